"""Stein's control variates: functions of mean zero under a density known up to a constant.

For x in R^d and a density g that is continuous, positive and almost everywhere differentiable, with
`g ∇φ → 0` at infinity, integration by parts gives

    U_φ(x) = Δφ(x) + ∇φ(x) · ∇ log g(x),      E[U_φ] = 0.

φ runs over the monomials of degree 1 to 3 in standardised coordinates `(x − centre)/scale`. What is
averaged (f, the score s, and `(f − m_f)(s − m_s)`) has its regression on the U's subtracted, with
coefficients from the *other* folds of the draws: given those, the mean is unchanged. Degree, 0
included, and ridge are chosen within the other folds too, so that no draw has a say in its own
coefficients.

The conditions matter. On a half-normal, which jumps at 0, φ = x has `E[U] = −0.798`: constrained
coordinates would bias every answer (`docs/mathematics.md`).

Everything here is written for NumPy and for JAX: `from_draws` computes in double precision on the
host, `Covariance(control="stein")` within its compiled program.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from ..analysis import Jump, moving_jumps
from ..base.validate import NotDifferentiable

# Coefficients for one fold come from the others; choices for it from pairs of the others.
FOLDS = 4
# Draws for each function.
DRAWS_PER_FUNCTION = 10
# Relative to the diagonal of the Gram matrix, the smallest for float64 and float32: below it the
# rounding of the sums would decide.
_SMALL_RIDGE = {8: 1e-9, 4: 1e-5}
_RIDGE = 1e-2
# A degree is chosen over none if it is expected to leave at most this share of the variance.
_WORTHWHILE = 0.95

Numbers = Float[Array | np.ndarray, "..."]


class Monomials(eqx.Module):
    """Monomials `x_a x_b x_c` in d coordinates, by their three indices; index d stands for 1.

    They are ordered by degree: of the first `sizes[i]`, those of degree 1, then of degree 2 without
    and with cross terms, then all of degree 3.
    """

    dimension: int = eqx.field(static=True)
    indices: tuple[tuple[int, int, int], ...] = eqx.field(static=True)
    sizes: tuple[int, ...] = eqx.field(static=True)

    @staticmethod
    def of(dimension: int, most: int, degree: int | None = None) -> Monomials:
        """As many of them as `most` allows, of at most this degree."""
        counts = _counts(dimension)
        allowed = 4 if degree is None else (0, 1, 3, 4)[degree]
        sizes = tuple(count for count in counts[:allowed] if count <= most)
        return Monomials(dimension, _indices(dimension, len(sizes)), sizes)

    def __len__(self) -> int:
        return len(self.indices)

    def evaluate(self, x: Numbers, slope: Numbers) -> Numbers:
        """`U_φ` of each monomial, (m, ...), at coordinates (d, ...) where `∇ log g` is `slope`."""
        xp = jnp if isinstance(x, jax.Array) else np
        a, b, c = np.array(self.indices, int).reshape(-1, 3).T
        one, zero = xp.ones_like(x[:1]), xp.zeros_like(x[:1])
        x, slope = xp.concatenate([x, one]), xp.concatenate([slope, zero])
        xa, xb, xc = x[a], x[b], x[c]

        def same(i, j):
            equal = ((i == j) & (i < self.dimension)).astype(x.dtype)
            return equal.reshape(-1, *(1,) * (x.ndim - 1))

        # ∂_i∂_i of a product: two of its three factors are differentiated, in either order.
        bend = 2 * (same(a, b) * xc + same(a, c) * xb + same(b, c) * xa)
        return slope[a] * (xb * xc) + xa * (slope[b] * xc + xb * slope[c]) + bend


def _counts(d: int) -> tuple[int, int, int, int]:
    """The number of monomials up to each stage."""
    cubes = math.comb(d + 2, 3)
    return d, 2 * d, 2 * d + math.comb(d, 2), 2 * d + math.comb(d, 2) + cubes


@functools.cache
def _indices(d: int, stages: int) -> tuple[tuple[int, int, int], ...]:
    found: list[tuple[int, int, int]] = []
    if stages > 0:
        found += [(i, d, d) for i in range(d)]
    if stages > 1:
        found += [(i, i, d) for i in range(d)]
    if stages > 2:
        found += [(i, j, d) for i, j in itertools.combinations(range(d), 2)]
    if stages > 3:
        found += itertools.combinations_with_replacement(range(d), 3)
    return tuple(found)


class Moments(eqx.Module):
    """Sums over the draws of each of K folds: their number, and those of U, of the T targets y, and
    of the products of them that least squares needs.
    """

    count: Float[Any, "K"]
    u: Float[Any, "K m"]
    y: Float[Any, "K T"]
    uu: Float[Any, "K m m"]
    uy: Float[Any, "K m T"]
    yy: Float[Any, "K T"]

    def about(self, fold: int, without: tuple[int, ...], xp) -> tuple[Any, Any, Any]:
        """The sums of products over one fold, or over all folds but `without` where `fold` is −1,
        about the means over all folds but `without`.
        """
        kept = [k for k in range(self.count.shape[0]) if k not in without]
        take = kept if fold < 0 else [fold]

        def total(leaf, folds):
            return functools.reduce(lambda a, b: a + b, [leaf[k] for k in folds])

        number = total(self.count, kept)
        mean_u, mean_y = total(self.u, kept) / number, total(self.y, kept) / number
        count, u, y = (total(leaf, take) for leaf in (self.count, self.u, self.y))
        uu, uy, yy = (total(leaf, take) for leaf in (self.uu, self.uy, self.yy))
        cross = xp.outer(u, mean_u)
        uu = uu - cross - cross.T + count * xp.outer(mean_u, mean_u)
        uy = uy - xp.outer(mean_u, y) - xp.outer(u, mean_y) + count * xp.outer(mean_u, mean_y)
        return uu, uy, yy - 2 * mean_y * y + count * mean_y**2


def coefficients(moments: Moments, sizes: tuple[int, ...]) -> Numbers:
    """The coefficients (K, m, T) of the regressions of the targets on the U's for each fold, from
    the other folds alone; zero beyond the degree that was chosen, for each target by itself.
    """
    xp = jnp if isinstance(moments.u, jax.Array) else np
    num_folds = moments.count.shape[0]
    if not sizes or num_folds < 3:
        return xp.zeros_like(moments.uy)
    folds = range(num_folds)
    pairs = list(itertools.combinations(folds, 2))
    candidates = functools.partial(_candidates, sizes=sizes, xp=xp)
    both = _each(candidates, [moments.about(-1, pair, xp)[:2] for pair in pairs], xp)
    final = _each(candidates, [moments.about(-1, (k,), xp)[:2] for k in folds], xp)
    # For each fold the other ones in turn, fitted to neither of the two.
    held = [(j, (min(j, k), max(j, k))) for k in folds for j in folds if j != k]
    tests = [(*moments.about(j, pair, xp), both[pairs.index(pair)]) for j, pair in held]
    plain, left = zip(*_each(_held_out, tests, xp), strict=True)
    others = num_folds - 1

    def total(parts, k):
        return functools.reduce(lambda a, b: a + b, parts[k * others : (k + 1) * others])

    chosen = [(total(plain, k), total(left, k), final[k]) for k in folds]
    return xp.stack(_each(functools.partial(_chosen, xp=xp), chosen, xp))


def _each(function: Any, arguments: list[tuple[Any, ...]], xp) -> list[Any]:
    """`function(*one)` for each of the arguments: one program for all of them in JAX."""
    if xp is np:
        return [function(*one) for one in arguments]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *arguments)
    found = jax.vmap(function)(*stacked)
    return [jax.tree.map(lambda leaf, i=i: leaf[i], found) for i in range(len(arguments))]


def _candidates(uu: Numbers, uy: Numbers, sizes: tuple[int, ...], xp) -> Numbers:
    """The least-squares coefficients (candidates, m, T) of each ridge and stage."""
    # In units in which the diagonal is 1, so that a ridge means the same for every function.
    size = xp.sqrt(xp.maximum(xp.diagonal(uu), 0.0))
    unit = xp.where(size > 0, 1 / xp.where(size > 0, size, 1.0), 0.0)
    correlation, along = uu * unit[:, None] * unit[None], uy * unit[:, None]
    found = []
    for ridge in (_SMALL_RIDGE[uu.dtype.itemsize], _RIDGE):
        # A factor of a leading block is the leading block of the factor.
        factor = _cholesky(correlation + (ridge + (size == 0)) * xp.eye(len(unit)), xp)
        for stage in sizes:
            solved = _solve(factor[:stage, :stage], along[:stage], xp) * unit[:stage, None]
            rest = xp.zeros((len(unit) - stage, uy.shape[1]), uy.dtype)
            found.append(xp.concatenate([solved, rest]))
    return xp.stack(found)


def _cholesky(matrix: Numbers, xp) -> Numbers:
    if xp is jnp:
        return jnp.linalg.cholesky(matrix)  # NaN where it does not exist
    try:
        return np.linalg.cholesky(matrix)
    except np.linalg.LinAlgError:
        return np.full_like(matrix, np.nan)


def _solve(factor: Numbers, right: Numbers, xp) -> Numbers:
    if xp is jnp:
        return jax.scipy.linalg.cho_solve((factor, True), right)
    from scipy.linalg import cho_solve

    return np.asarray(cho_solve((factor, True), right, check_finite=False))


def _held_out(uu: Numbers, uy: Numbers, yy: Numbers, tried: Numbers) -> tuple[Numbers, Numbers]:
    """Sums of squares (T) and (candidates, T) over one fold about a fit that it had no part in:
    without regression, and with each candidate's.
    """
    xp = jnp if isinstance(uu, jax.Array) else np
    crossed = xp.einsum("kmt,mt->kt", tried, uy)
    curved = xp.sum(tried * xp.matmul(uu[None], tried), axis=1)
    return yy, yy[None] - 2 * crossed + curved


def _chosen(plain: Numbers, left: Numbers, candidates: Numbers, xp) -> Numbers:
    """For each target the candidate that left least on draws that it had not seen, or none."""
    # What could not be solved is never chosen.
    possible = xp.isfinite(left) & xp.all(xp.isfinite(candidates), axis=1)
    left = xp.where(possible, left, xp.inf)
    best = xp.argmin(left, axis=0)
    least = xp.min(left, axis=0)
    picked = xp.take_along_axis(xp.nan_to_num(candidates), best[None, None], axis=0)[0]
    return xp.where(least < _WORTHWHILE * plain, picked, 0.0)


def continuous_part(x: PyTree) -> tuple[Any, Any]:
    """The floating leaves of a state, on which Stein's functions depend, and the rest."""
    return eqx.partition(x, lambda leaf: jnp.issubdtype(jnp.result_type(leaf), jnp.floating))


def dimension(x: PyTree) -> int:
    """The number of continuous coordinates of a state, or of its form."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(continuous_part(x)[0]))


def jumps_in_x(log_density: Any, theta: PyTree, x: PyTree) -> list[Jump]:
    """The places where a density may jump in continuous x, wherever they are: those of the
    analysis that lets x move.
    """
    return moving_jumps(log_density, theta, x, x_moves=True)


def refuse_unless_continuous(jumps: Callable[[], Iterable[Jump]], x: PyTree) -> None:
    """Refuse a state without real coordinates, and a density that is not proved to be continuous in
    x: `jumps()` are the places where it may jump.
    """
    if dimension(x) == 0:
        raise ValueError(
            "`control='stein'` needs real coordinates, and the state has integers only: leave"
            " `control` out."
        )
    for jump in jumps():
        raise NotDifferentiable(
            f"`control='stein'` needs a density that is continuous in x, and `log_density`"
            f" {'jumps' if jump.certain else 'may jump'} (`{jump.primitive}` at {jump.where}): its"
            " functions would not have the mean zero. Leave `control` out, transform x so that it"
            " is unconstrained, or vouch for it: `log_density = diffmh.continuous(log_density)`."
        )
