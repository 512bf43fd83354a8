"""Samplers: how a draw is made from a uniform, and the flips that carry the derivative of its
distribution.

For a distribution on values i with probabilities p_i, flipping a draw i to j with weight w_ij is
unbiased iff the net flow into each value is the derivative of its probability, `Σ_i p_i w_ij − p_j
Σ_i w_ji = dp_j`. Of all such weights ours have the least second moment `Σ p_i w_ij²` over the flips
that they allow: between neighbours for integers, between any two for categories. `docs/sad.md`
derives them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Int, Key

from .. import _validate
from .._lowering import compat
from .._validate import Checked, NotDifferentiable
from ..proposals.finite import index_from_uniform


@dataclasses.dataclass(frozen=True)
class Sampler:
    """A discrete distribution that a program may draw from: `sampler(key, *parameters)`. Make one
    to register your own.

    **Arguments**

    - `invert(uniform, *parameters)`: one draw from one uniform on [0, 1), non-decreasing in it
      where values are ordered. The primal and its alternatives share the uniform.
    - `flips(value, parameters, tangents)`: a list of pairs `(flipped, weight)`: other values that
      the draw might have had, and the weights of flipping to them, linear in the tangents of the
      parameters.
    - `event_ndims`: for each parameter the number of axes that one draw takes (1 for the logits of
      a categorical, else 0).
    - `log_prob(value, *parameters)`: the log probability, up to what the parameters do not change;
      `sad.Score` and `sad.Combined` need it.
    - `mean(*parameters)`: the mean; `sad.Smooth` needs it.
    - `in_range(*parameters)`: whether there is such a distribution; if not, a run's value and
      derivative are NaN. NaN among the parameters is out of range in any case.

    All functions are for one draw; arrays of parameters make arrays of draws. Values and weights of
    flips may have a leading axis, for many flips at once.

    >>> import jax, jax.numpy as jnp
    >>> from diffmh import sad
    >>> flip = lambda b, p, dp: [(~b, jnp.where(b, -dp[0], dp[0]))]
    >>> coin = sad.Sampler(lambda u, p: u < p, flip, (0,))
    >>> mean = sad.expectation(lambda p, key: coin(key, jnp.full(50, p)).mean())
    >>> round(float(jax.grad(mean)(0.3, jax.random.key(0))), 3)
    1.0
    """

    invert: Checked[Callable[..., Array]]
    flips: Checked[Callable[..., Sequence[tuple[Array, Array]]]]
    event_ndims: Checked[tuple[int, ...]]
    log_prob: Checked[Callable[..., Array]] | None = None
    mean: Checked[Callable[..., Array]] | None = None
    in_range: Checked[Callable[..., Any]] | None = None
    name: Checked[str] = "a `sad.Sampler`"

    def __post_init__(self):
        where = "sad.Sampler(invert, flips, event_ndims)"
        _validate.function(self.invert, where, "invert", "invert(uniform, *parameters) -> value")
        _validate.function(self.flips, where, "flips", "flips(value, parameters, tangents)")
        for name in ("log_prob", "mean", "in_range"):
            if getattr(self, name) is not None:
                _validate.function(getattr(self, name), where, name, f"{name}(...)")
        if not isinstance(self.event_ndims, tuple):
            raise TypeError(
                "`sad.Sampler(event_ndims=...)` must be a tuple with a number of axes for each"
                f" parameter, got {self.event_ndims!r}."
            )
        for count in self.event_ndims:
            _validate.count(count, "sad.Sampler(event_ndims=...)", least=0)
        _validate.text(self.name, "sad.Sampler(name=...)")

    def __call__(self, key: Checked[Key[Array, ""]], *parameters: ArrayLike) -> Array:
        if len(parameters) != len(self.event_ndims):
            raise TypeError(
                f"{self.name} has {len(self.event_ndims)} parameters by its `event_ndims`, got"
                f" {len(parameters)}."
            )
        arrays = [
            _validate.array_of(parameter, f"parameter {number} of {self.name}")
            for number, parameter in enumerate(parameters)
        ]
        for number, array in enumerate(arrays):
            if jnp.iscomplexobj(array):
                _validate.real_dtype(array.dtype, f"parameter {number} of {self.name}")
        shape = jnp.broadcast_shapes(
            *(a.shape[: a.ndim - n] for a, n in zip(arrays, self.event_ndims, strict=True))
        )
        arrays = [
            jnp.broadcast_to(a, (*shape, *a.shape[a.ndim - n :]))
            for a, n in zip(arrays, self.event_ndims, strict=True)
        ]
        dtype = jnp.result_type(
            float, *(a.dtype for a in arrays if jnp.issubdtype(a.dtype, jnp.floating))
        )
        return _sample(
            jax.random.uniform(_validate.typed_key(key), shape, dtype), *arrays, sampler=self
        )[0]

    def values(self, uniform: Array, *parameters: Array) -> Array:
        """Draws of the uniform's shape."""
        return self._each_draw(self.invert, uniform.ndim)(uniform, *parameters)

    def candidates(
        self, value: Array, parameters: Sequence[Array], tangents: Sequence[Array]
    ) -> tuple[Array, Array]:
        """Flipped values, shape `(C, *value.shape)`, and their weights, `(C, P, *value.shape)`."""

        def one(value, parameters, tangents):
            pairs = self.flips(value, parameters, tangents)
            many = lambda parts: jnp.concatenate([jnp.atleast_1d(part) for part in parts])
            flipped = many([jnp.asarray(flipped, value.dtype) for flipped, _ in pairs])
            return flipped, many([weight for _, weight in pairs])

        by_draw = self._each_draw(one, value.ndim, out_axes=1)
        if len(tangents[0]) == 1:
            flipped, weight = by_draw(
                value, tuple(parameters), tuple(tangent[0] for tangent in tangents)
            )
            return flipped, weight[:, None]
        by_parameter = jax.vmap(by_draw, in_axes=(None, None, 0), out_axes=(None, 1))
        return by_parameter(value, tuple(parameters), tuple(tangents))

    def num_candidates(self, drawn: Any, parameters: Sequence[Any]) -> int:
        """How many flips there are in all, for draws and parameters of these shapes."""
        struct = lambda leaf, axes: jax.ShapeDtypeStruct(leaf.shape[leaf.ndim - axes :], leaf.dtype)
        one = [
            struct(parameter, axes)
            for parameter, axes in zip(parameters, self.event_ndims, strict=True)
        ]
        pairs = jax.eval_shape(self.flips, jax.ShapeDtypeStruct((), drawn.dtype), one, one)
        return sum(math.prod(weight.shape) for _, weight in pairs) * math.prod(drawn.shape)

    def log_probs(self, value: Array, *parameters: Array) -> Array:
        """Of draws of the value's shape."""
        if self.log_prob is None:
            raise NotDifferentiable(
                f"{self.name} has no `log_prob`, which the score needs: give it one, or use"
                " `sad.Alternatives`."
            )
        return self._each_draw(self.log_prob, value.ndim)(value, *parameters)

    def means(self, shape: tuple[int, ...], *parameters: Array) -> Array:
        """Of draws of a shape."""
        if self.mean is None:
            raise NotDifferentiable(
                f"{self.name} has no `mean`, which `sad.Smooth` passes on: give it one, or use"
                " another estimator."
            )
        return self._each_draw(self.mean, len(shape))(*parameters)

    def in_ranges(self, *parameters: Array) -> Bool[Array, ""]:
        """Whether all draws have parameters in range."""
        known = [
            jnp.all(~jnp.isnan(parameter))
            for parameter in parameters
            if jnp.issubdtype(parameter.dtype, jnp.floating)
        ]
        if self.in_range is not None:
            draws = parameters[0].ndim - self.event_ndims[0]
            known.append(jnp.all(self._each_draw(self.in_range, draws)(*parameters)))
        return functools.reduce(jnp.logical_and, known, jnp.ones((), bool))

    @staticmethod
    def _each_draw(function, ndim, out_axes=0):
        for _ in range(ndim):
            function = jax.vmap(function, out_axes=out_axes)
        return function


