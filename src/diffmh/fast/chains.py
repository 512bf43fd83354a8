"""Chains last: `jax.vmap` over the last axis of every array, which stays the last axis in every
operation in between.

`jax.vmap(function, -1, -1)` means the same, but its rules bring the mapped axis to the front, and
the compiler then lays small states out with the chains apart in memory. Here neighbouring chains
are neighbours in memory whatever a state's shape, so that each operation is vectorised over them.
An operation that has no rule below is left to `jax.vmap`, and so is everything while
`plain_jax` is on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Key, PyTree

from ..jaxprs import compat, operations
from ..jaxprs.program import Cond, Constant, Equation, Program, Scan
from . import draws, plain_jax, threefry
from .shard_map import varying


def over_chains(function: Callable[..., PyTree], *, draws_ahead: bool = False) -> Callable:
    """`jax.vmap(function, in_axes=-1, out_axes=-1)`. What draws ahead for many steps computes the
    keys for its draws once, before them.
    """
    if plain_jax.value:
        return jax.vmap(function, in_axes=-1, out_axes=-1)

    @varying
    def mapped(*arguments):
        leaves, structure = jax.tree.flatten(arguments)
        count = leaves[0].shape[-1]
        if count == 1 and sum(leaf.size for leaf in leaves) > _LARGE:
            # An axis of length 1 at the end keeps loops over large arrays from being vectorised.
            alone = function(*jax.tree.map(lambda leaf: leaf[..., 0], arguments))
            return jax.tree.map(lambda leaf: leaf[..., None], alone)
        one = [jax.ShapeDtypeStruct(leaf.shape[:-1], leaf.dtype) for leaf in leaves]
        program, form = compat.program(
            lambda *flat: function(*structure.unflatten(flat)), *one, differentiated=False
        )
        results = _run(program, count, [_take_in(leaf, draws_ahead) for leaf in leaves])
        return jax.tree.structure(form).unflatten([_per_chain(value, count) for value in results])

    return mapped


def mapped_over_chains(function: Callable[..., PyTree], *arguments: PyTree) -> PyTree:
    """`function(*arguments)`, for which `jax.vmap` from outside is `over_chains`."""
    if plain_jax.value:
        return function(*arguments)
    arrays, rest = eqx.partition((function, *arguments), eqx.is_array)
    leaves, structure = jax.tree.flatten(arrays)

    @varying
    def call(*leaves):
        function, *arguments = eqx.combine(structure.unflatten(leaves), rest)
        return function(*arguments)

    def over_axis(size, batched, *leaves):
        last = [
            jnp.moveaxis(leaf, 0, -1) for leaf, moves in zip(leaves, batched, strict=True) if moves
        ]

        def one(*mapped):
            mapped = iter(mapped)
            return call(
                *(
                    next(mapped) if moves else leaf
                    for leaf, moves in zip(leaves, batched, strict=True)
                )
            )

        results = over_chains(one)(*last)
        return jax.tree.map(lambda leaf: jnp.moveaxis(leaf, -1, 0), results), jax.tree.map(
            lambda _: True, results
        )

    mapped = jax.custom_batching.custom_vmap(call)
    mapped.def_vmap(over_axis)
    return mapped(*leaves)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PerChain:
    """An array with the chains as its last axis."""

    array: Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Once:
    """An array, or a number, that is the same for all chains."""

    array: ArrayLike


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Keys:
    """Random keys with the chains as their last axis, as two arrays of words: side by side in
    memory, words would not vectorise.
    """

    left: Array
    right: Array
    once: bool = field(default=False, metadata={"static": True})

    @property
    def array(self) -> Key[Array, "*n C"]:
        return threefry.from_words(self.left, self.right)

    def each(self, function: Callable[[PerChain], Sequence[Any]]) -> list[Value]:
        """What moves keys about moves both words alike."""
        return [
            Keys(*words, self.once)
            for words in zip(
                function(PerChain(self.left)), function(PerChain(self.right)), strict=True
            )
        ]


Value = PerChain | Once | Keys
Rule = Callable[[Equation, int, list[Value]], Sequence[Array | Once]]


def _run(program: Program, count: int, inputs: Sequence[Value]) -> list[Value]:
    values = dict(zip(program.inputs, inputs, strict=True))
    read = lambda atom: Once(atom.value) if isinstance(atom, Constant) else values[atom]
    for alike in draws.in_groups(program):
        operands = [[read(atom) for atom in equation.inputs] for equation in alike]
        for equation, outputs in zip(alike, _apply_alike(alike, count, operands), strict=True):
            values.update(zip(equation.outputs, outputs, strict=True))
    return [read(atom) for atom in program.outputs]


def _apply_alike(
    alike: Sequence[Equation], count: int, operands: list[list[Value]]
) -> list[Sequence[Value]]:
    """What several equations give; draws that are alike are made at once, from stacked keys."""
    keys = [first for first, *_ in operands if isinstance(first, Keys)] if len(alike) > 1 else []
    if len(keys) < len(alike) or len({key.left.shape for key in keys}) > 1:
        apart = zip(alike, operands, strict=True)
        return [_apply(equation, count, own) for equation, own in apart]
    left, right = (jnp.stack(side) for side in zip(*((k.left, k.right) for k in keys), strict=True))
    (drawn,) = _of_keys(alike[0], count, [Keys(left, right, once=True), *operands[0][1:]])
    if isinstance(drawn, Keys):
        drawn = Keys(drawn.left, drawn.right, keys[0].once)
    return [[jax.tree.map(lambda leaf: leaf[index], drawn)] for index in range(len(alike))]


def _apply(equation: Equation, count: int, operands: list[Value]) -> Sequence[Value]:
    if all(isinstance(operand, Once) for operand in operands):
        return [Once(result) for result in equation.bind(*(operand.array for operand in operands))]
    if isinstance(equation.control, Scan):
        return _scan(equation.control, count, operands)
    if isinstance(equation.control, Cond) and isinstance(operands[0], Once):
        return _cond(equation.control, count, operands)
    if any(isinstance(operand, Keys) for operand in operands):
        return _of_keys(equation, count, operands)
    return [_take_in(result) for result in _rule(equation)(equation, count, operands)]


def _rule(equation: Equation) -> Rule:
    if equation.primitive in _RULES:
        return _RULES[equation.primitive]
    rule = _OPERATIONS.get(type(compat.operation(equation)))
    return _by_vmap if rule is None else rule


def _take_in(array: Array | Once, once: bool = False) -> Value:
    """An array with chains last; keys by their words, if we know how to draw from those."""
    if isinstance(array, Once):
        return array
    is_known = threefry.is_threefry(array)
    return Keys(*threefry.words(array), once) if is_known else PerChain(array)


def _of_keys(equation: Equation, count: int, operands: list[Value]) -> Sequence[Value]:
    """Draws from keys, and what becomes of keys as arrays."""
    first, *rest = operands
    if isinstance(first, Keys) and not rest and equation.primitive in _MOVES:
        return first.each(lambda words: _rule(equation)(equation, count, [words]))
    if isinstance(first, Keys):
        if equation.primitive == "random_clone":
            return [first]
        words = (first.left, first.right)
        match compat.operation(equation):
            case operations.SplitKeys(shape):
                return [Keys(*threefry.split(words, shape, first.once), first.once)]
            case operations.DrawWords(shape):
                return [PerChain(threefry.bits(words, shape, first.once))]
            case operations.FoldIn() if first.left.ndim == 1 or jnp.ndim(rest[0].array) == 0:
                data = jnp.asarray(rest[0].array, jnp.uint32)
                return [Keys(*threefry.fold_in(words, data, first.once), first.once)]
    typed: list[Value] = [
        PerChain(_per_chain(value, count)) if isinstance(value, Keys) else value
        for value in operands
    ]
    return [_take_in(result) for result in _by_vmap(equation, count, typed)]


def _per_chain(value: Value, count: int) -> Array:
    """The array with chains last, whether or not they differ."""
    if not isinstance(value, Once):
        return value.array
    array = jnp.asarray(value.array)
    return jax.lax.broadcast_in_dim(array, (*array.shape, count), tuple(range(array.ndim)))


def _by_vmap(equation: Equation, count: int, operands: list[Value]) -> Sequence[Array | Once]:
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
    shape = (*equation.outputs[0].shape, count)

    def whole(operand: Value):
        array = _per_chain(operand, count)
        return (
            array
            if array.ndim == len(shape)
            else jax.lax.broadcast_in_dim(array, shape, (len(shape) - 1,))
        )

    return equation.bind(*map(whole, operands))


def _same_axes(equation: Equation, count: int, operands: list[Value]) -> Sequence[Array]:
    """Operations on named axes: those come before the chains', so nothing changes."""
    return equation.bind(*(_per_chain(operand, count) for operand in operands))


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
    """Of many by a sum of floats, which the compiler vectorises; of truth values it does not."""
    if math.prod(array.shape[axis] for axis in over.axes) < _MANY_TRUTHS:
        return (jnp.all if over.of_all else jnp.any)(array, axis=over.axes)
    found = jnp.sum(jnp.where(array ^ over.of_all, 1.0, 0.0), axis=over.axes) > 0
    return ~found if over.of_all else found


