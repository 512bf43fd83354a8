"""Report: value and gradient of a run with their errors, and how far to trust them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from ..analysis import Jump
from ..base import validate
from ..base.validate import Checked
from ..core.simulation import Outcome
from . import diagnostics, display, meetings
from .convergence import mean_and_error
from .diagnostics import Diagnosis
from .display import with_errors
from .intervals import Shape, interval_tree, shape
from .meetings import MeetingTime


class RunChains(eqx.Module):
    """Each chain's value and derivative, with the outcomes of the simulations behind them, none for
    runs of a program.

    `notes` and `warnings` go into the report as they are. With `stretched`, value and derivative
    are those of the one simulation, so that its stretches tell their shape. `effective_samples`
    are taken from the outcomes if left out.
    """

    unflatten: Callable[[Float[Array | np.ndarray, "F C"]], PyTree]
    theta: PyTree
    value: Float[Array | np.ndarray, "F C"]
    jacobian: Float[Array | np.ndarray, "P F C"]
    outcomes: tuple[Outcome, ...]
    jumps: tuple[Jump, ...] = ()
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    stretched: bool = False
    effective_samples: Float[np.ndarray, "F"] | None = None


class EachChain(eqx.Module):
    """Each chain's own value and gradient: like a report's, with the chains first."""

    value: PyTree
    gradient: PyTree


class Report(eqx.Module):
    """The result of `.run`. Print it.

    `value` and `value_error` have f's structure; `gradient` and `gradient_error` have at each of
    its leaves a pytree like `theta`, with shape `(*leaf of f, *leaf of theta)`, as `jax.jacobian`
    does. Errors are standard errors over the chains.

    - `acceptance_rate`: accepted decisions; NaN where there are none (Gibbs).
    - `recoupling_time`: mean number of steps for which an alternative lives before it meets the
      primal.
    - `alive_fraction`: how much of the time a slot holds a living alternative.
    - `max_weight`: the largest weight that an alternative had.
    - `effective_samples`: how many independent samples would give f's value the same error; a tree
      like `value`.
    - `meeting_time`: when the chains of pairs met (`Stationary`): its `mean`, `quantile(level)`,
      `steps` of each pair, `distance(t)` from equilibrium at most, and a suggested `burn_in`;
      `None` for chains that run alone.
    - `num_chains`: how many chains the errors come from.
    - `num_alternatives`: how many alternatives each chain could follow at a time (K), also where
      the estimator chose it; 0 for an estimator without. `compare` says what others would give.
    - `nan_proposals`: proposals whose log density was NaN; they are never accepted.
    - `warnings`: what looks wrong, and what to do about it.
    - `per_chain`: each chain's own value and gradient, like `value` and `gradient` with the chains
      first.
    - `notes`: what else there is to say, such as what other estimators would have had, or that the
      chain is not at equilibrium.
    - `comparison`: a `Comparison` of estimators, if one was asked for.
    - `effective_draws`, `pareto_k`: for draws that are reweighted (`from_draws(at=...)`): how many
      equally weighted draws they are worth, and the tail index k̂ of their weights.
    - `value_shape`, `gradient_shape`: skewness and kurtosis of what a chain contributes, for
      `interval`.

    Entries that do not apply to the estimator are NaN.
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
    num_chains: int
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    per_chain: EachChain
    value_shape: Shape
    gradient_shape: Shape
    comparison: Any = None
    meeting_time: MeetingTime | None = None
    effective_draws: float = math.nan
    pareto_k: float = math.nan
    num_alternatives: int = 0

    def interval(self, level: Checked[float] = 0.95) -> tuple[PyTree, PyTree]:
        """Confidence intervals of value and gradient: two pytrees like them, each leaf with a last
        axis of two ends.

        `mean ± t · error` with Student's quantile for C chains, widened and bent where the chains'
        contributions are heavy-tailed or skew: `diffmh.reports.intervals` has the formula, and
        `docs/honest.md` how often the intervals hold.

        >>> import jax, diffmh
        >>> from diffmh.models import gaussian
        >>> mean = diffmh.expectation(lambda t, x: x, gaussian.sampler(), init=0.0, num_samples=500)
        >>> value, gradient = mean.run(0.5, jax.random.key(0)).interval(0.99)
        >>> bool(gradient[0] < 1 < gradient[1])
        True
        """
        level = validate.number(level, "Report.interval(level=...)", above=0, below=1)
        value = (self.value, self.value_error, self.value_shape)
        gradient = (self.gradient, self.gradient_error, self.gradient_shape)
        return (
            interval_tree(*value, self.num_chains, level),
            interval_tree(*gradient, self.num_chains, level),
        )

    def __repr__(self) -> str:
        parts = {
            "value": with_errors(self.value, self.value_error),
            "gradient": with_errors(self.gradient, self.gradient_error),
            "num_chains": str(self.num_chains),
        }
        return display.named("Report", parts, self.warnings)

    def _repr_html_(self) -> str:
        value, gradient = self.interval(0.95)
        rows = display.rows_with_intervals(self.value, self.value_error, value, "f")
        rows += display.rows_with_intervals(
            self.gradient, self.gradient_error, gradient, "gradient "
        )
        warnings = [f"warning: {warning}" for warning in self.warnings]
        return (
            display.table(("", "estimate ± standard error", "95 % interval"), rows)
            + display.paragraphs([*self._facts(), *self.notes])
            + display.paragraphs(warnings, "color:#b3261e")
        )

    def __str__(self) -> str:
        lines = [
            "value    " + with_errors(self.value, self.value_error),
            "gradient " + with_errors(self.gradient, self.gradient_error),
            *self._facts(),
            *self.notes,
            *(f"warning: {warning}" for warning in self.warnings),
        ]
        return "\n".join(lines if self.comparison is None else [*lines, str(self.comparison)])

    def _facts(self) -> list[str]:
        """The counts in one line, if the run has any."""
        facts = []
        if not math.isnan(self.acceptance_rate):
            facts.append(f"accepted {self.acceptance_rate:.1%}")
        least = min(float(np.min(leaf)) for leaf in jax.tree.leaves(self.effective_samples))
        if (facts or not math.isnan(self.alive_fraction)) and self.meeting_time is None:
            facts.append(f"effective samples {least:,.0f}")
        if not math.isnan(self.alive_fraction):
            facts.append(f"recoupling after {self.recoupling_time:.3g} steps")
            slots = "alternative" if self.num_alternatives == 1 else "alternatives"
            facts.append(f"{self.num_alternatives} {slots} alive {self.alive_fraction:.0%}")
            facts.append(f"largest weight {self.max_weight:.3g}")
        lines = [", ".join(facts)] if facts else []
        return lines if self.meeting_time is None else [*lines, meetings.facts(self.meeting_time)]


