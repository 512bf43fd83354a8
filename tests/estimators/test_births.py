"""Births, read forward, backward and chain by chain: the same derivative, by whichever way it is
asked for, and nothing of the size of parameters × outputs on the way.
"""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refused

import diffmh
from diffmh._compose import _backward, _forward, pseudo_values
from diffmh.core.estimator import Problem
from diffmh.estimators import birth_readout
from diffmh.estimators.births import Births
from diffmh.estimators.stochastic_derivative import MANY_PARAMETERS

KEY = jax.random.key(0)
BIRTHS = diffmh.StochasticDerivative(alternatives=2, births=True)
CHAINS = 6


def density(theta, x):
    hidden = jnp.tanh(theta["inner"] @ jnp.concatenate([x["a"], x["b"]]))
    return theta["outer"] @ hidden - 0.5 * jnp.sum(x["a"] ** 2) - 0.5 * jnp.sum(x["b"] ** 2)


def narrower(theta, x):
    return density(theta, x) - 0.1 * theta["outer"][0] * jnp.sum(x["a"] ** 2)


def f(theta, x):
    return {"first": x["a"][0], "all": theta["outer"][:2] * x["b"] + jnp.sum(x["a"] ** 2)}


def move(density, part):
    walk = diffmh.On(lambda x: x[part], diffmh.GaussianWalk(1.5))
    return diffmh.MetropolisHastings(density, walk)


TWO_DENSITIES = diffmh.Cycle(move(density, "a"), move(narrower, "b"))
START = {"a": jnp.zeros(2), "b": jnp.zeros(2)}
THETA = {
    "inner": jax.random.normal(jax.random.key(1), (3, 4)),
    "outer": jax.random.normal(jax.random.key(2), (3,)),
}


def expect(f=f, kernel=TWO_DENSITIES, init=START, estimator=BIRTHS, num_samples=150, **given):
    given = {"burn_in": 7, "num_chains": CHAINS} | given
    return diffmh.expectation(
        f, kernel, init=init, num_samples=num_samples, estimator=estimator, **given
    )


def flat_jacobian(tree):
    """(C, F, P), of a tree like f's with the chains leading, of trees like θ."""

    def rows(like_theta):
        parts = [like_theta["inner"].reshape(CHAINS, -1, 12), like_theta["outer"]]
        return np.concatenate([parts[0], parts[1].reshape(CHAINS, -1, 3)], axis=-1)

    return np.concatenate([rows(tree["all"]), rows(tree["first"])], axis=1)


@pytest.fixture(scope="module")
def forward():
    return flat_jacobian(jax.jit(jax.jacfwd(expect().per_chain))(THETA, KEY))


def assert_same(found, expected):
    assert np.abs(expected).max() > 0.01
    np.testing.assert_allclose(found, expected, atol=2e-5 * np.abs(expected).max())


def test_backward(forward):
    """The same births; blocks of 128 steps, of which the second is shorter."""
    assert_same(flat_jacobian(jax.jit(jax.jacrev(expect().per_chain))(THETA, KEY)), forward)


def test_a_cotangent_of_another_chain_is_seen(forward, monkeypatch):
    """The derivative of f itself, with the cotangents of the chains in the wrong order."""
    right = birth_readout.Backward._explicit

    def wrong(self, block, gradient):
        turned = jnp.roll(block.memory.cotangent, 1, axis=-1)
        block = eqx.tree_at(lambda block: block.memory.cotangent, block, turned)
        return right(self, block, gradient)

    monkeypatch.setattr(birth_readout.Backward, "_explicit", wrong)
    anew = lambda theta, x: f(theta, x)
    found = flat_jacobian(jax.jit(jax.jacrev(expect(anew).per_chain))(THETA, KEY))
    assert np.abs(found - forward).max() > 1e-3


def test_chain_by_chain(forward):
    by_chain = np.asarray(expect().run_chains(THETA, KEY).jacobian)
    assert_same(by_chain.T, forward)


