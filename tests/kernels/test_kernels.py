"""Cycle, Repeat and On against the exact oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import derivative, finite_chain_mean, ising_sweep, transition_matrix
from programs import derivatives
from unbiasedness import assert_unbiased

import diffmh
from diffmh.core.parameters import Parameters
from diffmh.core.values import without_tangents
from diffmh.fast.rounding import Barriers

GRID, LABELS = 5, 3


class GridWalk(diffmh.extend.Proposal):
    """A real number on the grid 0, 0.5, ..., 2: one step up or down, periodic."""

    symmetric: bool = True

    def sample(self, key, x):
        step = jnp.where(jax.random.bernoulli(key), 1, GRID - 1)
        return ((jnp.round(2 * x).astype(int) + step) % GRID).astype(float) / 2

    def log_prob(self, x, x_new):
        apart = jnp.round(2 * (x_new - x)).astype(int) % GRID
        return jnp.where((apart == 1) | (apart == GRID - 1), jnp.log(0.5), -jnp.inf)


def mixed_log_density(theta, state):
    """A label and a real number that see each other."""
    return -0.5 * (state["mean"] - theta[0] * state["label"]) ** 2 + theta[1] * state["label"]


def mixed_oracle(num_samples, repeats, order):
    """The same, enumerated: states are label · GRID + grid index."""
    labels, grid = np.divmod(np.arange(LABELS * GRID), GRID)
    means = grid / 2
    same_label, same_grid = labels[:, None] == labels[None], grid[:, None] == grid[None]
    move_label = np.where(~same_label & same_grid, 1 / (LABELS - 1), 0.0)
    apart = (grid[None] - grid[:, None]) % GRID
    move_mean = np.where(same_label & ((apart == 1) | (apart == GRID - 1)), 0.5, 0.0)
    observed = np.stack([labels, means, labels * means], axis=1).astype(float)

    def mean(theta):
        log_density = -0.5 * (means - theta[0] * labels) ** 2 + theta[1] * labels
        matrices = {
            "label": transition_matrix(log_density, move_label),
            "mean": transition_matrix(log_density, move_mean),
        }
        step = np.eye(LABELS * GRID, dtype=complex)
        for _ in range(repeats):
            for name in order:
                step = step @ matrices[name]
        return finite_chain_mean(step, 0, observed, num_samples, 0)

    return mean


def mixed_kernels(coupling=None):
    label = diffmh.MetropolisHastings(
        mixed_log_density, diffmh.On(lambda s: s["label"], diffmh.OtherState(LABELS))
    )
    mean = diffmh.MetropolisHastings(
        mixed_log_density, diffmh.On(lambda s: s["mean"], GridWalk()), coupling
    )
    return label, mean


def apart(kernel):
    """The same kernel with a density of its own, so that nothing remembered can be shared."""
    return diffmh.MetropolisHastings(
        lambda theta, state: mixed_log_density(theta, state), kernel.proposal, kernel.coupling
    )


label, mean = mixed_kernels()
KERNELS = {
    "cycle": (diffmh.Cycle(label, mean), 1, ["label", "mean"]),
    "repeat of a cycle": (diffmh.Repeat(diffmh.Cycle(label, mean), 3), 3, ["label", "mean"]),
    "cycle of repeats": (diffmh.Cycle(label, diffmh.Repeat(mean, 2)), 1, ["label", "mean", "mean"]),
    "repeat of one": (diffmh.Repeat(label, 2), 2, ["label"]),
    "cycle of different densities": (diffmh.Cycle(label, apart(mean)), 1, ["label", "mean"]),
    "nested cycles": (diffmh.Cycle(diffmh.Cycle(mean, label), mean), 1, ["mean", "label", "mean"]),
}


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("alternatives", [pytest.param(1, marks=pytest.mark.thorough), 2])
def test_metropolis_within_gibbs(name, alternatives):
    kernel, repeats, order = KERNELS[name]
    expectation = diffmh.expectation(
        lambda theta, s: jnp.stack([s["label"] * 1.0, s["mean"], s["label"] * s["mean"]]),
        kernel,
        init={"label": 0, "mean": 0.0},
        num_samples=5,
        num_chains=20_000,
        estimator=diffmh.StochasticDerivative(alternatives=alternatives),
    )
    theta = jnp.array([0.75, -0.25])
    found = derivatives(expectation, theta, jax.random.key(31))
    assert_unbiased(found, derivative(mixed_oracle(5, repeats, order), np.array(theta))[1], name)


@pytest.mark.optimised
def test_forgetting_changes_nothing():
    """A cycle whose kernels share what they remember, and one whose kernels do not, walk the
    same path.
    """
    shared, forgetful = (
        diffmh.trace(
            KERNELS[name][0],
            jnp.array([0.75, -0.25]),
            jax.random.key(0),
            init={"label": 0, "mean": 0.0},
            num_steps=300,
        )
        for name in ("cycle", "cycle of different densities")
    )
    for a, b in zip(jax.tree.leaves(shared.primal), jax.tree.leaves(forgetful.primal), strict=True):
        np.testing.assert_array_equal(a, b)


def ring_log_density(theta, x):
    return theta[0] * jnp.sum(x * jnp.roll(x, 1)) + theta[1] * jnp.sum(x)


def test_covariance_at_stationarity():
    """From starts in the stationary distribution, long enough: consistent. The Boltzmann average
    by enumeration.
    """
    spins = np.array([[1 - 2 * ((state >> k) & 1) for k in range(4)] for state in range(16)])
    pairs, field = np.sum(spins * np.roll(spins, 1, axis=1), axis=1), spins.sum(axis=1)

    def stationary(theta):
        weights = np.exp(theta[0] * pairs + theta[1] * field)
        return np.atleast_1d(np.sum(weights * pairs) / np.sum(weights))

    theta = np.array([0.3, 0.15])
    weights = np.exp(theta[0] * pairs + theta[1] * field)
    table, log_weights = jnp.asarray(spins), jnp.log(jnp.asarray(weights))
    expectation = diffmh.expectation(
        lambda theta, x: jnp.sum(x * jnp.roll(x, 1)) * 1.0,
        diffmh.Repeat(diffmh.MetropolisHastings(ring_log_density, diffmh.SpinFlip()), 4),
        init=lambda key: table[jax.random.categorical(key, log_weights)],
        num_samples=20,
        num_chains=20_000,
        estimator=diffmh.Covariance(),
    )
    found = derivatives(expectation, jnp.asarray(theta), jax.random.key(34))
    assert_unbiased(found, derivative(stationary, theta)[1][0])


def test_alternatives_carry_no_gradients():
    """An alternative's cache has values only: a gradient there would be carried, selected and
    copied for nothing.
    """
    kernel = diffmh.MetropolisHastings(
        lambda theta, x: -0.5 * (x - theta) ** 2, diffmh.GaussianWalk(1.0)
    )
    parameters = Parameters(jnp.array(0.5), (), Barriers(jnp.zeros(2, bool)), True)
    state = kernel.start(parameters, jnp.array(0.0))
    assert state.cache.tangent is not None and without_tangents(state).cache.tangent is None


def test_ising_sweep_is_stochastic():
    np.testing.assert_allclose(ising_sweep(2, 2.0).sum(axis=1), 1.0)
