"""Value, tangent, alternatives: the one algebra that the core and `sad` share.

Per chain (or run of a program) there are K *slots*, each with at most one alternative: its weight
`W` is a vector over the P parameters, zero where the slot is empty. What a function `φ` of the rest
contributes to the derivative is `φ̇ + Σ_k W_k (φ_k − φ)`.

Pruning thins candidates of weights `w_i` and scores `s_i` to one without bias: keep `i` with
probability `s_i / Σs` and weight `w_i Σs / s_i`. A score may look at anything but a direction dθ:
then everything is linear in it; only `s_i > 0` wherever `w_i ≠ 0` is asked of it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Inexact, Int, PyTree

from ..base import trees
from ..base.inversion import find


class Value(eqx.Module):
    """A value, its derivative by the P flattened parameters, and its values in the alternatives.

    `tangent` has the P parameters and `alternative` the K slots as a leading axis; each is `None`
    where there is none, and costs nothing then. In the core a `primal` may be a pytree, with
    tangents at its floats and `None` at its other leaves.
    """

    primal: Any
    tangent: Any = None
    alternative: Any = None

    def __sub__(self, other: Value) -> Value:
        """The difference of two values, of which both or neither have a tangent."""
        tangent = None if self.tangent is None else self.tangent - other.tangent
        return Value(self.primal - other.primal, tangent)

    def __add__(self, other: Value) -> Value:
        tangent = None if self.tangent is None else self.tangent + other.tangent
        return Value(self.primal + other.primal, tangent)

    def tangents(self, num_parameters: int, dtype: Any) -> Any:
        """Its tangent, zero if it has none; of its own dtype, or of `dtype` if it is whole."""
        if self.tangent is not None:
            return self.tangent
        inexact = jnp.issubdtype(self.primal.dtype, jnp.inexact)
        kind = self.primal.dtype if inexact else dtype
        return jnp.zeros((num_parameters, *jnp.shape(self.primal)), kind)


def without_tangents(tree: PyTree) -> PyTree:
    """Drops the tangents of all values in a tree: an alternative needs only primals."""
    is_value = lambda node: isinstance(node, Value)
    primal = lambda node: Value(node.primal) if is_value(node) else node
    return jax.tree.map(primal, tree, is_leaf=is_value)


def norm(
    vector: Float[Array, "P *D"], scale: Float[Array, "P"] | None = None
) -> Float[Array, "*D"]:
    """The Euclidean norm over the parameters, each measured in units of its `scale` if given.

    One parameter needs no scale. Components of scale 0 have never been anything but 0.
    """
    if vector.shape[0] == 1:
        return jnp.abs(vector[0])
    if scale is None:
        largest = jnp.max(jnp.abs(vector), axis=0, keepdims=True)
        unit = jnp.where((largest > 0) & jnp.isfinite(largest), largest, 1.0)
        return unit[0] * jnp.sqrt(jnp.sum((vector / unit) ** 2, axis=0))
    unit = jnp.where(scale > 0, scale, 1.0).reshape(-1, *(1,) * (vector.ndim - 1))
    return jnp.sqrt(jnp.sum((vector / unit) ** 2, axis=0))


def is_alive(score: Float[Array, "..."]) -> Bool[Array, "..."]:
    """NaN counts as alive: a derivative that is not a number must be seen, not dropped."""
    return score != 0


def drop(weight: Float[Array, "K P"], recoupled: Bool[Array, "K"]) -> Float[Array, "K P"]:
    """The weights, zero in the slots whose alternative met the primal: they will stay together."""
    seen = jnp.any(jnp.isnan(weight), axis=1)
    return jnp.where((recoupled & ~seen)[:, None], 0.0, weight)


def weighted(
    weight: Float[Array, "K P"], alive: Bool[Array, "K"], difference: Inexact[Array, "K *F"]
) -> Inexact[Array, "P *F"]:
    """`Σ_k W_k ⊗ difference_k` over the living."""
    flat = jnp.where(alive[:, None], difference.reshape(difference.shape[0], -1), 0.0)
    # Term by term: as one sum over k, XLA for the CPU (jaxlib 0.10.2) gets it wrong for tens of
    # thousands of chains.
    terms = [w[:, None] * change[None] for w, change in zip(weight, flat, strict=True)]
    return functools.reduce(jnp.add, terms).reshape(weight.shape[1], *difference.shape[1:])


class Sum(NamedTuple):
    """A sum, and that of the absolute values of its terms, of which its rounding is a fraction."""

    total: Float[Array, "*F"]
    size: Float[Array, "*F"]

    def minus(self, other: Sum) -> Sum:
        return Sum(self.total - other.total, self.size + other.size)

    def beyond_rounding(self) -> Float[Array, "*F"]:
        """The sum, and exactly zero where it is no more than the rounding of its terms."""
        limit = 16 * jnp.finfo(self.total.dtype).eps * self.size
        return jnp.where(jnp.abs(self.total) > limit, self.total, 0.0)


def each_slot(function: Callable[..., PyTree], slots: PyTree) -> PyTree:
    """`function` of each slot, slots leading. A single one is computed without their axis."""
    # Mapped and not written out one by one: written out, the results of the slots are joined by a
    # concatenation, which XLA for the CPU fuses with all that leads to it, and a loop that decides
    # for each number which slot it belongs to does not vectorise. `fast.chains` looks entries of
    # short tables up by comparisons, so an index per slot needs no gather.
    if jax.tree.leaves(slots)[0].shape[0] > 1:
        return jax.vmap(function)(slots)
    alone = function(jax.tree.map(lambda leaf: leaf[0], slots))
    return jax.tree.map(lambda leaf: leaf[None], alone)


def lightest(scores: Float[Array, "K"]) -> tuple[Bool[Array, "K"], Float[Array, ""]]:
    """The lightest slot, and its score."""
    if scores.shape[0] == 1:
        return jnp.ones(1, bool), scores[0]
    return jnp.arange(scores.shape[0]) == jnp.argmin(scores), jnp.min(scores)


def wins(
    old: Float[Array, "*D"], new: Float[Array, "*D"], uniform: Float[Array, ""]
) -> Bool[Array, "*D"]:
    """True if the new one of two is kept, in proportion to their scores."""
    # An empty slot takes the new one even where `uniform * (old + new)` rounds up to it. NaN takes
    # it too: it must be seen.
    return (uniform * (old + new) < new) | ((old == 0) & (new != 0))


def compete(
    weight: Float[Array, "K P"],
    scores: Float[Array, "K"],
    new_weight: Float[Array, "P"],
    new_score: Float[Array, ""],
    uniform: Float[Array, ""],
) -> tuple[Float[Array, "K P"], Bool[Array, "K"]]:
    """Keeps the lightest alternative or the new one, in proportion to their scores: the weights,
    and the new one's slot.
    """
    slot, old_score = lightest(scores)
    total = new_score + old_score
    replaced = slot & wins(old_score, new_score, uniform)
    safe = lambda score: jnp.where(score > 0, score, 1.0)
    grown = jnp.where(slot, total / safe(scores), 1.0)
    newcomer = new_weight * (total / safe(new_score))
    return jnp.where(replaced[:, None], newcomer, weight * grown[:, None]), replaced


class Picked(eqx.Module):
    """One of several candidates: its index, the score of all, its weight scaled to that score."""

    index: Int[Array, ""]
    score: Float[Array, ""]
    weight: Float[Array, "P"]


def pick(
    candidates: Float[Array, "P *C"],
    uniform: Float[Array, ""],
    old_score: Float[Array, ""],
    scale: Float[Array, "P"] | None = None,
) -> Picked:
    """One of the candidates in proportion to its score.

    The uniform that decides between old and new is used again, conditioned on new: with
    `v = U (Σs + S) < Σs`, `v` is uniform on [0, Σs). The candidates are looked through as rows and
    columns of about √C: two short running sums, no long one.
    """
    if candidates.ndim == 1:
        return Picked(jnp.zeros((), int), norm(candidates, scale), candidates)
    flat = candidates.reshape(candidates.shape[0], -1)
    count = flat.shape[1]
    columns = math.isqrt(count - 1) + 1
    scores = jnp.pad(norm(flat, scale), (0, -count % columns)).reshape(-1, columns)
    rows = jnp.sum(scores, axis=1)
    row = find(rows, lambda total: uniform * (total + old_score))
    column = find(trees.entry(scores, row.index), lambda total: row.within)
    index = row.index * columns + column.index
    chosen = trees.entry(flat.T, index)
    score = norm(chosen, scale)
    return Picked(index, row.total, chosen * (row.total / jnp.where(score > 0, score, 1.0)))
