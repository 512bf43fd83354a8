"""Which coupling suits which proposal."""

from __future__ import annotations

from ..base import validate
from ..proposals import (
    Coupling,
    FiniteProposal,
    GaussianProposal,
    NoiseProposal,
    OneLabel,
    Proposal,
)
from .maximal import Maximal
from .maximal_reflection import MaximalReflection
from .nearly_maximal import NearlyMaximal
from .same_noise import CommonRandomNumbers
from .same_site import SameSite


def best_coupling(proposal: Proposal) -> Coupling:
    """The coupling that the proposal names as its best, else the one that suits its kind."""
    proposal = proposal.part_proposal
    named = proposal.best_coupling()
    if named is not None:
        where = f"{type(proposal).__name__}.best_coupling()"
        return validate.instance(named, Coupling, where, "what it returns")
    match proposal:
        case GaussianProposal():
            return MaximalReflection()
        case OneLabel():
            return SameSite()
        case FiniteProposal():
            return Maximal()
        case NoiseProposal():
            return CommonRandomNumbers()
        case _:
            return NearlyMaximal()


def suitable(coupling: Coupling | None, proposal: Proposal) -> Coupling:
    """The coupling, or the best for the proposal; refused if it makes no sense."""
    if coupling is None:
        return best_coupling(proposal)
    refuse_mismatch(coupling, proposal)
    return coupling


def refuse_mismatch(coupling: Coupling, proposal: Proposal) -> None:
    """Refuses a pair that makes no sense."""
    reason = coupling.mismatch(proposal.part_proposal)
    if reason is not None:
        better = type(best_coupling(proposal)).__name__
        raise ValueError(
            f"`{type(coupling).__name__}()` {reason}: use `{better}()`, or leave `coupling` out."
        )
