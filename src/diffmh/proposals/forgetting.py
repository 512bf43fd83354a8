"""Forgetting: a walk that loses the tangent of where it came from, little by little, without bias.

The tangent of a random walk `x' = x + L z` is never forgotten: a shift of the state by ẋ shifts
every later state, and where the chain is at equilibrium that says nothing, but is noise. A shift
`λẋ` of the mean of a proposal may be put into the law of z instead, which then is `N(λL⁻¹ẋ, I)`:

- the proposed state moves by the rest, `ẋ' = (1 − λ)ẋ + ∂L z`;
- whatever comes of the step, H, gains `E[s H]`, `s = λ z·L⁻¹ẋ`. Since `E[s] = 0` and what would
  have come of a rejection does not depend on z, it is `E[s (H − H_rejected)]`: an accept flips to a
  reject with the weight `−s` on top of its own.

Any λ is unbiased. What is left of the tangent is the state less its mean over some 1/λ steps.
"""

from __future__ import annotations

import equinox as eqx
import jax
from jaxtyping import Array, Float, PyTree

from ..base import trees
from .gaussian import GaussianWalk
from .proposal import Proposal

# Measured on N(0, I): in one dimension anything from 0.01 to 0.08 does alike; in ten, 0.02 has less
# variance than 0 or 0.1.
RATE = 0.02


class Forgotten(eqx.Module):
    """The tangent of a proposed state that is left, and s."""

    tangent: PyTree
    score: Float[Array, "..."]


def forget(
    proposal: Proposal, x: PyTree, x_new: PyTree, tangent: PyTree, tangent_new: PyTree
) -> Forgotten | None:
    """The tangent of `x_new` with less of the state's, and the score of what was taken off, for
    one parameter; `None` for proposals other than walks, whose tangents are left as they are.
    """
    walk = proposal.part_proposal
    if not isinstance(walk, GaussianWalk):
        return None
    x, part_new, tangent, moved = map(proposal.moved_part, (x, x_new, tangent, tangent_new))
    z = walk.whiten(trees.subtract(part_new, x))
    shift = jax.tree.map(lambda leaf: RATE * leaf, tangent)
    # ∂/∂m log N(z; m, I) at m = 0, along L⁻¹ λẋ: z · L⁻¹ λẋ.
    score = trees.dot(z, walk.whiten(shift))
    return Forgotten(proposal.with_moved_part(tangent_new, trees.subtract(moved, shift)), score)
