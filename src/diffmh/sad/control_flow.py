"""The rules of loops and conditionals.

Within them the world is carried beside the values. A value from outside belongs to the alternatives
that lived when the loop was entered: in slots that have been given away since, it is the primal's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._lowering.program import Cond, Constant, Equation, Program, Scan, While
from .analysis import Analysis
from .interpreter import RULES, evaluate
from .propose import PROPOSE
from .rules import draw_coupling_noise
from .values import Value, World, drop_recoupled, forget, pin, select_slots, settle, weighted


def conform(world: World, value: Value, tangent: bool, alternative: bool) -> Value:
    """A value with exactly the parts that are asked for."""
    tangents = value.tangents(world.num_parameters, world.weight.dtype) if tangent else None
    return Value(value.primal, tangents, value.in_slots(world.num_slots) if alternative else None)


def _like(
    analysis: Analysis, world: World, variables: Sequence[Any], values: Sequence[Value]
) -> list[Value]:
    """Values with the parts that the analysis foresees for `variables`."""
    flags = [
        (analysis.has_tangent(variable), analysis.has_alternative(variable))
        for variable in variables
    ]
    return [conform(world, value, *flag) for value, flag in zip(values, flags, strict=True)]


def _finish(world: World, values: Sequence[Value]) -> tuple[World, list[Value]]:
    """Settles at the end of an inner program, whose outputs are all that matters of it."""
    world, settled = settle(world, dict(enumerate(values)))
    return world, list(settled.values())


def _settle_before(analysis: Analysis, program: Program, num_carry: int) -> int | None:
    """The first equation by which everything that is carried on is known: what follows is
    computed for the survivors only.
    """
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


def _chance(analysis: Analysis, program: Program, key: Any) -> tuple[Any, Any]:
    """The uniforms of one run of an inner program, and a key for programs within it."""
    key_uniforms, key_inner = jax.random.split(key)
    return jax.random.uniform(key_uniforms, (analysis.num_uniforms(program),)), key_inner


def _forget_all(world: World, births: Any, values: Sequence[Value]) -> list[Value]:
    return [forget(value, world.births != births) for value in values]


def _first(value: Value) -> Value:
    """Time as the leading axis of tangents and alternatives."""
    swap = lambda part: None if part is None else jnp.moveaxis(part, 1, 0)
    return Value(value.primal, swap(value.tangent), swap(value.alternative))


def scan(
    analysis: Analysis, world: World, equation: Equation, operands: Sequence[Value]
) -> tuple[World, list[Value]]:
    """`lax.scan` over values and world. What leaves an iteration is kept for the alternatives
    that live on to the end.
    """
    loop = equation.control
    assert isinstance(loop, Scan)
    body, num_constants, num_carry = loop.body, loop.num_constants, loop.num_carry
    edge = num_constants + num_carry
    carry_variables, bank_outputs = (
        body.inputs[num_constants:edge],
        _scan_banks(analysis, equation, loop),
    )
    constants, xs = operands[:num_constants], [_first(value) for value in operands[edge:]]
    world = pin(world, [*constants, *operands[edge:]])
    init = _like(analysis, world, carry_variables, operands[num_constants:edge])
    branching, entry = equation in analysis.branching, world.births
    branched_ys = [analysis.has_alternative(variable) for variable in equation.outputs[num_carry:]]
    settle_before = _settle_before(analysis, body, num_carry)
    world, key = world.spawn()
    key_uniforms, key_inner, key_couplings = jax.random.split(key, 3)
    num_uniforms = analysis.num_uniforms(body) if branching else 0
    uniforms = jax.random.uniform(key_uniforms, (loop.length, num_uniforms), world.uniforms.dtype)
    coupling_noise = _draw_ahead(analysis, loop, constants, key_couplings)
    nested = any(
        _needs_key(analysis, inner) and inner not in coupling_noise for inner in body.equations
    )
    keys = jax.random.split(key_inner, loop.length) if nested else None

    def step(carry, slices):
        values, weight, births, pinned = carry
        xs, uniforms, key, noise = slices
        within = world.replace(
            weight=weight,
            births=births,
            pinned=pinned,
            coupling_noise=dict(zip(coupling_noise, noise, strict=True)),
        )
        within = _inner(within, uniforms, key_inner if key is None else key)
        known = _forget_all(within, entry, constants) if branching else constants
        xs = [Value(v.primal, v.tangent, v.alternative) for v in xs]
        xs = _forget_all(within, entry, xs) if branching else xs
        within, outputs = evaluate(
            analysis, body, within, [*known, *values, *xs], bank_outputs, settle_before
        )
        within, outputs = _finish(within, outputs) if branching else (within, outputs)
        carried = _like(analysis, within, carry_variables, outputs[:num_carry])
        ys = _like(analysis, within, equation.outputs[num_carry:], outputs[num_carry:])
        within = pin(within, ys)
        stamp = within.births if branching and any(branched_ys) else None
        return (carried, within.weight, within.births, within.pinned), (ys, stamp)

    pinned = (
        jnp.full_like(world.births, -1)
        if world.pinned is None and any(branched_ys)
        else world.pinned
    )
    start = (init, world.weight, world.births, pinned)
    (carried, weight, births, _), (ys, stamps) = jax.lax.scan(
        step,
        start,
        (xs, uniforms, keys, list(coupling_noise.values())),
        length=loop.length,
        reverse=loop.reverse,
    )
    if branching:
        world = world.replace(weight=weight, births=births)
    return world, [*carried, *(_after_scan(births, stamps, y) for y in ys)]


def _draw_ahead(
    analysis: Analysis, loop: Scan, constants: Sequence[Value], key: Any
) -> dict[Equation, Any]:
    """The couplings' own randomness for all iterations at once, for those proposals that are the
    same in each.
    """
    known = dict(zip(loop.body.inputs, constants, strict=False))
    drawn = {}
    for number, equation in enumerate(loop.body.equations):
        if equation.primitive == PROPOSE and _needs_key(analysis, equation):
            atoms = equation.inputs[1 : 1 + equation.params["form"].sizes[1]]
            if all(isinstance(atom, Constant) or atom in known for atom in atoms):
                arrays = [
                    jnp.asarray(atom.value) if isinstance(atom, Constant) else known[atom].primal
                    for atom in atoms
                ]
                drawn[equation] = draw_coupling_noise(
                    equation, jax.random.fold_in(key, number), arrays, loop.length
                )
    return drawn


def _needs_key(analysis: Analysis, equation: Equation) -> bool:
    """Whether an equation draws what the program does not."""
    if equation.primitive == PROPOSE:
        return any(atom in analysis.branched for atom in equation.inputs)
    return equation.control is not None


def _scan_banks(analysis: Analysis, equation: Equation, loop: Scan) -> list[bool]:
    """Which outputs of the body are taken linearly."""
    carry = loop.body.inputs[loop.num_constants : loop.num_constants + loop.num_carry]
    return [
        variable in analysis.linear for variable in (*carry, *equation.outputs[loop.num_carry :])
    ]


def _after_scan(births: Any, stamps: Any, y: Value) -> Value:
    """Stacked outputs: those of iterations before a slot was last given away are the primal's."""
    y = _first(y)
    if y.alternative is None or stamps is None:
        return y
    current = (stamps == births).T
    current = current.reshape(*current.shape, *(1,) * (y.alternative.ndim - 2))
    return Value(y.primal, y.tangent, jnp.where(current, y.alternative, y.primal))


