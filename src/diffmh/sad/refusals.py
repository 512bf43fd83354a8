"""Errors before a program runs; each names the line of user code and what to do."""

from __future__ import annotations

from ..analysis import Jump, jumps
from ..analysis.steps import STEPS
from ..base.validate import NotDifferentiable
from ..jaxprs import compat
from ..jaxprs.program import Equation, Program, While, every_equation
from . import primitives
from .analysis import Analysis
from .draw import SAMPLE
from .marker import LINEAR
from .propose import PROPOSE


def refuse_equations(analysis: Analysis, program: Program, any_primitive: bool) -> None:
    """Raise an error for equations whose derivative would be wrong and, unless JAX differentiates
    them itself (`any_primitive`), for primitives without a rule.
    """
    for equation in program.equations:
        for inner in equation.inner:
            refuse_equations(analysis, inner, any_primitive)
        if isinstance(equation.control, While):
            _refuse_condition(analysis, equation.control)
        if equation.primitive == LINEAR and equation.outputs[0] not in analysis.linear:
            raise NotDifferentiable(
                f"`sad.linear(value)`{at(equation)} declares that `value` enters the result"
                " linearly, but it"
                f" doesn't{_nonlinear_use(analysis, program, equation)}: remove the marker, or"
                " mark the last value that does."
            )
        if equation.control is None:
            _refuse_primitive(analysis, equation, any_primitive)


def _refuse_condition(analysis: Analysis, loop: While) -> None:
    for equation in every_equation(loop.condition):
        if equation.primitive == SAMPLE and equation in analysis.branching:
            raise NotDifferentiable(
                "A draw whose distribution depends on theta is in the condition of a"
                f" `while_loop`{at(equation)}, which is not supported: draw in the"
                " body and carry the result to the condition."
            )


def _nonlinear_use(analysis: Analysis, program: Program, marker: Equation) -> str:
    """The place where a marked value is first used nonlinearly, if within the same loop."""
    reached = set(marker.outputs)
    for equation in program.equations:
        taken = [atom in reached for atom in equation.inputs]
        if equation.control is not None or not any(taken):
            continue
        linear = primitives.linear_in(equation, analysis.fixed(equation))
        if any(is_taken and not flag for is_taken, flag in zip(taken, linear, strict=True)):
            return f" (`{equation.primitive}`{at(equation)})"
        reached.update(equation.outputs)
    return ""


def _refuse_primitive(analysis: Analysis, equation: Equation, any_primitive: bool) -> None:
    name = equation.primitive
    inside = compat.inner_primitives(equation)
    if inside & {SAMPLE, PROPOSE}:
        raise NotDifferentiable(
            f"A draw of `diffmh.sad` inside of `{name}`{at(equation)} is not supported: draw"
            " outside of it."
        )
    if not analysis.concerns(equation):
        return
    if name == PROPOSE:
        _refuse_proposal(analysis, equation)
        return
    if not any_primitive and not primitives.is_known(name):
        raise NotDifferentiable(
            f"`diffmh.sad` has no rule for the primitive `{name}`{at(equation)}, which depends on"
            " theta or on a draw. Write"
            " this step with other operations, or register a rule with `sad.register`."
        )
    moving = any(atom in analysis.tangent for atom in equation.inputs)
    # Flat primitives are refused only where theta moves the operand and the result matters.
    if moving and analysis.matters.intersection(equation.outputs) and primitives.is_flat(equation):
        raise NotDifferentiable(
            f"The primitive `{name}`{at(equation)} has no derivative, and its operand depends on"
            " theta. If no derivative is intended, use `jax.lax.stop_gradient`; otherwise write"
            " this step with other operations."
        )


def refuse_jumps(analysis: Analysis, program: Program) -> None:
    """Raise an error for steps of continuous random values that depend on theta and matter."""
    stepping = frozenset(primitives.JUMPS - STEPS)
    found = jumps(program, analysis.tangent, analysis.continuous, {SAMPLE, PROPOSE}, stepping)
    for jump in found:
        raise NotDifferentiable(
            f"`{jump.primitive}`{at(jump)} makes a step of a continuous random value at a place"
            f" that depends on theta, where the result {'jumps' if jump.certain else 'may jump'}."
            " The estimator cannot see a moving step, so the derivative would be wrong. Draw the"
            " decision itself: `sad.bernoulli(key, p)` instead of `uniform < p`, or use another"
            " sampler of `diffmh.sad`. If the program is continuous, declare it:"
            " `program = sad.continuous(program)`, or the function that steps. If the step"
            " does not matter, wrap it in `jax.lax.stop_gradient`."
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
                f"`sad.propose`{at(equation)}: the {name} depends on"
                f" theta{' or on a draw' * (name == 'proposal')}, which"
                " is not supported. Use a proposal that does not depend on theta, and let the"
                " accept decision depend on it."
            )


def at(equation: Equation | Jump) -> str:
    """The line of user code, for a message."""
    return f" at {equation.where}" if equation.where else ""
