"""Decisions: draws whose probabilities depend on θ, and the flips that carry their derivative.

A step makes any number of them, none included. `Acceptance` is Metropolis–Hastings' accept or
reject, `Bernoulli` and `Categorical` are draws from finitely many values (Gibbs). For a draw of
value i with probability p_i, flipping it to j with weight w_ij is unbiased iff the net flow into
each value is the derivative of its probability: `Σ_i p_i w_ij − p_j Σ_i w_ji = dp_j`.

An outcome of probability zero is never a candidate: its weight is exactly zero, and whatever its
derivative is, a NaN included, counts for nothing.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..base.inversion import index_from_uniform
from ..base.validate import Checked
from .values import Value

Weights = Literal["two-sided", "one-sided"]


class Decision(eqx.Module):
    """Draws that are independent given the state before: any number of them, of one kind.

    `outcome` is what was drawn. A *candidate* is a draw with another outcome. Candidates are
    numbered in the order of the weights that `flip_weight` returns.
    """

    outcome: Array

    @abstractmethod
    def flip_weight(self, weights: Weights) -> Float[Array, "P *C"]:
        """The weight of each candidate."""

    @abstractmethod
    def flipped_outcome(self, candidate: Int[Array, ""]) -> Array:
        """The outcome with one draw flipped, as the candidate has it."""

    @abstractmethod
    def score(self) -> Float[Array, "P"]:
        """`∂ log P(outcome)/∂θ`, all draws added up."""

    def flip_rate(self) -> Float[Array, "*C"]:
        """For each candidate a number c ≥ 0, known without a derivative, such that `c · ∂ log odds`
        is an unbiased weight; the odds are those of the candidate against what was drawn.
        """
        raise NotImplementedError(
            f"`{type(self).__name__}` has no `flip_rate`, which"
            " `StochasticDerivative(births=True)` needs: use births=False."
        )

    def odds_slope(self) -> Float[Array, "P *C"] | None:
        """`∂ log odds` of each candidate against what was drawn, or `None` where it is not known:
        what `Update.flip_odds` differentiates to.
        """
        return None

    @property
    def count(self) -> int:
        """The number of draws."""
        return self.outcome.size

    @property
    def num_candidates(self) -> int:
        return self.count

    @property
    def ties(self) -> Bool[Array, "*D"] | None:
        """Marks draws that have a derivative on an outcome of probability 0, which the score
        cannot see; `None` where there are none of this kind.
        """
        return None


def _checked(value: Any, uniform: Array, draw: str, num_leading: int = 0) -> Value:
    """The number behind a draw, if it is a `Value` with an entry (after its leading axes) for each
    uniform.
    """
    if not isinstance(value, Value):
        described = f"{value.dtype}{list(value.shape)}" if hasattr(value, "dtype") else repr(value)
        raise TypeError(
            f"`{draw}` needs a `Value`, as `parameters.evaluate(function, *operands)` returns it"
            f" with its derivative, got {described}."
        )
    shape = jnp.shape(value.primal)
    if len(shape) < num_leading or shape[num_leading:] != jnp.shape(uniform):
        wanted = "one uniform for each draw" if not num_leading else "values x draws"
        raise TypeError(
            f"`{draw}` needs {wanted}, got uniforms of shape {jnp.shape(uniform)} and"
            f" probabilities of shape {shape}."
        )
    return value


def accept_probability(log_ratio: Float[Array, "*D"]) -> Float[Array, "*D"]:
    """`α = min(1, r) = exp(min(0, log r))`, and 0 where `log r` is NaN."""
    return jnp.where(jnp.isnan(log_ratio), 0.0, jnp.exp(jnp.minimum(0.0, log_ratio)))


class Acceptance(Decision):
    """Accept with probability `α = min(1, r)`: `U < α`.

    Strict: a float32 uniform is exactly 0 once in 2²³ draws, and α may be 0. A NaN is never
    accepted.

    >>> import jax.numpy as jnp
    >>> from diffmh import extend
    >>> bool(extend.Acceptance.draw(jnp.array(0.4), extend.Value(jnp.log(0.5))).outcome)
    True
    """

    outcome: Bool[Array, "*D"]
    log_ratio: Value
    # s, the derivative of the log law of what was proposed, where some of it is kept apart from
    # the state's tangent: `proposals.forget`.
    proposal_score: Float[Array, "P *D"] | None = None

    @staticmethod
    def draw(
        uniform: Float[Array, "*D"],
        log_ratio: Checked[Value],
        proposal_score: Float[Array, "P *D"] | None = None,
    ) -> Acceptance:
        log_ratio = _checked(log_ratio, uniform, "Acceptance.draw(uniform, log_ratio)")
        # U lies in [0, 1), so α = 1 always accepts and, as the comparison is strict, α = 0 never
        # does.
        outcome = uniform < accept_probability(log_ratio.primal)
        return Acceptance(outcome, log_ratio, proposal_score)

    @property
    def accepted(self) -> Bool[Array, "*D"]:
        return self.outcome

    @property
    def probability(self) -> Float[Array, "*D"]:
        """The probability of an accept."""
        return accept_probability(self.log_ratio.primal)

    def flip_weight(self, weights):
        """Two-sided: `−dα` after an accept, `+dα` after a reject. One-sided, the paper's:
        `max(0, −dα)/α` after an accept and `max(0, dα)/(1 − α)` after a reject. After an accept
        `−s` on top.
        """
        # The score s of what was proposed is a weight of its own: E[s g(x')] = E[s (g(x') − g(x))],
        # as E[s] = 0 given x. After a reject the step has led to x already, and nothing is left to
        # carry.
        weight = self._own_flip_weight(weights)
        if self.proposal_score is None:
            return weight
        return jnp.where(self.outcome, weight - self.proposal_score, weight)

    def _own_flip_weight(self, weights: Weights) -> Float[Array, "P *D"]:
        log_gradient = self.log_accept_gradient
        if weights == "two-sided":
            # Net flow into the accepted state: (1 − α) dα + α dα = dα.
            gradient = accept_probability(self.log_ratio.primal)[None] * log_gradient
            return jnp.where(self.outcome, -gradient, gradient)
        # At a tie α = 1: nothing is ever rejected, so the accept carries the weight of either sign.
        tie = self.log_ratio.primal == 0
        after_accept = jnp.where(tie, -log_gradient, jnp.maximum(0.0, -log_gradient))
        return jnp.where(self.outcome, after_accept, jnp.maximum(0.0, -self.log_reject_gradient))

    def flip_rate(self):
        """`α`, half of it at an exact tie, and 0 where `log r > 0`: the two-sided weights, of which
        `∂ log r` is left out.
        """
        alpha = accept_probability(self.log_ratio.primal)
        return self._share.astype(alpha.dtype) * alpha

    def odds_slope(self):
        return jnp.where(self.outcome, -self.log_ratio.tangent, self.log_ratio.tangent)

    def flipped_outcome(self, candidate):
        return self.outcome ^ _one(candidate, self.outcome.shape)

    def score(self):
        gradient = jnp.where(self.outcome, self.log_accept_gradient, self.log_reject_gradient)
        if self.proposal_score is not None:
            gradient = gradient + self.proposal_score
        return jnp.sum(gradient, axis=tuple(range(1, gradient.ndim)))

    @property
    def ties(self):
        if self.log_ratio.tangent is None:
            return None
        moves = jnp.any(self.log_accept_gradient != 0, axis=0)
        return (self.log_ratio.primal == 0) & moves

    @property
    def log_accept_gradient(self) -> Float[Array, "P *D"]:
        """`∂ log α / ∂θ`: that of `log r` where `log r < 0`, zero where `log r > 0`, and half of
        it at an exact tie.

        The tie is what `jnp.minimum(0, log r)` differentiates to. A model whose weights are all
        zero ties at every step: with a zero there its gradient would silently be zero.
        """
        log_ratio, gradient = self.log_ratio.primal, self.log_ratio.tangent
        assert gradient is not None, "the step was taken without derivatives"
        share = self._share
        # α = 0 where the proposal lies outside the support: its log density has no derivative
        # there, and needs none.
        counts = (share > 0) & (log_ratio > -jnp.inf)
        return jnp.where(counts, share.astype(gradient.dtype)[None] * gradient, 0.0)

    @property
    def _share(self) -> Float[Array, "*D"]:
        """The share of `∂ log r` that counts."""
        log_ratio = self.log_ratio.primal
        return jnp.where(log_ratio < 0, 1.0, jnp.where(log_ratio == 0, 0.5, 0.0))

    @property
    def log_reject_gradient(self) -> Float[Array, "P *D"]:
        """`∂ log(1 − α) / ∂θ = −∂ log α / expm1(−log α)`, where α < 1."""
        odds = jnp.expm1(-jnp.minimum(0.0, self.log_ratio.primal))
        return -self.log_accept_gradient / jnp.where(odds > 0, odds, 1.0)[None]


def acceptances(decisions: Iterable[Decision]) -> tuple[int, Int[Array, ""]]:
    """The number of accept/reject decisions, and of those that accepted."""
    made = [decision for decision in decisions if isinstance(decision, Acceptance)]
    taken = sum((jnp.sum(each.outcome) for each in made), jnp.zeros((), int))
    return sum(each.outcome.size for each in made), taken


class Bernoulli(Decision):
    """True with probability `p = 1/(1 + exp(−log_odds))`: `U < p`. Flip weights `∓dp`.

    >>> import jax.numpy as jnp
    >>> from diffmh import extend
    >>> extend.Bernoulli.draw(jnp.array([0.4, 0.6]), extend.Value(jnp.zeros(2))).outcome
    Array([ True, False], dtype=bool)
    """

    outcome: Bool[Array, "*D"]
    log_odds: Value

    @staticmethod
    def draw(uniform: Float[Array, "*D"], log_odds: Checked[Value]) -> Bernoulli:
        log_odds = _checked(log_odds, uniform, "Bernoulli.draw(uniform, log_odds)")
        return Bernoulli(uniform < jax.nn.sigmoid(log_odds.primal), log_odds)

    @property
    def probability(self) -> Float[Array, "*D"]:
        """The probability of true."""
        return jax.nn.sigmoid(self.log_odds.primal)

    @property
    def _gradient(self) -> Float[Array, "P *D"]:
        """`∂ log_odds`; where p is exactly 0 or 1 it may be anything, and counts for nothing."""
        gradient = self.log_odds.tangent
        assert gradient is not None, "the step was taken without derivatives"
        return jnp.where(jnp.isinf(self.log_odds.primal), 0.0, gradient)

    def flip_weight(self, weights):
        p = jax.nn.sigmoid(self.log_odds.primal)
        # Not `1 − p`, which is 0 in float32 from log odds of 17 on.
        q = jax.nn.sigmoid(-self.log_odds.primal)
        if weights == "two-sided":
            gradient = (p * q)[None] * self._gradient
            return jnp.where(self.outcome, -gradient, gradient)
        # dp = p q dl: the flow out of true is p (q max(0, −dl)), that into it q (p max(0, dl)).
        down, up = jnp.maximum(0.0, -self._gradient), jnp.maximum(0.0, self._gradient)
        return jnp.where(self.outcome, q[None] * down, p[None] * up)

    def flip_rate(self):
        """`p (1 − p)`."""
        return jax.nn.sigmoid(self.log_odds.primal) * jax.nn.sigmoid(-self.log_odds.primal)

    def odds_slope(self):
        return jnp.where(self.outcome, -self._gradient, self._gradient)

    def flipped_outcome(self, candidate):
        return self.outcome ^ _one(candidate, self.outcome.shape)

    def score(self):
        p = jax.nn.sigmoid(self.log_odds.primal)
        gradient = (self.outcome - p)[None] * self._gradient
        return jnp.sum(gradient, axis=tuple(range(1, gradient.ndim)))


class Categorical(Decision):
    """Value j with probability `softmax(logits)_j`, by inversion of one uniform.

    `logits` have the n values as their leading axis. Flip weights `λ_j − λ_i` from i to j
    (`flow_potential`); candidate `j D + d` is draw d flipped to value j.

    >>> import jax.numpy as jnp
    >>> from diffmh import extend
    >>> extend.Categorical.draw(jnp.array([0.1, 0.9]), extend.Value(jnp.zeros((4, 2)))).outcome
    Array([0, 3], dtype=int32)
    """

    outcome: Int[Array, "*D"]
    logits: Value

    @staticmethod
    def draw(uniform: Float[Array, "*D"], logits: Checked[Value]) -> Categorical:
        logits = _checked(logits, uniform, "Categorical.draw(uniform, logits)", num_leading=1)
        cumulative = jnp.cumsum(jax.nn.softmax(logits.primal, axis=0), axis=0)
        # U < 1, so the last value is reached only where it has a stretch of its own:
        # `cumulative[-1]` may be rounded to less or more than 1. Values of probability 0 have an
        # empty stretch and are never drawn.
        below = cumulative <= (uniform * cumulative[-1])[None]
        return Categorical(jnp.sum(below, axis=0), logits)

    @property
    def num_candidates(self):
        return self.logits.primal.size

    @property
    def probabilities(self) -> Float[Array, "n *D"]:
        return jax.nn.softmax(self.logits.primal, axis=0)

    @property
    def _slope(self) -> Float[Array, "P n *D"]:
        """`d log p`, up to where p = 0."""
        p, gradient = self.probabilities, self.logits.tangent
        assert gradient is not None, "the step was taken without derivatives"
        # Before the sum: 0 · NaN at an impossible value would reach all others.
        gradient = jnp.where(p > 0, gradient, 0.0)
        return gradient - jnp.sum(p[None] * gradient, axis=1, keepdims=True)

    @property
    def _here(self) -> Bool[Array, "n *D"]:
        values = jnp.arange(self.logits.primal.shape[0])
        return values.reshape(-1, *(1,) * self.outcome.ndim) == self.outcome[None]

    def flip_weight(self, weights):
        p, slope = self.probabilities, self._slope
        at_drawn = lambda array: jnp.sum(jnp.where(self._here, array, 0.0), axis=1, keepdims=True)
        if weights == "two-sided":
            potential = flow_potential(p, p[None] * slope)
            return jnp.where(self._here | (p == 0), 0.0, potential - at_drawn(potential))
        # From values that lose probability to those that gain it, in proportion to the gain.
        gain = jnp.maximum(0.0, p[None] * slope)
        gained = jnp.sum(gain, axis=1, keepdims=True)
        share = gain / jnp.where(gained > 0, gained, 1.0)
        return jnp.where(self._here, 0.0, at_drawn(jnp.maximum(0.0, -slope)) * share)

    def flip_rate(self):
        """`p_i p_j / (p_i + p_j)` from i to j: with weights `w_ij = s_ij (dl_j − dl_i)` of the
        logits l the net flow is right iff `p_i s_ij + p_j s_ji = p_i p_j`, and these have the least
        second moment of all such.
        """
        p = self.probabilities
        drawn = jnp.sum(jnp.where(self._here, p, 0.0), axis=0, keepdims=True)
        both = drawn + p
        rate = drawn * p / jnp.where(both > 0, both, 1.0)
        return jnp.where(self._here, 0.0, rate)

    def odds_slope(self):
        slope = self._slope
        return slope - jnp.sum(jnp.where(self._here, slope, 0.0), axis=1, keepdims=True)

    def flipped_outcome(self, candidate):
        value, draw = candidate // self.count, candidate % self.count
        flipped = _one(draw, self.outcome.shape)
        return jnp.where(flipped, value.astype(self.outcome.dtype), self.outcome)

    def mean(self, values: Float[Array, "n *F"]) -> Float[Array, "*F"]:
        """The mean of one draw, `Σ_j p_j values_j` over the values that are possible."""
        p = self.probabilities.reshape(-1, *(1,) * (values.ndim - 1))
        return jnp.sum(of_possible(p, values), axis=0)

    def nearest(self, other: Categorical, uniforms: Float[Array, "2"]) -> Int[Array, ""]:
        """One draw of these probabilities that is the other's draw as often as it can be (maximal
        coupling): kept with probability `min(1, p/p_other)`, else drawn from the residual.
        """
        p, q = self.probabilities, other.probabilities
        at_drawn = lambda array: jnp.sum(jnp.where(other._here, array, 0.0), axis=0)
        # U < p/q without dividing; for a draw of probability q > 0.
        keep = uniforms[0] * at_drawn(q) < at_drawn(p)
        drawn = index_from_uniform(jnp.maximum(p - q, 0.0), uniforms[1])
        return jnp.where(keep, other.outcome, drawn.astype(other.outcome.dtype))

    def score(self):
        slope = jnp.sum(jnp.where(self._here, self._slope, 0.0), axis=1)
        return jnp.sum(slope, axis=tuple(range(1, slope.ndim)))


def of_possible(weight: Float[Array, "..."], value: Float[Array, "..."]) -> Float[Array, "..."]:
    """`weight · value`, and 0 where the weight is: there the value may be infinite or NaN."""
    return weight * jnp.where(weight != 0, value, 0.0)


def flow_potential(
    p: Float[Array, "n *D"], dp: Float[Array, "P n *D"], num_values: int | None = None
) -> Float[Array, "P n *D"]:
    """λ with `w_ij = λ_j − λ_i`: of all unbiased flips between any two values those of least second
    moment `Σ p_i w_ij²`.

    λ solves `λ_j (1 + n p_j) = dp_j + p_j Σλ` in the gauge `Σ p λ = 0`, where n is between how many
    values flips are allowed: `num_values`, or those that are possible; nothing is divided by p_j.
    """
    p = p[None]
    count = jnp.sum(p > 0, axis=1, keepdims=True) if num_values is None else num_values
    # With S = Σλ: λ_j = (dp_j + p_j S) share_j. Summed over j, S (1 − Σ p share) = Σ dp share.
    # Adding a constant to λ changes no difference λ_j − λ_i, so any gauge will do.
    share = 1 / (1 + count * p)
    left = 1 - jnp.sum(p * share, axis=1, keepdims=True)
    total = jnp.sum(dp * share, axis=1, keepdims=True) / left
    return (dp + p * total) * share


def _one(index: Int[Array, ""], shape: tuple[int, ...]) -> Bool[Array, "*D"]:
    """True at a flat index."""
    return (jnp.arange(math.prod(shape)) == index).reshape(shape)
