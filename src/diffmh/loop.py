"""The time loop: many chains, many steps, nothing of the path kept.

Steps are taken in blocks. The randomness of a block is drawn at once, which is several times faster
than step by step; sums are plain within a block and compensated between blocks. Chains are the last
axis of every array. A chain's randomness does not depend on how many others there are.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from . import _trees
from ._lowering import plain_jax
from ._lowering.chains import over_chains
from ._sums import CompensatedSum
from .chain import Chain, Stepper
from .counts import Batches, Silent, Watch, Window
from .estimators import Block, Reading
from .parameters import Parameters
from .simulation import Observed, Outcome, Simulation
from .values import without_tangents

# Random words per chain that a block may hold, and the steps that it may have.
_BLOCK_WORDS, _BLOCK_STEPS = 4096, 128

# Chains are run in groups of so many bytes of state, which stay near the processor, and of so many
# chains at the least and at most. If the least have more bytes than this, they are run together.
_GROUP_BYTES, _MOST_GROUP_BYTES = 4096, 16384
_LEAST_GROUP, _LARGEST_GROUP = 64, 512


class Progress(eqx.Module):
    """How far a run has come: all that is needed to go on. Chains are the last axis of every
    array, so that they can be shared out; what is the same for all of them is static.
    """

    chains: Chain
    startable: Bool[Array, "C"]
    sums: CompensatedSum
    watch: Watch | Silent
    gathered: CompensatedSum | None = None


class Loop(eqx.Module):
    """All chains of a simulation at given parameters and key: their start, the randomness of their
    blocks, and a block's steps.
    """

    simulation: Simulation
    theta: PyTree
    key: Key[Array, ""]
    args: tuple[Any, ...]
    differentiate: bool = eqx.field(static=True)
    diagnose: bool = eqx.field(static=True, default=False)

    def share(self, keys: Key[Array, "C 2"]) -> Loop:
        """The chains of these keys only."""
        return dataclasses.replace(self, simulation=self.simulation.share(keys))

    @property
    def stepper(self) -> Stepper:
        """What takes each of the chains on."""
        return Stepper(self.simulation, self.theta, self.key, self.args, self.differentiate)

    @property
    def block_steps(self) -> int:
        """How many steps' randomness is drawn at once. Depends on one chain's primal alone, not
        on the estimator.
        """

        def noise(key):
            make = lambda update, key: update.noise(key, self.stepper.one, 1)
            return self.simulation.kernel.distribute(make, key)

        words = sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(noise, self.key)))
        most = min(_BLOCK_STEPS, _BLOCK_WORDS // max(1, words), self.simulation.num_steps)
        return max(1, most)

    @property
    def num_blocks(self) -> int:
        return -(-self.simulation.num_steps // self.block_steps)

    @property
    def num_groups(self) -> int:
        """In how many groups chains are run, one after the other. On a processor with caches, small
        states of many chains are; larger ones keep several cores busy as they are.
        """
        num_chains = self.simulation.num_chains
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.stepper.one))
        on_processor = jax.default_backend() == "cpu" and not plain_jax.value
        if not on_processor or _LEAST_GROUP * size > _MOST_GROUP_BYTES:
            return 1
        most = min(max(_LEAST_GROUP, _GROUP_BYTES // max(1, size)), _LARGEST_GROUP)
        fits = lambda chains: num_chains % chains == 0
        chains = max(filter(fits, range(_LEAST_GROUP, min(most, num_chains) + 1)), default=0)
        return num_chains // chains if chains else 1

    def start(self) -> Progress:
        """All chains at their start."""
        parameters = self.stepper.parameters(self.key)
        starts = self.simulation.starts(self.key)
        chains, startable = over_chains(lambda x: self.stepper.start(parameters, x))(starts)
        watch = self._start_watch(parameters, chains) if self.diagnose else Silent()
        observed = jax.eval_shape(
            over_chains(lambda chain, watch: self.stepper.observe(parameters, chain, watch)),
            chains,
            watch.per_chain,
        )
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), observed)
        watch = watch.watching(_unwatched(zeros))
        begun = Progress(chains, startable, CompensatedSum.like(zeros), watch)
        form = jax.eval_shape(lambda: self._read(begun, chains, self._unkept(begun), True)[1])
        if form is None or form.gathered is None:
            return begun
        nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), form.gathered)
        return dataclasses.replace(begun, gathered=CompensatedSum.like(nothing))

    def _start_watch(self, parameters: Parameters, chains: Chain) -> Watch:
        plain = parameters.value_only()
        f = lambda x, past: self.simulation.observable(plain, x, past).primal
        origin = over_chains(f)(chains.state.x, without_tangents(chains.past))
        counted = (self.simulation.num_samples, self.simulation.burn_in)
        batches = Batches.of(self.num_blocks, self.block_steps, *counted)
        num_leaves = len(jax.tree.leaves(self.stepper.one))
        return Watch.start(origin, chains.memory, num_leaves, batches, Window.of(*counted))

    def block_noise(self, block: Int[Array, ""]) -> PyTree:
        """The randomness of a block: steps first, chains last."""
        of_chain = lambda key: self.stepper.noise(jax.random.fold_in(key, block), self.block_steps)
        return over_chains(of_chain, draws_ahead=True)(self.simulation.chain_keys(self.key)[:, 1])

    def block(self, index: Int[Array, ""], progress: Progress) -> Progress:
        """One block of steps of all chains."""
        return self.read_block(index, progress)[0]

    def read_block(
        self, index: Int[Array, ""], progress: Progress
    ) -> tuple[Progress, Reading | None]:
        """The same, and what the estimator read off it."""
        simulation, block_steps = self.simulation, self.block_steps
        parameters = self.stepper.parameters(jax.random.fold_in(self.key, index))
        noise = self.block_noise(index)
        begin = index * block_steps
        end = jnp.minimum(begin + block_steps, simulation.num_steps)
        zeros = jax.tree.map(jnp.zeros_like, progress.sums.total)

        def step(i, carry):
            chains, watch, sums, halves, kept = carry
            now = jax.tree.map(lambda leaf: leaf[i], noise)
            shares = self._shares(progress.watch, begin + i)
            one = lambda chain, watch, noise: self._one(parameters, chain, watch, noise, shares)
            chains, watch, observed, new = over_chains(one)(chains, watch, now)
            sums = _trees.add(sums, _where(begin + i >= simulation.burn_in, observed))
            halves = self._add_half(progress.watch, begin + i, halves, observed)
            kept = jax.tree.map(lambda all, leaf: all.at[i].set(leaf), kept, new)
            return chains, watch, sums, halves, kept

        unwatched = None if isinstance(progress.watch, Silent) else _unwatched(zeros)
        carry = (
            progress.chains,
            progress.watch.per_chain,
            zeros,
            (unwatched, unwatched),
            self._unkept(progress),
        )
        chains, per_chain, sums, halves, kept = jax.lax.fori_loop(0, end - begin, step, carry)
        halves = jax.tree.map(lambda early, late: jnp.stack([early, late]), *halves)
        chains, reading = self._read(progress, chains, kept, self._must_end(index))
        gathered = progress.gathered
        if reading is not None:
            gathered = None if gathered is None else gathered.plus(reading.gathered)
            sums, halves = _with_reading(sums, halves, reading.observed)
        watch = progress.watch.after_block(index, per_chain, _unwatched(sums), halves)
        sums = progress.sums.plus(sums)
        return Progress(chains, progress.startable, sums, watch, gathered), reading

    def _must_end(self, index: Int[Array, ""]) -> Bool[Array, ""]:
        """Short blocks may leave sums for the next, unless a report wants to know block by block;
        plain sums over many steps drift.
        """
        every = 1 if self.diagnose else -(-_BLOCK_STEPS // self.block_steps)
        return ((index + 1) % every == 0) | (index + 1 == self.num_blocks)

    def _shares(self, watch: Watch | Silent, step: Int[Array, ""]) -> Float[Array, "n"]:
        """Whether a step counts as a sample, and if it is watched, in which half it lies."""
        counted = jnp.asarray(step >= self.simulation.burn_in)[None]
        if not isinstance(watch, Silent):
            counted = jnp.concatenate([counted, watch.window.halves(step)])
        return counted.astype(float)

    def _unkept(self, progress: Progress) -> PyTree:
        """Room for what is kept of a block's steps."""
        shares = self._shares(progress.watch, jnp.zeros((), int))
        note = lambda chain: self.stepper.note(self.stepper.parameters(self.key), chain, shares)[1]
        form = jax.eval_shape(over_chains(note), progress.chains)
        room = lambda leaf: jnp.zeros((self.block_steps, *leaf.shape), leaf.dtype)
        return jax.tree.map(room, form)

    def _read(
        self, progress: Progress, chains: Chain, kept: PyTree, must_end: Bool[Array, ""] | bool
    ) -> tuple[Chain, Reading | None]:
        """What the estimator reads off a block at its end."""
        simulation = self.simulation
        block = Block(
            self.stepper.parameters(self.key),
            simulation.kernel,
            simulation.observable,
            chains.memory,
            kept,
            jnp.asarray(must_end),
        )
        memory, reading = simulation.estimator.read(block)
        return Chain(chains.state, chains.past, memory), reading

    def _one(self, parameters, chain: Chain, watch: PyTree, noise: PyTree, shares):
        """One step of one chain, what it adds to the averages, and what is kept of it."""
        note = (lambda record, step, events: None) if watch is None else type(watch).note
        chain, watch = self.stepper.step(parameters, chain, noise, watch, note)
        observed = self.stepper.observe(parameters, chain, watch)
        chain, kept = self.stepper.note(parameters, chain, shares)
        return chain, None if watch is None else watch.after(chain.memory), observed, kept

    @staticmethod
    def _add_half(watch: Watch | Silent, step, halves: tuple[PyTree, PyTree], observed: Observed):
        """The sums over the halves of the watched window, after another step."""
        if isinstance(watch, Silent):
            return halves
        each = zip(halves, watch.window.halves(step), strict=True)
        return tuple(_trees.add(half, _where(now, _unwatched(observed))) for half, now in each)

    def outcome(self, progress: Progress) -> Outcome:
        """A chain whose log density is not finite at its start has NaN for its averages."""
        count = self.simulation.num_samples
        mean = lambda total: jnp.where(progress.startable, total / count, jnp.nan)
        log_density, estimator = None, type(self.simulation.estimator).__name__
        if self.diagnose:
            log_density = over_chains(self.stepper.largest_log_density)(progress.chains.state.x)
        gathered = None
        if progress.gathered is not None:
            gathered = jax.tree.map(mean, progress.gathered.value())
        return Outcome(
            jax.tree.map(mean, progress.sums.value()),
            progress.watch,
            log_density,
            estimator,
            gathered=gathered,
        )


def _where(counted: Bool[Array, ""], observed: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: jnp.where(counted, leaf, jnp.zeros_like(leaf)), observed)


def _unwatched(observed: Observed) -> Observed:
    """Without what is there for the report alone."""
    return dataclasses.replace(observed, watched=None)


def _with_reading(
    sums: Observed, halves: Observed | None, read: PyTree
) -> tuple[Observed, Observed | None]:
    """With what was read of a block, over its samples and over either half."""
    if read is None:
        return sums, halves

    def plus(observed, part):
        return dataclasses.replace(observed, estimator=_trees.add(observed.estimator, part))

    whole, parts = (jax.tree.map(lambda leaf: leaf[at], read) for at in (0, slice(1, None)))
    return plus(sums, whole), None if halves is None else plus(halves, parts)
