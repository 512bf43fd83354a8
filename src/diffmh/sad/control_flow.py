"""The rules for loops.

The lanes are carried through a loop together with the values. A value from outside of the loop
belongs to the alternatives that were alive when the loop was entered. In a slot that was reassigned
since then, the value is the primal's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Key

from ..base import trees
from ..jaxprs.program import Constant, Equation, Program, Scan, While
from .analysis import Analysis
from .interpreter import RULES, evaluate
from .propose import PROPOSE
from .rules import noise_of_coupling
from .values import (
    Lanes,
    Value,
    World,
    add_difference,
    forget,
    in_lanes,
    pin,
    prune,
)


def conform(world: World, value: Value, tangent: bool, alternative: bool) -> Value:
    """The value with exactly the requested parts."""
    tangents = value.tangents(world.num_parameters, world.weight.dtype) if tangent else None
    return Value(value.primal, tangents, in_lanes(value, world.num_slots) if alternative else None)


def as_foreseen(
    analysis: Analysis, world: World, variables: Sequence[Any], values: Sequence[Value]
) -> list[Value]:
    """Values with the parts that the analysis determined for `variables`."""
    flags = [
        (analysis.has_tangent(variable), analysis.has_alternative(variable))
        for variable in variables
    ]
    return [conform(world, value, *flag) for value, flag in zip(values, flags, strict=True)]


def _prune_before(analysis: Analysis, program: Program, num_carry: int) -> int | None:
    """The first equation at which everything that the next iteration reads is known. Everything
    after it is computed for the survivors only.
    """
    # Banked sums do not distinguish alternatives, so they need not be known by then.
    carried = {
        atom
        for atom in program.outputs[:num_carry]
        if atom in analysis.branched and atom not in analysis.linear
    }
    defined = [
        index
        for index, equation in enumerate(program.equations)
        if carried.intersection(equation.outputs)
    ]
    return max(defined) + 1 if defined else None


def _inner(world: World, uniforms: Any, key: Any) -> World:
    return world.replace(uniforms=uniforms, key=key, taken=0, spawned=0)


def _first(value: Value) -> Value:
    """Move time to the leading axis of tangents and alternatives."""
    parts = (value.tangent, value.alternative)
    swapped = (None if part is None else jnp.moveaxis(part, 1, 0) for part in parts)
    return Value(value.primal, *swapped)


class Carried(eqx.Module):
    """The carry of a loop: the program's values and the state of the alternatives."""

    values: list[Value]
    lanes: Lanes


class _Chances(eqx.Module):
    """The randomness of an iteration: uniforms for pruning, a key for inner programs, and the noise
    of couplings.
    """

    uniforms: Array
    key: Key[Array, "..."] | None
    noise: list[Any]


@dataclasses.dataclass(frozen=True)
class ControlRun:
    """A loop or a conditional at the point where it is entered."""

    analysis: Analysis
    equation: Equation

    @property
    def branching(self) -> bool:
        return self.equation in self.analysis.branching

    def evaluate(
        self,
        program: Program,
        world: World,
        inputs: Sequence[Value],
        banked: Sequence[bool],
        prune_before: int | None = None,
    ) -> tuple[World, list[Value]]:
        """Run an inner program. At its end all of its draws have been pruned: only its outputs are
        used later.
        """
        world, outputs = evaluate(self.analysis, program, world, inputs, banked, prune_before)
        if self.branching:
            world, left = prune(world, dict(enumerate(outputs)))
            outputs = list(left.values())
        return world, outputs

    def of_the_living(self, now: World, then: World, values: Sequence[Value]) -> list[Value]:
        """Values of an earlier world. Alternatives born since then share the primal's."""
        if not self.branching:
            return list(values)
        return [forget(value, now.births != then.births) for value in values]


