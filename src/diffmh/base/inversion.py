"""Inversion: find the interval, among intervals of given lengths, that contains a position."""

from __future__ import annotations

from collections.abc import Callable

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class Found(eqx.Module):
    """The index of the interval, the position within it, and the sum of all masses."""

    index: Int[Array, ""]
    within: Float[Array, ""]
    total: Float[Array, ""]


def find(masses: Float[Array, "n"], position: Callable[[Array], Array]) -> Found:
    """The interval of `[0, Σ masses)` that contains `position(Σ masses)`; never an empty one."""
    cumulative = jnp.cumsum(masses)
    total = cumulative[-1]
    # A position that was rounded up to the end belongs to the last interval of positive length.
    at = jnp.minimum(position(total), jnp.nextafter(total, jnp.zeros_like(total)))
    # `<=` skips intervals of length 0, which end where they begin.
    before = cumulative <= at
    index = jnp.minimum(jnp.sum(before), masses.size - 1)
    return Found(index, at - jnp.max(jnp.where(before, cumulative, 0.0)), total)


def index_from_uniform(
    probabilities: Float[Array, "n"], uniform: Float[Array, ""]
) -> Int[Array, ""]:
    """The index drawn by inversion from `probabilities`, which need not sum to one."""
    cumulative = jnp.cumsum(probabilities)
    return jnp.sum(cumulative <= uniform * cumulative[-1])