def _abstract(uniform, *parameters, sampler):
    result = jax.eval_shape(
        sampler.values, *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (uniform, *parameters))
    )
    return [compat.shaped(result.shape, result.dtype)]


def refuse_plain(primals: Any, tangents: Any, **params: Any) -> Any:
    """JAX by itself would lose the derivative of what a draw decides."""
    raise NotDifferentiable(
        "JAX was asked to differentiate a draw of `diffmh.sad` by itself, by which its derivative"
        " would be lost: differentiate `sad.expectation(program)` instead of `program`."
    )


SAMPLE = "sad_sample"
# Whether the parameters of a draw are in range, in the programs of `ranges`.
VALID = "sad_valid"
_sample = compat.new_primitive(
    SAMPLE,
    lambda *operands, sampler: [sampler.values(*operands)],
    _abstract,
    jvp=refuse_plain,
)


def _up_or_down(value: Array, up: Array, down: Array) -> list[tuple[Array, Array]]:
    """Flips to the neighbours of an integer."""
    return [(value + 1, up), (value - 1, down)]


@dataclasses.dataclass(frozen=True)
class _Range:
    """Where a parameter must be, in words and as a condition on NumPy's and JAX's arrays."""

    wanted: str
    holds: Callable[[Any], Any]

    def inside(self, parameter: Array, instead: float) -> Array:
        """Beyond it something harmless: a draw must end, whatever becomes of it."""
        return jnp.where(self.holds(parameter), parameter, instead)


