"""The time loop: many chains, many steps, nothing of the path kept.

Steps are taken in blocks. The randomness of a block is drawn at once, which is several times faster
than step by step; sums are plain within a block and compensated between blocks. Chains are the last
axis of every array.

The primal's randomness comes from keys of its own. It is the same whatever the estimator, the
coupling and the number of alternatives; nor does a chain's depend on how many others there are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from . import _trees
from ._lowering import rounding
from ._lowering.chains import over_chains
from ._lowering.manual import varying
from ._sums import CompensatedSum
from .counts import Batches, Counts
from .estimators import Estimator, ValueOnly
from .kernel import AcceptReject, Kernel, State
from .parameters import Dual, Parameters

# Random words per chain that a block may hold, and the steps that it may have.
_BLOCK_WORDS, _BLOCK_STEPS = 4096, 128

# A state of more elements than this is kept whole between steps; a smaller one may be fused into
# whatever uses it.
_SMALL = 32


class Simulation(eqx.Module):
    """What to run: a kernel from a start, and what to observe of it by which estimator."""

    kernel: Kernel
    init: PyTree | Callable[[Key[Array, ""]], PyTree]
    f: Callable[..., PyTree]
    estimator: Estimator
    num_samples: int = eqx.field(static=True)
    burn_in: int = eqx.field(static=True)
    num_chains: int = eqx.field(static=True)
    f_depends_on_theta: bool = eqx.field(static=True, default=True)

    def plain(self) -> Simulation:
        """The same chains, with no derivative."""
        return dataclasses.replace(self, estimator=ValueOnly())

    def starts(self, key: Key[Array, ""]) -> PyTree:
        """The start state of each chain, chains last."""
        if callable(self.init):
            keys = self.chain_keys(key)[:, 0]
            return jax.vmap(lambda key: _trees.strong(self.init(key)), out_axes=-1)(keys)
        last = lambda leaf: jnp.broadcast_to(leaf[..., None], (*leaf.shape, self.num_chains))
        return jax.tree.map(last, _trees.strong(self.init))

    def chain_keys(self, key: Key[Array, ""]) -> Key[Array, "C 2"]:
        """For each chain a key for its start and one for its steps."""
        return jax.vmap(jax.random.split)(jax.random.split(key, self.num_chains))

    def observable(self, parameters: Parameters, x: PyTree) -> Dual:
        """`f(θ, x)` flattened to shape (F,), with `∂f/∂θ` if it depends on θ and a derivative is
        wanted.
        """
        parameters = parameters if self.f_depends_on_theta else parameters.value_only()
        return parameters.evaluate(lambda theta, x, *args: flatten(self.f(theta, x, *args)), x)


def flatten(value: PyTree) -> Float[Array, "F"]:
    """f's value as one vector of floats."""
    flat = ravel_pytree(value)[0]
    return flat if jnp.issubdtype(flat.dtype, jnp.floating) else flat.astype(float)


class Chain(eqx.Module):
    """One chain: the primal, and what the estimator carries beside it."""

    state: State
    memory: PyTree


class Observed(eqx.Module):
    """What is averaged over the samples: f, what the estimator asks for, and (for `.run`) f²
    about f's value at the start.
    """

    value: Float[Array, "F *C"]
    estimator: PyTree
    square: Float[Array, "F *C"] | None


class Outcome(eqx.Module):
    """The averages over each chain's samples, chains last, and what was counted on the way, if
    it was.
    """

    observed: Observed
    origin: Float[Array, "F C"] | None
    counts: Counts | None
    batches: Batches | None


