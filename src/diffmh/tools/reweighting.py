"""Draws at θ₀ as a function of θ: weighted averages that JAX differentiates to any order.

    Ê(θ) = Σ w f(θ, x) / Σ w,    w = exp(log g(θ, x) − log g(θ₀, x))

Draws are evaluated in blocks, and a block is evaluated again when it is differentiated backward, so
memory is that of one block whatever the number of draws and the order of the derivative.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from ..base import trees, validate
from ..core.admission import refuse_jumps_of_slope
from ..core.autodiff import not_differentiable
from ..core.simulation import flatten
from ..jaxprs import compat
from .examination import one_draw
from .intake import chains_and_draws

# Draws that are evaluated at once, and the share of the draws below which a value is NaN.
AT_ONCE, LEAST_SHARE = 1024, 0.05


class Blocks(eqx.Module):
    """The division of each chain's draws: `count` blocks of `length` draws of every chain."""

    count: int = eqx.field(static=True)
    length: int = eqx.field(static=True)
    draws: int = eqx.field(static=True)

    @staticmethod
    def of(draws: PyTree, at_once: int | None = None) -> Blocks:
        chains, draws = chains_and_draws(draws)
        length = min(draws, max(1, (AT_ONCE if at_once is None else at_once) // chains))
        return Blocks(-(-draws // length), length, draws)

    def take(self, draws: PyTree, number: Array) -> tuple[PyTree, Array]:
        """The draws of a block, and which of them count: the last block overlaps with the one
        before where the length does not divide.
        """
        first = number * self.length
        start = jnp.minimum(first, self.draws - self.length)
        here = jax.tree.map(
            lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, start, self.length, axis=1), draws
        )
        return here, start + jnp.arange(self.length) >= first


class Weights(eqx.Module):
    """The sums of a set of draws: the largest log weight, and `Σ w`, `Σ w²` and `Σ w f` in its
    units.
    """

    largest: Float[Array, "*B"]
    total: Float[Array, "*B"]
    squares: Float[Array, "*B"]
    weighted: Float[Array, "*B F"]

    def joined(self) -> Weights:
        """The sums of all sets, along the leading axis, in the units of the largest weight."""
        largest = jnp.max(self.largest)
        # No exponent is positive: Σ_b e^{m_b − m} Σ_{i ∈ b} e^{l_i − m_b}, m_b the largest log
        # weight of set b and m that of all.
        scale = jnp.exp(self.largest - largest)
        return Weights(
            largest,
            jnp.sum(scale * self.total),
            jnp.sum(scale**2 * self.squares),
            jnp.sum(scale[:, None] * self.weighted, axis=0),
        )

    def effective(self) -> Float[Array, "*B"]:
        """The effective size `(Σ w)² / Σ w²` (Kish)."""
        return jax.lax.stop_gradient(self.total**2 / self.squares)


class Reweighted(eqx.Module):
    """f and log g at draws that were made at `at`; what it computes, JAX differentiates with
    respect to theta.
    """

    f: Callable[..., PyTree]
    log_density: Callable[..., Array]
    at: PyTree
    draws: PyTree
    args: tuple[Any, ...]

    def log_weight(self, theta: PyTree, x: PyTree) -> Float[Array, ""]:
        """`log g(θ, x) − log g(θ₀, x)`; only the former moves."""
        before = jax.lax.stop_gradient(self.log_density(self.at, x, *self.args))
        return self.log_density(theta, x, *self.args) - before

    def value(self, theta: PyTree, x: PyTree) -> Float[Array, "F"]:
        return flatten(self.f(theta, x, *self.args))

    def mean(self, theta: PyTree, at_once: int | None = None) -> Float[Array, "F"]:
        """`Ê(θ)`, NaN in value and derivatives where the effective size is too small."""
        centre, level = self._about(theta)
        sums = self._sums(theta, centre, level, Blocks.of(self.draws, at_once))
        enough = sums.effective() >= LEAST_SHARE * np.prod(chains_and_draws(self.draws))
        # A product and not a choice: the derivatives of a choice would be 0 where it is NaN.
        trusted = jnp.where(enough, 1.0, jnp.nan).astype(centre.dtype)
        return (centre + sums.weighted / sums.total) * trusted

    def _about(self, theta: PyTree) -> tuple[Float[Array, "F"], Float[Array, ""]]:
        """f and the log weight averaged over a few draws.

        `Ê` does not change if f is taken about the former, which is added again, and log w about
        the latter: any function of θ alone is in numerator and denominator. In float32 both matter:
        derivatives are covariances, small differences of large numbers otherwise.
        """
        few = self.few()
        f = jnp.mean(jax.vmap(self.value, in_axes=(None, 0))(theta, few), axis=0)
        level = jnp.mean(jax.vmap(self.log_weight, in_axes=(None, 0))(theta, few))
        return f, level

    def few(self) -> PyTree:
        """Some of the draws, spread evenly, along one leading axis."""
        chains, draws = chains_and_draws(self.draws)
        some = max(1, min(draws, AT_ONCE // (4 * chains)))
        spread = slice(None, some * (draws // some), draws // some)
        return jax.tree.map(lambda leaf: leaf[:, spread].reshape(-1, *leaf.shape[2:]), self.draws)

    def _sums(self, theta, centre, level, blocks: Blocks) -> Weights:
        # Backward, a block keeps nothing but its number: its draws are evaluated again.
        @jax.checkpoint
        def block(given, number):
            theta, centre, level = given
            here, counts = blocks.take(self.draws, number)

            def one(x):
                return self.log_weight(theta, x) - level, self.value(theta, x) - centre

            log_weight, f = jax.vmap(jax.vmap(one))(here)
            # Of all draws of the block, counted or not, so that no exponential overflows.
            largest = jax.lax.stop_gradient(jnp.max(log_weight))
            weight = jnp.where(counts, jnp.exp(log_weight - largest), 0.0)
            return Weights(
                largest,
                jnp.sum(weight),
                jnp.sum(weight**2),
                jnp.tensordot(weight, f, axes=2, precision="highest"),
            )

        if blocks.count == 1:
            return block((theta, centre, level), jnp.int32(0))
        numbers = jnp.arange(blocks.count)
        return jax.lax.map(lambda number: block((theta, centre, level), number), numbers).joined()


@eqx.filter_jit
def reweighted_mean(reweighted: Reweighted, theta: PyTree) -> Float[Array, "F"]:
    return reweighted.mean(theta)


@eqx.filter_jit
def log_weights(reweighted: Reweighted, theta: PyTree) -> Float[Array, "C n"]:
    """The log weight of each draw."""
    blocks = Blocks.of(reweighted.draws)

    def block(number):
        here, _ = blocks.take(reweighted.draws, number)
        return jax.vmap(jax.vmap(lambda x: reweighted.log_weight(theta, x)))(here)

    found = jax.lax.map(block, jnp.arange(blocks.count))
    # The last block ends at the last draw, and overlaps with the one before.
    whole = jnp.moveaxis(found[:-1], 0, 1).reshape(found.shape[1], -1)
    rest = blocks.draws - whole.shape[1]
    return jnp.concatenate([whole, found[-1][:, blocks.length - rest :]], axis=1)


def gate(
    theta: PyTree, x: PyTree, functions: dict[str, Callable[[PyTree, PyTree], Any]], order: int = 1
) -> PyTree:
    """`theta`, of which an order of differentiation beyond the first is refused where a function's
    derivative jumps in x at a place that depends on θ.

    A derivative of order k + 1 of an average over draws is right if the functions and their
    derivatives up to order k have no moving jump. Each differentiation passes one gate, which looks
    at the derivatives of its order and leaves the next gate behind it.
    """
    form = compat.forms(theta)

    @jax.custom_jvp
    def passed(theta):
        return theta

    @passed.defjvp
    def _examined(primals, tangents):
        if order > 1:
            for name, function in functions.items():
                refuse_jumps_of_slope(function, form, x, name, order - 1)
        return gate(primals[0], x, functions, order + 1), tangents[0]

    return passed(theta)


def as_function(given: Reweighted, theta: PyTree) -> Float[Array, "F"]:
    """`Ê(θ)`, flat, as a function of theta that JAX differentiates to any order; derivatives with
    respect to data are refused.
    """
    arrays, rest = eqx.partition((given.at, given.draws, given.args), eqx.is_array)
    arrays = not_differentiable(
        arrays,
        "A derivative of `from_draws(..., at=...)` with respect to `args`, `at` or `draws` was"
        " asked for: they are data. Make what you differentiate a part of `theta`.",
    )
    at, draws, args = eqx.combine(arrays, rest)
    functions = {
        "log_density": lambda theta, x: given.log_density(theta, x, *args),
        "f": lambda theta, x: flatten(given.f(theta, x, *args)),
    }
    theta = gate(theta, one_draw(draws), functions)
    return reweighted_mean(Reweighted(given.f, given.log_density, at, draws, args), theta)


def refuse_another_form(theta: PyTree, at: PyTree, name: str = "`theta`") -> None:
    """Refuse a theta that is not like the one of the draws."""
    same = jax.tree.structure(theta) == jax.tree.structure(at)
    if not same or trees.shapes(theta) != trees.shapes(at):
        raise TypeError(
            f"`from_draws(..., at=...)`: {name} must have the form of `at`,"
            f" {trees.shapes(at)}, got {trees.shapes(theta)}."
        )


def checked_at(at: Any) -> PyTree:
    """The theta that draws were made with."""
    if not validate.concrete(at):
        raise TypeError("`from_draws(at=...)` must be known: it cannot be traced by `jit`.")
    return trees.strong(validate.theta(at, "from_draws(at=...)"))
