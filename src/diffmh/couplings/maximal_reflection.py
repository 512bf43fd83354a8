"""The maximal coupling of Gaussian steps, with reflection."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..base import trees
from ..proposals import GaussianProposal
from .coupling import GaussianCoupling


class MaximalReflection(GaussianCoupling):
    """For Gaussian steps `x' = m(x) + L z`: keep `x'` with the largest possible probability, and
    otherwise reflect the step.

    With `z = L⁻¹(x' − m(x))`, `δ = L⁻¹(m(y) − m(x))` and `e = δ/‖δ‖`: keep `x'` with probability
    `min(1, φ(z − δ)/φ(z))`, otherwise `y' = m(y) + L(z − 2(e·z)e)`. Proposals that are not Gaussian
    raise an error.
    """

    def noise(self, key, proposal, x, num_steps):
        return jax.random.uniform(key, (num_steps,))

    def couple(self, proposal, x, x_new, y, primal_noise, noise):
        assert isinstance(proposal, GaussianProposal)
        mean_x, mean_y = proposal.mean(x), proposal.mean(y)
        z = proposal.whiten(trees.subtract(x_new, mean_x))
        delta = proposal.whiten(trees.subtract(mean_y, mean_x))
        along, distance = trees.dot(z, delta), trees.dot(delta, delta)
        # log φ(z − δ) − log φ(z) = z·δ − ‖δ‖²/2. The part of N(0, I) that is not kept, φ(z) −
        # min(φ(z), φ(z − δ)), is the mirror image of the part of N(δ, I) that is missing, so the
        # reflected step supplies it exactly.
        keep = noise < jnp.exp(jnp.minimum(0.0, along - 0.5 * distance))
        # If the chains have met, δ = 0, and `couple` returns x'.
        twice = 2 * along / jnp.where(distance > 0, distance, 1.0)
        # Each leaf in its own precision; the sums are in the widest.
        reflected = jax.tree.map(lambda z, delta: (z - twice * delta).astype(z.dtype), z, delta)
        return trees.select(keep, x_new, trees.add(mean_y, proposal.colour(reflected)))
