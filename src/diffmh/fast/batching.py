"""Batching rules with the chains as the last axis: one for each operation that has the axis of the
chains added to its parameters, and `jax.vmap` for all others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ..jaxprs import compat, operations
from ..jaxprs.program import Equation
from .per_chain import Once, PerChain, Value, per_chain

Rule = Callable[[Equation, int, list[Value]], Sequence[Array | Once]]

# At least this many truth values are counted.
_MANY_TRUTHS = 16

# Tables up to this length are looked up by comparisons.
_SHORT = 16


def rule_of(equation: Equation) -> Rule:
    """The rule of an equation that has an operand with chains."""
    return _RULES.get(equation.primitive, _by_operation)


def by_vmap(equation: Equation, count: int, operands: list[Value]) -> Sequence[Array | Once]:
    """Results that `jax.vmap` does not map are the same for all chains and stay so: a branch on
    whether any chain errs must not become a branch of each chain's own, of which both sides run.
    """
    axes = tuple(-1 if isinstance(operand, PerChain) else None for operand in operands)
    differs: set[int] = set()

    def one(*arrays):
        results = equation.bind(*arrays)
        for index, result in enumerate(results):
            _noting(lambda index=index: differs.add(index))(result)
        return results

    results = jax.vmap(one, axes, -1)(*(operand.array for operand in operands))
    return [
        result if index in differs else Once(result[..., 0]) for index, result in enumerate(results)
    ]


def _noting(mapped: Callable[[], None]) -> Callable[[Array], Array]:
    """The identity, which calls `mapped` if `jax.vmap` maps over its operand."""
    identity = jax.custom_batching.custom_vmap(lambda array: array)

    def rule(size, batched, array):
        mapped()
        return array, batched[0]

    identity.def_vmap(rule)
    return identity


def _elementwise(equation: Equation, count: int, operands: list[Value]) -> Sequence[Array]:
    """Operands of one shape up to axes of length 1; the condition of a selection and the ends of
    a clamp may be scalars.
    """
    # Invariant of every rule: the result means what `jax.vmap(…, -1, -1)` gives, and has chains
    # last, after the axes that the equation declares.
    shape = (*equation.outputs[0].shape, count)

    def whole(operand: Value):
        array = per_chain(operand, count)
        return (
            array
            if array.ndim == len(shape)
            else jax.lax.broadcast_in_dim(array, shape, (len(shape) - 1,))
        )

    return equation.bind(*map(whole, operands))


def _same_axes(equation: Equation, count: int, operands: list[Value]) -> Sequence[Array]:
    """Operations on named axes: those come before the chains', so nothing changes."""
    return equation.bind(*(per_chain(operand, count) for operand in operands))


def _by_operation(equation: Equation, count: int, operands: list[Value]) -> Sequence[Array | Once]:
    """Operations that list all axes of an array, to which the chains' is added; all others by
    `jax.vmap`.
    """
    operand, *others = operands
    array: Any = operand.array
    match compat.operation(equation):
        case operations.Broadcast(shape, axes):
            return [jax.lax.broadcast_in_dim(array, (*shape, count), (*axes, len(shape)))]
        case operations.Reshape(shape):
            return [jax.lax.reshape(array, (*shape, count))]
        case operations.Slice(starts, limits, strides):
            return [jax.lax.slice(array, (*starts, 0), (*limits, count), (*strides, 1))]
        case operations.Transpose(axes):
            return [jax.lax.transpose(array, (*axes, len(axes)))]
        case operations.Logical(axes, of_all):
            return [_logical(array, axes, of_all)]
        case operations.Pad(widths) if isinstance(others[0], Once):
            value = jnp.asarray(others[0].array)
            return [jax.lax.pad(per_chain(operand, count), value, (*widths, (0, 0, 0)))]
        case operations.DynamicSlice(sizes):
            return _dynamic_slice(equation, sizes, count, operands)
        case operations.Lookup():
            return _lookup(equation, count, operands)
    return by_vmap(equation, count, operands)


