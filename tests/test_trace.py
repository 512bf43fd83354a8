"""The trace of a chain carries its derivative and tells a consistent story."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_runs import KEY, LABELS, TREE, TREE_THETA, WALK, close_trees, identity, log_normal

import diffmh

TRACED = {
    "mixture": (LABELS, 0.4, 0, lambda theta, x: jax.nn.one_hot(x, 3)),
    "normal": (WALK, 0.5, 0.0, identity),
    "tree": (TREE.simulation.kernel, TREE_THETA, jnp.zeros(2), identity),
    "repeated": (diffmh.Repeat(WALK, 3), 0.5, 0.0, identity),
}


@pytest.mark.parametrize("alternatives", [pytest.param(1, marks=pytest.mark.thorough), 3])
@pytest.mark.parametrize("case", TRACED)
def test_trace_carries_the_derivative(case, alternatives):
    """`(1/N) Σ_t Σ_k W_k (f(y_k) − f(x_t))`, recomputed from what was kept."""
    kernel, theta, init, f = TRACED[case]
    estimator, num_steps = diffmh.StochasticDerivative(alternatives=alternatives), 150
    trace = diffmh.trace(kernel, theta, KEY, init=init, num_steps=num_steps, estimator=estimator)
    state, value = jnp.asarray(init), jnp.asarray(f(theta, jnp.asarray(init)))
    assert trace.primal.shape == (num_steps, *state.shape) and trace.primal.dtype == state.dtype
    assert trace.alternative.shape == (num_steps, alternatives, *state.shape)
    assert (
        trace.alive.shape == trace.born.shape == trace.recoupled.shape == (num_steps, alternatives)
    )
    assert trace.accepted.shape == (num_steps,)
    np.testing.assert_array_equal(trace.init, init)
    jax.tree.map(
        lambda w, part: np.testing.assert_equal(
            w.shape, (num_steps, alternatives, *jnp.shape(part))
        ),
        trace.weight,
        theta,
    )

    at_primal = jax.vmap(lambda x: f(theta, x))(trace.primal)
    at_alternative = jax.vmap(jax.vmap(lambda y: f(theta, y)))(trace.alternative)
    change = np.asarray(
        jnp.where(
            trace.alive[(...,) + (None,) * value.ndim], at_alternative - at_primal[:, None], 0
        ),
        float,
    )
    derivative = jax.tree.map(
        lambda w: np.tensordot(change, np.asarray(w, float), ((0, 1), (0, 1))) / num_steps,
        trace.weight,
    )
    expectation = diffmh.expectation(
        f, kernel, init=init, num_samples=num_steps, num_chains=1, estimator=estimator
    )
    close_trees(jax.jacobian(expectation)(theta, KEY), derivative, rtol=1e-4)
    assert any(np.any(leaf != 0) for leaf in jax.tree.leaves(derivative))


@pytest.mark.parametrize("case", ["mixture", "normal", "tree"])
@pytest.mark.parametrize("alternatives", [pytest.param(1, marks=pytest.mark.thorough), 3])
def test_trace_tells_a_consistent_story(case, alternatives):
    kernel, theta, init, _ = TRACED[case]
    estimator = diffmh.StochasticDerivative(alternatives=alternatives)
    trace = jax.tree.map(
        np.asarray, diffmh.trace(kernel, theta, KEY, init=init, num_steps=150, estimator=estimator)
    )
    before = np.concatenate([np.zeros((1, alternatives), bool), trace.alive[:-1]])
    np.testing.assert_array_equal(trace.alive, trace.born | (before & ~trace.recoupled))
    assert not np.any(trace.recoupled & ~before), "only the living recouple"
    assert np.all(trace.born.sum(axis=1) <= 1), "one candidate a step"
    assert trace.born.any() and trace.recoupled.any() and not trace.alive.all()

    weighs = (
        sum(
            (weight.reshape(*trace.alive.shape, -1) != 0).any(axis=-1)
            for weight in jax.tree.leaves(trace.weight)
        )
        > 0
    )
    np.testing.assert_array_equal(weighs, trace.alive)
    differs = (
        (trace.alternative != trace.primal[:, None]).reshape(*trace.alive.shape, -1).any(axis=-1)
    )
    assert np.all(differs[trace.alive]), "an alternative that is where the primal is has recoupled"
    path = np.concatenate([np.asarray(init)[None], trace.primal])
    moved = (path[1:] != path[:-1]).reshape(150, -1).any(axis=-1)
    np.testing.assert_array_equal(trace.accepted, moved)


def test_trace_is_compiled_once():
    traced = []

    def log_density(theta, x):
        traced.append(x)
        return log_normal(theta, x)

    kernel = diffmh.MetropolisHastings(log_density, diffmh.GaussianWalk(1.0))
    diffmh.trace(kernel, 0.5, KEY, init=0.0, num_steps=10)
    before = len(traced)
    assert before > 0
    diffmh.trace(kernel, 0.7, jax.random.key(8), init=1.0, num_steps=10)
    assert len(traced) == before
