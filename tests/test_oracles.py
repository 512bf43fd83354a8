"""The oracle against the figures of ESTIMATOR.md, section 10."""

import numpy as np
import pytest
from oracles import (
    derivative,
    entropy,
    heat_capacity,
    ising_moments,
    mixture_log_density,
    mixture_occupancy,
)


@pytest.mark.parametrize(
    ("num_samples", "burn_in", "expected"),
    [
        (20, 0, [-0.081439, 0.021855, 0.059584]),
        (5, 0, [-0.088729, 0.019568, 0.069162]),
        (5, 50, [-0.079093, 0.022615, 0.056478]),
    ],
)
def test_mixture(num_samples, burn_in, expected):
    _, slope = derivative(mixture_occupancy(num_samples, burn_in), 0.4)
    np.testing.assert_allclose(slope[:, 0], expected, atol=1e-6)


def test_mixture_entropy():
    def stationary(theta):
        weights = np.exp(mixture_log_density(theta[0]))
        return entropy(weights / weights.sum())

    value, slope = derivative(stationary, 0.4)
    np.testing.assert_allclose([value[0], slope[0, 0]], [1.071713, 0.018368], atol=1e-6)


@pytest.mark.parametrize(
    ("size", "temperature", "energy", "capacity"),
    [
        (2, 2.0, 1.044145, 0.797385),
        (2, 3.0, 1.355762, -0.150553),
        (3, 2.0, 2.814180, 3.191138),
        (3, 3.0, 4.048486, -0.653530),
    ],
)
def test_ising(size, temperature, energy, capacity):
    moments = ising_moments(size, num_sweeps=5)
    _, slope = derivative(moments, temperature)
    _, capacity_slope = derivative(
        lambda theta: np.atleast_1d(heat_capacity(moments(theta), theta[0])), temperature
    )
    np.testing.assert_allclose([slope[0, 0], capacity_slope[0, 0]], [energy, capacity], atol=1e-6)
