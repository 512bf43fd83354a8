"""Chains last: `jax.vmap` over the last axis of every array, which stays the last axis in every operation in between.

`jax.vmap(function, -1, -1)` means the same, but its rules bring the mapped axis to the front, and the compiler then lays small
states out with the chains apart in memory. Here neighbouring chains are neighbours in memory whatever a state's shape, so that
each operation is vectorised over them. An operation that has no rule below is left to `jax.vmap`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, PyTree

from . import _compat
from ._compat import Cond, Constant, Equation, Program, Scan


def over_chains(function: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """`jax.vmap(function, in_axes=-1, out_axes=-1)`."""

    def mapped(*arguments):
        leaves, structure = jax.tree.flatten(arguments)
        count = leaves[0].shape[-1]
        one = [jax.ShapeDtypeStruct(leaf.shape[:-1], leaf.dtype) for leaf in leaves]
        program, form = _compat.program(lambda *flat: function(*structure.unflatten(flat)), *one, differentiated=False)
        results = _run(program, count, [PerChain(leaf) for leaf in leaves])
        return jax.tree.structure(form).unflatten([_per_chain(value, count) for value in results])

    return mapped


@dataclass(frozen=True)
class PerChain:
    """An array with the chains as its last axis."""

    array: Array


@dataclass(frozen=True)
class Once:
    """An array, or a number, that is the same for all chains."""

    array: ArrayLike


Value = PerChain | Once


def _run(program: Program, count: int, inputs: Sequence[Value]) -> list[Value]:
    values = dict(zip(program.inputs, inputs, strict=True))
    read = lambda atom: Once(atom.value) if isinstance(atom, Constant) else values[atom]
    for equation in program.equations:
        outputs = _apply(equation, count, [read(atom) for atom in equation.inputs])
        values.update(zip(equation.outputs, outputs, strict=True))
    return [read(atom) for atom in program.outputs]


def _apply(equation: Equation, count: int, operands: list[Value]) -> Sequence[Value]:
    if not any(isinstance(operand, PerChain) for operand in operands):
        return [Once(result) for result in equation.bind(*(operand.array for operand in operands))]
    if isinstance(equation.control, Scan):
        return _scan(equation.control, count, operands)
    if isinstance(equation.control, Cond) and isinstance(operands[0], Once):
        return _cond(equation.control, count, operands)
    rule = _RULES.get(equation.primitive, _by_vmap)
    return [PerChain(result) for result in rule(equation, count, operands)]


def _per_chain(value: Value, count: int) -> Array:
    """The array with chains last, whether or not they differ."""
    if isinstance(value, PerChain):
        return value.array
    array = jnp.asarray(value.array)
    return jax.lax.broadcast_in_dim(array, (*array.shape, count), tuple(range(array.ndim)))


def _by_vmap(equation: Equation, count: int, operands: list[Value]) -> Sequence[Array]:
    axes = tuple(-1 if isinstance(operand, PerChain) else None for operand in operands)
    arrays = [operand.array for operand in operands]
    return jax.vmap(lambda *one: equation.bind(*one), axes, -1)(*arrays)


def _elementwise(equation: Equation, count: int, operands: list[Value]) -> Sequence[Array]:
    """Operands of one shape up to axes of length 1; the condition of a selection and the ends of a clamp may be scalars."""
    shape = (*equation.outputs[0].shape, count)

    def whole(operand: Value):
        array = _per_chain(operand, count)
        return array if array.ndim == len(shape) else jax.lax.broadcast_in_dim(array, shape, (len(shape) - 1,))

    return equation.bind(*map(whole, operands))


def _same_axes(equation: Equation, count: int, operands: list[Value]) -> Sequence[Array]:
    """Operations on named axes: those come before the chains', so nothing changes."""
    return equation.bind(*(_per_chain(operand, count) for operand in operands))


def _with(**changed: Callable[[tuple, int], Any]):
    """Operations whose parameters list all axes: each changed parameter takes up the chains' axis."""

    def rule(equation: Equation, count: int, operands: list[Value]) -> Sequence[Array]:
        if not isinstance(operands[0], PerChain) or any(isinstance(operand, PerChain) for operand in operands[1:]):
            return _by_vmap(equation, count, operands)
        given = {
            name: change(equation.params[name], count) for name, change in changed.items() if equation.params[name] is not None
        }
        return equation.bind(*(operand.array for operand in operands), **given)

    return rule


