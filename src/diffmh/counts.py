"""What `.run` counts in the time loop, for its report."""

from __future__ import annotations

import dataclasses

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from .alternatives import Alternatives, Events
from .kernel import Step

# Batches per chain whose means tell the effective number of samples.
_BATCHES = 16


class Counts(eqx.Module):
    """Sums over the steps of one chain, and the largest weight met. A slot's step counts as a
    step of its own.
    """

    decisions: Int[Array, "*C"]
    accepted: Int[Array, "*C"]
    nan: Int[Array, "*C"]
    slot_steps: Int[Array, "*C"]
    alive: Int[Array, "*C"]
    recoupled: Int[Array, "*C"]
    weight_born: Float[Array, "*C"]
    max_weight: Float[Array, "*C"]

    @staticmethod
    def zeros() -> Counts:
        count, size = jnp.zeros((), int), jnp.zeros(())
        return Counts(count, count, count, count, count, count, size, size)

    def note(self, step: Step, events: Events | None) -> Counts:
        """After an inner step."""
        counts = dataclasses.replace(
            self,
            decisions=self.decisions + step.accepted.size,
            accepted=self.accepted + jnp.sum(step.accepted),
            nan=self.nan + jnp.sum(jnp.isnan(step.log_ratio.value)),
        )
        if events is None:
            return counts
        return dataclasses.replace(
            counts,
            recoupled=self.recoupled + jnp.sum(events.recoupled),
            weight_born=self.weight_born + events.score.astype(self.weight_born.dtype),
        )

    def after(self, memory: PyTree) -> Counts:
        """After a whole step of the kernel."""
        if not isinstance(memory, Alternatives):
            return self
        return dataclasses.replace(
            self,
            slot_steps=self.slot_steps + memory.score.size,
            alive=self.alive + jnp.sum(memory.alive),
            max_weight=jnp.maximum(
                self.max_weight, jnp.max(memory.score).astype(self.max_weight.dtype)
            ),
        )


class Batches(eqx.Module):
    """Sums of f over successive stretches of each chain: a fixed number of them, however long
    the run.
    """

    sums: Float[Array, "batches F C"]
    lengths: Int[Array, "batches"]

    @staticmethod
    def zeros(num_blocks: int, value: Float[Array, "F C"]) -> Batches:
        num_batches = min(_BATCHES, num_blocks)
        return Batches(
            jnp.zeros((num_batches, *value.shape), value.dtype), jnp.zeros(num_batches, int)
        )

    def plus(
        self, block, num_blocks: int, sums: Float[Array, "F C"], length: Int[Array, ""]
    ) -> Batches:
        # In floats: block · batches may pass 2³¹.
        share = jnp.floor((block + 0.5) * (self.lengths.size / num_blocks)).astype(int)
        return Batches(self.sums.at[share].add(sums), self.lengths.at[share].add(length))
