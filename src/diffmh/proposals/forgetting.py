"""Forgetting: a walk that gradually drops the tangent of earlier states, without bias.

The tangent of a random walk `x' = x + L z` never decays: a shift ẋ of the state shifts every later
state. At equilibrium such a shift has no effect on the mean and is only noise. Part of the shift,
`λẋ`, may be moved from the mean of the proposal into the distribution of z, which becomes
`N(λL⁻¹ẋ, I)`:

- the proposed state moves by the rest, `ẋ' = (1 − λ)ẋ + ∂L z`;
- the derivative of the outcome H of the step gains `E[s H]` with `s = λ z·L⁻¹ẋ`. Since `E[s] = 0`
  and the outcome of a rejection does not depend on z, it equals `E[s (H − H_rejected)]`: an accept
  flips to a reject with the additional weight `−s`.

Any λ is unbiased. The remaining tangent is that of the state minus its mean over about 1/λ steps.
"""

from __future__ import annotations

import equinox as eqx
import jax
from jaxtyping import Array, Float, PyTree

from ..base import trees
from .gaussian import GaussianWalk
from .proposal import Proposal

# Measured on N(0, I): in one dimension anything from 0.01 to 0.08 is similar; in ten, 0.02 has less
# variance than 0 or 0.1.
RATE = 0.02


class Forgotten(eqx.Module):
    """The remaining tangent of a proposed state, and s."""

    tangent: PyTree
    score: Float[Array, "..."]


def forget(
    proposal: Proposal, x: PyTree, x_new: PyTree, tangent: PyTree, tangent_new: PyTree
) -> Forgotten | None:
    """The reduced tangent of `x_new` and the score s of the part removed, for one parameter; `None`
    for proposals other than walks, whose tangents are not changed.
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
