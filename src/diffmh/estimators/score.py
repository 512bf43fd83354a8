"""Algorithm 3: the score function of the decisions."""

from __future__ import annotations

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Int

from ..base import trees, validate
from ..base.sums import mean_of_others
from ..core import alternatives
from ..core.alternatives import Transition
from ..core.decisions import Decision
from ..core.estimator import Estimator


def _num_ties(at: Transition, number: int, decision: Decision) -> Int[Array, ""] | int:
    """The exact ties of a decision, if one of them, flipped, leads elsewhere: none if all lead
    where the step led anyway, as the swap of two equal replicas does.
    """
    if decision.ties is None:
        return 0
    ties = decision.ties.ravel()

    def elsewhere(candidate):
        return ~trees.equal(alternatives.flipped_in(at, number, candidate).x, at.step.after.x)

    if ties.size == 1:
        matter = elsewhere(jnp.zeros((), int))
    else:
        # Ends at the first that leads elsewhere, and at once where there are no ties.
        def look(carry):
            left, _ = carry
            first = jnp.argmax(left)
            return left & (jnp.arange(ties.size) != first), elsewhere(first)

        more = lambda carry: jnp.any(carry[0]) & ~carry[1]
        _, matter = jax.lax.while_loop(more, look, (ties, jnp.zeros((), bool)))
    return jnp.where(matter, jnp.sum(ties), 0)


class ScoreAverages(eqx.Module):
    """Averages over one chain: of `w f + ∂f/∂θ`, and of the score w."""

    weighted: Float[Array, "P F *C"]
    score: Float[Array, "P *C"]


class Memory(eqx.Module):
    """The score so far, and how many of the decisions were exact ties that depend on θ."""

    score: Float[Array, "P"]
    ties: Int[Array, ""]
    decisions: Int[Array, ""]


# Ties beyond this share of the decisions are no accident of rounding.
_MOST_TIES = 1e-4


class Score(Estimator):
    """`(1/N) Σ_t w_t (f(x_t) − b)` with `w_t = Σ_{s ≤ t} ∂ log P(decision_s)`. Unbiased; its
    variance grows with N.

    `baseline` is b: `None` (none, as the paper prints it), a number or a pytree like f's value, or
    `"other chains"`, the mean of f over the other chains, which is independent of w and so leaves
    the estimate unbiased.

    >>> import diffmh
    >>> diffmh.Score(baseline="other chains")
    Score(baseline='other chains')
    """

    baseline: Any
    differentiates_steps: ClassVar[bool] = True

    def __init__(self, baseline: Any = None):
        if isinstance(baseline, str) and baseline != "other chains":
            raise ValueError(
                "`Score(baseline=...)` must be None, a number, a pytree like f's value or 'other"
                f" chains', got {baseline!r}."
            )
        self.baseline = baseline
        if baseline is not None and not isinstance(baseline, str):
            self.baseline = validate.real_arrays(baseline, "Score(baseline=...)")
            validate.require(validate.finite(self.baseline, "Score(baseline=...)"))

    def start(self, at):
        count = jnp.zeros((), int)
        return Memory(jnp.zeros(at.parameters.size, at.parameters.dtype), count, count)

    def advance(self, memory: Memory, at):
        score, ties, decisions = memory.score, memory.ties, memory.decisions
        for number, decision in enumerate(at.step.decisions):
            score = score + decision.score().astype(score.dtype)
            ties = ties + _num_ties(at, number, decision)
            decisions = decisions + decision.count
        return Memory(score, ties, decisions), None

    def observe(self, memory: Memory, at):
        tied = memory.ties > _MOST_TIES * memory.decisions
        score = jnp.where(tied, jnp.nan, memory.score)
        return ScoreAverages(score[:, None] * at.value.primal[None, :] + at.explicit, score)

    def derivative(self, means: ScoreAverages, value):
        if self.baseline is None:
            return means.weighted
        if isinstance(self.baseline, str):
            if value.shape[-1] < 2:
                raise ValueError(
                    "`Score(baseline='other chains')` needs `num_chains` of at least 2, got 1."
                )
            baseline = mean_of_others(value)
        else:
            flat = ravel_pytree(self.baseline)[0].astype(value.dtype)
            if flat.size not in (1, value.shape[0]):
                raise ValueError(
                    f"`Score(baseline=...)` has {flat.size} numbers, and f's value has"
                    f" {value.shape[0]}: give one for all"
                    " or one for each."
                )
            baseline = jnp.broadcast_to(flat[:, None], value.shape)
        return means.weighted - means.score[:, None, :] * baseline[None]
