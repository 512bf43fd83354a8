"""Alternatives: birth, coupled step, recoupling and pruning. Algorithm 2's bookkeeping, for any
kernel.

Per chain there are K slots, each with at most one alternative: a state `y` and a weight `W`, a
vector over the P parameters that is zero when the slot is empty. The derivative of `E[f(x)]` is
carried by `Σ W (f(y) − f(x))`.

The order within a step is: propagate the alternatives by the coupled step; empty the slots whose
alternative met the primal; prune one slot against the new candidate. Scores never look at a
direction dθ, so everything is linear in it.
"""

from __future__ import annotations

import functools
import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from . import _trees
from .kernel import AcceptReject, State, Step, met
from .parameters import Parameters, without_gradients


class Alternatives(eqx.Module):
    """K slots; the leaves of `state` have them as their leading axis."""

    state: State
    weight: Float[Array, "K P"]

    @property
    def score(self) -> Float[Array, "K"]:
        """`‖W‖`."""
        return norm(self.weight.T)

    @property
    def alive(self) -> Bool[Array, "K"]:
        return self.score > 0


class Events(eqx.Module):
    """What happened at a step: in which slots an alternative met the primal or a new one was
    born, and the candidates' score.
    """

    recoupled: Bool[Array, "K"]
    born: Bool[Array, "K"]
    score: Float[Array, ""]


def none_yet(state: State, num_slots: int, num_parameters: int, dtype) -> Alternatives:
    """K empty slots, for a chain that starts at `state`."""
    return Alternatives(
        _trees.repeat(without_gradients(state), num_slots),
        jnp.zeros((num_slots, num_parameters), dtype),
    )


def propagate(
    kernel: AcceptReject,
    parameters: Parameters,
    step: Step,
    alternatives: Alternatives,
    noise: PyTree,
    coupling_noise: PyTree,
) -> State:
    """The coupled step of every alternative. They share its noise: each is a coupling with the
    primal by itself.
    """
    step = without_gradients(step)
    move = lambda y: kernel.coupled_step(parameters.value_only(), step, y, noise, coupling_noise)
    return each_slot(move, alternatives.state)


def drop_recoupled(alternatives: Alternatives, primal: State) -> Alternatives:
    """Empties the slots whose alternative is where the primal is: they will stay together."""
    recoupled = each_slot(lambda y: met(y, primal), alternatives.state)
    return Alternatives(alternatives.state, jnp.where(recoupled[:, None], 0.0, alternatives.weight))


def prune(
    kernel: AcceptReject,
    step: Step,
    alternatives: Alternatives,
    candidate: Float[Array, "P *D"],
    uniform: Float[Array, ""],
) -> tuple[Alternatives, Bool[Array, "K"]]:
    """Keeps one of the D candidates and the lightest alternative, `i` with probability `s_i / Σs`
    and weight `w_i Σs / s_i`.

    `candidate` holds the weights of flipping each decision of the step, and `s = ‖w‖`. An empty
    slot weighs nothing, so it is taken first. Also returns which slot has a new alternative.
    """
    _, old_score = _lightest(alternatives.score)
    index, new_score, new_weight = pick(candidate, uniform, old_score)
    weight, replaced = compete(alternatives.weight, new_weight, new_score, uniform)
    newborn = _trees.repeat(without_gradients(kernel.flipped(step, index)), weight.shape[0])
    return Alternatives(_trees.select(replaced, newborn, alternatives.state), weight), replaced


def compete(
    weight: Float[Array, "K P"],
    new_weight: Float[Array, "P"],
    new_score: Float[Array, ""],
    uniform: Float[Array, ""],
) -> tuple[Float[Array, "K P"], Bool[Array, "K"]]:
    """Keeps the lightest alternative or the new one, in proportion to their scores: the weights,
    and the new one's slot.
    """
    scores = norm(weight.T)
    slot, old_score = _lightest(scores)
    total = new_score + old_score
    # An empty slot takes the candidate even where `uniform * total` rounds up to it.
    born = (uniform * total < new_score) | ((old_score == 0) & (new_score > 0))
    replaced = slot & born
    safe = lambda score: jnp.where(score > 0, score, 1.0)
    grown = jnp.where(slot, total / safe(scores), 1.0)
    return jnp.where(
        replaced[:, None], new_weight * (total / safe(new_score)), weight * grown[:, None]
    ), replaced


