"""Derivatives of many pairs from their averages: D, the covariance C over independent pairs, and
the mixture of the two.

C is a U-statistic over the pairs of a fold, and β comes from the other folds alone: so
`D + β(C − D)` is unbiased, and so is `F + β(C − D)` for the finite chain.
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .covariance import CovarianceAverages, contributions
from .covariance_hessian import HessianMoments

# C needs several pairs in a fold, and β several in the others: fewer pairs than two folds have
# D alone.
_LEAST_FOLD, _MOST_FOLDS = 4, 4
LEAST_PAIRS = 2 * _LEAST_FOLD
# β is shrunk as if there were this many further pairs that tell nothing.
_SHRINKAGE = 2


class PairTerms(eqx.Module):
    """Terms of a pair: at one place, summed over its steps (n times over), or averaged: `value` is
    H(f), and `plain` the sum of f over the samples; `derivative` is D or, for the finite chain, F,
    and `correction` then F − D; `product`, `score` and `explicit` are `H(f s)`, `H(s)` and `H(∂f)`
    with s less its value at the start, which is the `origin` of averages; `moments` are those of a
    second derivative, averaged by H. What is not wanted is `None`.
    """

    value: Float[Array, "F *C"]
    plain: Float[Array, "F *C"] | None = None
    derivative: Float[Array, "P F *C"] | None = None
    correction: Float[Array, "P F *C"] | None = None
    product: Float[Array, "P F *C"] | None = None
    score: Float[Array, "P *C"] | None = None
    explicit: Float[Array, "P F *C"] | None = None
    moments: HessianMoments | None = None
    origin: Float[Array, "P *C"] | None = None


def mixed(means: PairTerms, value: Float[Array, "F C"]) -> Float[Array, "P F C"]:
    """The contribution of each pair to the derivative: the mean over pairs is the estimate."""
    num_pairs = value.shape[-1]
    own = means.derivative
    if means.score is None:
        assert own is not None
        return own
    if own is None:
        return by_covariance(means, np.zeros(num_pairs, int))
    if num_pairs < LEAST_PAIRS:
        return own
    folds = folds_of(num_pairs)
    covariance = by_covariance(means, folds)
    # C − D, of which D is `own`, or F less the correction F − D.
    difference = covariance - own
    if means.correction is not None:
        difference = difference + means.correction
    return own + coefficient(own, difference, folds) * difference


def folds_of(num_pairs: int) -> np.ndarray:
    """The fold of each pair."""
    count = min(_MOST_FOLDS, num_pairs // _LEAST_FOLD)
    return np.arange(num_pairs) * count // num_pairs


def by_covariance(means: PairTerms, folds: np.ndarray) -> Float[Array, "P F C"]:
    """The contribution of each pair to C. Over the R pairs of a fold the mean of

        H_r(f s) − H_r(f) H_r(s) + (1 − 1/R) (H_r(f) − H_{−r}(f)) (H_r(s) − H_{−r}(s)) + H_r(∂f)

    is `mean_r H_r(f s) − mean_{r≠q} H_r(f) H_q(s) + mean H(∂f)`, and the spread over r gives its
    error.
    """
    assert means.product is not None and means.score is not None
    assert means.origin is not None and means.explicit is not None
    # H(1) = 1, so what holds for averages over a chain holds for H of a pair.
    each = CovarianceAverages(means.product, means.score, means.origin, means.explicit)
    parts = []
    for fold in np.unique(folds):
        # Folds are stretches of the pairs.
        here = np.flatnonzero(folds == fold)
        one = slice(int(here[0]), int(here[-1]) + 1)
        of_fold = jax.tree.map(lambda leaf, one=one: leaf[..., one], each)
        parts.append(contributions(of_fold, means.value[..., one]))
    return jnp.concatenate(parts, axis=-1)


def coefficient(
    own: Float[Array, "P F C"], difference: Float[Array, "P F C"], folds: np.ndarray
) -> Float[Array, "P F C"]:
    """β for each pair, from the pairs of the other folds: it minimises the variance of `own + β
    difference` there.
    """
    parts = []
    for fold in np.unique(folds):
        others = np.flatnonzero(folds != fold)
        y, x = own[..., others], difference[..., others]
        y, x = (leaf - jnp.mean(leaf, axis=-1, keepdims=True) for leaf in (y, x))
        # β is a function of other pairs than those whose C − D it multiplies, so E[β (C − D)] =
        # E[β] E[C − D] = 0: fitted to the same pairs it would be biased.
        square = jnp.sum(x * x, axis=-1, keepdims=True) * (1 + _SHRINKAGE / len(others))
        # Where C = D in all of the others any β will do: 0.
        slope = -jnp.sum(x * y, axis=-1, keepdims=True) / jnp.where(square > 0, square, 1.0)
        shape = (*own.shape[:-1], int(np.sum(folds == fold)))
        parts.append(jnp.broadcast_to(slope, shape))
    return jnp.concatenate(parts, axis=-1)
