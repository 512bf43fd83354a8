"""What is refused before a program is run, each with the line of user code and what to do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from .._bounds import decided
from .._crossing import makes_no_jump
from .._lowering import compat
from .._lowering.program import Cond, Equation, Program, Scan, Variable, While
from .._steps import EQUALITIES, ORDERS, is_inexact, steps
from .._validate import NotDifferentiable
from . import primitives
from .analysis import Analysis
from .marker import LINEAR
from .propose import PROPOSE
from .samplers import SAMPLE

# What may be evaluated at made-up numbers.
_ARITHMETIC = primitives.SMOOTH | primitives.JUMPS | primitives.LOGIC


def refuse(
    analysis: Analysis, program: Program, any_primitive: bool = False, vouched: bool = False
) -> None:
    """Refuses programs whose derivative would be wrong, and, unless JAX differentiates them itself,
    primitives without a rule. What a user has `vouched` for is continuous.
    """
    defined_by = {output: equation for equation in program.equations for output in equation.outputs}
    for equation in program.equations:
        continuous = vouched or equation.vouched or _only_searches(analysis, program, equation)
        for inner in equation.inner:
            refuse(analysis, inner, any_primitive, continuous)
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
            _refuse_primitive(analysis, equation, any_primitive)
            if not vouched and not equation.vouched:
                _refuse_step(analysis, program, equation, defined_by)


def _refuse_condition(analysis: Analysis, loop: While) -> None:
    for equation in _draws(loop.condition):
        if equation in analysis.branching:
            raise NotDifferentiable(
                "A draw whose distribution depends on theta in the condition of a"
                f" `while_loop`{_at(equation)}: draw in the"
                " body, and carry the decision to the condition."
            )


def _draws(program: Program) -> Iterator[Equation]:
    for equation in program.equations:
        if equation.primitive == SAMPLE:
            yield equation
        for inner in equation.inner:
            yield from _draws(inner)


def _nonlinear_use(analysis: Analysis, program: Program, marker: Equation) -> str:
    """Where a marked value is first used nonlinearly, if that is within the same loop."""
    reached = set(marker.outputs)
    for equation in program.equations:
        taken = [atom in reached for atom in equation.inputs]
        if equation.control is not None or not any(taken):
            continue
        linear = primitives.linear_in(equation, analysis.fixed(equation))
        if any(is_taken and not flag for is_taken, flag in zip(taken, linear, strict=True)):
            return f" (`{equation.primitive}`{_at(equation)})"
        reached.update(equation.outputs)
    return ""


def _refuse_primitive(analysis: Analysis, equation: Equation, any_primitive: bool) -> None:
    name = equation.primitive
    inside = compat.inner_primitives(equation)
    if inside & {SAMPLE, PROPOSE}:
        raise NotDifferentiable(
            f"A draw of `diffmh.sad` inside of `{name}`{_at(equation)}: draw outside of it."
        )
    if not analysis.concerns(equation):
        return
    if name == PROPOSE:
        _refuse_proposal(analysis, equation)
        return
    if not any_primitive and not primitives.is_known(name):
        raise NotDifferentiable(
            f"`diffmh.sad` has no rule for the primitive `{name}`{_at(equation)}, which depends on"
            " theta or on a draw. Write"
            " that step in other operations, or register a rule with `sad.register`."
        )
    moving = any(atom in analysis.tangent for atom in equation.inputs)
    if moving and analysis.matters.intersection(equation.outputs) and primitives.is_flat(equation):
        raise NotDifferentiable(
            f"The primitive `{name}`{_at(equation)} has no derivative, and its operand depends on"
            " theta. Where none is meant, say so by `jax.lax.stop_gradient`."
        )


def _refuse_step(
    analysis: Analysis,
    program: Program,
    equation: Equation,
    defined_by: Mapping[Variable, Equation],
) -> None:
    """Refuses steps of continuous random values that move, on the way to the result."""
    inputs = equation.inputs
    if equation.primitive in (SAMPLE, PROPOSE) or not (
        any(atom in analysis.tangent for atom in inputs)
        and any(atom in analysis.continuous for atom in inputs)
    ):
        return
    stepped = (*steps(equation, defined_by), *_flat_results(analysis, equation))
    if not analysis.matters.intersection(stepped):
        return
    if equation.primitive in ORDERS | EQUALITIES and decided(program, equation):
        return
    if _is_arithmetic(equation) and makes_no_jump(program, equation, _is_arithmetic):
        return
    raise NotDifferentiable(
        f"`{equation.primitive}`{_at(equation)} makes a step of a continuous random value that"
        " depends on theta: the derivative of how often it steps would be lost. Draw the decision"
        " itself: `sad.bernoulli(key, p)` instead of `uniform < p`, or use another sampler of"
        " `diffmh.sad`. Where it makes no jump, say so by `sad.continuous(function)`; where it does"
        " no harm, hide it by `jax.lax.stop_gradient`."
    )


def _is_arithmetic(equation: Equation) -> bool:
    """Whether it ends and means something for whatever numbers."""
    inner = all(_is_arithmetic(one) for program in equation.inner for one in program.equations)
    known = isinstance(equation.control, Scan | Cond) or equation.primitive in _ARITHMETIC
    return known and inner


def _only_searches(analysis: Analysis, program: Program, equation: Equation) -> bool:
    """Whether a loop or a conditional finds whole numbers of continuous random values that move,
    and what these lead to is continuous: the piece of `jnp.interp` in which a number lies.
    """
    if equation.control is None or any(is_inexact(output) for output in equation.outputs):
        return False
    moving = any(atom in analysis.tangent for atom in equation.inputs)
    if not moving or not any(atom in analysis.continuous for atom in equation.inputs):
        return False
    return _is_arithmetic(equation) and makes_no_jump(program, equation, _is_arithmetic)


def _flat_results(analysis: Analysis, equation: Equation) -> tuple[Variable, ...]:
    """The results of a function with a derivative of its own for which that is zero: steps, such
    as the sign of `slogdet`.
    """
    if equation.primitive != "custom_jvp_call":
        return ()
    moving = [atom in analysis.tangent for atom in equation.inputs]
    moved = compat.moved(equation, moving)
    return tuple(output for output, moves in zip(equation.outputs, moved, strict=True) if not moves)


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
