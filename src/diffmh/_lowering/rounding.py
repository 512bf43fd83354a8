"""Rounding that does not depend on what else is computed.

A compiler contracts `a * b + c` into one rounding where it can, and whether it can depends on what
else uses `a * b`. The same chain would then round differently in the program of its value and in
that of its gradient, or in two copies of one expression within a program; and a chain that differs
by one ulp soon differs altogether. Passing the bits through an integer operation that the compiler
cannot see through forbids contraction across that point.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Key, PyTree


def never(key: Key[Array, ""], shape: tuple[int, ...] = ()) -> Bool[Array, "..."]:
    """False, in a way that no compiler can know: a normal draw does not exceed 10³⁰."""
    return jax.random.normal(key, shape) > 1e30


def settle(tree: PyTree, never: Bool[Array, ""]) -> PyTree:
    """`tree`, rounded here and now; values settled by different `never` share no computation
    either.
    """

    def through_bits(leaf):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf ^ never.astype(leaf.dtype)
        integer = jnp.dtype(f"uint{8 * leaf.dtype.itemsize}")
        bits = jax.lax.bitcast_convert_type(leaf, integer)
        return jax.lax.bitcast_convert_type(bits ^ never.astype(integer), leaf.dtype)

    return jax.tree.map(through_bits, tree)


def whole(tree: PyTree, never: Bool[Array, ""]) -> PyTree:
    """`tree` computed once and kept: a compiler that fuses would compute it anew for each of its
    uses.

    It comes out of a branch that is always taken, and compilers don't fuse across branches.
    """
    return jax.lax.cond(
        never, lambda tree: jax.tree.map(jnp.zeros_like, tree), lambda tree: tree, tree
    )
