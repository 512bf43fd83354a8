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

from ..fast.chains import over_chains
from .chain import Chain, Stepper
from .estimator import Estimator
from .plan import Plan
from .recorder import Recorder


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
        noise = self._block_noise(index)
        begin = self._begin(index)
        # The last block may be shorter. Its noise is drawn whole, so that a step's noise depends on
        # its block and row alone, not on the length of the run.
        end = jnp.minimum(self._begin(index + 1), self.plan.most_steps)

        def step_of(stepper: Stepper):
            def step(row, carry):
                chains, block = carry
                time = begin + row

                def one(chain, own, noise):
                    chain, own = stepper.step(parameters, chain, noise, own, recorder.after_update)
                    return recorder.after_step(stepper, parameters, chain, own, time)

                now = jax.tree.map(lambda leaf: leaf[row], noise)
                chains, own, seen = over_chains(one)(chains, block.own, now)
                return chains, recorder.add(block, own, seen, time, row)

            return step

        # The record of the run stays out of the loop over steps: only the block's is carried.
        carry = (progress.chains, recorder.open_block(self, progress))
        if recorder.stops:
            chains, block = self._in_stages(end - begin, step_of, carry)
        else:
            chains, block = jax.lax.fori_loop(0, end - begin, step_of(self.stepper), carry)
        chains, record = recorder.close_block(self, progress, chains, block, index)
        return Progress(chains, progress.startable, record)

    def _in_stages(self, num_steps, step_of: Callable[[Stepper], Callable], carry: PyTree):
        """At most this number of steps, each with the estimator's form for the stage that the
        chains are in.
        """
        row = jnp.zeros((), int)
        for stage in self.recorder.stages(self.plan.estimator):
            step = step_of(Stepper(self.plan.by(stage), self.theta, self.args))
            row, carry = self._until(stage, row, num_steps, step, carry, lambda carry: carry[0])
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

    def _block_noise(self, block: Int[Array, ""]) -> PyTree:
        """The randomness of a block: steps first, chains last."""
        plan = self.plan

        def draw(num_steps: int):
            def of_chain(key):
                return self.stepper.noise(jax.random.fold_in(key, block), num_steps)

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

    def whole(self) -> Any:
        """The record of all blocks."""
        progress = self.blocks(0, self.plan.num_blocks, self.start())
        return self.recorder.result(self, progress)
