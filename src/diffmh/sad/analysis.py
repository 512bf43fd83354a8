"""What is known of a program before it is run: which values have tangents and alternatives, and
which are used only linearly.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp

from .._lowering.program import Cond, Equation, Program, Scan, Variable, While
from .._lowering.program import Constant as Constant
from . import primitives
from .samplers import SAMPLE

Atom = Variable | Constant


@dataclasses.dataclass
class Analysis:
    """Sets of variables: with a tangent; that may differ in an alternative (`branched`); of a
    continuous distribution; used only linearly on every way to the result (`linear`). `branching`
    holds the equations that give rise to alternatives."""

    tangent: set[Variable] = dataclasses.field(default_factory=set)
    branched: set[Variable] = dataclasses.field(default_factory=set)
    continuous: set[Variable] = dataclasses.field(default_factory=set)
    linear: set[Variable] = dataclasses.field(default_factory=set)
    branching: set[Equation] = dataclasses.field(default_factory=set)
    accumulated: set[Variable] = dataclasses.field(default_factory=set)

    def has_tangent(self, variable: Variable) -> bool:
        """At run time, when the alternatives of linear values have become tangents."""
        return variable in self.tangent or (
            variable in self.branched and variable in self.linear | self.accumulated
        )

    def has_alternative(self, variable: Variable) -> bool:
        return (
            variable in self.branched
            and variable not in self.linear
            and variable not in self.accumulated
        )

    def banks(self, equation: Equation) -> list[bool]:
        """Which operands an equation takes linearly, on the way to a result that is used
        linearly itself.
        """
        match equation.control:
            case Scan(body=body):
                return [variable in self.linear for variable in body.inputs]
            case While() as loop if self.stops_apart(loop):
                skip = loop.num_condition_constants + loop.num_body_constants
                return [False] * skip + [
                    variable in self.accumulated for variable in equation.outputs
                ]
            case While() as loop:
                return [False] * loop.num_condition_constants + [
                    variable in self.linear for variable in loop.body.inputs
                ]
            case Cond(branches=branches):
                inputs = zip(*(branch.inputs for branch in branches), strict=True)
                return [False] + [
                    all(variable in self.linear for variable in column) for column in inputs
                ]
            case _:
                if not all(output in self.linear for output in equation.outputs):
                    return [False] * len(equation.inputs)
                return primitives.linear_in(
                    equation, [atom not in self.branched for atom in equation.inputs]
                )

    def stops_apart(self, loop: While) -> bool:
        """Whether an alternative may leave a loop before or after the primal."""
        return loop.condition.outputs[0] in self.branched

    def num_uniforms(self, program: Program) -> int:
        """Uniforms that pruning needs: for each draw one to pick a candidate, if there are
        several, and one to prune it.
        """
        draws = [
            equation
            for equation in program.equations
            if equation in self.branching and equation.control is None
        ]
        return sum(1 + (num_candidates(equation) > 1) for equation in draws)


def num_candidates(equation: Equation) -> int:
    """How many flips a draw has."""
    described = lambda atom: (
        jnp.asarray(atom.value)
        if isinstance(atom, Constant)
        else jax.ShapeDtypeStruct(atom.shape, atom.dtype)
    )
    return equation.params["sampler"].num_candidates(
        equation.outputs[0], [described(atom) for atom in equation.inputs[1:]]
    )


def analyse(program: Program, differentiated: Iterable[Variable]) -> Analysis:
    """Forward to a fixed point for tangents and alternatives, then backward for linear use."""
    analysis = Analysis(tangent=set(differentiated))
    _until_stable(lambda: _forward(analysis, program), lambda: _size(analysis))
    analysis.linear = _linear(analysis, program)
    return analysis


def _size(analysis: Analysis) -> int:
    sets = (analysis.tangent, analysis.branched, analysis.continuous, analysis.branching)
    return sum(len(facts) for facts in sets)


def _until_stable(step, size) -> None:
    before = -1
    while size() != before:
        before = size()
        step()


def _forward(analysis: Analysis, program: Program) -> None:
    for equation in program.equations:
        match equation.control:
            case Scan() as loop:
                _flow(analysis, equation.inputs, loop.body.inputs)
                _forward(analysis, loop.body)
                carry = loop.body.inputs[loop.num_constants : loop.num_constants + loop.num_carry]
                _flow(analysis, loop.body.outputs[: loop.num_carry], carry)
                _flow(analysis, carry, equation.outputs[: loop.num_carry])
                _flow(
                    analysis,
                    loop.body.outputs[loop.num_carry :],
                    equation.outputs[loop.num_carry :],
                )
                inner = (loop.body,)
            case While() as loop:
                num_condition, num_body = loop.num_condition_constants, loop.num_body_constants
                carry = loop.body.inputs[num_body:]
                _flow(analysis, equation.inputs[num_condition:], loop.body.inputs)
                _flow(
                    analysis, equation.inputs[:num_condition], loop.condition.inputs[:num_condition]
                )
                _forward(analysis, loop.body)
                _flow(analysis, loop.body.outputs, carry)
                _flow(analysis, carry, loop.condition.inputs[num_condition:])
                _forward(analysis, loop.condition)
                _flow(analysis, carry, equation.outputs)
                if analysis.stops_apart(loop):
                    analysis.branched.update(carry)
                inner = (loop.body, loop.condition)
            case Cond() as choice:
                branches = choice.branches
                for branch in branches:
                    _flow(analysis, equation.inputs[1:], branch.inputs)
                    _forward(analysis, branch)
                    _flow(analysis, branch.outputs, equation.outputs)
                if equation.inputs[0] in analysis.branched:
                    analysis.branched.update(equation.outputs)
                inner = branches
            case None:
                _forward_primitive(analysis, equation)
                continue
        if any(nested in analysis.branching for part in inner for nested in part.equations):
            analysis.branching.add(equation)


def _forward_primitive(analysis: Analysis, equation: Equation) -> None:
    inputs = equation.inputs
    differentiated, branched = (
        any(atom in facts for atom in inputs) for facts in (analysis.tangent, analysis.branched)
    )
    if equation.primitive == SAMPLE:
        if differentiated:
            analysis.branching.add(equation)
        branched, differentiated = branched or differentiated, False
    is_continuous = primitives.continuous(
        equation, [atom in analysis.continuous for atom in inputs]
    )
    for output in equation.outputs:
        if differentiated and jnp.issubdtype(output.dtype, jnp.floating):
            analysis.tangent.add(output)
        if branched:
            analysis.branched.add(output)
        if is_continuous and output.dtype != jnp.bool_:
            analysis.continuous.add(output)


def _flow(analysis: Analysis, sources: Sequence[Atom], targets: Sequence[Variable]) -> None:
    """What is known of the sources holds of the targets."""
    for source, target in zip(sources, targets, strict=True):
        for facts in (analysis.tangent, analysis.branched, analysis.continuous):
            if source in facts:
                facts.add(target)


def _linear(analysis: Analysis, program: Program) -> set[Variable]:
    """The greatest set of float variables each of whose uses is linear with results in the set;
    the program's outputs are free.
    """
    variables: set[Variable] = set()
    # A use of a variable asks that all of some others be linear too; an impossible one asks it of
    # `None`.
    uses: list[tuple[Atom, tuple[Variable | None, ...]]] = []
    accumulators: list[tuple[Variable, While]] = []
    _collect(analysis, program, variables, uses, accumulators)
    linear = {variable for variable in variables if jnp.issubdtype(variable.dtype, jnp.floating)}
    prune = lambda: linear.difference_update(
        [atom for atom, targets in uses if not linear.issuperset(targets)]
    )  # pyright: ignore
    _until_stable(prune, lambda: len(linear))
    analysis.accumulated = {variable for variable, _ in accumulators if variable in linear}
    return linear


def _collect(analysis, program, variables, uses, accumulators) -> None:
    variables.update(program.inputs)
    nonlinear = (None,)
    for equation in program.equations:
        variables.update(equation.outputs)
        inner: tuple[Program, ...] = ()
        match equation.control:
            case Scan() as loop:
                carry = loop.body.inputs[loop.num_constants : loop.num_constants + loop.num_carry]
                uses.extend(
                    (atom, (variable,))
                    for atom, variable in zip(equation.inputs, loop.body.inputs, strict=True)
                )
                _collect_carry(uses, loop.body.outputs, carry, equation.outputs)
                inner = (loop.body,)
            case While() as loop:
                num_condition, num_body = loop.num_condition_constants, loop.num_body_constants
                carry, init = (
                    loop.body.inputs[num_body:],
                    equation.inputs[num_condition + num_body :],
                )
                uses.extend((atom, nonlinear) for atom in equation.inputs[:num_condition])
                uses.extend((atom, nonlinear) for atom in loop.condition.outputs)
                constants = zip(
                    equation.inputs[num_condition:], loop.body.inputs[:num_body], strict=False
                )
                uses.extend((atom, (variable,)) for atom, variable in constants)
                if analysis.stops_apart(loop):
                    uses.extend((atom, nonlinear) for atom in (*carry, *loop.body.outputs))
                    for index, (atom, output) in enumerate(
                        zip(init, equation.outputs, strict=True)
                    ):
                        if _accumulates(loop, index):
                            accumulators.append((output, loop))
                            uses.append((atom, (output,)))
                        else:
                            uses.append((atom, nonlinear))
                else:
                    uses.extend(
                        (atom, (variable,)) for atom, variable in zip(init, carry, strict=True)
                    )
                    seen = loop.condition.inputs[num_condition:]
                    uses.extend(
                        (variable, (other,)) for variable, other in zip(carry, seen, strict=True)
                    )
                    _collect_carry(uses, loop.body.outputs, carry, equation.outputs)
                inner = (loop.body, loop.condition)
            case Cond() as choice:
                branches = choice.branches
                uses.append((equation.inputs[0], nonlinear))
                fixed = equation.inputs[0] not in analysis.branched
                for branch in branches:
                    uses.extend(
                        (atom, (variable,))
                        for atom, variable in zip(equation.inputs[1:], branch.inputs, strict=True)
                    )
                    outputs = zip(branch.outputs, equation.outputs, strict=True)
                    uses.extend(
                        (atom, (output,) if fixed else nonlinear) for atom, output in outputs
                    )
                inner = branches
            case None:
                fixed = [atom not in analysis.branched for atom in equation.inputs]
                flags = primitives.linear_in(equation, fixed)
                uses.extend(
                    (atom, equation.outputs if flag else nonlinear)
                    for atom, flag in zip(equation.inputs, flags, strict=True)
                )
                continue
        for part in inner:
            _collect(analysis, part, variables, uses, accumulators)


def _collect_carry(uses, body_outputs, carry, outputs) -> None:
    """A carried value is linear only if its next round and its last are."""
    for atom, variable, output in zip(body_outputs, carry, outputs, strict=False):
        uses.extend([(atom, (variable, output)), (variable, (output,))])
    uses.extend(
        (atom, (output,))
        for atom, output in zip(body_outputs[len(carry) :], outputs[len(carry) :], strict=True)
    )


def _accumulates(loop: While, index: int) -> bool:
    """Whether a float carry is only ever added to: `s + term`, and nothing else looks at it."""
    variable = loop.body.inputs[loop.num_body_constants + index]
    if loop.condition.inputs[loop.num_condition_constants + index] in _used(loop.condition):
        return False
    target = loop.body.outputs[index]
    if not jnp.issubdtype(variable.dtype, jnp.floating):
        return False
    while variable is not target:
        users = [
            equation
            for equation in loop.body.equations
            for atom in equation.inputs
            if atom is variable
        ]
        if len(users) != 1 or variable in loop.body.outputs:
            return False
        (equation,) = users
        adds = equation.primitive in ("add", "add_any") or (
            equation.primitive == "sub" and equation.inputs[0] is variable
        )
        if not adds or equation.outputs[0].shape != variable.shape:
            return False
        variable = equation.outputs[0]
    users = [
        equation for equation in loop.body.equations for atom in equation.inputs if atom is variable
    ]
    return not users and sum(atom is target for atom in loop.body.outputs) == 1


def _used(program: Program) -> set[Atom]:
    return {atom for equation in program.equations for atom in equation.inputs} | set(
        program.outputs
    )
