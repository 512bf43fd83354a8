"""Mixture against exact transition matrices, and a memory that must not be shared."""

import numpy as np
import pytest
from oracles import transition_matrix
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
from statistics_ import assert_unbiased, is_caught

import diffmh
from diffmh.kernels import compose

OTHER_ROW = np.where((COLUMN[:, None] == COLUMN) & (ROW[:, None] != ROW), 1 / (ROWS - 1), 0.0)
OTHER_COLUMN = np.where((ROW[:, None] == ROW) & (COLUMN[:, None] != COLUMN), 1 / (COLUMNS - 1), 0.0)


def cold(*operands):
    return 1.5 * log_density(*operands)


def mixture(density=log_density, other=cold):
    """Walks in both directions, of different densities, and a Gibbs draw."""
    row = diffmh.On(lambda z: z[0], diffmh.OtherState(ROWS))
    column = diffmh.On(lambda z: z[1], diffmh.OtherState(COLUMNS))
    return diffmh.Mixture(
        diffmh.MetropolisHastings(density, row),
        diffmh.MetropolisHastings(other, column),
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
    monkeypatch.setattr(compose, "sharing_memory", lambda kernels: kernels)
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
    with pytest.raises(ValueError, match="positive with sum 1"):
        diffmh.Mixture(kernel, kernel, (0.5, 0.6))
    with pytest.raises(TypeError, match=r"`kernel` must be a `diffmh\.Kernel`"):
        diffmh.Mixture(diffmh.GaussianWalk(1.0), kernel)
