"""The rule for conditionals."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..jaxprs.program import Cond, Equation
from .analysis import Analysis
from .control_flow import Carried, ControlRun, as_foreseen
from .interpreter import RULES
from .values import Value, World, in_lanes, pin


@dataclasses.dataclass(frozen=True)
class _CondRun(ControlRun):
    """A conditional at the point where it is entered. Its branches take their uniforms and keys
    from those of the surrounding program.
    """

    choice: Cond
    index: Value
    inputs: list[Value]

    def one(self, world: World) -> tuple[World, list[Value]]:
        """All alternatives take the primal's branch."""
        variables = self.equation.outputs
        banked = [variable in self.analysis.linear for variable in variables]
        world, key = world.spawn()

        def run(branch, inputs):
            # All branches spawn from the same key. Only one branch runs, so the key is used once.
            within = world.replace(key=key, spawned=0)
            after, outputs = self.evaluate(branch, within, inputs, banked)
            return Carried(as_foreseen(self.analysis, after, variables, outputs), after.lanes)

        runs = [functools.partial(run, branch) for branch in self.choice.branches]
        carried = jax.lax.switch(self.index.primal, runs, self.inputs)
        if not self.branching:
            return world, carried.values
        # Only one branch runs, so they may use the same uniforms.
        most = max(map(self.analysis.num_uniforms, self.choice.branches))
        return world.replace(lanes=carried.lanes, taken=world.taken + most), carried.values

    def each(self, world: World) -> tuple[World, list[Value]]:
        """Run every branch, one after the other; each alternative takes the results of its own."""
        entry, index = world, self.index
        rows: list[list[Value]] = []
        for number, branch in enumerate(self.choice.branches):
            # `world` is the world at entry except for the lanes, which earlier branches changed.
            # `index`, `inputs` and `rows` (the results so far) belong to the alternatives alive
            # now. All of them are pinned: rows are chosen last, so an alternative that
            # agrees with the primal within this branch may still differ after the choice.
            inputs = self.of_the_living(world, entry, self.inputs)
            within = pin(self.entered(world, number), [index, *inputs, *itertools.chain(*rows)])
            nothing = [False] * len(self.equation.outputs)
            after, outputs = self.evaluate(branch, within, inputs, nothing)
            (index,), *rows = (self.of_the_living(after, world, row) for row in ([index], *rows))
            rows.append(outputs)
            if self.branching:
                world = world.replace(lanes=after.lanes).with_lanes(pinned=entry.lanes.pinned)
            world = world.replace(taken=after.taken, spawned=after.spawned)
        return world, [_choose(world, index, column) for column in zip(*rows, strict=True)]

    def entered(self, world: World, number: int) -> World:
        """The world within a branch: alternatives are born only in the one the primal takes."""
        chosen = self.index.primal == number
        return world.replace(running=chosen if world.running is None else chosen & world.running)


def cond(
    analysis: Analysis, world: World, equation: Equation, operands: Sequence[Value]
) -> tuple[World, list[Value]]:
    """`lax.switch` if all alternatives take the primal's branch. Otherwise every branch runs,
    and each alternative takes the results of its own.
    """
    choice = equation.control
    assert isinstance(choice, Cond)

    def clipped(part):
        return None if part is None else jnp.clip(part.astype(jnp.int32), 0, last)

    last = len(choice.branches) - 1
    index = Value(clipped(operands[0].primal), None, clipped(operands[0].alternative))
    run = _CondRun(analysis, equation, choice, index, list(operands[1:]))
    return run.one(world) if index.alternative is None else run.each(world)


def _choose(world: World, index: Value, column: Sequence[Value]) -> Value:
    """`column[index]`, with each alternative's own index."""
    primal = _select(index.primal, [value.primal for value in column])
    tangent = None
    if any(value.tangent is not None for value in column):
        tangent = _select(
            index.primal,
            [value.tangents(world.num_parameters, world.weight.dtype) for value in column],
        )
    slots = [in_lanes(value, world.num_slots) for value in column]
    # The tangent is that of the primal's branch. The differences of alternatives in other branches
    # stay in their slots and are banked when the value is used linearly.
    own = index.alternative.reshape(-1, *(1,) * (slots[0].ndim - 1))
    return Value(primal, tangent, _select(own, slots))


def _select(index: Any, cases: Sequence[Any]) -> Any:
    result = cases[0]
    for number, case in enumerate(cases[1:], 1):
        result = jnp.where(index == number, case, result)
    return result


RULES["cond"] = cond
