"""The time loop: many chains, many steps, nothing of the path kept unless a recorder keeps it.

Steps are taken in blocks. The randomness of a block is drawn at once, which is several times faster
than step by step. Chains are the last axis of every array. A chain's randomness does not depend on
how many others there are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Key, PyTree

from ..base import trees
from ..fast.chains import over_chains
from ..fast.short_loops import over_rows, row_of
from .chain import Chain, StepNoise, Stepper
from .estimator import Estimator
from .plan import Plan
from .recorder import Recorder

# The estimator's own noise of a run that stops by itself is drawn for so many steps at a time.
PART_STEPS = 32
_OWN = 2**20


def with_own(noise: PyTree, own: PyTree) -> PyTree:
    """A step's noise with the estimator's from another draw."""

    def joined(primal, other):
        is_noise = isinstance(primal, StepNoise)
        return StepNoise(primal.primal, other.own) if is_noise else primal

    return jax.tree.map(joined, noise, own, is_leaf=lambda part: isinstance(part, StepNoise))


class Progress(eqx.Module):
    """The state of a run: all that is needed to continue. Chains are the last axis of every
    array; what is the same for all of them is static.
    """

    chains: Chain
    startable: Bool[Array, "C"]
    record: PyTree


class Loop(eqx.Module):
    """All chains of a plan at given parameters and key, and what is recorded of them."""

    plan: Plan
    theta: PyTree
    key: Key[Array, ""]
    args: tuple[Any, ...]
    recorder: Recorder

    def share(self, keys: Key[Array, "C 2"]) -> Loop:
        """The chains of these keys only."""
        return dataclasses.replace(self, plan=self.plan.share(keys))

    @property
    def stepper(self) -> Stepper:
        return Stepper(self.plan, self.theta, self.args)

    def start(self) -> Progress:
        """All chains at their start."""
        parameters = self.stepper.parameters(self.key)
        starts, second = self.plan.starts(self.key), None
        if self.plan.estimator.has_second_start:
            second = self.plan.starts(self.key, second=True)
        start = lambda x, second: self.stepper.start(parameters, x, second)
        chains, startable = over_chains(start)(starts, second)
        return Progress(chains, startable, self.recorder.start(self, parameters, chains))

    def block(self, index: Int[Array, ""], progress: Progress) -> Progress:
        """The progress after one more block of steps of all chains."""
        recorder = self.recorder
        # The key only makes values that are False but opaque to the compiler (`rounding.Barriers`);
        # no number depends on it.
        parameters = self.stepper.parameters(jax.random.fold_in(self.key, index))
        in_parts = recorder.stops and self.plan.block_steps > PART_STEPS
        noise = self._block_noise(index, own=not in_parts)
        begin = self._begin(index)
        # The last block may be shorter. Its noise is drawn whole, so that a step's noise depends on
        # its block and row alone, not on the length of the run.
        end = jnp.minimum(self._begin(index + 1), self.plan.most_steps)

        def step_of(stepper: Stepper):
            def step(row, now, carry):
                chains, block = carry
                time = begin + row

                def one(chain, own, noise):
                    chain, own = stepper.step(parameters, chain, noise, own, recorder.after_update)
                    return recorder.after_step(stepper, parameters, chain, own, time)

                chains, own, seen = over_chains(one)(chains, block.own, now)
                return chains, recorder.add(block, own, seen, time, row)

            return step

        # The record of the run stays out of the loop over steps: only the block's is carried.
        carry = (progress.chains, recorder.open_block(self, progress))
        if in_parts:
            chains, block = self._in_parts(index, end - begin, step_of, noise, carry)
        elif recorder.stops:
            noise_at = lambda row: row_of(noise, row)
            chains, block = self._in_stages(0, end - begin, step_of, noise_at, carry)
        else:
            # A value's step is short.
            many = self.plan.estimator.differentiates_f
            chains, block = over_rows(step_of(self.stepper), noise, end - begin, carry, many)
        chains, record = recorder.close_block(self, progress, chains, block, index)
        return Progress(chains, progress.startable, record)

    def _in_parts(self, index, num_steps, step_of: Callable, noise: PyTree, carry: PyTree):
        """At most this number of steps, in parts of `PART_STEPS`: for each the estimator's noise is
        drawn if the chains still need it.
        """

        def part(number, carry):
            first = number * PART_STEPS

            def draw():
                def of_chain(key):
                    # Beyond all keys that are split off the block's.
                    key = jax.random.fold_in(jax.random.fold_in(key, index), _OWN + number)
                    return self.stepper.noise(key, PART_STEPS, primal=False)

                keys = self.plan.chain_keys(self.key)[:, 1]
                return over_chains(of_chain, draws_ahead=True)(keys)

            nothing = lambda: trees.zeros(jax.eval_shape(draw))
            own = jax.lax.cond(self.recorder.needs_own_noise(carry[0]), draw, nothing)

            noise_at = lambda row: with_own(row_of(noise, row), row_of(own, row - first))
            last = jnp.minimum(first + PART_STEPS, num_steps)
            return self._in_stages(first, last, step_of, noise_at, carry)

        return jax.lax.fori_loop(0, -(-num_steps // PART_STEPS), part, carry)

    def _in_stages(
        self,
        first,
        last,
        step_of: Callable[[Stepper], Callable],
        noise_at: Callable,
        carry: PyTree,
    ):
        """The rows from `first` to before `last`, unless the chains have finished, each with the
        estimator's form for the stage that they are in.
        """
        row = jnp.asarray(first, int)
        for stage in self.recorder.stages(self.plan.estimator):
            step = step_of(Stepper(self.plan.by(stage), self.theta, self.args))
            one = lambda row, carry, step=step: step(row, noise_at(row), carry)
            row, carry = self._until(stage, row, last, one, carry, lambda carry: carry[0])
        return carry

    def _until(
        self,
        stage: Estimator | None,
        first: int | Int[Array, ""],
        last: int | Int[Array, ""],
        body: Callable,
        carry: PyTree,
        chains: Callable,
    ):
        """`carry = body(index, carry)` from `first` to before `last`, or until `chains(carry)` have
        finished a stage (`None`: the run); and the index that was reached.
        """

        def goes_on(at):
            index, carry = at
            return (index < last) & ~self.recorder.finished(chains(carry), stage)

        def more(at):
            index, carry = at
            return index + 1, body(index, carry)

        return jax.lax.while_loop(goes_on, more, (jnp.asarray(first), carry))

    def _begin(self, index: Int[Array, ""]) -> Int[Array, ""]:
        """The number of the first step of a block."""
        plan = self.plan
        if not self.recorder.stops:
            return index * plan.block_steps
        asked = jnp.minimum(index, plan.asked_blocks)
        return asked * plan.block_steps + (index - asked) * plan.further_steps

    def _block_noise(self, block: Int[Array, ""], own: bool) -> PyTree:
        """The randomness of a block: steps first, chains last; with the estimator's own or
        without.
        """
        plan = self.plan

        def draw(num_steps: int):
            def of_chain(key):
                return self.stepper.noise(jax.random.fold_in(key, block), num_steps, own=own)

            return over_chains(of_chain, draws_ahead=True)(plan.chain_keys(self.key)[:, 1])

        def draw_further():
            def padded(leaf):
                # Rows that are never taken: so that one loop runs short blocks and long ones.
                missing = plan.block_steps - plan.further_steps
                return jnp.concatenate([leaf, jnp.repeat(leaf[:1], missing, axis=0)])

            return jax.tree.map(padded, draw(plan.further_steps))

        whole = lambda: draw(plan.block_steps)
        if not self.recorder.stops or plan.further_steps == plan.block_steps:
            return whole()
        return jax.lax.cond(block < plan.asked_blocks, whole, draw_further)

    def blocks(
        self, first: int | Int[Array, ""], last: int | Int[Array, ""], progress: Progress
    ) -> Progress:
        """The progress after the blocks from `first` to before `last`."""
        # A bound method of a module with arrays has no hash, which `fori_loop` asks for.
        block = lambda *given: self.block(*given)
        if not self.recorder.stops:
            return jax.lax.fori_loop(first, last, block, progress)
        return self._until(None, first, last, block, progress, lambda progress: progress.chains)[1]
