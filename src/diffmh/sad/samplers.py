"""Samplers: the functions with which a program draws. Each checks its arguments and draws from one
of the distributions.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Int, Key

from ..base import validate
from ..base.validate import Checked
from .distributions import (
    BERNOULLI,
    BINOMIAL,
    CATEGORICAL,
    CHANCE,
    COUNT,
    GEOMETRIC,
    GEOMETRIC_UP,
    LOGITS,
    NEGATIVE_BINOMIAL,
    POISSON,
    POISSON_UP,
    PROBABILITIES,
    RATE,
    UNIFORM_INT,
    UNIT,
    WEIGHTS,
    Range,
)
from .draw import Sampler as Sampler
from .draw import sample


def bernoulli(
    key: Checked[Key[Array, ""]], p: Checked[Float[ArrayLike, "..."]]
) -> Bool[Array, "..."]:
    """True with probability `p`. An array of `p` gives an array of independent draws.

    Flip weights `−dp` from True and `+dp` from False.

    **Refused**: `p` outside of [0, 1]. As for all samplers, if a parameter is found to be out of
    range only when a compiled program runs, the value and derivative of that run are NaN.

    >>> import jax
    >>> from diffmh import sad
    >>> bool(sad.bernoulli(jax.random.key(0), 1.0))
    True
    """
    return BERNOULLI(key, _real(p, "bernoulli", "p", UNIT))


def categorical(
    key: Checked[Key[Array, ""]],
    logits: Checked[Float[ArrayLike, "... n"]] | None = None,
    *,
    probs: Checked[Float[ArrayLike, "... n"]] | None = None,
) -> Int[Array, "..."]:
    """An index with probability `softmax(logits)`, or in proportion to `probs`, over the last axis.

    Flip weights `λ_j − λ_i`, of least second moment among flips between any two categories.
    `probs` may contain zeros and are divided by their sum; logits may be −∞.

    **Refused**: both or none of `logits` and `probs`; no categories; logits that are NaN or +∞;
    negative `probs`; logits or `probs` that leave no category possible.

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
    name, given, range_ = ("logits", logits, LOGITS) if probs is None else ("probs", probs, WEIGHTS)
    array = _per_category(given, "categorical", name, range_)
    return (CATEGORICAL if probs is None else PROBABILITIES)(key, array)


def uniform_int(
    key: Checked[Key[Array, ""]],
    low: Checked[Int[ArrayLike, "..."]],
    high: Checked[Int[ArrayLike, "..."]],
) -> Int[Array, "..."]:
    """An integer `low ≤ x < high`, each with the same probability.

    The bounds may be draws: an alternative draws between its own bounds with the same random bits.
    Integers have no derivative, so nothing is flipped here.

    **Refused**: bounds that are not integers; no integer between them.

    >>> import jax
    >>> from diffmh import sad
    >>> int(sad.uniform_int(jax.random.key(0), 3, 4))
    3
    """
    low, high = _integer(low, "uniform_int", "low"), _integer(high, "uniform_int", "high")
    if validate.concrete(low, high) and not np.all(np.asarray(low) < np.asarray(high)):
        raise ValueError(
            f"`sad.uniform_int(low=..., high=...)`: `high` must be above `low`, got {low} and"
            f" {high}."
        )
    shape = jnp.broadcast_shapes(low.shape, high.shape)
    dtype = jnp.promote_types(low.dtype, high.dtype)
    wide = jnp.uint64 if jnp.iinfo(dtype).bits > 32 else jnp.uint32
    # Twice as many random bits as the integers have, so that the probabilities in a range that does
    # not divide 2ⁿ differ by less than 2⁻ⁿ.
    bits = jax.random.bits(validate.typed_key(key), (2, *shape), wide)
    low, high = (jnp.broadcast_to(bound.astype(dtype), shape) for bound in (low, high))
    return sample(bits[0], low, high, bits[1], sampler=UNIFORM_INT)[0]


def negative_binomial(
    key: Checked[Key[Array, ""]],
    r: Checked[Int[ArrayLike, "..."]],
    p: Checked[Float[ArrayLike, "..."]],
) -> Int[Array, "..."]:
    """The number of failures before the `r`-th success, in trials of probability `p`.

    Flip weights `∓ dp (k+r)(k+1) / (p (k+1+(k+r)(1−p)))` between k and k+1.

    **Refused**: a negative `r`; `p` outside of (0, 1], or so small that the draw may exceed
    2³¹.

    >>> import jax
    >>> from diffmh import sad
    >>> int(sad.negative_binomial(jax.random.key(0), 2, 1.0))
    0
    """
    r = _integer(r, "negative_binomial", "r", COUNT)
    return NEGATIVE_BINOMIAL(key, r, _real(p, "negative_binomial", "p", CHANCE))


