"""The facts known of a program before it is run: which values have tangents and alternatives, and
which are used only linearly.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax
import jax.numpy as jnp

from ..jaxprs.program import Atom, Cond, Equation, Program, Scan, Variable, While
from ..jaxprs.program import Constant as Constant
from . import primitives
from .draw import SAMPLE, VALID

# A use of a value asks that all of some others be linear too; an impossible one asks it of `None`.
Use = tuple[Atom, tuple[Variable | None, ...]]
_NONLINEAR = (None,)


@dataclasses.dataclass
class Analysis:
    """Sets of variables: with a tangent; that may differ in an alternative (`branched`); of a
    continuous distribution; used only linearly on every way to the result (`linear`); the carried
    sums of a loop that may be left at different times (`accumulated`); those that reach the result
    other than through `stop_gradient` (`matters`). `branching` holds the equations within which
    alternatives are born or dropped."""

    tangent: set[Variable] = dataclasses.field(default_factory=set)
    branched: set[Variable] = dataclasses.field(default_factory=set)
    continuous: set[Variable] = dataclasses.field(default_factory=set)
    linear: set[Variable] = dataclasses.field(default_factory=set)
    accumulated: set[Variable] = dataclasses.field(default_factory=set)
    matters: set[Variable] = dataclasses.field(default_factory=set)
    branching: set[Equation] = dataclasses.field(default_factory=set)

    def has_tangent(self, variable: Variable) -> bool:
        """At run time, when the alternatives of linear values have become tangents."""
        return variable in self.tangent or (variable in self.branched and self._is_banked(variable))

    def has_alternative(self, variable: Variable) -> bool:
        return variable in self.branched and not self._is_banked(variable)

    def _is_banked(self, variable: Variable) -> bool:
        return variable in self.linear or variable in self.accumulated

    def concerns(self, equation: Equation) -> bool:
        """True if a derivative depends on what the equation computes."""
        return equation in self.branching or any(
            atom in self.tangent or atom in self.branched for atom in equation.inputs
        )

    def banks(self, equation: Equation) -> list[bool]:
        """Which operands an equation takes linearly, on the way to a result that is used
        linearly itself.
        """
        control = equation.control
        if control is None:
            if not self.linear.issuperset(equation.outputs):
                return [False] * len(equation.inputs)
            return primitives.linear_in(equation, self.fixed(equation))
        flags = [
            bool(targets) and self.linear.issuperset(targets) for targets in control.edges().into
        ]
        # A carried sum of a loop that is left at different times is banked inside of it, at the end
        # of each iteration (`_WhileRun.accumulated`), though its variables within are not linear.
        if isinstance(control, While) and self.stops_apart(control):
            constants = len(flags) - len(equation.outputs)
            flags[constants:] = [output in self.accumulated for output in equation.outputs]
        return flags

    def fixed(self, equation: Equation) -> list[bool]:
        """Which operands are the same in every alternative."""
        return [atom not in self.branched for atom in equation.inputs]

    def stops_apart(self, loop: While) -> bool:
        """True if an alternative may leave a loop before or after the primal."""
        return loop.condition.outputs[0] in self.branched

    def goes_apart(self, equation: Equation) -> bool:
        """True if an alternative may take another way through an equation than the primal."""
        if isinstance(equation.control, While):
            return self.stops_apart(equation.control)
        return isinstance(equation.control, Cond) and equation.inputs[0] in self.branched

    def num_uniforms(self, program: Program) -> int:
        """Uniforms that pruning needs: for each draw one to pick a candidate, if there are
        several, and one to prune it; those of a conditional's branches among them.
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
    """How many flips a draw has."""
    return equation.params["sampler"].num_candidates(
        equation.outputs[0], [_described(atom) for atom in equation.inputs[1:]]
    )


def _described(atom: Atom):
    if isinstance(atom, Constant):
        return jnp.asarray(atom.value)
    return jax.ShapeDtypeStruct(atom.shape, atom.dtype)


def every_equation(program: Program) -> Iterator[Equation]:
    """The equations of a program and of those within it."""
    for equation in program.equations:
        yield equation
        for inner in equation.inner:
            yield from every_equation(inner)


def analyse(program: Program, differentiated: Iterable[Variable]) -> Analysis:
    """Forward to a fixed point for tangents and alternatives, then backward for linear use."""
    analysis = Analysis(tangent=set(differentiated))
    facts = (analysis.tangent, analysis.branched, analysis.continuous, analysis.branching)
    until_stable(functools.partial(_forward, analysis, program), facts)
    # Linear use rests on which operands are fixed, thus on `branched`: it comes after the fixed
    # point.
    _find_linear(analysis, program)
    analysis.matters.update(atom for atom in program.outputs if isinstance(atom, Variable))
    until_stable(functools.partial(_backward, analysis, program), (analysis.matters,))
    return analysis


def until_stable(step: Callable[[], None], facts: Iterable[set]) -> None:
    """Takes steps until the sets no longer change. Each step only adds, or only takes away, so that
    their sizes tell.
    """
    # Sets over a finite program, changed in one direction only: this ends.
    before = -1
    while (size := sum(map(len, facts))) != before:
        before = size
        step()


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
        # Even an output that is computed alike in each branch differs if the branches do.
        analysis.branched.update(equation.outputs)
        if isinstance(equation.control, While):
            analysis.branched.update((*equation.control.carry, *equation.control.seen))
    # A loop that is left at different times drops alternatives at its end even if it draws nothing.
    if (apart and isinstance(equation.control, While)) or any(
        nested in analysis.branching for inner in equation.inner for nested in inner.equations
    ):
        analysis.branching.add(equation)


