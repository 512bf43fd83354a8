"""Comparison: estimators of one expectation on the same chains, by what they cost."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Float, PyTree

from ..core.estimator import Estimator
from ..estimators import Covariance, Score, Stationary, StochasticDerivative
from .convergence import mean_and_error
from .display import aligned, first_few, number_with_error, with_errors
from .report import gradient_tree, value_tree

# A difference between estimators of more standard errors than this is called a bias.
_BIAS = 4.0


def candidates(own: Estimator) -> list[Estimator]:
    """The estimators that a comparison tries, the one in use first."""
    tried = [StochasticDerivative(alternatives=count) for count in (1, 4, 16)]
    tried.append(StochasticDerivative(alternatives=1, control="covariance"))
    tried += [Score(baseline="other chains"), Covariance()]
    return [own, *(estimator for estimator in tried if not eqx.tree_equal(estimator, own))]


class EstimatorRow(eqx.Module):
    """One estimator: its results and its cost.

    `seconds` are for a compiled run; `cost` is the variance of the gradient × seconds, a geometric
    mean over its entries; `bias` is the difference from the first row's gradient in standard errors
    of that difference, chain by chain, where it is largest.
    """

    estimator: Estimator
    value: PyTree
    value_error: PyTree
    gradient: PyTree
    gradient_error: PyTree
    seconds: float
    cost: float
    bias: float

    @property
    def quantity(self) -> str:
        """The quantity whose derivative is estimated."""
        of_equilibrium = isinstance(self.estimator, Covariance | Stationary)
        return "equilibrium" if of_equilibrium else "finite chain"


class Comparison(eqx.Module):
    """The result of `diffmh.compare`. Print it, or draw it with `plots.compare`.

    `recommended` is the estimator with the least variance × time, among those that estimate the
    same quantity as the first row and agree with it. `reason` explains the choice.
    """

    rows: tuple[EstimatorRow, ...]
    recommended: Estimator
    reason: str
    num_chains: int

    def row(self, estimator: Estimator) -> EstimatorRow:
        """The row of an estimator."""
        return next(row for row in self.rows if eqx.tree_equal(row.estimator, estimator))

    def __str__(self) -> str:
        best = self.row(self.recommended)
        head = ["estimator", "derivative of", "gradient", "seconds"]
        head += ["variance × time", "differs by"]
        lines = aligned([head, *(self._line(row, best) for row in self.rows)])
        value = with_errors(self.rows[0].value, self.rows[0].value_error)
        return "\n".join([f"value {value}", *lines, f"use {self.reason}"])

    __repr__ = __str__

    def _line(self, row: EstimatorRow, best: EstimatorRow) -> list[str]:
        chosen = "→ " if row is best else "  "
        return [
            chosen + str(row.estimator),
            row.quantity,
            _short(row.gradient, row.gradient_error),
            f"{row.seconds:.3g}",
            f"{row.cost / best.cost:.3g}" if best.cost > 0 else "–",
            "" if row is self.rows[0] else f"{row.bias:.1f} σ",
        ]


def _short(gradient: PyTree, error: PyTree) -> str:
    """The first two entries."""
    flat = [np.concatenate([np.ravel(x) for x in jax.tree.leaves(t)]) for t in (gradient, error)]
    return first_few(number_with_error, 2, *flat)


class Measured(eqx.Module):
    """Each chain's value and derivative, and the seconds that they took."""

    value: Float[np.ndarray, "F C"]
    jacobian: Float[np.ndarray, "P F C"]
    seconds: float


def measure(
    programs: list[Callable[[], tuple[PyTree, PyTree]]], repeats: int = 3
) -> list[Measured]:
    """Run compiled programs in turn, several times, and keep the least time of each."""
    # On a CPU the time of this process, which other programs do not disturb.
    clock = time.process_time if jax.default_backend() == "cpu" else time.perf_counter
    results = [jax.block_until_ready(program()) for program in programs]
    best = [math.inf] * len(programs)
    for _ in range(repeats):
        for number, program in enumerate(programs):
            began = clock()
            jax.block_until_ready(program())
            best[number] = min(best[number], clock() - began)
    return [
        Measured(np.asarray(value, float), np.asarray(slope, float), seconds)
        for (value, slope), seconds in zip(results, best, strict=True)
    ]