def multinomial(
    key: Checked[Key[Array, ""]],
    n: Checked[Int[ArrayLike, "..."]],
    probs: Checked[Float[ArrayLike, "... c"]],
) -> Int[Array, "... c"]:
    """The number of times each category occurs in `n` trials. Drawn category by category as
    binomials of the remaining trials. `probs` are divided by their sum.

    **Refused**: a negative `n`; negative `probs`; `probs` that leave no category possible.

    >>> import jax, jax.numpy as jnp
    >>> from diffmh import sad
    >>> sad.multinomial(jax.random.key(0), 5, jnp.array([0.0, 1.0, 0.0]))
    Array([0, 5, 0], dtype=int32)
    """
    p = _per_category(probs, "multinomial", "probs", WEIGHTS)
    n = _integer(n, "multinomial", "n", COUNT)
    if n.ndim >= p.ndim:
        raise ValueError(
            "`sad.multinomial(n=...)` must broadcast to the shape of `probs` without its last"
            f" axis, {p.shape[:-1]}, got shape {n.shape}."
        )
    # Given the counts before it, N_i is binomial with the trials that are left and probability
    # p_i / Σ_{j ≥ i} p_j. Summed from the end, so that small probabilities there keep their digits.
    rest = jnp.flip(jnp.cumsum(jnp.flip(p, -1), -1), -1)
    # If no probability is left, no trial is left either, and the share is arbitrary.
    some = jax.lax.stop_gradient(rest) > 0
    share = jnp.where(some, p / jnp.where(some, rest, 1.0), 0.0)
    # With `probs` out of range, n = −1 puts every binomial draw out of range.
    left = jnp.where(WEIGHTS.holds(jax.lax.stop_gradient(p)), n.astype(jnp.int32), -1)
    count = max(p.shape[-1] - 1, 1)
    keys = jax.random.split(validate.typed_key(key), p.shape[-1])

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
    n = _integer(n, "binomial", "n", COUNT)
    return BINOMIAL(key, n, _real(p, "binomial", "p", UNIT))


def poisson(
    key: Checked[Key[Array, ""]],
    rate: Checked[Float[ArrayLike, "..."]],
    *,
    flips: Checked[str] = "two-sided",
) -> Int[Array, "..."]:
    """A Poisson draw of mean `rate`.

    Flip weights `± dλ (k+1)/(k+1+λ)` between k and k+1; with `flips="one-sided"`, `dλ` from k to
    k+1 only: no variance for results that are linear in the draw, more for others.

    **Refused**: a rate below 0 or above 2³⁰, for which the draw may not fit an int32.
    What is not known before the program runs makes its result NaN (`bernoulli`).

    >>> import jax
    >>> from diffmh import sad
    >>> int(sad.poisson(jax.random.key(0), 0.0))
    0
    """
    sampler = _flips(flips, "poisson", POISSON, POISSON_UP)
    return sampler(key, _real(rate, "poisson", "rate", RATE))


def geometric(
    key: Checked[Key[Array, ""]],
    p: Checked[Float[ArrayLike, "..."]],
    *,
    flips: Checked[str] = "two-sided",
) -> Int[Array, "..."]:
    """The number of trials up to the first success, 1, 2, …, as `jax.random.geometric`.

    Flip weights `∓ dp k / (p(2−p))` between k and k+1; with `flips="one-sided"`, `−dp k / p` from
    k to k+1 only, with a smaller variance for results that are linear in the draw.

    **Refused**: `p` outside of (0, 1] or below 2⁻²⁵, for which the draw may not fit an int32.
    What is not known before the program runs makes its result NaN (`bernoulli`).

    >>> import jax
    >>> from diffmh import sad
    >>> int(sad.geometric(jax.random.key(0), 1.0))
    1
    """
    sampler = _flips(flips, "geometric", GEOMETRIC, GEOMETRIC_UP)
    return sampler(key, _real(p, "geometric", "p", CHANCE))


def _flips(flips: str, where: str, two_sided: Sampler, one_sided: Sampler) -> Sampler:
    samplers = {"two-sided": two_sided, "one-sided": one_sided}
    return samplers[validate.choice(flips, f"sad.{where}(flips=...)", samplers)]


def _real(parameter: Any, where: str, name: str, range_: Range | None = None) -> Array:
    what = f"`sad.{where}({name}=...)`"
    if isinstance(parameter, int) and not isinstance(parameter, bool):
        parameter = float(parameter)
    array = validate.array_of(parameter, what)
    validate.real_dtype(array.dtype, what)
    return _refuse(array, where, name, range_)


def _per_category(parameter: Any, where: str, name: str, range_: Range) -> Array:
    array = _real(parameter, where, name)
    if array.ndim == 0 or array.shape[-1] == 0:
        raise ValueError(
            f"`sad.{where}({name}=...)` needs a last axis of categories, got {array.shape}."
        )
    return _refuse(array, where, name, range_)


def _integer(parameter: Any, where: str, name: str, range_: Range | None = None) -> Array:
    array = validate.array_of(parameter, f"`sad.{where}({name}=...)`")
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"`sad.{where}({name}=...)` must be an integer, got {array.dtype}.")
    return _refuse(array, where, name, range_)


def _refuse(array: Array, where: str, name: str, range_: Range | None) -> Array:
    """The array, after checking its range if its values are known."""
    if range_ is None or not validate.concrete(array):
        return array
    known = np.asarray(array)
    if not np.all(range_.holds(known)):
        raise ValueError(f"`sad.{where}({name}=...)` must be {range_.wanted}, got {known}.")
    return array
