"""Running a loop: to its end or a stretch of it, shared out over devices and groups of chains."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array, Float, Int, Key, PyTree

from ..fast.shard_map import varying
from ..runs.devices import over_groups, over_shards, placed, summed_over_shards
from .averages import Averages
from .chain import Stepper
from .estimator import Estimator, ValueOnly
from .loop import Loop, Progress
from .plan import Plan
from .simulation import Outcome

# Pilot chains, and the number that sets their key apart from those of rounds and blocks.
_PILOT_CHAINS, _PILOT = 32, 0x5713


def loop_of(
    plan: Plan, theta: PyTree, key: Key[Array, ""], args: tuple[Any, ...], diagnose: bool = False
) -> Loop:
    """The loop of a plan that averages; with `diagnose` also what a report needs."""
    if plan.estimator.pilot_steps:
        plan = plan.by(_piloted(plan, theta, key, args))
    simulation = plan.simulation
    averages = Averages(simulation.num_samples, simulation.burn_in, diagnose)
    return Loop(plan, theta, key, args, plan.estimator.recorder(averages))


@eqx.filter_jit
def _piloted(plan: Plan, theta: PyTree, key: Key[Array, ""], args: tuple[Any, ...]) -> Estimator:
    """The plan's estimator, prepared by the last states of pilot chains with a key of their own."""
    steps = max(plan.estimator.pilot_steps, plan.simulation.burn_in)
    simulation = dataclasses.replace(
        plan.simulation,
        estimator=ValueOnly(),
        num_samples=1,
        burn_in=steps - 1,
        num_chains=_PILOT_CHAINS,
        mesh=None,
    )
    pilot = dataclasses.replace(plan, simulation=simulation, num_chains=_PILOT_CHAINS, keys=None)
    own_key = jax.random.fold_in(key, _PILOT)
    loop = Loop(pilot, theta, own_key, args, Averages(1, steps - 1))
    states = loop.blocks(0, pilot.num_blocks, loop.start()).chains.state.x
    parameters = Stepper(plan, theta, args).parameters(own_key)
    return plan.estimator.prepared(plan.simulation.kernel, parameters, states, plan.observable)


def run(plan: Plan, theta: PyTree, key: Key[Array, ""], args: tuple[Any, ...]) -> Outcome:
    """The averages over the last `num_samples` of `burn_in + num_samples` steps of all chains; each
    device of the mesh, if there is one, runs its share of them.
    """
    return shared_out(_whole, loop_of(plan, theta, key, args), None)


@varying
def _whole(loop: Loop, _: None) -> Any:
    progress = loop.blocks(0, loop.plan.num_blocks, loop.start())
    return loop.recorder.result(loop, progress)


def advance(
    loop: Loop, progress: Progress, first: Int[Array, ""], last: Int[Array, ""]
) -> tuple[Progress, Any]:
    """The progress after the blocks from `first` to before `last`, from the start if that is block
    0, and the result up to there. It is one program for every stretch, so that a run has the same
    digits however it is cut.
    """
    return shared_out(_advance, loop, progress, first, last)


@varying
def _advance(loop: Loop, progress: Progress, first, last) -> tuple[Progress, Any]:
    # A branch of the same program and not a program of its own: compiled apart, the start could be
    # rounded differently, and a resumed run would differ from an uninterrupted one.
    progress = jax.lax.cond(first == 0, lambda _: loop.start(), lambda same: same, progress)
    progress = loop.blocks(first, last, progress)
    return progress, loop.recorder.result(loop, progress)


def summed(
    function: Callable[[Loop, Float[Array, "F C"]], PyTree],
    plan: Plan,
    theta: PyTree,
    key: Key[Array, ""],
    args: tuple[Any, ...],
    per_chain: Float[Array, "F C"],
) -> PyTree:
    """`function(loop, per_chain)`, a sum over chains, added up over the devices of the mesh."""
    function, mesh = varying(function), plan.simulation.mesh
    if mesh is None:
        return function(loop_of(plan, theta, key, args), per_chain)
    arrays, static = eqx.partition((plan, theta, key, args), eqx.is_array)

    def on_device(keys, per_chain, arrays):
        plan, theta, key, args = eqx.combine(arrays, static)
        return function(loop_of(plan.share(keys), theta, key, args), per_chain)

    return summed_over_shards(on_device, mesh, plan.chain_keys(key), per_chain, arrays)


def shared_out(function: Callable[..., PyTree], loop: Loop, carry: PyTree, *more: Any) -> PyTree:
    """`function(loop, carry, *more)` of each group of chains, on each device of the mesh.

    Invariant: chains are the last axis of every array that is carried or returned, so cutting and
    joining along it is all that sharing out does. A device's share is cut into groups in its turn.
    """
    mesh, num_groups = loop.plan.simulation.mesh, loop.plan.num_groups
    if mesh is None and num_groups == 1:
        return function(loop, carry, *more)
    # What is captured by closure would be the same on every device; as arguments the compiler is
    # told so.
    arrays, static = eqx.partition((loop, more), eqx.is_array)

    def share(keys, carry, arrays):
        loop, more = eqx.combine(arrays, static)
        return shared_out(function, loop.share(keys), carry, *more)

    keys = loop.plan.chain_keys(loop.key)
    if mesh is None:
        return over_groups(share, num_groups, keys, carry, arrays)
    return over_shards(share, mesh, keys, carry, arrays)


def at_home(loop: Loop, tree: PyTree) -> PyTree:
    """Arrays with chains last, each chain's on the device that runs it."""
    mesh = loop.plan.simulation.mesh
    return tree if mesh is None else placed(tree, mesh)
