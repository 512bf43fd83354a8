"""Alternatives: birth, coupled step, recoupling and pruning. Algorithm 2's bookkeeping, for any
kernel.

Per chain there are K slots, each with at most one alternative: a state `y` and a weight `W`, a
vector over the P parameters that is zero when the slot is empty. The derivative of `E[f(x)]` is
carried by `Σ W (f(y) − f(x))`.

The order within a step is: propagate the alternatives by the coupled step; empty the slots whose
alternative met the primal; prune one slot against the new candidates.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from ..base import trees
from . import values
from .decisions import Weights
from .kernel import Kernel, State, Step, Update
from .parameters import Parameters
from .update_checks import checked_noise, checked_state
from .values import Value, without_tangents


class Transition(eqx.Module):
    """One update of the primal, as an estimator sees it.

    `noise` is the primal's, `own_noise` what the estimator had drawn for itself (`OwnNoise`, if it
    follows alternatives by the functions below); `past` holds the earlier states that f looks at,
    if it does; `observable` is f, as in `Observation`; `kernel` is what the update belongs to.
    """

    parameters: Parameters
    update: Update
    step: Step
    noise: PyTree
    own_noise: PyTree
    past: Value | None = None
    observable: Callable[..., Value] | None = None
    kernel: Kernel | None = None


class Alternatives(eqx.Module):
    """K slots; the leaves of `state` and `past` have them as their leading axis.

    `scale` adds up what weights were born so far, parameter by parameter: scores measure each
    parameter in its own units, so that none starves the others. One parameter needs none.
    """

    state: State
    past: Value | None
    weight: Float[Array, "K P"]
    scale: Float[Array, "P"] | None

    @property
    def score(self) -> Float[Array, "K"]:
        """The weight of each in pruning; 0 where the slot is empty."""
        return values.norm(self.weight.T, self.scale)

    @property
    def alive(self) -> Bool[Array, "K"]:
        return values.is_alive(jnp.max(jnp.abs(self.weight), axis=1))


class Events(eqx.Module):
    """The events of a step: in which slots an alternative met the primal or a new one was born,
    how much weight the candidates had, and which of them was picked.
    """

    recoupled: Bool[Array, "K"]
    born: Bool[Array, "K"]
    score: Float[Array, ""]
    picked: Int[Array, ""] | None = None


class OwnNoise(eqx.Module):
    """The coupling's randomness, and the uniform that prunes, if anything is pruned: a draw of its
    own, never the one that accepts.
    """

    coupling: PyTree
    prune: Float[Array, "..."] | None

    @staticmethod
    def draw(
        update: Update, key: Key[Array, ""], x: PyTree, num_steps: int, prunes: bool = True
    ) -> OwnNoise:
        key_coupling, key_prune = jax.random.split(key)
        uniform = jax.random.uniform(key_prune, (num_steps,)) if prunes else None
        noise = update.coupling_noise(key_coupling, x, num_steps)
        name = f"{update.name_in_messages}.coupling_noise"
        return OwnNoise(checked_noise(noise, num_steps, name), uniform)


def none_yet(
    state: State, past: Value | None, num_slots: int, num_parameters: int, dtype: Any
) -> Alternatives:
    """K empty slots, for a chain that starts at `state`."""
    return Alternatives(
        trees.repeat(state.without_tangents(), num_slots),
        trees.repeat(without_tangents(past), num_slots),
        jnp.zeros((num_slots, num_parameters), dtype),
        jnp.zeros(num_parameters, dtype) if num_parameters > 1 else None,
    )


def advance(slots: Alternatives, at: Transition, weights: Weights) -> tuple[Alternatives, Events]:
    """A step of all alternatives, beside the primal's."""
    candidates = None
    if at.step.decisions:
        candidates = without_idle(at, flip_weight(at.step, weights))
    return follow(slots, at, candidates)


def without_idle(at: Transition, candidates: Float[Array, "P *C"]) -> Float[Array, "P *C"]:
    """The weights of candidates, 0 for those that are known to lead to where the primal is."""
    idle = at.update.leads_nowhere(at.step, at.noise)
    if idle is None:
        return candidates
    shape = candidates.shape[1:]
    if jnp.size(idle) != math.prod(shape):
        raise TypeError(
            f"`{at.update.name_in_messages}.leads_nowhere` must return one truth value for each of"
            f" {math.prod(shape)} candidates, got shape {jnp.shape(idle)}."
        )
    # NaN stays: a derivative that is not a number must be seen.
    return jnp.where(idle.reshape(shape) & ~jnp.isnan(candidates), 0.0, candidates)


def follow(
    slots: Alternatives, at: Transition, candidates: Float[Array, "P *C"] | None
) -> tuple[Alternatives, Events]:
    """A step of all alternatives, and the pruning of one of them against these candidates."""
    return settle(propagate(slots, at), at, candidates)


def settle(
    moved: Alternatives, at: Transition, candidates: Float[Array, "P *C"] | None
) -> tuple[Alternatives, Events]:
    """Alternatives that have taken their step: those that met the primal leave, and one competes
    with the candidates.
    """
    # Recoupled alternatives are dropped before the pruning: an alternative that has met the primal
    # must not compete with the candidates, as its weight carries nothing any more.
    remaining = drop_recoupled(moved, at)
    recoupled = moved.alive & ~remaining.alive
    if candidates is None:
        return remaining, Events(recoupled, jnp.zeros_like(recoupled), jnp.zeros(()))
    # Pruning decides by them for each number that is kept of an alternative.
    remaining, flips = at.parameters.barriers.materialise(
        (remaining, candidates.astype(moved.weight.dtype))
    )
    pruned, born, picked = prune(remaining, at, flips, at.own_noise.prune)
    score = jnp.sum(values.norm(flips))
    return pruned, Events(recoupled, born, score, picked)


