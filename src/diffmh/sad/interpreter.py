"""The interpreter: it evaluates a program's equations in order, each by its rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import jax.numpy as jnp

from ..base.validate import NotDifferentiable
from ..jaxprs.program import Constant, Equation, Program, Variable
from .analysis import Analysis, Atom
from .values import Value, World, bank, forget, pin, prune

Rule = Callable[[Analysis, World, Equation, Sequence[Value]], tuple[World, Sequence[Value]]]
RULES: dict[str, Rule] = {}
# Stands for a name in the table: the rule for primitives that JAX differentiates by itself.
ANY = "any primitive"


def evaluate(
    analysis: Analysis,
    program: Program,
    world: World,
    inputs: Sequence[Value],
    bank_outputs: Sequence[bool],
    prune_before: int | None = None,
) -> tuple[World, list[Value]]:
    """Run a program. Outputs that `bank_outputs` marks are taken linearly.

    Newcomers are pruned before the next draw, before a loop or a conditional, and before equation
    `prune_before`.
    """
    values = dict(zip(program.inputs, inputs, strict=True))
    last_use = _last_use(program)
    for index, equation in enumerate(program.equations):
        # Invariant: `values` holds exactly what this equation or a later one reads. So an
        # alternative that agrees with the primal in all of it agrees from here on and may be
        # dropped. The newcomers in the lanes belong to at most one draw.
        interrupts = (
            equation.control is not None or equation in analysis.branching or index == prune_before
        )
        if world.num_lanes > world.num_slots and interrupts:
            world, values = prune(world, values)
        operands = [
            _read(world, values, atom, linearly)
            for atom, linearly in zip(equation.inputs, analysis.banks(equation), strict=True)
        ]
        lasting = {
            variable: value
            for variable, value in values.items()
            if last_use.get(variable, -1) > index
        }
        after, outputs = _apply(analysis, world, equation, operands, lasting)
        if after.births is not world.births:
            # A slot was reassigned: its alternative was born within the equation and shares all
            # earlier values with the primal.
            replaced = after.births != world.births
            lasting = {variable: forget(value, replaced) for variable, value in lasting.items()}
        world = after
        named = zip(equation.outputs, outputs, strict=True)
        values = lasting | {
            name: bank(world, value) if name in analysis.linear else value for name, value in named
        }
    return world, [
        _read(world, values, atom, flag)
        for atom, flag in zip(program.outputs, bank_outputs, strict=True)
    ]


def _apply(
    analysis: Analysis,
    world: World,
    equation: Equation,
    operands: Sequence[Value],
    lasting: Mapping[Variable, Value],
) -> tuple[World, Sequence[Value]]:
    """Evaluate one equation by its rule. Within a loop or a conditional that may drop alternatives,
    those that differ in a value that is read after it are pinned.
    """
    if not analysis.concerns(equation):
        primals = equation.bind(*(value.primal for value in operands))
        return world, [Value(primal) for primal in primals]
    # Inside, only the inner program's values are compared with the primal's. An alternative that
    # agrees in those but differs in a value that is read later must survive, so it is pinned.
    drops = equation.control is not None and equation in analysis.branching
    within = pin(world, lasting.values()) if drops else world
    after, outputs = rule(equation, world)(analysis, within, equation, operands)
    return after.with_lanes(pinned=world.lanes.pinned), outputs


def rule(equation: Equation, world: World) -> Rule:
    """The rule of an equation on which a derivative depends. In reverse mode JAX differentiates,
    and equations without a rule of ours are simply evaluated.
    """
    if equation.primitive not in RULES and world.lanes.worth is not None:
        return RULES[ANY]
    if equation.primitive not in RULES:
        raise NotDifferentiable(
            f"`diffmh.sad` has no rule for the primitive `{equation.primitive}`, which depends on"
            " theta or on a draw. Register one with `sad.register`."
        )
    return RULES[equation.primitive]


def _read(world: World, values: dict[Variable, Value], atom: Atom, linearly: bool) -> Value:
    if isinstance(atom, Constant):
        return Value(jnp.asarray(atom.value))
    return bank(world, values[atom]) if linearly else values[atom]


def _last_use(program: Program) -> dict[Atom, int]:
    # Later uses overwrite earlier ones, as equations are in order. Outputs are used last.
    uses = {
        atom: index for index, equation in enumerate(program.equations) for atom in equation.inputs
    }
    return uses | dict.fromkeys(program.outputs, len(program.equations))
