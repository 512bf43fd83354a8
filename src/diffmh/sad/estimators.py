"""Estimators: what is made of the runs of a program."""

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
from jaxtyping import Array, Float

from ..base import validate
from ..base.validate import Checked, NotDifferentiable
from ..core.autodiff import moving
from ..fast.chains import over_chains
from ..runs.devices import shared_evenly
from . import derivative
from .baseline import Baseline, baseline
from .combination import LEAST_REPLICATES, ScoreParts, combine
from .derivative import Run

# So many runs tell how large each parameter's score is.
_NUM_SCALES = 4


class Runs(eqx.Module):
    """The same program with a key for each of C replicates, as an estimator sees it.

    `reverse` says that there are so many parameters that JAX goes backward; then `group` replicates
    at a time have one derivative, that of their mean: nobody needs it of each. The devices of
    `mesh` share the replicates.
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
        """True if JAX goes backward through the program."""
        return self.reverse or self.run.plan.by_jax.is_reversible

    def of(self, keys: Any, group: int = 1) -> Runs:
        """The replicates of these keys."""
        return dataclasses.replace(self, keys=keys, group=group)

    def still(self) -> Runs:
        """The same replicates, through which nothing is differentiated."""
        return dataclasses.replace(self, run=self.run.at(jax.lax.stop_gradient(self.run.theta)))

    def each(self, function: Callable[[Run], Any], differentiated: bool = False) -> Any:
        """`function` of every replicate, replicates last. What JAX is to differentiate must be
        mapped by JAX: `over_chains` would lose derivatives that functions have of their own.
        """

        def one(key):
            return function(self.run.at(self.run.theta, key))

        keys = shared_evenly(self.keys, self.mesh)
        if self.reverse or differentiated:
            return jax.vmap(one, out_axes=-1)(keys)
        return over_chains(one)(keys)

    def jacobians(self, function: Callable[[Run], tuple[Float[Array, "N"], Any]]) -> Any:
        """For a function that returns a vector and something else: that, and the vector's
        derivative `(P, N, C)` by JAX, replicates (or groups of them) last.
        """

        def of_one(run):
            def at(theta):
                return function(run.at(theta))

            return derivative.jacobian(at, run.theta, self.reverse)

        def of_group(keys):
            def mean(theta):
                each = jax.vmap(lambda key: function(self.run.at(theta, key)))(keys)
                return jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), each)

            return derivative.jacobian(mean, self.run.theta, True)

        if self.group > 1:
            groups = shared_evenly(self.keys.reshape(-1, self.group), self.mesh)
            return jax.vmap(of_group, out_axes=-1)(groups)
        return self.each(of_one)


def _twice(
    function: Callable[[Run], Float[Array, "N"]],
) -> Callable[[Run], tuple[Float[Array, "N"], Float[Array, "N"]]]:
    """A function of which the value itself is differentiated."""

    def both(run):
        value = function(run)
        return value, value

    return both


class Found(eqx.Module):
    """Each replicate's value and derivative, or those of groups of `group` replicates, and what
    each estimator would have had of single ones, by name.
    """

    value: Float[Array, "F C"]
    jacobian: Float[Array, "P F C"]
    others: dict[str, Float[Array, "P F pilot"]]
    group: int = eqx.field(static=True, default=1)


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

    num_alternatives: Checked[int] = eqx.field(static=True, default=1)

    def __check_init__(self):
        validate.count(self.num_alternatives, "sad.Alternatives(num_alternatives=...)")

    def find(self, runs: Runs) -> Found:
        return self.backward(runs, _scales(runs)) if runs.reverse else self.forward(runs)

    def surrogate(self, runs: Runs) -> Float[Array, "F C"]:
        if runs.reverse:
            return runs.each(self._moving(runs, _scales(runs.still())))
        return _linear(runs, self.find(runs.still()))

    def forward(self, runs: Runs) -> Found:
        """With a tangent for each parameter."""
        value, jacobian = runs.each(lambda run: derivative.forward(run, self.num_alternatives))
        return Found(value, jacobian, {}, runs.group)

    def backward(self, runs: Runs, scale: Float[Array, "P"]) -> Found:
        """By JAX, with each parameter's weights in units of its `scale`."""
        value, jacobian = runs.jacobians(_twice(self._moving(runs, scale)))
        return Found(value, jacobian, {}, runs.group)

    def _moving(self, runs: Runs, scale: Float[Array, "P"]) -> Callable[[Run], Float[Array, "F"]]:
        directions = derivative.probes(runs.run, scale)
        return lambda run: derivative.backward(run, self.num_alternatives, directions)


def _scales(runs: Runs) -> Float[Array, "P"]:
    """How large each parameter's score is, from a few runs of its own. They are the same for all
    keys, so that whoever maps over keys pays for them once.
    """
    # Scales only decide who is pruned, so any keys are unbiased that the runs themselves do not
    # use.
    keys = jax.random.split(jax.random.key(0, impl=jax.random.key_impl(runs.run.key)), _NUM_SCALES)

    def log_prob(theta, key):
        return derivative.scored(runs.run.at(theta, key), baseline(1)).log_prob

    try:
        scores = jax.vmap(jax.grad(log_prob), (None, 0))(runs.run.theta, keys)
    except NotDifferentiable:  # A sampler without `log_prob`: nothing is known of scales.
        return jnp.zeros_like(ravel_pytree(runs.run.theta)[0])
    return _typical(jax.vmap(lambda score: ravel_pytree(score)[0], out_axes=-1)(scores))


