"""Estimators: what is made of the runs of a program."""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float

from .. import _validate
from .._lowering.chains import over_chains
from . import derivative
from .derivative import Run


class Runs(eqx.Module):
    """The same program with a key for each of C replicates, as an estimator sees it.

    `reverse` says that there are so many parameters that JAX goes backward.
    """

    run: Run
    keys: Any
    reverse: bool = eqx.field(static=True)

    def each(self, function: Callable[[Run], Any]) -> Any:
        """`function` of every replicate, replicates last."""
        one = lambda key: function(self.run.at(self.run.theta, key))
        if self.reverse:
            return jax.vmap(one, out_axes=-1)(self.keys)
        return over_chains(one)(self.keys)

    def jacobians(self, function: Callable[[Run], Float[Array, "N"]]) -> Any:
        """Every replicate's value `(N, C)` and derivative `(P, N, C)`, by JAX."""
        return self.each(
            lambda run: derivative.jacobian(
                lambda theta: function(run.at(theta)), run.theta, self.reverse
            )
        )


class Found(eqx.Module):
    """Each replicate's value and derivative, and what each estimator would have had: their
    variances, by name.
    """

    value: Float[Array, "F C"]
    jacobian: Float[Array, "P F C"]
    others: dict[str, Float[Array, "P F pilot"]]


class Estimator(eqx.Module):
    """How a derivative is estimated: `Alternatives`, `Score`, `Combined`, `Smooth`."""

    @abstractmethod
    def find(self, runs: Runs) -> Found:
        """Each replicate's value and derivative."""

    @abstractmethod
    def surrogate(self, runs: Runs) -> Float[Array, "F C"]:
        """Each replicate's value, which JAX differentiates into the estimate."""


class Alternatives(Estimator):
    """Follows `num_alternatives` alternatives beside the program: unbiased (`docs/sad.md`).

    >>> from diffmh import sad
    >>> sad.Alternatives(4)
    Alternatives(num_alternatives=4)
    """

    num_alternatives: int = eqx.field(static=True, default=1)

    def __check_init__(self):
        _validate.count(self.num_alternatives, "sad.Alternatives(num_alternatives=...)")

    def find(self, runs: Runs) -> Found:
        if runs.reverse:
            value, jacobian = runs.jacobians(self.backward)
        else:
            value, jacobian = runs.each(self.forward)
        return Found(value, jacobian, {})

    def surrogate(self, runs: Runs) -> Float[Array, "F C"]:
        if runs.reverse:
            return runs.each(self.backward)
        still = runs.run.at(jax.lax.stop_gradient(runs.run.theta))
        return _linear(runs, self.find(Runs(still, runs.keys, False)))

    def forward(self, run: Run) -> tuple[Float[Array, "F"], Float[Array, "P F"]]:
        return derivative.forward(run, self.num_alternatives)

    def backward(self, run: Run) -> Float[Array, "F"]:
        return derivative.backward(run, self.num_alternatives)


def _linear(runs: Runs, found: Found) -> Float[Array, "F C"]:
    """The values, with the derivative that was found."""
    flat = ravel_pytree(runs.run.theta)[0]
    move = flat - jax.lax.stop_gradient(flat)
    return found.value + jnp.tensordot(move, jax.lax.stop_gradient(found.jacobian), axes=1)


class Score(Estimator):
    """The score of the draws times the result, less the mean of the other replicates':
    `∂f + (f_c − f̄_{−c}) ∂ log P(draws)`. Unbiased; its variance grows with the number of draws that
    matter little. With a single run there is no baseline.

    Draws whose probability is exactly 0 or 1 and moves have no score: `sad.Combined` sees that.

    >>> from diffmh import sad
    >>> sad.Score()
    Score()
    """

    def find(self, runs: Runs) -> Found:
        return self.from_parts(score_parts(runs))

    def from_parts(self, parts: ScoreParts) -> Found:
        centred = parts.value - others_mean(parts.value)
        return Found(parts.value, parts.path + parts.score[:, None] * centred[None], {})

    def surrogate(self, runs: Runs) -> Float[Array, "F C"]:
        value, log_prob = runs.each(lambda run: derivative.held_fixed(run))
        still = jax.lax.stop_gradient(value)
        moving = log_prob - jax.lax.stop_gradient(log_prob)
        return value + (still - others_mean(still)) * moving[None]


class ScoreParts(eqx.Module):
    """Of each replicate: the value, its derivative along the path, and the score."""

    value: Float[Array, "F C"]
    path: Float[Array, "P F C"]
    score: Float[Array, "P C"]


def score_parts(runs: Runs) -> ScoreParts:
    def both(run):
        value, log_prob = derivative.held_fixed(run)
        return jnp.append(value, log_prob)

    value, slope = runs.jacobians(both)
    return ScoreParts(value[:-1], slope[:, :-1], slope[:, -1])


def others_mean(value: Float[Array, "F C"]) -> Float[Array, "F C"]:
    """For each replicate the mean of the others; 0 if there are none."""
    count = value.shape[-1]
    if count == 1:
        return jnp.zeros_like(value)
    mean = jnp.mean(value, axis=-1, keepdims=True)
    return mean + (mean - value) / (count - 1)


