"""Operations on pytrees: select, compare and stack."""

from __future__ import annotations

import operator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PyTree


def select(condition: Bool[Array, "..."], chosen: PyTree, other: PyTree) -> PyTree:
    """`chosen` where `condition` holds, else `other`, bit for bit.

    `condition` may have leading axes of the leaves; it is broadcast over the rest. This must not be
    written as arithmetic: `other + condition * (chosen - other)` rounds, and two chains that have
    met would forever differ by a few ulps.
    """

    def choose(a, b):
        expanded = jnp.expand_dims(condition, range(condition.ndim, jnp.ndim(a)))
        return jnp.where(expanded, a, b)

    return jax.tree.map(choose, chosen, other)


def equal(a: PyTree, b: PyTree) -> Bool[Array, ""]:
    """True if two states are equal in every element."""
    same = [jnp.all(p == q) for p, q in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)]
    return jnp.all(jnp.stack(same)) if len(same) != 1 else same[0]


def subtract(a: PyTree, b: PyTree) -> PyTree:
    return jax.tree.map(operator.sub, a, b)


def add(a: PyTree, b: PyTree) -> PyTree:
    return jax.tree.map(operator.add, a, b)


def dot(a: PyTree, b: PyTree) -> Array:
    """The inner product over all leaves."""
    return sum(jnp.sum(p * q) for p, q in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))  # pyright: ignore


def repeat(tree: PyTree, count: int) -> PyTree:
    """`count` copies along a new leading axis."""
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (count, *jnp.shape(leaf))), tree)


def zeros(form: PyTree, *leading: int) -> PyTree:
    """Zeros of the shapes, after these leading axes, and dtypes of a form."""
    return jax.tree.map(lambda leaf: jnp.zeros((*leading, *leaf.shape), leaf.dtype), form)


def strong(tree: PyTree) -> PyTree:
    """Arrays of definite dtype: Python numbers become arrays, and weak types (which would cause
    retracing) become strong.
    """

    def one(leaf):
        if not isinstance(leaf, jax.Array):
            leaf = jnp.asarray(leaf)
        return jnp.asarray(leaf, dtype=leaf.dtype) if leaf.weak_type else leaf

    return jax.tree.map(one, tree)


def data(args: PyTree) -> PyTree:
    """A user's arguments with numbers converted to arrays; other objects are unchanged."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf) if eqx.is_array_like(leaf) else leaf, args)


def entry(rows: Array, index: Array) -> Array:
    """`rows[index]` without a gather, which is slow if each chain has its own index."""
    # Exact: all terms of the sum but one are 0. `where`, not a product, as other rows may be
    # infinite.
    here = jnp.expand_dims(jnp.arange(rows.shape[0]) == index, range(1, rows.ndim))
    return jnp.sum(jnp.where(here, rows, jnp.zeros((), rows.dtype)), axis=0)


def take(tree: PyTree, index: Any) -> PyTree:
    """`leaf[index]` of each leaf."""
    return jax.tree.map(lambda leaf: leaf[index], tree)


def size(tree: PyTree) -> int:
    """The number of elements of all arrays."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def shapes(tree: PyTree) -> PyTree:
    """The shape of each leaf, for messages."""
    return jax.tree.map(jnp.shape, tree)
