"""Programs: jaxprs with their calls inlined, in our own data structures.

`inlining` creates them. All other code reads programs, never the parameters of a jaxpr.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

T = TypeVar("T")
Three = tuple[tuple[T, ...], tuple[T, ...], tuple[T, ...]]


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
    def known(self) -> np.ndarray | None:
        """The value as an array; `None` if it is being traced."""
        return None if isinstance(self.value, Tracer) else np.asarray(self.value)

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

    def run(
        self,
        inputs: Sequence[Any],
        apply: Callable[[Equation, list[Any]], Iterable[Any]],
        constant: Callable[[Any], Any] = lambda value: value,
    ) -> list[Any]:
        """The outputs. `apply` gives the results of an equation, `constant` the operand that a
        constant is.
        """
        values: dict[Any, Any] = dict(zip(self.inputs, inputs, strict=True))

        def read(atom: Atom) -> Any:
            return constant(atom.value) if isinstance(atom, Constant) else values[atom]

        for equation in self.equations:
            outputs = apply(equation, list(map(read, equation.inputs)))
            values.update(zip(equation.outputs, outputs, strict=True))
        return list(map(read, self.outputs))


# Gives the outputs of an inner program.
Inner = Callable[[Program, list[Any]], list[Any]]


def _in_three(operands: Sequence[T], first: int, second: int) -> Three[T]:
    edge = first + second
    return tuple(operands[:first]), tuple(operands[first:edge]), tuple(operands[edge:])


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

    def parts(self, operands: Sequence[T]) -> Three[T]:
        """Constants, initial values of the carry, and sliced operands."""
        return _in_three(operands, self.num_constants, self.num_carry)

    def run(self, inner: Inner, *operands: Any) -> list[Any]:
        """The outputs, by a loop of JAX."""
        constants, start, xs = self.parts(operands)

        def step(carried, xs):
            outputs = inner(self.body, [*constants, *carried, *xs])
            return outputs[: self.num_carry], outputs[self.num_carry :]

        carried, ys = jax.lax.scan(step, list(start), list(xs), self.length, self.reverse)
        return [*carried, *ys]

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

    def parts(self, operands: Sequence[T]) -> Three[T]:
        """Constants of the condition, constants of the body, and initial values of the carry."""
        return _in_three(operands, self.num_condition_constants, self.num_body_constants)

    def run(self, inner: Inner, *operands: Any) -> list[Any]:
        """The outputs, by a loop of JAX."""
        for_condition, for_body, start = self.parts(operands)

        def goes_on(carried):
            return inner(self.condition, [*for_condition, *carried])[0]

        def step(carried):
            return inner(self.body, [*for_body, *carried])

        return jax.lax.while_loop(goes_on, step, list(start))

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

    def run(self, inner: Inner, index: Any, *operands: Any) -> list[Any]:
        """The outputs, by a conditional of JAX."""
        branches = [functools.partial(inner, branch) for branch in self.branches]
        return jax.lax.switch(index, branches, list(operands))

    def edges(self) -> Edges:
        inputs = zip(*(branch.inputs for branch in self.branches), strict=True)
        return Edges(
            into=((), *inputs),
            around=(),
            out=tuple(zip(*(branch.outputs for branch in self.branches), strict=True)),
        )


Control = Scan | While | Cond


@dataclasses.dataclass(frozen=True, eq=False)
class Equation:
    """`outputs = primitive(*inputs)`. `control` holds the inner programs of a loop or a
    conditional. `vouched` is True if the user declared it continuous.
    """

    primitive: str
    inputs: tuple[Atom, ...]
    outputs: tuple[Variable, ...]
    params: dict[str, Any]
    control: Control | None
    where: str
    _bind: Callable[..., tuple[Any, ...]]
    vouched: bool = False

    @property
    def inner(self) -> tuple[Program, ...]:
        """The inner programs."""
        return () if self.control is None else self.control.programs

    @property
    def decider(self) -> Atom | None:
        """The value that decides which branch is taken, or whether a `While` goes on."""
        if isinstance(self.control, Cond):
            return self.inputs[0]
        return self.control.condition.outputs[0] if isinstance(self.control, While) else None

    def bind(self, *operands: Any, **changed: Any) -> tuple[Any, ...]:
        """Apply the primitive, under the transformations that trace the operands, with some
        parameters changed.
        """
        return self._bind(*operands, **changed)


def every_equation(program: Program) -> Iterator[Equation]:
    """The equations of a program and of its inner programs."""
    for equation in program.equations:
        yield equation
        for inner in equation.inner:
            yield from every_equation(inner)


def until_stable(step: Callable[[], None], facts: Iterable[set]) -> None:
    """Repeat `step` until the sets no longer change. Each step must only add to a set or only
    remove from it, so comparing sizes is enough.
    """
    # Terminates: the sets are finite and change in one direction only.
    before = -1
    while (size := sum(map(len, facts))) != before:
        before = size
        step()


def spread(
    equation: Equation, facts: Iterable[set[Variable]], within: Callable[[Program], None]
) -> None:
    """Pass facts through a loop or a conditional: a fact about an operand holds for the variable
    that it is passed to. `within` handles the inner programs.
    """
    assert equation.control is not None
    edges = equation.control.edges()
    # One pass over the edges: `until_stable` repeats it, so facts also reach earlier iterations.
    for operand, targets in zip(equation.inputs, edges.into, strict=True):
        _flow(facts, operand, targets)
    for inner in equation.inner:
        within(inner)
    for source, target in edges.around:
        _flow(facts, source, (target,))
    for output, sources in zip(equation.outputs, edges.out, strict=True):
        for source in sources:
            _flow(facts, source, (output,))


def _flow(facts: Iterable[set[Variable]], source: Atom, targets: Iterable[Variable]) -> None:
    for found in facts:
        if source in found:
            found.update(targets)