@pytest.mark.parametrize("mistaken", [False, True])
def test_chunks_do_not_matter(forward, mistaken, monkeypatch):
    """Chunks of five births; what fills the last one up counts for nothing."""
    monkeypatch.setattr(birth_readout, "_CHUNK", 5)
    if mistaken:
        monkeypatch.setattr(birth_readout.Chunk, "where_real", lambda self, array: array)
    anew = lambda theta, x: f(theta, x)
    found = flat_jacobian(jax.jit(jax.jacfwd(expect(anew).per_chain))(THETA, KEY))
    agrees = np.allclose(found, forward, atol=2e-5 * np.abs(forward).max())
    assert agrees != mistaken


def test_primal_is_the_same_bit_for_bit():
    plain = expect(estimator=diffmh.StochasticDerivative(births=False)).per_chain(THETA, KEY)
    reported = expect().run(THETA, KEY).per_chain.value
    assert all(np.array_equal(plain[name], reported[name]) for name in ("first", "all"))


def linear(theta, x):
    return jnp.sum(theta * x) - 0.5 * jnp.sum(x**2)


WALK = diffmh.MetropolisHastings(linear, diffmh.GaussianWalk(0.3))


def largest_array(births):
    """The most numbers that any array has in the program of a gradient of 170 parameters through
    150 outputs, with one chain.
    """
    mean = expect(
        lambda theta, x: x[:150],
        WALK,
        jnp.zeros(170),
        diffmh.StochasticDerivative(births=births),
        num_samples=3,
        num_chains=1,
        burn_in=0,
    )
    scalar = lambda theta: jnp.sum(jnp.sin(mean(theta, KEY)))
    return max(_sizes(jax.make_jaxpr(jax.grad(scalar))(jnp.zeros(170)).jaxpr))


def _sizes(jaxpr):
    for equation in jaxpr.eqns:
        yield from (np.prod(variable.aval.shape) for variable in equation.outvars)
        parameters = list(equation.params.values())
        if "way" in equation.params:
            types = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in equation.invars]
            parameters.append(jax.make_jaxpr(equation.params["way"].function)(*types).jaxpr)
        is_jaxpr = lambda leaf: hasattr(getattr(leaf, "jaxpr", leaf), "eqns")
        for parameter in jax.tree.leaves(parameters, is_leaf=is_jaxpr):
            if is_jaxpr(parameter):
                yield from _sizes(getattr(parameter, "jaxpr", parameter))


def test_nothing_of_the_size_of_parameters_times_outputs():
    assert largest_array(True) < 170 * 150 <= largest_array(False)


def resolved(estimator, num_parameters, kernel=None):
    kernel = WALK if kernel is None else kernel
    theta = x = jax.ShapeDtypeStruct((num_parameters,), float)
    f = lambda theta, x: x
    return estimator.resolve(Problem(kernel, theta, x, (), f, False, 0))


def test_chosen_above_a_number_of_parameters():
    few, many = MANY_PARAMETERS, MANY_PARAMETERS + 1
    default = diffmh.StochasticDerivative(alternatives=3)
    assert resolved(default, few) is default
    assert resolved(default, many) == Births(3)
    assert resolved(diffmh.StochasticDerivative(births=True), 1) == Births(1)
    for never in (
        diffmh.StochasticDerivative(births=False),
        diffmh.StochasticDerivative(control="f"),
        # Moves that depend on θ carry tangents, which births don't have.
    ):
        assert resolved(never, many) == never.with_alternatives(many, 1, jnp.zeros(many))
    assert resolved(default, many, diffmh.Langevin(linear, 0.1)) is default


def test_refusals():
    langevin = expect(kernel=diffmh.Langevin(linear, 0.1), init=jnp.zeros(4))
    refused(
        lambda: langevin(jnp.zeros(4), KEY), ValueError, "births=True … Langevin … births=False"
    )
    both = lambda **given: diffmh.StochasticDerivative(births=True, **given)
    refused(lambda: both(weights="one-sided"), ValueError, "two-sided … 'one-sided'")
    refused(lambda: both(control="f"), ValueError, "births=True … control='f'")
    site = lambda i: diffmh.Gibbs(lambda theta, z: theta * z[i], lambda z: z[i], 2)
    total = lambda theta, z: jnp.sum(z) * 1.0
    sweep = expect(total, diffmh.Sweep(site, 3), jnp.zeros(3, int))
    refused(lambda: jax.grad(sweep)(0.5, KEY), ValueError, "sweep … outside of `kernel_at`")


