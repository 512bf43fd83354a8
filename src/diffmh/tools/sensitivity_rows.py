"""The rows of a sensitivity table, with the reasons to doubt them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, PyTree

from ..reports.convergence import autocorrelation_time
from ..reports.display import Entry, entries
from ..reports.report import Report, gradient_matrix
from .draw_averages import AtDraws, largest_r_hat
from .quantities import Judgement, influence, judge
from .sensitivity_table import SensitivityRow
from .tails import HEAVY, pareto_shape

# Limits on split R̂ and on effective draws, beyond which a row is marked.
_R_HAT, _EFFECTIVE = 1.05, 100
# A quantity that has one value at nearly all draws, such as an indicator of a rare event, is known
# by the others: if they are less than this share, and fewer of them than this are effective, the
# row is marked.
_NEARLY, _LEAST_OTHERS = 0.1, 10
_CONSTANT = (
    "the quantity has the same value at all draws, or at all but a few, and they do not tell how"
    " often it has others. Sample longer, unless it is a constant."
)


class Health(NamedTuple):
    """The largest split R̂ and the fewest effective draws of the series behind some rows."""

    r_hat: float
    effective_draws: float


def parameters_of(theta: PyTree) -> list[Entry]:
    """The hyperparameters and the powers, by name."""
    return [Entry(name.removeprefix("model."), value) for name, value in entries(theta)]


def reported(
    run: Report, level: float, of: Callable[[PyTree], PyTree] = lambda tree: tree
) -> Float[np.ndarray, "F P 4"]:
    """Derivative, error and interval of every mean from a report; `of` picks a part of f."""
    value, ends = of(run.value), of(run.interval(level)[1])
    slopes = [gradient_matrix(value, of(tree)) for tree in (run.gradient, run.gradient_error)]
    return np.concatenate([np.stack(slopes, -1), gradient_matrix(value, ends, after=1)], axis=-1)


def row(
    quantity: Entry,
    statistic: str,
    parameter: Entry,
    found: Sequence[float] | Float[np.ndarray, "4"],
    sd: float,
    doubt: str,
) -> SensitivityRow:
    """The row of a derivative with its error and the ends of its interval."""
    derivative, error, low, high = map(float, found)
    change = 0.1 * float(parameter.values) * derivative
    name = quantity.name if statistic == "mean" else f"{statistic}({quantity.name})"
    relative = change / sd if sd > 0 else math.nan
    estimate = (derivative, error, low, high, change, relative)
    return SensitivityRow(name, parameter.name, *estimate, not doubt, doubt, statistic)


def strongest_first(rows: Sequence[SensitivityRow]) -> list[SensitivityRow]:
    return sorted(rows, key=lambda row: -np.nan_to_num(abs(row.in_deviations), nan=-1.0))


class FromDrawsRows:
    """The rows of what was found at draws; means are those of the report. `health` is that of all
    rows so far.
    """

    def __init__(self, at: AtDraws, run: Report, theta: PyTree, level: float, doubt: str):
        self.at, self.level, self.doubt = at, level, doubt or _of_weights(at)
        self.quantities, self.parameters = entries(run.value), parameters_of(theta)
        self.means = reported(run, level)
        self.health = Health(1.0, math.inf)

    def of(self, statistics: Sequence[str]) -> Iterator[SensitivityRow]:
        for index in range(len(self.quantities)):
            for statistic in statistics:
                yield from strongest_first(list(self._of(index, statistic)))

    def _of(self, index: int, statistic: str) -> Iterator[SensitivityRow]:
        at, quantity = self.at, self.quantities[index]
        centred = at.value[..., index] - at.mean(at.value[..., index])
        sd = math.sqrt(at.mean(centred**2))
        series = at.weights * centred
        own = Health(largest_r_hat(series[None]), series.size / autocorrelation_time(series))
        tail = max(pareto_shape(series), pareto_shape(-series))
        heavy = statistic in ("mean", "sd") and tail > HEAVY
        rare = self._has_few_others(index, own.effective_draws / series.size)
        found = influence(statistic, at, index)
        for p, parameter in enumerate(self.parameters):
            derivative = float(found.derivative[p])
            judged = judge(derivative, found.series[..., p], at.weights, self.level)
            estimate = (derivative, judged.error, judged.low, judged.high)
            if statistic == "mean":
                estimate = self.means[index, p]
            doubt = self._doubt(judged, own, heavy)
            if rare and math.isfinite(judged.error):
                doubt = _CONSTANT
            doubt = found.missing or self.doubt or doubt
            yield row(quantity, statistic, parameter, estimate, sd, doubt)

    def _has_few_others(self, index: int, effective_share: float) -> bool:
        """True for a quantity that has one value at nearly all draws, and too few others to know
        their probability.
        """
        share, others = _others(self.at, index)
        # Where nothing varies there is no autocorrelation time.
        return share < _NEARLY and others * np.nan_to_num(effective_share, nan=1.0) < _LEAST_OTHERS

    def _doubt(self, judged: Judgement, own: Health, heavy: bool) -> str:
        # Where one of them is NaN, there is nothing to judge by.
        r_hat = float(np.fmax(judged.r_hat, own.r_hat))
        effective = float(np.fmin(judged.effective_draws, own.effective_draws))
        self.health = Health(
            max(self.health.r_hat, r_hat), min(self.health.effective_draws, effective)
        )
        if r_hat > _R_HAT:
            return (
                f"the chains disagree (split R̂ above {_R_HAT}). Sample longer; if that does not"
                " help, look for several modes."
            )
        if effective < _EFFECTIVE:
            return f"fewer than {_EFFECTIVE} effective draws. Sample longer."
        if heavy:
            return (
                f"the quantity has a heavy tail (Pareto k̂ above {HEAVY}), and its moments may be"
                " infinite. Ask for quantiles, or for its logarithm."
            )
        return "" if math.isfinite(judged.error) else "the estimate is not finite."


def _others(at: AtDraws, index: int) -> tuple[float, float]:
    """The share of draws at which a quantity has not its most common value, and how many they are
    worth by their weights.
    """
    _, value = np.unique(at.value[..., index], return_inverse=True)
    value, weights = value.ravel(), at.weights.ravel()
    others = weights[value != np.argmax(np.bincount(value, weights))]
    if not np.any(others > 0):
        return 0.0, 0.0
    total = float(others.sum())
    return total / float(weights.sum()), total**2 / float(np.sum(others**2))


def _of_weights(at: AtDraws) -> str:
    if at.weight is None or pareto_shape(at.weight) <= HEAVY:
        return ""
    return (
        f"the weights have a heavy tail (Pareto k̂ above {HEAVY}). Draw from a distribution that is"
        " closer to the posterior."
    )


def of_own_chains(run: Report, theta: PyTree, level: float) -> Iterator[SensitivityRow]:
    """The rows of a run of moments (f, f²) on our own chains. What the report warns of concerns all
    rows.
    """
    quantities, squares = map(entries, run.value)
    parameters = parameters_of(theta)
    means = reported(run, level, lambda tree: tree[0])
    effective = entries(run.effective_samples[0])
    for index, quantity in enumerate(quantities):
        mean, square = float(quantity.values), float(squares[index].values)
        sd = math.sqrt(max(square - mean**2, 0.0))
        doubt = "the run has warnings (below). Leave `kernel` out to sample by NUTS."
        if not run.warnings:
            few = effective[index].values < _EFFECTIVE
            doubt = f"fewer than {_EFFECTIVE} effective samples. Run longer." if few else ""
            doubt = doubt if sd > 0 else _CONSTANT
        rows = [
            row(quantity, "mean", parameter, means[index, p], sd, doubt)
            for p, parameter in enumerate(parameters)
        ]
        yield from strongest_first(rows)
