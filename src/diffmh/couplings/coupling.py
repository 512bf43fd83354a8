"""The faster form of a coupling, in which the noise is drawn ahead of the time loop, and how any
coupling is applied.
"""

from __future__ import annotations

from abc import abstractmethod

import jax
from jaxtyping import Array, Key, PyTree

from .. import _trees, _validate
from ..proposals import Coupling, On, Proposal, proposal_noise

# `propose` may be handed the very key that drew `x_new`. What a coupling draws itself comes from
# that key folded with this number, a counter that no proposal's own draws reach.
_OWN = 0x636F7570


class NoiseCoupling(Coupling):
    """A coupling whose randomness is drawn apart from the states, ahead of the time loop."""

    @abstractmethod
    def noise(self, key: Key[Array, ""], proposal: Proposal, x: PyTree, num_steps: int) -> PyTree:
        """Its own randomness for `num_steps` steps along a leading axis."""

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
        """`y_new`, from the noise that made `x_new` and its own. Need not be faithful: `couple`
        below sees to it.
        """

    def propose(self, key, proposal, x, x_new, y):
        """Draws `y_new`. The same key may have drawn `x_new`; for `CommonRandomNumbers` it must
        have.
        """
        first = lambda tree: jax.tree.map(lambda leaf: leaf[0], tree)
        primal_noise = first(proposal_noise(proposal, key, x, 1))
        noise = first(coupling_noise(self, proposal, key, x, 1))
        return couple(self, proposal, x, x_new, y, primal_noise, noise)


def coupling_noise(
    coupling: Coupling, proposal: Proposal, key: Key[Array, ""], x: PyTree, num_steps: int
) -> PyTree:
    """The coupling's own randomness for `num_steps` steps: noise where it has it apart, else a
    key for each.
    """
    if isinstance(proposal, On):
        return coupling_noise(coupling, proposal.proposal, key, proposal.form(x), num_steps)
    own = jax.random.fold_in(key, _OWN)
    if isinstance(coupling, NoiseCoupling):
        return coupling.noise(own, proposal, x, num_steps)
    return jax.random.split(own, num_steps)


def draw_one(coupling: Coupling, proposal: Proposal, key: Key[Array, ""], x: PyTree) -> PyTree:
    """One step's worth of `coupling_noise`."""
    return jax.tree.map(lambda leaf: leaf[0], coupling_noise(coupling, proposal, key, x, 1))


def couple(
    coupling: Coupling,
    proposal: Proposal,
    x: PyTree,
    x_new: PyTree,
    y: PyTree,
    primal_noise: PyTree,
    noise: PyTree,
) -> PyTree:
    """`y_new`, from the primal's noise and one step's worth of `coupling_noise`; faithful
    whatever the coupling.
    """
    if isinstance(proposal, On):
        part = proposal.where
        return proposal.replace(
            y,
            couple(coupling, proposal.proposal, part(x), part(x_new), part(y), primal_noise, noise),
        )
    if isinstance(coupling, NoiseCoupling):
        y_new = coupling.couple(proposal, x, x_new, y, primal_noise, noise)
    else:
        y_new = coupling.propose(noise, proposal, x, x_new, y)
    _validate.same_form(y_new, y, f"what `{type(coupling).__name__}` proposes")
    return _trees.select(_trees.equal(x, y), x_new, y_new)
