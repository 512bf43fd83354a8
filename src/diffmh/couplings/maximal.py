"""The maximal coupling of Vaserstein."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from .. import _trees
from ..proposals import FiniteProposal, Proposal
from ..proposals.finite import index_from_uniform
from .coupling import NoiseCoupling


class Maximal(NoiseCoupling):
    """Makes `y' = x'` as probable as it can be.

    Keep `x'` with probability `min(1, q(x'|y) / q(x'|x))`; else draw `y'` from the residual `q(·|y)
    − min(q(·|x), q(·|y))`. On finite spaces the residual is written down, with no loop. For any
    other proposal with a density it is drawn by rejection: one further proposal on average, more
    when the chains are close but do not meet.
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
    residual = jnp.maximum(from_y - from_x, 0.0)
    return jnp.where(keep, x_new, index_from_uniform(residual, uniforms[1]).astype(x_new.dtype))


def _by_rejection(proposal: Proposal, x: PyTree, x_new: PyTree, y: PyTree, key) -> PyTree:
    key_keep, key_residual = jax.random.split(key)

    def covered(state, near, far, key):
        """With probability `min(1, q(state|far) / q(state|near))`: the part of q(·|near) under
        q(·|far).
        """
        log_ratio = proposal.log_prob(far, state) - proposal.log_prob(near, state)
        return jax.random.uniform(key) < jnp.exp(jnp.minimum(0.0, log_ratio))

    # Chains that have met keep x' whatever rounding says: the residual is empty, and the loop would
    # never end.
    keep = covered(x_new, x, y, key_keep) | _trees.equal(x, y)

    def try_again(carry):
        _, key, _ = carry
        key, key_sample, key_accept = jax.random.split(key, 3)
        candidate = proposal.sample(key_sample, y)
        return candidate, key, ~covered(candidate, y, x, key_accept)

    y_new, _, _ = jax.lax.while_loop(
        lambda carry: ~carry[2], try_again, (x_new, key_residual, keep)
    )
    return y_new