def _in_unit(p: Any) -> Any:
    """Probabilities that are sums and quotients of others may be rounded beyond the ends."""
    slack = 8 * jnp.finfo(p.dtype).eps
    return (p >= -slack) & (p <= 1 + slack)


# An int32 must hold the draw: of a rate up to this, and of a geometric draw whose uniform has 53
# bits, at most 53 log(2)/p.
_MOST_RATE, _LEAST_CHANCE = 2.0**30, 2.0**-25
_UNIT = _Range("in [0, 1]", _in_unit)
_COUNT = _Range("at least 0", lambda n: n >= 0)
_RATE = _Range("in [0, 2³⁰]", lambda rate: (rate >= 0) & (rate <= _MOST_RATE))
_CHANCE = _Range("in [2⁻²⁵, 1]", lambda p: (p >= _LEAST_CHANCE) & _in_unit(p))
_LOGITS = _Range(
    "below +∞, none of them NaN and not all −∞",
    lambda logits: (logits < jnp.inf).all(-1) & (logits > -jnp.inf).any(-1),
)
_WEIGHTS = _Range(
    "finite, none of them negative and not all 0",
    lambda p: ((p >= 0) & (p < jnp.inf)).all(-1) & (p > 0).any(-1),
)


def _all_in(*ranges: _Range) -> Callable[..., Any]:
    """Each parameter in its range."""

    def in_range(*parameters):
        held = [each.holds(given) for each, given in zip(ranges, parameters, strict=True)]
        return functools.reduce(operator.and_, held)

    return in_range


# Boundary between k and k+1, with δ_k = −∂F(k) the flow across it: w(k → k+1) = δ_k/(p_k + p_{k+1})
# = −w(k+1 → k).


def _bernoulli_flips(value, parameters, tangents):
    return [(~value, jnp.where(value, -tangents[0], tangents[0]))]


def _binomial_flips(value, parameters, tangents):
    n, p = parameters
    derivative, p = tangents[1], jnp.clip(p, 0.0, 1.0)
    k = value.astype(p.dtype)

    def across(k):
        """δ_k = n C(n−1, k) p^k (1−p)^(n−1−k), over p_k + p_{k+1}; zero beyond the ends."""
        inside = (k >= 0) & (k < n)
        denominator = jnp.where(inside, (k + 1) * (1 - p) + (n - k) * p, 1.0)
        return jnp.where(inside, (n - k) * (k + 1) / denominator, 0.0)

    return _up_or_down(value, across(k) * derivative, -across(k - 1) * derivative)


def _poisson_flips(value, parameters, tangents):
    rate, derivative = parameters[0], tangents[0]
    k = value.astype(rate.dtype)
    # δ_k = p_k, p_{k+1}/p_k = λ/(k+1).
    across = lambda k: (k + 1) / (k + 1 + jnp.where(k < 0, 1.0, rate))
    return _up_or_down(value, across(k) * derivative, -across(k - 1) * derivative)


