"""Replicas that swap, against exact transition matrices of all replicas together, and mistakes that
must be caught.
"""

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import MEANS, OTHER, derivative, finite_chain_mean, transition_matrix
from programs import each, optimised
from staged import tempering_matrix
from unbiasedness import assert_unbiased, is_caught

import diffmh
from diffmh.kernels.tempering import Swap

# ESTIMATOR.md §18: the paper's mixture at β = (1, .3), both replicas in component 1.
THETA = np.float32([0.4, 0.3]).astype(float)
KNOWN = {
    3: np.array([[-0.077106, 0.011716, 0.065390], [0.042695, -0.032561, -0.010134]]).T,
    10: np.array([[-0.077713, 0.019381, 0.058332]]).T,
}


def log_densities(theta):
    mixture = -0.5 * ((theta[0] - MEANS) / 4.0) ** 2
    return mixture, theta[1] * mixture


def occupancy(theta, num_samples):
    """Of the cold replica."""
    f = np.repeat(np.eye(3), 3, axis=0)
    return finite_chain_mean(tempering_matrix(log_densities(theta), OTHER), 0, f, num_samples, 0)


def exact(num_samples):
    return derivative(lambda theta: occupancy(theta, num_samples), THETA)[1]


def kernel_at(beta):
    def density(theta, j):
        return -0.5 * beta(theta) * ((theta[0] - jnp.asarray(MEANS)[j]) / 4.0) ** 2

    return diffmh.MetropolisHastings(density, diffmh.OtherState(3))


def ladder(theta):
    return jnp.stack([jnp.ones(()), theta[1]])


def tempered(num_samples, estimator=None, num_chains=4000):
    return diffmh.expectation(
        lambda theta, x: jax.nn.one_hot(x[0], 3),
        diffmh.Tempering(kernel_at, ladder, num_replicas=2),
        init=jnp.zeros(2, int),
        num_samples=num_samples,
        num_chains=num_chains,
        estimator=estimator,
    )


def slopes_of(num_samples, estimator=None):
    mean = tempered(num_samples, estimator)
    slopes = optimised(jax.jacfwd(mean.per_chain))
    return np.asarray(slopes(jnp.asarray(THETA, jnp.float32), jax.random.key(0)))


def test_the_oracle_has_the_known_numbers():
    for num_samples, known in KNOWN.items():
        found = exact(num_samples)[:, : known.shape[1]]
        np.testing.assert_allclose(found, known, atol=1.2e-6)


@pytest.mark.parametrize(
    "num_samples, estimator",
    [
        (3, diffmh.StochasticDerivative()),
        (3, diffmh.StochasticDerivative(births=True)),
        (10, diffmh.StochasticDerivative(alternatives=2)),
        (3, diffmh.Score("other chains")),
    ],
)
def test_the_mixture_at_two_temperatures(num_samples, estimator):
    found, known = slopes_of(num_samples, estimator), KNOWN[num_samples]
    assert_unbiased(found, exact(num_samples), "with respect to h and the ladder")
    assert_unbiased(found[..., : known.shape[1]], known, "as known")


def test_covariance_has_the_equilibrium():
    """The replicas leave the product of their densities invariant; the ladder does not matter
    there.
    """
    mean = diffmh.expectation(
        lambda theta, x: jax.nn.one_hot(x[0], 3),
        diffmh.Tempering(kernel_at, ladder, num_replicas=2),
        init=jnp.zeros(2, int),
        num_samples=20,
        burn_in=30,
        num_chains=4000,
        estimator=diffmh.Covariance(),
    )
    slopes = jax.jit(jax.jacfwd(mean.per_chain))(jnp.float32(THETA), jax.random.key(1))
    stationary = np.array([[-0.079093, 0.022615, 0.056478], np.zeros(3)]).T
    assert_unbiased(np.asarray(slopes), stationary)


def wrong_sign(right):
    return lambda self, theta, x, *args: -right(self, theta, x, *args)


def without_flips(right):
    return lambda self, theta, x, *args: jax.lax.stop_gradient(right(self, theta, x, *args))


@pytest.mark.parametrize("mistake", [wrong_sign, without_flips])
def test_a_mistake_of_swaps_is_caught(monkeypatch, mistake):
    """A ratio of the wrong sign, and swaps at which nothing is born."""
    monkeypatch.setattr(Swap, "log_ratio", mistake(Swap.log_ratio))
    assert is_caught(slopes_of(3), exact(3))


