"""All configurations of a few units, and averages over them in double precision."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

# 2²⁰ configurations take seconds and a few hundred megabytes.
MOST_UNITS = 20


def configurations(
    num_units: int, values: tuple[float | int, float | int], what: str
) -> Float[np.ndarray, "m n"]:
    """Every configuration of units that take one of two values."""
    if num_units > MOST_UNITS:
        raise ValueError(
            f"{what} enumerates at most {MOST_UNITS} units, got {num_units}: estimate it with"
            " the sampler instead."
        )
    bits = (np.arange(2**num_units)[:, None] >> np.arange(num_units)) & 1
    return np.where(bits, values[1], values[0]).astype(float)


def log_sum_exp(terms: Float[np.ndarray, "m"]) -> float:
    largest = terms.max()
    return float(largest + np.log(np.sum(np.exp(terms - largest))))
