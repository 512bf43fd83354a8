"""Stationary: the equilibrium's value and derivative from pairs of chains that meet."""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn

import equinox as eqx

from ..base import validate
from ..base.validate import Checked
from ..core.estimator import Estimator, Problem, SecondOrder
from ..core.kernel import Kernel, Update, knows_coupled_transition
from ..core.pair import PairSchedule
from .covariance import Covariance
from .covariance_hessian import CovarianceHessian
from .mixing import LEAST_PAIRS
from .paired import PairEstimator

# A pair runs for at most this many steps, or this many times what was asked for, if `max_steps` is
# left out.
_MOST_STEPS, _TIMES = 100_000, 10


def _unresolved(self: Estimator, *_: Any) -> NoReturn:
    raise TypeError(f"`{self!r}` runs in the form that `resolve` gives it.")


class Stationary(Estimator):
    """The value and the derivative **of the equilibrium**, unbiased from any start and with any
    burn-in, for kernels whose coupled chains meet.

    Each chain X has a second one Y, of the same start law, which lags `lag` steps behind and moves
    with X by the kernel's own coupling until they meet, at time τ. With
    `H(φ) = Σ_t c_t φ(X_t) + e_t (φ(X_t) − φ(Y_{t−L}))` (`docs/mathematics.md` has the weights) the
    value is `H(f)`, and the derivative is a mixture `D + β(C − D)` of two unbiased estimates: D by
    alternatives of X and Y, each followed until it meets its chain, and
    `C = mean_r H_r(f s) − mean_{r≠q} H_r(f) H_q(s) + H(∂f)`, `s = ∂ log g`, over independent pairs;
    β comes from other pairs. C needs what `Covariance()` needs; where it does not apply, and with
    fewer than 8 chains, the derivative is D alone.

    - `lag`: how many steps Y is behind. A larger one has a smaller variance where `burn_in` is
      short, at the cost of as many steps.
    - `alternatives=K`: how many alternatives of each chain are followed at a time; 0 is C alone,
      with less work for each step. `None`: 1, or 0 for kernels with moves that depend on theta and
      have no density (`Hamiltonian`).
    - `max_steps`: the most steps of a pair; `None` for 100,000, or ten times `burn_in +
      num_samples`. A pair that has not met by then makes the result NaN; `.run` says how many.

    Where C applies there are second derivatives as well, by the cumulants of f and s across pairs:
    `diffmh.hessian`, and `jax.hessian` itself.

    `num_samples` and `burn_in` decide about the variance only. A `burn_in` near the time that most
    pairs take to meet is a good choice: `.run` reports `meeting_time` and suggests one.

    Refused: kernels whose chains cannot meet (a `Hamiltonian` by itself; a walk coupled by
    `CommonRandomNumbers()`); `alternatives=0` where C does not apply; alternatives for updates
    whose coupled step has no known decisions (`Hamiltonian`, functions of draws).

    >>> import jax, diffmh
    >>> from diffmh.models import gaussian
    >>> mean = diffmh.expectation(
    ...     lambda theta, x: x, gaussian.sampler(), init=8.0, num_samples=50, burn_in=20,
    ...     num_chains=256, estimator=diffmh.Stationary())
    >>> slope = jax.grad(mean)(0.5, jax.random.key(0))                               # exactly 1
    >>> bool(abs(slope - 1) < 0.2)
    True
    """

    lag: int = eqx.field(static=True)
    alternatives: int | None = eqx.field(static=True)
    max_steps: int | None = eqx.field(static=True)
    differentiates_steps: ClassVar[bool] = True

    def __init__(
        self,
        lag: Checked[int] = 1,
        alternatives: Checked[int] | None = None,
        max_steps: Checked[int] | None = None,
    ):
        self.lag = validate.count(lag, "Stationary(lag=...)")
        if alternatives is not None:
            validate.count(alternatives, "Stationary(alternatives=...)", least=0)
        self.alternatives = alternatives
        if max_steps is not None:
            validate.count(max_steps, "Stationary(max_steps=...)")
        self.max_steps = max_steps

    def __repr__(self) -> str:
        given = {"lag": self.lag, "alternatives": self.alternatives, "max_steps": self.max_steps}
        shown = (f"{name}={value}" for name, value in given.items() if value is not None)
        return f"Stationary({', '.join(shown)})"

    def refuse_kernel(self, kernel, num_steps):
        refuse_that_stay_apart(kernel, repr(self))
        if self.max_steps is not None and self.max_steps < num_steps:
            raise ValueError(
                f"`Stationary(max_steps={self.max_steps})` must be at least `burn_in + num_samples`"
                f" = {num_steps}."
            )
        if self.num_alternatives(kernel):
            advice = (
                "use `Stationary(alternatives=0)`, the covariance alone, if theta is in the target"
                " only"
            )
            refuse_unknown_decisions(kernel, repr(self), advice)

    def refuse(self, kernel, num_parameters, lag):
        self.refuse_kernel(kernel, 0)
        if not self.num_alternatives(kernel):
            reason = no_covariance(kernel, num_parameters, lag)
            if reason is not None:
                raise ValueError(f"`{self!r}` is the covariance alone: {reason}")

    def num_alternatives(self, kernel: Kernel) -> int:
        if self.alternatives is not None:
            return self.alternatives
        return int(all(map(knows_coupled_transition, kernel.updates())))

    def resolve(self, problem):
        schedule = schedule_of(problem, self.lag, self.max_steps)
        alternatives = self.num_alternatives(problem.kernel)
        covariance = no_covariance(problem.kernel, problem.num_parameters, problem.lag) is None
        if not alternatives and problem.num_chains < 2:
            raise ValueError(
                f"`{self!r}` is a covariance over independent pairs and needs `num_chains` of at"
                f" least 2, got {problem.num_chains}."
            )
        # Fewer pairs make one fold, and there is no other to take β from: then D alone, or C alone
        # if no alternatives are followed.
        enough = not alternatives or problem.num_chains >= LEAST_PAIRS
        return PairEstimator(schedule, alternatives, covariance and enough, twice=covariance)

    def second_order(self):
        return StationaryHessian(self)

    start = advance = observe = derivative = _unresolved  # pyright: ignore