class Loop(eqx.Module):
    """A simulation at given parameters and key: its start, the randomness of its blocks, and its
    step.
    """

    simulation: Simulation
    theta: PyTree
    key: Key[Array, ""]
    args: tuple[Any, ...]
    differentiate: bool = eqx.field(static=True)

    @property
    def one(self) -> PyTree:
        """The form of one chain's state."""
        starts = jax.eval_shape(self.simulation.starts, self.key)
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[:-1], leaf.dtype), starts)

    @property
    def block_steps(self) -> int:
        """How many steps' randomness is drawn at once. Depends on one chain's primal alone, not
        on the estimator.
        """
        draw = lambda key: self.simulation.kernel.draw(
            lambda step, key: step.noise(key, self.one, 1), key
        )
        words = sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(draw, self.key)))
        num_steps = self.simulation.burn_in + self.simulation.num_samples
        return max(1, min(_BLOCK_STEPS, _BLOCK_WORDS // max(1, words), num_steps))

    def parameters(self, key: Key[Array, ""]) -> Parameters:
        return Parameters(self.theta, self.args, rounding.never(key, (2,)), self.differentiate)

    def start(self) -> tuple[Chain, Bool[Array, "C"]]:
        """All chains at their start, and which of them may be run: those whose log density is
        finite.
        """
        kernel, estimator = self.simulation.kernel, self.simulation.estimator
        parameters = self.parameters(self.key)
        for_steps = parameters if estimator.differentiates_steps else parameters.value_only()

        def one(x):
            state = kernel.start(for_steps, x)
            log_density = kernel.steps()[0].log_density(self.theta, x, *self.args)
            return Chain(state, estimator.start(parameters, kernel, state)), jnp.isfinite(
                log_density
            )

        return over_chains(one)(self.simulation.starts(self.key))

    def draw(self, block: Int[Array, ""]) -> tuple[Parameters, PyTree]:
        """The parameters to run a block at, and its randomness: steps first, chains last."""
        num_steps, estimator = self.block_steps, self.simulation.estimator

        def both(step: AcceptReject, key):
            key_primal, key_own = jax.random.split(key)
            return step.noise(key_primal, self.one, num_steps), estimator.draw(
                step, key_own, self.one, num_steps
            )

        keys = self.simulation.chain_keys(self.key)[:, 1]
        draw = lambda key: self.simulation.kernel.draw(both, jax.random.fold_in(key, block))
        return self.parameters(jax.random.fold_in(self.key, block)), over_chains(draw)(keys)

    def step(
        self, parameters: Parameters, chain: Chain, noise: PyTree, record: PyTree = None, note=None
    ):
        """One step of one chain, through every inner step of the kernel; `note` adds each to
        `record`.
        """
        estimator = self.simulation.estimator
        for_steps = parameters if estimator.differentiates_steps else parameters.value_only()

        def inner(kernel: AcceptReject, carry, noise):
            (chain, record), (primal, own) = carry, noise
            step = kernel.step(for_steps, chain.state, primal)
            memory, events = estimator.advance(parameters, kernel, step, chain.memory, primal, own)
            if note is not None:
                record = note(record, step, events)
            return Chain(step.after, memory), record

        return self.simulation.kernel.fold(inner, (chain, record), noise)

    def observe(
        self, parameters: Parameters, chain: Chain, origin: Float[Array, "F"] | None
    ) -> Observed:
        """What one chain adds to the averages where it is now; the square about `origin`, if
        there is one.
        """
        simulation, x = self.simulation, parameters.settle(chain.state.x)
        value = simulation.observable(parameters.value_only(), x).value
        again = simulation.observable(parameters, parameters.apart(x))
        args = (
            parameters,
            simulation.kernel,
            simulation.observable,
            again,
            chain.state,
            chain.memory,
        )
        square = None if origin is None else (again.value - origin) ** 2
        return Observed(value, simulation.estimator.observe(*args), square)


@varying
def run(
    simulation: Simulation,
    theta: PyTree,
    key: Key[Array, ""],
    args: tuple[Any, ...],
    *,
    differentiate: bool = True,
    diagnose: bool = False,
) -> Outcome:
    """Runs the chains for `burn_in + num_samples` steps and averages over the last `num_samples`.

    A chain whose log density is not finite at its start has NaN for its averages.
    """
    loop = Loop(simulation, theta, key, args, differentiate)
    chains, startable = loop.start()
    at_start = loop.parameters(key)
    origin = None
    if diagnose:
        origin = over_chains(lambda x: simulation.observable(at_start.value_only(), x).value)(
            chains.state.x
        )
    observe = over_chains(lambda chain, origin: loop.observe(at_start, chain, origin))
    zeros = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(observe, chains, origin)
    )
    num_steps, block_steps = simulation.burn_in + simulation.num_samples, loop.block_steps
    num_blocks = -(-num_steps // block_steps)

    def block(index, carry):
        chains, sums, counts, batches = carry
        parameters, noise = loop.draw(index)
        begin = index * block_steps

        def one(chain, counts, noise, origin, counted):
            chain, counts = loop.step(
                parameters, chain, noise, counts, Counts.note if diagnose else None
            )
            if sum(leaf.size for leaf in jax.tree.leaves(chain.state.x)) > _SMALL:
                chain = parameters.whole(chain)
            observed = loop.observe(parameters, chain, origin)
            observed = jax.tree.map(
                lambda leaf: jnp.where(counted, leaf, jnp.zeros_like(leaf)), observed
            )
            counts = counts.after(chain.memory) if diagnose else None
            return chain, counts, observed

        def step(i, carry):
            chains, counts, sums = carry
            now = jax.tree.map(lambda leaf: leaf[i], noise)
            counted = begin + i >= simulation.burn_in
            advance = over_chains(
                lambda chain, counts, noise, origin: one(chain, counts, noise, origin, counted)
            )
            chains, counts, observed = advance(chains, counts, now, origin)
            return chains, counts, _trees.add(sums, observed)

        end = jnp.minimum(begin + block_steps, num_steps)
        chains, counts, block_sums = jax.lax.fori_loop(
            0, end - begin, step, (chains, counts, zeros)
        )
        if diagnose:
            sampled = jnp.clip(end - simulation.burn_in, 0, end - begin)
            batches = batches.plus(index, num_blocks, block_sums.value, sampled)
        return chains, sums.plus(block_sums), counts, batches

    counts = over_chains(lambda _: Counts.zeros())(startable) if diagnose else None
    batches = Batches.zeros(num_blocks, zeros.value) if diagnose else None
    carry = (chains, CompensatedSum.like(zeros), counts, batches)
    _, sums, counts, batches = jax.lax.fori_loop(0, num_blocks, block, carry)
    mean = lambda total: jnp.where(startable, total / simulation.num_samples, jnp.nan)
    return Outcome(jax.tree.map(mean, sums.value()), origin, counts, batches)
