"""Detect keys that are used twice. Draws that share a key are not independent, so flipping only one
of them leads to an impossible state.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..base.validate import NotDifferentiable
from ..jaxprs import compat, operations
from ..jaxprs.program import Atom, Cond, Constant, Equation, Program, Scan, Variable
from .analysis import Analysis
from .draw import SAMPLE

BITS = "random_bits"


@dataclasses.dataclass(frozen=True)
class Source:
    """The origin of a value: equal sources give equal values. `loops` are the loops in which the
    value changes.
    """

    number: int
    loops: frozenset[int]


class Sources:
    """Numbers that identify values: the same computation gets the same number."""

    def __init__(self):
        self._numbers: dict[Any, int] = {}
        self._made_by: dict[int, tuple[Equation, tuple[int, ...]]] = {}
        self._fresh = itertools.count()

    def fresh(self, loops: frozenset[int] = frozenset()) -> Source:
        return self.of(("fresh", next(self._fresh)), loops)

    def of(self, description: Any, loops: frozenset[int]) -> Source:
        return Source(self._numbers.setdefault(description, len(self._numbers)), loops)

    def constant(self, atom: Constant) -> Source:
        value = atom.value
        if np.ndim(value) or not isinstance(value, int | float | bool | np.generic | np.ndarray):
            return self.of(("object", id(value)), frozenset())
        return self.of(("number", str(jnp.result_type(value)), str(value)), frozenset())

    def result(self, equation: Equation, inputs: Sequence[Source], index: int) -> Source:
        # A value changes with a loop iff one of its operands does.
        loops = frozenset[int]().union(*(source.loops for source in inputs))
        numbers = tuple(source.number for source in inputs)
        child = self._child(equation, numbers, index)
        if child is not None:
            return self.of(child, loops)
        made = self.of((equation.primitive, _described(equation), numbers, index), loops)
        self._made_by[made.number] = (equation, numbers)
        return made

    def _child(self, equation: Equation, numbers: tuple[int, ...], index: int) -> Any:
        """The i-th child of a key, if the generator makes each child independently. Then the i-th
        key of a split, whatever its length, equals the key folded with i.
        """
        if not _makes_children_alone(equation.outputs[0]):
            return None
        if equation.primitive == "random_fold_in":
            which = equation.inputs[1]
            if isinstance(which, Constant) and not np.ndim(which.value):
                return ("child", numbers[0], int(which.value))
            return None
        if equation.primitive == "unstack":
            return self._of_split(numbers[0], index)
        taken = self._made_by.get(numbers[0]) if equation.primitive == "squeeze" else None
        part = compat.operation(taken[0]) if taken is not None else None
        if taken is None or not isinstance(part, operations.Slice) or len(part.starts) != 1:
            return None
        return self._of_split(taken[1][0], part.starts[0])

    def _of_split(self, keys: int, index: int) -> Any:
        """The i-th of an array of keys, if they are those of a split."""
        split = self._made_by.get(keys)
        if (
            split is None
            or split[0].primitive != "random_split"
            or len(split[0].outputs[0].shape) != 1
        ):
            return None
        return ("child", split[1][0], index)


def _makes_children_alone(key: Variable) -> bool:
    one_by_one = jax.config.jax_threefry_partitionable  # pyright: ignore
    return one_by_one and str(key.dtype) == "key<fry>"


def _described(equation: Equation) -> str:
    """A description of an operation. For a slice, strides of 1 and no strides are the same."""
    part = compat.operation(equation)
    return str(part) if isinstance(part, operations.Slice) else compat.parameters_of(equation)


def refuse_shared(analysis: Analysis, program: Program) -> None:
    """Raise an error if a draw that depends on theta provably shares its key with another use."""
    if analysis.branching:
        sources = Sources()
        inputs = [sources.fresh() for _ in program.inputs]
        _follow(analysis, sources, program, inputs, frozenset(), {})


Uses = Mapping[int, Equation]


def _follow(
    analysis: Analysis,
    sources: Sources,
    program: Program,
    inputs: Sequence[Source],
    loops: frozenset[int],
    uses: Uses,
) -> Uses:
    """The uses of keys after a program, by the key's number."""
    known: dict[Atom, Source] = dict(zip(program.inputs, inputs, strict=True))
    draws = _draws_by_bits(program)
    for equation in program.equations:
        taken = [
            sources.constant(atom) if isinstance(atom, Constant) else known[atom]
            for atom in equation.inputs
        ]
        # An inner program's results are unknown: a fresh source never equals another.
        if equation.control is not None:
            uses = _follow_inside(analysis, sources, equation, taken, loops, uses)
            known.update((output, sources.fresh(loops)) for output in equation.outputs)
            continue
        for index, output in enumerate(equation.outputs):
            known[output] = sources.result(equation, taken, index)
        if equation.primitive == BITS:
            user = draws.get(equation, equation)
            # A `vmap` over one key makes more draws than bits: its lanes share the key.
            other = uses.get(taken[0].number)
            lanes = math.prod(user.outputs[0].shape) > math.prod(equation.outputs[0].shape)
            _refuse(analysis, user, other, loops - taken[0].loops, lanes)
            uses = {**uses, taken[0].number: user}
    return uses


