"""Running a simulation: to its end or a stretch of it, shared out over devices and groups of
chains; and its derivatives by births, forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, PyTree

from ._lowering.manual import varying
from ._sharding import over_groups, over_shards, placed, summed_over_shards
from ._sums import CompensatedSum
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
    return shared_out(_run, loop, None)


@varying
def _run(loop: Loop, _: None) -> Outcome:
    block = lambda index, progress: loop.block(index, progress)
    return loop.outcome(jax.lax.fori_loop(0, loop.num_blocks, block, loop.start()))


def advance(
    loop: Loop, progress: Progress, first: Int[Array, ""], last: Int[Array, ""]
) -> tuple[Progress, Outcome]:
    """Takes the chains through the blocks from `first` to before `last`, from their start if that
    is block 0. It is one program for every stretch, so that a run has the same digits however it
    is cut.
    """
    return shared_out(_advance, loop, progress, first, last)


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

    def block(index, carry):
        progress, gradient = carry
        progress, reading = loop.read_block(index, progress)
        assert reading is not None, "births are read at the end of every block"
        return progress, gradient.plus(reading.pulled)

    nothing = CompensatedSum.like(jax.tree.map(jnp.zeros_like, theta))
    _, gradient = jax.lax.fori_loop(0, loop.num_blocks, block, (begin, nothing))
    may_run = jnp.all(begin.startable)
    mean = lambda leaf: jnp.where(may_run, leaf / simulation.num_samples, jnp.nan)
    return jax.tree.map(mean, gradient.value())


def shared_out(function: Callable[..., PyTree], loop: Loop, carry: PyTree, *more: Any) -> PyTree:
    """`function(loop, carry, *more)`, by groups of chains; each device of the mesh, if there is
    one, has a loop of its share of them. Chains are the last axis of every array that is carried or
    returned.
    """
    mesh, num_groups = loop.simulation.mesh, loop.num_groups
    if mesh is None and num_groups == 1:
        return function(loop, carry, *more)
    arrays, static = eqx.partition((loop, more), eqx.is_array)

    def share(keys, carry, arrays):
        loop, more = eqx.combine(arrays, static)
        return shared_out(function, loop.share(keys), carry, *more)

    keys = loop.simulation.chain_keys(loop.key)
    if mesh is None:
        return over_groups(share, num_groups, keys, carry, arrays)
    return over_shards(share, mesh, keys, carry, arrays)


def at_home(loop: Loop, tree: PyTree) -> PyTree:
    """Arrays with chains last, each chain's with the device that runs it."""
    mesh = loop.simulation.mesh
    return tree if mesh is None else placed(tree, mesh)
