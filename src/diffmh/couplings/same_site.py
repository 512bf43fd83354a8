"""The coupling of single-site proposals on labels."""

from __future__ import annotations

import jax.numpy as jnp

from ..proposals import OneLabel
from .coupling import NoiseCoupling


class SameSite(NoiseCoupling):
    """For `OneLabel`: the same site, and the same value there with the largest probability.

    If the primal's label is proposed to change from `a` to `a'` and the alternative's label there
    is `b`, propose `a'` to it, or `a` if `a' = b`. This maps the other values of `a` one to one
    onto those of `b`, so the marginal is exact without another draw. If `a ≠ b`, the proposals
    agree with probability `(n − 2)/(n − 1)`, which is the maximum; if `a = b`, always.
    """

    def mismatch(self, proposal):
        if isinstance(proposal, OneLabel):
            return None
        return f"couples `OneLabel`, not `{type(proposal).__name__}`"

    def noise(self, key, proposal, x, num_steps):
        return None

    def couple(self, proposal, x, x_new, y, primal_noise, noise):
        # a' ↦ a' for a' ≠ b and b ↦ a is one to one from {≠ a} onto {≠ b}.
        return jnp.where(x == x_new, y, jnp.where(x_new == y, x, x_new))
