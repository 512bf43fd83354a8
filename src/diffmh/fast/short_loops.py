"""A loop over the steps of few chains, in parts that XLA runs quickly.

XLA for the CPU runs the pieces of a loop's body one after the other if there are at most eight, or
if none of them touches an array of more than 512 bytes (`ThunkExecutor::Options` in its
`thunk_executor.h`). Else it keeps a graph of the pieces that are ready to run, which for few chains
takes as long as the pieces themselves. What a step of few chains computes is small; its noise,
drawn for many steps at once, is not. So an outer loop takes the noise of a few steps at a time.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

from ..jaxprs import compat
from . import plain_jax

_SMALL_BYTES = 512
# Taking the noise of fewer steps at a time costs more than is gained.
_FEWEST_STEPS = 2


def row_of(rows: PyTree, index: int | Int[Array, ""]) -> PyTree:
    """The row of each array."""
    return jax.tree.map(lambda leaf: leaf[index], rows)


def over_rows(
    step: Callable[..., PyTree],
    rows: PyTree,
    num_rows: Int[Array, ""],
    carry: PyTree,
    many_pieces: bool,
) -> PyTree:
    """`carry = step(index, row, carry)` for the first `num_rows` rows of the arrays of `rows`;
    `many_pieces` says that a step is probably compiled to more than eight pieces.
    """
    length = _part_length(step, rows, carry) if many_pieces else None
    if length is None:
        one = lambda index, carry: step(index, row_of(rows, index), carry)
        return jax.lax.fori_loop(0, num_rows, one, carry)

    def part(number, carry):
        first = number * length
        # The last part may begin within the one before it.
        begin = jnp.minimum(first, jax.tree.leaves(rows)[0].shape[0] - length)
        few = jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, begin, length), rows)
        one = lambda index, carry: step(index, row_of(few, index - begin), carry)
        return jax.lax.fori_loop(first, jnp.minimum(first + length, num_rows), one, carry)

    return jax.lax.fori_loop(0, -(-num_rows // length), part, carry)


def _part_length(step: Callable[..., PyTree], rows: PyTree, carry: PyTree) -> int | None:
    """So many rows of every array are small; `None` if parts would not make the loop faster."""
    leaves = jax.tree.leaves(rows)
    if jax.default_backend() != "cpu" or plain_jax.value or not leaves:
        return None
    total = leaves[0].shape[0]
    length = _SMALL_BYTES * total // max(1, *(leaf.size * leaf.dtype.itemsize for leaf in leaves))
    if not _FEWEST_STEPS <= length < total:
        return None
    small = compat.largest_array(step, 0, row_of(rows, 0), carry) <= _SMALL_BYTES
    return length if small else None
