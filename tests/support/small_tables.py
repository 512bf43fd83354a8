"""Random densities on tables of two labels, and kernels that move one of them: their exact
transition matrices.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from oracles import derivative, finite_chain_mean
from programs import each

import diffmh

ROWS, COLUMNS, PARAMETERS, OUTPUTS = 3, 4, 2, 2
STATES = ROWS * COLUMNS
ROW, COLUMN = np.divmod(np.arange(STATES), COLUMNS)


class Table(NamedTuple):
    """`log g = base[x] + features[x] · θ`, `f = values[x] + slopes[x] θ_0`, with x = (row, column)
    numbered through.
    """

    theta: np.ndarray
    base: np.ndarray
    features: np.ndarray
    values: np.ndarray
    slopes: np.ndarray


def random_table(seed: int) -> Table:
    rng = np.random.default_rng(seed)
    base = 1.5 * rng.normal(size=STATES)
    # Some columns are impossible beside some rows; the start, state 0, never is.
    base[(rng.random(STATES) < rng.choice([0.0, 0.3])) & (COLUMN > 0) & (ROW > 0)] = -np.inf
    rows = (
        rng.normal(size=PARAMETERS),
        base,
        rng.normal(size=(STATES, PARAMETERS)),
        rng.normal(size=(STATES, OUTPUTS)),
        rng.normal(size=(STATES, OUTPUTS)),
    )
    return Table(*(np.asarray(row, np.float32).astype(float) for row in rows))


def tables(first: int, count: int = 100) -> list[Table]:
    return [random_table(seed) for seed in range(first, first + count)]


def entry(table, x):
    here = jnp.arange(STATES) == COLUMNS * x[0] + x[1]
    return jnp.sum(jnp.where(here.reshape(-1, *(1,) * (table.ndim - 1)), table, 0), axis=0)


def log_density(theta, x, base, features, values, slopes):
    return entry(base + features @ theta, x)


def f(theta, x, base, features, values, slopes):
    return entry(values + slopes * theta[0], x)


def estimates(problems, seed, kernel, estimator=None, num_samples=5, num_runs=4_000):
    """Derivatives by many independent runs: (problems, runs, F, P)."""

    def one(problem, key):
        expectation = diffmh.expectation(
            f,
            kernel,
            init=jnp.zeros(2, jnp.int32),
            num_samples=num_samples,
            num_chains=num_runs,
            estimator=estimator,
        )
        return jax.jacfwd(expectation.per_chain)(problem.theta, key, *problem[1:])

    return each(one, problems, seed)


def conditional(log_density: np.ndarray, fixed: np.ndarray) -> np.ndarray:
    """The Gibbs matrix that draws anew among the states of equal `fixed`."""
    weights = np.exp(log_density)[None, :] * (fixed[:, None] == fixed[None, :])
    return weights / weights.sum(axis=1, keepdims=True)


def exact(problem: Table, matrix, num_samples: int = 5) -> np.ndarray:
    """The Jacobian (F, P) of the finite chain's expectation; `matrix` maps a log density over
    states to the transition matrix.
    """

    def mean(theta):
        # Far below everything, where the sampler has −inf: NaN in rows that are never reached.
        step = matrix(np.maximum(problem.base, -1e3) + problem.features @ theta)
        return finite_chain_mean(
            step, 0, problem.values + problem.slopes * theta[0], num_samples, 0
        )

    return derivative(mean, problem.theta)[1]
