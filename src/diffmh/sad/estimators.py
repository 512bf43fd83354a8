"""Estimators of the derivative of a program, from its runs."""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float

from ..base import validate
from ..base.validate import Checked, NotDifferentiable
from ..core.autodiff import moving
from ..fast.chains import over_chains
from ..runs.devices import shared_evenly
from . import derivative
from .baseline import Baseline, baseline
from .combination import LEAST_REPLICATES, ScoreParts, combine
from .plan import Run

# The number of runs from which the size of each parameter's score is estimated.
_NUM_SCALES = 4
# In float32 a probability such as `exp(log_ratio)` is rounded to 1 about once in ten million draws.
# Up to this share of the replicates may contain such a draw and keep their score.
_ROUNDED = 1e-3


class Runs(eqx.Module):
    """The same program with a key for each of C replicates, as an estimator sees it.

    With many parameters (`reverse`), JAX differentiates backward. Then `group` replicates at a time
    share one derivative, that of their mean, because single derivatives are not needed. The devices
    of `mesh` share the replicates.
    """

    run: Run
    keys: Any
    reverse: bool = eqx.field(static=True)
    group: int = eqx.field(static=True, default=1)
    mesh: Mesh | None = eqx.field(static=True, default=None)

    @property
    def baseline(self) -> Baseline:
        """The mean over the other replicates of a value in the middle of a run."""
        return baseline(1 if self.group == 1 else 2)

    @property
    def is_reversible(self) -> bool:
        """True if JAX can differentiate the program backward."""
        return self.reverse or self.run.plan.by_jax.is_reversible

    def of(self, keys: Any, group: int = 1) -> Runs:
        """The same runs with other keys."""
        return dataclasses.replace(self, keys=keys, group=group)

    def still(self) -> Runs:
        """The same replicates without derivatives."""
        return dataclasses.replace(self, run=self.run.at(jax.lax.stop_gradient(self.run.theta)))

    def each(self, function: Callable[[Run], Any], differentiated: bool = False) -> Any:
        """Apply `function` to every replicate; replicates are the last axis. A function that JAX
        is to differentiate must be mapped by `jax.vmap`: `over_chains` drops custom derivatives.
        """

        def one(key):
            return function(self.run.at(self.run.theta, key))

        keys = shared_evenly(self.keys, self.mesh)
        if self.reverse or differentiated:
            return jax.vmap(one, out_axes=-1)(keys)
        return over_chains(one)(keys)

    def jacobians(self, function: Callable[[Run], tuple[Float[Array, "N"], Any]]) -> Any:
        """For a function that returns a vector and something else: the latter, and the derivative
        `(P, N, C)` of the vector by JAX. Replicates (or groups of them) are the last axis.
        """

        def of_one(run):
            def at(theta):
                return function(run.at(theta))

            return derivative.jacobian(at, run.theta, self.reverse)

        def of_group(keys):
            def mean(theta):
                # The derivative of the mean is all that a group needs: one backward pass for all.
                each = jax.vmap(lambda key: function(self.run.at(theta, key)))(keys)
                return jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), each)

            return derivative.jacobian(mean, self.run.theta, True)

        if self.group > 1:
            groups = shared_evenly(self.keys.reshape(-1, self.group), self.mesh)
            return jax.vmap(of_group, out_axes=-1)(groups)
        return self.each(of_one)


class Found(eqx.Module):
    """The value and derivative of each replicate, or of each group of `group` replicates. `others`
    has the derivatives of single replicates by each estimator, by name; `scoreless` is True if the
    score is known not to exist.
    """

    value: Float[Array, "F C"]
    jacobian: Float[Array, "P F C"]
    others: dict[str, Float[Array, "P F pilot"]]
    group: int = eqx.field(static=True, default=1)
    scoreless: Bool[Array, ""] | bool = False


class Estimator(eqx.Module):
    """An estimator of the derivative: `Alternatives`, `Score`, `Combined` or `Smooth`."""

    @abstractmethod
    def find(self, runs: Runs) -> Found:
        """The value and derivative of each replicate."""

    def surrogate(self, runs: Runs) -> Float[Array, "F C"]:
        """The value of each replicate. JAX differentiates it into the estimate."""
        return _linear(runs, self.find(runs.still()))


