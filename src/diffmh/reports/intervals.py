"""Confidence intervals over chains, for contributions that are neither normal nor symmetric.

Chains are independent, so an estimate over C of them is `mean ± t(C − 1) · error` if their
contributions are nearly normal. But a derivative may depend on a few alternatives of large weight.
Then the error is more uncertain than for C normal numbers, and it is small just when the estimate
is too small. Both effects are measured by the kurtosis κ and the skewness γ. The many stretches
into which the chains are divided show them better than the C chains do; they are scaled to full
chains.

- The degrees of freedom are those of a variance estimated from C numbers of kurtosis κ,
  `ν = min(C − 1, 2C / (κ − 1))` (Satterthwaite 1946).
- `t = (mean − truth) / error` is made symmetric by Hall's cubic,
  `h(t) = t + a t² + a² t³ / 3 + γ / (6 √C)` with `a = γ / (3 √C)` (Hall 1992), whose inverse is
  explicit: the interval is where `|h(t)|` is below Student's quantile.
"""

from __future__ import annotations

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, PyTree

# NumPy turns arrays without axes into numbers.
Numbers = Float[np.ndarray | np.floating, "..."]


class Shape(eqx.Module):
    """Skewness and kurtosis of a chain's contributions, by entry; 0 and 3 if normal."""

    skewness: PyTree
    kurtosis: PyTree


def shape(
    chains: Float[np.ndarray, "... C"],
    stretches: Float[np.ndarray, "S ... C"] | None = None,
    length: Int[np.ndarray, "S"] | None = None,
) -> Shape:
    """The shape of each chain's estimates, from the stretches of the chains if they are known.

    Skewness and excess kurtosis of a sum of S independent parts are those of a part over √S and S.
    """
    mean = chains.mean(axis=-1, keepdims=True)
    of_chains = _standardised(chains - mean)
    if stretches is None or length is None or length.size < 2:
        return of_chains
    sized = length.reshape(-1, *(1,) * chains.ndim)
    # Contributions to the chain's sum: a longer stretch has a larger one.
    parts = np.moveaxis(sized * (stretches - mean), 0, -1)
    of_parts = _standardised(parts.reshape(*chains.shape[:-1], -1))
    kurtosis = 3 + np.maximum(of_parts.kurtosis - 3, 0) / length.size
    return Shape(
        of_parts.skewness / math.sqrt(length.size), np.maximum(kurtosis, of_chains.kurtosis)
    )


def _standardised(deviations: Float[np.ndarray, "... n"]) -> Shape:
    largest = np.max(np.abs(deviations), axis=-1, keepdims=True)
    # In units of the largest: cubes and fourth powers of small numbers would underflow.
    unit = deviations / np.where(largest > 0, largest, 1.0)
    second, third, fourth = (np.mean(unit**order, axis=-1) for order in (2, 3, 4))
    varies = second > 0
    second = np.where(varies, second, 1.0)
    return Shape(
        np.where(varies, third / second**1.5, 0.0), np.where(varies, fourth / second**2, 3.0)
    )


def ends(
    mean: Numbers, error: Numbers, shape: Shape, num_chains: int, level: float
) -> tuple[Numbers, Numbers]:
    """The two ends of the interval that contains the truth with probability `level`."""
    reach = quantile(shape, num_chains, level)
    centre = shape.skewness / (6 * math.sqrt(num_chains))
    lean = shape.skewness / (3 * math.sqrt(num_chains))
    # Hall's cubic is ((1 + a t)³ − 1)/(3a) + centre.
    steep = np.where(np.abs(lean) > 1e-6, lean, 1.0)

    def student(h):
        # The inverse of Hall's cubic; its limit for a → 0 is h − centre.
        bent = (np.cbrt(1 + 3 * steep * (h - centre)) - 1) / steep
        return np.where(np.abs(lean) > 1e-6, bent, h - centre)

    return mean - error * student(reach), mean - error * student(-reach)


def interval_tree(
    mean: PyTree, error: PyTree, shape: Shape, num_chains: int, level: float
) -> PyTree:
    """The interval of each number of a tree, with a last axis of two ends; the shape has trees like
    it.
    """

    def both_ends(mean, error, skewness, kurtosis):
        mean, error = np.asarray(mean, float), np.asarray(error, float)
        own = Shape(np.asarray(skewness, float), np.asarray(kurtosis, float))
        return jnp.stack(ends(mean, error, own, num_chains, level), -1)

    return jax.tree.map(both_ends, mean, error, shape.skewness, shape.kurtosis)


def quantile(shape: Shape, num_chains: int, level: float) -> Numbers:
    """Student's quantile, with the degrees of freedom of an error over chains of this shape."""
    from scipy.special import stdtrit

    excess = np.maximum(shape.kurtosis - 1, 1e-3)
    # Var(s²)/σ⁴ ≈ (κ − 1)/C = 2/ν.
    freedom = np.clip(2 * num_chains / excess, 1, num_chains - 1)
    return stdtrit(freedom, 0.5 + level / 2)
