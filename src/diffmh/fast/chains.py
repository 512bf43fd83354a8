"""Chains last: `jax.vmap` over the last axis of every array, which stays the last axis in every
operation in between.

`jax.vmap(function, -1, -1)` means the same, but its rules bring the mapped axis to the front, and
the compiler then lays small states out with the chains apart in memory. Here neighbouring chains
are neighbours in memory whatever a state's shape, so that each operation is vectorised over them.
An operation that has no rule in `batching` is left to `jax.vmap`, and so is everything while
`plain_jax` is on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from ..jaxprs import compat, operations
from ..jaxprs.program import Cond, Constant, Equation, Program, Scan
from . import draws, plain_jax, threefry
from .batching import by_vmap, rule_of
from .per_chain import Keys, Once, PerChain, Value, for_each, per_chain, take_in
from .shard_map import varying

# With more numbers than this a chain by itself needs no axis to be vectorised over.
_LARGE = 4096


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
        results = _run(program, count, [take_in(leaf, draws_ahead) for leaf in leaves])
        return jax.tree.structure(form).unflatten([per_chain(value, count) for value in results])

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


def _run(program: Program, count: int, inputs: Sequence[Value]) -> list[Value]:
    # Invariant: an array in `values` either has chains as its last axis (`PerChain`, `Keys`) or is
    # the same for all of them (`Once`); without chains it has the shape of its atom.
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
    """The results of several equations; like draws are made at once, from stacked keys."""
    keys = [first for first, *_ in operands if isinstance(first, Keys)] if len(alike) > 1 else []
    if len(keys) < len(alike) or len({key.left.shape for key in keys}) > 1:
        apart = zip(alike, operands, strict=True)
        return [_apply(equation, count, own) for equation, own in apart]
    # Same operation, same shape of keys: by `draws.in_groups` none of them needs another's result,
    # and threefry's bits depend on each key alone, so the stacked draw is the draws stacked.
    left, right = (jnp.stack(side) for side in zip(*((k.left, k.right) for k in keys), strict=True))
    (drawn,) = _of_keys(alike[0], count, [Keys(left, right, once=True), *operands[0][1:]])
    if isinstance(drawn, Keys):
        drawn = Keys(drawn.left, drawn.right, keys[0].once)
    return [[jax.tree.map(lambda leaf: leaf[index], drawn)] for index in range(len(alike))]


def _apply(equation: Equation, count: int, operands: list[Value]) -> Sequence[Value]:
    if all(isinstance(operand, Once) for operand in operands):
        return [Once(result) for result in equation.bind(*(operand.array for operand in operands))]

    def inner(program, inputs):
        return [for_each(value, count) for value in _run(program, count, inputs)]

    match equation.control:
        case Scan() as loop:
            # The carry has the same form before and after a step, so an array that all chains share
            # at the start is broadcast too: the body may make it differ.
            constants, carry, xs = loop.parts(operands)
            return loop.run(inner, *constants, *(for_each(one, count) for one in carry), *xs)
        case Cond() as choice if isinstance(operands[0], Once):
            return choice.run(inner, jnp.asarray(operands[0].array), *operands[1:])
    if any(isinstance(operand, Keys) for operand in operands):
        return _of_keys(equation, count, operands)
    return [take_in(result) for result in rule_of(equation)(equation, count, operands)]


def _of_keys(equation: Equation, count: int, operands: list[Value]) -> Sequence[Value]:
    """Draws from keys, and what becomes of keys as arrays."""
    first, *rest = operands
    if isinstance(first, Keys) and not rest and equation.primitive in _MOVES:
        return first.each(lambda words: rule_of(equation)(equation, count, [words]))
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
        PerChain(per_chain(value, count)) if isinstance(value, Keys) else value
        for value in operands
    ]
    return [take_in(result) for result in by_vmap(equation, count, typed)]


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
