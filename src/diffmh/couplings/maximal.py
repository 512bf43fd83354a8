"""The maximal coupling of Vaserstein."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from ..base import trees
from ..base.inversion import index_from_uniform
from ..proposals import FiniteProposal, Proposal
from .coupling import NoiseCoupling

# The residual is where q(·|y) > q(·|x). So many draws from q(·|y) in a row that are not there mean
# that `log_prob` is not the density of `sample` (not normalised, say): the residual is empty, and
# the loop would never end. Where `log_prob` is NaN it ends at once.
_VAIN_TRIES = 1_000


class Maximal(NoiseCoupling):
    """Makes `y' = x'` as probable as it can be.

    Keep `x'` with probability `min(1, q(x'|y) / q(x'|x))`; else draw `y'` from the residual `q(·|y)
    − min(q(·|x), q(·|y))`. On finite spaces the residual is written down, with no loop. For any
    other proposal with a density it is drawn by rejection: one further proposal on average, but
    `1/R` where the residual has the mass `R`, and chains that run side by side all wait for the
    slowest: see `NearlyMaximal`.
    """

    def noise(self, key, proposal, x, num_steps):
        if isinstance(proposal, FiniteProposal):
            return jax.random.uniform(key, (num_steps, 2))
        return jax.random.split(key, num_steps)

    def couple(self, proposal, x, x_new, y, primal_noise, noise):
        if isinstance(proposal, FiniteProposal):
            return _finite(proposal, x, x_new, y, noise)
        return _by_rejection(proposal, x, x_new, y, noise)


def _finite(proposal: FiniteProposal, x, x_new, y, uniforms):
    from_x, from_y = proposal.probabilities(x), proposal.probabilities(y)
    keep = uniforms[0] * from_x[x_new] < from_y[x_new]
    # Σ_j min(from_x, from_y) is kept; what is missing of from_y is its excess over from_x. Where
    # both are the same there is none, and x' is always kept.
    residual = jnp.maximum(from_y - from_x, 0.0)
    return jnp.where(keep, x_new, index_from_uniform(residual, uniforms[1]).astype(x_new.dtype))


def _by_rejection(proposal: Proposal, x: PyTree, x_new: PyTree, y: PyTree, key) -> PyTree:
    key_keep, key_residual = jax.random.split(key)

    def log_ratio(state, near, far):
        """The part of q(·|near) under q(·|far) at `state`; 1 or more where it is all of it."""
        return proposal.log_prob(far, state) - proposal.log_prob(near, state)

    def covered(log_ratio, key):
        # NaN is told apart: of `exp(min(0, NaN))` some settings of XLA make 1.
        below = jax.random.uniform(key) < jnp.exp(jnp.minimum(0.0, log_ratio))
        return below & ~jnp.isnan(log_ratio)

    # Chains that have met keep x' whatever rounding says: the residual is empty, and the loop would
    # never end.
    keep = covered(log_ratio(x_new, x, y), key_keep) | trees.equal(x, y)

    def try_again(carry):
        _, key, _, vain = carry
        key, key_sample, key_accept = jax.random.split(key, 3)
        candidate = proposal.sample(key_sample, y)
        ratio = log_ratio(candidate, y, x)
        # log q(z|x) − log q(z|y) < 0: z is where the residual has mass, and the loop will end.
        vain = jnp.where(ratio < 0, 0, vain + 1)
        return candidate, key, ~covered(ratio, key_accept), vain

    def unfinished(carry):
        _, _, found, vain = carry
        return ~found & (vain < _VAIN_TRIES)

    start = (x_new, key_residual, keep, jnp.zeros((), int))
    return jax.lax.while_loop(unfinished, try_again, start)[0]