def while_loop(
    analysis: Analysis, world: World, equation: Equation, operands: Sequence[Value]
) -> tuple[World, list[Value]]:
    """`lax.while_loop` until the primal and every living alternative have stopped, each frozen
    where it did.

    Where they may stop apart, a value that is only added to is banked at the end of each iteration,
    `W (term in the alternative, if it still runs − term of the primal, if it does)`; alternatives
    are born only while the primal runs.
    """
    loop = equation.control
    assert isinstance(loop, While)
    apart = analysis.stops_apart(loop)
    num_condition, num_body = loop.num_condition_constants, loop.num_body_constants
    carry_variables = loop.body.inputs[num_body:]
    accumulated = [apart and variable in analysis.accumulated for variable in equation.outputs]
    branching, entry = equation in analysis.branching, world.births
    condition_constants, body_constants = (
        operands[:num_condition],
        operands[num_condition : num_condition + num_body],
    )
    world = pin(world, [*condition_constants, *body_constants])
    tangents = [analysis.has_tangent(variable) for variable in equation.outputs]
    slots = [
        apart and not flag if apart else analysis.has_alternative(v)
        for flag, v in zip(accumulated, carry_variables, strict=True)
    ]
    like = lambda world, values: [
        conform(world, *parts) for parts in zip(values, tangents, slots, strict=True)
    ]
    init = like(world, operands[num_condition + num_body :])
    bank_outputs = [not apart and variable in analysis.linear for variable in carry_variables]
    settle_before = _settle_before(analysis, loop.body, len(carry_variables))
    world, key = world.spawn()

    def known(within, constants):
        return _forget_all(within, entry, constants) if branching else list(constants)

    def unfinished(within, values):
        """Whether the primal goes on, and which alternatives do."""
        inputs = [*known(within, condition_constants), *values]
        _, (goes_on,) = evaluate(analysis, loop.condition, within, inputs, [False])
        return goes_on.primal, goes_on.in_slots(within.num_slots)

    def goes_on(state):
        values, weight, births, _ = state
        within = world.replace(weight=weight, births=births)
        primal, alternative = unfinished(within, values)
        return primal | jnp.any(alternative & within.alive) if apart else primal

    def step(state):
        values, weight, births, count = state
        within = _inner(
            world.replace(weight=weight, births=births),
            *_chance(analysis, loop.body, jax.random.fold_in(key, count)),
        )
        runs, slots_run = (
            unfinished(within, values)
            if apart
            else (jnp.array(True), jnp.ones(within.num_slots, bool))
        )
        if apart:
            # One that has stopped stays as it is, whatever the body would make of it: it may not be
            # compared until the end.
            pinned = jnp.where(
                slots_run & runs, -1 if within.pinned is None else within.pinned, within.births
            )
            was_running = within.running
            within = within.replace(
                pinned=pinned, running=runs if was_running is None else runs & was_running
            )
        inputs = [*known(within, body_constants), *values]
        within, outputs = evaluate(analysis, loop.body, within, inputs, bank_outputs, settle_before)
        within, outputs = _finish(within, outputs) if branching else (within, outputs)
        if apart:
            newborn = within.births != births
            outputs = [
                _frozen(within, old, new, runs, slots_run | newborn, flag)
                for old, new, flag in zip(values, outputs, accumulated, strict=True)
            ]
            within = within.replace(pinned=world.pinned, running=world.running)
            within = drop_recoupled(within, outputs)
        return like(within, outputs), within.weight, within.births, count + 1

    values, weight, births, _ = jax.lax.while_loop(
        goes_on, step, (init, world.weight, world.births, jnp.zeros((), jnp.int32))
    )
    return world.replace(weight=weight, births=births if branching else world.births), values


