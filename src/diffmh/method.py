"""Method: how a derivative was estimated, and what differs from it."""

from __future__ import annotations

from collections.abc import Iterable

import equinox as eqx

from . import couplings
from .couplings import Coupling
from .estimators import Covariance, Estimator, StochasticDerivative
from .kernel import Kernel, Update
from .proposals import Proposal

# Beyond so many alternatives more of them hardly help (`docs/honest.md`).
_MANY = 32


class Method(eqx.Module):
    """Estimator, alternatives and couplings of a run, by name, and what else could be used: the
    couplings that its proposals name as their best, and whether `Covariance()` applies.
    """

    estimator: str
    weights: str | None
    num_alternatives: int
    couplings: tuple[str, ...]
    better: tuple[str, ...]
    covariance_applies: bool

    @staticmethod
    def of(kernel: Kernel, estimator: Estimator, num_parameters: int, lag: int) -> Method:
        follows = isinstance(estimator, StochasticDerivative)
        pairs = [_coupling_of(update) for update in kernel.updates()]
        return Method(
            type(estimator).__name__,
            estimator.weights if follows else None,
            estimator.alternatives if follows else 0,
            _names(used for used, _ in pairs),
            _names(best for used, best in pairs if type(best) is not type(used)),
            applies(Covariance(), kernel, num_parameters, lag),
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
        """What differs from the method in use."""
        found = [f"the coupling `{name}()`" for name in self.better if name not in self.couplings]
        if self.weights == "one-sided":
            found.append("weights='two-sided'")
        if 0 < self.num_alternatives < _MANY:
            found.append(f"alternatives={min(_MANY, 4 * self.num_alternatives)}")
        found.append("a proposal whose chains meet sooner")
        if self.covariance_applies and self.estimator != "Covariance":
            found.append("`Covariance()`, whose derivative is that of the equilibrium")
        return "Use " + ", or ".join(found) + "."


def applies(estimator: Estimator, kernel: Kernel, num_parameters: int, lag: int) -> bool:
    """Whether the estimator does not refuse."""
    try:
        estimator.refuse(kernel, num_parameters, lag)
    except ValueError:
        return False
    return True


def _coupling_of(update: Update) -> tuple[Coupling | None, Coupling | None]:
    """The coupling in use, and the one that the proposal names as its best, where they are known:
    a kernel that decides with the same noise names none.
    """
    used = getattr(update, "coupling", None)
    proposal = getattr(update, "proposal", None)
    best = couplings.best_coupling(proposal) if isinstance(proposal, Proposal) else used
    return used or best, best


def _names(found: Iterable[Coupling | None]) -> tuple[str, ...]:
    named = (type(coupling).__name__ for coupling in found if coupling is not None)
    return tuple(dict.fromkeys(named))
