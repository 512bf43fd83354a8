"""A function of many inputs, some of them at a time."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import PyTree


def in_batches(
    function: Callable[[PyTree], PyTree], inputs: PyTree, at_once: int, axes: int = 1
) -> PyTree:
    """`function` of each input along this number of leading axes, `at_once` of them vectorised.

    The last batch is filled up with copies of the last input. `jax.lax.map(batch_size=...)` runs
    what is left over beside the loop instead; on a machine of two cores the Cholesky
    factorisations of both then wait for each other's threads for ever (jaxlib 0.10.2).
    """
    lead = jax.tree.leaves(inputs)[0].shape[:axes]
    count = math.prod(lead)
    size = min(at_once, count)
    num_batches = -(-count // size)
    index = jnp.minimum(jnp.arange(num_batches * size), count - 1)

    def batched(leaf):
        flat = leaf.reshape(count, *leaf.shape[axes:])
        return flat[index].reshape(num_batches, size, *flat.shape[1:])

    def joined(leaf):
        return leaf.reshape(-1, *leaf.shape[2:])[:count].reshape(*lead, *leaf.shape[2:])

    return jax.tree.map(joined, jax.lax.map(jax.vmap(function), jax.tree.map(batched, inputs)))
