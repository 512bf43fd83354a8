"""Sums over batches of weighted draws, and the derivatives of their ratio with errors.

With `W = Σ w` and `S = Σ w f`, derivatives of `m = S/W` with respect to θ are

    m_i  = (S_i − m W_i) / W
    m_ij = (S_ij − m W_ij − m_i W_j − m_j W_i) / W

where `W_i = Σ w s_i`, `W_ij = Σ w (s_i s_j + h_ij)`, `S_i = Σ w (f s_i + ∂_i f)` and
`S_ij = Σ w (f (s_i s_j + h_ij) + s_i ∂_j f + s_j ∂_i f + ∂_ij f)`, with `s = ∂_θ log g` and
`h = ∂_θ s`. The jackknife over batches takes them without each batch in turn.
"""

from __future__ import annotations

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from ..base.sums import CompensatedSum
from ..core.parameters import jacobian
from .reweighting import Blocks, Reweighted, log_weights


class Sums(eqx.Module):
    """The sums of each of B batches; `None` beyond the order that is asked for."""

    w: Float[Array | np.ndarray, "B"]
    s: Float[Array | np.ndarray, "B F"]
    w_i: Float[Array | np.ndarray, "B P"] | None = None
    s_i: Float[Array | np.ndarray, "B P F"] | None = None
    w_ij: Float[Array | np.ndarray, "B P P"] | None = None
    s_ij: Float[Array | np.ndarray, "B P P F"] | None = None

    def without_each(self) -> Sums:
        """For each batch the sums of the others."""
        return jax.tree.map(lambda leaf: leaf.sum(axis=0) - leaf, self)

    def all(self) -> Sums:
        return jax.tree.map(lambda leaf: leaf.sum(axis=0, keepdims=True), self)


class Ratio(eqx.Module):
    """`S/W` of each of B sets of draws, and its derivatives; parameters before the values of f."""

    value: Float[Array | np.ndarray, "B F"]
    slope: Float[Array | np.ndarray, "B P F"] | None = None
    second: Float[Array | np.ndarray, "B P P F"] | None = None

    @staticmethod
    def of(sums: Sums) -> Ratio:
        w = sums.w[:, None]
        value = sums.s / w
        if sums.w_i is None or sums.s_i is None:
            return Ratio(value)
        w_i, w = sums.w_i[:, :, None], w[:, None]
        slope = (sums.s_i - value[:, None] * w_i) / w
        if sums.w_ij is None or sums.s_ij is None:
            return Ratio(value, slope)
        # m_i W_j, and m_j W_i by symmetry.
        cross = slope[:, :, None] * w_i[:, None]
        cross = cross + cross.swapaxes(1, 2)
        bent = sums.s_ij - value[:, None, None] * sums.w_ij[..., None] - cross
        return Ratio(value, slope, bent / w[:, None])


def pseudo_values(sums: Sums) -> Ratio:
    """The jackknife's pseudo-values of B batches, `m + (B − 1) (m − m_{−b})`: their mean is free of
    the bias of order 1/B of a ratio, and their spread gives its error (Quenouille 1956).
    """
    count = sums.w.shape[0]
    of_all, of_others = Ratio.of(sums.all()), Ratio.of(sums.without_each())
    return jax.tree.map(lambda a, b: a + (count - 1) * (a - b), of_all, of_others)


class AtOne(eqx.Module):
    """f, s, h, and f's own derivatives at one draw, or their means; `None` beyond the order that is
    asked for, and where f does not depend on θ.
    """

    f: Float[Array, "F"]
    s: Float[Array, "P"] | None
    h: Float[Array, "P P"] | None
    f_i: Float[Array, "P F"] | None
    f_ij: Float[Array, "P P F"] | None