# Three replicas of three states at random densities, which need not be powers of one: 27 states
# together, and two rounds of swaps.
STATES, REPLICAS, PARAMETERS = 3, 3, 2


class Problem(NamedTuple):
    theta: np.ndarray
    proposal: np.ndarray
    base: np.ndarray
    features: np.ndarray
    values: np.ndarray


def random_problem(seed: int) -> Problem:
    rng = np.random.default_rng(seed)
    rows = (
        rng.normal(size=PARAMETERS),
        rng.dirichlet(np.ones(STATES), size=STATES),
        rng.normal(size=(REPLICAS, STATES)),
        0.7 * rng.normal(size=(REPLICAS, STATES, PARAMETERS)),
        rng.normal(size=(REPLICAS, STATES)),
    )
    return Problem(*(np.asarray(row, np.float32).astype(float) for row in rows))


TOGETHER = np.array(list(itertools.product(range(STATES), repeat=REPLICAS)))


def swap(tables: np.ndarray, first: int) -> np.ndarray:
    """A swap of the replicas `first` and `first + 1`, by its definition."""
    matrix = np.zeros((len(TOGETHER),) * 2, complex)
    for number, x in enumerate(TOGETHER):
        y = x.copy()
        y[[first, first + 1]] = y[[first + 1, first]]
        joint = lambda x: sum(table[each] for table, each in zip(tables, x, strict=True))
        ratio = joint(y) - joint(x)
        share = 1.0 if ratio.real < 0 else 0.5 * (ratio.real == 0)
        accept = np.exp(min(ratio.real, 0.0)) * (1 + 1j * share * ratio.imag)
        matrix[number, number] += 1 - accept
        matrix[number, np.flatnonzero((y == TOGETHER).all(axis=1))[0]] += accept
    return matrix


def exact_of(problem: Problem, num_samples: int) -> np.ndarray:
    def mean(theta):
        tables = problem.base + problem.features @ theta
        step = np.eye(1)
        for table in tables:
            step = np.kron(step, transition_matrix(table, problem.proposal))
        step = step @ swap(tables, 0) @ swap(tables, 1)
        f = sum(values[x] for values, x in zip(problem.values, TOGETHER.T, strict=True))
        return finite_chain_mean(step, 0, f[:, None], num_samples, 0)

    return derivative(mean, problem.theta)[1][0]


def look_up(table, x):
    return jax.nn.one_hot(x, STATES) @ table


def test_random_replicas():
    def one(problem, key):
        def at(replica):
            def density(theta, x, base, features, values):
                own = jax.nn.one_hot(replica.astype(int), REPLICAS)
                return look_up(jnp.tensordot(own, base + features @ theta, 1), x)

            return diffmh.MetropolisHastings(density, diffmh.TransitionMatrix(problem.proposal))

        mean = diffmh.expectation(
            lambda theta, x, base, features, values: jnp.sum(jax.vmap(look_up)(values, x)),
            diffmh.Tempering(at, jnp.arange(float(REPLICAS))),
            init=jnp.zeros(REPLICAS, int),
            num_samples=4,
            num_chains=3000,
        )
        return jax.jacfwd(mean.per_chain)(problem.theta, key, *problem[2:])

    problems = [random_problem(seed) for seed in range(30)]
    for number, found in enumerate(each(one, problems, 8)):
        assert_unbiased(found, exact_of(problems[number], 4), f"replicas {number}")


def test_replicas_that_are_sweeps():
    """A kernel of several updates, of units that are independent: the mean of each is known."""

    def at(beta):
        density = lambda theta, z: beta * theta * jnp.sum(z)
        return diffmh.Sweep(lambda i: diffmh.Gibbs(density, lambda z: z[i], 2), 3)

    mean = diffmh.expectation(
        lambda theta, z: jnp.mean(1.0 * z, axis=1),
        diffmh.Tempering(at, (1.0, 0.5)),
        init=jnp.zeros((2, 3), int),
        num_samples=1,
        num_chains=4000,
    )
    slopes = optimised(jax.jacfwd(mean.per_chain))(0.7, jax.random.key(4))

    def after_swap(theta):
        """By enumeration of both sums of three independent units."""
        counts, bits = np.arange(4), np.array([1, 3, 3, 1])

        def law(beta):
            p = 1 / (1 + np.exp(-beta * theta))
            return bits * p**counts * (1 - p) ** (3 - counts)

        both = law(1.0)[:, None] * law(0.5)[None]
        ratio = 0.5 * theta * (counts[None] - counts[:, None])
        accept = np.where(ratio.real < 0, np.exp(ratio), 1.0)
        cold = accept * counts[None] + (1 - accept) * counts[:, None]
        hot = accept * counts[:, None] + (1 - accept) * counts[None]
        return np.array([np.sum(both * cold), np.sum(both * hot)]) / 3

    exact = derivative(lambda theta: after_swap(theta[0]), np.float32([0.7]).astype(float))[1]
    assert_unbiased(np.asarray(slopes), exact[:, 0])