def _negative_binomial_flips(value, parameters, tangents):
    r, p = parameters
    k = value.astype(p.dtype)

    def across(k):
        """δ_k = −(k+r) p_k / p, p_{k+1}/p_k = (k+r)(1−p)/(k+1); zero below 0."""
        inside = k >= 0
        denominator = jnp.where(inside, p * (k + 1 + (k + r) * (1 - p)), 1.0)
        return jnp.where(inside, -(k + r) * (k + 1) / denominator, 0.0)

    return _up_or_down(value, across(k) * tangents[1], -across(k - 1) * tangents[1])


def _geometric_flips(value, parameters, tangents):
    p = parameters[0]
    k = value.astype(p.dtype)
    # F(k) = 1 − (1−p)^k: δ_k = −k (1−p)^(k−1), p_k + p_{k+1} = (1−p)^(k−1) p (2−p).
    across = lambda k: -k / (p * (2 - p))
    return _up_or_down(value, across(k) * tangents[0], -across(k - 1) * tangents[0])


def _categorical_flips(value, parameters, tangents):
    p = jax.nn.softmax(parameters[0])
    return _between_any(value, p, p * (tangents[0] - jnp.sum(p * tangents[0])))


def _probabilities_flips(value, parameters, tangents):
    """Of probabilities that are divided by their sum: `dp − p Σdp`."""
    total = jnp.sum(parameters[0])
    p = parameters[0] / total
    return _between_any(value, p, (tangents[0] - p * jnp.sum(tangents[0])) / total)


def _between_any(value, p, dp):
    """w_ij = λ_j − λ_i, where λ solves the flow equations: `λ_j (1 + n p_j) = dp_j + p_j Σλ` in
    the gauge `Σ p λ = 0`.
    """
    n = p.size
    share = 1 / (1 + n * p)
    total = jnp.sum(dp * share) / (1 - jnp.sum(p * share))
    potential = (dp + p * total) * share
    others = jnp.arange(n)
    return [(others, jnp.where(others == value, 0.0, potential - potential[value]))]


def _poisson_flips_up(value, parameters, tangents):
    """`d E[g] = dλ E[g(k + 1) − g(k)]`: the same weight for all, so a linear g has no variance."""
    return [(value + 1, tangents[0])]


def _geometric_flips_up(value, parameters, tangents):
    """δ_k / p_k."""
    p = parameters[0]
    return [(value + 1, -value.astype(p.dtype) / p * tangents[0])]


def _walk(uniform: Array, mean: Array, variance: Array, ratio: Callable[[Array], Array]) -> Array:
    """The smallest k with `F(k) > U`, by adding up masses from six standard deviations below the
    mean; `ratio(k)` is p_{k+1}/p_k.

    What lies below weighs e⁻¹⁸ at most; beyond the mode, masses that no longer change the sum end
    it. The first mass counts as 1 and the sum is normalised: in float32, masses of large counts are
    known to few digits, but their ratios to all.
    """
    start = jnp.maximum(jnp.floor(mean - 6 * jnp.sqrt(variance)), 0.0).astype(jnp.int32)
    first = (start, jnp.ones_like(mean), jnp.ones_like(mean))
    # Counted in integers: in float32, 2²⁴ + 1 is 2²⁴, and the walk would not end.
    ratio_at = lambda k: ratio(k.astype(mean.dtype))

    def step(state):
        k, mass, total = state
        mass = mass * ratio_at(k)
        return k + 1, mass, total + mass

    def matters(state):
        k, mass, total = state
        ahead = ratio_at(k)
        return (ahead >= 1) | (mass * ahead > 1e-3 * jnp.finfo(total.dtype).eps * total)

    _, _, total = jax.lax.while_loop(matters, step, first)
    return jax.lax.while_loop(
        lambda state: (uniform * total >= state[2]) & matters(state), step, first
    )[0]


def _invert_binomial(uniform, n, p):
    p, size = jnp.clip(_UNIT.inside(p, 0.0), 0.0, 1.0), jnp.maximum(n, 0).astype(p.dtype)
    ratio = lambda k: jnp.where(
        k < size, (size - k) * p / ((k + 1) * jnp.where(p < 1, 1 - p, 1.0)), 0.0
    )
    return _walk(uniform, size * p, size * p * (1 - p), ratio).astype(n.dtype)


def _invert_poisson(uniform, rate):
    rate = _RATE.inside(rate, 0.0)
    return _walk(uniform, rate, rate, lambda k: rate / (k + 1)).astype(jnp.int32)


