"""The two ends: the same noise for both chains, and fresh noise."""

from __future__ import annotations

from ..proposals import move, proposal_noise
from .coupling import NoiseCoupling


class CommonRandomNumbers(NoiseCoupling):
    """The same noise for both chains: `y' = sample(key, y)` with the key that drew `x'`.

    On lattices of spins this is the monotone coupling, and for independence proposals both chains
    are proposed the same state. Random walks so coupled keep their distance and meet only by
    accident: use `MaximalReflection` there.
    """

    def noise(self, key, proposal, x, num_steps):
        return None

    def couple(self, proposal, x, x_new, y, primal_noise, noise):
        return move(proposal, y, primal_noise)


class Independent(NoiseCoupling):
    """Fresh noise for the alternative until the chains meet. Unbiased, with a large variance:
    for comparison only.
    """

    def noise(self, key, proposal, x, num_steps):
        return proposal_noise(proposal, key, x, num_steps)

    def couple(self, proposal, x, x_new, y, primal_noise, noise):
        return move(proposal, y, noise)
