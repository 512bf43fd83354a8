"""The default coupling of each proposal, and the check that a coupling fits a proposal."""

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
    """The coupling that the proposal names as its best, otherwise the default for its class."""
    proposal = proposal.part_proposal
    named = proposal.best_coupling()
    if named is not None:
        where = f"{type(proposal).__name__}.best_coupling()"
        return validate.instance(named, Coupling, where, "what it returns")
    # From the most specific class to the most general.
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
    """The coupling, or by default the best for the proposal; an error if the pair does not fit."""
    if coupling is None:
        return best_coupling(proposal)
    refuse_mismatch(coupling, proposal)
    return coupling


def refuse_mismatch(coupling: Coupling, proposal: Proposal) -> None:
    """Raise an error if the coupling does not fit the proposal."""
    reason = coupling.mismatch(proposal.part_proposal)
    if reason is not None:
        better = type(best_coupling(proposal)).__name__
        raise ValueError(
            f"`{type(coupling).__name__}()` {reason}: use `{better}()`, or leave `coupling` out."
        )
