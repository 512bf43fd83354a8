"""When the chains of pairs met, and what that says of the distance from equilibrium."""

from __future__ import annotations

from collections.abc import Iterator

import equinox as eqx
import numpy as np
from jaxtyping import Float, Int

from ..core.simulation import Meetings, Outcome, Simulation
from ..estimators import LEAST_PAIRS, Stationary, StochasticDerivative

# A suggested burn-in is the first step from which the bound on the distance is below this.
_NEAR = 0.01


class MeetingTime(eqx.Module):
    """The meeting times τ of a run's pairs, and the steps that they were run for.

    - `times`, `steps`: of each pair; a pair that has not met has the time −1.
    - `mean`, `quantile(level)`: of those that have met.
    - `num_unmet`, `max_steps`: how many have not, and the limit.
    - `distance(t)`: a bound on the distance from equilibrium after t steps,
      `TV(law of X_t, π) ≤ E max(0, ⌈(τ − L − t)/L⌉)` (Biswas, Jacob and Vanetti, arXiv 1905.09971),
      from the pairs that have met.
    - `burn_in`: the first t at which that bound is below 0.01.
    """

    times: Int[np.ndarray, "C"]
    steps: Int[np.ndarray, "C"]
    lag: int
    max_steps: int

    @staticmethod
    def of(meetings: Meetings) -> MeetingTime:
        times, steps = np.asarray(meetings.time), np.asarray(meetings.steps)
        return MeetingTime(times, steps, meetings.lag, meetings.max_steps)

    @property
    def met(self) -> Int[np.ndarray, "M"]:
        """The times of the pairs that have met."""
        return self.times[self.times >= 0]

    @property
    def num_unmet(self) -> int:
        return int(np.sum(self.times < 0))

    @property
    def mean(self) -> float:
        return float(np.mean(self.met)) if self.met.size else float("nan")

    def quantile(self, level: float) -> float:
        """The time by which this share of the pairs that have met had done so."""
        return float(np.quantile(self.met, level)) if self.met.size else float("nan")

    def distance(self, t: int | Int[np.ndarray, "T"]) -> Float[np.ndarray, "..."]:
        left = self.met[:, None] - self.lag - np.atleast_1d(np.asarray(t))[None]
        bound = np.mean(np.maximum(0, -(-left // self.lag)), axis=0)
        return bound[0] if np.ndim(t) == 0 else bound

    @property
    def burn_in(self) -> int:
        if not self.met.size:
            return self.max_steps
        steps = np.arange(int(self.met.max()) + 1)
        return int(np.argmax(self.distance(steps) < _NEAR))

    def __repr__(self) -> str:
        if self.num_unmet:
            return f"MeetingTime({self.num_unmet} of {self.times.size} pairs have not met)"
        return (
            f"MeetingTime(mean={self.mean:.3g}, median={self.quantile(0.5):.3g},"
            f" 99 %={self.quantile(0.99):.3g}, steps={np.mean(self.steps):.4g},"
            f" burn_in={self.burn_in})"
        )


def facts(time: MeetingTime) -> str:
    """The times in one line."""
    return (
        f"chains met after {time.mean:.3g} steps (median {time.quantile(0.5):.3g}, 99 %"
        f" within {time.quantile(0.99):.3g}), {np.mean(time.steps):,.4g} steps per pair"
    )


def notes(outcome: Outcome, simulation: Simulation) -> Iterator[str]:
    """Notes that a longer burn-in would have a smaller variance, and that there are too few chains
    for the covariance.
    """
    estimator, burn_in = simulation.estimator, simulation.burn_in
    paired = isinstance(estimator, StochasticDerivative) and estimator.is_paired
    equilibrium = isinstance(estimator, Stationary)
    few = simulation.num_chains < LEAST_PAIRS and outcome.method.covariance_applies
    if few and (paired or (equilibrium and outcome.method.num_alternatives)):
        yield (
            f"with {simulation.num_chains} chains the derivative is estimated by alternatives"
            f" alone; the covariance is used from `num_chains={LEAST_PAIRS}` on."
        )
    if outcome.meetings is None or not equilibrium:
        return
    time = MeetingTime.of(outcome.meetings)
    if not time.num_unmet and burn_in < time.burn_in:
        yield (
            "equilibrium: unbiased with any `burn_in`; after"
            f" {burn_in:,} steps the distance from equilibrium may be"
            f" {min(1.0, float(time.distance(burn_in))):.2g}, and with `burn_in={time.burn_in}`,"
            " where it is below 0.01, the variance is smaller."
        )


def warnings(outcome: Outcome) -> Iterator[str]:
    meetings = outcome.meetings
    if meetings is None:
        return
    time = MeetingTime.of(meetings)
    if time.num_unmet:
        yield (
            f"{time.num_unmet} of {time.times.size} pairs had not met after"
            f" max_steps={time.max_steps:,}, so the result is NaN (leaving them out would bias it):"
            " raise `max_steps`, or use a proposal or a coupling whose chains meet sooner."
        )
    late = int(np.sum(np.asarray(meetings.met) & ~np.asarray(meetings.finished)))
    if late:
        yield (
            f"{late} of {time.times.size} pairs had alternatives that had not met their chain after"
            f" max_steps={time.max_steps:,}, so the derivative is NaN: raise `max_steps`, or use a"
            " proposal or a coupling whose chains meet sooner."
        )
