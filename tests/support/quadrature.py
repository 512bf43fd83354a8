"""Expectations of one step from the stationary distribution N(0, 1), by quadrature."""

from __future__ import annotations

import numpy as np

GRID = np.linspace(-8, 8, 1501)


def phi(x, x_new):
    """Products, squared jumps, and a function that is not symmetric."""
    return x * x_new, (x - x_new) ** 2, x * abs(x_new)


def log_normal(x, mean, scale):
    return -0.5 * ((x - mean) / scale) ** 2 - np.log(scale) - 0.5 * np.log(2 * np.pi)


def _added_up(weight, x, x_new):
    """`∫∫ weight (φ(x, x') − φ(x, x))`: what a step changes."""
    area = (GRID[1] - GRID[0]) ** 2
    after, before = phi(x, x_new), phi(x, x)
    return np.array([area * np.sum(weight * (new - old)) for new, old in zip(after, before)])  # noqa: B905


def proposed_by_density(log_q):
    """Metropolis–Hastings with a proposal of density `exp log_q(θ, x, x')`."""

    def mean(theta):
        x, x_new = GRID[:, None], GRID[None]
        forward, backward = log_q(theta, x, x_new), log_q(theta, x_new, x)
        accept = np.exp(np.minimum(0.0, 0.5 * x**2 - 0.5 * x_new**2 + backward - forward))
        return _added_up(np.exp(log_normal(x, 0.0, 1.0) + forward) * accept, x, x_new)

    return mean


def leapfrog(num_steps):
    """Hamiltonian Monte Carlo with step θ."""

    def mean(theta):
        x, p = GRID[:, None], GRID[None]
        x_new, p_new = x, p
        for _ in range(num_steps):
            half = p_new - 0.5 * theta * x_new
            x_new = x_new + theta * half
            p_new = half - 0.5 * theta * x_new
        accept = np.exp(np.minimum(0.0, 0.5 * (x**2 + p**2 - x_new**2 - p_new**2)))
        weight = np.exp(log_normal(x, 0.0, 1.0) + log_normal(p, 0.0, 1.0)) * accept
        return _added_up(weight, x, x_new)

    return mean


def slope(mean, theta, step=1e-3):
    return (mean(theta + step) - mean(theta - step)) / (2 * step)
