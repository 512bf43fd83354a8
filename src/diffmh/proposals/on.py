"""Moving one part of a state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax

from ..base import parts, validate
from ..base.validate import Checked
from .proposal import NoiseProposal, Proposal, move, proposal_noise


class On(NoiseProposal):
    """Moves the part `where(x)` of a state with `proposal` and keeps the rest.

    `where` selects a node of the state, as in `equinox.tree_at`, or elements of its arrays:
    `lambda x: x["means"][3]`, `lambda x: x[::2]`. So the state may contain both labels and means,
    and `Cycle(MetropolisHastings(density, On(labels, ...)), MetropolisHastings(density, On(means,
    ...)))` samples it. The default coupling is the best one for the part.

    An index may be traced, such as that of a `Sweep` over the sites of an array: `Sweep(lambda i:
    MetropolisHastings(density, On(lambda z: z[i], ...)), n)` compiles once for all sites.

    >>> import diffmh, jax, jax.numpy as jnp
    >>> state = {"label": jnp.array(0), "mean": jnp.array(0.5)}
    >>> proposal = diffmh.On(lambda x: x["label"], diffmh.OtherState(2))
    >>> moved = proposal.sample(jax.random.key(0), state)
    >>> int(moved["label"]), float(moved["mean"])
    (1, 0.5)
    >>> diffmh.On(lambda z: z[1], diffmh.OtherState(2)).sample(jax.random.key(0), jnp.zeros(3, int))
    Array([0, 1, 0], dtype=int32)

    Raises an error if `where` computes something, or selects an element twice.
    """

    where: Callable[[Any], Any]
    proposal: Proposal
    symmetric: bool = eqx.field(static=True)

    def __init__(self, where: Checked[Callable[[Any], Any]], proposal: Checked[Proposal]):
        self.where = validate.function(where, "On(where, proposal)", "where", "state -> part")
        self.proposal = validate.instance(proposal, Proposal, "On(where, proposal)", "proposal")
        # The rest of the state does not change, so q of the state is q of the part.
        self.symmetric = proposal.symmetric

    def sample(self, key, x):
        return self.replace(x, self.proposal.sample(key, self.where(x)))

    def noise(self, key, x, num_steps):
        return proposal_noise(self.proposal, key, jax.eval_shape(self.where, x), num_steps)

    def move(self, x, noise):
        return self.replace(x, move(self.proposal, self.where(x), noise))

    def log_prob(self, x, x_new):
        return self.proposal.log_prob(self.where(x), self.where(x_new))

    def conditions(self):
        return self.proposal.conditions()

    def refuse_start(self, x):
        parts.places(self.where, x, "On(where, ...)")
        self.proposal.refuse_start(self.where(x))

    @property
    def part_proposal(self):
        return self.proposal.part_proposal

    def moved_part(self, x):
        return self.proposal.moved_part(self.where(x))

    def with_moved_part(self, x, part):
        return self.replace(x, self.proposal.with_moved_part(self.where(x), part))

    def replace(self, x: Any, part: Any) -> Any:
        """`x` with `part` in its place."""
        return parts.replace(self.where, x, part, "On(where, ...)")