def _invert_geometric(uniform, p):
    # F(k) = 1 − (1−p)^k > U  iff  k > log(1−U)/log(1−p).
    p = _CHANCE.inside(p, 1.0)
    some = p < 1
    failures = jnp.floor(jnp.log1p(-uniform) / jnp.log1p(-jnp.where(some, p, 0.5)))
    return jnp.where(some, failures, 0.0).astype(jnp.int32) + 1


def _invert_negative_binomial(uniform, r, p):
    some = _failures_fit(r, p)
    p, size = jnp.where(some, jnp.minimum(p, 1.0), 1.0), jnp.where(some, r, 0).astype(p.dtype)
    mean = size * (1 - p) / p
    ratio = lambda k: (k + size) * (1 - p) / (k + 1)
    return _walk(uniform, mean, mean / p, ratio).astype(jnp.int32)


def _failures_fit(r, p):
    """Whether the parameters of a negative binomial are in range, and an int32 holds the draw: 40
    standard deviations above the mean a geometric draw is beyond what a uniform of 53 bits reaches.
    """
    mean = r * (1 - p) / jnp.maximum(p, _LEAST_CHANCE)
    most = mean + 40 * jnp.sqrt(jnp.maximum(mean, 0) / jnp.maximum(p, _LEAST_CHANCE))
    return _COUNT.holds(r) & _CHANCE.holds(p) & (most < 2.0**31)


def _invert_categorical(uniform, logits):
    return jnp.minimum(index_from_uniform(jax.nn.softmax(logits), uniform), logits.size - 1).astype(
        jnp.int32
    )


def _invert_probabilities(uniform, probabilities):
    p = probabilities / jnp.sum(probabilities)
    return jnp.minimum(index_from_uniform(p, uniform), p.size - 1).astype(jnp.int32)


def _invert_uniform_int(high_bits, low, high, low_bits):
    """`low + ⌊U (high − low)⌋`, where `high_bits` and `low_bits` are the binary digits of U: twice
    as many as the integers have, so that all of them are as probable to that many digits.
    """
    start = low.astype(high_bits.dtype)
    size = high.astype(high_bits.dtype) - start
    carried = high_bits * size + _high_product(low_bits, size)
    whole = _high_product(high_bits, size) + (carried < high_bits * size)
    return (start + whole).astype(low.dtype)


def _high_product(a: Array, b: Array) -> Array:
    """The upper half of the digits of `a b`, which has twice as many as unsigned a and b."""
    half = jnp.iinfo(a.dtype).bits // 2
    apart = lambda x: (x >> half, x & ((1 << half) - 1))
    (a_high, a_low), (b_high, b_low) = apart(a), apart(b)
    middle = a_high * b_low + ((a_low * b_low) >> half)
    other = a_low * b_high + (middle & ((1 << half) - 1))
    return a_high * b_high + (middle >> half) + (other >> half)


def _log_powers(successes: Array, failures: Array, p: Array) -> Array:
    """`log p^a (1 − p)^b`."""
    return _times_log(successes, p) + _times_log(failures, 1 - p)


def _times_log(count: Array, x: Array) -> Array:
    """`n log x`, 0 with derivative 0 where n is."""
    some = count > 0
    return jnp.where(some, count.astype(x.dtype) * jnp.log(jnp.where(some, x, 1.0)), 0.0)


def _sum_of(p: Array) -> Array:
    return jnp.sum(jnp.arange(p.size) * p)


