"""Thinning: reduce many weighted alternatives to few, without bias.

Keep i with probability `π_i = min(1, s_i / τ)` and weight `w_i / π_i`. The threshold τ is chosen so
that the expected number kept equals the number of slots. Systematic sampling with one uniform U
keeps exactly that many. The cumulative sum of π, started at U, assigns an interval of length π_i
to each i; i is kept if its interval contains an integer.
"""

from __future__ import annotations

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..base import trees
from ..core import values as algebra

# More lanes than this are sorted; fewer are compared pairwise.
_SORTED = 64


class Kept(eqx.Module):
    """The contents of K slots after thinning: the lane of each slot's alternative, the factor of
    its weight (0 if the slot is empty), and True if it is a newcomer.
    """

    source: Int[Array, "K"]
    factor: Float[Array, "K"]
    replaced: Bool[Array, "K"]
    num_lanes: int = eqx.field(static=True)

    def take(self, lanes: Array) -> Array:
        """The entries that the slots hold, of an array over lanes."""
        num_slots = self.source.shape[0]
        if self.num_lanes == num_slots + 1:
            own, newcomer = lanes[:num_slots], lanes[num_slots:]
            return trees.select(self.replaced, newcomer, own)
        return jnp.take(lanes, self.source, axis=0)


def thin(scores: Float[Array, "L"], num_slots: int, uniform: Float[Array, ""]) -> Kept:
    """Keep one lane for each slot. Survivors keep their slots; newcomers fill the rest."""
    num_lanes = scores.shape[0]
    if (num_slots, num_lanes) == (1, 2):
        return _one_of_two(scores, uniform)
    # Unbiased: E[kept_i · w_i / π_i] = w_i for each lane, for any joint distribution of the lanes
    # that are kept.
    probability = inclusion(scores, num_slots)
    kept = _systematic(probability, uniform)
    stays, comes = kept[:num_slots], kept[num_slots:]
    # The r-th newcomer takes the r-th free slot.
    rank_of_slot, rank_of_comer = jnp.cumsum(~stays) - 1, jnp.cumsum(comes) - 1
    takes = ~stays[:, None] & comes[None] & (rank_of_slot[:, None] == rank_of_comer[None])
    replaced = jnp.any(takes, axis=1)
    source = jnp.where(replaced, num_slots + jnp.argmax(takes, axis=1), jnp.arange(num_slots))
    chance = jnp.where(probability > 0, probability, 1.0)[source]
    factor = jnp.where(stays | replaced, 1 / chance, 0.0)
    # A NaN derivative must not disappear.
    factor = jnp.where(jnp.any(jnp.isnan(scores)), jnp.nan, factor)
    return Kept(source, factor, replaced, num_lanes)


def _one_of_two(scores: Float[Array, "2"], uniform: Float[Array, ""]) -> Kept:
    # With one slot `inclusion` is s_i / (s_1 + s_2), a competition of two, which needs no sorting.
    old, new = scores[:1], scores[1:]
    total = old + new
    replaced = algebra.wins(old, new, uniform)
    chosen = jnp.where(replaced, new, old)
    factor = jnp.where(chosen == 0, 0.0, total / jnp.where(chosen == 0, 1.0, chosen))
    return Kept(replaced.astype(jnp.int32), factor, replaced, 2)


def inclusion(scores: Float[Array, "L"], count: int) -> Float[Array, "L"]:
    """`π_i = min(1, s_i / τ)` with `Σπ = count`; 1 for all nonzero scores if those are fewer.

    If the t largest are certain, τ is the sum of the others over `count − t`. The first t for which
    no other exceeds τ is right.
    """
    if scores.shape[0] > _SORTED:
        ordered = jnp.sort(scores)[::-1]
        above = jnp.arange(scores.shape[0])
        rest = jnp.cumsum(ordered[::-1])[::-1]
    else:
        ordered = scores
        greater = scores[None, :] > scores[:, None]
        above = jnp.sum(greater, axis=1)
        rest = jnp.sum(jnp.where(greater, 0.0, scores[None, :]), axis=1)
    # Entries of equal score have equal `above`, so ties are treated alike.
    threshold = rest / jnp.maximum(count - above, 1)
    # Rounding must not leave an empty set.
    right = (above < count) & (ordered <= threshold * (1 + 1e-6))
    threshold = jnp.min(jnp.where(right, threshold, jnp.inf))
    return jnp.where(scores > threshold, 1.0, scores / jnp.where(threshold > 0, threshold, 1.0))


def several(
    scores: Float[Array, "C"], count: int, uniform: Float[Array, ""]
) -> tuple[Int[Array, "M"], Float[Array, "M"]]:
    """The indices of `count` different candidates, and the factors of their weights."""
    probability = inclusion(scores, count)
    reached = jnp.cumsum(probability) + uniform
    points = jnp.arange(1, count + 1, dtype=reached.dtype)
    index = jnp.minimum(jnp.searchsorted(reached, points, side="left"), scores.shape[0] - 1)
    chance = probability[index]
    found = (points <= reached[-1]) & (chance > 0)
    factor = jnp.where(found, 1 / jnp.where(found, chance, 1.0), 0.0)
    # A NaN derivative must not disappear.
    return index, jnp.where(jnp.any(jnp.isnan(scores)), jnp.nan, factor)


def _systematic(probability: Float[Array, "L"], uniform: Float[Array, ""]) -> Bool[Array, "L"]:
    # The interval of i has length π_i ≤ 1, so it contains an integer with probability π_i, and
    # never two. Σπ and the size of the sample differ by less than 1.
    reached = jnp.floor(jnp.cumsum(probability) + uniform)
    return jnp.diff(reached, prepend=jnp.zeros(1)) > 0
