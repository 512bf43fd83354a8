"""Diagnostics: a summary of a run's counts, and a warning for each cause that makes it doubtful."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Float, PyTree

from ..analysis import Jump
from ..core.simulation import Outcome
from ..core.watch import Counts, Watch
from .convergence import (
    drift,
    effective_samples,
    gradient_r_hat,
    joined,
    largest_share,
    split_r_hat,
)
from .method import Method

# On healthy runs each is passed in fewer than 2 % of them (`benchmarks/coverage.py`).
_LARGEST_SHARE, _CUT_OFF, _VALUE_R_HAT, _GRADIENT_R_HAT = 0.25, 0.05, 1.1, 1.6
# For draws, whose R̂ is the largest of f's and of the covariance's terms.
_DRAWS_R_HAT = 1.05
_EFFECTIVE_PER_CHAIN = 5
_STUCK_ACCEPTANCE = 0.005
# No state's derivative is as large as this unless it grows from step to step.
_EXPLODED = 1e6


class Diagnosis(eqx.Module):
    """The diagnostics of one simulation. Warnings and notes are functions of it alone.

    `recoupling_time`, `alive_fraction` and `max_weight` are NaN for an estimator without
    alternatives, the acceptance rates for a kernel that accepts nothing. `num_decisions` are those
    of the chain that made the fewest.
    """

    acceptance_rate: float
    least_acceptance: float
    num_decisions: float
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
    method: Method
    recouplings: float
    largest_share: float = 0.0
    cut_off: float = 0.0
    value_r_hat: float = 1.0
    gradient_r_hat: float = 1.0
    value_drift: str | None = None
    gradient_drift: str | None = None

    @property
    def is_stuck(self) -> bool:
        """True if a chain accepts next to nothing, and not because it is so short that chance
        explains it: at the chains' mean rate, or 5 % if that is less.
        """
        rate = max(self.acceptance_rate, 0.05)
        by_chance = self.num_chains * (1 - rate) ** self.num_decisions
        return self.least_acceptance < _STUCK_ACCEPTANCE and by_chance < 1e-3

    @property
    def effective_per_chain(self) -> float:
        """The fewest that an entry of f has; infinite where none varies."""
        return float(np.nanmin(np.append(self.effective_samples, np.inf))) / self.num_chains


def notes(d: Diagnosis) -> Iterator[str]:
    """A sentence where the finite chain visibly differs from its equilibrium."""
    seen = [
        f"its {name} is {text}"
        for name, text in (("derivative", d.gradient_drift), ("value", d.value_drift))
        if text is not None
    ]
    if seen:
        whose = "that of this finite chain, not of the equilibrium"
        if d.method.estimator == "Covariance":
            whose = "meant for the equilibrium, which these chains have not reached"
        yield (
            f"finite chain: the gradient is {whose}: {', and '.join(seen)}. For the equilibrium,"
            " raise `burn_in` or run longer."
        )


def warnings(d: Diagnosis) -> Iterator[str]:
    """One warning for each cause: what another one explains is left out."""
    yield from _of_kernel(d)
    mixing = list(_of_mixing(d))
    yield from mixing
    alternatives = list(_of_alternatives(d))
    yield from alternatives
    # Chains that mix too slowly, or rest on few alternatives, disagree about the gradient too.
    if d.gradient_r_hat > _GRADIENT_R_HAT and not mixing and not alternatives:
        yield (
            f"the chains disagree about the gradient, by {d.method.in_use}: split R̂ is"
            f" {d.gradient_r_hat:.3g}, 1 where they agree. Run longer. {d.method.remedies()}"
        )


def _of_kernel(d: Diagnosis) -> Iterator[str]:
    if d.nan_proposals:
        yield (
            f"the log density was NaN at {d.nan_proposals:,} proposals, which were rejected: let"
            " `log_density` return -inf outside the support."
        )
    if d.rounding > 0.01:
        yield (
            f"the log density is so large that its last digit is {d.rounding:.2g}, so accept"
            " probabilities are rounded as coarsely. Subtract a constant from `log_density`, or use"
            " float64 (`jax.config.update('jax_enable_x64', True)`)."
        )
    for leaf in d.never_moved:
        yield (
            f"part {leaf} of the state never moved in any chain: no kernel proposes to change it,"
            " or none of its proposals was accepted."
        )
    # The negation holds for NaN too.
    if not d.max_tangent < _EXPLODED:
        yield (
            f"the derivative of a state with respect to theta grew to {d.max_tangent:.2g}: the"
            " moves are chaotic, and the gradient, though unbiased, is lost in noise. Take fewer or"
            " smaller leapfrog steps, or use a kernel whose moves do not depend on theta."
        )


def _of_mixing(d: Diagnosis) -> Iterator[str]:
    # A stuck chain has few effective samples, and chains with few of them disagree.
    if d.is_stuck:
        yield (
            f"a chain is stuck: it accepted {d.least_acceptance:.2%} of its proposals. Propose"
            " smaller steps, or start closer to the bulk of the density."
        )
    elif d.method.paired:
        return
    elif d.effective_per_chain < _EFFECTIVE_PER_CHAIN:
        yield (
            f"there are fewer than {_EFFECTIVE_PER_CHAIN} effective samples per chain: a chain of"
            f" {d.num_samples:,.0f} is {d.effective_per_chain:.2g} times as long as its"
            " autocorrelation time. Run longer, or use a proposal that mixes faster."
        )
    elif d.value_r_hat > _VALUE_R_HAT:
        yield (
            f"the chains disagree about the value: split R̂ is {d.value_r_hat:.3g}, 1 where they"
            " agree. Run longer, raise `burn_in`, or use a proposal that mixes faster."
        )


def _of_alternatives(d: Diagnosis) -> Iterator[str]:
    if d.tie_share > 1e-4 and d.method.estimator == "Score":
        yield (
            f"{d.tie_share:.1%} of the decisions were exact ties, log r = 0, whose derivative the"
            " score does not contain: `Score()` is biased here. Use `StochasticDerivative()`."
        )
    if d.never_born:
        yield (
            "no alternative was ever born: no decision that the chains made depends on theta, so"
            " the gradient is only f's own derivative with respect to theta."
        )
    signs = list(_signs_of_few_alternatives(d))
    if signs:
        yield (
            f"few alternatives carry the gradient: {'; '.join(signs)}. {d.method.in_use} remains"
            " unbiased, but its variance is large here and its error may be underestimated."
            f" {d.method.remedies()}"
        )
    # Few of them also outlive the chain.
    elif d.cut_off > _CUT_OFF:
        yield (
            f"alternatives outlive the chain: {d.cut_off:.0%} of those that its end cut off had"
            f" lived for more than a tenth of it, by {d.method.in_use}. A longer chain has a"
            f" different derivative. Run longer. {d.method.remedies()}"
        )


def _signs_of_few_alternatives(d: Diagnosis) -> Iterator[str]:
    """Signs that few alternatives carry the gradient: they hardly ever recouple, few contributions
    make up much of the sum, or one alternative carries much of the weight. None is reported for
    pairs of chains, whose alternatives are followed until they recouple.
    """
    if d.method.paired:
        return
    if d.alive_fraction > 0.5 and d.recoupling_time > max(0.1 * d.num_samples, 25):
        yield (
            f"they hardly ever recouple with the primal ({d.recouplings:.2g} times in a chain of"
            f" {d.num_samples:,.0f})"
        )
    if d.largest_share > _LARGEST_SHARE:
        yield (
            f"the largest 1 % of the contributions make up {d.largest_share:.0%} of the sum of"
            " their sizes"
        )
    if d.weight_share > 0.2 and d.num_samples >= 100:
        yield f"one of them carried {d.weight_share:.0%} of all the weight born in its chain"


def of_jump(jump: Jump) -> str:
    """The warning of a density that may jump at a place that depends on theta."""
    return (
        f"`log_density` may jump in x at a place that depends on theta (`{jump.primitive}` at"
        f" {jump.where}): the estimator cannot see a moving jump, so the derivative would be wrong."
        " If it is continuous there, say so with `diffmh.continuous(function)`."
    )


def of_estimates(
    theta: PyTree,
    value: Float[np.ndarray, "F C"],
    slope: Float[np.ndarray, "P F"],
    error: Float[np.ndarray, "P F"],
) -> Iterator[str]:
    """Warnings of numbers that cannot be right: not finite, or a gradient of exactly 0 ± 0."""
    lost = np.sum(~np.isfinite(value).all(axis=0))
    if lost:
        yield (
            f"the value is not finite in {lost} of {value.shape[-1]} chains: `f`, or the"
            " function composed of it, is NaN or infinite at states that they visited."
        )
    first = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(theta):
        name = f"`theta{jax.tree_util.keystr(path)}`"
        here = slice(first, first + np.size(leaf))
        first += np.size(leaf)
        # Exactly 0 in every chain: an estimate that is merely small has an error.
        dead = np.all((slope[here] == 0) & (error[here] == 0), axis=1)
        if not np.all(np.isfinite(slope[here])):
            yield f"the gradient with respect to {name} is not finite: see the other warnings."
        elif dead.any():
            which = "" if dead.all() else f" ({dead.sum()} of its {dead.size} entries)"
            yield (
                f"the gradient with respect to {name}{which} is exactly 0 ± 0: nothing that was"
                " observed depends on it."
            )


def of_draws(num_draws: int, time: float, r_hat: float, too_few: bool) -> Iterator[str]:
    """Warnings of draws with this autocorrelation time and split R̂, `num_draws` in a chain."""
    if too_few:
        yield (
            f"the draws are worth few independent ones: their autocorrelation time is {time:.3g},"
            f" and a chain has {num_draws:,} draws. Draw longer chains."
        )
    if r_hat > _DRAWS_R_HAT:
        yield (
            f"the chains disagree (split R̂ = {r_hat:.3f}, of f or of its covariance with the"
            " score): draw longer chains, or find out why they stay apart."
        )


def diagnose(outcome: Outcome) -> Diagnosis:
    """Summarise the counts of one simulation that was watched."""
    watch = outcome.watch
    assert isinstance(watch, Watch) and outcome.method is not None, "the run was not watched"
    counts = jax.tree.map(lambda leaf: np.asarray(leaf, float), watch.per_chain)
    means = np.asarray(outcome.observed.value, float)
    decided = counts.decisions > 0
    rates = np.where(decided, counts.accepted / np.where(decided, counts.decisions, 1.0), math.nan)
    has_slots = counts.slot_steps.sum() > 0
    alive, recoupled = counts.alive.sum(), counts.recoupled.sum()
    # Within a chain: a weight as large as all that was born there means that it alone is left.
    share = np.max(counts.max_weight / np.where(counts.weight_born > 0, counts.weight_born, np.inf))
    largest = np.asarray(outcome.log_density)
    # Time at risk over events: the right mean also when other alternatives were pruned before they
    # met the primal.
    recoupling_time = float(alive / recoupled) if recoupled else math.inf
    stretched = _of_stretches(outcome, counts, means, has_slots)
    return Diagnosis(
        **stretched,
        acceptance_rate=float(rates.mean()),
        least_acceptance=float(rates.min()),
        num_decisions=float(counts.decisions.min()),
        recoupling_time=recoupling_time if has_slots else math.nan,
        alive_fraction=float(alive / counts.slot_steps.sum()) if has_slots else math.nan,
        max_weight=float(counts.max_weight.max()) if has_slots else math.nan,
        weight_share=float(share),
        max_tangent=float(counts.max_tangent.max()),
        tie_share=float(counts.ties.sum() / max(1.0, counts.decisions.sum())),
        never_born=bool(has_slots and counts.born.sum() == 0),
        never_moved=tuple(i for i, moved in enumerate(counts.moved) if not moved.any()),
        rounding=float(np.nanmax(np.append(largest, 0.0)) * np.finfo(largest.dtype).eps),
        num_chains=means.shape[-1],
        nan_proposals=int(counts.nan.sum()),
        method=outcome.method,
        recouplings=float(recoupled / counts.recoupled.size),
    )


def _of_stretches(
    outcome: Outcome, counts: Counts, means: Float[np.ndarray, "F C"], has_slots: bool
) -> dict[str, Any]:
    """The diagnostics that compare parts of a chain with each other. They do not apply to the pairs
    of chains of `Stationary`, which stop by themselves.
    """
    watch = outcome.watch
    assert isinstance(watch, Watch)
    if outcome.stretches is None or outcome.halves is None:
        return dict(
            effective_samples=np.full(means.shape[0], math.nan),
            num_samples=float(sum(watch.batches.samples)),
        )
    stretches, halves = outcome.stretches.nonempty(), outcome.halves.nonempty()
    length, num_samples = stretches.length, float(stretches.length.sum())
    # f² is averaged about f at the start, so that float32 keeps the digits of the variance.
    within = np.asarray(outcome.observed.watched, float) - (means - counts.origin) ** 2
    sums = np.asarray(watch.sums.value, float)[np.array(watch.batches.samples) > 0]
    return dict(
        effective_samples=effective_samples(means, within, sums / length.reshape(-1, 1, 1), length),
        num_samples=num_samples,
        largest_share=largest_share(stretches.jacobian, length) if has_slots else 0.0,
        cut_off=float(np.mean(counts.age > 0.1 * num_samples)) if has_slots else 0.0,
        value_r_hat=split_r_hat(joined(halves.value), within.mean(axis=-1)),
        gradient_r_hat=gradient_r_hat(
            halves.jacobian, float(np.mean(halves.length)), stretches.jacobian, length
        ),
        value_drift=drift(halves.value),
        gradient_drift=drift(halves.jacobian),
    )
