"""The record of births: what each step closes is kept until the end of its block, and read there.

It stands around the averages: what is read of a block joins their sums where it is observed chain
by chain, and is gathered beside them otherwise.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from ..base import trees
from ..base.sums import CompensatedSum
from ..core import averages
from ..core.averages import Averaged, Averages
from ..core.chain import Chain
from ..core.execute import run, summed
from ..core.loop import Loop, over_chains
from ..core.plan import BLOCK_STEPS, Plan
from ..core.recorder import Recorder
from ..core.simulation import Outcome
from .birth_readout import Backward, BirthBlock, Forward, Reading

if TYPE_CHECKING:
    from .births import Births


class BirthRecord(eqx.Module):
    """The averages, and what was gathered: each chain's derivative, chains last, or the gradient of
    all of them together.
    """

    averaged: Averaged
    gathered: CompensatedSum


class OpenBlock(eqx.Module):
    """The averages' block, and room for what is kept of each of its steps."""

    averages: averages.Block
    kept: PyTree

    @property
    def own(self) -> PyTree:
        return self.averages.own


class BirthRecorder(Recorder):
    """Reads births at the end of each block, beside the averages."""

    averages: Averages
    births: Births

    def start(self, loop, parameters, chains) -> BirthRecord:
        averaged = self.averages.start(loop, parameters, chains)

        def gathered():
            return self._read(loop, chains, self._room(loop, chains), True)[1].gathered

        # Traced for its form only: nothing is read before the first block.
        nothing = trees.zeros(jax.eval_shape(gathered))
        return BirthRecord(averaged, CompensatedSum.like(nothing))

    def open_block(self, loop, progress) -> OpenBlock:
        inner = dataclasses.replace(progress, record=progress.record.averaged)
        block = self.averages.open_block(loop, inner)
        return OpenBlock(block, self._room(loop, progress.chains))

    def after_update(self, own, step, events):
        return self.averages.after_update(own, step, events)

    def after_step(self, stepper, parameters, chain, own, time):
        chain, own, observed = self.averages.after_step(stepper, parameters, chain, own, time)
        chain, kept = self._note(stepper, parameters, chain, time)
        return chain, own, (observed, kept)

    def add(self, block: OpenBlock, own, seen, time, row) -> OpenBlock:
        observed, kept = seen
        return OpenBlock(
            self.averages.add(block.averages, own, observed, time, row),
            jax.tree.map(lambda all, leaf: all.at[row].set(leaf), block.kept, kept),
        )

    def close_block(self, loop, progress, chains, block: OpenBlock, index):
        record: BirthRecord = progress.record
        chains, reading = self._read(loop, chains, block.kept, self._must_end(loop, index))
        inner = dataclasses.replace(progress, record=record.averaged)
        block_averages = _with_reading(block.averages, reading.observed)
        chains, averaged = self.averages.close_block(loop, inner, chains, block_averages, index)
        return chains, BirthRecord(averaged, record.gathered.plus(reading.gathered))

    def result(self, loop, progress) -> Outcome:
        record: BirthRecord = progress.record
        inner = dataclasses.replace(progress, record=record.averaged)
        outcome = self.averages.result(loop, inner)

        def mean(total):
            return jnp.where(progress.startable, total / self.averages.num_samples, jnp.nan)

        return dataclasses.replace(outcome, gathered=jax.tree.map(mean, record.gathered.value()))

    def _note(self, stepper, parameters, chain: Chain, time) -> tuple[Chain, PyTree]:
        at = stepper.observation(parameters, chain.state, chain.past)
        memory, kept = self.births.note(chain.memory, at, self._shares(time))
        return Chain(chain.state, chain.past, memory), kept

    def _shares(self, time: Int[Array, ""]) -> Float[Array, "n"]:
        """1 or 0: whether a step counts as a sample and, for a report, in which half it lies."""
        counted = jnp.asarray(time >= self.averages.burn_in)[None]
        if self.averages.diagnose:
            counted = jnp.concatenate([counted, self.averages.window.halves(time)])
        return counted.astype(float)

    def _room(self, loop: Loop, chains: Chain) -> PyTree:
        """Room for what is kept of a block's steps."""
        parameters = loop.stepper.parameters(loop.key)

        def note(chain):
            return self._note(loop.stepper, parameters, chain, jnp.zeros((), int))[1]

        form = jax.eval_shape(over_chains(note), chains)
        return trees.zeros(form, loop.plan.block_steps)

    def _must_end(self, loop: Loop, index: Int[Array, ""]) -> Bool[Array, ""]:
        """Short blocks may leave sums for the next, unless a report wants to know block by block;
        plain sums over many steps drift.
        """
        # The last block always ends them: nothing is left unread.
        every = 1 if self.averages.diagnose else -(-BLOCK_STEPS // loop.plan.block_steps)
        return ((index + 1) % every == 0) | (index + 1 == loop.plan.num_blocks)

    def _read(self, loop: Loop, chains: Chain, kept, must_end) -> tuple[Chain, Reading]:
        """The chains without what is read of a block at its end, and what was read."""
        block = BirthBlock(
            loop.stepper.parameters(loop.key),
            loop.plan.simulation.kernel,
            loop.plan.observable,
            chains.memory,
            kept,
            jnp.asarray(must_end),
        )
        memory, reading = self.births.reading.read(block)
        return Chain(chains.state, chains.past, memory), reading


def _with_reading(block: averages.Block, read: PyTree) -> averages.Block:
    """The averages' block with what was read: over its samples and over either half."""
    if read is None:
        return block

    def plus(observed, number):
        part = jax.tree.map(lambda leaf: leaf[number], read)
        return dataclasses.replace(observed, estimator=trees.add(observed.estimator, part))

    halves = block.halves
    if halves is not None:
        halves = (plus(halves[0], 1), plus(halves[1], 2))
    return averages.Block(plus(block.sums, 0), halves, block.own)


def _reading(plan: Plan, how: Backward | Forward) -> Plan:
    """The plan of the same chains, their births read in this way."""
    return plan.by(dataclasses.replace(plan.estimator, reading=how))


def pushed(plan: Plan, theta, key, args: tuple[Any, ...], direction) -> Float[Array, "F C"]:
    """The derivative of each chain's averages along a direction of θ."""
    outcome = run(_reading(plan, Forward(direction)), theta, key, args)
    explicit = outcome.observed.estimator
    return outcome.gathered if explicit is None else outcome.gathered + explicit


def pulled(plan: Plan, theta, key, args: tuple[Any, ...], cotangent: Float[Array, "F C"]) -> PyTree:
    """`Σ_c ⟨cotangent_c, dm_c⟩` for the averages m of each chain, like θ."""
    return summed(_pull, _reading(plan, Backward()), theta, key, args, cotangent)


def _pull(loop: Loop, cotangent: Float[Array, "F C"]) -> PyTree:
    begin = loop.start()
    # With the cotangent known ahead, S of a birth is one number, ⟨cotangent, Σ c (f(y) − f(x))⟩,
    # however many outputs f has.
    begin = eqx.tree_at(lambda progress: progress.chains.memory.cotangent, begin, cotangent)
    gradient = loop.blocks(0, loop.plan.num_blocks, begin).record.gathered
    may_run, count = jnp.all(begin.startable), loop.plan.simulation.num_samples
    return jax.tree.map(lambda leaf: jnp.where(may_run, leaf / count, jnp.nan), gradient.value())