def _typical(score: Float[Array, "P C"]) -> Float[Array, "P"]:
    return jnp.mean(jnp.abs(score), axis=-1)


def _linear(runs: Runs, found: Found) -> Float[Array, "F C"]:
    """The values, with the derivative that was found."""
    flat = ravel_pytree(runs.run.theta)[0]
    return moving(found.value, jnp.tensordot(flat, jax.lax.stop_gradient(found.jacobian), axes=1))


class Score(Estimator):
    """The score of the draws times the result, less the mean of the other replicates'; of a result
    that is a sum, each term times the score of the draws before it:
    `∂f + Σ_t (f_t − f̄_t) ∂ log P(draws up to t)`. Unbiased; its variance grows with the number of
    draws that matter little. With a single run there is no baseline.

    Draws whose probability is exactly 0 or 1 and moves have no score: `sad.Combined` sees that.

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
            return _linear(runs, self.find(runs.still()))
        scored = runs.each(lambda run: derivative.scored(run, runs.baseline), differentiated=True)
        return moving(scored.value, scored.credit)


def score_parts(runs: Runs) -> ScoreParts:
    def both(run):
        scored = derivative.scored(run, runs.baseline)
        return jnp.append(scored.value + scored.credit, scored.log_prob), scored.value

    value, slope = runs.jacobians(both)
    return ScoreParts(value, slope[:, :-1], slope[:, -1])


class Combined(Estimator):
    """Alternatives and score together: `A + a (G − A) + Σ_q b_q S_q`, where A is by alternatives, G
    by the score, and the score S itself has mean zero. The coefficients of least variance, for each
    parameter and result, are fitted on other replicates: unbiased, and no worse than either.

    With fewer than 32 replicates there is nothing to fit on: then it is `Alternatives`. With 512 or
    more, `.run` tries all on the first 256th of them (32 at least) and leaves out, for the others,
    what does not pay for its time.

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
        # Alternatives of the same keys as the scores: the two estimates belong to the same runs,
        # which is what makes their difference a control of the one by the other.
        alternatives = (
            by_alternatives.backward(runs, _typical(parts.score))
            if runs.reverse
            else by_alternatives.forward(runs)
        )
        combined = combine(parts, alternatives.jacobian)
        others = {
            "alternatives": alternatives.jacobian,
            "score": parts.slope,
            "score with a fitted baseline": combine(parts, None),
        }
        return Found(alternatives.value, combined, others, runs.group)

    def surrogate(self, runs: Runs) -> Float[Array, "F C"]:
        if runs.keys.shape[0] < LEAST_REPLICATES:
            return Alternatives(self.num_alternatives).surrogate(runs)
        return _linear(runs, self.find(runs.still()))


class Fitted(Estimator):
    """The score with a multiple of itself fitted on other replicates: what is left of `Combined`
    where alternatives do not pay.
    """

    def find(self, runs: Runs) -> Found:
        parts = score_parts(runs)
        return Found(parts.value, combine(parts, None), {}, runs.group)

    def surrogate(self, runs: Runs) -> Float[Array, "F C"]:
        return _linear(runs, self.find(runs.still()))


class Smooth(Estimator):
    """A draw passes on the derivative of its mean. **Biased** wherever the result is not linear in
    the draws; of far smaller variance where many draws add up.

    `.run` shows the difference from the unbiased `Combined`, with its error, always.

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
        value, jacobian = runs.jacobians(_twice(derivative.smoothed))
        return Found(value, jacobian, {}, runs.group)


def notes(estimator: Estimator, found: Found) -> tuple[str, ...]:
    """The lines of a report about the estimators that it did not choose."""
    if isinstance(estimator, Smooth):
        difference = np.asarray(found.jacobian) - np.asarray(found.others["unbiased"])
        mean, error = _mean_and_error(difference)
        worst = int(np.argmax(np.abs(mean) / np.where(error > 0, error, np.inf)))
        shown = f"{float(mean.reshape(-1)[worst]):.4g} ± {float(error.reshape(-1)[worst]):.2g}"
        return (f"smoothed, which is biased: less the unbiased estimate {shown}, at worst",)
    if not found.others:
        return ()
    count = found.jacobian.shape[-1]

    def size(jacobian, count):
        return math.sqrt(np.mean(np.asarray(jacobian).var(axis=-1)) / count)

    singles = count * found.group
    alone = [f"{name} alone {size(other, singles):.2g}" for name, other in found.others.items()]
    return (f"gradient error {size(found.jacobian, count):.2g}; " + ", ".join(alone),)


def disagreement(found: Found) -> tuple[str, ...]:
    """A warning where alternatives and score cannot both be right."""
    if "alternatives" not in found.others:
        return ()
    alternatives, score = (np.asarray(found.others[name]) for name in ("alternatives", "score"))
    mean, error = _mean_and_error(alternatives - score)
    sure = np.abs(mean) > 1e-5 * np.max(np.abs(alternatives))
    if not np.any(sure & (np.abs(mean) > 6 * error)):
        return ()
    return (
        "alternatives and score differ by more than their errors allow: a draw may have a"
        " probability of exactly 0 or 1 that moves, where the score has no answer. Use"
        " `estimator=sad.Alternatives()`.",
    )


def _mean_and_error(replicates: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    count = replicates.shape[-1]
    return replicates.mean(axis=-1), replicates.std(axis=-1, ddof=1) / math.sqrt(count)
