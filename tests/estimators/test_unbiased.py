"""Unbiased: random finite chains, the paper's mixture, Ising models and ties, against exact
derivatives at burn-in 0 and 3.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from finite_chains import COUPLINGS, estimates, exact, random_problem
from oracles import (
    derivative,
    finite_chain_mean,
    ising_moments,
    mixture_occupancy,
    transition_matrix,
)
from paper_models import ising, mixture
from programs import derivatives
from unbiasedness import assert_unbiased

import diffmh

LENGTHS = [(12, 0), (8, 3)]


@functools.cache
def problems(kind: str, part: int):
    """200 chains in two parts, each run at its own length; one-sided weights exist for one
    parameter only.
    """
    first = 1000 * (kind == "one-sided") + 100 * part
    return [
        random_problem(seed, 1 if kind == "one-sided" else None)
        for seed in range(first, first + 100)
    ]


@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    ("weights", "alternatives"),
    [
        pytest.param("two-sided", 1, marks=pytest.mark.thorough),
        pytest.param("two-sided", 2, marks=pytest.mark.thorough),
        ("two-sided", 4),
        ("one-sided", 1),
        pytest.param("one-sided", 2, marks=pytest.mark.thorough),
        pytest.param("one-sided", 4, marks=pytest.mark.thorough),
    ],
)
def test_random_chains(weights, alternatives, part):
    """By each coupling. One-sided weights have heavy tails where α is near 1: more runs."""
    check_random_chains(weights, alternatives, part)


@pytest.mark.optimised
@pytest.mark.parametrize(
    ("alternatives", "count"),
    [
        (1, 12),
        pytest.param(1, 100, marks=pytest.mark.thorough),
        pytest.param(4, 100, marks=pytest.mark.thorough),
    ],
)
def test_random_chains_by_births(alternatives, count):
    check_random_chains("two-sided", alternatives, 1, births=True, count=count)


def check_random_chains(weights, alternatives, part, births=None, count=100):
    num_samples, burn_in = LENGTHS[part]
    num_runs = 4_000 if weights == "two-sided" else 12_000
    estimator = diffmh.StochasticDerivative(weights, alternatives, births=births)
    chains = problems(weights, part)[:count]
    each = range(len(COUPLINGS))
    found = estimates(chains, 7, each, estimator, num_samples, burn_in, num_runs)
    for index, problem in enumerate(chains):
        expected = exact(problem, num_samples, burn_in)
        for coupling, samples in zip(COUPLINGS, found[index], strict=True):
            assert_unbiased(samples, expected, f"chain {index} of part {part} by {coupling}")


@pytest.mark.parametrize(
    "estimator",
    [
        diffmh.Score(),
        diffmh.Score("other chains"),
        pytest.param(diffmh.Score(0.7), marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_random_chains_by_score(estimator):
    """The score has no alternatives, and so no coupling."""
    found = estimates(problems("two-sided", 1), 8, [2], estimator, 8, 3, 4_000)[:, 0]
    for index, problem in enumerate(problems("two-sided", 1)):
        assert_unbiased(found[index], exact(problem, 8, 3), f"chain {index}")


@pytest.mark.parametrize("num_samples", [5, pytest.param(20, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    "estimator",
    [
        diffmh.StochasticDerivative(),
        pytest.param(diffmh.StochasticDerivative(alternatives=4), marks=pytest.mark.thorough),
        pytest.param(diffmh.StochasticDerivative("one-sided"), marks=pytest.mark.thorough),
        diffmh.StochasticDerivative(births=True),
        diffmh.Score(),
    ],
    ids=str,
)
def test_mixture(estimator, num_samples):
    found = derivatives(mixture(estimator, num_samples), 0.4, jax.random.key(1))
    assert_unbiased(found, derivative(mixture_occupancy(num_samples, 0), 0.4)[1][:, 0])


@pytest.mark.parametrize(
    ("size", "temperature"),
    [
        pytest.param(2, 2.0, marks=pytest.mark.thorough),
        pytest.param(2, 3.0, marks=pytest.mark.thorough),
        (3, 2.0),
        pytest.param(3, 3.0, marks=pytest.mark.thorough),
    ],
)
@pytest.mark.parametrize(
    ("alternatives", "births"), [(1, None), (4, None), (2, True)], ids=["1", "4", "births"]
)
def test_ising_sweeps(size, temperature, alternatives, births):
    """The sites in fixed order: a Cycle whose kernels differ only in an array."""
    estimator = diffmh.StochasticDerivative(alternatives=alternatives, births=births)
    expectation = ising(size, estimator=estimator)
    found = derivatives(expectation, temperature, jax.random.key(2))
    assert_unbiased(found, derivative(ising_moments(size, 5), temperature)[1][:, 0])


def boltzmann_machine_oracle(num_steps):
    """Three spins, random site, all couplings and fields zero: d/d(J12, J13, J23, h1, h2, h3) of
    E[mean s] and E[s1 s2].
    """
    spins = np.array([[1 - 2 * ((state >> k) & 1) for k in range(3)] for state in range(8)])
    pairs = [(0, 1), (0, 2), (1, 2)]
    features = np.concatenate(
        [np.stack([spins[:, i] * spins[:, j] for i, j in pairs], 1), spins], axis=1
    )
    proposal = np.zeros((8, 8))
    for state in range(8):
        proposal[state, state] = 0.5
        for k in range(3):
            proposal[state, state ^ (1 << k)] = 1 / 6
    observed = np.stack([spins.mean(axis=1), spins[:, 0] * spins[:, 1]], axis=1).astype(float)
    return derivative(
        lambda theta: finite_chain_mean(
            transition_matrix(features @ theta, proposal), 0, observed, num_steps, 0
        ),
        np.zeros(6),
    )[1]


@pytest.mark.parametrize(
    ("alternatives", "births"),
    [pytest.param(1, None, marks=pytest.mark.thorough), (4, None), (1, True)],
    ids=["1", "4", "births"],
)
def test_ties_of_a_boltzmann_machine_at_zero(alternatives, births):
    """Every step is an exact tie. A zero gradient here is a failure, and so is a full one."""

    def log_density(theta, s):
        couplings = (
            theta["J"][0] * s[0] * s[1] + theta["J"][1] * s[0] * s[2] + theta["J"][2] * s[1] * s[2]
        )
        return couplings + jnp.sum(theta["h"] * s)

    kernel = diffmh.MetropolisHastings(log_density, diffmh.SpinFlip())
    expectation = diffmh.expectation(
        lambda theta, s: jnp.stack([jnp.mean(s.astype(float)), (s[0] * s[1]).astype(float)]),
        kernel,
        init=jnp.ones(3, int),
        num_samples=6,
        num_chains=100_000,
        estimator=diffmh.StochasticDerivative(alternatives=alternatives, births=births),
    )
    zero = {"J": jnp.zeros(3), "h": jnp.zeros(3)}
    found = derivatives(expectation, zero, jax.random.key(3))
    exact_slope = boltzmann_machine_oracle(6)
    assert_unbiased(np.concatenate([found["J"], found["h"]], axis=-1), exact_slope)
    assert np.abs(exact_slope).max() > 0.1


@pytest.mark.parametrize(
    ("coupling", "births"),
    [
        (None, None),
        pytest.param(diffmh.Maximal(), None, marks=pytest.mark.thorough),
        (diffmh.Independent(), None),
        (None, True),
    ],
    ids=str,
)
def test_normal_at_stationarity(coupling, births):
    """E[x] = θ and E[x²] = 1 + θ²: derivatives 1 and 2θ, from a start in the stationary
    distribution.
    """
    kernel = diffmh.MetropolisHastings(
        lambda theta, x: -0.5 * (x - theta) ** 2, diffmh.GaussianWalk(2.38), coupling
    )
    # The start is drawn at θ = 0.5 whatever θ: after 60 steps its own dependence on θ would be
    # gone.
    expectation = diffmh.expectation(
        lambda theta, x: jnp.stack([x, x**2]),
        kernel,
        init=lambda key: 0.5 + jax.random.normal(key),
        num_samples=30,
        burn_in=60,
        num_chains=20_000,
        estimator=diffmh.StochasticDerivative(births=births),
    )
    found = derivatives(expectation, 0.5, jax.random.key(4))
    assert_unbiased(found, np.array([1.0, 1.0]))
