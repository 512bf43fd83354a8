"""The restricted machine: two layers without couplings within a layer."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Key, Shaped

from ...base import validate
from ...base.validate import Checked
from ...kernels import BlockGibbs, Cycle
from .enumeration import configurations, log_sum_exp


class Units(eqx.Module):
    """A configuration of both layers, each unit 0 or 1."""

    visible: Array
    hidden: Array


class Restricted(eqx.Module):
    """`log g(v, h) = a·v + b·h + v·W h` for units 0 and 1. The same class holds the parameters and
    the moments.

    - `visible`: a, of shape (V,); `hidden`: b, of shape (H,); `couplings`: W, of shape (V, H).

    >>> import jax, diffmh
    >>> from diffmh.models import boltzmann
    >>> theta = boltzmann.Restricted.random(jax.random.key(0), 5, 3)
    >>> moments = diffmh.expectation(
    ...     boltzmann.Restricted.moments, theta.sampler(), init=theta.start(), num_samples=50)
    >>> moments(theta, jax.random.key(1)).couplings.shape, theta.exact_moments().visible.shape
    ((5, 3), (5,))
    """

    visible: Float[Array, "V"]
    hidden: Float[Array, "H"]
    couplings: Float[Array, "V H"]

    @staticmethod
    def random(
        key: Checked[Key[Array, ""]],
        num_visible: Checked[int],
        num_hidden: Checked[int],
        scale: Checked[float] = 0.1,
    ) -> Restricted:
        """Couplings of standard deviation `scale`, and no fields."""
        shape = (
            validate.count(num_visible, "Restricted.random(num_visible=...)"),
            validate.count(num_hidden, "Restricted.random(num_hidden=...)"),
        )
        scale = validate.number(scale, "Restricted.random(scale=...)", above=0, least=True)
        couplings = scale * jax.random.normal(validate.typed_key(key), shape)
        return Restricted(jnp.zeros(num_visible), jnp.zeros(num_hidden), couplings)

    def log_density(self, x: Units, *args: Any) -> Float[Array, ""]:
        """`log g(v, h)`, unnormalised."""
        v, h = x.visible, x.hidden
        return v @ self.visible + h @ self.hidden + v @ self.couplings @ h

    def moments(self, x: Units, *args: Any) -> Restricted:
        """`v`, `h` and `v hᵀ` of one configuration, to be averaged."""
        v, h = x.visible * 1.0, x.hidden * 1.0
        return Restricted(v, h, v[:, None] * h)

    def start(self) -> Units:
        """All units off."""
        return Units(jnp.zeros_like(self.visible), jnp.zeros_like(self.hidden))

    def noise(self, key: Key[Array, ""]) -> Units:
        """A random start: each unit is on with probability ½."""
        visible, hidden = (
            jax.random.bernoulli(key, 0.5, like.shape).astype(like.dtype)
            for key, like in zip(jax.random.split(key), (self.visible, self.hidden), strict=True)
        )
        return Units(visible, hidden)

    def sampler(self) -> Cycle:
        """A sweep: first the hidden layer, then the visible one. The kernel fits any machine of
        this size.
        """
        # Given one layer, the units of the other are independent: each layer is one block.
        hidden = BlockGibbs(_hidden_log_odds, _hidden_layer, Restricted.log_density)
        visible = BlockGibbs(_visible_log_odds, _visible_layer, Restricted.log_density)
        return Cycle(hidden, visible)

    def free_energy(self, v: Float[Array, "V"]) -> Float[Array, ""]:
        """`−log Σ_h g(v, h)`, the hidden layer summed out."""
        inputs = self.hidden + v @ self.couplings
        return -(v @ self.visible + jnp.sum(jax.nn.softplus(inputs)))

    def log_partition(self) -> float:
        """`log Σ_{v,h} g(v, h)`, exactly, if one of the layers has at most 20 units."""
        return log_sum_exp(self._by_smaller_layer()[1])

    def log_likelihood(
        self, v: Shaped[ArrayLike, "... V"]
    ) -> Float[np.ndarray | np.floating, "..."]:
        """`log p(v)` of each configuration of the visible layer, exactly."""
        units = np.asarray(v, float)
        a, b, w = (np.asarray(p, float) for p in (self.visible, self.hidden, self.couplings))
        inputs = b + units @ w
        return units @ a + np.logaddexp(0.0, inputs).sum(axis=-1) - self.log_partition()

    def exact_moments(self) -> Restricted:
        """`E[v]`, `E[h]` and `E[v hᵀ]`, exactly."""
        units, terms, on = self._by_smaller_layer()
        p = np.exp(terms - log_sum_exp(terms))
        both = (units * p[:, None]).T @ on
        mine, other = p @ units, p @ on
        if self.hidden.size <= self.visible.size:
            mine, other, both = other, mine, both.T
        return Restricted(*(jnp.asarray(moment, float) for moment in (mine, other, both)))

    def _by_smaller_layer(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The configurations of the smaller layer, the log of each one's sum over the other layer,
        and the probabilities that each unit there is on.
        """
        a, b, w = (np.asarray(p, float) for p in (self.visible, self.hidden, self.couplings))
        # Given one layer, the units of the other are independent, so its 2ⁿ terms factorise:
        # log Π (1 + e^input).
        mine, other, w = (b, a, w.T) if b.size <= a.size else (a, b, w)
        units = configurations(mine.size, (0, 1), "`Restricted`")
        inputs = other + units @ w
        terms = units @ mine + np.logaddexp(0.0, inputs).sum(axis=1)
        return units, terms, 1 / (1 + np.exp(-inputs))


def _hidden_layer(x: Units) -> Array:
    return x.hidden


def _visible_layer(x: Units) -> Array:
    return x.visible


def _hidden_log_odds(theta: Restricted, x: Units, *args) -> Float[Array, "H"]:
    return theta.hidden + x.visible @ theta.couplings


def _visible_log_odds(theta: Restricted, x: Units, *args) -> Float[Array, "V"]:
    return theta.visible + theta.couplings @ x.hidden
