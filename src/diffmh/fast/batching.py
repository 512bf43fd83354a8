"""Batching rules with the chains as the last axis: one for each operation that has the axis of the
chains added to its parameters, and `jax.vmap` for all others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

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
    if equation.primitive in _RULES:
        return _RULES[equation.primitive]
    rule = _OPERATIONS.get(type(compat.operation(equation)))
    return by_vmap if rule is None else rule


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


def _of_one(of: Callable[[Any, int, Array], Array]) -> Rule:
    """Operations on one array that list all of its axes: `of(operation, count, array)` adds the
    chains'.
    """

    def rule(equation: Equation, count: int, operands: list[Value]) -> Sequence[Array]:
        (operand,) = operands
        return [of(compat.operation(equation), count, jnp.asarray(operand.array))]

    return rule


def _broadcast(to: operations.Broadcast, count: int, array: Array) -> Array:
    shape, axes = (*to.shape, count), (*to.axes, len(to.shape))
    return jax.lax.broadcast_in_dim(array, shape, axes)


def _reshape(to: operations.Reshape, count: int, array: Array) -> Array:
    return jax.lax.reshape(array, (*to.shape, count))


def _slice(part: operations.Slice, count: int, array: Array) -> Array:
    return jax.lax.slice(array, (*part.starts, 0), (*part.limits, count), (*part.strides, 1))


def _transpose(to: operations.Transpose, count: int, array: Array) -> Array:
    return jax.lax.transpose(array, (*to.axes, len(to.axes)))


def _logical(over: operations.Logical, count: int, array: Array) -> Array:
    """The count of many, as a sum of floats: the compiler does not vectorise one of booleans."""
    if math.prod(array.shape[axis] for axis in over.axes) < _MANY_TRUTHS:
        return (jnp.all if over.of_all else jnp.any)(array, axis=over.axes)
    found = jnp.sum(jnp.where(array ^ over.of_all, 1.0, 0.0), axis=over.axes) > 0
    return ~found if over.of_all else found


def _pad(equation: Equation, count: int, operands: list[Value]) -> Sequence[Array | Once]:
    array, padding = operands
    operation = compat.operation(equation)
    if not isinstance(operation, operations.Pad) or not isinstance(padding, Once):
        return by_vmap(equation, count, operands)
    value = jnp.asarray(padding.array)
    return [jax.lax.pad(per_chain(array, count), value, (*operation.widths, (0, 0, 0)))]


def _dynamic_slice(equation: Equation, count: int, operands: list[Value]) -> Sequence[Array | Once]:
    """An entry of a short table, each chain at its own position, by comparisons (a gather is
    slower); or a common slice.
    """
    operation, (table, *starts) = compat.operation(equation), operands
    assert isinstance(operation, operations.DynamicSlice)
    if _are_common(starts):
        array, sizes = per_chain(table, count), (*operation.sizes, count)
        at = _positions(starts)
        return [jax.lax.dynamic_slice(array, at, sizes, allow_negative_indices=False)]
    rows = jnp.asarray(table.array)
    if operation.sizes != (1,) or rows.shape[0] > _SHORT:
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

_OPERATIONS: dict[type, Rule] = {
    operations.Broadcast: _of_one(_broadcast),
    operations.Reshape: _of_one(_reshape),
    operations.Slice: _of_one(_slice),
    operations.Transpose: _of_one(_transpose),
    operations.Logical: _of_one(_logical),
    operations.Pad: _pad,
    operations.DynamicSlice: _dynamic_slice,
    operations.Lookup: _lookup,
}