def _logical(array: Array, axes: tuple[int, ...], of_all: bool) -> Array:
    """The count of many, as a sum of floats: the compiler does not vectorise one of booleans."""
    if math.prod(array.shape[axis] for axis in axes) < _MANY_TRUTHS:
        return (jnp.all if of_all else jnp.any)(array, axis=axes)
    found = jnp.sum(jnp.where(array ^ of_all, 1.0, 0.0), axis=axes) > 0
    return ~found if of_all else found


def _dynamic_slice(
    equation: Equation, sizes: tuple[int, ...], count: int, operands: list[Value]
) -> Sequence[Array | Once]:
    """An entry of a short table, each chain at its own position, by comparisons (a gather is
    slower); or a common slice.
    """
    table, *starts = operands
    if _are_common(starts):
        array, at = per_chain(table, count), _positions(starts)
        return [jax.lax.dynamic_slice(array, at, (*sizes, count), allow_negative_indices=False)]
    rows = jnp.asarray(table.array)
    if sizes != (1,) or rows.shape[0] > _SHORT:
        return by_vmap(equation, count, operands)
    position = jnp.asarray(starts[0].array)
    return [_looked_up(list(rows), position, (count,))[None]]


def _lookup(equation: Equation, count: int, operands: list[Value]) -> Sequence[Array | Once]:
    """The same for several alternatives at once, of a table or of positions that differ."""
    table, positions = operands
    length = equation.inputs[0].shape[-1]
    if length > _SHORT:
        return by_vmap(equation, count, operands)
    # Chains last: beside a table that all chains share, their axis has length 1.
    shared = isinstance(table, Once)
    rows = jnp.asarray(table.array)[..., None] if shared else jnp.asarray(table.array)
    entries = [rows[..., i, :] for i in range(length)]
    position = per_chain(positions, count)[..., 0, :]
    return [_looked_up(entries, position, (equation.outputs[0].shape[0], count))[:, None]]


def _looked_up(rows: list[Array], position: Array, shape: tuple[int, ...]) -> Array:
    """`rows[position]`, by comparisons; positions beyond the ends are those of the ends."""
    # After step i the entry is rows[min(max(position, 0), i)].
    entry = jnp.broadcast_to(rows[0], shape)
    for i, row in enumerate(rows[1:], 1):
        entry = jnp.where(position >= i, row, entry)
    return entry


def _dynamic_update(
    equation: Equation, count: int, operands: list[Value]
) -> Sequence[Array | Once]:
    array, update, *starts = operands
    if not _are_common(starts):
        return by_vmap(equation, count, operands)
    whole, part, at = per_chain(array, count), per_chain(update, count), _positions(starts)
    return [jax.lax.dynamic_update_slice(whole, part, at, allow_negative_indices=False)]


def _are_common(starts: Sequence[Value]) -> bool:
    return bool(starts) and all(isinstance(start, Once) for start in starts)


def _positions(starts: Sequence[Value]) -> list[Array]:
    """Positions that are the same for all chains, and that of the first chain."""
    positions = [jnp.asarray(start.array) for start in starts]
    return [*positions, jnp.zeros((), positions[0].dtype)]


def _bitcast(equation: Equation, count: int, operands: list[Value]) -> Sequence[Array | Once]:
    same = jnp.shape(operands[0].array)[:-1] == equation.outputs[0].shape
    return (_elementwise if same else by_vmap)(equation, count, operands)


_ELEMENTWISE = """ abs acos acosh add and asin asinh atan atan2 atanh cbrt ceil clamp
convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt
imag integer_pow is_finite le lgamma log log1p logistic lt max min mul ne neg nextafter not or
population_count pow real reduce_precision rem round rsqrt select_n shift_left
shift_right_arithmetic shift_right_logical sign sin sinh sqrt square sub tan tanh xor
"""

_ON_NAMED_AXES = """ argmax argmin concatenate cumlogsumexp cummax cummin cumprod cumsum
reduce_max reduce_min reduce_prod reduce_sum reduce_xor rev split squeeze stack
"""

_RULES: dict[str, Rule] = {
    **dict.fromkeys(_ELEMENTWISE.split(), _elementwise),
    **dict.fromkeys(_ON_NAMED_AXES.split(), _same_axes),
    "bitcast_convert_type": _bitcast,
    "dynamic_update_slice": _dynamic_update,
}
