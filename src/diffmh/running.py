"""Running a simulation: to its end or a stretch of it, shared out over devices and groups of
chains; and its derivatives by births, forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array, Float, Int, Key, PyTree

from ._lowering.manual import varying
from ._sharding import over_groups, over_shards, placed, summed_over_shards
from .estimators import Backward, Forward
from .loop import Loop, Progress
from .simulation import Outcome, Simulation


def run(
    simulation: Simulation,
    theta: PyTree,
    key: Key[Array, ""],
    args: tuple[Any, ...],
    *,
    differentiate: bool = True,
    diagnose: bool = False,
) -> Outcome:
    """Runs the chains for `burn_in + num_samples` steps and averages over the last
    `num_samples`; each device of the mesh, if there is one, runs its share of them.
    """
    loop = Loop(simulation, theta, key, args, differentiate, diagnose)
    return shared_out(_run, loop, like=lambda loop: loop.outcome(loop.start()))


@varying
def _run(loop: Loop) -> Outcome:
    block = lambda index, progress: loop.block(index, progress)
    return loop.outcome(jax.lax.fori_loop(0, loop.num_blocks, block, loop.start()))


def advance(
    loop: Loop, progress: Progress, first: Int[Array, ""], last: Int[Array, ""]
) -> tuple[Progress, Outcome]:
    """Takes the chains through the blocks from `first` to before `last`, from their start if that
    is block 0. It is one program for every stretch, so that a run has the same digits however it
    is cut.
    """

    def like(loop: Loop, *_):
        progress = loop.start()
        return progress, loop.outcome(progress)

    return shared_out(_advance, loop, first, last, like=like, carry=progress)


@varying
def _advance(loop: Loop, progress: Progress, first, last) -> tuple[Progress, Outcome]:
    start = lambda _: loop.start()
    progress = jax.lax.cond(first == 0, start, lambda progress: progress, progress)
    block = lambda index, progress: loop.block(index, progress)
    progress = jax.lax.fori_loop(first, last, block, progress)
    return progress, loop.outcome(progress)


def pushed(
    simulation: Simulation, theta: PyTree, key: Key[Array, ""], args: tuple[Any, ...], direction
) -> Float[Array, "F C"]:
    """The derivative of each chain's averages along a direction of θ, by births."""
    simulation = simulation.reading(Forward(direction))
    outcome = run(simulation, theta, key, args)
    explicit = outcome.observed.estimator
    return outcome.gathered if explicit is None else outcome.gathered + explicit


def pulled(
    simulation: Simulation,
    theta: PyTree,
    key: Key[Array, ""],
    args: tuple[Any, ...],
    cotangent: Float[Array, "F C"],
) -> PyTree:
    """`Σ_c ⟨cotangent_c, dm_c⟩` for the averages m of each chain, like θ, by births."""
    simulation = simulation.reading(Backward())
    if simulation.mesh is None:
        return _pull(simulation, theta, key, args, cotangent)
    arrays, static = eqx.partition((simulation, theta, key, args), eqx.is_array)

    def on_device(keys, cotangent, arrays):
        simulation, theta, key, args = eqx.combine(arrays, static)
        return _pull(simulation.share(keys), theta, key, args, cotangent)

    keys = simulation.chain_keys(key)
    return summed_over_shards(on_device, simulation.mesh, keys, cotangent, arrays)


@varying
def _pull(simulation: Simulation, theta, key, args, cotangent: Float[Array, "F C"]) -> PyTree:
    loop = Loop(simulation, theta, key, args, True)
    begin = eqx.tree_at(lambda progress: progress.chains.memory.cotangent, loop.start(), cotangent)
    block = lambda index, progress: loop.block(index, progress)
    return loop.outcome(jax.lax.fori_loop(0, loop.num_blocks, block, begin)).gathered


def shared_out(
    function: Callable[..., PyTree],
    loop: Loop,
    *more: Any,
    like: Callable[..., PyTree],
    carry: PyTree = None,
) -> PyTree:
    """`function(loop, carry, *more)`, or without a carry `function(loop, *more)`; each device of
    the mesh, if there is one, has a loop of its share of the chains. What is carried is in the form
    of the first result, and `like(loop, *more)` has the results' form.
    """
    mesh, num_groups = loop.simulation.mesh, loop.num_groups
    if mesh is None and num_groups == 1:
        return function(loop, *(() if carry is None else (carry,)), *more)
    arrays, static = eqx.partition((loop, more), eqx.is_array)

    def share(keys, arrays):
        loop, more = eqx.combine(arrays, static)
        return loop.share(keys), more

    def on_device(keys, *given):
        *carried, arrays = given
        own, more = share(keys, arrays)
        if mesh is None:
            return function(own, *carried, *more)
        between = carried[0] if carried else None
        return shared_out(function, own, *more, like=like, carry=between)

    def form(keys, arrays):
        own, more = share(keys, arrays)
        return like(own, *more)

    keys = loop.simulation.chain_keys(loop.key)
    if mesh is None:
        return over_groups(on_device, num_groups, keys, arrays, like=form, carry=carry)
    return over_shards(on_device, mesh, keys, arrays, like=form, carry=carry)


def at_home(loop: Loop, like: Callable[[Loop], PyTree], tree: PyTree) -> PyTree:
    """Arrays in the form of `like(loop)`, each chain's with the device that runs it."""
    mesh = loop.simulation.mesh
    if mesh is None:
        return tree
    arrays, static = eqx.partition(loop, eqx.is_array)
    form = lambda keys, arrays: like(eqx.combine(arrays, static).share(keys))
    return placed(tree, form, mesh, loop.simulation.chain_keys(loop.key), arrays)