@dataclasses.dataclass(frozen=True)
class _ScanRun(ControlRun):
    """A scan at the point where it is entered."""

    loop: Scan
    world: World
    constants: tuple[Value, ...]
    key: Key[Array, ""]
    coupling: dict[Equation, Any]

    @property
    def ys(self) -> tuple[Any, ...]:
        return self.equation.outputs[self.loop.num_carry :]

    @property
    def stamped(self) -> bool:
        """True if stacked outputs must record which alternatives they belong to."""
        return self.branching and any(self.analysis.has_alternative(y) for y in self.ys)

    def chances(self) -> _Chances:
        """The randomness of all iterations."""
        body, length = self.loop.body, self.loop.length
        key_uniforms, key_inner = jax.random.split(self.key)
        # Drawn for all iterations at once, as many as the body takes in one: keys drawn inside of
        # the loop would be generated one by one.
        count = self.analysis.num_uniforms(body) if self.branching else 0
        nested = any(
            _needs_key(self.analysis, inner) and inner not in self.coupling
            for inner in body.equations
        )
        return _Chances(
            jax.random.uniform(key_uniforms, (length, count), self.world.uniforms.dtype),
            jax.random.split(key_inner, length) if nested else None,
            list(self.coupling.values()),
        )

    def step(self, carried: Carried, inputs: tuple[list[Value], _Chances]) -> Any:
        """One iteration: the new carry, and the outputs to stack."""
        analysis, body, num_carry = self.analysis, self.loop.body, self.loop.num_carry
        xs, chances = inputs
        noise = dict(zip(self.coupling, chances.noise, strict=True))
        within = self.world.replace(lanes=carried.lanes, coupling_noise=noise)
        within = _inner(within, chances.uniforms, self.key if chances.key is None else chances.key)
        constants, xs = (
            self.of_the_living(within, self.world, known) for known in (self.constants, xs)
        )
        within, outputs = self.evaluate(
            body,
            within,
            [*constants, *carried.values, *xs],
            [variable in analysis.linear for variable in (*self.loop.carry, *self.ys)],
            _prune_before(analysis, body, num_carry),
        )
        # A carry has the same parts before and after each iteration, by the fixed point of the
        # analysis.
        values = as_foreseen(analysis, within, self.loop.carry, outputs[:num_carry])
        ys = as_foreseen(analysis, within, self.ys, outputs[num_carry:])
        # Stacked outputs leave the loop: an alternative that differs in them never recouples.
        within = pin(within, ys)
        stamp = within.births if self.stamped else None
        return Carried(values, within.lanes), (ys, stamp)


def scan(
    analysis: Analysis, world: World, equation: Equation, operands: Sequence[Value]
) -> tuple[World, list[Value]]:
    """`lax.scan` over values and lanes."""
    loop = equation.control
    assert isinstance(loop, Scan)
    constants, start, xs = loop.parts(operands)
    # Constants and slices are read in later iterations too: differences in them pin alternatives.
    world = pin(world, [*constants, *xs])
    world, key = world.spawn()
    key, key_couplings = jax.random.split(key)
    coupling = _noise_ahead(analysis, loop, constants, key_couplings)
    run = _ScanRun(analysis, equation, loop, world, constants, key, coupling)
    lanes = world.lanes
    if lanes.pinned is None and any(analysis.has_alternative(y) for y in run.ys):
        lanes = dataclasses.replace(lanes, pinned=jnp.full_like(lanes.births, -1))
    carried, (ys, stamps) = jax.lax.scan(
        run.step,
        Carried(as_foreseen(analysis, world, loop.carry, start), lanes),
        ([_first(value) for value in xs], run.chances()),
        length=loop.length,
        reverse=loop.reverse,
    )
    ys = [_after_scan(carried.lanes.births, stamps, y) for y in ys]
    after = world.replace(lanes=carried.lanes) if run.branching else world
    return after, [*carried.values, *ys]


