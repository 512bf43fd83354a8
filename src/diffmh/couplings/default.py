"""Which coupling suits which proposal."""

from __future__ import annotations

from .. import _validate
from ..proposals import (
    Coupling,
    FiniteProposal,
    GaussianProposal,
    NoiseProposal,
    On,
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
    named = proposal.best_coupling()
    if named is not None:
        where = f"{type(proposal).__name__}.best_coupling()"
        return _validate.instance(named, Coupling, where, "what it returns")
    match proposal:
        case On():
            return best_coupling(proposal.proposal)
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


def refuse_mismatch(coupling: Coupling, proposal: Proposal) -> None:
    """Refuses a pair that makes no sense."""
    inner = proposal
    while isinstance(inner, On):
        inner = inner.proposal
    reason = coupling.mismatch(inner)
    if reason is not None:
        better = type(best_coupling(inner)).__name__
        raise ValueError(
            f"`{type(coupling).__name__}()` {reason}: use `{better}()`, or leave `coupling` out."
        )
