"""A proposal that knows all labels' modes: Laplace's approximations of the continuous sites given
each joint value of the discrete ones, as a mixture.

NUTS passes between two modes by states of high energy, which it hardly ever has: a mode that is low
and wide, such as a switch at the very end of a series, is entered a few times in a thousand draws.
A Metropolis–Hastings step with this mixture as proposal jumps there in one step. The mixture is
fitted before the first iteration, and any mixture leaves the posterior invariant: nothing of it
needs to be exact. In many dimensions its proposals are rejected, and NUTS does what it does.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.scipy.special import gammaln
from jaxtyping import Array, Float, Key, PyTree

from ..base.batches import in_batches

# Newton steps from each start, those that had to be shortened included.
_STEPS = 50
# Values whose modes are looked for at once, by gradients at `starts × 2 d` places each.
_AT_ONCE = 16
# Degrees of freedom: a proposal must have heavier tails than what it proposes for.
_FREEDOM = 5.0
# Along an axis on which a conditional density is flatter than this, or rises.
_LEAST_PRECISION = 1e-2


class LaplaceMixture(eqx.Module):
    """`Σ_k w_k t₅(x; m_k, Λ_k⁻¹)`, with `Λ_k = V_k diag(λ_k) V_kᵀ` the curvature at the mode m_k
    and `w_k ∝ g_k(m_k) |Λ_k|^−½`, Laplace's approximation of `∫ g_k`.
    """

    modes: Float[Array, "K d"]
    axes: Float[Array, "K d d"]
    precisions: Float[Array, "K d"]
    log_weights: Float[Array, "K"]

    def sample(self, key: Key[Array, ""]) -> Float[Array, "d"]:
        key_label, key_normal, key_width = jax.random.split(key, 3)
        k = jax.random.categorical(key_label, self.log_weights)
        dimension = self.modes.shape[1]
        width = jnp.sqrt(_FREEDOM / jax.random.chisquare(key_width, _FREEDOM))
        steps = width * jax.random.normal(key_normal, (dimension,)) / jnp.sqrt(self.precisions[k])
        return self.modes[k] + self.axes[k] @ steps

    def log_prob(self, x: Float[Array, "d"]) -> Float[Array, ""]:
        along = jnp.einsum("kij,ki->kj", self.axes, x - self.modes)
        distance = jnp.sum(self.precisions * along**2, axis=-1)
        dimension = x.size
        log_t = 0.5 * jnp.sum(jnp.log(self.precisions), axis=-1)
        log_t -= (_FREEDOM + dimension) / 2 * jnp.log1p(distance / _FREEDOM)
        log_t += gammaln((_FREEDOM + dimension) / 2) - gammaln(_FREEDOM / 2)
        log_t -= dimension / 2 * math.log(_FREEDOM * math.pi)
        return jax.nn.logsumexp(jax.nn.log_softmax(self.log_weights) + log_t)


def laplace_mixture(
    log_density: Callable[[PyTree, Float[Array, "d"]], Array],
    values: PyTree,
    starts: Float[Array, "S d"],
) -> LaplaceMixture:
    """The mixture of `log_density(value, x)` over the `values` (leading axis); of the modes that
    Newton's method finds from the starts, the highest for each. A value without a finite one has
    weight 0.
    """

    def one(value):
        density = lambda x: log_density(value, x)
        modes, curvatures = jax.vmap(lambda start: _mode(density, start))(starts)
        heights = jax.vmap(density)(modes)
        best = jnp.argmax(jnp.where(jnp.isnan(heights), -jnp.inf, heights))
        curvature = curvatures[best]
        sound = jnp.isfinite(heights[best]) & jnp.all(jnp.isfinite(curvature))
        unit = jnp.eye(len(curvature), dtype=curvature.dtype)
        precisions, axes = jnp.linalg.eigh(jnp.where(sound, curvature, unit))
        precisions = jnp.maximum(precisions, _LEAST_PRECISION)
        log_weight = heights[best] - 0.5 * jnp.sum(jnp.log(precisions))
        # A component of weight 0 must have a finite density, too: 0 times NaN is NaN.
        mode = jnp.where(sound, modes[best], starts[0])
        return mode, axes, precisions, jnp.where(sound, log_weight, -jnp.inf)

    return LaplaceMixture(*in_batches(one, values, _AT_ONCE))


def _mode(
    density: Callable[[Array], Array], start: Float[Array, "d"]
) -> tuple[Float[Array, "d"], Float[Array, "d d"]]:
    """A local maximum and the negative Hessian there, by Newton's method with damping."""

    def step(carry, _):
        x, damping, curvature = carry
        precisions, axes = jnp.linalg.eigh(curvature)
        precisions = jnp.maximum(jnp.abs(precisions), _LEAST_PRECISION) + damping
        new = x + axes @ ((axes.T @ jax.grad(density)(x)) / precisions)
        # NaN compares as false: such a step is shortened.
        better = density(new) >= density(x)
        x = jnp.where(better, new, x)
        damping = jnp.where(better, damping / 4, 4 * damping + _LEAST_PRECISION)
        return (x, damping, _curvature(density, x, curvature)), None

    unit = jnp.ones((), start.dtype)
    began = (start, unit, _curvature(density, start, 100 * jnp.eye(start.size, dtype=start.dtype)))
    (x, _, curvature), _ = jax.lax.scan(step, began, length=_STEPS)
    return x, curvature


def _curvature(
    density: Callable[[Array], Array], x: Float[Array, "d"], before: Float[Array, "d d"]
) -> Float[Array, "d d"]:
    """The negative Hessian by differences of the gradient, which is all that NUTS asks of a
    density; over a tenth of a standard deviation, by the Hessian `before`.
    """
    width = 0.1 / jnp.sqrt(jnp.clip(jnp.diagonal(before), _LEAST_PRECISION, 1e8))
    at = lambda sign: jax.vmap(jax.grad(density))(x + sign * jnp.diag(width))
    rows = (at(-1) - at(1)) / (2 * width[:, None])
    rows = jnp.where(jnp.all(jnp.isfinite(rows)), rows, before)
    return 0.5 * (rows + rows.T)
