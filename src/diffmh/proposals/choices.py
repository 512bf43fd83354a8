"""Choices among finitely many values, of the whole state or of a part of it."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from .finite import FiniteProposal
from .on import On
from .proposal import Proposal


def moved_part(proposal: Proposal, x: PyTree) -> PyTree:
    """The part of the state that a proposal moves."""
    while isinstance(proposal, On):
        proposal, x = proposal.proposal, proposal.where(x)
    return x


def is_finite(proposal: Proposal) -> bool:
    """Whether it chooses among finitely many values."""
    while isinstance(proposal, On):
        proposal = proposal.proposal
    return isinstance(proposal, FiniteProposal)


def log_probabilities(proposal: Proposal, x: PyTree) -> Float[Array, "n"]:
    """`log q(· | x)` over the values of a finite proposal."""
    while isinstance(proposal, On):
        proposal, x = proposal.proposal, proposal.where(x)
    assert isinstance(proposal, FiniteProposal)
    p = proposal.probabilities(x)
    # Twice guarded: where p = 0, the logarithm's derivative is no number.
    return jnp.where(p > 0, jnp.log(jnp.where(p > 0, p, 1.0)), -jnp.inf)


def choose(proposal: Proposal, x: PyTree, value: Int[Array, ""]) -> PyTree:
    """The state with one of a finite proposal's values."""
    if isinstance(proposal, On):
        return proposal.replace(x, choose(proposal.proposal, proposal.where(x), value))
    return value.astype(x.dtype)


def chosen(proposal: Proposal, x_new: PyTree) -> Int[Array, ""]:
    """Which of a finite proposal's values was proposed."""
    return moved_part(proposal, x_new)
