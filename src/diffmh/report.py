"""Report: value and gradient with their errors, and what a person should know about the run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PyTree

from .counts import Watch
from .simulation import Outcome


class RunChains(eqx.Module):
    """Each chain's value and derivative; the outcomes of the simulations behind them, none if they
    are runs of a program. `notes` and `warnings` go into the report as they are.
    """

    unflatten: Callable[[Float[Array, "F C"]], PyTree]
    theta: PyTree
    value: Float[Array, "F C"]
    jacobian: Float[Array, "P F C"]
    outcomes: tuple[Outcome, ...]
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


class Report(eqx.Module):
    """What `.run` returns. Print it.

    `value` and `value_error` have f's structure; `gradient` and `gradient_error` have at each of
    its leaves a pytree like `theta`, with shape `(*leaf of f, *leaf of theta)`, as `jax.jacobian`
    does. Errors are standard errors over the chains.

    - `acceptance_rate`: accepted decisions.
    - `recoupling_time`: mean number of steps for which an alternative lives before it meets the
      primal.
    - `alive_fraction`: how much of the time a slot holds a living alternative.
    - `max_weight`: the largest weight that an alternative had.
    - `effective_samples`: how many independent samples would give f's value the same error; like
      `value`.
    - `nan_proposals`: proposals whose log density was NaN; they are never accepted.
    - `warnings`: what looks wrong, and what to do about it.
    - `notes`: what else there is to say, such as what other estimators would have had.

    What an estimator has no use for is NaN.
    """

    value: PyTree
    value_error: PyTree
    gradient: PyTree
    gradient_error: PyTree
    acceptance_rate: float
    recoupling_time: float
    alive_fraction: float
    max_weight: float
    effective_samples: PyTree
    nan_proposals: int
    warnings: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = ["value    " + with_errors(self.value, self.value_error)]
        lines.append("gradient " + with_errors(self.gradient, self.gradient_error))
        facts = []
        if not math.isnan(self.acceptance_rate):
            least = min(float(np.min(leaf)) for leaf in jax.tree.leaves(self.effective_samples))
            facts = [f"accepted {self.acceptance_rate:.1%}", f"effective samples {least:,.0f}"]
        if not math.isnan(self.alive_fraction):
            facts.append(f"recoupling after {self.recoupling_time:.3g} steps")
            facts.append(f"alternative alive {self.alive_fraction:.0%}")
            facts.append(f"largest weight {self.max_weight:.3g}")
        lines.extend([", ".join(facts)] if facts else [])
        lines.extend(self.notes)
        lines.extend(f"warning: {warning}" for warning in self.warnings)
        return "\n".join(lines)


def report(chains: RunChains) -> Report:
    """Summarises the chains of a run."""
    value, value_error = mean_and_error(chains.value)
    slope, slope_error = mean_and_error(chains.jacobian)
    findings = [_find(outcome) for outcome in chains.outcomes]
    effective = [finding.effective_samples for finding in findings]
    # Replicates of a program are independent. A composed value has no samples of its own: it is as
    # good as the worst expectation behind it.
    effective = effective or [np.full(value.shape, float(chains.value.shape[-1]))]
    shared = (
        effective[0]
        if len(effective) == 1 and effective[0].shape == value.shape
        else np.nanmin(np.concatenate(effective))
    )
    like_value = lambda flat: jax.tree.map(
        lambda leaf: leaf[0], chains.unflatten(jnp.asarray(flat)[:, None])
    )
    return Report(
        value=like_value(value),
        value_error=like_value(value_error),
        gradient=gradient_tree(chains.unflatten, chains.theta, slope),
        gradient_error=gradient_tree(chains.unflatten, chains.theta, slope_error),
        acceptance_rate=min((f.acceptance_rate for f in findings), default=math.nan),
        recoupling_time=_largest(finding.recoupling_time for finding in findings),
        alive_fraction=_largest(finding.alive_fraction for finding in findings),
        max_weight=_largest(finding.max_weight for finding in findings),
        effective_samples=like_value(np.broadcast_to(shared, value.shape)),
        nan_proposals=sum(finding.nan_proposals for finding in findings),
        warnings=tuple(
            dict.fromkeys(
                (
                    *(warning for finding in findings for warning in finding.warnings()),
                    *chains.warnings,
                )
            )
        ),
        notes=chains.notes,
    )


def _largest(values: Iterable[float]) -> float:
    """Of those that are not NaN, if any: an estimator has no use for the others."""
    return max((value for value in values if not math.isnan(value)), default=math.nan)


class _Finding(eqx.Module):
    """What one simulation's counts say."""

    acceptance_rate: float
    least_acceptance: float
    recoupling_time: float
    alive_fraction: float
    max_weight: float
    weight_share: float
    effective_samples: Float[np.ndarray, "F"]
    num_samples: float
    num_chains: int
    nan_proposals: int

    def warnings(self) -> list[str]:
        found = []
        if self.nan_proposals:
            found.append(
                f"the log density was NaN at {self.nan_proposals:,} proposals, which were rejected:"
                " let `log_density` return -inf"
                " outside the support."
            )
        if self.least_acceptance < 0.005:
            found.append(
                f"a chain is stuck: it accepted {self.least_acceptance:.2%} of its proposals."
                " Propose smaller steps, or start"
                " nearer to where the density lies."
            )
        if self.alive_fraction > 0.5 and self.recoupling_time > 0.1 * self.num_samples:
            found.append(
                "alternatives hardly ever recouple with the primal: the gradient is unbiased but"
                " its variance grows with the length"
                " of the chain. Choose a coupling under which chains meet (`Maximal()`,"
                " `MaximalReflection()`), or a better"
                " proposal."
            )
        if self.weight_share > 0.2 and self.num_samples >= 100:
            found.append(
                f"one alternative carried {self.weight_share:.0%} of all the weight born in its"
                " chain: the gradient rests on"
                " few alternatives, and its error may be underestimated. Use weights='two-sided',"
                " more alternatives, or a coupling"
                " under which chains meet sooner."
            )
        if np.nanmin(np.append(self.effective_samples, np.inf)) < 5 * self.num_chains:
            found.append(
                "there are fewer than 5 effective samples per chain: run longer, or propose better."
            )
        return found


