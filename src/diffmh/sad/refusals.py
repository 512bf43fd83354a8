"""What is refused before a program is run, each with the line of user code and what to do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import jax

from .._continuity import agree_at_the_step
from .._lowering import compat
from .._lowering.program import Equation, Program, Variable, While
from .._validate import NotDifferentiable
from . import primitives
from .analysis import Analysis
from .marker import LINEAR
from .propose import PROPOSE
from .samplers import SAMPLE

_COMPARISONS = {"ge", "gt", "le", "lt"}


def refuse(
    analysis: Analysis, program: Program, any_primitive: bool = False, vouched: bool = False
) -> None:
    """Refuses programs whose derivative would be wrong, and, unless JAX differentiates them itself,
    primitives without a rule. What a user has `vouched` for is continuous.
    """
    defined_by = {output: equation for equation in program.equations for output in equation.outputs}
    for equation in program.equations:
        for inner in equation.inner:
            refuse(analysis, inner, any_primitive, vouched or equation.vouched)
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
    stepped = (*primitives.steps(equation, defined_by), *_flat_results(analysis, equation))
    if not analysis.matters.intersection(stepped) or _only_chooses_what_agrees(program, equation):
        return
    raise NotDifferentiable(
        f"`{equation.primitive}`{_at(equation)} makes a step of a continuous random value that"
        " depends on theta: the derivative of how often it steps would be lost. Draw the decision"
        " itself: `sad.bernoulli(key, p)` instead of `uniform < p`, or use another sampler of"
        " `diffmh.sad`. Where it makes no jump, say so by `sad.continuous(function)`; where it does"
        " no harm, hide it by `jax.lax.stop_gradient`."
    )


def _only_chooses_what_agrees(program: Program, step: Equation) -> bool:
    """Whether a comparison only chooses between cases that are equal where it steps, as in a leaky
    ReLU or Huber's loss.
    """
    users = [equation for equation in program.equations if step.outputs[0] in equation.inputs]
    chooses = all(
        user.primitive == "select_n" and user.inputs.index(step.outputs[0]) == 0 for user in users
    )
    if step.primitive not in _COMPARISONS or not users or not chooses:
        return False
    if step.outputs[0] in program.outputs:
        return False
    with jax.ensure_compile_time_eval():
        return all(agree_at_the_step(_before(program, user), step, user) for user in users)


def _before(program: Program, last: Equation) -> Program:
    """What an equation is computed from by plain arithmetic, and from what."""
    defined_by = {output: equation for equation in program.equations for output in equation.outputs}
    plain = lambda equation: (
        equation is not None
        and equation.control is None
        and equation.primitive in primitives.SMOOTH | primitives.JUMPS
    )
    needed: set[Equation] = set()
    inputs: dict[Variable, None] = {}
    waiting = list(last.inputs)
    while waiting:
        atom = waiting.pop()
        if not isinstance(atom, Variable):
            continue
        equation = defined_by.get(atom)
        if equation is None or not plain(equation):
            inputs[atom] = None
        elif equation not in needed:
            needed.add(equation)
            waiting.extend(equation.inputs)
    ordered = tuple(equation for equation in program.equations if equation in needed)
    return Program(tuple(inputs), ordered, ())


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
