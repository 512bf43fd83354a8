"""The facts known of a program before it is run: which values have tangents and alternatives, and
which are used only linearly.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence

import jax
import jax.numpy as jnp

from ..jaxprs.program import (
    Atom,
    Cond,
    Equation,
    Program,
    Scan,
    Variable,
    While,
    every_equation,
    spread,
    until_stable,
)
from . import primitives
from .draw import SAMPLE, VALID

# A use requires that all of its targets be linear too. A nonlinear use has the target `None`.
Use = tuple[Atom, tuple[Variable | None, ...]]
_NONLINEAR = (None,)


@dataclasses.dataclass
class Analysis:
    """Sets of variables of a program.

    `tangent`: has a tangent; `branched`: may differ in an alternative; `linear`: used only linearly
    on every path to the result; `accumulated`: a carried sum of a loop that may be left at
    different times; `matters`: reaches the result other than through `stop_gradient`. `branching`
    holds the equations in which alternatives are born or dropped."""

    tangent: set[Variable] = dataclasses.field(default_factory=set)
    branched: set[Variable] = dataclasses.field(default_factory=set)
    continuous: set[Variable] = dataclasses.field(default_factory=set)
    linear: set[Variable] = dataclasses.field(default_factory=set)
    accumulated: set[Variable] = dataclasses.field(default_factory=set)
    matters: set[Variable] = dataclasses.field(default_factory=set)
    branching: set[Equation] = dataclasses.field(default_factory=set)

    def has_tangent(self, variable: Variable) -> bool:
        """True if a value has a tangent at run time, where linear alternatives become tangents."""
        return variable in self.tangent or (variable in self.branched and self._is_banked(variable))

    def has_alternative(self, variable: Variable) -> bool:
        return variable in self.branched and not self._is_banked(variable)

    def _is_banked(self, variable: Variable) -> bool:
        return variable in self.linear or variable in self.accumulated

    def concerns(self, equation: Equation) -> bool:
        """True if a derivative depends on what the equation computes."""
        if equation.primitive == VALID:
            return False  # The flag depends on the primal alone.
        return equation in self.branching or any(
            atom in self.tangent or atom in self.branched for atom in equation.inputs
        )

    def banks(self, equation: Equation) -> list[bool]:
        """For each operand, True if the equation takes it linearly and its own result is used
        linearly.
        """
        control = equation.control
        if control is None:
            if not self.linear.issuperset(equation.outputs):
                return [False] * len(equation.inputs)
            return primitives.linear_in(equation, self.fixed(equation))
        flags = [
            bool(targets) and self.linear.issuperset(targets) for targets in control.edges().into
        ]
        # In a loop that is left at different times, a carried sum is banked at the end of each
        # iteration (`_WhileRun.accumulated`), though its variables inside are not linear.
        if isinstance(control, While) and self.goes_apart(equation):
            constants = len(flags) - len(equation.outputs)
            flags[constants:] = [output in self.accumulated for output in equation.outputs]
        return flags

    def fixed(self, equation: Equation) -> list[bool]:
        """For each operand, True if it is the same in every alternative."""
        return [atom not in self.branched for atom in equation.inputs]

    def goes_apart(self, equation: Equation) -> bool:
        """True if an alternative may take another branch or leave a loop at another time."""
        return equation.decider in self.branched

    def num_uniforms(self, program: Program) -> int:
        """The number of uniforms that pruning needs: for each draw one to pick a candidate, if
        there are several, and one to prune. Draws in the branches of a conditional count too.
        """
        return sum(
            self._num_uniforms_of(equation)
            for equation in program.equations
            if equation in self.branching
        )

    def _num_uniforms_of(self, equation: Equation) -> int:
        if isinstance(equation.control, Cond):
            return sum(map(self.num_uniforms, equation.control.branches))
        return 1 + (num_candidates(equation) > 1) if equation.control is None else 0


def num_candidates(equation: Equation) -> int:
    """The number of flips of a draw."""
    parameters = [jax.ShapeDtypeStruct(atom.shape, atom.dtype) for atom in equation.inputs[1:]]
    return equation.params["sampler"].num_candidates(equation.outputs[0], parameters)


def analyse(program: Program, differentiated: Iterable[Variable]) -> Analysis:
    """Propagate tangents and alternatives forward to a fixed point, then linear use backward."""
    analysis = Analysis(tangent=set(differentiated))
    facts = (analysis.tangent, analysis.branched, analysis.continuous, analysis.branching)
    until_stable(functools.partial(_forward, analysis, program), facts)
    # Linear use depends on which operands are fixed, so on `branched`, which must be final here.
    _find_linear(analysis, program)
    analysis.matters.update(atom for atom in program.outputs if isinstance(atom, Variable))
    until_stable(functools.partial(_backward, analysis, program), (analysis.matters,))
    return analysis


def _forward(analysis: Analysis, program: Program) -> None:
    for equation in program.equations:
        if equation.control is None:
            _forward_primitive(analysis, equation)
        else:
            _forward_control(analysis, equation)


def _forward_control(analysis: Analysis, equation: Equation) -> None:
    facts = (analysis.tangent, analysis.branched, analysis.continuous)
    spread(equation, facts, functools.partial(_forward, analysis))
    apart = analysis.goes_apart(equation)
    if apart:
        # If alternatives may take another branch, even an output that each branch computes in the
        # same way may differ.
        analysis.branched.update(equation.outputs)
        if isinstance(equation.control, While):
            analysis.branched.update((*equation.control.carry, *equation.control.seen))
    # A loop that is left at different times drops alternatives at its end even without draws.
    if (apart and isinstance(equation.control, While)) or any(
        nested in analysis.branching for inner in equation.inner for nested in inner.equations
    ):
        analysis.branching.add(equation)


def _forward_primitive(analysis: Analysis, equation: Equation) -> None:
    if equation.primitive == VALID:
        return  # The flag depends on the primal alone.
    inputs = equation.inputs
    differentiated, branched = (
        any(atom in facts for atom in inputs) for facts in (analysis.tangent, analysis.branched)
    )
    if equation.primitive == SAMPLE:
        if differentiated:
            analysis.branching.add(equation)
        # A draw is discrete: theta acts through flips of its outcome, never through a tangent.
        branched, differentiated = branched or differentiated, False
    if equation.primitive in primitives.STOPPED:
        differentiated = False
    is_continuous = primitives.continuous(
        equation, [atom in analysis.continuous for atom in inputs]
    )
    for output in equation.outputs:
        if differentiated and jnp.issubdtype(output.dtype, jnp.inexact):
            analysis.tangent.add(output)
        if branched:
            analysis.branched.add(output)
        if is_continuous and output.dtype != jnp.bool_:
            analysis.continuous.add(output)


def _backward(analysis: Analysis, program: Program) -> None:
    """Mark every value that reaches a value that matters."""
    matters = analysis.matters

    def matter(atoms: Iterable[Atom]) -> None:
        matters.update(atom for atom in atoms if isinstance(atom, Variable))

    # In reverse order, so that all uses of an equation's outputs are known before its inputs.
    for equation in reversed(program.equations):
        if equation.control is None:
            if matters.intersection(equation.outputs) and (
                equation.primitive not in primitives.STOPPED
            ):
                matter(equation.inputs)
            continue
        edges = equation.control.edges()
        for output, sources in zip(equation.outputs, edges.out, strict=True):
            matter(sources if output in matters else ())
        # A predicate matters if any output does: it decides which values the outputs have.
        if equation.decider is not None and matters.intersection(equation.outputs):
            matter((equation.decider,))
        for source, target in edges.around:
            matter((source,) if target in matters else ())
        for inner in equation.inner:
            _backward(analysis, inner)
        for operand, targets in zip(equation.inputs, edges.into, strict=True):
            matter((operand,) if matters.intersection(targets) else ())


def _find_linear(analysis: Analysis, program: Program) -> None:
    """Find the largest set of float variables whose every use is linear with results in the set.
    The program's outputs are unrestricted.
    """
    analysis.linear = _used_linearly(program, list(_uses(analysis, program)))
    sums = (pair for equation in every_equation(program) for pair in _sums_of(analysis, equation))
    analysis.accumulated = {output for _, output in sums if output in analysis.linear}


def by_terms(analysis: Analysis, program: Program) -> Analysis:
    """The analysis for a run that follows the primal's path alone. Operands of conditionals and
    `while_loop`s count as used nonlinearly, since the paths not taken are unknown.
    """
    uses = list(_uses(analysis, program, whole=True))
    return dataclasses.replace(analysis, linear=_used_linearly(program, uses), accumulated=set())


def _used_linearly(program: Program, uses: Sequence[Use]) -> set[Variable]:
    variables = {*program.inputs}
    for equation in every_equation(program):
        variables.update(equation.outputs, *(inner.inputs for inner in equation.inner))
    # The greatest fixed point: start with all variables and remove those with a nonlinear use. So a
    # sum carried around a loop, whose only use is itself, stays.
    linear = {variable for variable in variables if jnp.issubdtype(variable.dtype, jnp.inexact)}

    def keep_what_is_used_linearly():
        # Backward: most uses are of values that were computed just before.
        for atom, targets in reversed(uses):
            if atom in linear and not linear.issuperset(targets):  # pyright: ignore
                linear.discard(atom)  # pyright: ignore

    until_stable(keep_what_is_used_linearly, (linear,))
    return linear


def _uses(analysis: Analysis, program: Program, whole: bool = False) -> Iterator[Use]:
    """Every use of a value. With `whole`, conditionals and `while_loop`s use values nonlinearly."""
    for equation in program.equations:
        if equation.control is None:
            flags = primitives.linear_in(equation, analysis.fixed(equation))
            for atom, flag in zip(equation.inputs, flags, strict=True):
                yield atom, equation.outputs if flag else _NONLINEAR
        else:
            if whole and not isinstance(equation.control, Scan):
                yield from ((atom, _NONLINEAR) for atom in equation.inputs)
                outputs = (inner.outputs for inner in equation.inner)
                yield from ((atom, _NONLINEAR) for atoms in outputs for atom in atoms)
            else:
                yield from _control_uses(analysis, equation)
            for inner in equation.inner:
                yield from _uses(analysis, inner, whole)


def _control_uses(analysis: Analysis, equation: Equation) -> Iterator[Use]:
    """A value is linear if what it becomes is. Predicates are not linear. Where alternatives may
    take another path, only the sums of a loop are linear.
    """
    control = equation.control
    assert control is not None
    edges, apart = control.edges(), analysis.goes_apart(equation)
    sums = dict(_sums_of(analysis, equation))
    for operand, targets in zip(equation.inputs, edges.into, strict=True):
        # The initial value of a sum is used as the sum's result is: in between it is only added to.
        sum_of = [sums[target] for target in targets if target in sums]
        yield operand, tuple(sum_of) or targets or _NONLINEAR
    yield from ((source, (target,)) for source, target in edges.around)
    for output, sources in zip(equation.outputs, edges.out, strict=True):
        yield from ((source, _NONLINEAR if apart else (output,)) for source in sources)
    if isinstance(control, While):
        yield control.condition.outputs[0], _NONLINEAR


def _sums_of(analysis: Analysis, equation: Equation) -> Iterator[tuple[Variable, Variable]]:
    """The carries that are only added to, of a loop that may be left at different times, with
    their outputs.
    """
    loop = equation.control
    if isinstance(loop, While) and analysis.goes_apart(equation):
        for index, output in enumerate(equation.outputs):
            if _accumulates(loop, index):
                yield loop.carry[index], output


def _accumulates(loop: While, index: int) -> bool:
    """True if a float carry is only ever added to (`s + term`) and has no other use."""
    # Follow `s + term` from the carry to the body's output: each value on the way is used once.
    variable, target = loop.carry[index], loop.body.outputs[index]
    if loop.seen[index] in _used(loop.condition) or not jnp.issubdtype(variable.dtype, jnp.inexact):
        return False
    while variable is not target:
        users = _users(loop.body, variable)
        if len(users) != 1 or variable in loop.body.outputs:
            return False
        (equation,) = users
        adds = equation.primitive in ("add", "add_any") or (
            equation.primitive == "sub" and equation.inputs[0] is variable
        )
        if not adds or equation.outputs[0].shape != variable.shape:
            return False
        variable = equation.outputs[0]
    return not _users(loop.body, variable) and (
        sum(atom is target for atom in loop.body.outputs) == 1
    )


def _users(program: Program, variable: Variable) -> list[Equation]:
    """The equations that take a variable, repeated for repeated operands."""
    return [
        equation for equation in program.equations for atom in equation.inputs if atom is variable
    ]


def _used(program: Program) -> set[Atom]:
    return {atom for equation in program.equations for atom in equation.inputs} | set(
        program.outputs
    )
