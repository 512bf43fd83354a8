"""What `.run` watches in the time loop, for its report."""

from __future__ import annotations

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from ._lowering.chains import over_chains
from .alternatives import Alternatives, Events
from .decisions import Acceptance
from .kernel import Step
from .values import norm

# Batches per chain whose means tell the effective number of samples.
_BATCHES = 16


class Silent(eqx.Module):
    """Nothing is watched."""

    per_chain: None = None

    def after_block(self, *_: Any) -> Silent:
        return self


class Counts(eqx.Module):
    """Sums over the steps of one chain, the largest weight met, the largest derivative that a state
    had (where states carry one), and which leaves of the state have moved. A slot's step counts as
    a step of its own. `origin` is f at the start.
    """

    decisions: Int[Array, "*C"]
    accepted: Int[Array, "*C"]
    nan: Int[Array, "*C"]
    ties: Int[Array, "*C"]
    slot_steps: Int[Array, "*C"]
    alive: Int[Array, "*C"]
    born: Int[Array, "*C"]
    recoupled: Int[Array, "*C"]
    weight_born: Float[Array, "*C"]
    max_weight: Float[Array, "*C"]
    max_tangent: Float[Array, "*C"]
    moved: tuple[Bool[Array, "*C"], ...]
    origin: Float[Array, "F *C"]

    @staticmethod
    def zeros(num_leaves: int, origin: Float[Array, "F"]) -> Counts:
        count, size, no = jnp.zeros((), int), jnp.zeros(()), jnp.zeros((), bool)
        moved = (no,) * num_leaves
        return Counts(
            count, count, count, count, count, count, count, count, size, size, size, moved, origin
        )

    def note(self, step: Step, events: Events | None) -> Counts:
        """After an update."""
        changed = zip(
            self.moved, jax.tree.leaves(step.before.x), jax.tree.leaves(step.after.x), strict=True
        )
        counts = dataclasses.replace(
            self,
            moved=tuple(moved | jnp.any(old != new) for moved, old, new in changed),
            max_tangent=self._largest_tangent(step),
        )
        for decision in step.decisions:
            if isinstance(decision, Acceptance):
                counts = dataclasses.replace(
                    counts,
                    decisions=counts.decisions + decision.count,
                    accepted=counts.accepted + jnp.sum(decision.accepted),
                    nan=counts.nan + jnp.sum(jnp.isnan(decision.log_ratio.primal)),
                    ties=counts.ties + decision.num_ties,
                )
        if events is None:
            return counts
        return dataclasses.replace(
            counts,
            born=counts.born + jnp.sum(events.born),
            recoupled=counts.recoupled + jnp.sum(events.recoupled),
            weight_born=counts.weight_born + events.score.astype(counts.weight_born.dtype),
        )

    def _largest_tangent(self, step: Step) -> Float[Array, ""]:
        largest = self.max_tangent
        for leaf in jax.tree.leaves(step.after.tangent):
            largest = jnp.maximum(largest, jnp.max(jnp.abs(leaf)).astype(largest.dtype))
        return largest

    def after(self, memory: PyTree) -> Counts:
        """After a whole step of the kernel."""
        if not isinstance(memory, Alternatives):
            return self
        heaviest = jnp.max(norm(memory.weight.T)).astype(self.max_weight.dtype)
        return dataclasses.replace(
            self,
            slot_steps=self.slot_steps + memory.alive.size,
            alive=self.alive + jnp.sum(memory.alive),
            max_weight=jnp.maximum(self.max_weight, heaviest),
        )

    def square(self, value: Float[Array, "F"]) -> Float[Array, "F"]:
        """f² about f at the start."""
        return (value - self.origin) ** 2


class Watch(eqx.Module):
    """What is counted in each chain, and sums of f over successive stretches of it: a fixed number
    of them, however long the run.
    """

    per_chain: Counts
    sums: Float[Array, "batches F C"]
    lengths: Int[Array, "batches"]

    @staticmethod
    def start(origin: Float[Array, "F C"], num_leaves: int, num_blocks: int) -> Watch:
        counts = over_chains(lambda origin: Counts.zeros(num_leaves, origin))(origin)
        num_batches = min(_BATCHES, num_blocks)
        sums = jnp.zeros((num_batches, *origin.shape), origin.dtype)
        return Watch(counts, sums, jnp.zeros(num_batches, int))

    def after_block(
        self,
        block: Int[Array, ""],
        num_blocks: int,
        per_chain: Counts,
        sums: Float[Array, "F C"],
        length: Int[Array, ""],
    ) -> Watch:
        # In floats: block · batches may pass 2³¹.
        share = jnp.floor((block + 0.5) * (self.lengths.size / num_blocks)).astype(int)
        return Watch(per_chain, self.sums.at[share].add(sums), self.lengths.at[share].add(length))
