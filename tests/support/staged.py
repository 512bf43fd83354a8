"""Exact answers for chains that change on the way, by their transition matrices."""

from __future__ import annotations

import numpy as np
from oracles import ising_configurations, ising_energy, transition_matrix

# ESTIMATOR.md §18: 2×2 Ising, single-site steps.
BETAS = np.array([0.1, 0.2, 0.35, 0.5, 0.8])
STEPS = 8
ISING_START = np.array([[1, -1], [-1, 1]])
ISING_VALUE = -6.940915
ISING_GRADIENT = np.array([-0.199696, -1.012483, -1.335546, -1.166146, -0.255110])


def pass_matrix(log_densities, proposals, num_steps: int) -> np.ndarray:
    """A pass through all stages: `num_steps` steps at each."""
    whole = np.eye(len(log_densities[0]), dtype=complex)
    for log_density, proposal in zip(log_densities, proposals, strict=True):
        step = transition_matrix(log_density, proposal)
        whole = whole @ np.linalg.matrix_power(step, num_steps)
    return whole


def annealed_weights(log_densities, proposals, num_steps: int, begin, f) -> np.ndarray:
    """`E[w]`, `E[log w]` and `E[w f(x)]` of annealed importance sampling from the law `begin`."""
    law = begin.astype(complex)
    tilted, mean_log = law, 0.0
    for stage, log_density in enumerate(log_densities):
        if stage:
            gain = log_density - log_densities[stage - 1]
            mean_log = mean_log + law @ gain
            tilted = tilted * np.exp(gain)
        step = np.linalg.matrix_power(transition_matrix(log_density, proposals[stage]), num_steps)
        law, tilted = law @ step, tilted @ step
    return np.array([tilted.sum(), mean_log, tilted @ f])


def spin_flips(size: int) -> np.ndarray:
    """One site, uniform, proposed ±1 with probability ½ each."""
    spins = ising_configurations(size).reshape(2 ** (size * size), -1)
    differ = (spins[:, None] != spins[None]).sum(axis=-1)
    return np.where(differ == 1, 0.5 / spins.shape[1], 0.0) + 0.5 * np.eye(len(spins))


def annealed_energy(betas) -> np.ndarray:
    """The final energy of the 2×2 Ising schedule."""
    spins = ising_configurations(2)
    energy = ising_energy(spins).astype(float)
    start = int(np.flatnonzero((spins == ISING_START).all(axis=(1, 2)))[0])
    flips = spin_flips(2)
    matrix = pass_matrix([-beta * energy for beta in betas], [flips] * len(betas), STEPS)
    return (matrix[start] @ energy)[None]


def swap_matrix(log_densities) -> np.ndarray:
    """A swap of two replicas on n states each; state (i, j) has the number `n i + j`. Half the
    derivative at ties, as ever; a swap of two equal states changes nothing.
    """
    first, second = log_densities
    n = len(first)
    i, j = np.divmod(np.arange(n * n), n)
    ratio = first[j] + second[i] - first[i] - second[j]
    share = np.where(ratio.real < 0, 1.0, np.where(ratio.real == 0, 0.5, 0.0))
    accept = np.exp(np.minimum(ratio.real, 0.0)) * (1 + 1j * share * ratio.imag)
    matrix = np.diag(1 - accept)
    matrix[np.arange(n * n), n * j + i] += accept
    return matrix


def tempering_matrix(log_densities, proposal) -> np.ndarray:
    """Both of two replicas step, then a swap is tried."""
    first, second = (transition_matrix(each, proposal) for each in log_densities)
    return np.kron(first, second) @ swap_matrix(log_densities)
