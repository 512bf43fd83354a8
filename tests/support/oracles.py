"""Exact answers in double precision: transition matrices and enumeration, differentiated by
complex step.
"""

from __future__ import annotations

import itertools

import numpy as np

_STEP = 1e-30


def log_ratio(log_density: np.ndarray, proposal: np.ndarray) -> np.ndarray:
    """`log r` of the move from `i` to `j`, complex if the log density over states is."""
    with np.errstate(divide="ignore", invalid="ignore"):
        correction = np.where(proposal > 0, np.log(proposal.T) - np.log(proposal), 0.0)
    return log_density[None, :] - log_density[:, None] + correction


def accept_matrix(
    log_density: np.ndarray, proposal: np.ndarray, share_at_ties: float = 0.5
) -> np.ndarray:
    """`α(j | i)` for a log density over states (complex for a derivative) and a proposal matrix;
    half the derivative at ties.
    """
    ratio = log_ratio(log_density, proposal)
    real, imaginary = ratio.real, ratio.imag
    probability = np.exp(np.minimum(real, 0.0))
    share = np.where(real < 0, 1.0, np.where(real == 0, share_at_ties, 0.0))
    return probability * (1 + 1j * share * imaginary)


def transition_matrix(
    log_density: np.ndarray, proposal: np.ndarray, share_at_ties: float = 0.5
) -> np.ndarray:
    """Metropolis–Hastings on finitely many states."""
    accepted = accept_matrix(log_density, proposal, share_at_ties)
    moves = proposal * np.where(proposal > 0, accepted, 0.0)
    np.fill_diagonal(moves, 0.0)
    return moves + np.diag(1 - moves.sum(axis=1))


def finite_chain_mean(
    matrix: np.ndarray, start: int | np.ndarray, f: np.ndarray, num_samples: int, burn_in: int
) -> np.ndarray:
    """`E[(1/N) Σ_{t=B+1}^{B+N} f(x_t)]`, with `f` of shape (states, F), from a state or from a
    distribution over them.
    """
    row = np.eye(matrix.shape[0], dtype=complex)[start] if np.ndim(start) == 0 else start
    total = np.zeros(f.shape[1], complex)
    for step in range(burn_in + num_samples):
        row = row @ matrix
        if step >= burn_in:
            total += row @ f
    return total / num_samples


def lagged_chain_mean(
    matrix: np.ndarray,
    start: np.ndarray,
    earlier: np.ndarray,
    f: np.ndarray,
    num_samples: int,
    burn_in: int,
    lag: int,
) -> np.ndarray:
    """`E[(1/N) Σ g(x_{t−L}) f(x_t)]` over the same steps, x being the start before it; `earlier`
    is g, of shape (states, 1).
    """
    rows = [start.astype(complex)]
    for _ in range(burn_in + num_samples):
        rows.append(rows[-1] @ matrix)
    total = np.zeros(f.shape[1], complex)
    for step in range(burn_in + 1, burn_in + num_samples + 1):
        before = max(0, step - lag)
        row = rows[before] * earlier[:, 0]
        for _ in range(step - before):
            row = row @ matrix
        total += row @ f
    return total / num_samples


def derivative(function, theta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Value and Jacobian (F, P) of a function of complex parameters, by complex step."""
    theta = np.atleast_1d(np.asarray(theta, float))
    columns = []
    for p in range(theta.size):
        shifted = theta.astype(complex)
        shifted[p] += 1j * _STEP
        columns.append(function(shifted))
    return columns[0].real, np.stack([column.imag / _STEP for column in columns], axis=-1)


# The paper's mixture.
MEANS = np.array([-2.5, 2.0, 5.0])
OTHER = (1 - np.eye(3)) / 2


def mixture_log_density(h):
    return -0.5 * ((h - MEANS) / 4.0) ** 2


def mixture_occupancy(num_samples: int, burn_in: int):
    return lambda theta: finite_chain_mean(
        transition_matrix(mixture_log_density(theta[0]), OTHER), 0, np.eye(3), num_samples, burn_in
    )


# Ising models, periodic, enumerated.
def ising_configurations(size: int) -> np.ndarray:
    return np.array(list(itertools.product([1, -1], repeat=size * size))).reshape(-1, size, size)


def ising_energy(spins: np.ndarray) -> np.ndarray:
    return -np.sum(spins * (np.roll(spins, 1, axis=-1) + np.roll(spins, 1, axis=-2)), axis=(-1, -2))


def ising_sweep(size: int, temperature: complex) -> np.ndarray:
    """One sweep over the sites in order, each proposed ±1 with probability ½."""
    spins = ising_configurations(size)
    states = len(spins)
    log_density = -ising_energy(spins) / temperature
    sweep = np.eye(states, dtype=complex)
    for site in range(size * size):
        flipped = np.arange(states) ^ (1 << (size * size - 1 - site))
        ratio = log_density[flipped] - log_density
        share = np.where(ratio.real < 0, 1.0, np.where(ratio.real == 0, 0.5, 0.0))
        move = 0.5 * np.exp(np.minimum(ratio.real, 0.0)) * (1 + 1j * share * ratio.imag)
        sweep = sweep * (1 - move) + (sweep * move)[:, flipped]
    return sweep


def ising_moments(size: int, num_sweeps: int, burn_in: int = 0):
    """`T -> E[mean H], E[mean H²]` from a cold start."""
    energy = ising_energy(ising_configurations(size)).astype(float)
    f = np.stack([energy, energy**2], axis=1)
    return lambda theta: finite_chain_mean(ising_sweep(size, theta[0]), 0, f, num_sweeps, burn_in)


def heat_capacity(moments, temperature):
    return (moments[1] - moments[0] ** 2) / temperature**2


def entropy(p):
    return -np.sum(p * np.log(p), keepdims=True)
