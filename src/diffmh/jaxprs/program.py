"""Programs: jaxprs with their calls inlined, in our own data structures.

`inlining` creates them. All other code reads programs, never the parameters of a jaxpr.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, eq=False)
class Variable:
    """A variable of a program."""

    shape: tuple[int, ...]
    dtype: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Constant:
    """A literal, or a value that the program closes over."""

    value: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return np.shape(self.value)

    @property
    def dtype(self) -> Any:
        return jnp.result_type(self.value)


Atom = Variable | Constant


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """Equations in order, from inputs to outputs."""

    inputs: tuple[Variable, ...]
    equations: tuple[Equation, ...]
    outputs: tuple[Atom, ...]


@dataclasses.dataclass(frozen=True)
class Edges:
    """The passing of values between an equation and its inner programs.

    `into[i]` are the inner inputs that operand i initially becomes; `around` are pairs of an inner
    value and the inner input that it becomes next (in the next iteration, or in the condition);
    `out[j]` are the inner values that output j may be. An operand without an inner input (the index
    of a `Cond`) is a predicate.
    """

    into: tuple[tuple[Variable, ...], ...]
    around: tuple[tuple[Atom, Variable], ...]
    out: tuple[tuple[Atom, ...], ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Scan:
    """`body(*constants, *carry, *slice of xs) -> (*carry, *slice of ys)`."""

    body: Program
    num_constants: int
    num_carry: int
    length: int
    reverse: bool

    @property
    def programs(self) -> tuple[Program, ...]:
        return (self.body,)

    @property
    def carry(self) -> tuple[Variable, ...]:
        """The body's inputs that change between iterations."""
        return self.parts(self.body.inputs)[1]

    def parts(self, operands: Sequence[T]) -> tuple[tuple[T, ...], tuple[T, ...], tuple[T, ...]]:
        """Constants, initial values of the carry, and sliced operands."""
        edge = self.num_constants + self.num_carry
        return (
            tuple(operands[: self.num_constants]),
            tuple(operands[self.num_constants : edge]),
            tuple(operands[edge:]),
        )

    def edges(self) -> Edges:
        results, ys = self.body.outputs[: self.num_carry], self.body.outputs[self.num_carry :]
        return Edges(
            into=tuple((variable,) for variable in self.body.inputs),
            around=tuple(zip(results, self.carry, strict=True)),
            out=tuple((atom,) for atom in (*self.carry, *ys)),
        )


@dataclasses.dataclass(frozen=True, eq=False)
class While:
    """`condition(*condition constants, *carry)`, `body(*body constants, *carry) -> carry`."""

    condition: Program
    body: Program
    num_condition_constants: int
    num_body_constants: int

    @property
    def programs(self) -> tuple[Program, ...]:
        return (self.condition, self.body)

    @property
    def carry(self) -> tuple[Variable, ...]:
        """The body's inputs that change between iterations."""
        return self.body.inputs[self.num_body_constants :]

    @property
    def seen(self) -> tuple[Variable, ...]:
        """The same values as inputs of the condition."""
        return self.condition.inputs[self.num_condition_constants :]

    def parts(self, operands: Sequence[T]) -> tuple[tuple[T, ...], tuple[T, ...], tuple[T, ...]]:
        """Constants of the condition, constants of the body, and initial values of the carry."""
        edge = self.num_condition_constants + self.num_body_constants
        return (
            tuple(operands[: self.num_condition_constants]),
            tuple(operands[self.num_condition_constants : edge]),
            tuple(operands[edge:]),
        )

    def edges(self) -> Edges:
        constants = (
            *self.condition.inputs[: self.num_condition_constants],
            *self.body.inputs[: self.num_body_constants],
        )
        return Edges(
            into=tuple((variable,) for variable in (*constants, *self.carry)),
            around=(
                *zip(self.body.outputs, self.carry, strict=True),
                *zip(self.carry, self.seen, strict=True),
            ),
            out=tuple((variable,) for variable in self.carry),
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Cond:
    """`branches[index](*operands)`; the index is the equation's first input."""

    branches: tuple[Program, ...]

    @property
    def programs(self) -> tuple[Program, ...]:
        return self.branches

    def edges(self) -> Edges:
        inputs = zip(*(branch.inputs for branch in self.branches), strict=True)
        return Edges(
            into=((), *inputs),
            around=(),
            out=tuple(zip(*(branch.outputs for branch in self.branches), strict=True)),
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Equation:
    """`outputs = primitive(*inputs)`. `control` holds the inner programs of a loop or a
    conditional. `vouched` is True if the user declared it continuous.
    """

    primitive: str
    inputs: tuple[Atom, ...]
    outputs: tuple[Variable, ...]
    params: dict[str, Any]
    control: Scan | While | Cond | None
    where: str
    _bind: Callable[..., tuple[Any, ...]]
    vouched: bool = False

    @property
    def inner(self) -> tuple[Program, ...]:
        """The inner programs."""
        return () if self.control is None else self.control.programs

    def bind(self, *operands: Any, **changed: Any) -> tuple[Any, ...]:
        """Apply the primitive, under the transformations that trace the operands, with some
        parameters changed.
        """
        return self._bind(*operands, **changed)
