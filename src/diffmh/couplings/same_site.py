"""The coupling of single-site proposals on labels."""

from __future__ import annotations

import jax.numpy as jnp

from ..proposals import OneLabel
from .coupling import NoiseCoupling


class SameSite(NoiseCoupling):
    """For `OneLabel`: the same site, and there the same value as often as can be.

    Where the primal's label moves from `a` to `a'`, and the alternative's label there is `b`, it is
    proposed `a'`, or `a` if `a' = b`. That maps the other values of `a` one to one onto those of
    `b`, so the marginal is exact with no further draw; the proposals agree with probability
    `(n − 2)/(n − 1)` where `a ≠ b`, which no coupling exceeds, and always where `a = b`.
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
