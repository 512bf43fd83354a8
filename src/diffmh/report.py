"""Report: value and gradient with their errors, and what a person should know about the run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from . import _display, _validate
from ._display import number_with_error
from ._validate import Checked
from .analysis import Jump
from .findings import Finding, cannot_be_right, find
from .intervals import Shape, ends, shape
from .simulation import Outcome


class RunChains(eqx.Module):
    """Each chain's value and derivative; the outcomes of the simulations behind them, none if they
    are runs of a program. `notes` and `warnings` go into the report as they are. `stretched` says
    that value and derivative are those of the one simulation, stretch by stretch too.
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


class Report(eqx.Module):
    """What `.run` returns. Print it.

    `value` and `value_error` have f's structure; `gradient` and `gradient_error` have at each of
    its leaves a pytree like `theta`, with shape `(*leaf of f, *leaf of theta)`, as `jax.jacobian`
    does. Errors are standard errors over the chains.

    - `acceptance_rate`: accepted decisions; NaN where there are none (Gibbs).
    - `recoupling_time`: mean number of steps for which an alternative lives before it meets the
      primal.
    - `alive_fraction`: how much of the time a slot holds a living alternative.
    - `max_weight`: the largest weight that an alternative had.
    - `effective_samples`: how many independent samples would give f's value the same error; like
      `value`.
    - `num_chains`: how many chains the errors come from.
    - `nan_proposals`: proposals whose log density was NaN; they are never accepted.
    - `warnings`: what looks wrong, and what to do about it.
    - `per_chain`: each chain's own value and gradient, like `value` and `gradient` with the chains
      first.
    - `notes`: what else there is to say, such as what other estimators would have had, or that the
      chain is not at equilibrium.
    - `comparison`: a `Comparison` of estimators, if one was asked for.
    - `value_shape`, `gradient_shape`: skewness and kurtosis of what a chain contributes, for
      `interval`.

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
    num_chains: int
    warnings: tuple[str, ...]
    notes: tuple[str, ...] = ()
    per_chain: PerChain | None = None
    value_shape: Shape | None = None
    gradient_shape: Shape | None = None
    comparison: Any = None

    def interval(self, level: Checked[float] = 0.95) -> tuple[PyTree, PyTree]:
        """Confidence intervals of value and gradient: two pytrees like them, each leaf with a last
        axis of two ends.

        `mean ± t · error` with Student's quantile for C chains, widened and bent where the chains'
        contributions are heavy-tailed or skew: `diffmh.intervals` has the formula, and
        `docs/honest.md` how often the intervals hold.

        >>> import jax, diffmh
        >>> from diffmh.models import gaussian
        >>> mean = diffmh.expectation(lambda t, x: x, gaussian.sampler(), init=0.0, num_samples=500)
        >>> value, gradient = mean.run(0.5, jax.random.key(0)).interval(0.99)
        >>> bool(gradient[0] < 1 < gradient[1])
        True
        """
        level = _validate.number(level, "Report.interval(level=...)", above=0, below=1)

        def both(mean, error, skewness, kurtosis):
            mean, error = np.asarray(mean, float), np.asarray(error, float)
            shape = Shape(np.asarray(skewness, float), np.asarray(kurtosis, float))
            return jnp.stack(ends(mean, error, shape, self.num_chains, level), -1)

        def of(mean, error, shape):
            normal = Shape(*(jax.tree.map(lambda _, n=n: n, mean) for n in (0.0, 3.0)))
            shape = normal if shape is None else shape
            return jax.tree.map(both, mean, error, shape.skewness, shape.kurtosis)

        value = of(self.value, self.value_error, self.value_shape)
        return value, of(self.gradient, self.gradient_error, self.gradient_shape)

    def __repr__(self) -> str:
        parts = {
            "value": with_errors(self.value, self.value_error),
            "gradient": with_errors(self.gradient, self.gradient_error),
            "num_chains": str(self.num_chains),
        }
        if self.warnings:
            parts["warnings"] = f"{len(self.warnings)}: print it"
        return _display.named("Report", parts)

    def _repr_html_(self) -> str:
        value, gradient = self.interval(0.95)
        rows = [
            *_display.entries(self.value, self.value_error, value, "f"),
            *_display.entries(self.gradient, self.gradient_error, gradient, "gradient "),
        ]
        heads = ("", "estimate ± standard error", "95 % interval")
        warnings = [f"warning: {warning}" for warning in self.warnings]
        return (
            _display.table(heads, (row.cells() for row in rows))
            + _display.paragraphs([*self._facts(), *self.notes])
            + _display.paragraphs(warnings, "color:#b3261e")
        )

    def __str__(self) -> str:
        lines = ["value    " + with_errors(self.value, self.value_error)]
        lines.append("gradient " + with_errors(self.gradient, self.gradient_error))
        lines.extend(self._facts())
        lines.extend(self.notes)
        lines.extend(f"warning: {warning}" for warning in self.warnings)
        lines.extend([] if self.comparison is None else [str(self.comparison)])
        return "\n".join(lines)

    def _facts(self) -> list[str]:
        """What was counted on the way, in one line if there is anything."""
        facts = []
        if not math.isnan(self.acceptance_rate):
            facts.append(f"accepted {self.acceptance_rate:.1%}")
        if facts or not math.isnan(self.alive_fraction):
            least = min(float(np.min(leaf)) for leaf in jax.tree.leaves(self.effective_samples))
            facts.append(f"effective samples {least:,.0f}")
        if not math.isnan(self.alive_fraction):
            facts.append(f"recoupling after {self.recoupling_time:.3g} steps")
            facts.append(f"alternative alive {self.alive_fraction:.0%}")
            facts.append(f"largest weight {self.max_weight:.3g}")
        return [", ".join(facts)] if facts else []


class PerChain(eqx.Module):
    """Each chain's own value and gradient: like a report's, with the chains first."""

    value: PyTree
    gradient: PyTree


def report(chains: RunChains) -> Report:
    """Summarises the chains of a run."""
    value, value_error = mean_and_error(chains.value)
    slope, slope_error = mean_and_error(chains.jacobian)
    findings = [find(outcome) for outcome in chains.outcomes]
    effective = [finding.effective_samples for finding in findings]
    # Replicates of a program are independent. A composed value has no samples of its own: it is as
    # good as the worst expectation behind it.
    effective = effective or [np.full(value.shape, float(chains.value.shape[-1]))]
    shared = (
        effective[0]
        if len(effective) == 1 and effective[0].shape == value.shape
        else np.nanmin(np.concatenate(effective))
    )

    def like_value(flat):
        return jax.tree.map(
            lambda leaf: jnp.asarray(leaf[0]), chains.unflatten(np.asarray(flat)[:, None])
        )

    like_gradient = lambda flat: gradient_tree(chains.unflatten, chains.theta, flat)
    value_shape, slope_shape = _shapes(chains)
    return Report(
        value=like_value(value),
        value_error=like_value(value_error),
        value_shape=Shape(*map(like_value, (value_shape.skewness, value_shape.kurtosis))),
        gradient=like_gradient(slope),
        gradient_error=like_gradient(slope_error),
        gradient_shape=Shape(*map(like_gradient, (slope_shape.skewness, slope_shape.kurtosis))),
        acceptance_rate=min((f.acceptance_rate for f in findings), default=math.nan),
        recoupling_time=_largest(finding.recoupling_time for finding in findings),
        alive_fraction=_largest(finding.alive_fraction for finding in findings),
        max_weight=_largest(finding.max_weight for finding in findings),
        effective_samples=like_value(np.broadcast_to(shared, value.shape)),
        nan_proposals=sum(finding.nan_proposals for finding in findings),
        num_chains=chains.value.shape[-1],
        warnings=tuple(
            dict.fromkeys((*_warnings(chains, findings, slope, slope_error), *chains.warnings))
        ),
        notes=(*chains.notes, *dict.fromkeys(note for f in findings for note in f.notes())),
        per_chain=_per_chain(chains),
    )


def _per_chain(chains: RunChains) -> PerChain:
    value = jax.tree.map(jnp.asarray, chains.unflatten(np.asarray(chains.value)))
    return PerChain(value, gradient_tree(chains.unflatten, chains.theta, chains.jacobian))


def _shapes(chains: RunChains) -> tuple[Shape, Shape]:
    """Of value and derivative: from the stretches of the simulation whose they are, or else from
    whole chains.
    """
    value, slope = np.asarray(chains.value, float), np.asarray(chains.jacobian, float)
    parts = chains.outcomes[0].stretches if chains.stretched else None
    if parts is None:
        return shape(value), shape(slope)
    parts = parts.nonempty()
    of_value = shape(value, parts.value, parts.length)
    # Of very many parameters the stretches know a few directions only.
    if parts.jacobian.shape[1:3] != slope.shape[:2]:
        return of_value, shape(slope)
    return of_value, shape(slope, parts.jacobian, parts.length)


def _warnings(chains: RunChains, findings: list[Finding], slope, slope_error) -> Iterable[str]:
    for finding in findings:
        yield from finding.warnings()
    for jump in chains.jumps:
        yield (
            f"`log_density` may jump in x at a place that depends on theta (`{jump.primitive}` at"
            f" {jump.where}), and the derivative of where it jumps would be lost. If it is"
            " continuous there, say so with `diffmh.continuous(function)`."
        )
    lost = np.sum(~np.isfinite(np.asarray(chains.value)).all(axis=0))
    if lost:
        yield (
            f"the value is not finite in {lost} of {chains.value.shape[-1]} chains: `f` (or what is"
            " composed of it) is NaN or infinite at states that they visited."
        )
    yield from cannot_be_right(chains.theta, slope, slope_error)


def _largest(values: Iterable[float]) -> float:
    """Of those that are not NaN, if any: an estimator has no use for the others."""
    return max((value for value in values if not math.isnan(value)), default=math.nan)


def mean_and_error(per_chain: Float[Any, "... C"]) -> tuple[np.ndarray, np.ndarray]:
    # In double precision: the square of a small number would vanish in single.
    values = np.asarray(per_chain, float)
    return values.mean(axis=-1), values.std(axis=-1, ddof=1) / math.sqrt(values.shape[-1])


def gradient_tree(
    unflatten: Callable[[Float[Array | np.ndarray, "F P"]], PyTree],
    theta: PyTree,
    flat: Float[Array | np.ndarray, "P F *C"],
) -> PyTree:
    """A flat Jacobian as f's tree of theta's trees, chains first if there are any; `unflatten` puts
    f's flat values, with a further axis, into f's form.

    All of it in NumPy: JAX would compile every operation for every shape.
    """
    flat = np.asarray(flat)
    num_parameters, num_values, *chains = flat.shape
    parameters, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, theta))
    ends = np.cumsum([parameter.size for parameter in parameters])

    def like_theta(leaf):
        leaf = np.asarray(leaf).reshape((num_parameters, *chains, *leaf.shape[1:]))

        def of(part, parameter):
            return jnp.asarray(
                np.moveaxis(part, 0, -1).reshape((*leaf.shape[1:], *parameter.shape)),
                parameter.dtype,
            )

        return structure.unflatten(map(of, np.split(leaf, ends[:-1]), parameters))

    return jax.tree.map(like_theta, unflatten(np.moveaxis(flat, 1, 0).reshape(num_values, -1)))


def with_errors(value: PyTree, error: PyTree) -> str:
    """`1.234 ± 0.005` at each leaf, arrays element by element, in the tree's own form."""
    texts = jax.tree.map(_leaf_with_errors, value, error)
    if jax.tree.structure(value) == jax.tree.structure(0):
        return texts
    return str(jax.tree.map(_display.Plain, texts))


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