_UNIFORM_INT = Sampler(
    _invert_uniform_int,
    lambda value, parameters, tangents: [(value, jnp.zeros_like(tangents[0]))],
    (0, 0, 0),
    lambda value, low, high, bits: -jnp.log(high.astype(float) - low.astype(float)),
    lambda low, high, bits: (low.astype(float) + high.astype(float) - 1) / 2,
    lambda low, high, bits: low < high,
    "`sad.uniform_int`",
)
_BERNOULLI = Sampler(
    lambda uniform, p: uniform < p,
    _bernoulli_flips,
    (0,),
    lambda value, p: jnp.log(jnp.clip(jnp.where(value, p, 1 - p), 0.0, 1.0)),
    lambda p: p,
    _all_in(_UNIT),
    "`sad.bernoulli`",
)
_BINOMIAL = Sampler(
    _invert_binomial,
    _binomial_flips,
    (0, 0),
    lambda k, n, p: _log_powers(k, n - k, jnp.clip(p, 0.0, 1.0)),
    lambda n, p: n * p,
    _all_in(_COUNT, _UNIT),
    "`sad.binomial`",
)
_POISSON = Sampler(
    _invert_poisson,
    _poisson_flips,
    (0,),
    lambda k, rate: _times_log(k, rate) - rate,
    lambda rate: rate,
    _all_in(_RATE),
    "`sad.poisson`",
)
_POISSON_UP = dataclasses.replace(_POISSON, flips=_poisson_flips_up)
_NEGATIVE_BINOMIAL = Sampler(
    _invert_negative_binomial,
    _negative_binomial_flips,
    (0, 0),
    lambda k, r, p: _log_powers(r, k, p),
    lambda r, p: r * (1 - p) / p,
    _failures_fit,
    "`sad.negative_binomial`",
)
_GEOMETRIC = Sampler(
    _invert_geometric,
    _geometric_flips,
    (0,),
    lambda k, p: _log_powers(jnp.ones_like(k), k - 1, p),
    lambda p: 1 / p,
    _all_in(_CHANCE),
    "`sad.geometric`",
)
_GEOMETRIC_UP = dataclasses.replace(_GEOMETRIC, flips=_geometric_flips_up)
_CATEGORICAL = Sampler(
    _invert_categorical,
    _categorical_flips,
    (1,),
    lambda value, logits: jax.nn.log_softmax(logits)[value],
    lambda logits: _sum_of(jax.nn.softmax(logits)),
    _all_in(_LOGITS),
    "`sad.categorical`",
)
_PROBABILITIES = Sampler(
    _invert_probabilities,
    _probabilities_flips,
    (1,),
    lambda value, p: jnp.log(p[value]) - jnp.log(jnp.sum(p)),
    lambda p: _sum_of(p) / jnp.sum(p),
    _all_in(_WEIGHTS),
    "`sad.categorical`",
)


def bernoulli(
    key: Checked[Key[Array, ""]], p: Checked[Float[ArrayLike, "..."]]
) -> Bool[Array, "..."]:
    """True with probability `p`; an array of `p` makes that many independent draws.

    Flip weights `−dp` from True and `+dp` from False.

    **Refused**: `p` outside of [0, 1]. As for all samplers, a parameter out of range that is known
    only when a compiled program runs makes the value and the derivative of that run NaN.

    >>> import jax
    >>> from diffmh import sad
    >>> bool(sad.bernoulli(jax.random.key(0), 1.0))
    True
    """
    return _BERNOULLI(key, _real(p, "bernoulli", "p", _UNIT))


def categorical(
    key: Checked[Key[Array, ""]],
    logits: Checked[Float[ArrayLike, "... n"]] | None = None,
    *,
    probs: Checked[Float[ArrayLike, "... n"]] | None = None,
) -> Int[Array, "..."]:
    """An index with probability `softmax(logits)`, or in proportion to `probs`, over the last axis.

    Flip weights `λ_j − λ_i`, of least second moment among flips between any two categories.
    `probs` may be zero, and are divided by their sum; logits may be −∞.

    **Refused**: both or none of `logits` and `probs`; no categories; logits that are NaN or +∞,
    negative `probs`, and those that leave no category.

    >>> import jax, jax.numpy as jnp
    >>> from diffmh import sad
    >>> sad.categorical(jax.random.key(0), jnp.zeros((4, 3))).shape
    (4,)
    >>> int(sad.categorical(jax.random.key(0), probs=jnp.array([0.0, 0.7, 0.0])))
    1
    """
    if (logits is None) == (probs is None):
        given = "both" if logits is not None else "neither"
        raise TypeError(f"`sad.categorical` takes `logits` or `probs=...`, got {given}.")
    name, given, range_ = (
        ("logits", logits, _LOGITS) if probs is None else ("probs", probs, _WEIGHTS)
    )
    array = _real(given, "categorical", name)
    if array.ndim == 0 or array.shape[-1] == 0:
        raise ValueError(
            f"`sad.categorical({name}=...)` needs a last axis of categories, got {array.shape}."
        )
    _refuse(array, "categorical", name, range_)
    return (_CATEGORICAL if probs is None else _PROBABILITIES)(key, array)


