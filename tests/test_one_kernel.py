"""Loops compiled as one function, and chains in groups: the same numbers as without."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import diffmh
from diffmh import simulation
from diffmh._lowering import one_kernel, plain_jax
from diffmh.models import gaussian, mixture

KEY = jax.random.key(5)
MARK = "xla_cpu_small_call"


def mean_of(density, start, num_chains=16, proposal=None, **options):
    kernel = diffmh.MetropolisHastings(density, proposal or diffmh.GaussianWalk(2.0))
    options = {"num_samples": 30, "num_chains": num_chains} | options
    return diffmh.expectation(lambda theta, x: jnp.sum(x), kernel, init=start, **options)


def normal(theta, x):
    return -0.5 * jnp.sum((x - theta) ** 2)


def is_marked(mean) -> bool:
    return MARK in jax.jit(jax.value_and_grad(mean)).lower(0.5, KEY).as_text()


def test_the_loop_is_marked():
    assert is_marked(mean_of(normal, 0.0))


@pytest.mark.parametrize(
    "density",
    [
        lambda theta, x: -0.5 * x @ jnp.array([[2.0, 1.0], [1.0, 2.0]]) @ (x - theta),
        lambda theta, x: normal(theta, jnp.sort(x)),
        lambda theta, x: normal(theta, x.at[jnp.argmax(x)].set(0.0)),
        lambda theta, x: normal(theta, jnp.linalg.cholesky(jnp.eye(2) + jnp.outer(x, x))),
    ],
    ids=["product", "sort", "scatter", "cholesky"],
)
def test_a_loop_that_needs_a_library_is_not_marked(density):
    assert not is_marked(mean_of(density, jnp.ones(2)))


def test_nor_a_large_one_nor_without_the_door():
    assert not is_marked(mean_of(normal, jnp.zeros(20_000)))
    with plain_jax(True):
        assert not is_marked(mean_of(normal, 0.0))


def test_nor_one_that_is_mapped():
    """Lanes would make its sums larger than they were seen to be."""
    mean = mean_of(normal, jnp.zeros(20))
    assert is_marked(mean)
    several = jax.jit(jax.vmap(mean, (0, None)))
    assert MARK not in several.lower(jnp.arange(100.0), KEY).as_text()


def everything(i, carry):
    """A round of a loop with every kind of operation that may be marked."""
    x, total, count = carry
    unit = 0.4 * jnp.tanh(x)
    smooth = [
        *(f(unit) for f in (jnp.sin, jnp.cos, jnp.tan, jnp.sinh, jnp.cosh, jnp.exp, jnp.exp2)),
        *(f(unit) for f in (jnp.arcsin, jnp.arccos, jnp.arctan, jnp.arcsinh, jnp.arctanh)),
        *(f(unit) for f in (jnp.expm1, jnp.log1p, jnp.cbrt, jax.nn.sigmoid, jax.lax.erf)),
        *(f(unit) for f in (jax.lax.erf_inv, jax.lax.erfc, jnp.square, jnp.abs, jnp.sign)),
        *(f(1.5 + unit) for f in (jnp.log, jnp.sqrt, jax.lax.rsqrt, jnp.arccosh)),
        *(f(1.5 + unit) for f in (jax.lax.lgamma, jax.lax.digamma)),
        jnp.arctan2(unit, 1 + unit),
        (1.5 + unit) ** unit,
        unit**3,
        jnp.floor(3 * unit) + jnp.ceil(unit) + jnp.round(2 * unit),
        jnp.remainder(unit, 0.3),
        jnp.clip(unit, -0.1, 0.2),
        jnp.maximum(unit, 0.1) + jnp.minimum(unit, 0.2),
        jnp.where(jnp.isfinite(unit) & ~(unit > 0), unit, -unit),
        jnp.flip(unit),
        jnp.concatenate([unit[3:], unit[:3]]),
        jnp.pad(unit, (1, 2))[:-3],
        jnp.broadcast_to(jnp.max(unit) - jnp.min(unit), unit.shape),
        jnp.broadcast_to(jnp.prod(1 + unit), unit.shape),
        unit.reshape(4, -1).T.reshape(-1),
        jnp.where(jnp.any(unit > 0) | jnp.all(unit < 0), unit, 0.0),
        jax.lax.cond(count > 3, jnp.sin, jnp.cos, unit),
        jax.nn.relu(unit) / (2.0 + jnp.arange(24)),
        jax.lax.fori_loop(0, 1 + count % 3, lambda j, y: 0.5 * y + 0.1 * j, unit),
        jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(unit, jnp.uint32) ^ 1, float),
    ]
    bits = (count << 2) | (count >> 1) & 7
    here = jnp.argmax(unit) + jnp.argmin(unit) + jax.lax.population_count(bits)
    x = jax.lax.dynamic_update_slice(x, jax.lax.dynamic_slice(x, (i % 3,), (2,)), (i,))
    return x + 0.01 * sum(smooth), total + jnp.sum(x), count + here


@pytest.mark.optimised
def test_whatever_may_be_marked_can_be_compiled():
    loop = lambda carry, given=None: jax.lax.fori_loop(0, 5, everything, carry)
    carry = (jnp.linspace(-1.0, 1.0, 24), jnp.zeros(()), jnp.zeros((), int))
    marked = jax.jit(lambda carry: one_kernel.as_one_kernel(loop, carry))
    assert MARK in marked.lower(carry).as_text()
    for found, expected in zip(marked(carry), jax.jit(loop)(carry), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("reduction", [jnp.sum, jnp.max, jnp.min, jnp.prod, jnp.argmax, jnp.any])
def test_sums_that_may_be_marked_can_be_compiled(reduction):
    step = lambda i, carry: carry + reduction(carry, axis=0)[None].astype(float)
    loop = lambda carry, given=None: jax.lax.fori_loop(0, 3, step, carry)
    lowered = lambda rows: jax.jit(lambda carry: one_kernel.as_one_kernel(loop, carry)).lower(
        jnp.ones((rows, 64))
    )
    assert MARK in lowered(32).as_text() and MARK not in lowered(33).as_text()
    lowered(32).compile()


def chains_of(mean, theta):
    value, slope = jax.jit(lambda t: jax.jvp(lambda t: mean.per_chain(t, KEY), (t,), (1.0,)))(theta)
    return np.asarray(value), np.asarray(slope)


@pytest.mark.optimised
@pytest.mark.parametrize("model", [gaussian, mixture], ids=["normal", "mixture"])
@pytest.mark.parametrize("num_alternatives", [1, 3])
def test_a_marked_loop_takes_the_same_path(model, num_alternatives, monkeypatch):
    estimator = diffmh.StochasticDerivative(alternatives=num_alternatives)
    start = 0 if model is mixture else 0.0

    def chains():
        mean = diffmh.expectation(
            lambda theta, x: jnp.cos(x), model.sampler(), init=start, num_samples=300,
            estimator=estimator,
        )  # fmt: skip
        return chains_of(mean, 0.4)

    value, slope = chains()
    monkeypatch.setattr(one_kernel, "_PLAIN", set())
    plain_value, plain_slope = chains()
    np.testing.assert_array_equal(value, plain_value)
    np.testing.assert_allclose(slope, plain_slope, rtol=1e-4, atol=1e-5)


@pytest.fixture
def without_groups(monkeypatch):
    return lambda: monkeypatch.setattr(simulation, "_GROUP_BYTES", 0)


@pytest.mark.optimised
def test_groups_of_chains_take_the_same_paths(without_groups):
    chains = lambda: chains_of(mean_of(normal, 0.0, num_chains=640), 0.4)
    value, slope = chains()
    without_groups()
    plain_value, plain_slope = chains()
    np.testing.assert_array_equal(value, plain_value)
    np.testing.assert_allclose(slope, plain_slope, rtol=1e-4, atol=1e-5)


@pytest.mark.optimised
def test_a_report_and_draws_by_groups(without_groups):
    key = jax.random.key(7)
    start = lambda key: jax.random.normal(key)
    kernel = diffmh.MetropolisHastings(normal, diffmh.GaussianWalk(2.0))

    def both():
        report = mean_of(normal, start, num_chains=512, num_samples=200, burn_in=3).run(0.4, key)
        draws = diffmh.sample(kernel, 0.4, key, init=start, num_samples=4, num_chains=512)
        return report, draws.posterior

    (report, draws), _ = both(), without_groups()
    plain_report, plain_draws = both()
    for name in ("value", "value_error", "gradient", "gradient_error", "effective_samples"):
        found, expected = getattr(report, name), getattr(plain_report, name)
        np.testing.assert_allclose(found, expected, rtol=1e-4, err_msg=name)
    assert report.acceptance_rate == pytest.approx(plain_report.acceptance_rate)
    for name in plain_draws:
        np.testing.assert_array_equal(draws[name], plain_draws[name])


@pytest.mark.parametrize(
    ("num_chains", "start", "groups"),
    [(16, 0.0, 1), (256, 0.0, 1), (4096, 0.0, 16), (640, 0.0, 4), (257, 0.0, 1),
     (1024, jnp.zeros(2), 8), (1024, jnp.zeros(20), 16), (1024, jnp.zeros(65), 1)],
)  # fmt: skip
def test_how_many_groups(num_chains, start, groups):
    mean = mean_of(normal, start, num_chains=num_chains)
    assert simulation.Loop(mean.simulation, 0.5, KEY, (), True).num_groups == groups