class Alternatives(Estimator):
    """Follows `num_alternatives` alternative runs of the program: each differs from it by the
    outcome of one draw. Unbiased (`docs/sad.md`).

    >>> from diffmh import sad
    >>> sad.Alternatives(4)
    Alternatives(num_alternatives=4)
    """

    num_alternatives: Checked[int] = eqx.field(static=True, default=1)

    def __check_init__(self):
        validate.count(self.num_alternatives, "sad.Alternatives(num_alternatives=...)")

    def find(self, runs: Runs) -> Found:
        return self.backward(runs, _scales(runs)) if runs.reverse else self.forward(runs)

    def surrogate(self, runs: Runs) -> Float[Array, "F C"]:
        if runs.reverse:
            evaluate = self._moving(runs, _scales(runs.still()))
            return runs.each(lambda run: evaluate(run)[0])
        return super().surrogate(runs)

    def forward(self, runs: Runs) -> Found:
        """Forward mode, with a tangent for each parameter."""
        value, jacobian, scoreless = runs.each(
            lambda run: derivative.forward(run, self.num_alternatives)
        )
        return Found(value, jacobian, {}, runs.group, _often(scoreless))

    def backward(self, runs: Runs, scale: Float[Array, "P"]) -> Found:
        """Reverse mode by JAX, with each parameter's weights in units of its `scale`."""
        evaluate = self._moving(runs, scale)

        def both(run):
            value, scoreless = evaluate(run)
            return value, (value, scoreless)

        (value, scoreless), jacobian = runs.jacobians(both)
        return Found(value, jacobian, {}, runs.group, _often(scoreless))

    def _moving(self, runs: Runs, scale: Float[Array, "P"]) -> Callable[[Run], tuple[Any, Any]]:
        directions = derivative.probes(runs.run, scale)
        return lambda run: derivative.backward(run, self.num_alternatives, directions)


def _often(flags: Array) -> Bool[Array, ""]:
    """True if more replicates are flagged than rounding explains. For a group, `flags` has the
    share.
    """
    return jnp.mean(flags.astype(float)) > _ROUNDED


def _scales(runs: Runs) -> Float[Array, "P"]:
    """The size of each parameter's score, from a few separate runs; zeros if a sampler has no
    `log_prob`. Their keys are constants, so a `vmap` over keys computes the scales only once.
    """
    # Scales only decide what is pruned, so any keys are unbiased that the runs themselves do not
    # use.
    keys = jax.random.split(jax.random.key(0, impl=jax.random.key_impl(runs.run.key)), _NUM_SCALES)

    def log_prob(theta, key):
        return derivative.scored(runs.run.at(theta, key), baseline(1)).log_prob

    try:
        scores = jax.vmap(jax.grad(log_prob), (None, 0))(runs.run.theta, keys)
    except NotDifferentiable:  # A sampler without `log_prob`: the scales are unknown.
        return jnp.zeros_like(ravel_pytree(runs.run.theta)[0])
    return _typical(jax.vmap(lambda score: ravel_pytree(score)[0], out_axes=-1)(scores))


def _typical(score: Float[Array, "P C"]) -> Float[Array, "P"]:
    return jnp.mean(jnp.abs(score), axis=-1)


def _linear(runs: Runs, found: Found) -> Float[Array, "F C"]:
    """The values, with the derivative `found` attached."""
    flat = ravel_pytree(runs.run.theta)[0]
    return moving(found.value, jnp.tensordot(flat, jax.lax.stop_gradient(found.jacobian), axes=1))


class Score(Estimator):
    """The result minus the mean of the other replicates, times the score of the draws. If the
    result is a sum, each term is multiplied with the score of the draws before it:
    `∂f + Σ_t (f_t − f̄_t) ∂ log P(draws up to t)`. Unbiased. Its variance grows with the number of
    draws, including those with little effect. With a single run there is no baseline.

    The score does not exist where a probability is exactly 0 or 1 and depends on theta.
    `sad.Combined` detects this.

    >>> from diffmh import sad
    >>> sad.Score()
    Score()
    """

    def find(self, runs: Runs) -> Found:
        def estimate(run):
            scored = derivative.scored(run, runs.baseline)
            return scored.value + scored.credit, scored.value

        value, jacobian = runs.jacobians(estimate)
        return Found(value, jacobian, {}, runs.group)

    def surrogate(self, runs: Runs) -> Float[Array, "F C"]:
        if not runs.is_reversible:
            return super().surrogate(runs)
        scored = runs.each(lambda run: derivative.scored(run, runs.baseline), differentiated=True)
        return moving(scored.value, scored.credit)


def score_parts(runs: Runs) -> ScoreParts:
    def both(run):
        scored = derivative.scored(run, runs.baseline)
        return jnp.append(scored.value + scored.credit, scored.log_prob), scored.value

    value, slope = runs.jacobians(both)
    return ScoreParts(value, slope[:, :-1], slope[:, -1])


