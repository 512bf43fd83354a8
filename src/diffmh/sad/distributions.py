"""Distributions: how a draw is made from a uniform, and the flips that carry the derivative of its
probabilities.

Let a distribution have probabilities p_i. Flipping a draw i to j with weight w_ij is unbiased iff
the net flow into each value is the derivative of its probability:
`Σ_i p_i w_ij − p_j Σ_i w_ji = dp_j`. The weights here have the least second moment `Σ p_i w_ij²`
among the allowed flips: between neighbours for integers, between any two values for categories.
`docs/sad.md` derives them.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ..core.decisions import flow_potential
from ..proposals.finite import index_from_uniform
from .draw import Sampler


@dataclasses.dataclass(frozen=True)
class Range:
    """The range of a parameter, as text and as a condition on NumPy and JAX arrays."""

    wanted: str
    holds: Callable[[Any], Any]

    def inside(self, parameter: Array, instead: float) -> Array:
        """The parameter, with values out of range replaced by `instead`, so that the draw ends."""
        return jnp.where(self.holds(parameter), parameter, instead)


def _in_unit(p: Any) -> Any:
    """True in [0, 1], with a margin for the rounding of sums and quotients of probabilities."""
    slack = 8 * jnp.finfo(p.dtype).eps
    return (p >= -slack) & (p <= 1 + slack)


# The draw must fit an int32. A rate up to this does, and so does a geometric draw from a uniform of
# 53 bits, which is at most 53 log(2)/p.
_MOST_RATE, _LEAST_CHANCE = 2.0**30, 2.0**-25
UNIT = Range("in [0, 1]", _in_unit)
COUNT = Range("at least 0", lambda n: n >= 0)


def _is_rate(rate: Any) -> Any:
    return (rate >= 0) & (rate <= _MOST_RATE)


def _is_chance(p: Any) -> Any:
    return (p >= _LEAST_CHANCE) & _in_unit(p)


def _are_logits(logits: Any) -> Any:
    return (logits < jnp.inf).all(-1) & (logits > -jnp.inf).any(-1)


def _are_weights(p: Any) -> Any:
    return ((p >= 0) & (p < jnp.inf)).all(-1) & (p > 0).any(-1)


RATE = Range("in [0, 2³⁰]", _is_rate)
CHANCE = Range("in [2⁻²⁵, 1]", _is_chance)
LOGITS = Range("below +∞, none of them NaN and not all −∞", _are_logits)
WEIGHTS = Range("finite, none of them negative and not all 0", _are_weights)


def _all_in(*ranges: Range) -> Callable[..., Any]:
    """True if each parameter is in its range."""

    def in_range(*parameters):
        held = [each.holds(given) for each, given in zip(ranges, parameters, strict=True)]
        return functools.reduce(operator.and_, held)

    return in_range


def _chance_has_score(p: Any, dp: Any) -> Any:
    """True if neither outcome has probability 0 and a derivative that is not."""
    return ((p > 0) & (p < 1)) | (dp == 0)


def _bernoulli_has_score(parameters, tangents):
    return _chance_has_score(parameters[0], tangents[0])


def _binomial_has_score(parameters, tangents):
    return (parameters[0] == 0) | _chance_has_score(parameters[1], tangents[1])


def _poisson_has_score(parameters, tangents):
    return (parameters[0] > 0) | (tangents[0] == 0)


def _geometric_has_score(parameters, tangents):
    return (parameters[0] < 1) | (tangents[0] == 0)


def _negative_binomial_has_score(parameters, tangents):
    return (parameters[0] == 0) | (parameters[1] < 1) | (tangents[1] == 0)


def _probabilities_have_score(parameters, tangents):
    return jnp.all((parameters[0] > 0) | (tangents[0] == 0))


def _to_neighbours(value: Array, across: Callable[[Array], Array], derivative: Array) -> Any:
    """Flips of an integer k to k + 1 and k − 1. `across(k)`, times the parameter's derivative, is
    δ_k/(p_k + p_{k+1}) = w(k → k+1) = −w(k+1 → k), where δ_k = −∂F(k) is the flow across the
    boundary between k and k + 1.
    """
    # The flow across each boundary must be δ_k = p_k w(k → k+1) − p_{k+1} w(k+1 → k). The second
    # moment is least if both weights have the same size, δ_k/(p_k + p_{k+1}).
    k = value.astype(derivative.dtype)
    return [(value + 1, across(k) * derivative), (value - 1, -across(k - 1) * derivative)]


def _bernoulli_flips(value, parameters, tangents):
    return [(~value, jnp.where(value, -tangents[0], tangents[0]))]


def _binomial_flips(value, parameters, tangents):
    n, p = parameters
    p = jnp.clip(p, 0.0, 1.0)

    def across(k):
        """δ_k = n C(n−1, k) p^k (1−p)^(n−1−k), over p_k + p_{k+1}; zero beyond the ends."""
        inside = (k >= 0) & (k < n)
        denominator = jnp.where(inside, (k + 1) * (1 - p) + (n - k) * p, 1.0)
        return jnp.where(inside, (n - k) * (k + 1) / denominator, 0.0)

    return _to_neighbours(value, across, tangents[1])


def _poisson_flips(value, parameters, tangents):
    def across(k):
        """δ_k = p_k, p_{k+1}/p_k = λ/(k+1)."""
        return (k + 1) / (k + 1 + jnp.where(k < 0, 1.0, parameters[0]))

    return _to_neighbours(value, across, tangents[0])


def _negative_binomial_flips(value, parameters, tangents):
    r, p = parameters

    def across(k):
        """δ_k = −(k+r) p_k / p, p_{k+1}/p_k = (k+r)(1−p)/(k+1); zero below 0."""
        inside = k >= 0
        denominator = jnp.where(inside, p * (k + 1 + (k + r) * (1 - p)), 1.0)
        return jnp.where(inside, -(k + r) * (k + 1) / denominator, 0.0)

    return _to_neighbours(value, across, tangents[1])


def _geometric_flips(value, parameters, tangents):
    p = parameters[0]

    def across(k):
        """F(k) = 1 − (1−p)^k: δ_k = −k (1−p)^(k−1), p_k + p_{k+1} = (1−p)^(k−1) p (2−p)."""
        return -k / (p * (2 - p))

    return _to_neighbours(value, across, tangents[0])


def _categorical_flips(value, parameters, tangents):
    p = jax.nn.softmax(parameters[0])
    return _between_any(value, p, p * (tangents[0] - jnp.sum(p * tangents[0])))


def _probabilities_flips(value, parameters, tangents):
    """The flips for probabilities that are divided by their sum: `dp − p Σdp`."""
    total = jnp.sum(parameters[0])
    p = parameters[0] / total
    return _between_any(value, p, (tangents[0] - p * jnp.sum(tangents[0])) / total)


def _between_any(value, p, dp):
    """Flips `w_ij = λ_j − λ_i`, including flips to categories whose probability is still 0."""
    potential = flow_potential(p, dp[None], p.size)[0]
    others = jnp.arange(p.size)
    return [(others, jnp.where(others == value, 0.0, potential - potential[value]))]


def _poisson_flips_up(value, parameters, tangents):
    """`d E[g] = dλ E[g(k + 1) − g(k)]`: the same weight for all, so a linear g has no variance."""
    return [(value + 1, tangents[0])]


def _geometric_flips_up(value, parameters, tangents):
    """δ_k / p_k."""
    p = parameters[0]
    return [(value + 1, -value.astype(p.dtype) / p * tangents[0])]


def _walk(uniform: Array, mean: Array, variance: Array, ratio: Callable[[Array], Array]) -> Array:
    """The smallest k with `F(k) > U`. Masses are summed from six standard deviations below the
    mean; `ratio(k)` is p_{k+1}/p_k.

    The mass below is at most e⁻¹⁸. Beyond the mode, the sum ends when masses no longer change it.
    The first mass counts as 1 and the sum is normalised: in float32 the masses of large counts have
    few correct digits, but their ratios have all.
    """
    # Non-decreasing in the uniform, as `Sampler.invert` must be, because sums of masses are.
    start = jnp.maximum(jnp.floor(mean - 6 * jnp.sqrt(variance)), 0.0).astype(jnp.int32)
    first = (start, jnp.ones_like(mean), jnp.ones_like(mean))

    # k is an integer: in float32, 2²⁴ + 1 is 2²⁴, and the loop would not end.
    def ratio_at(k):
        return ratio(k.astype(mean.dtype))

    def step(state):
        k, mass, total = state
        mass = mass * ratio_at(k)
        return k + 1, mass, total + mass

    def matters(state):
        k, mass, total = state
        ahead = ratio_at(k)
        return (ahead >= 1) | (mass * ahead > 1e-3 * jnp.finfo(total.dtype).eps * total)

    _, _, total = jax.lax.while_loop(matters, step, first)

    def is_below(state):
        return (uniform * total >= state[2]) & matters(state)

    return jax.lax.while_loop(is_below, step, first)[0]


def _invert_binomial(uniform, n, p):
    p, size = jnp.clip(UNIT.inside(p, 0.0), 0.0, 1.0), jnp.maximum(n, 0).astype(p.dtype)

    def ratio(k):
        """p_{k+1}/p_k, which is 0 at k = n, so no draw exceeds n."""
        failure = jnp.where(p < 1, 1 - p, 1.0)
        return jnp.where(k < size, (size - k) * p / ((k + 1) * failure), 0.0)

    return _walk(uniform, size * p, size * p * (1 - p), ratio).astype(n.dtype)


def _invert_poisson(uniform, rate):
    rate = RATE.inside(rate, 0.0)
    return _walk(uniform, rate, rate, lambda k: rate / (k + 1)).astype(jnp.int32)


def _invert_geometric(uniform, p):
    # F(k) = 1 − (1−p)^k > U  iff  k > log(1−U)/log(1−p).
    p = CHANCE.inside(p, 1.0)
    some = p < 1
    failures = jnp.floor(jnp.log1p(-uniform) / jnp.log1p(-jnp.where(some, p, 0.5)))
    return jnp.where(some, failures, 0.0).astype(jnp.int32) + 1


def _invert_negative_binomial(uniform, r, p):
    some = _failures_fit(r, p)
    p, size = jnp.where(some, jnp.minimum(p, 1.0), 1.0), jnp.where(some, r, 0).astype(p.dtype)
    mean = size * (1 - p) / p

    def ratio(k):
        return (k + size) * (1 - p) / (k + 1)

    return _walk(uniform, mean, mean / p, ratio).astype(jnp.int32)


def _failures_fit(r, p):
    """True if the parameters of a negative binomial are in range and the draw fits an int32: 40
    standard deviations above the mean are more than a uniform of 53 bits can reach.
    """
    mean = r * (1 - p) / jnp.maximum(p, _LEAST_CHANCE)
    most = mean + 40 * jnp.sqrt(jnp.maximum(mean, 0) / jnp.maximum(p, _LEAST_CHANCE))
    return COUNT.holds(r) & CHANCE.holds(p) & (most < 2.0**31)


def _invert_categorical(uniform, logits):
    return _invert_probabilities(uniform, jax.nn.softmax(logits), normalised=True)


def _invert_probabilities(uniform, probabilities, normalised=False):
    p = probabilities if normalised else probabilities / jnp.sum(probabilities)
    return jnp.minimum(index_from_uniform(p, uniform), p.size - 1).astype(jnp.int32)


def _invert_uniform_int(high_bits, low, high, low_bits):
    """`low + ⌊U (high − low)⌋`. `high_bits` and `low_bits` are the binary digits of U, twice as
    many as the integers have, so that the probabilities are equal to that many digits.
    """
    start = low.astype(high_bits.dtype)
    size = high.astype(high_bits.dtype) - start
    # (h 2^b + l) n / 2^(2b), with b binary digits each: the high half of h n, and a carry from its
    # low half plus the high half of l n.
    carried = high_bits * size + _high_product(low_bits, size)
    whole = _high_product(high_bits, size) + (carried < high_bits * size)
    return (start + whole).astype(low.dtype)


def _high_product(a: Array, b: Array) -> Array:
    """The upper half of the digits of `a b`, which has twice as many digits as a and b."""
    half = jnp.iinfo(a.dtype).bits // 2
    mask = (1 << half) - 1
    a_high, a_low, b_high, b_low = a >> half, a & mask, b >> half, b & mask
    # With digits in base h = 2^half, no sum here exceeds (h−1)² + 2(h−1) = h² − 1, so no carry is
    # lost.
    middle = a_high * b_low + ((a_low * b_low) >> half)
    other = a_low * b_high + (middle & mask)
    return a_high * b_high + (middle >> half) + (other >> half)


def _log_powers(successes: Array, failures: Array, p: Array) -> Array:
    """`log p^a (1 − p)^b`."""
    return _times_log(successes, p) + _times_log(failures, 1 - p)


def _times_log(count: Array, x: Array) -> Array:
    """`n log x`; 0 with derivative 0 where n is 0."""
    some = count > 0
    return jnp.where(some, count.astype(x.dtype) * jnp.log(jnp.where(some, x, 1.0)), 0.0)


def _sum_of(p: Array) -> Array:
    return jnp.sum(jnp.arange(p.size) * p)


def _no_flips(value, parameters, tangents):
    """No flips: the bounds of a range of integers have no derivative."""
    return [(value, jnp.zeros_like(tangents[0]))]


def _uniform_log_prob(value, low, high, bits):
    return -jnp.log(high.astype(float) - low.astype(float))


def _uniform_mean(low, high, bits):
    return (low.astype(float) + high.astype(float) - 1) / 2


UNIFORM_INT = Sampler(
    _invert_uniform_int,
    _no_flips,
    (0, 0, 0),
    _uniform_log_prob,
    _uniform_mean,
    lambda low, high, bits: low < high,
    "`sad.uniform_int`",
)


def _bernoulli_log_prob(value, p):
    return jnp.log(jnp.clip(jnp.where(value, p, 1 - p), 0.0, 1.0))


BERNOULLI = Sampler(
    lambda uniform, p: uniform < p,
    _bernoulli_flips,
    (0,),
    _bernoulli_log_prob,
    lambda p: p,
    _all_in(UNIT),
    "`sad.bernoulli`",
    _bernoulli_has_score,
)
BINOMIAL = Sampler(
    _invert_binomial,
    _binomial_flips,
    (0, 0),
    lambda k, n, p: _log_powers(k, n - k, jnp.clip(p, 0.0, 1.0)),
    lambda n, p: n * p,
    _all_in(COUNT, UNIT),
    "`sad.binomial`",
    _binomial_has_score,
)
POISSON = Sampler(
    _invert_poisson,
    _poisson_flips,
    (0,),
    lambda k, rate: _times_log(k, rate) - rate,
    lambda rate: rate,
    _all_in(RATE),
    "`sad.poisson`",
    _poisson_has_score,
)
POISSON_UP = dataclasses.replace(POISSON, flips=_poisson_flips_up)
NEGATIVE_BINOMIAL = Sampler(
    _invert_negative_binomial,
    _negative_binomial_flips,
    (0, 0),
    lambda k, r, p: _log_powers(r, k, p),
    lambda r, p: r * (1 - p) / p,
    _failures_fit,
    "`sad.negative_binomial`",
    _negative_binomial_has_score,
)
GEOMETRIC = Sampler(
    _invert_geometric,
    _geometric_flips,
    (0,),
    lambda k, p: _log_powers(jnp.ones_like(k), k - 1, p),
    lambda p: 1 / p,
    _all_in(CHANCE),
    "`sad.geometric`",
    _geometric_has_score,
)
GEOMETRIC_UP = dataclasses.replace(GEOMETRIC, flips=_geometric_flips_up)
CATEGORICAL = Sampler(
    _invert_categorical,
    _categorical_flips,
    (1,),
    lambda value, logits: jax.nn.log_softmax(logits)[value],
    lambda logits: _sum_of(jax.nn.softmax(logits)),
    _all_in(LOGITS),
    "`sad.categorical`",
)
PROBABILITIES = Sampler(
    _invert_probabilities,
    _probabilities_flips,
    (1,),
    lambda value, p: jnp.log(p[value]) - jnp.log(jnp.sum(p)),
    lambda p: _sum_of(p) / jnp.sum(p),
    _all_in(WEIGHTS),
    "`sad.categorical`",
    _probabilities_have_score,
)
