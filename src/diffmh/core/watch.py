"""Diagnostics that `.run` collects in the time loop, for its report."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from ..base import trees
from .alternatives import Events
from .decisions import Acceptance
from .kernel import Step
from .values import norm

# Batches per chain whose means tell the effective number of samples.
_BATCHES = 16


def _has_slots(memory: PyTree) -> bool:
    """True if an estimator's memory has alternatives: their weights, and which of them live."""
    return hasattr(memory, "weight") and hasattr(memory, "alive")


class Counts(eqx.Module):
    """Sums over the steps of one chain, the largest weight met, the largest derivative that a state
    had (where states carry one), and which leaves of the state have moved. A slot's step counts as
    a step of its own. `age` is for how many steps each slot's alternative has lived, and `origin` f
    at the start.
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
    age: Int[Array, "K *C"]

    @staticmethod
    def zeros(num_leaves: int, origin: Float[Array, "F"], memory: PyTree) -> Counts:
        count, size, no = jnp.zeros((), int), jnp.zeros(()), jnp.zeros((), bool)
        slots = memory.weight.shape[0] if _has_slots(memory) else 0
        moved, age = (no,) * num_leaves, jnp.zeros(slots, int)
        eight = (count, count, count, count, count, count, count, count)
        return Counts(*eight, size, size, size, moved, origin, age)

    def note(self, step: Step, events: Events | None) -> Counts:
        """After an update."""
        changed = zip(
            self.moved, jax.tree.leaves(step.before.x), jax.tree.leaves(step.after.x), strict=True
        )
        largest = self.max_tangent
        for leaf in jax.tree.leaves(step.after.tangent):
            largest = jnp.maximum(largest, jnp.max(jnp.abs(leaf)).astype(largest.dtype))
        moved = tuple(moved | jnp.any(old != new) for moved, old, new in changed)
        counts = dataclasses.replace(self, moved=moved, max_tangent=largest)
        for decision in step.decisions:
            if isinstance(decision, Acceptance):
                counts = dataclasses.replace(
                    counts,
                    decisions=counts.decisions + decision.count,
                    accepted=counts.accepted + jnp.sum(decision.accepted),
                    nan=counts.nan + jnp.sum(jnp.isnan(decision.log_ratio.primal)),
                )
        if events is None:
            return counts
        return dataclasses.replace(
            counts,
            age=jnp.where(events.born, 0, counts.age),
            born=counts.born + jnp.sum(events.born),
            recoupled=counts.recoupled + jnp.sum(events.recoupled),
            weight_born=counts.weight_born + events.score.astype(counts.weight_born.dtype),
        )

    def after(self, memory: PyTree) -> Counts:
        """After a whole step of the kernel."""
        if not _has_slots(memory):
            # `Score` counts those that matter to it.
            ties = getattr(memory, "ties", None)
            return self if ties is None else dataclasses.replace(self, ties=ties)
        heaviest = jnp.max(norm(memory.weight.T)).astype(self.max_weight.dtype)
        return dataclasses.replace(
            self,
            # After the births of this step, whose age `note` has set to 0.
            age=jnp.where(memory.alive, self.age + 1, 0),
            slot_steps=self.slot_steps + memory.alive.size,
            alive=self.alive + jnp.sum(memory.alive),
            max_weight=jnp.maximum(self.max_weight, heaviest),
        )

    def square(self, value: Float[Array, "F"]) -> Float[Array, "F"]:
        """f² about f at the start."""
        return (value - self.origin) ** 2


class Window(eqx.Module):
    """Steps of a chain that are looked at in two halves, by number, from 0: the samples, or where
    there are fewer of them than steps of burn-in, the last half of all steps.
    """

    first: int
    middle: int

    @staticmethod
    def of(num_samples: int, burn_in: int) -> Window:
        num_steps = num_samples + burn_in
        # At least half of all steps, so that a run that is nearly all burn-in is looked at too.
        first = min(burn_in, num_steps // 2)
        return Window(first, first + (num_steps - first) // 2)

    def halves(self, step: Int[Array, ""]) -> Bool[Array, "2"]:
        """In which half a step lies, if in any."""
        early = (step >= self.first) & (step < self.middle)
        return jnp.stack([early, step >= self.middle])


class Batches(eqx.Module):
    """Successive stretches of a run, a fixed number of them however long it is: the block that each
    begins with, and how many samples it has.
    """

    first_blocks: tuple[int, ...]
    samples: tuple[int, ...]

    @staticmethod
    def of(num_blocks: int, block_steps: int, num_samples: int, burn_in: int) -> Batches:
        count = min(_BATCHES, num_blocks)
        # The blocks nearest to the ends of equal parts.
        first = tuple((2 * i * num_blocks + count) // (2 * count) for i in range(count))
        samples_before = lambda block: min(max(0, block * block_steps - burn_in), num_samples)
        edges = [samples_before(block) for block in (*first, num_blocks)]
        return Batches(first, tuple(b - a for a, b in itertools.pairwise(edges)))

    def number(self, block: Int[Array, ""]) -> Int[Array, ""]:
        """In which of them a block lies."""
        return jnp.sum(block >= jnp.array(self.first_blocks)) - 1


class Watch(eqx.Module):
    """The counts of each chain, and sums of what it observes (f, and what the estimator
    averages) over successive stretches of it and over the two halves of a window. Stretches and
    halves lead, chains are last.
    """

    per_chain: Counts
    sums: PyTree
    halves: PyTree
    batches: Batches = eqx.field(static=True)
    window: Window = eqx.field(static=True)

    @staticmethod
    def start(counts: Counts, form: PyTree, batches: Batches, window: Window) -> Watch:
        """With sums of what is observed, which has this form."""
        stretches, halves = trees.zeros(form, len(batches.samples)), trees.zeros(form, 2)
        return Watch(counts, stretches, halves, batches, window)

    def after_block(
        self,
        block: Int[Array, ""],
        per_chain: Counts,
        sums: PyTree,
        halves: PyTree,
    ) -> Watch:
        batch = self.batches.number(block)
        return Watch(
            per_chain,
            jax.tree.map(lambda total, leaf: total.at[batch].add(leaf), self.sums, sums),
            jax.tree.map(jnp.add, self.halves, halves),
            self.batches,
            self.window,
        )


class Stretches(eqx.Module):
    """Averages of f and of the derivative over successive parts of each chain, and their lengths
    in steps. Where there are very many parameters the derivative is along a few directions of θ.
    """

    value: Float[Any, "S F C"]
    jacobian: Float[Any, "S P F C"]
    lengths: tuple[int, ...] = eqx.field(static=True)

    def nonempty(self) -> Stretches:
        """On the host and in double precision, without those of no length (burn-in)."""
        some = self.length > 0
        chosen = lambda leaf: np.asarray(leaf, float)[some]
        lengths = tuple(length for length in self.lengths if length)
        return Stretches(chosen(self.value), chosen(self.jacobian), lengths)

    @property
    def length(self) -> Int[np.ndarray, "S"]:
        return np.array(self.lengths)
