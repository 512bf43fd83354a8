"""Indices: the position in an operand of an entry of the result, if an operation moves entries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..jaxprs import compat
from ..jaxprs.program import Atom, Equation

# The position of an entry in an array: on each axis a number, or `offset + stride · label`.
Index = tuple[Any, ...]
_SAME_VALUE = {"copy", "copy_p", "name", "optimization_barrier", "pvary", "reduce_precision"} | {
    *("stop_gradient", "device_put")
}


def anywhere(shape: Sequence[int]) -> Index:
    return tuple(0 if size == 1 else (axis, 1, 0) for axis, size in enumerate(shape))


def entry_of(atom: Atom, index: Index) -> Index:
    """The index of an operand of an elementwise operation, which may broadcast axes of length 1."""
    shape = atom.shape
    return tuple(0 if size == 1 else place for size, place in zip(shape, index, strict=bool(shape)))


def moved_index(equation: Equation, index: Index) -> Index | None:
    """The position of an entry of the result in the first operand, if it was only moved."""
    name = equation.primitive
    if name in _SAME_VALUE:
        return index
    if name == "expand_dims" or not equation.inputs:
        return None
    shape = equation.inputs[0].shape
    moved = compat.moved_entry(equation, index)
    if moved is not None:
        return tuple(0 if size == 1 else place for size, place in zip(shape, moved, strict=True))
    if name in ("reshape", "squeeze"):
        return _reshaped(shape, equation.outputs[0].shape, index)
    return None


def _reshaped(shape: Sequence[int], into: Sequence[int], index: Index) -> Index | None:
    """The index in the reshaped array, if only axes of length one are added or removed."""
    # Row-major order with axes of length one inserted or removed is the same order.
    if [n for n in shape if n != 1] != [n for n in into if n != 1]:
        return None
    places = iter(place for size, place in zip(into, index, strict=True) if size != 1)
    return tuple(0 if size == 1 else next(places) for size in shape)


def part_of(equation: Equation, index: Index) -> tuple[Atom, Index] | None:
    """The operand of a `concatenate` or a `stack` that an entry comes from, if known."""
    axis = compat.joined_axis(equation)
    place, rest = index[axis], index[axis + 1 :]
    if not isinstance(place, int):
        return None
    if equation.primitive == "stack":
        return equation.inputs[place], (*index[:axis], *rest)
    for part in equation.inputs:
        length = part.shape[axis]
        if place < length:
            return part, (*index[:axis], place, *rest)
        place -= length
    return None


def is_one_place(index: Index) -> bool:
    return all(isinstance(place, int) for place in index)