class Combined(Estimator):
    """Combines alternatives and score: `A + a (G − A) + Σ_q b_q S_q`, where A is the estimate by
    alternatives, G the estimate by the score, and S the score itself, which has mean zero. The
    coefficients of least variance, for each parameter and result, are fitted on other replicates,
    so the combination is unbiased and no worse than either. If the score does not exist or
    contradicts the alternatives, it is A alone.

    With fewer than 32 replicates it is the same as `Alternatives`. With 512 or more, `.run` tries
    all estimators on the first 256th of the replicates (at least 32) and drops, for the others,
    those that are not worth their time.

    >>> from diffmh import sad
    >>> sad.Combined(2)
    Combined(num_alternatives=2)
    """

    num_alternatives: Checked[int] = eqx.field(static=True, default=1)

    def __check_init__(self):
        validate.count(self.num_alternatives, "sad.Combined(num_alternatives=...)")

    def find(self, runs: Runs) -> Found:
        by_alternatives = Alternatives(self.num_alternatives)
        if runs.keys.shape[0] // runs.group < LEAST_REPLICATES:
            return by_alternatives.find(runs)
        parts = score_parts(runs)
        # Alternatives and scores use the same keys: only if both estimates come from the same runs
        # is their difference a control variate.
        alternatives = (
            by_alternatives.backward(runs, _typical(parts.score))
            if runs.reverse
            else by_alternatives.forward(runs)
        )
        others = {
            "alternatives": alternatives.jacobian,
            "score": parts.slope,
            "score with a fitted baseline": combine(parts, None),
        }
        # Where a probability is exactly 0 or 1 and its derivative is not 0, the score is biased. A
        # `sad.Sampler` need not tell.
        scoreless = alternatives.scoreless | _disagree(alternatives.jacobian, parts.slope)
        combined = combine(parts, alternatives.jacobian)
        trusted = jnp.where(scoreless, alternatives.jacobian, combined)
        return Found(alternatives.value, trusted, others, runs.group, scoreless)

    def surrogate(self, runs: Runs) -> Float[Array, "F C"]:
        if runs.keys.shape[0] < LEAST_REPLICATES:
            return Alternatives(self.num_alternatives).surrogate(runs)
        return super().surrogate(runs)


class Fitted(Estimator):
    """The estimate by the score, with a fitted baseline: it subtracts a multiple of the score,
    whose mean is zero, with a coefficient fitted on other replicates. `Combined` uses it if
    alternatives are not worth their time.
    """

    def find(self, runs: Runs) -> Found:
        parts = score_parts(runs)
        return Found(parts.value, combine(parts, None), {}, runs.group)


class Smooth(Estimator):
    """Each draw passes on the derivative of its mean. **Biased** unless the result is linear in
    the draws, but of much smaller variance where many draws add up.

    `.run` always shows the difference from the unbiased `Combined`, with its error.

    >>> from diffmh import sad
    >>> sad.Smooth()
    Smooth()
    """

    def find(self, runs: Runs) -> Found:
        found = self._smoothed(runs)
        unbiased = {"unbiased": Combined().find(runs).jacobian}
        return Found(found.value, found.jacobian, unbiased, runs.group)

    def surrogate(self, runs: Runs) -> Float[Array, "F C"]:
        if not runs.is_reversible:
            return _linear(runs, self._smoothed(runs.still()))
        return runs.each(derivative.smoothed, differentiated=True)

    def _smoothed(self, runs: Runs) -> Found:
        def twice(run):
            value = derivative.smoothed(run)
            return value, value

        value, jacobian = runs.jacobians(twice)
        return Found(value, jacobian, {}, runs.group)


def notes(estimator: Estimator, found: Found) -> tuple[str, ...]:
    """The lines of a report about the other estimators."""
    if isinstance(estimator, Smooth):
        difference = np.asarray(found.jacobian) - np.asarray(found.others["unbiased"])
        mean, error = _mean_and_error(difference)
        worst = int(np.argmax(np.abs(mean) / np.where(error > 0, error, np.inf)))
        shown = f"{float(mean.reshape(-1)[worst]):.4g} ± {float(error.reshape(-1)[worst]):.2g}"
        return (f"smoothed, which is biased: largest difference from the unbiased {shown}",)
    if not found.others:
        return ()
    count = found.jacobian.shape[-1]

    def size(jacobian, count):
        return math.sqrt(np.mean(np.asarray(jacobian).var(axis=-1)) / count)

    singles = count * found.group
    alone = [f"{name} alone {size(other, singles):.2g}" for name, other in found.others.items()]
    return (f"gradient error {size(found.jacobian, count):.2g}; " + ", ".join(alone),)


def disagreement(found: Found) -> tuple[str, ...]:
    """A warning if an estimate might have contained a score that does not exist."""
    if "alternatives" not in found.others or not found.scoreless:
        return ()
    return (
        "the score is left out: a draw may have a probability of exactly 0 or 1 that depends on"
        " theta, where the score does not exist. Use `estimator=sad.Alternatives()`.",
    )


def _disagree(alternatives: Float[Array, "P F C"], score: Float[Array, "P F C"]) -> Bool[Array, ""]:
    """True if the means of two estimates differ by more than rounding and six standard errors."""
    mean, error = _mean_and_error(alternatives - score)
    sure = jnp.abs(mean) > 1e-5 * jnp.max(jnp.abs(alternatives))
    return jnp.any(sure & (jnp.abs(mean) > 6 * error))


def _mean_and_error(replicates: Any) -> tuple[Any, Any]:
    count = replicates.shape[-1]
    return replicates.mean(axis=-1), replicates.std(axis=-1, ddof=1) / math.sqrt(count)