class Combined(Estimator):
    """Alternatives and score together: `A + a (G − A) + b S`, where A is by alternatives, G by the
    score, and the score S itself has mean zero. The coefficients of least variance, for each
    parameter and result, are fitted on other replicates: unbiased, and no worse than either.

    With fewer than 32 replicates there is nothing to fit on: then it is `Alternatives`. With 512 or
    more, `.run` tries all on the first 64th of them (32 at least) and leaves out, for the others,
    what does not pay for its time.

    >>> from diffmh import sad
    >>> sad.Combined(2)
    Combined(num_alternatives=2)
    """

    num_alternatives: int = eqx.field(static=True, default=1)

    def __check_init__(self):
        _validate.count(self.num_alternatives, "sad.Combined(num_alternatives=...)")

    def find(self, runs: Runs) -> Found:
        alternatives = Alternatives(self.num_alternatives).find(runs)
        if runs.keys.shape[0] < LEAST_REPLICATES:
            return alternatives
        parts = score_parts(runs)
        score = Score().from_parts(parts)
        combined = combine(parts, alternatives.jacobian)
        others = {
            "alternatives": alternatives.jacobian,
            "score": score.jacobian,
            "score with a fitted baseline": combine(parts, None),
        }
        return Found(alternatives.value, combined, others)

    def surrogate(self, runs: Runs) -> Float[Array, "F C"]:
        if runs.keys.shape[0] < LEAST_REPLICATES:
            return Alternatives(self.num_alternatives).surrogate(runs)
        still = runs.run.at(jax.lax.stop_gradient(runs.run.theta))
        return _linear(runs, self.find(Runs(still, runs.keys, runs.reverse)))


LEAST_REPLICATES = 32
# With so many replicates and more, `.run` finds out on a part of them what pays.
_MANY, _PILOT = 512, 64


class Fitted(Estimator):
    """The score with a baseline and a multiple of itself fitted on other replicates: what is left
    of `Combined` where alternatives do not pay.
    """

    def find(self, runs: Runs) -> Found:
        parts = score_parts(runs)
        return Found(parts.value, combine(parts, None), {})

    def surrogate(self, runs: Runs) -> Float[Array, "F C"]:
        still = runs.run.at(jax.lax.stop_gradient(runs.run.theta))
        return _linear(runs, self.find(Runs(still, runs.keys, runs.reverse)))