def _pad(equation: Equation, count: int, operands: list[Value]) -> Sequence[Array | Once]:
    array, padding = operands
    operation = compat.operation(equation)
    if not isinstance(operation, operations.Pad) or not isinstance(padding, Once):
        return _by_vmap(equation, count, operands)
    value = jnp.asarray(padding.array)
    return [jax.lax.pad(_per_chain(array, count), value, (*operation.widths, (0, 0, 0)))]


def _dynamic_slice(equation: Equation, count: int, operands: list[Value]) -> Sequence[Array | Once]:
    """An entry of a short table, each chain at its own position, by comparisons (a gather is
    slower); or a common slice.
    """
    operation, (table, *starts) = compat.operation(equation), operands
    assert isinstance(operation, operations.DynamicSlice)
    if _are_common(starts):
        array, sizes = _per_chain(table, count), (*operation.sizes, count)
        at = _positions(starts)
        return [jax.lax.dynamic_slice(array, at, sizes, allow_negative_indices=False)]
    rows = jnp.asarray(table.array)
    if operation.sizes != (1,) or rows.shape[0] > _SHORT:
        return _by_vmap(equation, count, operands)
    position, entry = jnp.asarray(starts[0].array), jnp.broadcast_to(rows[0], (count,))
    for i in range(1, rows.shape[0]):
        entry = jnp.where(position >= i, rows[i], entry)
    return [entry[None]]