def normal_at(beta):
    density = lambda theta, x: -0.5 * beta * (x - theta) ** 2
    return diffmh.Cycle(
        diffmh.MetropolisHastings(density, diffmh.GaussianWalk(1.5)), diffmh.Langevin(density, 1.0)
    )


def test_a_walk_beside_moves_that_depend_on_theta():
    """A walk does not move with θ, but decides where the other kernel has moved the chain."""
    mean = diffmh.expectation(
        lambda theta, x: jnp.stack([x[0], x[1] ** 2]),
        diffmh.Tempering(normal_at, (1.0, 0.5)),
        init=jnp.zeros(2),
        num_samples=10,
        burn_in=20,
        num_chains=3000,
    )
    slopes = optimised(jax.jacfwd(mean.per_chain))(0.5, jax.random.key(2))
    assert_unbiased(np.asarray(slopes), np.array([1.0, 1.0]))


def test_refusals():
    fixed = lambda beta: diffmh.MetropolisHastings(
        lambda theta, x: -0.5 * beta * (x - theta) ** 2, diffmh.GaussianWalk(1.0)
    )
    with pytest.raises(TypeError, match="kernel_at"):
        diffmh.Tempering(diffmh.GaussianWalk(1.0), (1.0, 0.5))
    with pytest.raises(TypeError, match=r"kernel_at\(beta\)` must be a `diffmh.extend.Kernel`"):
        diffmh.Tempering(lambda beta: diffmh.GaussianWalk(1.0), (1.0, 0.5))
    with pytest.raises(ValueError, match="at least two inverse temperatures"):
        diffmh.Tempering(fixed, (1.0,))
    with pytest.raises(ValueError, match=r"Tempering\(betas=...\).*finite"):
        diffmh.Tempering(fixed, (1.0, jnp.nan))
    with pytest.raises(ValueError, match="pass `num_replicas`"):
        diffmh.Tempering(fixed, lambda theta: theta)
    with pytest.raises(ValueError, match="leave it out"):
        diffmh.Tempering(fixed, (1.0, 0.5), num_replicas=3)
    with pytest.raises(ValueError, match=r"Tempering\(kernel_at, betas\).*one density"):
        diffmh.Tempering(lambda beta: diffmh.Cycle(fixed(beta), fixed(beta)), (1.0, 0.5))

    def run(kernel, start):
        mean = diffmh.expectation(
            lambda theta, x: x[0], kernel, init=start, num_samples=1, num_chains=2
        )
        mean(0.3, jax.random.key(0))

    with pytest.raises(ValueError, match=r"moves 2 replicas.*got shape \(3,\)"):
        run(diffmh.Tempering(fixed, (1.0, 0.5)), jnp.zeros(3))
    wrong = diffmh.Tempering(
        lambda beta: diffmh.MetropolisHastings(
            lambda theta, x: -0.5 * beta(theta) * (x - theta) ** 2, diffmh.GaussianWalk(1.0)
        ),
        lambda theta: jnp.stack([1.0, theta, 0.5]),
        num_replicas=2,
    )
    with pytest.raises(ValueError, match="must return 2 numbers"):
        run(wrong, jnp.zeros(2))


def test_tools_take_replicas():
    kernel = diffmh.Tempering(kernel_at, ladder, num_replicas=2)
    theta, start = jnp.asarray(THETA, jnp.float32), jnp.zeros(2, int)
    path = diffmh.trace(kernel, theta, jax.random.key(0), init=start, num_steps=6)
    assert path.primal.shape == (6, 2)
    draws = diffmh.sample(kernel, theta, jax.random.key(0), init=start, num_samples=5, num_chains=2)
    assert draws.posterior["x"].shape == (2, 5, 2)


@pytest.mark.thorough
def test_check_takes_replicas():
    kernel = diffmh.Tempering(kernel_at, ladder, num_replicas=2)
    theta, start = jnp.asarray(THETA, jnp.float32), jnp.zeros(2, int)
    found = diffmh.check(kernel, theta, jax.random.key(0), init=start)
    assert found, str(found)