def _noise_ahead(
    analysis: Analysis, loop: Scan, constants: Sequence[Value], key: Any
) -> dict[Equation, Any]:
    """The noise of the couplings for all iterations at once, for the proposals that are the same in
    every iteration.
    """
    known = dict(zip(loop.body.inputs, constants, strict=False))
    # The arrays of a proposal must be the same in every iteration: constants of the loop.
    ahead = {}
    for number, equation in enumerate(loop.body.equations):
        if equation.primitive == PROPOSE and _needs_key(analysis, equation):
            atoms = equation.inputs[1 : 1 + equation.params["form"].sizes[1]]
            if all(isinstance(atom, Constant) or atom in known for atom in atoms):
                arrays = [
                    jnp.asarray(atom.value) if isinstance(atom, Constant) else known[atom].primal
                    for atom in atoms
                ]
                ahead[equation] = noise_of_coupling(
                    equation, jax.random.fold_in(key, number), arrays, loop.length
                )
    return ahead


def _needs_key(analysis: Analysis, equation: Equation) -> bool:
    """True if an equation needs random numbers beyond the program's own."""
    if equation.primitive == PROPOSE:
        return any(atom in analysis.branched for atom in equation.inputs)
    return equation.control is not None and analysis.concerns(equation)


def _after_scan(births: Any, stamps: Any, y: Value) -> Value:
    """Stacked outputs. Rows from before a slot was last reassigned are the primal's."""
    y = _first(y)
    if y.alternative is None or stamps is None:
        return y
    # The alternative that now has slot k wrote a row iff no birth came after it, which is iff the
    # counts agree.
    current = (stamps == births[None]).T
    current = current.reshape(*current.shape, *(1,) * (y.alternative.ndim - 2))
    return Value(y.primal, y.tangent, jnp.where(current, y.alternative, y.primal[None]))


class _Rounds(eqx.Module):
    """The carry of a `while_loop`, with the number of iterations."""

    carried: Carried
    count: Int[Array, ""]


class _Runs(eqx.Module):
    """True for the primal and for each alternative that is still in the loop."""

    primal: Bool[Array, ""]
    slots: Bool[Array, "K"]


@dataclasses.dataclass(frozen=True)
class _WhileRun(ControlRun):
    """A `while_loop` at the point where it is entered."""

    loop: While
    world: World
    condition_constants: tuple[Value, ...]
    body_constants: tuple[Value, ...]
    key: Key[Array, ""]

    @property
    def apart(self) -> bool:
        return self.analysis.goes_apart(self.equation)

    @property
    def accumulated(self) -> list[bool]:
        """For each carry, True if it is banked at the end of each iteration."""
        outputs = self.equation.outputs
        return [self.apart and output in self.analysis.accumulated for output in outputs]

    def like(self, world: World, values: Sequence[Value]) -> list[Value]:
        """Carried values with the parts that the analysis determined."""
        analysis, carry = self.analysis, self.loop.carry
        return [
            conform(
                world,
                value,
                analysis.has_tangent(output),
                not banked if self.apart else analysis.has_alternative(variable),
            )
            for value, output, variable, banked in zip(
                values, self.equation.outputs, carry, self.accumulated, strict=True
            )
        ]

    def runs(self, within: World, values: Sequence[Value]) -> _Runs:
        """Evaluate the condition for the primal and the alternatives."""
        constants = self.of_the_living(within, self.world, self.condition_constants)
        inputs = [*constants, *values]
        _, (goes_on,) = evaluate(self.analysis, self.loop.condition, within, inputs, [False])
        return _Runs(goes_on.primal, in_lanes(goes_on, within.num_slots))

    def goes_on(self, rounds: _Rounds) -> Bool[Array, ""]:
        """True until the primal and every living alternative have stopped."""
        within = self.world.replace(lanes=rounds.carried.lanes)
        runs = self.runs(within, rounds.carried.values)
        return runs.primal | jnp.any(runs.slots & within.alive) if self.apart else runs.primal

    def step(self, rounds: _Rounds) -> _Rounds:
        values, count = rounds.carried.values, rounds.count
        key_uniforms, key_inner = jax.random.split(jax.random.fold_in(self.key, count))
        uniforms = jax.random.uniform(key_uniforms, (self.analysis.num_uniforms(self.loop.body),))
        within = _inner(self.world.replace(lanes=rounds.carried.lanes), uniforms, key_inner)
        # As in `lax.while_loop`, the values at the start of the iteration decide who runs.
        runs = self.runs(within, values) if self.apart else None
        within = within if runs is None else self.only(within, runs)
        within, outputs = self.evaluate(
            self.loop.body,
            within,
            [*self.of_the_living(within, self.world, self.body_constants), *values],
            [not self.apart and variable in self.analysis.linear for variable in self.loop.carry],
            _prune_before(self.analysis, self.loop.body, len(values)),
        )
        if runs is not None:
            within, outputs = self.freeze(rounds, within, runs, outputs)
        return _Rounds(Carried(self.like(within, outputs), within.lanes), count + 1)

    def only(self, within: World, runs: _Runs) -> World:
        """The world for those that still run. An alternative that has stopped keeps its values,
        and it must not be compared with the primal before the end of the iteration.
        """
        # Compare an alternative with the primal only in an iteration that both run. Otherwise one
        # of them is frozen and equality means nothing.
        pinned = -1 if within.lanes.pinned is None else within.lanes.pinned
        pinned = jnp.where(runs.slots & runs.primal, pinned, within.births)
        was_running = within.running
        running = runs.primal if was_running is None else runs.primal & was_running
        return within.with_lanes(pinned=pinned).replace(running=running)

    def freeze(
        self, rounds: _Rounds, within: World, runs: _Runs, outputs: Sequence[Value]
    ) -> tuple[World, list[Value]]:
        """Freeze those that have stopped, and drop alternatives that now agree with the primal."""
        # An alternative born in this iteration has run in it, because the primal has.
        newborn = within.births != rounds.carried.lanes.births
        runs = _Runs(runs.primal, runs.slots | newborn)
        frozen = [
            _frozen(within, old, new, runs, banked)
            for old, new, banked in zip(
                rounds.carried.values, outputs, self.accumulated, strict=True
            )
        ]
        within = within.with_lanes(pinned=self.world.lanes.pinned)
        within = within.replace(running=self.world.running)
        # No newcomers are left, so pruning only drops.
        return prune(within, dict(enumerate(frozen)))[0], frozen


