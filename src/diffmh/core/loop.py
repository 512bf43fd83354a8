"""The time loop: many chains, many steps, nothing of the path kept unless a recorder keeps it.

Steps are taken in blocks. The randomness of a block is drawn at once, which is several times faster
than step by step. Chains are the last axis of every array. A chain's randomness does not depend on
how many others there are.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Key, PyTree

from ..fast.chains import over_chains
from .chain import Chain, Stepper
from .plan import Plan
from .recorder import Recorder


class Progress(eqx.Module):
    """How far a run has come: all that is needed to go on. Chains are the last axis of every
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
        starts = self.plan.starts(self.key)
        chains, startable = over_chains(lambda x: self.stepper.start(parameters, x))(starts)
        return Progress(chains, startable, self.recorder.start(self, parameters, chains))

    def block(self, index: Int[Array, ""], progress: Progress) -> Progress:
        """The progress after one more block of steps of all chains."""
        stepper, recorder, block_steps = self.stepper, self.recorder, self.plan.block_steps
        # The key only makes falsehoods that the compiler cannot see through (`rounding.Barriers`);
        # no number depends on it.
        parameters = stepper.parameters(jax.random.fold_in(self.key, index))
        noise = self._block_noise(index)
        begin = index * block_steps
        # The last block may be shorter. Its noise is drawn whole, so that a step's noise depends on
        # its block and row alone, not on the length of the run.
        end = jnp.minimum(begin + block_steps, self.plan.simulation.num_steps)

        def step(row, carry):
            chains, block = carry
            time = begin + row

            def one(chain, own, noise):
                chain, own = stepper.step(parameters, chain, noise, own, recorder.after_update)
                return recorder.after_step(stepper, parameters, chain, own, time)

            now = jax.tree.map(lambda leaf: leaf[row], noise)
            chains, own, seen = over_chains(one)(chains, block.own, now)
            return chains, recorder.add(block, own, seen, time, row)

        # The record of the run stays out of the loop over steps: only the block's is carried.
        carry = (progress.chains, recorder.open_block(self, progress))
        chains, block = jax.lax.fori_loop(0, end - begin, step, carry)
        chains, record = recorder.close_block(self, progress, chains, block, index)
        return Progress(chains, progress.startable, record)

    def _block_noise(self, block: Int[Array, ""]) -> PyTree:
        """The randomness of a block: steps first, chains last."""

        def of_chain(key):
            return self.stepper.noise(jax.random.fold_in(key, block), self.plan.block_steps)

        return over_chains(of_chain, draws_ahead=True)(self.plan.chain_keys(self.key)[:, 1])

    def blocks(
        self, first: int | Int[Array, ""], last: int | Int[Array, ""], progress: Progress
    ) -> Progress:
        """The progress after the blocks from `first` to before `last`."""
        # A bound method of a module with arrays has no hash, which `fori_loop` asks for.
        return jax.lax.fori_loop(first, last, lambda *given: self.block(*given), progress)

    def whole(self) -> Any:
        """The record of all blocks."""
        progress = self.blocks(0, self.plan.num_blocks, self.start())
        return self.recorder.result(self, progress)
