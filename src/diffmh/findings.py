"""Findings: what a run's counts say, and what a person should be warned of."""

from __future__ import annotations

import math
from collections.abc import Iterable

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Float, PyTree

from .agreement import Drift, drift, gradient_r_hat, largest_share, value_r_hat
from .counts import Watch
from .method import Method
from .simulation import Outcome

# On healthy runs each is passed in fewer than 2 % of them (`benchmarks/coverage.py`).
_LARGEST_SHARE, _CUT_OFF, _VALUE_R_HAT, _GRADIENT_R_HAT = 0.25, 0.05, 1.1, 1.6

# No state's derivative is as large as this unless it grows from step to step.
_EXPLODED = 1e6


class Finding(eqx.Module):
    """What one simulation's counts say."""

    acceptance_rate: float
    least_acceptance: float
    recoupling_time: float
    alive_fraction: float
    max_weight: float
    weight_share: float
    max_tangent: float
    tie_share: float
    never_born: bool
    never_moved: tuple[int, ...]
    rounding: float
    effective_samples: Float[np.ndarray, "F"]
    num_samples: float
    num_chains: int
    nan_proposals: int
    estimator: str
    method: Method
    largest_share: float
    cut_off: float
    recouplings: float
    value_r_hat: float
    gradient_r_hat: float
    value_drift: Drift
    gradient_drift: Drift

    def notes(self) -> Iterable[str]:
        """One sentence where the finite chain visibly differs from its equilibrium."""
        seen = []
        if self.gradient_drift.visible:
            seen.append(f"its derivative is {self.gradient_drift}")
        if self.value_drift.visible:
            seen.append(f"its value is {self.value_drift}")
        samples = np.nanmin(np.append(self.effective_samples, np.inf)) / self.num_chains
        if samples < 5:
            time = self.num_samples / samples
            seen.append(f"{self.num_samples:,.0f} samples are {samples:.2g} times the {time:,.3g}")
            seen[-1] += " steps of its autocorrelation"
        if seen:
            of = "that of this finite chain"
            if self.estimator == "Covariance":
                of = "meant for the equilibrium"
            yield (
                f"finite chain: the gradient is {of}, which is not at equilibrium: "
                + ", and ".join(seen)
                + "; for the equilibrium, raise `burn_in` or run longer."
            )

    def warnings(self) -> Iterable[str]:
        if self.nan_proposals:
            yield (
                f"the log density was NaN at {self.nan_proposals:,} proposals, which were rejected:"
                " let `log_density` return -inf outside the support."
            )
        if self.rounding > 0.01:
            yield (
                f"the log density is so large that its last digit is {self.rounding:.2g}: accept"
                " probabilities are rounded as coarsely. Subtract a constant from `log_density`,"
                " or use float64 (`jax.config.update('jax_enable_x64', True)`)."
            )
        if self.least_acceptance < 0.005:
            yield (
                f"a chain is stuck: it accepted {self.least_acceptance:.2%} of its proposals."
                " Propose smaller steps, or start nearer to where the density lies."
            )
        for leaf in self.never_moved:
            yield (
                f"part {leaf} of the state never moved in any chain: no kernel proposes to change"
                " it, or none of its proposals was accepted."
            )
        # NaN and infinity too.
        if not self.max_tangent < _EXPLODED:
            yield (
                f"the derivative of a state by theta grew to {self.max_tangent:.2g}: the moves are"
                " chaotic, and the gradient, though unbiased, is lost in noise. Take fewer or"
                " smaller leapfrog steps, or a kernel whose moves don't depend on theta."
            )
        yield from self._of_alternatives()
        if np.nanmin(np.append(self.effective_samples, np.inf)) < 5 * self.num_chains:
            yield (
                "there are fewer than 5 effective samples per chain: run longer, or propose better."
            )
        if self.value_r_hat > _VALUE_R_HAT:
            yield (
                f"the chains disagree about the value: split R̂ is {self.value_r_hat:.3g}, 1 where"
                " they agree. Run longer, raise `burn_in`, or propose better."
            )
        if self.gradient_r_hat > _GRADIENT_R_HAT:
            yield (
                f"the chains disagree about the gradient: split R̂ is {self.gradient_r_hat:.3g}, 1"
                f" where they agree, by {self.method.in_use}. Run longer. {self.method.remedies()}"
            )

    def _of_alternatives(self) -> Iterable[str]:
        if self.tie_share > 1e-4 and self.estimator == "Score":
            yield (
                f"{self.tie_share:.1%} of the decisions were exact ties, log r = 0, whose"
                " derivative no score sees: `Score()` has no unbiased answer here. Use"
                " `StochasticDerivative()`."
            )
        if self.never_born:
            yield (
                "no alternative was ever born: no decision depends on theta where the chains went,"
                " and the gradient has nothing but f's own derivative by theta."
            )
        yield from self._of_few_alternatives()

    def _of_few_alternatives(self) -> Iterable[str]:
        by, remedies = self.method.in_use, self.method.remedies()
        if self.alive_fraction > 0.5 and self.recoupling_time > max(0.1 * self.num_samples, 25):
            yield (
                "alternatives hardly ever recouple with the primal:"
                f" {self.recouplings:.2g} times in a chain of {self.num_samples:,.0f}, by {by}. The"
                " gradient is unbiased but its variance grows with the length of the chain."
                f" {remedies}"
            )
        elif self.cut_off > _CUT_OFF:
            yield (
                f"{self.cut_off:.0%} of the alternatives that the end of the chain cut off had"
                f" lived for more than a tenth of it, by {by}: what they would have added is"
                f" missing from the chain's derivative. Run longer. {remedies}"
            )
        if self.largest_share > _LARGEST_SHARE:
            yield (
                f"few births carry the gradient: the largest 1 % of the contributions make up"
                f" {self.largest_share:.0%} of the sum of their sizes, by {by}. A run that misses"
                f" the next such birth prints too small an error. {remedies}"
            )
        elif self.weight_share > 0.2 and self.num_samples >= 100:
            yield (
                f"one alternative carried {self.weight_share:.0%} of all the weight born in its"
                f" chain, by {by}: the gradient rests on few alternatives, and its error may be"
                f" underestimated. {remedies}"
            )


