"""The two extremes: the same noise for both chains, and independent noise."""

from __future__ import annotations

from ..proposals import GaussianProposal, move, proposal_noise
from .coupling import NoiseCoupling


class CommonRandomNumbers(NoiseCoupling):
    """The same noise for both chains: `y' = sample(key, y)` with the key that drew `x'`.

    On lattices of spins this is the monotone coupling, and with independence proposals both chains
    propose the same state. Random walks coupled in this way keep their distance and meet only by
    accident: use `MaximalReflection` for them.
    """

    def keeps_apart(self, kind):
        return issubclass(kind, GaussianProposal)

    def noise(self, key, proposal, x, num_steps):
        return None

    def couple(self, proposal, x, x_new, y, primal_noise, noise):
        return move(proposal, y, primal_noise)


class Independent(NoiseCoupling):
    """Independent noise for the alternative until the chains meet. Unbiased but with a large
    variance: for comparison only.
    """

    def keeps_apart(self, kind):
        return issubclass(kind, GaussianProposal)

    def noise(self, key, proposal, x, num_steps):
        return proposal_noise(proposal, key, x, num_steps)

    def couple(self, proposal, x, x_new, y, primal_noise, noise):
        return move(proposal, y, noise)
