"""Whole-state operations: selecting, comparing and stacking pytrees."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PyTree


def select(condition: Bool[Array, "..."], chosen: PyTree, other: PyTree) -> PyTree:
    """`chosen` where `condition` holds, else `other`, bit for bit.

    `condition` may have leading axes of the leaves; it is broadcast over the rest. Never written as
    arithmetic: `other + condition * (chosen - other)` rounds, and two chains that met would stay a
    few ulps apart for ever.
    """

    def choose(a, b):
        expanded = jnp.expand_dims(condition, range(condition.ndim, jnp.ndim(a)))
        return jnp.where(expanded, a, b)

    return jax.tree.map(choose, chosen, other)


def equal(a: PyTree, b: PyTree) -> Bool[Array, ""]:
    """Whether two states are the same in every element."""
    same = [jnp.all(p == q) for p, q in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)]
    return jnp.all(jnp.stack(same)) if len(same) != 1 else same[0]


def subtract(a: PyTree, b: PyTree) -> PyTree:
    return jax.tree.map(lambda p, q: p - q, a, b)


def add(a: PyTree, b: PyTree) -> PyTree:
    return jax.tree.map(lambda p, q: p + q, a, b)


def dot(a: PyTree, b: PyTree) -> Array:
    """The inner product over all leaves."""
    return sum(jnp.sum(p * q) for p, q in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))  # pyright: ignore


def repeat(tree: PyTree, count: int) -> PyTree:
    """`count` copies along a new leading axis."""
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (count, *jnp.shape(leaf))), tree)


def strong(tree: PyTree) -> PyTree:
    """Arrays of definite type: Python numbers become arrays, and weak types (which would
    retrace) become strong.
    """
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype=jnp.asarray(leaf).dtype), tree)


def entry(rows: Array, index: Array) -> Array:
    """`rows[index]`, without a gather, which is slow where each chain has an index of its own."""
    here = jnp.expand_dims(jnp.arange(rows.shape[0]) == index, range(1, rows.ndim))
    return jnp.sum(jnp.where(here, rows, jnp.zeros((), rows.dtype)), axis=0)


def shapes(tree: PyTree) -> PyTree:
    """The shape of each leaf, for messages."""
    return jax.tree.map(jnp.shape, tree)
