"""Baselines: the mean over the other replicates of a value in the middle of a run.

Replicates are lanes of `jax.vmap`, and their mean is only known there. So a baseline is a function
of one replicate's value whose batching rule sees all replicates. Maps outside of the replicates see
plain operations.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from ..base.sums import mean_of_others

Baseline = Callable[[Float[Array, "..."], Shaped[Array, "..."]], Float[Array, "..."]]


def baseline(num_axes: int) -> Baseline:
    """`of(value, anchor)`: the mean of the others' values under `num_axes` nested maps over
    replicates. `anchor` must differ between replicates, so that each of the maps treats the value
    as batched.
    """
    return _after(0, num_axes)


def _after(done: int, num_axes: int) -> Baseline:
    """The baseline when the first `done` axes of a value are axes of replicates."""

    def of_others(value, anchor):
        return mean_of_others(value, tuple(range(done)))

    if done == num_axes:
        return of_others
    mapped = jax.custom_batching.custom_vmap(of_others)

    # Each `vmap` adds one leading axis of replicates; after `num_axes` of them all are there.
    def rule(size, batched, value, anchor):
        given = (
            leaf if has_axis else jnp.broadcast_to(leaf, (size, *jnp.shape(leaf)))
            for leaf, has_axis in zip((value, anchor), batched, strict=True)
        )
        return _after(done + 1, num_axes)(*given), True

    mapped.def_vmap(rule)
    return mapped