def _at_one(given: Reweighted, theta: PyTree, x: PyTree, order: int, explicit: bool) -> AtOne:
    def repeated(function: Callable[[PyTree], Array], order: int) -> Callable[[PyTree], Array]:
        return function if order == 0 else repeated(lambda t: jacobian(function, t), order - 1)

    def value(theta):
        return given.value(theta, x)

    def density(theta):
        return given.log_density(theta, x, *given.args)

    s, h = (repeated(density, k)(theta) if order >= k else None for k in (1, 2))
    f_i, f_ij = (repeated(value, k)(theta) if explicit and order >= k else None for k in (1, 2))
    return AtOne(value(theta), s, h, f_i, f_ij)


def _terms(at: AtOne, centre: AtOne) -> Sums:
    """The terms of one draw, apart from its weight."""
    f = at.f - centre.f
    one = jnp.ones((), f.dtype)
    if at.s is None or centre.s is None:
        return Sums(one, f)
    # As if the weight were w e^{−c(θ)}, with ∂c and ∂²c equal to the centres of s and h at this θ:
    # a factor that contains θ alone cancels in S/W and all its derivatives.
    s = at.s - centre.s
    s_i = s[:, None] * f
    if at.f_i is not None:
        s_i = s_i + at.f_i
    if at.h is None or centre.h is None:
        return Sums(one, f, s, s_i)
    w_ij = s[:, None] * s + at.h - centre.h
    s_ij = w_ij[:, :, None] * f
    if at.f_i is not None and at.f_ij is not None:
        cross = s[:, None, None] * at.f_i
        s_ij = s_ij + cross + cross.swapaxes(0, 1) + at.f_ij
    return Sums(one, f, s, s_i, w_ij, s_ij)


@eqx.filter_jit
def batch_sums(
    given: Reweighted, theta: PyTree, order: int, explicit: bool, batches: int
) -> tuple[Sums, Float[Array, "F"]]:
    """The sums of `batches` stretches of each chain about a centre, in units of the largest weight;
    and f's centre. The first few draws are left out where the length of a
    batch does not divide the chain.
    """
    draws = jax.tree.map(lambda leaf: _cut(leaf, batches), given.draws)
    blocks = Blocks.of(draws)
    # One scale and one centre for all batches, or their sums could not be added and subtracted.
    largest = jnp.max(log_weights(given, theta))

    centre = _centre(given, theta, order)

    def weighted(x):
        weight = jnp.exp(given.log_weight(theta, x) - largest)
        terms = _terms(_at_one(given, theta, x, order, explicit), centre)
        return jax.tree.map(lambda leaf: weight * leaf, terms)

    def over(number):
        here, counts = blocks.take(draws, number)

        def added(leaf):
            counted = jnp.expand_dims(counts, range(1, leaf.ndim - 1))
            return jnp.sum(jnp.where(counted, leaf, 0), axis=1)

        return jax.tree.map(added, jax.vmap(jax.vmap(weighted))(here))

    return _added(over, blocks.count), centre.f


def _centre(given: Reweighted, theta: PyTree, order: int) -> AtOne:
    """Means over some draws: sums are about them, as `Ê` does not see a common part of s and h, and
    that of f is added again. Otherwise covariances would be small differences of large numbers.
    """

    def one(x):
        return _at_one(given, theta, x, order, False)

    return jax.tree.map(lambda leaf: leaf.mean(axis=0), jax.vmap(one)(given.few()))


def _cut(leaf: Array, batches: int) -> Array:
    chains, draws = leaf.shape[:2]
    length = draws // batches
    used = leaf[:, draws - batches * length :]
    return used.reshape(chains * batches, length, *leaf.shape[2:])


def _added(over: Callable[[Array], PyTree], count: int) -> PyTree:
    """The sum of `over(number)` for all numbers below `count`, compensated."""
    form = jax.eval_shape(over, jnp.int32(0))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), form)

    def add(number, total):
        return total.plus(over(number))

    return jax.lax.fori_loop(0, count, add, CompensatedSum.like(zeros)).value()