def report(chains: RunChains) -> Report:
    """Summarise the chains of a run."""
    value, value_error = mean_and_error(chains.value)
    slope, slope_error = mean_and_error(chains.jacobian)
    found = [diagnostics.diagnose(outcome) for outcome in chains.outcomes]
    value_shape, slope_shape = _shapes(chains)
    times = [MeetingTime.of(one.meetings) for one in chains.outcomes if one.meetings is not None]

    def like_value(flat):
        return value_tree(chains.unflatten, flat)

    def like_gradient(flat):
        return gradient_tree(chains.unflatten, chains.theta, flat)

    warnings = (
        *(text for diagnosis in found for text in diagnostics.warnings(diagnosis)),
        *map(diagnostics.of_jump, chains.jumps),
        *(text for outcome in chains.outcomes for text in meetings.warnings(outcome)),
        *diagnostics.of_estimates(chains.theta, _met(chains), slope, slope_error),
        *chains.warnings,
    )
    notes = (*chains.notes, *(text for diagnosis in found for text in diagnostics.notes(diagnosis)))
    return Report(
        value=like_value(value),
        value_error=like_value(value_error),
        value_shape=jax.tree.map(like_value, value_shape),
        gradient=like_gradient(slope),
        gradient_error=like_gradient(slope_error),
        gradient_shape=jax.tree.map(like_gradient, slope_shape),
        acceptance_rate=min((d.acceptance_rate for d in found), default=math.nan),
        recoupling_time=_largest(d.recoupling_time for d in found),
        alive_fraction=_largest(d.alive_fraction for d in found),
        max_weight=_largest(d.max_weight for d in found),
        effective_samples=like_value(_effective_samples(chains, found)),
        nan_proposals=sum(d.nan_proposals for d in found),
        num_chains=chains.value.shape[-1],
        num_alternatives=max((d.method.num_alternatives for d in found), default=0),
        # Of several expectations, that of the slowest pairs.
        meeting_time=max(times, key=lambda time: (time.num_unmet, time.mean), default=None),
        # Expectations that are composed may have the same to say.
        warnings=tuple(dict.fromkeys(warnings)),
        notes=tuple(dict.fromkeys(notes)),
        per_chain=EachChain(
            jax.tree.map(jnp.asarray, chains.unflatten(np.asarray(chains.value))),
            like_gradient(chains.jacobian),
        ),
    )