def flip_weight(step: Step, weights: Weights) -> Float[Array, "P *C"]:
    """The weights of flipping the decisions of a step, one candidate each."""
    return _together([decision.flip_weight(weights) for decision in step.decisions])


def flip_rate(step: Step) -> Float[Array, "1 *C"]:
    """The same without their derivatives: `Decision.flip_rate`."""
    return _together([decision.flip_rate()[None] for decision in step.decisions])


def _together(found: list[Array]) -> Float[Array, "P *C"]:
    if len(found) == 1:
        return found[0]
    return jnp.concatenate([weight.reshape(weight.shape[0], -1) for weight in found], axis=1)


def propagate(slots: Alternatives, at: Transition) -> Alternatives:
    """The coupled step of every alternative. They share its noise: each is a coupling with the
    primal by itself.
    """
    step, parameters = without_tangents(at.step), at.parameters.value_only()
    name = f"{at.update.name_in_messages}.coupled_step"

    def move(y):
        moved = at.update.coupled_step(parameters, step, y, at.noise, at.own_noise.coupling)
        return checked_state(moved, step.after, name)

    return dataclasses.replace(
        slots, state=parameters.barriers.materialise_slots(values.each_slot(move, slots.state))
    )


def drop_recoupled(slots: Alternatives, at: Transition) -> Alternatives:
    """Empties the slots whose alternative is where the primal is, in all that f still looks at:
    they will stay together.
    """
    primal = (at.step.after.x, without_tangents(at.past))
    same = lambda place: trees.equal(place, primal)
    recoupled = values.each_slot(same, (slots.state.x, slots.past))
    return dataclasses.replace(slots, weight=values.drop(slots.weight, recoupled))


def prune(
    slots: Alternatives, at: Transition, candidates: Float[Array, "P *C"], uniform: Array
) -> tuple[Alternatives, Bool[Array, "K"], Int[Array, ""]]:
    """Keeps one of the candidates and the lightest alternative, `i` with probability `s_i / Σs` and
    weight `w_i Σs / s_i`. An empty slot weighs nothing, so it is taken first. Also returns which
    slot has a new alternative, and of which candidate.
    """
    # The scale grows before scores are taken, so that no candidate is measured by a scale of 0.
    if slots.scale is not None:
        born = jnp.sum(jnp.abs(candidates), axis=tuple(range(1, candidates.ndim)))
        slots = dataclasses.replace(slots, scale=slots.scale + born)
    scores = slots.score
    # One uniform picks among the candidates and decides against the old alternative: conditioned on
    # a candidate being kept, its fraction is uniform again.
    picked = values.pick(candidates, uniform, values.lightest(scores)[1], slots.scale)
    weight, replaced = values.compete(slots.weight, scores, picked.weight, picked.score, uniform)
    newborn = (flipped(at, picked.index).without_tangents(), without_tangents(at.past))
    state, past = trees.select(
        replaced, trees.repeat(newborn, weight.shape[0]), (slots.state, slots.past)
    )
    return dataclasses.replace(slots, state=state, past=past, weight=weight), replaced, picked.index


def flipped(at: Transition, candidate: Int[Array, ""]) -> State:
    """The state that a candidate leads to."""
    first, *others = at.step.decisions
    state = flipped_in(at, 0, candidate)
    begin = first.num_candidates
    for number, decision in enumerate(others, 1):
        # Out of its range for other decisions' candidates: whatever it returns is not selected
        # then.
        other = flipped_in(at, number, candidate - begin)
        state = trees.select(candidate < begin, state, other)
        begin += decision.num_candidates
    return state


def flipped_in(at: Transition, decision: int, candidate: Int[Array, ""]) -> State:
    """The state that a candidate of one of the decisions leads to."""
    state = at.update.flipped(at.step, at.noise, decision, candidate)
    return checked_state(state, at.step.after, f"{at.update.name_in_messages}.flipped")


def differences(slots: Alternatives, function, primal: Array) -> Float[Array, "P F"]:
    """`Σ_k W_k ⊗ (f(y_k) − f(x))`, `function` being f of a place."""
    at_alternatives = values.each_slot(function, (slots.state.x, slots.past))
    return values.weighted(slots.weight, slots.alive, at_alternatives - primal[None])


def look_back(slots: Alternatives) -> Alternatives:
    """Before a step, where f looks at earlier states: the present becomes past."""
    newest = lambda slot: remember(slot[0], Value(slot[1]))
    past = values.each_slot(newest, (slots.past, slots.state.x))
    return dataclasses.replace(slots, past=past)


def remember(past: Value, x: Value) -> Value:
    """The past with `x` as its newest state, and without its oldest. Time leads, after the
    parameters of a tangent.
    """
    shift = lambda stack, newest: jnp.concatenate([newest[None], stack[:-1]])
    primal = jax.tree.map(shift, past.primal, x.primal)
    return Value(primal, jax.tree.map(jax.vmap(shift), past.tangent, x.tangent))
