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
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from .. import _validate
from .._lowering import compat
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

    Both functions are for one draw; arrays of parameters make arrays of draws.

    >>> import jax, jax.numpy as jnp
    >>> from diffmh import sad
    >>> coin = sad.Sampler(lambda u, p: u < p, lambda b, p, dp: [(~b, jnp.where(b, -dp[0], dp[0]))], (0,))
    >>> mean = sad.expectation(lambda p, key: coin(key, jnp.full(50, p)).mean())
    >>> round(float(jax.grad(mean)(0.3, jax.random.key(0))), 3)
    1.0
    """

    invert: Callable[..., Array]
    flips: Callable[..., Sequence[tuple[Array, Array]]]
    event_ndims: tuple[int, ...]

    def __call__(self, key: Key[Array, ""], *parameters: Any) -> Array:
        arrays = [jnp.asarray(parameter) for parameter in parameters]
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
            flipped = jnp.stack([jnp.asarray(flipped, value.dtype) for flipped, _ in pairs])
            return flipped, jnp.stack([weight for _, weight in pairs])

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
        return len(pairs) * math.prod(drawn.shape)

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


SAMPLE = "sad_sample"
_sample = compat.new_primitive(
    SAMPLE, lambda *operands, sampler: [sampler.values(*operands)], _abstract
)


def _up_or_down(value: Array, up: Array, down: Array) -> list[tuple[Array, Array]]:
    """Flips to the neighbours of an integer."""
    return [(value + 1, up), (value - 1, down)]


def _within(parameter: Array, tangent: Array, most: float) -> Array:
    """The tangent of a parameter that counts as the nearer end of [0, most] beyond it."""
    return jnp.where((parameter < 0) | (parameter > most), 0.0, tangent)


# Boundary between k and k+1, with δ_k = −∂F(k) the flow across it: w(k → k+1) = δ_k/(p_k + p_{k+1})
# = −w(k+1 → k).


def _bernoulli_flips(value, parameters, tangents):
    derivative = _within(parameters[0], tangents[0], 1.0)
    return [(~value, jnp.where(value, -derivative, derivative))]


def _binomial_flips(value, parameters, tangents):
    n, p = parameters
    derivative, p = _within(p, tangents[1], 1.0), jnp.clip(p, 0.0, 1.0)
    k = value.astype(p.dtype)

    def across(k):
        """δ_k = n C(n−1, k) p^k (1−p)^(n−1−k), over p_k + p_{k+1}; zero beyond the ends."""
        inside = (k >= 0) & (k < n)
        denominator = jnp.where(inside, (k + 1) * (1 - p) + (n - k) * p, 1.0)
        return jnp.where(inside, (n - k) * (k + 1) / denominator, 0.0)

    return _up_or_down(value, across(k) * derivative, -across(k - 1) * derivative)


def _poisson_flips(value, parameters, tangents):
    (rate,) = parameters
    derivative, rate = _within(rate, tangents[0], jnp.inf), jnp.maximum(rate, 0.0)
    k = value.astype(rate.dtype)
    # δ_k = p_k, p_{k+1}/p_k = λ/(k+1).
    across = lambda k: (k + 1) / (k + 1 + jnp.where(k < 0, 1.0, rate))
    return _up_or_down(value, across(k) * derivative, -across(k - 1) * derivative)


def _geometric_flips(value, parameters, tangents):
    (p,) = parameters
    k = value.astype(p.dtype)
    # F(k) = 1 − (1−p)^k: δ_k = −k (1−p)^(k−1), p_k + p_{k+1} = (1−p)^(k−1) p (2−p).
    across = lambda k: -k / (p * (2 - p))
    return _up_or_down(value, across(k) * tangents[0], -across(k - 1) * tangents[0])


def _categorical_flips(value, parameters, tangents):
    """w_ij = λ_j − λ_i, where λ solves the flow equations: `λ_j (1 + n p_j) = dp_j + p_j Σλ` in
    the gauge `Σ p λ = 0`.
    """
    (logits,) = parameters
    p = jax.nn.softmax(logits)
    dp = p * (tangents[0] - jnp.sum(p * tangents[0]))
    n = p.size
    share = 1 / (1 + n * p)
    total = jnp.sum(dp * share) / (1 - jnp.sum(p * share))
    potential = (dp + p * total) * share
    return [
        (jnp.asarray(j), jnp.where(value == j, 0.0, potential[j] - potential[value]))
        for j in range(n)
    ]


def _walk(uniform: Array, mean: Array, variance: Array, ratio: Callable[[Array], Array]) -> Array:
    """The smallest k with `F(k) > U`, by adding up masses from six standard deviations below the
    mean; `ratio(k)` is p_{k+1}/p_k.

    What lies below weighs e⁻¹⁸ at most; beyond the mode, masses that no longer change the sum end
    it. The first mass counts as 1 and the sum is normalised: in float32, masses of large counts are
    known to few digits, but their ratios to all.
    """
    start = jnp.maximum(jnp.floor(mean - 6 * jnp.sqrt(variance)), 0.0)
    first = (start, jnp.ones_like(start), jnp.ones_like(start))

    def step(state):
        k, mass, total = state
        mass = mass * ratio(k)
        return k + 1, mass, total + mass

    def matters(state):
        k, mass, total = state
        return (ratio(k) >= 1) | (mass * ratio(k) > 1e-3 * jnp.finfo(total.dtype).eps * total)

    _, _, total = jax.lax.while_loop(matters, step, first)
    return jax.lax.while_loop(
        lambda state: (uniform * total >= state[2]) & matters(state), step, first
    )[0]


def _invert_binomial(uniform, n, p):
    p, size = jnp.clip(p, 0.0, 1.0), n.astype(p.dtype)
    ratio = lambda k: jnp.where(
        k < size, (size - k) * p / ((k + 1) * jnp.where(p < 1, 1 - p, 1.0)), 0.0
    )
    return _walk(uniform, size * p, size * p * (1 - p), ratio).astype(n.dtype)


def _invert_poisson(uniform, rate):
    rate = jnp.maximum(rate, 0.0)
    return _walk(uniform, rate, rate, lambda k: rate / (k + 1)).astype(jnp.int32)


def _invert_geometric(uniform, p):
    # F(k) = 1 − (1−p)^k > U  iff  k > log(1−U)/log(1−p).
    failures = jnp.floor(jnp.log1p(-uniform) / jnp.log1p(-p))
    return jnp.where(p >= 1, 1, failures.astype(jnp.int32) + 1)


def _invert_categorical(uniform, logits):
    return jnp.minimum(index_from_uniform(jax.nn.softmax(logits), uniform), logits.size - 1).astype(
        jnp.int32
    )


_BERNOULLI = Sampler(lambda uniform, p: uniform < p, _bernoulli_flips, (0,))
_BINOMIAL = Sampler(_invert_binomial, _binomial_flips, (0, 0))
_POISSON = Sampler(_invert_poisson, _poisson_flips, (0,))
_GEOMETRIC = Sampler(_invert_geometric, _geometric_flips, (0,))
_CATEGORICAL = Sampler(_invert_categorical, _categorical_flips, (1,))


def bernoulli(key: Key[Array, ""], p: Float[Array, "..."]) -> Bool[Array, "..."]:
    """True with probability `p`; an array of `p` makes that many independent draws.

    Flip weights `−dp` from True and `+dp` from False. `p` outside of [0, 1] counts as the nearer
    end.

    >>> import jax
    >>> from diffmh import sad
    >>> bool(sad.bernoulli(jax.random.key(0), 1.0))
    True
    """
    return _BERNOULLI(key, _real(p, "bernoulli", "p"))


def categorical(key: Key[Array, ""], logits: Float[Array, "... n"]) -> Int[Array, "..."]:
    """An index with probability `softmax(logits)` over the last axis.

    Flip weights `λ_j − λ_i`, of least second moment among flips between any two categories.

    >>> import jax, jax.numpy as jnp
    >>> from diffmh import sad
    >>> sad.categorical(jax.random.key(0), jnp.zeros((4, 3))).shape
    (4,)
    """
    return _CATEGORICAL(key, _real(logits, "categorical", "logits"))


def binomial(
    key: Key[Array, ""], n: Int[Array, "..."], p: Float[Array, "..."]
) -> Int[Array, "..."]:
    """The number of successes in `n` trials of probability `p`.

    Flip weights `± dp (n−k)(k+1) / ((k+1)(1−p) + (n−k)p)` between k and k+1.

    >>> import jax
    >>> from diffmh import sad
    >>> int(sad.binomial(jax.random.key(0), 5, 1.0))
    5
    """
    n = jnp.asarray(n)
    if not jnp.issubdtype(n.dtype, jnp.integer):
        raise TypeError(f"`sad.binomial(n=...)` must be an integer, got {n.dtype}.")
    return _BINOMIAL(key, n, _real(p, "binomial", "p"))


def poisson(key: Key[Array, ""], rate: Float[Array, "..."]) -> Int[Array, "..."]:
    """A Poisson draw of mean `rate`.

    Flip weights `± dλ (k+1)/(k+1+λ)` between k and k+1.

    >>> import jax
    >>> from diffmh import sad
    >>> int(sad.poisson(jax.random.key(0), 0.0))
    0
    """
    return _POISSON(key, _real(rate, "poisson", "rate"))


def geometric(key: Key[Array, ""], p: Float[Array, "..."]) -> Int[Array, "..."]:
    """The number of trials up to the first success, 1, 2, …, as `jax.random.geometric`.

    Flip weights `∓ dp k / (p(2−p))` between k and k+1.

    >>> import jax
    >>> from diffmh import sad
    >>> int(sad.geometric(jax.random.key(0), 1.0))
    1
    """
    return _GEOMETRIC(key, _real(p, "geometric", "p"))


def _real(parameter: Any, where: str, name: str) -> Array:
    array = (
        jnp.asarray(parameter, float)
        if isinstance(parameter, int | float)
        else jnp.asarray(parameter)
    )
    _validate.real_dtype(array.dtype, f"`sad.{where}({name}=...)`")
    return array