def _met(chains: RunChains) -> Float[np.ndarray, "F M"]:
    """The values of the chains of which one is known: pairs that have not met are told apart."""
    value = np.asarray(chains.value)
    unknown = np.zeros(value.shape[-1], bool)
    for outcome in chains.outcomes:
        if outcome.meetings is not None:
            unknown |= ~np.asarray(outcome.meetings.met)
    return value[:, ~unknown]


def _effective_samples(chains: RunChains, found: list[Diagnosis]) -> Float[np.ndarray, "F"]:
    num_values, num_chains = chains.value.shape
    if chains.effective_samples is not None:
        return chains.effective_samples
    if not found:
        # Replicates of a program are independent.
        return np.full(num_values, float(num_chains))
    if len(found) == 1 and found[0].effective_samples.size == num_values:
        return found[0].effective_samples
    # A composed value has no samples of its own: it is as good as the worst expectation behind it.
    return np.full(num_values, np.nanmin(np.concatenate([d.effective_samples for d in found])))


def _shapes(chains: RunChains) -> tuple[Shape, Shape]:
    """The shapes of value and derivative, from the simulation's stretches if they are its own."""
    value, slope = np.asarray(chains.value, float), np.asarray(chains.jacobian, float)
    parts = chains.outcomes[0].stretches if chains.stretched else None
    if parts is None:
        return shape(value), shape(slope)
    parts = parts.nonempty()
    # With very many parameters the stretches know a few directions only.
    all_directions = parts.jacobian.shape[1:3] == slope.shape[:2]
    of_slope = (parts.jacobian, parts.length) if all_directions else ()
    return shape(value, parts.value, parts.length), shape(slope, *of_slope)


def _largest(values: Iterable[float]) -> float:
    """The largest of those that are not NaN: an estimator has no use for the others."""
    return max((value for value in values if not math.isnan(value)), default=math.nan)


def value_tree(
    unflatten: Callable[[Float[Array | np.ndarray, "F C"]], PyTree], flat: Float[np.ndarray, "F"]
) -> PyTree:
    """Flat values as f's tree."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), unflatten(np.asarray(flat)[:, None]))


def gradient_tree(
    unflatten: Callable[[Float[Array | np.ndarray, "F P"]], PyTree],
    theta: PyTree,
    flat: Float[Array | np.ndarray, "P F *C"],
) -> PyTree:
    """A flat Jacobian as f's tree of theta's trees, chains first if there are any; `unflatten` puts
    f's flat values, with a further axis, into f's form.
    """
    # All of it in NumPy: JAX would compile every operation for every shape.
    flat = np.asarray(flat)
    num_parameters, num_values, *chains = flat.shape
    # The order of `ravel_pytree`, in which the P parameters were flattened.
    parameters, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, theta))
    ends = np.cumsum([parameter.size for parameter in parameters])

    def like_theta(leaf):
        leaf = np.asarray(leaf).reshape((num_parameters, *chains, *leaf.shape[1:]))

        def like_parameter(part, parameter):
            shaped = np.moveaxis(part, 0, -1).reshape((*leaf.shape[1:], *parameter.shape))
            return jnp.asarray(shaped, parameter.dtype)

        return structure.unflatten(map(like_parameter, np.split(leaf, ends[:-1]), parameters))

    return jax.tree.map(like_theta, unflatten(np.moveaxis(flat, 1, 0).reshape(num_values, -1)))


def gradient_matrix(
    value: PyTree, gradient: PyTree, before: int = 0, after: int = 0
) -> Float[np.ndarray, "..."]:
    """The inverse of `gradient_tree`: a tree like the gradient of `value` as an array `(..., F, P,
    ...)`, with these numbers of further axes before and after.
    """
    leaves, structure = jax.tree.flatten(value)
    rows = []
    for leaf, of_theta in zip(leaves, structure.flatten_up_to(gradient), strict=True):
        parts = []
        for part in map(np.asarray, jax.tree.leaves(of_theta)):
            first, last = part.shape[:before], part.shape[part.ndim - after :]
            parts.append(part.reshape(*first, np.size(leaf), -1, *last).astype(float))
        rows.append(np.concatenate(parts, axis=before + 1))
    return np.concatenate(rows, axis=before)
