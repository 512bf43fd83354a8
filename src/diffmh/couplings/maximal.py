"""The maximal coupling of Vaserstein."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from ..base import trees
from ..base.inversion import index_from_uniform
from ..proposals import FiniteProposal, Proposal
from .coupling import NoiseCoupling

# The residual has its mass where q(·|y) > q(·|x). If this many draws from q(·|y) in a row are not
# there, `log_prob` is not the normalised density of `sample`. Then the residual may be empty and
# the loop would not end. If `log_prob` is NaN, the loop ends at once.
_VAIN_TRIES = 1_000


class Maximal(NoiseCoupling):
    """Maximises the probability that `y' = x'`.

    Keep `x'` with probability `min(1, q(x'|y) / q(x'|x))`; otherwise draw `y'` from the residual
    `q(·|y) − min(q(·|x), q(·|y))`. On finite spaces the residual is computed, without a loop. For
    other proposals with a density it is drawn by rejection, which takes one more proposal on
    average, but `1/R` where the residual has the mass `R`. Chains that run in parallel all wait for
    the slowest: see `NearlyMaximal`.
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
    # x' is kept with probability Σ_j min(from_x, from_y); the residual is the excess of from_y over
    # from_x. If both are the same it is empty, and x' is always kept.
    residual = jnp.maximum(from_y - from_x, 0.0)
    return jnp.where(keep, x_new, index_from_uniform(residual, uniforms[1]).astype(x_new.dtype))


def _by_rejection(proposal: Proposal, x: PyTree, x_new: PyTree, y: PyTree, key) -> PyTree:
    key_keep, key_residual = jax.random.split(key)

    def log_ratio(state, near, far):
        """`log q(state|far) − log q(state|near)`; 0 or more where all of q(·|near) is covered."""
        return proposal.log_prob(far, state) - proposal.log_prob(near, state)

    def covered(log_ratio, key):
        # NaN needs its own test: with some settings of XLA, `exp(min(0, NaN))` is 1.
        below = jax.random.uniform(key) < jnp.exp(jnp.minimum(0.0, log_ratio))
        return below & ~jnp.isnan(log_ratio)

    # Chains that have met keep x' whatever the rounding: the residual is empty, and the loop would
    # not end.
    keep = covered(log_ratio(x_new, x, y), key_keep) | trees.equal(x, y)

    def try_again(carry):
        _, key, _, vain = carry
        key, key_sample, key_accept = jax.random.split(key, 3)
        candidate = proposal.sample(key_sample, y)
        ratio = log_ratio(candidate, y, x)
        # log q(z|x) − log q(z|y) < 0: the residual has mass at z, so the loop can end.
        vain = jnp.where(ratio < 0, 0, vain + 1)
        return candidate, key, ~covered(ratio, key_accept), vain

    def unfinished(carry):
        _, _, found, vain = carry
        return ~found & (vain < _VAIN_TRIES)

    start = (x_new, key_residual, keep, jnp.zeros((), int))
    return jax.lax.while_loop(unfinished, try_again, start)[0]