def _broadcast_in_dim(equation: Equation, count: int, operands: list[Value]) -> Sequence[Array]:
    shape, dimensions = equation.params["shape"], equation.params["broadcast_dimensions"]
    if len(operands) > 1:
        return _by_vmap(equation, count, operands)
    return [jax.lax.broadcast_in_dim(operands[0].array, (*shape, count), (*dimensions, len(shape)))]


def _reshape(equation: Equation, count: int, operands: list[Value]) -> Sequence[Array]:
    if equation.params["dimensions"] is not None or len(operands) > 1:
        return _by_vmap(equation, count, operands)
    return [jax.lax.reshape(operands[0].array, (*equation.params["new_sizes"], count))]


def _dynamic(num_arrays: int):
    """Slices at positions that are the same for all chains."""

    def rule(equation: Equation, count: int, operands: list[Value]) -> Sequence[Array]:
        arrays, starts = operands[:num_arrays], operands[num_arrays:]
        if any(isinstance(start, PerChain) for start in starts) or not starts:
            return _by_vmap(equation, count, operands)
        zero = jnp.zeros((), jnp.asarray(starts[0].array).dtype)
        sizes = equation.params.get("slice_sizes")
        changed = {} if sizes is None else {"slice_sizes": (*sizes, count)}
        return equation.bind(*(_per_chain(array, count) for array in arrays), *(start.array for start in starts), zero, **changed)

    return rule


def _bitcast(equation: Equation, count: int, operands: list[Value]) -> Sequence[Array]:
    same = jnp.shape(operands[0].array)[:-1] == equation.outputs[0].shape
    return (_elementwise if same else _by_vmap)(equation, count, operands)


def _scan(loop: Scan, count: int, operands: list[Value]) -> list[Value]:
    """A scan with its loop inside out: one loop, of all chains."""
    edge = loop.num_constants + loop.num_carry
    constants, carry, xs = operands[: loop.num_constants], operands[loop.num_constants : edge], operands[edge:]
    kinds = [type(x) for x in xs]

    def step(carry, xs):
        inputs = [*constants, *map(PerChain, carry), *(kind(x) for kind, x in zip(kinds, xs, strict=True))]
        arrays = [_per_chain(result, count) for result in _run(loop.body, count, inputs)]
        return arrays[: loop.num_carry], arrays[loop.num_carry :]

    start = [_per_chain(value, count) for value in carry]
    carry_out, ys = jax.lax.scan(step, start, [x.array for x in xs], loop.length, loop.reverse)
    return [PerChain(array) for array in (*carry_out, *ys)]


def _cond(choice: Cond, count: int, operands: list[Value]) -> list[Value]:
    """A branch that all chains take together."""
    index, *rest = operands
    kinds = [type(value) for value in rest]

    def along(branch: Program):
        def run(*arrays):
            values = [kind(array) for kind, array in zip(kinds, arrays, strict=True)]
            return [_per_chain(result, count) for result in _run(branch, count, values)]

        return run

    arrays = jax.lax.switch(index.array, [along(branch) for branch in choice.branches], *(value.array for value in rest))
    return [PerChain(array) for array in arrays]


_ELEMENTWISE = """
abs acos acosh add and asin asinh atan atan2 atanh cbrt ceil clamp convert_element_type copy copy_p cos cosh digamma div eq erf
erf_inv erfc exp exp2 expm1 floor ge gt imag integer_pow is_finite le lgamma log log1p logistic lt max min mul ne neg nextafter not
or population_count pow real reduce_precision rem round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign
sin sinh sqrt square sub tan tanh xor
"""

_ON_NAMED_AXES = """
argmax argmin concatenate cumlogsumexp cummax cummin cumprod cumsum reduce_and reduce_max reduce_min reduce_or reduce_prod
reduce_sum reduce_xor rev split squeeze stack
"""

_RULES = {
    **dict.fromkeys(_ELEMENTWISE.split(), _elementwise),
    **dict.fromkeys(_ON_NAMED_AXES.split(), _same_axes),
    "bitcast_convert_type": _bitcast,
    "broadcast_in_dim": _broadcast_in_dim,
    "reshape": _reshape,
    "dynamic_slice": _dynamic(1),
    "dynamic_update_slice": _dynamic(2),
    "pad": _with(padding_config=lambda padding, count: (*padding, (0, 0, 0))),
    "slice": _with(
        start_indices=lambda starts, count: (*starts, 0),
        limit_indices=lambda limits, count: (*limits, count),
        strides=lambda strides, count: (*strides, 1),
    ),
    "transpose": _with(permutation=lambda axes, count: (*axes, len(axes))),
}
