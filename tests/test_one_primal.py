"""One primal, bit for bit, whatever is asked of an expectation and by whichever estimator or
coupling.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_runs import LABELS

import diffmh

KEY = jax.random.key(1)
COUPLINGS = [
    diffmh.CommonRandomNumbers(),
    diffmh.Independent(),
    diffmh.Maximal(),
    diffmh.MaximalReflection(),
]
# Beside the default, which the couplings are tried with.
ESTIMATORS = [
    diffmh.StochasticDerivative(alternatives=2),
    diffmh.StochasticDerivative(alternatives=4),
    diffmh.StochasticDerivative("one-sided"),
    diffmh.Score(),
    diffmh.Score(baseline="other chains"),
    diffmh.Covariance(),
]


def occupancy(h, j):
    return jax.nn.one_hot(j, 3)


# Long enough, with enough chains and products to contract that a compiler's freedom to round would
# show: without `rounding.round_here` these tests fail.
LONG = 3_000
WALK = diffmh.MetropolisHastings(lambda theta, x: -0.5 * (x - theta) ** 2, diffmh.GaussianWalk(1.3))
bump = lambda theta, x: jnp.exp(-x * x) * x + 0.1 * x
RUNS = {"mixture": (LABELS, 0, occupancy), "normal": (WALK, 0.1, bump)}


def run(model, num_chains=16, coupling=None, estimator=None):
    kernel, init, f = RUNS[model]
    if coupling is not None:
        kernel = diffmh.MetropolisHastings(kernel.density, kernel.proposal, coupling)
    return diffmh.expectation(
        f, kernel, init=init, num_samples=LONG, num_chains=num_chains, estimator=estimator
    )


@functools.cache
def plain(model, num_chains):
    return run(model, num_chains).per_chain(0.4, KEY)


def assert_one_primal(expectation, expected):
    values, tangents = jax.jvp(lambda theta: expectation.per_chain(theta, KEY), (0.4,), (1.0,))
    np.testing.assert_array_equal(values, expected)
    assert np.all(np.isfinite(tangents)) and np.any(tangents != 0)


@pytest.mark.optimised
@pytest.mark.parametrize(
    "model, num_chains",
    [
        pytest.param("mixture", 16, marks=pytest.mark.thorough),
        ("normal", 16),
        pytest.param("normal", 1, marks=pytest.mark.thorough),
    ],
)
@pytest.mark.parametrize("estimator", ESTIMATORS, ids=str)
def test_one_primal_for_every_estimator(estimator, model, num_chains):
    if estimator == diffmh.Score(baseline="other chains") and num_chains == 1:
        num_chains = 2
    assert_one_primal(run(model, num_chains, estimator=estimator), plain(model, num_chains))


@pytest.mark.optimised
@pytest.mark.parametrize("num_chains", [pytest.param(1, marks=pytest.mark.thorough), 16])
@pytest.mark.parametrize(
    "model, coupling",
    [
        *(
            pytest.param("mixture", coupling, marks=pytest.mark.thorough)
            for coupling in COUPLINGS[:3]
        ),
        *(("normal", coupling) for coupling in COUPLINGS),
    ],
    ids=str,
)
def test_one_primal_for_every_coupling(model, coupling, num_chains):
    expectation = run(model, num_chains, coupling)
    assert_one_primal(expectation, plain(model, num_chains))
    if num_chains == 1:
        np.testing.assert_array_equal(expectation.per_chain(0.4, KEY), plain(model, 1))


def log_quartic(theta, x):
    return 0.3 * jnp.sum(x) - theta * jnp.sum(x**4) - 0.5 * jnp.sum(x * x)


def log_two_bumps(theta, x):
    return jax.nn.logsumexp(jnp.array([theta * x - 0.5 * x * x, -0.5 * (x - 0.5) ** 2]))


def log_parts(theta, x):
    return log_quartic(theta, x["a"]) - 0.3 * theta * x["a"] * x["b"] - 0.7 * x["b"] ** 2


PART = {
    name: diffmh.On(lambda x, name=name: x[name], diffmh.GaussianWalk(1.3)) for name in ("a", "b")
}


@pytest.mark.optimised
@pytest.mark.parametrize(
    "kernel, init, f",
    [
        (diffmh.MetropolisHastings(log_quartic, diffmh.GaussianWalk(1.3)), 0.1, bump),
        (diffmh.MetropolisHastings(log_two_bumps, diffmh.GaussianWalk(1.3)), 0.1, bump),
        (diffmh.MetropolisHastings(log_quartic, diffmh.CrankNicolson(0.7, 1.3)), 0.1, bump),
        (
            diffmh.Cycle(*(diffmh.MetropolisHastings(log_parts, part) for part in PART.values())),
            {"a": 0.1, "b": 0.2},
            lambda theta, x: bump(theta, x["a"]) + x["b"] ** 2,
        ),
    ],
    ids=["quartic", "two bumps", "Crank-Nicolson", "cycle"],
)
def test_one_primal_for_other_kernels(kernel, init, f):
    expectation = diffmh.expectation(f, kernel, init=init, num_samples=LONG, num_chains=16)
    assert_one_primal(expectation, expectation.per_chain(0.4, KEY))


@pytest.mark.optimised
@pytest.mark.parametrize("model", RUNS)
def test_one_primal_whatever_is_asked(model):
    expectation = run(model)
    per_chain, value = plain(model, 16), expectation(0.4, KEY)
    np.testing.assert_allclose(value, per_chain.mean(0), rtol=1e-6)
    np.testing.assert_array_equal(plain(model, 1)[0], per_chain[0])
    function = lambda theta, key: jnp.sum(expectation(theta, key))
    np.testing.assert_array_equal(
        jax.jvp(lambda theta: expectation(theta, KEY), (0.4,), (1.0,))[0], value
    )
    np.testing.assert_array_equal(jax.value_and_grad(function)(0.4, KEY)[0], function(0.4, KEY))
    # The mean over the chains may round otherwise when it is compiled together with them.
    np.testing.assert_allclose(
        jax.jit(jax.value_and_grad(function))(0.4, KEY)[0], function(0.4, KEY), rtol=1e-6
    )


@pytest.mark.optimised
@pytest.mark.parametrize("model", RUNS)
def test_the_trace_is_the_same_primal(model):
    kernel, init, f = RUNS[model]
    couplings = COUPLINGS[:3] if model == "mixture" else COUPLINGS
    kernels = [
        diffmh.MetropolisHastings(kernel.density, kernel.proposal, coupling)
        for coupling in couplings
    ]
    traces = [diffmh.trace(kernel, 0.4, KEY, init=init, num_steps=LONG) for kernel in kernels]
    for trace in traces[1:]:
        np.testing.assert_array_equal(trace.primal, traces[0].primal)
        assert np.any(trace.alternative != traces[0].alternative), (
            "the couplings differ in what they do to the alternative"
        )
    mean = np.mean(jax.vmap(lambda x: f(0.4, x))(traces[0].primal), axis=0, dtype=float)
    np.testing.assert_allclose(plain(model, 1)[0], mean, rtol=1e-6)
