"""Baselines: of a value in the middle of a run, its mean over the other replicates.

Replicates are lanes of `jax.vmap`, so that is where their mean is known: a function of one
replicate's value whose rule under `vmap` looks at all. Whatever maps from outside of the replicates
finds plain operations.
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
    replicates. Every replicate must have an `anchor` of its own, so that none of the maps takes the
    value for the same in all.
    """
    return _after(0, num_axes)


def _after(done: int, num_axes: int) -> Baseline:
    """With the first `done` axes of a value those of replicates."""

    def of_others(value, anchor):
        return mean_of_others(value, tuple(range(done)))

    if done == num_axes:
        return of_others
    mapped = jax.custom_batching.custom_vmap(of_others)

    def rule(size, batched, value, anchor):
        given = (
            leaf if has_axis else jnp.broadcast_to(leaf, (size, *jnp.shape(leaf)))
            for leaf, has_axis in zip((value, anchor), batched, strict=True)
        )
        return _after(done + 1, num_axes)(*given), True

    mapped.def_vmap(rule)
    return mapped