def pilot_size(estimator: Estimator, count: int) -> int | None:
    """How many replicates find out what pays, if there are enough."""
    if not isinstance(estimator, Combined) or count < _MANY:
        return None
    return max(LEAST_REPLICATES, count // _PILOT)


def what_pays(estimator: Combined, runs: Runs, pilot: Found) -> Estimator:
    """The estimator of least variance times cost, by the pilot's variances. A cost is in runs of
    the program: one for the value, one for each tangent or two for going backward, and those of the
    lanes.
    """
    slots = estimator.num_alternatives
    if disagreement(pilot):
        return Alternatives(slots)
    tangents = 2 if runs.reverse else derivative.num_parameters(runs.run.theta)
    # As measured on the programs of `benchmarks/sad_programs.py`.
    lanes = 12 + 8 * slots if runs.reverse else 1.5 + 3 * slots
    cost = {"combined": 2 * (1 + tangents) + lanes, "alternatives": 1 + tangents + lanes}
    cost["score"], cost["score with a fitted baseline"] = 1.0 + tangents, 1.3 * (1 + tangents)
    variance = {name: jnp.var(j, axis=-1) for name, j in pilot.others.items()}
    variance["combined"] = jnp.var(pilot.jacobian, axis=-1)
    # Each parameter and result in units of the best that is known of it, and the middle one.
    least = functools.reduce(jnp.minimum, variance.values())
    relative = lambda v: jnp.median(jnp.where(least > 0, v / jnp.where(least > 0, least, 1.0), 1.0))
    effort = {name: float(relative(v)) * cost[name] for name, v in variance.items()}
    best = min(effort, key=lambda name: effort[name])
    estimators = {"combined": estimator, "alternatives": Alternatives(slots), "score": Score()}
    return estimators.get(best, Fitted())


def joined(pilot: Found, rest: Found) -> Found:
    """A pilot and the replicates after it."""
    join = lambda a, b: jnp.concatenate([a, b], axis=-1)
    trusted = pilot.others["alternatives"] if disagreement(pilot) else pilot.jacobian
    value, jacobian = join(pilot.value, rest.value), join(trusted, rest.jacobian)
    return Found(value, jacobian, pilot.others)


def combine(parts: ScoreParts, alternatives: Float[Array, "P F C"] | None) -> Float[Array, "P F C"]:
    """The combination of least variance. Whatever is fitted for one half of the replicates, the
    baseline included, comes from the other half alone.
    """
    half = parts.path.shape[-1] // 2
    take = lambda where: jax.tree.map(lambda array: array[..., where], (parts, alternatives))
    one, other = take(slice(0, half)), take(slice(half, None))
    return jnp.concatenate([_fitted(*one, *other), _fitted(*other, *one)], axis=-1)


def _fitted(
    parts: ScoreParts,
    alternatives: Float[Array, "P F C"] | None,
    others: ScoreParts,
    other_alternatives: Float[Array, "P F D"] | None,
) -> Float[Array, "P F C"]:
    """`A + a (G − A) + b S`, baseline and coefficients from other replicates; where nothing varies
    it is A.
    """
    baseline = jnp.mean(others.value, axis=-1, keepdims=True)
    controls = _controls(parts, alternatives, baseline)
    base, difference, score = _controls(others, other_alternatives, baseline)
    ss, sa = _covariance(score, score), _covariance(score, base)
    if difference is None:
        return controls.base + _ratio(sa, ss) * controls.score
    dd, ds, da = (_covariance(difference, part) for part in (difference, score, base))
    # A hint of ridge: where the two controls are one, either will do.
    dd, ss = dd * (1 + 1e-4), ss * (1 + 1e-4)
    determinant = dd * ss - ds**2
    safe = jnp.where(determinant > 0, determinant, 1.0)
    of_difference = jnp.where(determinant > 0, -(ss * da - ds * sa) / safe, _ratio(da, dd))
    of_score = jnp.where(determinant > 0, -(dd * sa - ds * da) / safe, 0.0)
    return controls.base + of_difference * controls.difference + of_score * controls.score


class _Controls(NamedTuple):
    """What is combined: an estimate, and what has mean zero."""

    base: Float[Array, "P F C"]
    difference: Any
    score: Float[Array, "P F C"]


def _controls(parts: ScoreParts, alternatives: Any, baseline: Float[Array, "F 1"]) -> _Controls:
    score = jnp.broadcast_to(parts.score[:, None], parts.path.shape)
    by_score = parts.path + score * (parts.value - baseline)[None]
    if alternatives is None:
        return _Controls(by_score, None, score)
    return _Controls(alternatives, by_score - alternatives, score)


def _covariance(a: Float[Array, "P F C"], b: Float[Array, "P F C"]) -> Float[Array, "P F 1"]:
    mean = lambda array: jnp.mean(array, axis=-1, keepdims=True)
    return mean((a - mean(a)) * (b - mean(b)))


def _ratio(covariance: Array, variance: Array) -> Array:
    return jnp.where(variance > 0, -covariance / jnp.where(variance > 0, variance, 1.0), 0.0)


class Smooth(Estimator):
    """A draw passes on the derivative of its mean. **Biased** wherever the result is not linear in
    the draws; of far smaller variance where many draws add up.

    `.run` shows the difference from the unbiased `Combined`, with its error, always.

    >>> from diffmh import sad
    >>> sad.Smooth()
    Smooth()
    """

    def find(self, runs: Runs) -> Found:
        value, jacobian = runs.jacobians(lambda run: derivative.held_fixed(run, True)[0])
        unbiased = Combined().find(runs)
        return Found(value, jacobian, {"unbiased": unbiased.jacobian})

    def surrogate(self, runs: Runs) -> Float[Array, "F C"]:
        return runs.each(lambda run: derivative.held_fixed(run, True)[0])


def notes(estimator: Estimator, found: Found) -> tuple[str, ...]:
    """What a report says of the estimators that it did not choose."""
    if isinstance(estimator, Smooth):
        difference = found.jacobian - found.others["unbiased"]
        mean, error = _mean_and_error(difference)
        worst = int(jnp.argmax(jnp.where(error > 0, jnp.abs(mean) / error, 0.0)))
        shown = f"{float(mean.reshape(-1)[worst]):.4g} ± {float(error.reshape(-1)[worst]):.2g}"
        return (f"smoothed, which is biased: less the unbiased estimate {shown}, at worst",)
    if not found.others:
        return ()
    count = found.jacobian.shape[-1]
    size = lambda jacobian: float(jnp.sqrt(jnp.mean(jnp.var(jacobian, axis=-1)) / count))
    alone = [f"{name} alone {size(other):.2g}" for name, other in found.others.items()]
    return (f"gradient error {size(found.jacobian):.2g}; " + ", ".join(alone),)


def disagreement(found: Found) -> tuple[str, ...]:
    """A warning where alternatives and score cannot both be right."""
    if "alternatives" not in found.others:
        return ()
    mean, error = _mean_and_error(found.others["alternatives"] - found.others["score"])
    sure = jnp.abs(mean) > 1e-5 * jnp.max(jnp.abs(found.others["alternatives"]))
    if not bool(jnp.any(sure & (jnp.abs(mean) > 6 * error))):
        return ()
    return (
        "alternatives and score differ by more than their errors allow: a draw may have a"
        " probability of exactly 0 or 1 that moves, where the score has no answer. Use"
        " `estimator=sad.Alternatives()`.",
    )


def _mean_and_error(replicates: Float[Array, "P F C"]) -> tuple[Array, Array]:
    count = replicates.shape[-1]
    return replicates.mean(axis=-1), replicates.std(axis=-1, ddof=1) / math.sqrt(count)
