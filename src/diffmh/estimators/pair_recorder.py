"""The record of pairs of chains: their terms added up, until all of them are finished."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar, cast

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from ..base import trees
from ..base.sums import CompensatedSum
from ..core.averages import counts_at_start, zeros_of_seen
from ..core.chain import Chain
from ..core.loop import over_chains
from ..core.recorder import Recorder
from ..core.simulation import Meetings, Observed, Outcome
from ..core.watch import Batches, Counts, Watch, Window
from .mixing import PairTerms

if TYPE_CHECKING:
    from .paired import PairEstimator


class PairRecord(eqx.Module):
    """Sums so far; for a report also what was counted, and where each pair was last unfinished."""

    sums: CompensatedSum
    counts: Counts | None


class PairBlock(eqx.Module):
    """A block's sums, and what is counted in each pair."""

    sums: PairTerms
    own: Counts | None


class PairRecorder(Recorder):
    """Adds up the terms of pairs; ends when all pairs are finished."""

    estimator: PairEstimator
    diagnose: bool = eqx.field(static=True)
    stops: ClassVar[bool] = True

    def stages(self, estimator):
        """During the burn-in and after it, each first with pairs and then, once all of them have
        met, with their primals alone.
        """
        pairs = cast("PairEstimator", estimator)
        forms = [dataclasses.replace(pairs, burning_in=True), pairs]
        # The births of F, the finite chain's, begin with the first step.
        if pairs.finite or pairs.schedule.first == 1:
            forms = [pairs]
        return tuple(
            dataclasses.replace(form, merged=merged) for form in forms for merged in (False, True)
        )

    def finished(self, chains, stage=None):
        memory, schedule = chains.memory, self.estimator.schedule
        stage = cast("PairEstimator | None", stage)
        if stage is not None and not (stage.merged and not stage.burning_in):
            merged = jnp.all(memory.second.now(schedule)[0] & memory.second_idle)
            # Its last step is the one from first − 2 to first − 1 = `burn_in`.
            burnt_in = memory.second.time[0] + 1 >= schedule.first - 1
            if not stage.burning_in:
                return merged
            return burnt_in | (merged if not stage.merged else ~merged)
        # All chains take their steps together. The slots are looked at only when the births are
        # over.
        over = self._no_births_left(memory.second.time[0] + 1)
        look = lambda chains: jnp.all(self._finished(chains))
        return jax.lax.cond(over, look, lambda chains: jnp.zeros((), bool), chains)

    def needs_own_noise(self, chains):
        # It moves second chains until they meet, and alternatives.
        if self.estimator.alternatives:
            return True
        return ~jnp.all(chains.memory.second.now(self.estimator.schedule)[0])

    def _finished(self, chains: Chain) -> Bool[Array, "C"]:
        memory, schedule = chains.memory, self.estimator.schedule
        met, _ = memory.second.now(schedule)
        return met & self._no_births_left(memory.second.time + 1) & memory.idle

    def _no_births_left(self, now: Int[Array, "*C"]) -> Bool[Array, "*C"]:
        """True if the samples are over, and so is the step from the last of them, whose births
        belong to D: it must be taken even if all slots are empty before it.
        """
        schedule = self.estimator.schedule
        return now > schedule.last if self.estimator.alternatives else now >= schedule.last

    def start(self, loop, parameters, chains) -> PairRecord:
        counts = counts_at_start(loop, parameters, chains) if self.diagnose else None
        zeros = zeros_of_seen(self, loop, parameters, chains, counts)
        return PairRecord(CompensatedSum.like(zeros), counts)

    def open_block(self, loop, progress) -> PairBlock:
        record: PairRecord = progress.record
        return PairBlock(jax.tree.map(jnp.zeros_like, record.sums.total), record.counts)

    def after_update(self, own, step, events):
        return None if own is None else own.note(step, events)

    def after_step(self, stepper, parameters, chain, own, time):
        at = stepper.observation(parameters, chain.state, chain.past)
        # f by itself, so that its value is rounded alike whether or not it is differentiated.
        value = stepper.value(parameters, chain)
        at = dataclasses.replace(at, value=dataclasses.replace(at.value, primal=value))
        terms = stepper.plan.estimator.observe(chain.memory, at)
        return chain, None if own is None else own.after(chain.memory), terms

    def add(self, block: PairBlock, own, seen: PairTerms, time, row) -> PairBlock:
        return PairBlock(trees.add(block.sums, seen), own)

    def close_block(self, loop, progress, chains, block: PairBlock, index):
        record: PairRecord = progress.record
        return chains, PairRecord(record.sums.plus(block.sums), block.own)

    def result(self, loop, progress) -> Outcome:
        """The averages. They are NaN for a pair that has not met within `max_steps` or that cannot
        start. The derivative is also NaN for a pair whose alternatives are still being followed.
        """
        record: PairRecord = progress.record
        second, schedule = progress.chains.memory.second, self.estimator.schedule
        met, meeting = second.now(schedule)
        finished = self._finished(progress.chains)
        known = progress.startable & met & (second.time + 1 >= schedule.last)
        n = schedule.num_samples

        def mean(total: Any, sound: Any) -> Any:
            return jnp.where(sound, total / n, jnp.nan)

        sums: PairTerms = record.sums.value()
        sound = progress.startable & finished
        estimator = None
        if self.estimator.differentiates_f:
            own = dataclasses.replace(sums, plain=None)
            estimator = jax.tree.map(lambda total: mean(total, sound), own)
            # What each chain's averages are about.
            memory, moments = progress.chains.memory, estimator.moments
            if moments is not None:
                moments = dataclasses.replace(moments, origin=memory.origins)
            estimator = dataclasses.replace(estimator, moments=moments, origin=memory.origin)
        if self.estimator.finite:
            value = mean(sums.plain, progress.startable)
        else:
            value = mean(sums.value, known)
        return Outcome(
            Observed(value, estimator, None),
            *self._watched(loop, progress),
            type(self.estimator).__name__,
            meetings=Meetings(
                meeting, second.time + 1, met, finished, schedule.lag, schedule.max_steps
            ),
        )

    def _watched(self, loop, progress):
        """For a report: the counts, and the largest log density at the end."""
        counts = progress.record.counts
        if counts is None:
            return None, None
        simulation = loop.plan.simulation
        window = Window.of(simulation.num_samples, simulation.burn_in)
        watch = Watch(counts, None, None, Batches((0,), (simulation.num_samples,)), window)
        largest = loop.stepper.largest_log_density
        return watch, over_chains(largest)(progress.chains.state.x)
