"""The description of an operation that `chains` needs to give it one more axis. `params.operation`
creates it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Broadcast:
    """Broadcast to `shape`; the operand's axes become `axes` of the result."""

    shape: tuple[int, ...]
    axes: tuple[int, ...]


@dataclass(frozen=True)
class Reshape:
    """Reshape to `shape`, keeping the order of the elements."""

    shape: tuple[int, ...]


@dataclass(frozen=True)
class Slice:
    """Slice from `starts` to `limits` with `strides`."""

    starts: tuple[int, ...]
    limits: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Pad:
    """Low, high and interior padding of each axis, with the second operand."""

    widths: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Transpose:
    """Transpose: axis `axes[i]` of the operand becomes axis i."""

    axes: tuple[int, ...]


@dataclass(frozen=True)
class Logical:
    """Logical all or any over `axes`."""

    axes: tuple[int, ...]
    of_all: bool


@dataclass(frozen=True)
class DynamicSlice:
    """A slice of these sizes; the start indices are operands."""

    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Lookup:
    """One entry along the last axis of a table, at positions that are the second operand and are
    clipped to the table: `result[k, 0] = table[k, positions[k, 0]]`, where the table, or the
    positions, may be the same for all k and have no such axis.
    """


@dataclass(frozen=True)
class SplitKeys:
    """Split each key into `shape` keys."""

    shape: tuple[int, ...]


@dataclass(frozen=True)
class DrawWords:
    """Draw `shape` random 32-bit words from each key."""

    shape: tuple[int, ...]


@dataclass(frozen=True)
class FoldIn:
    """Fold a number into each key."""


Operation = (
    Broadcast
    | Reshape
    | Slice
    | Pad
    | Transpose
    | Logical
    | DynamicSlice
    | Lookup
    | SplitKeys
    | DrawWords
    | FoldIn
)
