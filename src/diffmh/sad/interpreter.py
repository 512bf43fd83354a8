"""The interpreter: a program's equations in order, each by its rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax.numpy as jnp

from .._lowering.program import Constant, Equation, Program, Variable
from .._validate import NotDifferentiable
from .analysis import Analysis, Atom
from .values import Value, World, bank, forget, pin, prune

Rule = Callable[[Analysis, World, Equation, Sequence[Value]], tuple[World, Sequence[Value]]]
RULES: dict[str, Rule] = {}
# In the place of a name: the rule of whatever JAX differentiates by itself.
ANY = "any primitive"


def evaluate(
    analysis: Analysis,
    program: Program,
    world: World,
    inputs: Sequence[Value],
    bank_outputs: Sequence[bool],
    prune_before: int | None = None,
) -> tuple[World, list[Value]]:
    """Runs a program. Outputs that `bank_outputs` marks are taken linearly.

    `values` holds what still matters: a variable leaves it after its last use. Newcomers are
    pruned before others may arise, before a loop or a conditional, and before equation
    `prune_before`.
    """
    values = dict(zip(program.inputs, inputs, strict=True))
    last_use = _last_use(program)
    for index, equation in enumerate(program.equations):
        interrupts = (
            equation.control is not None or equation in analysis.branching or index == prune_before
        )
        if world.num_lanes > world.num_slots and interrupts:
            world, values = prune(world, values)
        operands = [
            _read(world, values, *slot)
            for slot in zip(equation.inputs, analysis.banks(equation), strict=True)
        ]
        lasting = {
            variable: value
            for variable, value in values.items()
            if last_use.get(variable, -1) > index
        }
        within = (
            pin(world, lasting.values())
            if equation.control is not None and equation in analysis.branching
            else world
        )
        if analysis.concerns(equation):
            after, outputs = rule(equation, world)(analysis, within, equation, operands)
        else:
            primals = equation.bind(*(value.primal for value in operands))
            after, outputs = within, [Value(primal) for primal in primals]
        if after.births is not world.births:
            replaced = after.births != world.births
            lasting = {variable: forget(value, replaced) for variable, value in lasting.items()}
        world = after.with_lanes(pinned=world.lanes.pinned)
        named = zip(equation.outputs, outputs, strict=True)
        values = lasting | {
            name: bank(world, value) if name in analysis.linear else value for name, value in named
        }
    return world, [
        _read(world, values, atom, flag)
        for atom, flag in zip(program.outputs, bank_outputs, strict=True)
    ]


def rule(equation: Equation, world: World) -> Rule:
    """The rule of an equation that a derivative depends on. In the reverse mode JAX differentiates,
    and what has no rule of its own is evaluated.
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
    uses = {
        atom: index for index, equation in enumerate(program.equations) for atom in equation.inputs
    }
    return uses | dict.fromkeys(program.outputs, len(program.equations))
