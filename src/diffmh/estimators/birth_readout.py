"""The derivative from births: backward, forward, or chain by chain.

All of them read `Σ_b S_b ∂ log odds_b` over the births that a block closed, in chunks of a fixed
size, as many as there are births: a block without any costs nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Int, PyTree

from ..core.decisions import Decision
from ..core.estimator import Observation
from ..core.kernel import Kernel, Step, Update
from ..core.odds import IndexedOdds, distinct_odds, odds_of
from ..core.parameters import Parameters
from ..core.values import Value

# Births that are differentiated at once.
_CHUNK = 128
# Numbers that a chunk's own derivatives may take where they are wanted one by one.
_CHUNK_NUMBERS = 2**22
# Directions of θ that a report looks at where it can't look at all parameters.
_DIRECTIONS = 16


class BirthBlock(eqx.Module):
    """A block of steps of all chains at its end, chains last.

    `kept` is what was kept of each step, steps first; `must_end` says that nothing of the block may
    be left for later.
    """

    parameters: Parameters
    kernel: Kernel
    observable: Callable[[Parameters, PyTree, Value | None], Value]
    memory: PyTree
    kept: PyTree
    must_end: Bool[Array, ""]


class Reading(eqx.Module):
    """A block's increments: to what is `gathered` over a run, with chains last or, pulled back from
    all of them, like θ; and to what is `observed` over the samples and over each half of the
    watched window, stacked, chains last.
    """

    gathered: PyTree
    observed: PyTree = None


class Birth(eqx.Module):
    """The state x to which a step led, and y, to which it would have led had one decision come out
    otherwise; `kind` says whose decision it was, and `index` which odds of a family those were
    (`IndexedOdds`), if the kernel has any.
    """

    x: PyTree
    y: PyTree
    kind: Int[Array, "..."]
    index: Int[Array, "..."] | None = None


class Closed(eqx.Module):
    """Births and their sums S; those without a sum have nothing to add."""

    birth: Birth
    total: Float[Array, "... n F"]


class Place(eqx.Module):
    """The states at which f was evaluated, and the shares of the run that they stand for."""

    x: PyTree
    past: Value | None
    shares: Float[Array, "... n"]


class Kept(eqx.Module):
    """The part of a step that is stored until the end of its block."""

    closed: Closed
    place: Place | None


def matched_odds(update: Update, step: Step) -> list[tuple[Decision, Any]]:
    """Each decision of a step with the log odds of its flips."""
    decisions, odds = step.decisions, odds_of(update)
    if len(odds) != len(decisions):
        raise ValueError(
            f"`{type(update).__name__}` makes {len(decisions)} decisions, but its `flip_odds`"
            f" has the odds of {len(odds)}: return a tuple of odds, one for each"
            " decision, or `None`; or use `StochasticDerivative(births=False)`."
        )
    return list(zip(decisions, odds, strict=True))


def log_odds(block: BirthBlock, theta: PyTree, birth: Birth) -> Float[Array, ""]:
    """The quantities of one birth."""
    args = block.parameters.args

    def of(odds):
        own = odds
        if isinstance(odds, IndexedOdds):
            assert birth.index is not None
            own = odds.at(birth.index)
        return jnp.asarray(own(theta, birth.x, birth.y, *args))

    each = [of(odds) for odds in distinct_odds(block.kernel)]
    if len(each) == 1:
        return each[0]
    # The odds of all kinds are evaluated and one is selected: their number is that of distinct
    # odds, mostly one.
    own = lambda number, odds: jnp.where(birth.kind == number, odds, 0.0)
    return sum((own(number, odds) for number, odds in enumerate(each)), jnp.zeros(()))


def f_at(block: BirthBlock, theta: PyTree, place: Place) -> Float[Array, "F"]:
    """f of one place."""
    plain = dataclasses.replace(block.parameters.value_only(), theta=theta)
    return block.observable(plain, place.x, place.past).primal


class Chunk(eqx.Module):
    """Some entries of a block: M of them, the chain of each, and whether they are real or only
    fill the chunk up.
    """

    entries: Any
    chain: Int[Array, "M"]
    real: Bool[Array, "M"]

    def where_real(self, array: Float[Array, "M ..."]) -> Float[Array, "M ..."]:
        return jnp.where(self.real.reshape(-1, *(1,) * (array.ndim - 1)), array, 0.0)


def over_chunks(
    entries: PyTree,
    wanted: Bool[Array, "E C"],
    size: int,
    begin: PyTree,
    add: Callable[[PyTree, Chunk], PyTree],
) -> PyTree:
    """`total = add(total, chunk)` over the entries that are wanted; entries lead in every array,
    and chains are last.
    """
    size = max(1, min(size, wanted.size))
    num_chunks = -(-wanted.size // size)
    found = jnp.nonzero(wanted.ravel(), size=num_chunks * size, fill_value=0)[0]
    count = jnp.sum(wanted)

    def step(number, total):
        position = number * size + jnp.arange(size)
        # What fills up a chunk repeats its first entry: that one is wanted, so it has a derivative.
        position = jnp.where(position < count, position, number * size)
        entry, chain = jnp.unravel_index(found[position], wanted.shape)
        chosen = jax.tree.map(lambda leaf: leaf[entry, ..., chain], entries)
        return add(total, Chunk(chosen, chain, number * size + jnp.arange(size) < count))

    return jax.lax.fori_loop(0, (count + size - 1) // size, step, begin)


def ended(block: BirthBlock) -> tuple[PyTree, Closed, Bool[Array, "E C"]]:
    """The memory without what is read now, all births to read, and which have something to add.

    Births that are still open are read as well where nothing may be left for later: their sums
    begin anew.
    """
    memory, kept = block.memory, block.kept
    # Invariant: what is read now is taken off the memory, so each term of each sum is read once.
    left = jnp.where(block.must_end, memory.total, 0.0)
    still_open = Closed(memory.birth, left)
    merge = lambda steps, slots: jnp.concatenate([steps.reshape(-1, *slots.shape[1:]), slots])
    closed = jax.tree.map(merge, kept.closed, still_open)
    # The chains are its last axis here, so it is not made anew: `Open` says the shapes of one.
    memory = eqx.tree_at(lambda memory: memory.total, memory, memory.total - left)
    return memory, closed, jnp.any(closed.total != 0, axis=(1, 2))


class Backward(eqx.Module):
    """With the cotangent known: S is a number for each birth, and one VJP of a chunk's
    `Σ_b S_b log odds_b` adds to a gradient like θ.
    """

    num_shares: ClassVar[int] = 1
    knows_cotangent: ClassVar[bool] = True

    def read(self, block: BirthBlock):
        memory, closed, wanted = ended(block)
        theta = block.parameters.theta

        def births(gradient, chunk: Chunk):
            total = chunk.where_real(chunk.entries.total[:, 0, 0])

            def paired(theta):
                odds = jax.vmap(lambda birth: log_odds(block, theta, birth))(chunk.entries.birth)
                return jnp.sum(total * odds)

            return jax.tree.map(jnp.add, gradient, jax.grad(paired)(theta))

        gradient = jax.tree.map(jnp.zeros_like, theta)
        gradient = over_chunks(closed, wanted, _CHUNK, gradient, births)
        if block.kept.place is not None:
            gradient = self._explicit(block, gradient)
        return memory, Reading(gradient)

    def _explicit(self, block: BirthBlock, gradient: PyTree) -> PyTree:
        """`Σ ⟨cotangent, ∂f⟩` over the samples of a block."""
        place, cotangents = block.kept.place, block.memory.cotangent

        def samples(gradient, chunk: Chunk):
            cotangent = chunk.where_real(cotangents.T[chunk.chain])

            def paired(theta):
                value = jax.vmap(lambda place: f_at(block, theta, place))(chunk.entries)
                return jnp.sum(cotangent * value)

            return jax.tree.map(jnp.add, gradient, jax.grad(paired)(block.parameters.theta))

        return over_chunks(place, place.shares[:, 0] > 0, _CHUNK, gradient, samples)


class Forward(eqx.Module):
    """Along a direction of θ: one JVP of a chunk's log odds, each times its S."""

    direction: PyTree
    num_shares: ClassVar[int] = 1
    knows_cotangent: ClassVar[bool] = False

    def read(self, block: BirthBlock):
        memory, closed, wanted = ended(block)
        theta = block.parameters.theta

        def births(tangent, chunk: Chunk):
            def odds(theta):
                return jax.vmap(lambda birth: log_odds(block, theta, birth))(chunk.entries.birth)

            slope = jax.jvp(odds, (theta,), (self.direction,))[1]
            gain = chunk.where_real(chunk.entries.total[:, 0] * slope[:, None])
            return tangent.at[:, chunk.chain].add(gain.T.astype(tangent.dtype))

        num_outputs, num_chains = closed.total.shape[2:]
        tangent = jnp.zeros((num_outputs, num_chains), closed.total.dtype)
        return memory, Reading(over_chunks(closed, wanted, _CHUNK, tangent, births))

    def explicit(self, at: Observation) -> Float[Array, "F"]:
        """`∂f · direction`, step by step."""

        def f(theta):
            plain = dataclasses.replace(at.parameters.value_only(), theta=theta)
            return at.observable(plain, at.state.x, at.past).primal

        return jax.jvp(f, (at.parameters.theta,), (self.direction,))[1]


