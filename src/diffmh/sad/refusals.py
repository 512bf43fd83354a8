"""What is refused before a program is run, each with the line of user code and what to do."""

from __future__ import annotations

from .._lowering import compat
from .._lowering.program import Cond, Equation, Program, Scan, While
from .._validate import NotDifferentiable
from . import primitives
from .analysis import Analysis
from .marker import LINEAR
from .propose import PROPOSE
from .samplers import SAMPLE


def refuse(analysis: Analysis, program: Program) -> None:
    """Refuses programs whose derivative would be wrong."""
    for equation in program.equations:
        for inner in _inner_programs(equation):
            refuse(analysis, inner)
        if isinstance(equation.control, While):
            _refuse_condition(analysis, equation.control)
        if equation.primitive == LINEAR and equation.outputs[0] not in analysis.linear:
            raise NotDifferentiable(
                f"`sad.linear(value)`{_at(equation)} promises that `value` enters the result"
                " linearly, but it"
                f" doesn't{_nonlinear_use(analysis, program, equation)}: take the marker away, or"
                " mark the last value that does."
            )
        if equation.control is None:
            _refuse_primitive(analysis, equation)


def _refuse_condition(analysis: Analysis, loop: While) -> None:
    for equation in loop.condition.equations:
        if equation in analysis.branching:
            raise NotDifferentiable(
                "A draw whose distribution depends on theta in the condition of a"
                f" `while_loop`{_at(equation)}: draw in the"
                " body, and carry the decision to the condition."
            )


def _nonlinear_use(analysis: Analysis, program: Program, marker: Equation) -> str:
    """Where a marked value is first used nonlinearly, if that is within the same loop."""
    reached = set(marker.outputs)
    for equation in program.equations:
        taken = [atom in reached for atom in equation.inputs]
        if equation.control is not None or not any(taken):
            continue
        linear = primitives.linear_in(
            equation, [atom not in analysis.branched for atom in equation.inputs]
        )
        if any(is_taken and not flag for is_taken, flag in zip(taken, linear, strict=True)):
            return f" (`{equation.primitive}`{_at(equation)})"
        reached.update(equation.outputs)
    return ""


def _inner_programs(equation: Equation) -> tuple[Program, ...]:
    control = equation.control
    if control is None:
        return ()
    if isinstance(control, Scan):
        return (control.body,)
    return control.branches if isinstance(control, Cond) else (control.condition, control.body)


def _refuse_primitive(analysis: Analysis, equation: Equation) -> None:
    name, inputs = equation.primitive, equation.inputs
    moving = any(atom in analysis.tangent for atom in inputs)
    branched = any(atom in analysis.branched for atom in inputs)
    inside = compat.inner_primitives(equation)
    if inside & {SAMPLE, PROPOSE}:
        raise NotDifferentiable(
            f"A draw of `diffmh.sad` inside of `{name}`{_at(equation)}: draw outside of it."
        )
    if not moving and not branched:
        return
    if name == PROPOSE:
        _refuse_proposal(analysis, equation)
        return
    if name not in primitives.SMOOTH | primitives.JUMPS | primitives.EVALUATED:
        raise NotDifferentiable(
            f"`diffmh.sad` has no rule for the primitive `{name}`{_at(equation)}, which depends on"
            " theta or on a draw. Write"
            " that step in other operations, or register a rule with `sad.register`."
        )
    if moving and name in primitives.EVALUATED and name not in (SAMPLE, "is_finite"):
        raise NotDifferentiable(
            f"The primitive `{name}`{_at(equation)} has no derivative, and its operand depends on"
            " theta."
        )
    if (
        moving
        and primitives.jumps(equation)
        and any(atom in analysis.continuous for atom in inputs)
    ):
        raise NotDifferentiable(
            f"`{name}`{_at(equation)} makes a step of a continuous random value that depends on"
            " theta: the derivative of how"
            " often it steps would be lost. Draw the decision itself: `sad.bernoulli(key, p)`"
            " instead of `uniform < p`, or use"
            " another sampler of `diffmh.sad`."
        )


def _refuse_proposal(analysis: Analysis, equation: Equation) -> None:
    form = equation.params["form"]
    names = ["key", "proposal", "proposal's noise", "x"]
    position = 0
    for name, size in zip(names, form.sizes, strict=True):
        part = equation.inputs[position : position + size]
        position += size
        if any(atom in analysis.tangent for atom in part) or (
            name == "proposal" and any(atom in analysis.branched for atom in part)
        ):
            raise NotDifferentiable(
                f"`sad.propose`{_at(equation)}: the {name} depends on"
                f" theta{' or on a draw' * (name == 'proposal')}, which"
                " has no rule. Propose from a distribution that is free of theta, and let the"
                " accept decision depend on it."
            )


def _at(equation: Equation) -> str:
    return f" at {equation.where}" if equation.where else ""