def _frozen(
    world: World, old: Value, new: Value, runs: Any, slots_run: Any, accumulated: bool
) -> Value:
    """The next state of a carried value: of those that run, the new one; of those that stopped,
    the old.
    """
    choose = lambda a, b: jnp.where(runs, a, b)
    tangent: Any = None
    if old.tangent is not None:
        tangent = choose(new.tangents(world.num_parameters, world.weight.dtype), old.tangent)
    primal = choose(new.primal, old.primal)
    new_slots, old_slots = new.in_slots(world.num_slots), old.in_slots(world.num_slots)
    slots = select_slots(slots_run, new_slots, old_slots)
    if not accumulated:
        return Value(primal, tangent, slots)
    difference = (slots - old.primal) - (primal - old.primal)
    return Value(
        primal, tangent + weighted(world.weight, world.alive, difference).astype(tangent.dtype)
    )


def cond(
    analysis: Analysis, world: World, equation: Equation, operands: Sequence[Value]
) -> tuple[World, list[Value]]:
    """`lax.switch` where all alternatives take the primal's branch; else every branch is run,
    and each takes its own.
    """
    assert isinstance(equation.control, Cond)
    index, inputs = operands[0], operands[1:]
    branches, branching = equation.control.branches, equation in analysis.branching
    index = Value(
        *(
            None if part is None else jnp.clip(part.astype(jnp.int32), 0, len(branches) - 1)
            for part in _parts(index)
        )
    )
    world, key = world.spawn()
    run = _every_branch if index.alternative is not None else _one_branch
    return run(analysis, world, equation, branches, index, inputs, key, branching)