def uniform_int(
    key: Checked[Key[Array, ""]],
    low: Checked[Int[ArrayLike, "..."]],
    high: Checked[Int[ArrayLike, "..."]],
) -> Int[Array, "..."]:
    """An integer `low ≤ x < high`, each with the same probability.

    Its bounds may be draws: an alternative has bounds of its own and draws by the same random bits.
    There is no derivative with respect to integers, so nothing is flipped here.

    **Refused**: bounds that are not integers; no integer between them.

    >>> import jax
    >>> from diffmh import sad
    >>> int(sad.uniform_int(jax.random.key(0), 3, 4))
    3
    """
    low, high = _integer(low, "uniform_int", "low"), _integer(high, "uniform_int", "high")
    if _validate.concrete(low, high) and not np.all(np.asarray(low) < np.asarray(high)):
        raise ValueError(
            f"`sad.uniform_int(low=..., high=...)`: `high` must be above `low`, got {low} and"
            f" {high}."
        )
    shape = jnp.broadcast_shapes(low.shape, high.shape)
    dtype = jnp.promote_types(low.dtype, high.dtype)
    wide = jnp.uint64 if jnp.iinfo(dtype).bits > 32 else jnp.uint32
    bits = jax.random.bits(_validate.typed_key(key), (2, *shape), wide)
    low, high = (jnp.broadcast_to(bound.astype(dtype), shape) for bound in (low, high))
    return _sample(bits[0], low, high, bits[1], sampler=_UNIFORM_INT)[0]


def negative_binomial(
    key: Checked[Key[Array, ""]],
    r: Checked[Int[ArrayLike, "..."]],
    p: Checked[Float[ArrayLike, "..."]],
) -> Int[Array, "..."]:
    """The failures before the `r`-th success, trials of probability `p`.

    Flip weights `∓ dp (k+r)(k+1) / (p (k+1+(k+r)(1−p)))` between k and k+1.

    **Refused**: a negative `r`; `p` outside of (0, 1], or so small that the draw may be beyond
    2³¹.

    >>> import jax
    >>> from diffmh import sad
    >>> int(sad.negative_binomial(jax.random.key(0), 2, 1.0))
    0
    """
    r = _integer(r, "negative_binomial", "r", _COUNT)
    return _NEGATIVE_BINOMIAL(key, r, _real(p, "negative_binomial", "p", _CHANCE))


def multinomial(
    key: Checked[Key[Array, ""]],
    n: Checked[Int[ArrayLike, "..."]],
    probs: Checked[Float[ArrayLike, "... c"]],
) -> Int[Array, "... c"]:
    """How often each category comes in `n` trials: binomial draws, category by category, of those
    that are left. `probs` are divided by their sum.

    **Refused**: a negative `n`; negative `probs`, and those that leave no category.

    >>> import jax, jax.numpy as jnp
    >>> from diffmh import sad
    >>> sad.multinomial(jax.random.key(0), 5, jnp.array([0.0, 1.0, 0.0]))
    Array([0, 5, 0], dtype=int32)
    """
    p = _real(probs, "multinomial", "probs")
    if p.ndim == 0 or p.shape[-1] == 0:
        raise ValueError(
            f"`sad.multinomial(probs=...)` needs a last axis of categories, got {p.shape}."
        )
    _refuse(p, "multinomial", "probs", _WEIGHTS)
    n = _integer(n, "multinomial", "n", _COUNT)
    if n.ndim >= p.ndim:
        raise ValueError(
            f"`sad.multinomial(n=...)` of shape {n.shape} does not fit {p.shape[:-1]}."
        )
    rest = jnp.flip(jnp.cumsum(jnp.flip(p, -1), -1), -1)
    # Where nothing is left nothing is drawn, whatever the share.
    some = jax.lax.stop_gradient(rest) > 0
    share = jnp.where(some, p / jnp.where(some, rest, 1.0), 0.0)
    # Of probabilities out of range no draw is in range.
    left = jnp.where(_WEIGHTS.holds(jax.lax.stop_gradient(p)), n.astype(jnp.int32), -1)
    count = max(p.shape[-1] - 1, 1)
    keys = jax.random.split(_validate.typed_key(key), p.shape[-1])

    def take(left, inputs):
        key, share = inputs
        count = binomial(key, left, share)
        return left - count, count

    inputs = (keys[:count], jnp.moveaxis(share, -1, 0)[:count])
    left, counts = jax.lax.scan(take, left, inputs)
    counts = jnp.concatenate([counts, left[None]])[: p.shape[-1]]
    return jnp.moveaxis(counts, 0, -1)