class Rows(eqx.Module):
    """Each chain's derivative, for reports: over all samples for every parameter, and over
    stretches and halves of the chain for every parameter or, with many of them, along a few
    directions of θ.
    """

    num_shares: ClassVar[int] = 3
    knows_cotangent: ClassVar[bool] = False

    def read(self, block: BirthBlock):
        memory, closed, wanted = ended(block)
        theta = block.parameters.theta
        directions = _directions(block.parameters)
        num_outputs, num_chains = closed.total.shape[2:]
        kind = closed.total.dtype
        rows = jnp.zeros((num_chains, num_outputs, directions.shape[0]), kind)
        parts = jnp.zeros((self.num_shares, directions.shape[1], num_outputs, num_chains), kind)
        flat = lambda tree: ravel_pytree(tree)[0].astype(kind)

        def plus(totals, chunk: Chunk, slopes: Float[Array, "M F P"], shares):
            rows, parts = totals
            rows = rows.at[chunk.chain].add(chunk.where_real(shares[:, 0, :, None] * slopes))
            seen = jnp.einsum("mfp,pr->mrf", slopes, directions)
            gain = chunk.where_real(shares[:, :, None, :] * seen[:, None])
            return rows, parts.at[..., chunk.chain].add(jnp.moveaxis(gain, 0, -1))

        def births(totals, chunk: Chunk):
            slope = jax.vmap(lambda birth: flat(jax.grad(log_odds, 1)(block, theta, birth)))
            return plus(totals, chunk, slope(chunk.entries.birth)[:, None], chunk.entries.total)

        def samples(totals, chunk: Chunk):
            def jacobian(place):
                return jax.jacrev(lambda theta: f_at(block, theta, place))(theta)

            slopes = jax.vmap(lambda place: jax.vmap(flat)(jacobian(place)))(chunk.entries)
            return plus(totals, chunk, slopes, chunk.entries.shares[:, :, None].astype(kind))

        size = max(1, _CHUNK_NUMBERS // (directions.shape[0] * num_outputs))
        totals = over_chunks(closed, wanted, min(size, _CHUNK), (rows, parts), births)
        place = block.kept.place
        if place is not None:
            some = jnp.any(place.shares > 0, axis=1)
            totals = over_chunks(place, some, min(size, _CHUNK), totals, samples)
        # Rows are added up one by one, so their chains lead until here.
        rows, parts = totals
        return memory, Reading(rows.T, parts)

    def nothing(self, at: Observation) -> Float[Array, "R F"]:
        """Nothing here: observations come at the end of each block."""
        num_directions = min(at.parameters.size, _DIRECTIONS)
        return jnp.zeros((num_directions, at.value.primal.size), at.value.primal.dtype)


def _directions(parameters: Parameters) -> Float[Array, "P R"]:
    """Each parameter's own if they are few, else random signs, always the same."""
    size, dtype = parameters.size, parameters.dtype
    if size <= _DIRECTIONS:
        return jnp.eye(size, dtype=dtype)
    signs = jax.random.rademacher(jax.random.key(0), (size, _DIRECTIONS), dtype=dtype)
    return signs / jnp.sqrt(jnp.asarray(size, dtype))