def _forward_primitive(analysis: Analysis, equation: Equation) -> None:
    if equation.primitive == VALID:
        return  # Of the primal alone.
    inputs = equation.inputs
    differentiated, branched = (
        any(atom in facts for atom in inputs) for facts in (analysis.tangent, analysis.branched)
    )
    if equation.primitive == SAMPLE:
        if differentiated:
            analysis.branching.add(equation)
        # A draw is discrete: theta reaches it through the flips of its outcome, never through a
        # tangent.
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


def spread(
    equation: Equation, facts: Iterable[set[Variable]], within: Callable[[Program], None]
) -> None:
    """Passes facts through a loop or a conditional: whatever holds of a value holds of what it
    becomes. `within` goes on in the inner programs.
    """
    assert equation.control is not None
    edges = equation.control.edges()
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


def _backward(analysis: Analysis, program: Program) -> None:
    """Whatever reaches a value that matters, matters too."""
    matters = analysis.matters

    def matter(atoms: Iterable[Atom]) -> None:
        matters.update(atom for atom in atoms if isinstance(atom, Variable))

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
        if matters.intersection(equation.outputs):
            matter(equation.inputs[:1] if isinstance(equation.control, Cond) else ())
            matter(
                equation.control.condition.outputs if isinstance(equation.control, While) else ()
            )
        for source, target in edges.around:
            matter((source,) if target in matters else ())
        for inner in equation.inner:
            _backward(analysis, inner)
        for operand, targets in zip(equation.inputs, edges.into, strict=True):
            matter((operand,) if matters.intersection(targets) else ())


def _find_linear(analysis: Analysis, program: Program) -> None:
    """The greatest set of float variables each of whose uses is linear with results in the set;
    the program's outputs are free.
    """
    analysis.linear = _used_linearly(program, list(_uses(analysis, program)))
    sums = (pair for equation in every_equation(program) for pair in _sums_of(analysis, equation))
    analysis.accumulated = {output for _, output in sums if output in analysis.linear}


def by_terms(analysis: Analysis, program: Program) -> Analysis:
    """The analysis of a program whose values are followed along the primal's way alone: there,
    what goes into a conditional or a `while_loop` counts as used nonlinearly, for nothing is known
    of the ways that are not taken.
    """
    uses = list(_uses(analysis, program, whole=True))
    return dataclasses.replace(analysis, linear=_used_linearly(program, uses), accumulated=set())


def _used_linearly(program: Program, uses: Sequence[Use]) -> set[Variable]:
    variables = {*program.inputs}
    for equation in every_equation(program):
        variables.update(equation.outputs, *(inner.inputs for inner in equation.inner))
    # The greatest fixed point: all are taken to be linear until a use says otherwise, so that a sum
    # that is carried around a loop, whose only use is itself, stays.
    linear = {variable for variable in variables if jnp.issubdtype(variable.dtype, jnp.inexact)}

    def keep_what_is_used_linearly():
        # Backward, as most uses are of what came just before.
        for atom, targets in reversed(uses):
            if atom in linear and not linear.issuperset(targets):  # pyright: ignore
                linear.discard(atom)  # pyright: ignore

    until_stable(keep_what_is_used_linearly, (linear,))
    return linear


def _uses(analysis: Analysis, program: Program, whole: bool = False) -> Iterator[Use]:
    """Every use of a value; with `whole`, conditionals and `while_loop`s use theirs nonlinearly."""
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
    """A value is linear if what it becomes is; what decides isn't, and where ways go apart
    nothing is but the sums of a loop.
    """
    control = equation.control
    assert control is not None
    edges, apart = control.edges(), analysis.goes_apart(equation)
    sums = dict(_sums_of(analysis, equation))
    for operand, targets in zip(equation.inputs, edges.into, strict=True):
        # What starts a sum is used as the sum's result is: between the two it is only added to.
        sum_of = [sums[target] for target in targets if target in sums]
        yield operand, tuple(sum_of) or targets or _NONLINEAR
    yield from ((source, (target,)) for source, target in edges.around)
    for output, sources in zip(equation.outputs, edges.out, strict=True):
        yield from ((source, _NONLINEAR if apart else (output,)) for source in sources)
    if isinstance(control, While):
        yield control.condition.outputs[0], _NONLINEAR


def _sums_of(analysis: Analysis, equation: Equation) -> Iterator[tuple[Variable, Variable]]:
    """The carries of a loop that may be left at different times which are only added to, with
    their outputs.
    """
    loop = equation.control
    if isinstance(loop, While) and analysis.stops_apart(loop):
        for index, output in enumerate(equation.outputs):
            if _accumulates(loop, index):
                yield loop.carry[index], output


def _accumulates(loop: While, index: int) -> bool:
    """True if a float carry is only ever added to: `s + term`, and nothing else looks at it."""
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
    """The equations that take a variable, once for each time."""
    return [
        equation for equation in program.equations for atom in equation.inputs if atom is variable
    ]


def _used(program: Program) -> set[Atom]:
    return {atom for equation in program.equations for atom in equation.inputs} | set(
        program.outputs
    )