def test_second_derivatives_are_refused():
    mean = expect(lambda theta, x: x["a"][0], num_samples=3)
    with pytest.raises(diffmh.NotDifferentiable, match="second derivative"):
        jax.hessian(mean)(THETA, KEY)


def tilted(theta, x):
    return theta["tilt"] * jnp.sum(x) - theta["width"] * jnp.sum(x**2)


SIMPLE = expect(
    lambda theta, x: theta["width"] * x[0],
    diffmh.MetropolisHastings(tilted, diffmh.GaussianWalk(1.0)),
    jnp.zeros(2),
    diffmh.StochasticDerivative(births=True),
)
TILTED = {"tilt": jnp.array(0.5), "width": jnp.array(1.0)}


def test_mapped_and_by_a_part_of_theta():
    """`vmap` over keys and parameters, and a derivative by one leaf of θ."""
    by_width = lambda width, key: SIMPLE({**TILTED, "width": width}, key)
    keys = jnp.stack([jax.random.key(5), KEY])
    found = jax.jit(jax.vmap(jax.grad(by_width)))(jnp.ones(2), keys)
    expected = jax.jit(jax.jacfwd(SIMPLE))(TILTED, KEY)["width"]
    assert_same(found[1], expected)
    assert np.abs(found[0] - found[1]).max() > 1e-3


def test_over_a_mesh():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("chains",))
    sharded = diffmh.Expectation(dataclasses.replace(SIMPLE.simulation, mesh=mesh))
    found, expected = (jax.grad(mean)(TILTED, KEY)["tilt"] for mean in (sharded, SIMPLE))
    assert_same(found, expected)


def test_many_parameters_reported():
    """More than the directions that a report follows; all entries have an error."""
    mean = expect(lambda theta, x: x[:2], WALK, jnp.zeros(20), num_samples=400, num_chains=64)
    report = mean.run(jnp.linspace(0, 1, 20), KEY)
    slope = jax.jacobian(mean)(jnp.linspace(0, 1, 20), KEY)
    assert np.all(np.asarray(report.gradient_error) > 0)
    assert_same(report.gradient, slope)


def test_a_composition_of_many_parameters():
    """φ backward, as it is beyond 256 parameters, agrees with φ forward."""
    runs = [expect().run_chains(THETA, KEY)]
    means = tuple(run.unflatten(run.value) for run in runs)
    phi = lambda theta, m: theta["outer"][0] * jnp.sum(m["all"]) ** 2
    flat = lambda theta, means: pseudo_values(phi, theta, means)[None]
    one, other = (way(flat, THETA, means, runs) for way in (_forward, _backward))
    assert one[1].shape == (15, 1, CHAINS)
    assert_same(other[1], one[1])


def by_a_loop(theta, x):
    """`theta[x]`, in a loop that has no backward derivative."""
    more, add = lambda carry: carry[0] < 3, lambda carry: (carry[0] + 1, carry[1] + theta[x] / 3)
    return jax.lax.while_loop(more, add, (0, 0.0 * theta[0]))[1]


def test_a_density_without_a_backward_derivative():
    """Above 64 parameters weights are followed there; births that were asked for are refused."""
    first = lambda theta, x: 1.0 * (x == 0)
    kernel = diffmh.MetropolisHastings(by_a_loop, diffmh.OtherState(3))
    chosen = expect(first, kernel, 0, None, num_samples=2)
    theta = jnp.linspace(-1.0, 1.0, MANY_PARAMETERS + 1)
    slope = jax.grad(chosen)(theta, KEY)
    assert np.any(slope[:3] != 0) and np.all(slope[3:] == 0)
    asked = expect(first, kernel, 0, BIRTHS, num_samples=2)
    refused(lambda: asked(theta, KEY), ValueError, "`StochasticDerivative(births=True)` … backward")
