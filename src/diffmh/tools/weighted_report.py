"""The report of weighted draws: value, gradient and second derivative with errors from batches."""

from __future__ import annotations

import dataclasses

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Float, PyTree

from ..reports.report import Report, RunChains, report
from .draw_averages import AtDraws, Cut, evaluate, most_series, run_of_batches
from .examination import Examination
from .reweighting import LEAST_SHARE, Reweighted, log_weights
from .tails import HEAVY, effective_size, pareto_k
from .weighted_sums import Ratio, Sums, batch_sums, pseudo_values

# Above this k̂ errors are too small.
_HEAVY = 0.5


class Tail(eqx.Module):
    """The log weights of all draws, and what they say: the effective size `(Σw)²/Σw²`, its share of
    the draws, and Pareto k̂.
    """

    log_weights: Float[np.ndarray, "C n"]
    effective: float
    pareto_k: float

    @property
    def share(self) -> float:
        return self.effective / self.log_weights.size

    @property
    def trusted(self) -> bool:
        return self.pareto_k <= HEAVY and self.share >= LEAST_SHARE

    @staticmethod
    def of(given: Reweighted, theta: PyTree) -> Tail:
        found = np.asarray(log_weights(given, theta), float)
        if np.isnan(found).any() or np.isposinf(found).any() or np.isneginf(found.max()):
            raise ValueError(
                "`from_draws(..., at=theta)`: `log_density` is not finite at some draws, at the"
                " theta that they were made with or at the one of this call: the draws are not of"
                " this density."
            )
        return Tail(found, effective_size(found), pareto_k(found))

    def warnings(self) -> list[str]:
        # Measured on eight schools, from a prior's scale 5 to 25: with k̂ near 0.5 the 95 %
        # intervals of 200 runs held in 79–88 %.
        if self.pareto_k <= _HEAVY:
            return []
        return [
            f"Pareto k̂ of the weights is {self.pareto_k:.2f}, above {_HEAVY}: their variance may"
            " be infinite, and the errors are too small. Use a theta nearer to `at`, or make the"
            " draws where the distribution is wider: then the weights are bounded."
        ]

    def refuse(self, theta: PyTree) -> None:
        """Refuse weights that averages cannot be trusted to."""
        if self.trusted:
            return
        raise ValueError(
            f"`from_draws(..., at=...)`: theta = {theta} is too far from where the draws were made:"
            f" Pareto k̂ is {self.pareto_k:.2f} (at most {HEAVY} is trusted), and"
            f" {self.effective:,.0f} of {self.log_weights.size:,} draws are effective"
            f" ({self.share:.1%}; at least {LEAST_SHARE:.0%}). Use a theta nearer to `at`, or"
            " sample anew at this one."
        )


def weighted_draws(given: Reweighted, theta: PyTree, tail: Tail, explicit: bool) -> AtDraws:
    """f, the score and f's own derivative at each draw, with the weights at theta."""
    parts = evaluate(given.f, given.log_density, theta, given.draws, given.args, explicit)
    value, score, slope = (np.asarray(part, float) for part in parts)
    weight = np.exp(tail.log_weights - tail.log_weights.max())
    return AtDraws(value, score, slope, weight / weight.mean())


class WeightedBatches(eqx.Module):
    """Pseudo-values at theta of batches of draws that were made elsewhere."""

    theta: PyTree
    form: PyTree
    tail: Tail
    at_draws: AtDraws
    cut: Cut
    ratio: Ratio

    @staticmethod
    def of(
        given: Reweighted,
        theta: PyTree,
        examination: Examination,
        order: int = 1,
        batches: int | None = None,
    ) -> WeightedBatches:
        """Derivatives up to an order; `batches` of each chain, or as many as suit them. Refuses
        weights that averages cannot be trusted to.
        """
        tail = Tail.of(given, theta)
        tail.refuse(theta)
        at = weighted_draws(given, theta, tail, examination.explicit)
        cut = Cut.of(_series(at, order), batches)
        ratio = jackknife(given, theta, order, examination.explicit, cut.per_chain)
        return WeightedBatches(theta, examination.form, tail, at, cut, ratio)

    def run(self) -> RunChains:
        """Value and derivative of each batch."""
        tail, ratio = self.tail, self.ratio
        assert ratio.slope is not None
        value, slope = np.asarray(ratio.value), np.asarray(ratio.slope)
        worth = (
            f"effective draws {tail.effective:,.0f} of {tail.log_weights.size:,}"
            f" ({tail.share:.0%}), Pareto k̂ {tail.pareto_k:.2f}"
        )
        return run_of_batches(
            self.at_draws,
            self.cut,
            (np.moveaxis(value, 0, -1), np.moveaxis(slope, 0, -1)),
            self.theta,
            self.form,
            "by reweighting",
            notes=[worth],
            doubts=tail.warnings(),
        )

    def report(self) -> Report:
        """Value and gradient."""
        tail = self.tail
        return dataclasses.replace(
            report(self.run()), effective_draws=tail.effective, pareto_k=tail.pareto_k
        )


def jackknife(given: Reweighted, theta: PyTree, order: int, explicit: bool, batches: int) -> Ratio:
    """Pseudo-values of the average and its derivatives up to an order, from `batches` stretches of
    each chain; in double precision.
    """
    sums, centre = batch_sums(given, theta, order, explicit, batches)
    exact: Sums = jax.tree.map(lambda leaf: np.asarray(leaf, float), sums)
    ratio = pseudo_values(exact)
    return dataclasses.replace(ratio, value=ratio.value + np.asarray(centre, float))


def _series(at: AtDraws, order: int) -> Float[np.ndarray, "S C n"]:
    """The terms of the averages at each draw, about their means and weighted."""
    if order == 1:
        return at.series()
    value, score = at.value - at.mean(at.value), at.score - at.mean(at.score)
    size, num_values = score.shape[-1], value.shape[-1]
    triples = [(p, q, i) for p in range(size) for q in range(p + 1) for i in range(num_values)]
    terms = (score[..., p] * score[..., q] * value[..., i] for p, q, i in most_series(triples))
    return np.stack([*at.series(), *(at.weights * (term - at.mean(term)) for term in terms)])
