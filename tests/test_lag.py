"""Functions of two states: `lag` 1 and 2 against exact transition matrices, and the mistake that
they invite.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from finite_chains import log_density, random_problem, row
from oracles import derivative, transition_matrix
from programs import each
from unbiasedness import assert_unbiased, is_caught

import diffmh
from diffmh.base import trees
from diffmh.core import alternatives, values

PROBLEMS = [random_problem(seed) for seed in range(300, 400)]
STEPS, BURN_IN = 6, 1


def f(theta, x_earlier, x, base, features, values, slopes):
    """Neither a sum nor a product of functions of each."""
    return jnp.cos(row(values, x_earlier) - row(values + slopes * theta[0], x))


def exact(problem, lag):
    """Before the start, the earlier state is the start."""
    states = len(problem.base)

    def mean(theta):
        matrix = transition_matrix(problem.base + problem.features @ theta, problem.proposal)
        later = problem.values + problem.slopes * theta[0]
        observed = np.cos(problem.values[:, None] - later[None])
        total = np.zeros(observed.shape[-1], complex)
        for t in range(BURN_IN + 1, BURN_IN + STEPS + 1):
            before = np.linalg.matrix_power(matrix, max(t - lag, 0))[0]
            between = np.linalg.matrix_power(matrix, min(t, lag))
            total += np.einsum("i,ij,ijf->f", before, between, observed)
        return total / STEPS

    assert states == problem.proposal.shape[0]
    return derivative(mean, problem.theta)[1]


def estimates(problems, lag, alternatives, density=log_density, births=None):
    estimator = diffmh.StochasticDerivative(alternatives=alternatives, births=births)

    def one(problem, key):
        expectation = diffmh.expectation(
            f,
            diffmh.MetropolisHastings(density, diffmh.TransitionMatrix(problem.proposal)),
            init=0,
            num_samples=STEPS,
            burn_in=BURN_IN,
            num_chains=4_000,
            lag=lag,
            estimator=estimator,
        )
        return jax.jacfwd(expectation.per_chain)(problem.theta, key, *problem[2:])

    return each(one, problems, lag)


@pytest.mark.parametrize(
    ("lag", "alternatives", "births", "count"),
    [
        pytest.param(1, 1, None, 100, marks=pytest.mark.thorough),
        (2, 2, None, 100),
        (1, 1, True, 10),
    ],
)
def test_lag(lag, alternatives, births, count):
    problems = PROBLEMS[:count]
    found = estimates(problems, lag, alternatives, births=births)
    for index, problem in enumerate(problems):
        assert_unbiased(found[index], exact(problem, lag), f"lag {lag}, chain {index}")


def test_recoupled_when_only_the_newest_agrees_is_caught(monkeypatch):
    def newest_only(slots, at):
        same = lambda y: trees.equal(y, at.step.after.x)
        recoupled = values.each_slot(same, slots.state.x)
        return eqx.tree_at(lambda s: s.weight, slots, values.drop(slots.weight, recoupled))

    monkeypatch.setattr(alternatives, "drop_recoupled", newest_only)
    few = PROBLEMS[:10]
    found = estimates(few, 1, 1, lambda *operands: log_density(*operands))
    assert any(is_caught(found[i], exact(problem, 1)) for i, problem in enumerate(few))


def test_refusals():
    kernel = diffmh.MetropolisHastings(
        lambda theta, x: -0.5 * (x - theta) ** 2, diffmh.GaussianWalk(1.0)
    )
    given = dict(init=0.0, num_samples=2)
    with pytest.raises(ValueError, match="at least 0, got -1"):
        diffmh.expectation(lambda theta, a, x: a * x, kernel, lag=-1, **given)
    with pytest.raises(ValueError, match="cannot see functions of successive states, got lag=1"):
        lagged = diffmh.expectation(
            lambda theta, a, x: a * x, kernel, lag=1, estimator=diffmh.Covariance(), **given
        )
        lagged(0.5, jax.random.key(0))
