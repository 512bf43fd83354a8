"""Tails: how heavy they are, by the shape of a generalised Pareto distribution, and how many draws
weights leave.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from jaxtyping import Float

from ..base.extras import needing

# Above this a mean over draws converges too slowly for its error to be believed (Vehtari and others
# 2024, Pareto smoothed importance sampling): with shape k, moments of order 1/k and above are
# infinite.
HEAVY = 0.7
# A tail has a fifth of the numbers at most, and a fit needs this many.
_LEAST_TAIL = 5
# A tail that differs by rounding alone is not one: discrete states have few weights.
_ROUNDING = 1e-4


def pareto_shape(values: Float[np.ndarray, "..."]) -> float:
    """k̂ of the upper tail of n numbers, its largest `min(n/5, 3√n)`, by ArviZ; −∞ for fewer than
    5 in the tail, and for a tail of equal numbers.
    """
    ordered = np.sort(np.asarray(values, float).ravel())
    count = math.ceil(min(0.2 * ordered.size, 3 * math.sqrt(ordered.size)))
    if count < _LEAST_TAIL or count >= ordered.size:
        return -math.inf
    excess = ordered[-count:] - ordered[-count - 1]
    if not excess[-1] > 0 or not excess[int(count / 4 + 0.5) - 1] > 0:
        return -math.inf
    advice = (
        "Pareto k̂ of draws and weights needs arviz-stats, which is not installed: pip install"
        ' "diffmh[nuts]"'
    )
    with needing("arviz_stats", advice):
        from arviz_stats.base.array import array_stats
    # It divides by the sum, which must be positive; the tail does not depend on where 0 is.
    positive = ordered - ordered[0]
    found: Any = array_stats.pareto_khat(positive[None], r_eff=1.0, tail="right")
    return float(found)


def pareto_k(log_weights: Float[np.ndarray, "..."]) -> float:
    """k̂ of importance weights; −∞ where the largest are all the same, ∞ where there are too few
    draws to know.
    """
    flat = np.sort(np.asarray(log_weights, float).ravel())
    tail = math.ceil(min(0.2 * flat.size, 3 * math.sqrt(flat.size)))
    if tail < _LEAST_TAIL:
        return math.inf
    if flat[-1] - flat[-tail] < _ROUNDING:
        return -math.inf
    return pareto_shape(np.exp(flat - flat[-1]))


def effective_size(log_weights: Float[np.ndarray, "..."]) -> float:
    """`(Σ w)² / Σ w²` (Kish)."""
    weight = np.exp(log_weights - log_weights.max())
    return float(weight.sum() ** 2 / (weight**2).sum())
