"""Moving one part of a state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx

from .. import _validate
from .proposal import NoiseProposal, Proposal, draw, move


class On(NoiseProposal):
    """Moves the part `where(x)` of a state by `proposal` and leaves the rest.

    `where` picks a node of the state, as in `equinox.tree_at`. A mixed state of labels and means is
    then an ordinary state, and `Cycle(MetropolisHastings(density, On(labels, ...)),
    MetropolisHastings(density, On(means, ...)))` samples it. The part is coupled by the coupling
    that suits it best.

    >>> import diffmh, jax, jax.numpy as jnp
    >>> state = {"label": jnp.array(0), "mean": jnp.array(0.5)}
    >>> moved = diffmh.On(lambda x: x["label"], diffmh.OtherState(2)).sample(jax.random.key(0), state)
    >>> int(moved["label"]), float(moved["mean"])
    (1, 0.5)
    """

    where: Callable[[Any], Any]
    proposal: Proposal
    symmetric: bool = eqx.field(static=True)

    def __init__(self, where: Callable[[Any], Any], proposal: Proposal):
        self.where = _validate.function(where, "On(where, proposal)", "where", "state -> part")
        self.proposal = _validate.instance(proposal, Proposal, "On(where, proposal)", "proposal")
        self.symmetric = proposal.symmetric

    def noise(self, key, x, num_steps):
        return draw(self.proposal, key, self.where(x), num_steps)

    def move(self, x, noise):
        return self.replace(x, move(self.proposal, self.where(x), noise))

    def log_prob(self, x, x_new):
        return self.proposal.log_prob(self.where(x), self.where(x_new))

    def replace(self, x: Any, part: Any) -> Any:
        """`x` with `part` in its place."""
        return eqx.tree_at(self.where, x, part)