def _parts(value: Value):
    return value.primal, value.tangent, value.alternative, value.pending


def _run_branch(analysis, world, equation, branch, inputs, key, branching, bank_outputs):
    uniforms, key_inner = (
        _chance(analysis, branch, key) if branching else (world.uniforms, world.key)
    )
    after, outputs = evaluate(
        analysis, branch, _inner(world, uniforms, key_inner), inputs, bank_outputs
    )
    after, outputs = _finish(after, outputs) if branching else (after, outputs)
    return after, outputs


def _one_branch(analysis, world, equation, branches, index, inputs, key, branching):
    bank_outputs = [variable in analysis.linear for variable in equation.outputs]

    def taken(branch):
        def run(inputs):
            after, outputs = _run_branch(
                analysis, world, equation, branch, inputs, key, branching, bank_outputs
            )
            return after.weight, after.births, _like(analysis, after, equation.outputs, outputs)

        return run

    weight, births, outputs = jax.lax.switch(
        index.primal, [taken(branch) for branch in branches], list(inputs)
    )
    return (world.replace(weight=weight, births=births) if branching else world), outputs


def _every_branch(analysis, world, equation, branches, index, inputs, key, branching):
    entry, results = world, []
    bank_outputs = [False] * len(equation.outputs)
    num_outputs = len(equation.outputs)
    for number, branch in enumerate(branches):
        chosen = index.primal == number
        within = world.replace(running=chosen if entry.running is None else chosen & entry.running)
        current = _forget_all(within, entry.births, inputs) if branching else list(inputs)
        # What the other branches take and led to matters as long as the choice between them has not
        # been made.
        within = pin(within, [index, *current, *results])
        after, outputs = _run_branch(
            analysis,
            within,
            equation,
            branch,
            current,
            jax.random.fold_in(key, number),
            branching,
            bank_outputs,
        )
        if branching:
            replaced = after.births != world.births
            index, results = forget(index, replaced), [forget(value, replaced) for value in results]
        world = world.replace(weight=after.weight, births=after.births)
        results = [*results, *outputs]
    rows = [
        results[number * num_outputs : (number + 1) * num_outputs]
        for number in range(len(branches))
    ]
    chosen = [_choose(world, index, column) for column in zip(*rows, strict=True)]
    return world.replace(births=world.births if branching else entry.births), chosen


def _choose(world: World, index: Value, column: Sequence[Value]) -> Value:
    """`column[index]`, by each alternative's own index."""
    primal = _select(index.primal, [value.primal for value in column])
    tangent = None
    if any(value.tangent is not None for value in column):
        tangent = _select(
            index.primal,
            [value.tangents(world.num_parameters, world.weight.dtype) for value in column],
        )
    slots = [value.in_slots(world.num_slots) for value in column]
    own = index.alternative.reshape(-1, *(1,) * (slots[0].ndim - 1))
    return Value(primal, tangent, _select(own, slots))


def _select(index: Any, cases: Sequence[Any]) -> Any:
    result = cases[0]
    for number, case in enumerate(cases[1:], 1):
        result = jnp.where(index == number, case, result)
    return result


RULES.update({"scan": scan, "while": while_loop, "cond": cond})
