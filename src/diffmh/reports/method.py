"""Method: how a derivative was estimated, and what could be used instead."""

from __future__ import annotations

from collections.abc import Iterable

import equinox as eqx

from .. import couplings
from ..core.estimator import Estimator
from ..core.kernel import Kernel, Update
from ..couplings import Coupling
from ..estimators import Covariance, Stationary, StochasticDerivative
from ..proposals import Proposal

# Beyond this many alternatives more of them hardly help (`docs/honest.md`).
_MANY = 32


class Method(eqx.Module):
    """The names of a run's estimator and couplings, and what else could be used: the couplings that
    its proposals name as their best, and `Covariance()` if it applies.
    """

    estimator: str
    weights: str | None
    num_alternatives: int
    couplings: tuple[str, ...]
    better: tuple[str, ...]
    covariance_applies: bool
    paired: bool = False

    @staticmethod
    def of(kernel: Kernel, estimator: Estimator, num_parameters: int, lag: int) -> Method:
        weights, paired, num_alternatives = None, False, 0
        if isinstance(estimator, StochasticDerivative):
            weights, paired = estimator.weights, estimator.is_paired
            num_alternatives = estimator.num_alternatives
        elif isinstance(estimator, Stationary):
            weights, paired = "two-sided", True
            num_alternatives = estimator.num_alternatives(kernel)
        # Advice must differ from what is in use, so both are looked up in the same way.
        pairs = [_coupling_of(update) for update in kernel.updates()]
        used = _names(used for used, _ in pairs)
        best = _names(best for _, best in pairs)
        return Method(
            type(estimator).__name__,
            weights,
            num_alternatives,
            used,
            tuple(name for name in best if name not in used),
            applies(Covariance(), kernel, num_parameters, lag),
            paired,
        )

    @property
    def in_use(self) -> str:
        if not self.num_alternatives:
            return f"`{self.estimator}()`"
        used = " and ".join(f"`{name}()`" for name in self.couplings) or "the same noise"
        return (
            f"`{self.estimator}(weights='{self.weights}', alternatives={self.num_alternatives})`"
            f" coupled by {used}"
        )

    def remedies(self) -> str:
        """Advice that applies to this estimator and differs from what is in use."""
        if self.estimator == "Covariance":
            return "Use a proposal that mixes faster."
        found = []
        if not self.num_alternatives:
            found.append("`StochasticDerivative()`")
        else:
            found += [f"the coupling `{name}()`" for name in self.better]
            if self.weights == "one-sided":
                found.append("weights='two-sided'")
            if self.num_alternatives < _MANY:
                found.append(f"alternatives={min(_MANY, 4 * self.num_alternatives)}")
            found.append("a proposal whose chains meet sooner")
        if self.covariance_applies:
            found.append("`Covariance()`, whose derivative is that of the equilibrium")
        return "Use " + ", or ".join(found) + "."


def applies(estimator: Estimator, kernel: Kernel, num_parameters: int, lag: int) -> bool:
    """Return True if the estimator accepts this problem."""
    try:
        estimator.refuse(kernel, num_parameters, lag)
    except ValueError:
        return False
    return True


def _coupling_of(update: Update) -> tuple[Coupling | None, Coupling | None]:
    """The coupling in use and the proposal's best, where they are known: a kernel that decides with
    the same noise names none.
    """
    used = getattr(update, "coupling", None)
    proposal = getattr(update, "proposal", None)
    best = couplings.best_coupling(proposal) if isinstance(proposal, Proposal) else used
    return used or best, best


def _names(found: Iterable[Coupling | None]) -> tuple[str, ...]:
    named = (type(coupling).__name__ for coupling in found if coupling is not None)
    return tuple(dict.fromkeys(named))