def _follow_inside(analysis, sources, equation, taken, loops, uses) -> Uses:
    control = equation.control
    if isinstance(control, Cond):
        # Only one of the branches is taken.
        after = [
            _follow(analysis, sources, branch, taken[1:], loops, uses)
            for branch in control.branches
        ]
        return {key: user for found in (uses, *after) for key, user in found.items()}
    # A key that does not change in the loop is used again in the next iteration.
    once = isinstance(control, Scan) and control.length < 2
    within = loops if once else loops | {id(equation)}
    # All that is known of carried values and slices is that they change with this loop. Constants
    # of the loop are the values outside.
    edges = control.edges()
    changing = {target: sources.fresh(within) for _, target in edges.around}
    entering = zip(equation.inputs, taken, edges.into, strict=True)
    given = {target: source for _, source, targets in entering for target in targets}
    if isinstance(control, Scan):
        for variable in control.parts(control.body.inputs)[2]:
            changing[variable] = sources.fresh(given[variable].loops | (within - loops))
    known = given | changing
    for inner in equation.inner:
        inputs = [known[variable] for variable in inner.inputs]
        uses = _follow(analysis, sources, inner, inputs, within, uses)
    return uses


def _draws_by_bits(program: Program) -> dict[Equation, Equation]:
    """The draws of `sad`, by the equation that generates their random bits."""
    defined_by = {output: equation for equation in program.equations for output in equation.outputs}
    found = {}
    for equation in program.equations:
        if equation.primitive == SAMPLE:
            bits = _bits(equation.inputs[0], defined_by)
            if bits is not None:
                found[bits] = equation
    return found


def _bits(uniform: Atom, defined_by: Mapping[Variable, Equation]) -> Equation | None:
    """The equation that generates the bits of a uniform."""
    waiting = [uniform]
    while waiting:
        atom = waiting.pop()
        if isinstance(atom, Variable) and atom in defined_by:
            equation = defined_by[atom]
            if equation.primitive == BITS:
                return equation
            waiting.extend(equation.inputs)
    return None


def _refuse(
    analysis: Analysis,
    user: Equation,
    other: Equation | None,
    loops: frozenset[int],
    lanes: bool,
) -> None:
    advice = "each draw needs its own key, from `jax.random.split` or `jax.random.fold_in`."
    if other is not None and not analysis.branching.isdisjoint((user, other)):
        raise NotDifferentiable(
            f"One key is used twice, at {other.where or 'a draw'} and at {user.where or 'a draw'},"
            f" and one of the draws depends on theta: {advice}"
        )
    if user in analysis.branching and (loops or lanes):
        many = "every iteration of a loop" if loops else "every lane of a `vmap`"
        raise NotDifferentiable(
            f"One key is used in {many} by a draw that depends on theta, at {user.where}: {advice}"
        )