def _dynamic_update(
    equation: Equation, count: int, operands: list[Value]
) -> Sequence[Array | Once]:
    array, update, *starts = operands
    if not _are_common(starts):
        return _by_vmap(equation, count, operands)
    whole, part, at = _per_chain(array, count), _per_chain(update, count), _positions(starts)
    return [jax.lax.dynamic_update_slice(whole, part, at, allow_negative_indices=False)]


def _are_common(starts: Sequence[Value]) -> bool:
    return bool(starts) and all(isinstance(start, Once) for start in starts)


def _positions(starts: Sequence[Value]) -> list[Array]:
    """Positions that are the same for all chains, and that of the first chain."""
    positions = [jnp.asarray(start.array) for start in starts]
    return [*positions, jnp.zeros((), positions[0].dtype)]


def _bitcast(equation: Equation, count: int, operands: list[Value]) -> Sequence[Array | Once]:
    same = jnp.shape(operands[0].array)[:-1] == equation.outputs[0].shape
    return (_elementwise if same else _by_vmap)(equation, count, operands)


def _scan(loop: Scan, count: int, operands: list[Value]) -> list[Value]:
    """A scan with its loop inside out: one loop, of all chains."""
    edge = loop.num_constants + loop.num_carry
    constants, carry, xs = (
        operands[: loop.num_constants],
        operands[loop.num_constants : edge],
        operands[edge:],
    )
    per_chain = lambda values: [_for_each(value, count) for value in values]

    def step(carry, xs):
        results = per_chain(_run(loop.body, count, [*constants, *carry, *xs]))
        return results[: loop.num_carry], results[loop.num_carry :]

    carry, ys = jax.lax.scan(step, per_chain(carry), xs, loop.length, loop.reverse)
    return [*carry, *ys]


def _cond(choice: Cond, count: int, operands: list[Value]) -> list[Value]:
    """A branch that all chains take together."""
    index, *rest = operands

    def along(branch):
        return lambda *values: [
            _for_each(result, count) for result in _run(branch, count, list(values))
        ]

    return jax.lax.switch(
        jnp.asarray(index.array), [along(branch) for branch in choice.branches], *rest
    )


def _for_each(value: Value, count: int) -> Value:
    """The value with chains, so that loops and branches agree on what they pass on."""
    return value if isinstance(value, Keys) else _take_in(_per_chain(value, count))


_ELEMENTWISE = """ abs acos acosh add and asin asinh atan atan2 atanh cbrt ceil clamp
convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt
imag integer_pow is_finite le lgamma log log1p logistic lt max min mul ne neg nextafter not or
population_count pow real reduce_precision rem round rsqrt select_n shift_left
shift_right_arithmetic shift_right_logical sign sin sinh sqrt square sub tan tanh xor
"""

_ON_NAMED_AXES = """ argmax argmin concatenate cumlogsumexp cummax cummin cumprod cumsum
reduce_max reduce_min reduce_prod reduce_sum reduce_xor rev split squeeze stack
"""

# With more numbers than this a chain by itself needs no axis to be vectorised over.
_LARGE = 4096

# So many truth values and more are counted.
_MANY_TRUTHS = 16

# Tables up to this length are looked up by comparisons.
_SHORT = 16

# What takes keys from one place to another.
_MOVES = {
    "broadcast_in_dim",
    "copy",
    "copy_p",
    "dynamic_slice",
    "gather",
    "reshape",
    "rev",
    "slice",
    "split",
    "squeeze",
    "transpose",
}

_RULES: dict[str, Rule] = {
    **dict.fromkeys(_ELEMENTWISE.split(), _elementwise),
    **dict.fromkeys(_ON_NAMED_AXES.split(), _same_axes),
    "bitcast_convert_type": _bitcast,
}

_OPERATIONS: dict[type, Rule] = {
    operations.Broadcast: _of_one(_broadcast),
    operations.Reshape: _of_one(_reshape),
    operations.Slice: _of_one(_slice),
    operations.Transpose: _of_one(_transpose),
    operations.Logical: _of_one(_logical),
    operations.Pad: _pad,
    operations.DynamicSlice: _dynamic_slice,
    operations.DynamicUpdate: _dynamic_update,
}