def contribution(
    alternatives: Alternatives, primal_value: Array, values: Float[Array, "K F"]
) -> Float[Array, "P F"]:
    """`Σ_k W_k ⊗ (f(y_k) − f(x))`."""
    return weighted(alternatives.weight, alternatives.alive, values - primal_value)


def weighted(
    weight: Float[Array, "K P"], alive: Bool[Array, "K"], difference: Float[Array, "K F"]
) -> Float[Array, "P F"]:
    """`Σ_k W_k ⊗ difference_k` over the living."""
    difference = jnp.where(alive[:, None], difference, 0.0)
    # Term by term: as one sum over k, XLA for the CPU (jaxlib 0.10.2) gets it wrong for tens of
    # thousands of chains.
    return functools.reduce(
        jnp.add, [w[:, None] * change for w, change in zip(weight, difference, strict=True)]
    )


def values(function, alternatives: Alternatives) -> Float[Array, "K F"]:
    """`f(y_k)`."""
    return each_slot(function, alternatives.state)


def norm(vector: Float[Array, "P *D"]) -> Float[Array, "*D"]:
    """The Euclidean norm over the parameters."""
    if vector.shape[0] == 1:
        return jnp.abs(vector[0])
    return jnp.sqrt(jnp.sum(vector**2, axis=0))


def each_slot(function, state: State):
    """`function` of each slot's state; one slot needs no `vmap`, whose batched primitives may be
    slower.
    """
    if jax.tree.leaves(state)[0].shape[0] > 1:
        return jax.vmap(function)(state)
    single = function(jax.tree.map(lambda leaf: leaf[0], state))
    return jax.tree.map(lambda leaf: leaf[None], single)


def _lightest(scores: Float[Array, "K"]) -> tuple[Bool[Array, "K"], Float[Array, ""]]:
    """Which slot is lightest, and its score."""
    if scores.shape[0] == 1:
        return jnp.ones(1, bool), scores[0]
    return jnp.arange(scores.shape[0]) == jnp.argmin(scores), jnp.min(scores)


def pick(candidate: Float[Array, "P *D"], uniform: Float[Array, ""], old_score: Float[Array, ""]):
    """One of the D candidates in proportion to its score: its index, the total score, its weight
    scaled to that total.

    The uniform that decides between old and new is used again, conditioned on new: with `v = U (Σs
    + S) < Σs`, `v` is uniform on [0, Σs). The candidates are looked through as rows and columns of
    about √D: two short running sums, no long one.
    """
    if candidate.ndim == 1:
        return jnp.zeros((), int), norm(candidate), candidate
    flat = candidate.reshape(candidate.shape[0], -1)
    count = flat.shape[1]
    columns = math.isqrt(count - 1) + 1
    scores = jnp.pad(norm(flat), (0, -count % columns)).reshape(-1, columns)
    row, within, total = _find(jnp.sum(scores, axis=1), lambda total: uniform * (total + old_score))
    column, _, _ = _find(_at(row, scores), lambda total: within)
    index = row * columns + column
    chosen = _at(index, flat.T)
    score = norm(chosen)
    return index, total, chosen * (total / jnp.where(score > 0, score, 1.0))


def _find(
    scores: Float[Array, "n"], position
) -> tuple[Int[Array, ""], Float[Array, ""], Float[Array, ""]]:
    """The interval of `[0, Σs)` that `position(Σs)` is in, how far into it, and `Σs`. Never an
    interval of no length.
    """
    cumulative = jnp.cumsum(scores)
    total = cumulative[-1]
    at = jnp.minimum(position(total), jnp.nextafter(total, jnp.zeros_like(total)))
    before = cumulative <= at
    index = jnp.minimum(jnp.sum(before), scores.size - 1)
    return index, at - jnp.max(jnp.where(before, cumulative, 0.0)), total


def _at(index: Int[Array, ""], rows: Float[Array, "n *m"]) -> Float[Array, "*m"]:
    """`rows[index]`, without a gather, which is slow where each chain has an index of its own."""
    here = jnp.expand_dims(jnp.arange(rows.shape[0]) == index, range(1, rows.ndim))
    return jnp.sum(jnp.where(here, rows, 0.0), axis=0)
