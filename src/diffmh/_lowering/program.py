"""Programs: jaxprs with their calls inlined, in terms of our own.

`compat` makes them; whatever reads a program reads these, and never a jaxpr's own parameters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True, eq=False)
class Variable:
    """A value's place in a program."""

    shape: tuple[int, ...]
    dtype: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Constant:
    """A literal, or a value that the program closes over."""

    value: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """Equations in order, from inputs to outputs."""

    inputs: tuple[Variable, ...]
    equations: tuple[Equation, ...]
    outputs: tuple[Variable | Constant, ...]


@dataclasses.dataclass(frozen=True)
class Scan:
    """`body(*constants, *carry, *slice of xs) -> (*carry, *slice of ys)`."""

    body: Program
    num_constants: int
    num_carry: int
    length: int
    reverse: bool


@dataclasses.dataclass(frozen=True)
class While:
    """`condition(*condition constants, *carry)`, `body(*body constants, *carry) -> carry`."""

    condition: Program
    body: Program
    num_condition_constants: int
    num_body_constants: int


@dataclasses.dataclass(frozen=True)
class Cond:
    """`branches[index](*operands)`; the index is the equation's first input."""

    branches: tuple[Program, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Equation:
    """`outputs = primitive(*inputs)`. `control` holds the inner programs of a loop or a
    conditional; `vouched` says that a user takes responsibility for its being continuous.
    """

    primitive: str
    inputs: tuple[Variable | Constant, ...]
    outputs: tuple[Variable, ...]
    params: dict[str, Any]
    control: Scan | While | Cond | None
    where: str
    _bind: Callable[..., tuple[Any, ...]]
    vouched: bool = False

    def bind(self, *operands: Any, **changed: Any) -> tuple[Any, ...]:
        """The primitive itself, under whatever transformations the operands are traced by, with
        some parameters changed.
        """
        return self._bind(*operands, **changed)