class StationaryHessian(SecondOrder):
    """`Stationary`, and the equilibrium's second derivative by the cumulants of `Covariance()`,
    averages H taking the place of a chain's: unbiased from any start, like C.
    """

    stationary: Stationary
    differentiates_steps: ClassVar[bool] = True

    @property
    def first_order(self):
        return self.stationary

    def refuse_kernel(self, kernel, num_steps):
        self.stationary.refuse_kernel(kernel, num_steps)

    def refuse(self, kernel, num_parameters, lag):
        self.stationary.refuse(kernel, num_parameters, lag)
        reason = no_covariance(kernel, num_parameters, lag)
        if reason is not None:
            raise ValueError(
                f"`{self.stationary!r}` has second derivatives where the covariance applies:"
                f" {reason}"
            )

    def resolve(self, problem):
        found = self.stationary.resolve(problem).second_order()
        assert found is not None  # `refuse` has seen to it.
        return found

    def second_derivative(self, means, value):
        return CovarianceHessian(Covariance()).second_derivative(means.moments, value)

    along = start = advance = observe = derivative = _unresolved  # pyright: ignore


def schedule_of(problem: Problem, lag: int, max_steps: int | None) -> PairSchedule:
    """The samples of a problem, and how long its pairs may run."""
    num_steps = problem.burn_in + problem.num_samples
    if max_steps is None:
        max_steps = max(_MOST_STEPS, _TIMES * num_steps)
    return PairSchedule(lag, problem.burn_in + 1, num_steps, max_steps)


def refuse_that_stay_apart(kernel: Kernel, name: str) -> None:
    """Refuses a kernel none of whose updates lets chains meet."""
    # Necessary and not sufficient: pairs that might meet and do not are counted at run time, and
    # make the result NaN.
    updates = kernel.updates()
    if all(update.keeps_apart for update in updates):
        raise ValueError(
            f"`{name}` needs chains that meet, and those of {_named(updates)} at best come close to"
            " each other. Leave `coupling` out to use the proposal's best, or add a walk under"
            " which they meet: `Mixture(kernel, MetropolisHastings(log_density,"
            " GaussianWalk(...)))`."
        )


def refuse_unknown_decisions(kernel: Kernel, name: str, advice: str) -> None:
    """Refuse a kernel whose second chain cannot have alternatives."""
    for update in kernel.updates():
        if not knows_coupled_transition(update):
            raise ValueError(
                f"`{name}`: the coupled step of `{update.name_in_messages}` has no decisions that"
                f" are known, so the second chain cannot have alternatives: {advice}."
            )


def _named(updates: tuple[Update, ...]) -> str:
    def one(update: Update) -> str:
        coupling = getattr(update, "coupling", None)
        name = update.name_in_messages
        if coupling is None:
            return f"`{name}`"
        return f"`{getattr(update, 'proposed_by', type(update)).__name__}` coupled by `{coupling}`"

    return " and ".join(dict.fromkeys(map(one, updates)))


def no_covariance(kernel: Kernel, num_parameters: int, lag: int) -> str | None:
    """Why the covariance does not apply, or `None` if it does."""
    try:
        Covariance().refuse(kernel, num_parameters, lag)
    except ValueError as error:
        return str(error)
    return None
