"""The faster form of a coupling, whose noise is drawn ahead of the time loop, and the function that
applies any coupling.
"""

from __future__ import annotations

from abc import abstractmethod

import jax
from jaxtyping import Array, Key, PyTree

from .. import proposals
from ..base import trees, validate
from ..proposals import Coupling, GaussianProposal, Proposal

# `propose` may get the same key that drew `x_new`. The coupling's own draws use that key folded
# with this number, which no proposal's draws use.
_OWN = 0x636F7570


class NoiseCoupling(Coupling):
    """A coupling whose randomness does not depend on the states: drawn ahead of the time loop."""

    @abstractmethod
    def noise(self, key: Key[Array, ""], proposal: Proposal, x: PyTree, num_steps: int) -> PyTree:
        """The coupling's own randomness for `num_steps` steps along a leading axis."""

    @abstractmethod
    def couple(
        self,
        proposal: Proposal,
        x: PyTree,
        x_new: PyTree,
        y: PyTree,
        primal_noise: PyTree,
        noise: PyTree,
    ) -> PyTree:
        """`y_new`, from the noise that made `x_new` and the coupling's own. It need not be
        faithful: the function `couple` below ensures that.
        """

    def propose(self, key, proposal, x, x_new, y):
        """Draw `y_new`. The key may be the one that drew `x_new`; for `CommonRandomNumbers` it
        must be.
        """
        primal_noise = proposals.draw_one(proposal, key, x)
        noise = draw_one(self, proposal, key, x)
        return couple(self, proposal, x, x_new, y, primal_noise, noise)


class GaussianCoupling(NoiseCoupling):
    """A coupling of Gaussian steps."""

    def mismatch(self, proposal):
        if isinstance(proposal, GaussianProposal):
            return None
        return f"needs Gaussian steps, which `{type(proposal).__name__}` does not take"


def coupling_noise(
    coupling: Coupling, proposal: Proposal, key: Key[Array, ""], x: PyTree, num_steps: int
) -> PyTree:
    """The coupling's own randomness for `num_steps` steps: the noise of a `NoiseCoupling`,
    otherwise one key for each step.
    """
    own = jax.random.fold_in(key, _OWN)
    if isinstance(coupling, NoiseCoupling):
        part = jax.eval_shape(proposal.moved_part, x)
        return coupling.noise(own, proposal.part_proposal, part, num_steps)
    return jax.random.split(own, num_steps)


def draw_one(coupling: Coupling, proposal: Proposal, key: Key[Array, ""], x: PyTree) -> PyTree:
    """`coupling_noise` for one step."""
    return trees.take(coupling_noise(coupling, proposal, key, x, 1), 0)


def couple(
    coupling: Coupling,
    proposal: Proposal,
    x: PyTree,
    x_new: PyTree,
    y: PyTree,
    primal_noise: PyTree,
    noise: PyTree,
) -> PyTree:
    """`y_new`, from the primal's noise and `coupling_noise` for one step. Faithful for every
    coupling.
    """
    part = proposal.part_proposal
    x, x_new, y_part = map(proposal.moved_part, (x, x_new, y))
    if isinstance(coupling, NoiseCoupling):
        y_new = coupling.couple(part, x, x_new, y_part, primal_noise, noise)
    else:
        y_new = coupling.propose(noise, part, x, x_new, y_part)
    validate.same_form(y_new, y_part, f"what `{type(coupling).__name__}` proposes")
    # Faithful: if the parts of two chains are equal, so are their proposals, despite rounding.
    return proposal.with_moved_part(y, trees.select(trees.equal(x, y_part), x_new, y_new))
