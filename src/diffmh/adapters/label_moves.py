"""Moves of a model's discrete sites, between two steps of its continuous ones.

Each leaves the conditional distribution of its site given the rest invariant, whatever the others
do, so that any sequence of them and of NUTS steps leaves the posterior invariant.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from ..proposals import OneLabel, OtherState, Proposal

Sites = dict[str, Any]
Density = Callable[[Sites], Float[Array, ""]]

# A proposal of the user's own is tried at least this many times between two draws.
_LEAST_TRIES = 10


class LabelMove(eqx.Module):
    """A move of one discrete site."""

    name: eqx.AbstractVar[str]

    @abstractmethod
    def __call__(self, key: Key[Array, ""], x: Sites, log_density: Density) -> Sites:
        """The state with the site moved."""


class SiteGibbs(LabelMove):
    """Draws each entry of the site in turn from its conditional distribution over the integers
    `first, ..., first + count − 1`.
    """

    name: str = eqx.field(static=True)
    first: int = eqx.field(static=True)
    count: int = eqx.field(static=True)

    def __call__(self, key, x, log_density):
        site = x[self.name]
        values = (self.first + jnp.arange(self.count)).astype(site.dtype)
        entries = jnp.arange(site.size).reshape(site.shape)

        def draw(entry, x):
            def with_value(value):
                return {**x, self.name: jnp.where(entries == entry, value, x[self.name])}

            logits = jax.vmap(lambda value: log_density(with_value(value)))(values)
            # Where a density is NaN the value is impossible: the current one is not.
            logits = jnp.where(jnp.isnan(logits), -jnp.inf, logits)
            chosen = jax.random.categorical(jax.random.fold_in(key, entry), logits)
            return with_value(values[chosen])

        return jax.lax.fori_loop(0, site.size, draw, x)


class SiteProposal(LabelMove):
    """Metropolis–Hastings on the site with a proposal of the user's own, as many times as it has
    entries.
    """

    name: str = eqx.field(static=True)
    proposal: Proposal

    def __call__(self, key, x, log_density):
        def attempt(number, carry):
            x, here = carry
            key_propose, key_accept = jax.random.split(jax.random.fold_in(key, number))
            new = self.proposal.sample(key_propose, x[self.name])
            x_new = {**x, self.name: new}
            there = log_density(x_new)
            log_ratio = there - here
            if not self.proposal.symmetric:
                log_ratio += self.proposal.log_prob(new, x[self.name])
                log_ratio -= self.proposal.log_prob(x[self.name], new)
            # NaN compares as false: what has no density is never accepted.
            accept = jnp.log(jax.random.uniform(key_accept)) < log_ratio
            kept = {name: jnp.where(accept, x_new[name], x[name]) for name in x}
            return kept, jnp.where(accept, there, here)

        tries = max(_LEAST_TRIES, x[self.name].size)
        return jax.lax.fori_loop(0, tries, attempt, (x, log_density(x)))[0]


def label_move(name: str, proposal: Proposal) -> LabelMove:
    """The move of a site that was given a proposal: a Gibbs draw over its values if the proposal is
    uniform over all of them.
    """
    match proposal:
        case OtherState(num_states=count):
            return SiteGibbs(name, 0, count)
        case OneLabel(num_values=count, site=None):
            return SiteGibbs(name, 0, count)
    return SiteProposal(name, proposal)