def binomial(
    key: Checked[Key[Array, ""]],
    n: Checked[Int[ArrayLike, "..."]],
    p: Checked[Float[ArrayLike, "..."]],
) -> Int[Array, "..."]:
    """The number of successes in `n` trials of probability `p`.

    Flip weights `± dp (n−k)(k+1) / ((k+1)(1−p) + (n−k)p)` between k and k+1.

    **Refused**: a negative `n`; `p` outside of [0, 1].

    >>> import jax
    >>> from diffmh import sad
    >>> int(sad.binomial(jax.random.key(0), 5, 1.0))
    5
    """
    n = _integer(n, "binomial", "n", _COUNT)
    return _BINOMIAL(key, n, _real(p, "binomial", "p", _UNIT))


def poisson(
    key: Checked[Key[Array, ""]],
    rate: Checked[Float[ArrayLike, "..."]],
    *,
    flips: Checked[str] = "two-sided",
) -> Int[Array, "..."]:
    """A Poisson draw of mean `rate`.

    Flip weights `± dλ (k+1)/(k+1+λ)` between k and k+1, or with `flips="one-sided"` `dλ` from k to
    k+1 alone: no variance on what is linear in the draw, more on what is not.

    **Refused**: a rate below 0 or beyond 2³⁰, of which an int32 might not hold the draw.

    >>> import jax
    >>> from diffmh import sad
    >>> int(sad.poisson(jax.random.key(0), 0.0))
    0
    """
    sampler = _flips(flips, "poisson", _POISSON, _POISSON_UP)
    return sampler(key, _real(rate, "poisson", "rate", _RATE))


def geometric(
    key: Checked[Key[Array, ""]],
    p: Checked[Float[ArrayLike, "..."]],
    *,
    flips: Checked[str] = "two-sided",
) -> Int[Array, "..."]:
    """The number of trials up to the first success, 1, 2, …, as `jax.random.geometric`.

    Flip weights `∓ dp k / (p(2−p))` between k and k+1, or with `flips="one-sided"` `−dp k / p` from
    k to k+1 alone, of a smaller variance on what is linear in the draw.

    **Refused**: `p` outside of (0, 1], and below 2⁻²⁵: an int32 might not hold the draw.

    >>> import jax
    >>> from diffmh import sad
    >>> int(sad.geometric(jax.random.key(0), 1.0))
    1
    """
    sampler = _flips(flips, "geometric", _GEOMETRIC, _GEOMETRIC_UP)
    return sampler(key, _real(p, "geometric", "p", _CHANCE))


def _flips(flips: str, where: str, two_sided: Sampler, one_sided: Sampler) -> Sampler:
    samplers = {"two-sided": two_sided, "one-sided": one_sided}
    return samplers[_validate.choice(flips, f"sad.{where}(flips=...)", samplers)]


def _real(parameter: Any, where: str, name: str, range_: _Range | None = None) -> Array:
    what = f"`sad.{where}({name}=...)`"
    if isinstance(parameter, int) and not isinstance(parameter, bool):
        parameter = float(parameter)
    array = _validate.array_of(parameter, what)
    _validate.real_dtype(array.dtype, what)
    return _refuse(array, where, name, range_)


def _integer(parameter: Any, where: str, name: str, range_: _Range | None = None) -> Array:
    array = _validate.array_of(parameter, f"`sad.{where}({name}=...)`")
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"`sad.{where}({name}=...)` must be an integer, got {array.dtype}.")
    return _refuse(array, where, name, range_)


def _refuse(array: Array, where: str, name: str, range_: _Range | None) -> Array:
    """The array, if it is in range as far as can be seen."""
    if range_ is None or not _validate.concrete(array):
        return array
    known = np.asarray(array)
    if not np.all(range_.holds(known)):
        raise ValueError(f"`sad.{where}({name}=...)` must be {range_.wanted}, got {known}.")
    return array
