"""Stein's control variates over draws: what is averaged, less its regression on functions of mean
zero, fold by fold (`estimators.stein`).
"""

from __future__ import annotations

import itertools

import equinox as eqx
import numpy as np
from jaxtyping import Float, Int

from ..estimators import stein
from ..estimators.stein import Moments, Monomials

# Functions at most: their Gram matrix costs draws × functions². And numbers in memory at most.
_MOST_FUNCTIONS, _MOST_NUMBERS = 300, 16_000_000
# Draws whose functions are evaluated at once: few, so that intermediate arrays stay in the cache.
_BLOCK = 256


class Coordinates(eqx.Module):
    """The continuous coordinates of n draws of all chains, and `∇_x log g` there."""

    x: Float[np.ndarray, "n d"]
    slope: Float[np.ndarray, "n d"]

    def functions(self, monomials: Monomials) -> Float[np.ndarray, "n m"]:
        """Stein's functions at each draw, in coordinates standardised by all draws.

        Centre and scale come from the draws themselves. This moves the mean by less than 1/n of
        what is subtracted: the span of all monomials up to a degree does not depend on the centre,
        and the scale only sets the weights of the coordinates in `Δφ + ∇φ · ∇ log g`.
        """
        centre, scale = self.x.mean(axis=0), self.x.std(axis=0)
        scale = np.where(scale > 0, scale, 1.0)
        found = np.empty((len(self.x), len(monomials)))
        for first in range(0, len(self.x), _BLOCK):
            some = slice(first, first + _BLOCK)
            x, slope = (self.x[some] - centre) / scale, self.slope[some] * scale
            found[some] = monomials.evaluate(x.T, slope.T).T
        return found


def monomials_for(num_draws: int, dimension: int, degree: int | None) -> Monomials:
    """The monomials that this number of draws allows; a higher `degree` is refused."""
    most = min(num_draws // stein.DRAWS_PER_FUNCTION, _MOST_FUNCTIONS, _MOST_NUMBERS // num_draws)
    if degree is None:
        return Monomials.of(dimension, most)
    wanted, found = (Monomials.of(dimension, limit, degree) for limit in (10**9, most))
    if len(found) < len(wanted):
        raise ValueError(
            f"`from_draws(degree={degree})` needs {len(wanted)} functions of {dimension}"
            f" coordinates, and {num_draws:,} draws allow {most}: leave `degree` out to use the"
            " largest that they allow."
        )
    return wanted


class Control(eqx.Module):
    """Stein's functions at each draw, the fold of each draw, and what is subtracted in each."""

    u: Float[np.ndarray, "n m"]
    fold: Int[np.ndarray, "n"]
    value: Float[np.ndarray, "K m F"]
    score: Float[np.ndarray, "K m P"]
    product: Float[np.ndarray, "K m PF"]

    def subtract(
        self, target: Float[np.ndarray, "n T"], coefficients: Float[np.ndarray, "K m T"]
    ) -> Float[np.ndarray, "n T"]:
        """The target less its regression, with the coefficients that its fold had no part in."""
        left = target.copy()
        for k, here in enumerate(_pieces(self.fold)):
            left[here] -= self.u[here] @ coefficients[k]
        return left


def control_of(
    value: Float[np.ndarray, "n F"],
    score: Float[np.ndarray, "n P"],
    coordinates: Coordinates,
    num_chains: int,
    degree: int | None,
) -> Control | None:
    """The control variates for f and score, centred by all draws, and for their products; `None`
    where the draws are too few for any.

    The centre takes no part: with one degree for all targets the result does not depend on it.
    """
    num_draws, dimension = coordinates.x.shape
    monomials = monomials_for(num_draws, dimension, degree)
    if not len(monomials):
        return None
    u = coordinates.functions(monomials)
    fold = _folds(num_chains, num_draws)
    pieces = _pieces(fold)
    count = np.bincount(fold, minlength=stein.FOLDS).astype(float)
    total_u = np.stack([u[piece].sum(axis=0) for piece in pieces])
    gram = np.stack([u[piece].T @ u[piece] for piece in pieces])

    def fitted(target):
        y = np.stack([target[piece].sum(axis=0) for piece in pieces])
        uy = np.stack([u[piece].T @ target[piece] for piece in pieces])
        yy = np.stack([(target[piece] ** 2).sum(axis=0) for piece in pieces])
        return stein.coefficients(Moments(count, total_u, y, gram, uy, yy), monomials.sizes)

    num_values, num_scores = value.shape[1], score.shape[1]
    # Together where memory allows it: the Gram matrices are factorised once for each call.
    at_once = max(1, _MOST_NUMBERS // num_draws)
    columns = np.arange(num_scores * num_values)
    first = np.concatenate([value, score, products(score, value, columns[:at_once])], axis=1)
    found = [fitted(first)]
    for start in range(at_once, len(columns), at_once):
        found.append(fitted(products(score, value, columns[start : start + at_once])))
    every = np.concatenate(found, axis=-1)
    parts = np.split(every, [num_values, num_values + num_scores], axis=-1)
    return Control(u, fold, *parts)


def products(
    score: Float[np.ndarray, "n P"], value: Float[np.ndarray, "n F"], columns: Int[np.ndarray, "T"]
) -> Float[np.ndarray, "n T"]:
    """`s_p f_i` for the pairs numbered `p F + i`."""
    p, i = np.divmod(columns, value.shape[1])
    return score[:, p] * value[:, i]


def _folds(num_chains: int, num_draws: int) -> Int[np.ndarray, "n"]:
    """The fold of each draw, chains after each other: whole chains where there are enough of them,
    stretches of successive draws otherwise.
    """
    if num_chains >= stein.FOLDS:
        per_chain = np.arange(num_chains) * stein.FOLDS // num_chains
        return np.repeat(per_chain, num_draws // num_chains)
    return np.arange(num_draws) * stein.FOLDS // num_draws


def _pieces(fold: Int[np.ndarray, "n"]) -> list[slice]:
    """The draws of each fold, which follow each other: slices, so that nothing is copied."""
    edges = np.searchsorted(fold, np.arange(stein.FOLDS + 1))
    return [slice(first, last) for first, last in itertools.pairwise(edges.tolist())]