def while_loop(
    analysis: Analysis, world: World, equation: Equation, operands: Sequence[Value]
) -> tuple[World, list[Value]]:
    """`lax.while_loop` until the primal and every living alternative have stopped. Each keeps the
    values with which it stopped.

    Where they may stop at different times, a value that is only added to is banked at the end of
    each iteration: `W (term of the alternative, if it still runs − term of the primal, if it
    does)`.
    Alternatives are born only while the primal runs.
    """
    loop = equation.control
    assert isinstance(loop, While)
    condition_constants, body_constants, start = loop.parts(operands)
    world, key = pin(world, [*condition_constants, *body_constants]).spawn()
    run = _WhileRun(analysis, equation, loop, world, condition_constants, body_constants, key)
    start = Carried(run.like(world, start), world.lanes)
    rounds = jax.lax.while_loop(run.goes_on, run.step, _Rounds(start, jnp.zeros((), jnp.int32)))
    after = world.replace(lanes=rounds.carried.lanes) if run.branching else world
    return after, rounds.carried.values


def _frozen(world: World, old: Value, new: Value, runs: _Runs, banked: bool) -> Value:
    """The next state of a carried value: the new value for those that run, the old value for those
    that have stopped.
    """
    choose = lambda a, b: jnp.where(runs.primal, a, b)
    tangent: Any = None
    if old.tangent is not None:
        tangent = choose(new.tangents(world.num_parameters, world.weight.dtype), old.tangent)
    primal = choose(new.primal, old.primal)
    after, before = (in_lanes(value, world.num_slots) for value in (new, old))
    slots = trees.select(runs.slots, after, before)
    if not banked:
        return Value(primal, tangent, slots)
    # slots − old is the alternative's term of this iteration, or 0 if it has stopped. primal − old
    # is the primal's term. Differences of earlier iterations are banked already.
    difference = (slots - old.primal[None]) - (primal - old.primal)[None]
    return add_difference(world, Value(primal, tangent), difference)


RULES.update({"scan": scan, "while": while_loop})
