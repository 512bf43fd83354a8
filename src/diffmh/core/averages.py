"""Averages over the samples of f and of what the estimator observes, with what a report watches.

Sums are plain within a block and compensated between blocks: long float32 sums drift.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PyTree

from ..base import trees
from ..base.sums import CompensatedSum
from ..fast.chains import over_chains
from .chain import Chain
from .parameters import Parameters
from .recorder import Recorder
from .simulation import Observed, Outcome
from .values import without_tangents
from .watch import Batches, Counts, Watch, Window

if TYPE_CHECKING:
    from .loop import Loop


class Averaged(eqx.Module):
    """Sums over the samples so far, and what is watched for a report, if one is wanted."""

    sums: CompensatedSum
    watch: Watch | None


class Block(eqx.Module):
    """A block's sums over its samples, and over those in either half of the watched window; `own`
    is what is counted in each chain.
    """

    sums: Observed
    halves: tuple[Observed, Observed] | None
    own: Counts | None


class Averages(Recorder):
    """Averages over the samples; with `diagnose` also what a report needs."""

    num_samples: int = eqx.field(static=True)
    burn_in: int = eqx.field(static=True)
    diagnose: bool = eqx.field(static=True, default=False)

    @property
    def window(self) -> Window:
        """The steps whose two halves a report compares."""
        return Window.of(self.num_samples, self.burn_in)

    def start(self, loop, parameters, chains) -> Averaged:
        counts = counts_at_start(loop, parameters, chains) if self.diagnose else None
        zeros, watch = zeros_of_seen(self, loop, parameters, chains, counts), None
        if counts is not None:
            plan = loop.plan
            batches = Batches.of(plan.num_blocks, plan.block_steps, self.num_samples, self.burn_in)
            watch = Watch.start(counts, _without_squares(zeros), batches, self.window)
        return Averaged(CompensatedSum.like(zeros), watch)

    def open_block(self, loop, progress) -> Block:
        zeros = trees.zeros(progress.record.sums.total)
        watch = progress.record.watch
        if watch is None:
            return Block(zeros, None, None)
        half = _without_squares(zeros)
        return Block(zeros, (half, half), watch.per_chain)

    def after_update(self, own, step, events):
        return None if own is None else own.note(step, events)

    def after_step(self, stepper, parameters, chain, own, time):
        at = stepper.observation(parameters, chain.state, chain.past)
        observed = stepper.observe(parameters, chain, at)
        if own is None:
            return chain, None, observed
        # About the start: E[f²] − E[f]² would cancel in float32 if f is far from 0.
        observed = dataclasses.replace(observed, watched=own.square(at.value.primal))
        return chain, own.after(chain.memory), observed

    def add(self, block: Block, own, seen: Observed, time, row) -> Block:
        # By `where` and not by a product with 0 or 1: before burn-in is over f may be infinite.
        sums = trees.add(block.sums, _where(time >= self.burn_in, seen))
        if block.halves is None:
            return Block(sums, None, None)
        early, late = (
            trees.add(half, _where(inside, _without_squares(seen)))
            for half, inside in zip(block.halves, self.window.halves(time), strict=True)
        )
        return Block(sums, (early, late), own)

    def close_block(self, loop, progress, chains, block: Block, index):
        record: Averaged = progress.record
        watch = record.watch
        if watch is not None and block.halves is not None and block.own is not None:
            halves = jax.tree.map(lambda early, late: jnp.stack([early, late]), *block.halves)
            watch = watch.after_block(index, block.own, _without_squares(block.sums), halves)
        return chains, Averaged(record.sums.plus(block.sums), watch)

    def result(self, loop, progress) -> Outcome:
        """The averages. They are NaN for a chain that starts outside the support, and for a chain
        whose kernel has parameters out of range.
        """
        record: Averaged = progress.record

        def mean(total):
            return jnp.where(progress.startable, total / self.num_samples, jnp.nan)

        log_density = None
        if self.diagnose:
            largest = loop.stepper.largest_log_density
            log_density = over_chains(largest)(progress.chains.state.x)
        return Outcome(
            jax.tree.map(mean, record.sums.value()),
            record.watch,
            log_density,
            type(loop.plan.estimator).__name__,
        )


def counts_at_start(loop: Loop, parameters: Parameters, chains: Chain) -> Counts:
    """The counts of each chain before its first step."""
    plan, plain = loop.plan, parameters.value_only()

    def zeros(chain):
        origin = plan.observable(plain, chain.state.x, without_tangents(chain.past)).primal
        return Counts.zeros(len(plan.leaves), origin, chain.memory)

    return over_chains(zeros)(chains)


def zeros_of_seen(
    recorder: Recorder, loop: Loop, parameters: Parameters, chains: Chain, own: PyTree
) -> PyTree:
    """Zeros in the form of what a recorder sees after a step; `own` is what chains carry."""

    def seen(chain, own):
        return recorder.after_step(loop.stepper, parameters, chain, own, jnp.zeros((), int))[2]

    return trees.zeros(jax.eval_shape(over_chains(seen), chains, own))


def _where(counted: Bool[Array, ""], observed: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: jnp.where(counted, leaf, jnp.zeros_like(leaf)), observed)


def _without_squares(observed: Observed) -> Observed:
    """Without the squares, which are there for the whole run alone."""
    return dataclasses.replace(observed, watched=None)