def compared(
    estimators: list[Estimator], runs: list[Measured], unflatten: Callable, theta: PyTree
) -> Comparison:
    """Compare the runs of estimators on the same chains; the first is the one in use."""
    errors = [mean_and_error(run.jacobian)[1] for run in runs]
    # Entries that are exact for some estimator (0 ± 0) tell nothing about the others.
    usable = [error for error in errors if np.all(np.isfinite(error))] or errors
    told = np.all([np.isfinite(error) & (error > 0) for error in usable], axis=0)
    rows = []
    for estimator, run, error in zip(estimators, runs, errors, strict=True):
        value, value_error = mean_and_error(run.value)
        slope = run.jacobian.mean(axis=-1)
        # A geometric mean: entries have units of their own, and only ratios between estimators
        # count.
        logs = 2 * np.log(error[told]) if told.any() else np.zeros(1)
        cost = run.seconds * math.exp(float(np.mean(logs)))
        rows.append(
            EstimatorRow(
                estimator,
                value_tree(unflatten, value),
                value_tree(unflatten, value_error),
                gradient_tree(unflatten, theta, slope),
                gradient_tree(unflatten, theta, error),
                run.seconds,
                cost if np.all(np.isfinite(slope)) else math.inf,
                _largest_z(run.jacobian - runs[0].jacobian),
            )
        )
    chosen, reason = _choose(rows, runs[0].value.shape[-1])
    return Comparison(tuple(rows), chosen.estimator, reason, runs[0].value.shape[-1])


def _largest_z(difference: Float[np.ndarray, "P F C"]) -> float:
    mean, error = mean_and_error(difference)
    if not np.all(np.isfinite(mean)):
        return math.nan
    scores = np.where(error > 0, mean / np.where(error > 0, error, 1.0), 0.0).ravel()
    return float(scores[np.argmax(np.abs(scores))])


def _assuming_equilibrium(rows: list[EstimatorRow]) -> EstimatorRow | None:
    """The row of `Covariance()` beside `Stationary()`."""
    # Whoever asks for the equilibrium from any start must not be sent to an estimator that supposes
    # it: a bias within the error of these chains is not seen.
    if not isinstance(rows[0].estimator, Stationary):
        return None
    return next((row for row in rows if isinstance(row.estimator, Covariance)), None)


def _choose(rows: list[EstimatorRow], num_chains: int) -> tuple[EstimatorRow, str]:
    """The cheapest row that estimates the first row's quantity and agrees with it, and why."""
    own = rows[0]
    same = [row for row in rows if row.quantity == own.quantity and not abs(row.bias) > _BIAS]
    assumes = _assuming_equilibrium(rows)
    same = [row for row in same if row is not assumes]
    ranked = sorted(same, key=lambda row: row.cost)
    best = ranked[0]
    reason = f"{best.estimator}: the least variance × time for the derivative of the {own.quantity}"
    if len(ranked) > 1:
        second = ranked[1]
        ratio = second.cost / best.cost if best.cost > 0 else math.inf
        # A variance from C chains is uncertain by a factor of about exp(√(2/C)), each of the two.
        close = math.log(max(ratio, 1.0)) < 2 * math.sqrt(4 / num_chains)
        reason += (
            f", within the noise of {num_chains} chains as good as {second.estimator}"
            if close
            else f", {ratio:.3g} times less than {second.estimator}"
        )
    if assumes is not None and math.isfinite(assumes.cost):
        reason += (
            f"; {assumes.estimator}, which is right only where the chains have reached equilibrium,"
            f" has {assumes.cost / best.cost:.3g} times its variance × time, and differs here by"
            f" {abs(assumes.bias):.1f} σ"
        )
    for row in rows:
        if row.quantity == own.quantity or not math.isfinite(row.cost):
            continue
        reason += (
            f"; for the derivative of the {row.quantity}, {row.estimator} has"
            f" {row.cost / best.cost:.3g} times its variance × time, and differs here by"
            f" {abs(row.bias):.1f} σ"
        )
    return best, reason + "."
