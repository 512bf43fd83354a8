"""What `chains` has to know of an equation to give it one more axis: `compat.operation` reads it
off.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Broadcast:
    """To `shape`, the operand's axes becoming `axes` of the result."""

    shape: tuple[int, ...]
    axes: tuple[int, ...]


@dataclass(frozen=True)
class Reshape:
    """To `shape`, in the order of the elements."""

    shape: tuple[int, ...]


@dataclass(frozen=True)
class Slice:
    """From `starts` up to `limits` in steps of `strides`."""

    starts: tuple[int, ...]
    limits: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Pad:
    """Low, high and interior padding of each axis, with the second operand."""

    widths: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Transpose:
    """Axis `axes[i]` of the operand becomes axis i."""

    axes: tuple[int, ...]


@dataclass(frozen=True)
class Logical:
    """True if all, or any, are true over `axes`."""

    axes: tuple[int, ...]
    of_all: bool


@dataclass(frozen=True)
class DynamicSlice:
    """A slice of these sizes, from positions that are operands."""

    sizes: tuple[int, ...]


@dataclass(frozen=True)
class DynamicUpdate:
    """The second operand written over the first, at positions that are the other operands."""


@dataclass(frozen=True)
class SplitKeys:
    """`shape` keys from each."""

    shape: tuple[int, ...]


@dataclass(frozen=True)
class DrawWords:
    """`shape` words of 32 bits from each key."""

    shape: tuple[int, ...]


@dataclass(frozen=True)
class FoldIn:
    """A key from each key and number."""


Operation = (
    Broadcast
    | Reshape
    | Slice
    | Pad
    | Transpose
    | Logical
    | DynamicSlice
    | DynamicUpdate
    | SplitKeys
    | DrawWords
    | FoldIn
)
