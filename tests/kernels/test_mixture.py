"""Mixture against exact transition matrices, and a cache that must not be shared."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import derivative, finite_chain_mean, transition_matrix
from small_tables import (
    COLUMN,
    COLUMNS,
    ROW,
    ROWS,
    conditional,
    estimates,
    exact,
    log_density,
    tables,
)
from unbiasedness import assert_unbiased, is_caught

import diffmh
from diffmh.kernels import compose

OTHER_ROW = np.where((COLUMN[:, None] == COLUMN) & (ROW[:, None] != ROW), 1 / (ROWS - 1), 0.0)
OTHER_COLUMN = np.where((ROW[:, None] == ROW) & (COLUMN[:, None] != COLUMN), 1 / (COLUMNS - 1), 0.0)


def cold(*operands):
    return 1.5 * log_density(*operands)


class OtherEntry(diffmh.extend.NoiseProposal):
    """Another value for one of the two labels."""

    axis: int = eqx.field(static=True)
    num_values: int = eqx.field(static=True)
    symmetric: bool = eqx.field(static=True, default=True)

    def noise(self, key, x, num_steps):
        return jax.random.randint(key, (num_steps,), 1, self.num_values, x.dtype)

    def move(self, x, noise):
        here = jnp.arange(2) == self.axis
        return jnp.where(here, (x + noise) % self.num_values, x)

    def log_prob(self, x, x_new):
        return -jnp.log(self.num_values - 1.0)


def mixture(density=log_density, other=cold):
    """Walks in both directions, of different densities, and a Gibbs draw."""
    row, column = OtherEntry(axis=0, num_values=ROWS), OtherEntry(axis=1, num_values=COLUMNS)
    same = diffmh.CommonRandomNumbers()
    return diffmh.Mixture(
        diffmh.MetropolisHastings(density, row, same),
        diffmh.MetropolisHastings(other, column, same),
        diffmh.Gibbs(density, lambda z: z[1], COLUMNS),
        (0.3, 0.5, 0.2),
    )


def matrix(log_density):
    return (
        0.3 * transition_matrix(log_density, OTHER_ROW)
        + 0.5 * transition_matrix(1.5 * log_density, OTHER_COLUMN)
        + 0.2 * conditional(log_density, ROW)
    )


def test_mixture():
    problems = tables(100)
    found = estimates(problems, 30, mixture(), num_samples=6)
    for index, problem in enumerate(problems):
        assert_unbiased(found[index], exact(problem, matrix, 6), f"table {index}")


def test_a_memory_that_is_shared_by_different_densities_is_caught(monkeypatch):
    monkeypatch.setattr(compose, "sharing_cache", lambda kernels: kernels)
    density, other = (lambda *operands: log_density(*operands)), (lambda *operands: cold(*operands))
    walks = diffmh.Mixture(*mixture(density, other).kernels[:2], probabilities=(0.4, 0.6))
    problems = tables(100, 10)
    found = estimates(problems, 31, walks, num_samples=6)
    step = lambda log_density: (
        0.4 * transition_matrix(log_density, OTHER_ROW)
        + 0.6 * transition_matrix(1.5 * log_density, OTHER_COLUMN)
    )
    truths = [exact(problem, step, 6) for problem in problems]
    assert any(is_caught(found[i], truth) for i, truth in enumerate(truths))


def test_refusals():
    kernel = diffmh.Gibbs(log_density, lambda z: z[0], 2)
    with pytest.raises(ValueError, match="at least one kernel, got none"):
        diffmh.Mixture()
    with pytest.raises(ValueError, match="one number for each of the 2 kernels"):
        diffmh.Mixture(kernel, kernel, probabilities=(1.0,))
    with pytest.raises(ValueError, match=r"Mixture\(probabilities=.*sum to one, got 1.1"):
        diffmh.Mixture(kernel, kernel, (0.5, 0.6))
    with pytest.raises(TypeError, match=r"`kernel` must be a `diffmh\.extend\.Kernel`"):
        diffmh.Mixture(diffmh.GaussianWalk(1.0), kernel)


class Tempered(diffmh.extend.BlockUpdate):
    """A Gibbs draw of one label at a temperature of its own."""

    temperature: float

    def log_density(self, theta, x):
        return theta * x / self.temperature

    def noise(self, key, x, num_steps):
        return jax.random.uniform(key, (num_steps,))

    def decide(self, parameters, state, noise):
        odds = lambda theta, x: theta / self.temperature
        return diffmh.extend.Bernoulli.draw(noise, parameters.evaluate(odds, state.value))

    def result(self, x, noise, outcome):
        return outcome.astype(x.dtype)


@pytest.mark.parametrize("estimator", [diffmh.Covariance(), diffmh.StochasticDerivative()])
def test_covariance_refuses_updates_of_different_densities(estimator):
    """Two updates of one class need not leave one density invariant; the finite chain that mixes
    them has its derivative all the same, `(σ'(θ) + σ'(θ/3)/3)/2` after one step.
    """
    mean = diffmh.expectation(
        lambda theta, x: x,
        diffmh.Mixture(Tempered(1.0), Tempered(3.0)),
        init=0,
        num_samples=1,
        num_chains=4000,
        estimator=estimator,
    )
    if isinstance(estimator, diffmh.Covariance):
        with pytest.raises(
            ValueError, match=r"`Covariance\(\)` needs one density.*`density_identity`"
        ):
            jax.grad(mean)(0.6, jax.random.key(0))
        return
    slopes = jax.jacfwd(lambda theta: mean.per_chain(theta, jax.random.key(0)))(0.6)
    slope = lambda odds: jax.nn.sigmoid(odds) * jax.nn.sigmoid(-odds)
    assert_unbiased(np.asarray(slopes), np.asarray((slope(0.6) + slope(0.2) / 3) / 2))


TABLES = np.array([[0.0, 0.7, -0.3], [0.4, -0.5, 0.2]])
SLOPES = np.array([[0.8, -0.4, 0.1], [-0.3, 0.5, 0.9]])
OBSERVED = np.array([0.3, -1.1, 0.9])


def of_two_targets(estimator, num_samples):
    """Walks on three states, each of which leaves a density of its own invariant."""

    def walk(number):
        table, slope = jnp.asarray(TABLES[number]), jnp.asarray(SLOPES[number])
        density = lambda theta, x: (table + theta * slope)[x]
        return diffmh.MetropolisHastings(density, diffmh.OtherState(3))

    return diffmh.expectation(
        lambda theta, x: jnp.asarray(OBSERVED)[x],
        diffmh.Mixture(walk(0), walk(1), probabilities=(0.3, 0.7)),
        init=0,
        num_samples=num_samples,
        num_chains=4_000,
        estimator=estimator,
    )


def exact_slope_of_two_targets(num_samples, burn_in):
    other = (1 - np.eye(3)) / 2

    def mean(theta):
        walks = (transition_matrix(TABLES[i] + theta[0] * SLOPES[i], other) for i in range(2))
        step = sum(p * walk for p, walk in zip((0.3, 0.7), walks, strict=True))
        return finite_chain_mean(step, 0, OBSERVED[:, None], num_samples, burn_in)

    return derivative(mean, np.array([0.5]))[1][0, 0]


@pytest.mark.parametrize(
    "estimator",
    [
        diffmh.Covariance(),
        diffmh.Stationary(alternatives=0),
        diffmh.StochasticDerivative(control="covariance"),
    ],
)
def test_different_targets_have_no_covariance(estimator):
    with pytest.raises(ValueError, match=r"needs one density.*`density_identity`"):
        jax.grad(of_two_targets(estimator, 5))(0.5, jax.random.key(0))


@pytest.mark.parametrize("estimator", [diffmh.Stationary(), diffmh.StochasticDerivative()])
def test_chains_of_different_targets(estimator):
    """Each target is left by the other's walk, and what the chain has is differentiated: its own
    equilibrium, or its finite mean.
    """
    mean, key = of_two_targets(estimator, 5), jax.random.key(4)
    at_equilibrium = isinstance(estimator, diffmh.Stationary)
    exact = exact_slope_of_two_targets(1 if at_equilibrium else 5, 400 if at_equilibrium else 0)
    slopes = jax.jacfwd(lambda theta: mean.per_chain(theta, key))(0.5)
    assert_unbiased(np.asarray(slopes), exact, str(estimator))
