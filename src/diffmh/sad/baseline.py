"""Baselines: of a value in the middle of a run, its mean over the other replicates.

Replicates are lanes of `jax.vmap`, so that is where their mean is known: a function of one
replicate's value whose rule under `vmap` looks at all. Whatever maps from outside of the replicates
finds plain operations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

Baseline = Callable[[Float[Array, "..."], Shaped[Array, "..."]], Float[Array, "..."]]


def others_mean(value: Float[Array, "*F C"]) -> Float[Array, "*F C"]:
    """For each replicate the mean of the others; 0 if there are none."""
    return _less_own(value, (value.ndim - 1,))


def _less_own(value: Array, axes: tuple[int, ...]) -> Array:
    count = functools.reduce(lambda total, axis: total * value.shape[axis], axes, 1)
    if count == 1:
        return jnp.zeros_like(value)
    mean = jnp.mean(value, axis=axes, keepdims=True)
    return mean + (mean - value) / (count - 1)


def baseline(num_axes: int) -> Baseline:
    """`of(value, anchor)`: the mean of the others' values under `num_axes` nested maps over
    replicates. Every replicate must have an `anchor` of its own, so that none of the maps takes the
    value for the same in all.
    """
    return _after(0, num_axes)


def _after(done: int, num_axes: int) -> Baseline:
    """With the first `done` axes of a value those of replicates."""

    def of_others(value, anchor):
        return _less_own(value, tuple(range(done)))

    if done == num_axes:
        return of_others
    mapped = jax.custom_batching.custom_vmap(of_others)

    def rule(size, batched, value, anchor):
        lead = lambda leaf, is_batched: (
            leaf if is_batched else jnp.broadcast_to(leaf, (size, *jnp.shape(leaf)))
        )
        return _after(done + 1, num_axes)(lead(value, batched[0]), lead(anchor, batched[1])), True

    mapped.def_vmap(rule)
    return mapped