def cannot_be_right(
    theta: PyTree, slope: Float[np.ndarray, "P F"], error: Float[np.ndarray, "P F"]
) -> Iterable[str]:
    """One rule for a gradient that cannot be right: not a number, or exactly zero without error."""
    first = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(theta):
        name = f"`theta{jax.tree_util.keystr(path)}`"
        here = slice(first, first + np.size(leaf))
        first += np.size(leaf)
        if not np.all(np.isfinite(slope[here])):
            yield f"the gradient by {name} is not a number: see the other warnings."
            continue
        dead = np.all((slope[here] == 0) & (error[here] == 0), axis=1)
        if dead.any():
            which = "" if dead.all() else f" ({dead.sum()} of its {dead.size} entries)"
            yield (
                f"the gradient by {name}{which} is exactly 0 ± 0: nothing that was observed depends"
                " on it."
            )


def find(outcome: Outcome) -> Finding:
    """What the counts of one simulation say."""
    assert isinstance(outcome.watch, Watch), "the run was not diagnosed"
    counts = jax.tree.map(lambda leaf: np.asarray(leaf, float), outcome.watch.per_chain)
    decided = counts.decisions > 0
    rates = np.where(decided, counts.accepted / np.where(decided, counts.decisions, 1.0), math.nan)
    has_slots = counts.slot_steps.sum() > 0
    alive, recoupled = counts.alive.sum(), counts.recoupled.sum()
    share = np.max(counts.max_weight / np.where(counts.weight_born > 0, counts.weight_born, np.inf))
    risk = float(alive / recoupled) if recoupled else math.inf
    largest = np.asarray(outcome.log_density)
    assert outcome.method is not None and outcome.stretches is not None, "the run has no method"
    assert outcome.halves is not None
    stretches, halves = outcome.stretches.nonempty(), outcome.halves.nonempty()
    num_samples = float(sum(outcome.watch.batches.samples))
    return Finding(
        acceptance_rate=float(rates.mean()),
        least_acceptance=float(rates.min()),
        # Time at risk over events: the right mean also when other alternatives were pruned before
        # they met the primal.
        recoupling_time=risk if has_slots else math.nan,
        alive_fraction=float(alive / counts.slot_steps.sum()) if has_slots else math.nan,
        max_weight=float(counts.max_weight.max()) if has_slots else math.nan,
        weight_share=float(share),
        max_tangent=float(counts.max_tangent.max()),
        tie_share=float(counts.ties.sum() / max(1.0, counts.decisions.sum())),
        never_born=bool(has_slots and counts.born.sum() == 0),
        never_moved=tuple(i for i, moved in enumerate(counts.moved) if not moved.any()),
        rounding=float(np.nanmax(np.append(largest, 0.0)) * np.finfo(largest.dtype).eps),
        effective_samples=_effective_samples(outcome),
        num_samples=num_samples,
        num_chains=outcome.observed.value.shape[-1],
        nan_proposals=int(counts.nan.sum()),
        estimator=outcome.estimator,
        method=outcome.method,
        largest_share=largest_share(stretches) if has_slots else 0.0,
        cut_off=float(np.mean(counts.age > 0.1 * num_samples)) if has_slots else 0.0,
        recouplings=float(recoupled / counts.recoupled.size),
        value_r_hat=value_r_hat(outcome, halves),
        gradient_r_hat=gradient_r_hat(halves, stretches),
        value_drift=drift(halves.value),
        gradient_drift=drift(halves.jacobian),
    )


def _effective_samples(outcome: Outcome) -> Float[np.ndarray, "F"]:
    """`C N σ² / (L s²)`, with σ² the variance of f over all samples and s² that of its means over
    batches of length L.

    Where batches are too short to be independent the chains' own means tell: C σ² over their
    variance, if that is less than half. From ν + 1 means, 1/s² is ν/(ν − 2) too large on average,
    which is corrected.
    """
    watch = outcome.watch
    assert isinstance(watch, Watch), "the run was not diagnosed"
    lengths = np.array(watch.batches.samples, float)
    sums = np.asarray(watch.sums.value, float)[lengths > 0]
    lengths = lengths[lengths > 0][:, None, None]
    means, origin = np.asarray(outcome.observed.value, float), np.asarray(watch.per_chain.origin)
    about = means.mean(axis=-1, keepdims=True)
    within = np.asarray(outcome.observed.watched, float) - (means - origin) ** 2
    variance = np.mean(within + (means - about) ** 2, axis=-1)
    batch_freedom, chain_freedom = max(1, sums[:, 0].size - 1), means.shape[-1] - 1
    batch_variance = np.sum(lengths * (sums / lengths - about) ** 2, axis=(0, 2)) / batch_freedom
    chain_variance = lengths.sum() * means.var(axis=-1, ddof=1)
    by_chains = chain_variance > 2 * batch_variance
    longest = np.where(by_chains, chain_variance, batch_variance)
    freedom = np.where(by_chains, chain_freedom, batch_freedom)
    inflated = freedom / np.maximum(freedom - 2, 1)
    positive = (variance > 0) & (longest > 0)
    count = lengths.sum() * means.shape[-1]
    return np.where(
        positive, count * variance / np.where(positive, longest * inflated, 1.0), np.nan
    )