def _find(outcome: Outcome) -> _Finding:
    assert isinstance(outcome.watch, Watch), "the run was not diagnosed"
    counts = jax.tree.map(lambda leaf: np.asarray(leaf, float), outcome.watch.per_chain)
    rates = counts.accepted / counts.decisions
    has_slots = counts.slot_steps.sum() > 0
    alive, recoupled = counts.alive.sum(), counts.recoupled.sum()
    share = np.max(counts.max_weight / np.where(counts.weight_born > 0, counts.weight_born, np.inf))
    return _Finding(
        acceptance_rate=float(rates.mean()),
        least_acceptance=float(rates.min()),
        # Time at risk over events: the right mean also when other alternatives were pruned before
        # they met the primal.
        recoupling_time=(float(alive / recoupled) if recoupled else math.inf)
        if has_slots
        else math.nan,
        alive_fraction=float(alive / counts.slot_steps.sum()) if has_slots else math.nan,
        max_weight=float(counts.max_weight.max()) if has_slots else math.nan,
        weight_share=float(share),
        effective_samples=_effective_samples(outcome),
        num_samples=float(outcome.watch.lengths.sum()),
        num_chains=outcome.observed.value.shape[-1],
        nan_proposals=int(counts.nan.sum()),
    )


def _effective_samples(outcome: Outcome) -> Float[np.ndarray, "F"]:
    """`C N σ² / (L s²)`, with σ² the variance of f over all samples and s² that of its means over
    batches of length L.

    Where batches are too short to be independent the chains' own means tell: C σ² over their
    variance, if that is less than half.
    """
    assert isinstance(outcome.watch, Watch), "the run was not diagnosed"
    lengths = np.asarray(outcome.watch.lengths, float)
    sums, lengths = (
        np.asarray(outcome.watch.sums, float)[lengths > 0],
        lengths[lengths > 0][:, None, None],
    )
    means, origin = (
        np.asarray(outcome.observed.value, float),
        np.asarray(outcome.watch.per_chain.origin, float),
    )
    about = means.mean(axis=-1, keepdims=True)
    within = np.asarray(outcome.observed.watched, float) - (means - origin) ** 2
    variance = np.mean(within + (means - about) ** 2, axis=-1)
    batch_variance = np.sum(lengths * (sums / lengths - about) ** 2, axis=(0, 2)) / max(
        1, sums[:, 0].size - 1
    )
    chain_variance = lengths.sum() * means.var(axis=-1, ddof=1)
    longest = np.where(chain_variance > 2 * batch_variance, chain_variance, batch_variance)
    positive = (variance > 0) & (longest > 0)
    return np.where(
        positive,
        lengths.sum() * means.shape[-1] * variance / np.where(positive, longest, 1.0),
        np.nan,
    )


def mean_and_error(per_chain: Float[Array, "... C"]) -> tuple[np.ndarray, np.ndarray]:
    values = np.asarray(per_chain)
    return values.mean(axis=-1), values.std(axis=-1, ddof=1) / math.sqrt(values.shape[-1])


def gradient_tree(
    unflatten: Callable[[Float[Array, "F P"]], PyTree],
    theta: PyTree,
    flat: Float[np.ndarray, "P F"],
) -> PyTree:
    """A flat Jacobian as f's tree of theta's trees; `unflatten` puts f's flat values, with a
    further axis, into f's form.
    """
    _, unravel = ravel_pytree(theta)

    def like_theta(leaf):
        rows = leaf.reshape(leaf.shape[0], -1)
        trees = jax.vmap(unravel, in_axes=-1)(rows)
        return jax.tree.map(lambda part: part.reshape(*leaf.shape[1:], *part.shape[1:]), trees)

    return jax.tree.map(like_theta, unflatten(jnp.asarray(flat).T))


def with_errors(value: PyTree, error: PyTree) -> str:
    """`1.234 ± 0.005` at each leaf, arrays element by element, in the tree's own form."""
    texts = jax.tree.map(_leaf_with_errors, value, error)
    if jax.tree.structure(value) == jax.tree.structure(0):
        return texts
    return str(jax.tree.map(_Plain, texts))


class _Plain(str):
    """A string that prints without quotes inside a container."""

    def __repr__(self) -> str:
        return str(self)


def _leaf_with_errors(value, error) -> str:
    values, errors = np.asarray(value), np.asarray(error)
    if values.ndim == 0:
        return number_with_error(float(values), float(errors))
    shown = [
        number_with_error(float(v), float(e))
        for v, e in zip(values.ravel()[:12], errors.ravel()[:12], strict=True)
    ]
    rest = f", … {values.size} in all" if values.size > 12 else ""
    return "[" + ", ".join(shown) + rest + "]"


def number_with_error(value: float, error: float) -> str:
    """`value ± error` with two significant digits of the error."""
    if not math.isfinite(value) or not math.isfinite(error) or error == 0:
        return f"{value:.6g} ± {error:.2g}"
    digits = 1 - math.floor(math.log10(error))
    if not -3 <= digits <= 8:
        return f"{value:.4g} ± {error:.2g}"
    return f"{value:.{max(0, digits)}f} ± {error:.{max(0, digits)}f}"
