"""Random chains on 2 to 8 states with asymmetric, sparse proposals, and their estimated and
exact derivatives.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from oracles import derivative, finite_chain_mean, transition_matrix
from programs import each

import diffmh

STATES, PARAMETERS, OUTPUTS = 8, 3, 2


class Problem(NamedTuple):
    """`log g = base[x] + features[x] · θ` and `f = values[x] + slopes[x] θ_0`; states past the
    problem's own are never proposed.
    """

    proposal: np.ndarray
    theta: np.ndarray
    base: np.ndarray
    features: np.ndarray
    values: np.ndarray
    slopes: np.ndarray


def random_problem(seed: int, num_parameters: int | None = None) -> Problem:
    """Unused parameters have features 0; with `num_parameters=1` there are no others."""
    rng = np.random.default_rng(seed)
    states = int(rng.integers(2, STATES + 1))
    kept = rng.random((states, states)) < rng.choice([0.4, 0.7, 1.0])
    kept[np.arange(states), (np.arange(states) + 1) % states] = True
    proposal = np.eye(STATES)
    proposal[:states, :states] = rng.dirichlet(np.ones(states), size=states) * kept
    proposal[:states] /= proposal[:states].sum(axis=1, keepdims=True)
    total = num_parameters or PARAMETERS
    used = num_parameters or int(rng.integers(1, PARAMETERS + 1))
    features = rng.normal(size=(STATES, total)) * (np.arange(total) < used)
    rows = (
        rng.normal(size=STATES),
        features,
        rng.normal(size=(STATES, OUTPUTS)),
        rng.normal(size=(STATES, OUTPUTS)),
    )
    # float32 throughout, so that the oracle differentiates the very chain that is sampled.
    single = lambda array: np.asarray(array, np.float32).astype(float)
    return Problem(single(proposal), single(rng.normal(size=total)), *map(single, rows))


def row(table, x):
    """`table[x]`, by a product: much faster than a gather where many chains look up at once."""
    return jax.nn.one_hot(x, STATES) @ table


def log_density(theta, x, base, features, values, slopes):
    return row(base + features @ theta, x)


def f(theta, x, base, features, values, slopes):
    return row(values + slopes * theta[0], x)


COUPLINGS = (diffmh.CommonRandomNumbers(), diffmh.Independent(), diffmh.Maximal())


class OneOf(diffmh.extend.NoiseCoupling):
    """`COUPLINGS[which]`, where `which` is a number: chains of all couplings share one program."""

    which: jax.Array

    def noise(self, key, proposal, x, num_steps):
        return tuple(coupling.noise(key, proposal, x, num_steps) for coupling in COUPLINGS)

    def couple(self, proposal, x, x_new, y, primal_noise, noise):
        each = [
            coupling.couple(proposal, x, x_new, y, primal_noise, own)
            for coupling, own in zip(COUPLINGS, noise, strict=True)
        ]
        return jax.lax.select_n(self.which, *each)


def estimates(
    problems: list[Problem], seed: int, couplings, estimator, num_samples, burn_in, num_runs
) -> np.ndarray:
    """Derivatives by many independent runs: (problems, couplings, runs, F, P). `couplings` are
    indices of `COUPLINGS`.
    """

    def by(which, problem, key):
        proposal = diffmh.TransitionMatrix(problem.proposal)
        kernel = diffmh.MetropolisHastings(log_density, proposal, OneOf(which))
        expectation = diffmh.expectation(
            f,
            kernel,
            init=0,
            num_samples=num_samples,
            burn_in=burn_in,
            num_chains=num_runs,
            estimator=estimator,
        )
        return jax.jacfwd(expectation.per_chain)(problem.theta, key, *problem[2:])

    def one(problem, key):
        return jax.lax.map(lambda which: by(which, problem, key), jnp.asarray(couplings, jnp.int32))

    return each(one, problems, seed)


def exact(problem: Problem, num_samples: int, burn_in: int) -> np.ndarray:
    """The Jacobian (F, P) of the finite chain's expectation."""

    def mean(theta):
        matrix = transition_matrix(problem.base + problem.features @ theta, problem.proposal)
        values = problem.values + problem.slopes * theta[0]
        return finite_chain_mean(matrix, 0, values, num_samples, burn_in)

    return derivative(mean, problem.theta)[1]
