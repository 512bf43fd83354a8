"""Control variates of the stochastic derivative: two sums of mean exactly zero.

For any function g of the state, at best near the solution of Poisson's equation
`g − P g = f − π f`:

- at each pruning, `Σ w (g(y) − g(x))` over the candidates and alternatives before it, less the same
  after it. Pruning keeps the mean of a weighted sum, whatever stands in place of `g(y) − g(x)`, as
  long as it belongs to the candidate;
- at each step of a living alternative, `W [(g(y') − E g(y')) − (g(x') − E g(x'))]`, the mean being
  over as much of the step as the kernel knows (`Update.surprise`).

Both are averaged beside the derivative D of each chain. The coefficients that take them off are
those of least squares over the *other* chains, independent of the chain's own: nothing is biased.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from . import _trees, alternatives, values
from .alternatives import Alternatives, Events, Transition
from .decisions import Weights, of_possible
from .values import without_tangents

# Fewer chains don't tell two coefficients.
LEAST_CHAINS = 5
# Relative, so that two sums that are nearly the same share their part.
_RIDGE = 1e-3

Function = Callable[[PyTree], Float[Array, "F"]]


class Controlled(eqx.Module):
    """Alternatives, and what the two sums gained in the present step."""

    slots: Alternatives
    pruned: Float[Array, "P F"]
    moved: Float[Array, "P F"]

    def fresh(self) -> Controlled:
        return Controlled(self.slots, jnp.zeros_like(self.pruned), jnp.zeros_like(self.moved))

    @property
    def weight(self) -> Float[Array, "K P"]:
        return self.slots.weight

    @property
    def alive(self):
        return self.slots.alive


class Averages(eqx.Module):
    """Over each chain: of the derivative, and of the gains of the two sums."""

    derivative: Float[Array, "P F *C"]
    pruned: Float[Array, "P F *C"]
    moved: Float[Array, "P F *C"]


def advance(
    memory: Controlled,
    at: Transition,
    coupling_noise: PyTree,
    uniform: Array,
    weights: Weights,
    g: Function,
) -> tuple[Controlled, Events]:
    """A step of all alternatives, as `alternatives.advance` does it, and what the sums gain."""
    slots = memory.slots
    moved = alternatives.propagate(slots, at, coupling_noise)
    surprise = _surprise(slots, moved, at, coupling_noise, g)
    remaining = alternatives.drop_recoupled(moved, at)
    recoupled = moved.alive & ~remaining.alive
    here = g(at.step.after.x)
    old = values.each_slot(g, moved.state.x) - here[None]
    most = values.weighted(jnp.abs(slots.weight), slots.alive, jnp.abs(old) + jnp.abs(here))
    gained = memory.moved + _beyond_rounding(surprise, most)
    if not at.step.decisions:
        nobody = jnp.zeros_like(recoupled)
        events = Events(recoupled, nobody, jnp.zeros(()))
        return dataclasses.replace(memory, slots=remaining, moved=gained), events
    candidates = alternatives.flip_weight(at.step, weights).astype(slots.weight.dtype)
    after, born, index = alternatives.prune(remaining, at, candidates, uniform)
    changes = _changes(at, candidates, g, here)
    newcomer = _trees.entry(changes.T, index)
    new = jnp.where(born[:, None], newcomer[None], old)
    # As a product and a sum: a matrix product for each chain is slower.
    flat = candidates.reshape(candidates.shape[0], 1, -1)
    born_of = of_possible(flat, changes[None])

    def total(born_of, weight, weight_after, old, new):
        before = jnp.sum(born_of, axis=-1) + values.weighted(weight, remaining.alive, old)
        return before, values.weighted(weight_after, after.alive, new)

    terms = (born_of, remaining.weight, after.weight, old, new)
    before, left = total(*terms)
    before_size, left_size = total(*map(jnp.abs, terms))
    pruned = memory.pruned + _beyond_rounding(before - left, before_size + left_size)
    events = Events(recoupled, born, jnp.sum(values.norm(candidates)))
    return Controlled(after, pruned, gained), events


def _beyond_rounding(gain: Array, terms: Array) -> Array:
    """A gain, or zero if it is no more than the rounding of its terms, whose absolute values add up
    to `terms`. Where nothing is pruned the gain is zero; its rounding need not have the mean zero,
    and least squares would blow it up.
    """
    return jnp.where(jnp.abs(gain) > 16 * jnp.finfo(gain.dtype).eps * terms, gain, 0.0)


def _surprise(slots: Alternatives, moved: Alternatives, at: Transition, coupling_noise, g):
    """`Σ_k W_k [(g(y') − E g(y')) − (g(x') − E g(x'))]`."""
    step, parameters = without_tangents(at.step), at.parameters.value_only()

    def one(pair):
        before, after = pair
        found = at.update.surprise(parameters, step, before, after, at.noise, coupling_noise, g)
        return jnp.zeros_like(g(step.after.x)) if found is None else found

    each = values.each_slot(one, (slots.state, moved.state))
    return values.weighted(slots.weight, slots.alive, each)


def _changes(at: Transition, candidates: Array, g: Function, here: Array) -> Array:
    """`g(y_i) − g(x')` for each candidate, (F, candidates)."""
    found = at.update.flip_changes(at.step, at.noise, g)
    if found is not None:
        return found
    count = candidates.reshape(candidates.shape[0], -1).shape[1]
    if count == 1:
        return (g(alternatives.flipped(at, jnp.zeros((), int)).x) - here)[:, None]
    each = jax.vmap(lambda index: g(alternatives.flipped(at, index).x), out_axes=1)
    return each(jnp.arange(count)) - here[:, None]


def controlled(means: Averages) -> Float[Array, "P F C"]:
    """`D_c − a_{−c} A_c − b_{−c} B_c` for chain c, `(a, b)` by least squares over the others."""
    num_chains = means.derivative.shape[-1]
    if num_chains < LEAST_CHAINS:
        return means.derivative
    others = lambda leaf: jnp.sum(leaf, axis=-1, keepdims=True) - leaf
    # A shift of D changes nothing below but rounding.
    shifted = means.derivative - jnp.mean(means.derivative, axis=-1, keepdims=True)
    a, b = means.pruned, means.moved
    size_a, size_b = (_positive(jnp.sqrt(others(leaf**2))) for leaf in (a, b))
    about = others(shifted) / (num_chains - 1)

    def along(leaf, size):
        return (others(leaf * shifted) - others(leaf) * about) / size

    along_a, along_b = along(a, size_a), along(b, size_b)
    cosine = others(a * b) / size_a / size_b
    sine = (1 + _RIDGE) ** 2 - cosine**2
    of_a = ((1 + _RIDGE) * along_a - cosine * along_b) / sine / size_a
    of_b = ((1 + _RIDGE) * along_b - cosine * along_a) / sine / size_b
    return means.derivative - of_a * a - of_b * b


def _positive(size: Float[Array, "P F C"]) -> Float[Array, "P F C"]:
    """A sum that is always zero has the coefficient zero."""
    return jnp.where(size > 0, size, 1.0)
