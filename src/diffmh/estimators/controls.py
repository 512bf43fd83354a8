"""Control variates of the stochastic derivative: two sums of mean exactly zero.

For any function g of the state, at best near the solution of Poisson's equation
`g − P g = f − π f`:

- at each pruning, `Σ w (g(y) − g(x))` over the candidates and alternatives before it, less the same
  after it. Pruning keeps the mean of a weighted sum, whatever stands in place of `g(y) − g(x)`, as
  long as it belongs to the candidate;
- at each step of a living alternative, `W [(g(y') − E g(y')) − (g(x') − E g(x'))]`, the mean being
  over as much of the step as the kernel knows (`Update.martingale_increment`).

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

from ..base import trees
from ..core import alternatives, values
from ..core.alternatives import Alternatives, Events, Transition
from ..core.decisions import Weights, of_possible
from ..core.values import Sum, without_tangents

# Fewer chains don't tell two coefficients.
LEAST_CHAINS = 5
# Relative, so that two sums that are nearly the same share their part.
_RIDGE = 1e-3
# A sum whose mean over the other chains is this many standard errors from 0, or which rests on this
# few of them, has half of its coefficient (`_distrust`).
_FAR, _FEW, _LEAST_SHARE = 3.0, 30, 1 / 6

Function = Callable[[PyTree], Float[Array, "F"]]


class Controlled(eqx.Module):
    """Alternatives, and what the two sums gained in the present step."""

    slots: Alternatives
    pruned: Sum
    moved: Sum

    def fresh(self) -> Controlled:
        return Controlled(self.slots, *jax.tree.map(jnp.zeros_like, (self.pruned, self.moved)))

    @property
    def weight(self) -> Float[Array, "K P"]:
        return self.slots.weight

    @property
    def alive(self):
        return self.slots.alive


class ControlledAverages(eqx.Module):
    """Over each chain: of the derivative, and of the gains of the two sums."""

    derivative: Float[Array, "P F *C"]
    pruned: Sum
    moved: Sum


def advance(
    memory: Controlled, at: Transition, weights: Weights, g: Function
) -> tuple[Controlled, Events]:
    """A step of all alternatives, as `alternatives.advance` does it, and what the sums gain."""
    slots = memory.slots
    moved = alternatives.propagate(slots, at)
    surprise = _surprise(slots, moved, at, g)
    remaining = alternatives.drop_recoupled(moved, at)
    recoupled = moved.alive & ~remaining.alive
    here = g(at.step.after.x)
    old = values.each_slot(g, moved.state.x) - here[None]
    gained = _plus(memory.moved, surprise)
    if not at.step.decisions:
        nobody = jnp.zeros_like(recoupled)
        events = Events(recoupled, nobody, jnp.zeros(()))
        return dataclasses.replace(memory, slots=remaining, moved=gained), events
    candidates = alternatives.flip_weight(at.step, weights).astype(slots.weight.dtype)
    after, born, index = alternatives.prune(remaining, at, candidates, at.own_noise.prune)
    changes = _changes(at, candidates, g, here)
    newcomer = trees.entry(changes.T, index)
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
    pruned = _plus(memory.pruned, Sum(before - left, before_size + left_size))
    events = Events(recoupled, born, jnp.sum(values.norm(candidates)))
    return Controlled(after, pruned, gained), events


def _plus(sum_: Sum, gain: Sum) -> Sum:
    return jax.tree.map(lambda leaf, more: leaf + more.astype(leaf.dtype), sum_, gain)


def _surprise(slots: Alternatives, moved: Alternatives, at: Transition, g: Function) -> Sum:
    """`Σ_k W_k [(g(y') − E g(y')) − (g(x') − E g(x'))]`."""
    step, parameters = without_tangents(at.step), at.parameters.value_only()

    def one(pair):
        before, after = pair
        found = at.update.martingale_increment(
            parameters, step, before, after, at.noise, at.own_noise.coupling, g
        )
        nothing = jnp.zeros_like(g(step.after.x))
        return Sum(nothing, nothing) if found is None else found

    each = values.each_slot(one, (slots.state, moved.state))
    return Sum(
        values.weighted(slots.weight, slots.alive, each.total),
        values.weighted(jnp.abs(slots.weight), slots.alive, each.size),
    )


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


def controlled(means: ControlledAverages) -> Float[Array, "P F C"]:
    """`D_c − a_{−c} A_c − b_{−c} B_c` for chain c, `(a, b)` by least squares over the others."""
    num_chains = means.derivative.shape[-1]
    if num_chains < LEAST_CHAINS:
        return means.derivative
    # A shift of D changes nothing below but rounding.
    shifted = means.derivative - jnp.mean(means.derivative, axis=-1, keepdims=True)
    about = _others(shifted) / (num_chains - 1)
    # Where nothing was pruned, or the gains of different steps cancel, the sum is zero and its
    # rounding is not: least squares would blow it up, and its mean need not be zero.
    sums = [sum_.beyond_rounding() for sum_ in (means.pruned, means.moved)]
    # In units of their own, so that fourth powers do not underflow.
    a, b = (leaf / _positive(_largest(leaf)) for leaf in sums)
    size_a, size_b = (_positive(jnp.sqrt(_others(leaf**2))) for leaf in (a, b))

    def along(leaf, size):
        return (_others(leaf * shifted) - _others(leaf) * about) / size

    along_a, along_b = along(a, size_a), along(b, size_b)
    cosine = _others(a * b) / size_a / size_b
    norm_a, norm_b = (1 + _RIDGE + _distrust(*sum_) for sum_ in ((a, size_a), (b, size_b)))
    sine = norm_a * norm_b - cosine**2
    of_a = (norm_b * along_a - cosine * along_b) / sine / size_a
    of_b = (norm_a * along_b - cosine * along_a) / sine / size_b
    return means.derivative - of_a * a - of_b * b


def _distrust(leaf: Float[Array, "P F C"], size: Float[Array, "P F C"]) -> Float[Array, "P F C"]:
    """A further ridge for a sum whose mean of zero is not to be seen in the other chains: the rare
    events that make up for the frequent ones are missing there, and taking the sum off would take
    off some of the derivative too, with an error that knows nothing of it.

    They are missing if the mean is many standard errors from zero, or if few chains bear the sum:
    `(Σ A²)² / Σ A⁴` of them, a third of all where A is normal. The ridge is smooth: at a threshold
    a chain's own A would decide on which side the others are.
    """
    far = _others(leaf) / size / _FAR
    num_others = leaf.shape[-1] - 1
    few = min(_FEW, _LEAST_SHARE * num_others) * _others(leaf**4) / size**4
    return far**4 + few**4


def _others(leaf: Float[Array, "P F C"]) -> Float[Array, "P F C"]:
    """The sum over the other chains. Taken off the sum of all, a chain that outweighs the others
    would leave its rounding: their coefficient would depend on it.
    """
    before = jnp.cumsum(leaf, axis=-1)[..., :-1]
    after = jnp.cumsum(leaf[..., ::-1], axis=-1)[..., -2::-1]
    nothing = jnp.zeros_like(leaf[..., :1])
    return jnp.concatenate([nothing, before], -1) + jnp.concatenate([after, nothing], -1)


def _largest(leaf: Float[Array, "P F C"]) -> Float[Array, "P F 1"]:
    return jnp.max(jnp.abs(leaf), axis=-1, keepdims=True)


def _positive(size: Float[Array, "P F C"]) -> Float[Array, "P F C"]:
    """A sum that is always zero has the coefficient zero."""
    return jnp.where(size > 0, size, 1.0)
