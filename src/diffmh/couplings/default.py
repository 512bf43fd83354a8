"""Which coupling suits which proposal."""

from __future__ import annotations

from ..proposals import GaussianProposal, Independence, On, Proposal, SpinFlip
from .coupling import Coupling
from .maximal import Maximal
from .maximal_reflection import MaximalReflection
from .same_noise import CommonRandomNumbers


def best_coupling(proposal: Proposal) -> Coupling:
    """The coupling under which chains with this proposal meet soonest, of those that are
    offered.
    """
    match proposal:
        case On():
            return best_coupling(proposal.proposal)
        case GaussianProposal():
            return MaximalReflection()
        case SpinFlip() | Independence():
            return CommonRandomNumbers()
        case _:
            return Maximal()


def refuse_mismatch(coupling: Coupling, proposal: Proposal) -> None:
    """Refuses a pair that makes no sense."""
    inner = proposal
    while isinstance(inner, On):
        inner = inner.proposal
    if isinstance(coupling, MaximalReflection) and not isinstance(inner, GaussianProposal):
        raise ValueError(
            f"`MaximalReflection()` reflects Gaussian steps, and `{type(inner).__name__}` does not"
            " take any:"
            f" use `{type(best_coupling(inner)).__name__}()`, or leave `coupling` out."
        )
