"""Means, standard deviations and quantiles of posterior quantities: their derivatives with respect
to θ from draws, and how far each derivative can be trusted.

Each derivative D is a smooth function of means over draws, so that to first order its error is the
mean of an influence ψ over the draws, `D̂ − D ≈ mean ψ`. With s the score `∂_θ log g`, c the
quantity less its mean and v the mean of c²:

- mean:      `D = E[c s + ∂f]`,               `ψ = c s + ∂f − D`;
- sd:        `D = V / (2√v)`, `V = E[(c² − v) s + 2 c ∂f]`, where the derivative of the mean drops
  out because E[c] = 0;
- quantile:  `D = −A / p`, `A = E[(G − E G) s − K ∂f]`, `p = E K`, at the sample's quantile q, with
  `G = Φ((q − f)/h)` for the indicator 1{f ≤ q} and K its derivative with respect to q. It is
  exactly the derivative of the quantile of `f + h ε`, ε ~ N(0, 1).

The influences of v, of p and of q itself enter ψ, so that their errors enter the interval.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import numpy as np
from jaxtyping import Float

from ..reports.convergence import autocorrelation_time, mean_and_error
from ..reports.intervals import ends, shape
from .draw_averages import AtDraws, batches_per_chain, largest_r_hat

# A window about a quantile needs this many different values in it to have a density.
_LEAST_DISTINCT = 8


def checked_quantities(quantities: Any) -> tuple[str, ...]:
    """The names, each `mean`, `sd`, `median` or `q` and a percentage."""
    where = "sensitivity(quantities=...)"
    names = (quantities,) if isinstance(quantities, str) else quantities
    if not isinstance(names, Sequence) or not names:
        raise TypeError(
            f'`{where}` must be names such as ("mean", "sd", "q05"), got {quantities!r}.'
        )
    for name in names:
        if not isinstance(name, str) or (name not in ("mean", "sd") and _level(name) is None):
            raise ValueError(
                f"`{where}` must be among 'mean', 'sd', 'median' and 'q' with a percentage between"
                f" 0 and 100, such as 'q05' or 'q97.5', got {name!r}."
            )
    return tuple(dict.fromkeys(names))


def _level(name: str) -> float | None:
    """The probability of a quantile, None if it is not one."""
    if name == "median":
        return 0.5
    match = re.fullmatch(r"q(\d+(?:\.\d+)?)", name)
    level = float(match[1]) / 100 if match else 0.0
    return level if 0 < level < 1 else None


class DrawInfluence(eqx.Module):
    """A derivative `(P,)` of one quantity and its influence at each draw `(C, n, P)`; NaN where it
    does not exist, with the reason in `missing`.
    """

    derivative: Float[np.ndarray, "P"]
    series: Float[np.ndarray, "C n P"]
    missing: str = ""


def influence(name: str, at: AtDraws, entry: int) -> DrawInfluence:
    """The derivative of a quantity's mean, sd or quantile, by name."""
    if name == "mean":
        return _of_mean(at, entry)
    if name == "sd":
        return _of_deviation(at, entry)
    level = _level(name)
    assert level is not None
    return _of_quantile(at, entry, level)


def _parts(at: AtDraws, entry: int):
    """The quantity, the centred score and the quantity's own derivative at each draw."""
    slope = at.slope[..., entry] if at.slope.ndim > 2 else np.zeros(1)
    return at.value[..., entry], at.score - at.mean(at.score), slope


def _of_mean(at: AtDraws, entry: int) -> DrawInfluence:
    value, score, slope = _parts(at, entry)
    terms = (value - at.mean(value))[..., None] * score + slope
    derivative = at.mean(terms)
    return DrawInfluence(derivative, terms - derivative)


def _of_deviation(at: AtDraws, entry: int) -> DrawInfluence:
    value, score, slope = _parts(at, entry)
    mean_slope = _of_mean(at, entry).derivative
    centred = (value - at.mean(value))[..., None]
    variance = float(at.mean(centred**2)[0])
    if not variance > 0:
        return _none(at, "the quantity does not vary")
    beyond = centred**2 - variance
    terms = beyond * score + 2 * centred * slope
    moved = at.mean(terms)
    root = math.sqrt(variance)
    # ∂V/∂mean is −2 dE[f], and ∂(V / 2√v)/∂v is −V / (4 v √v).
    series = (terms - moved - 2 * mean_slope * centred) / (2 * root)
    return DrawInfluence(moved / (2 * root), series - moved / (4 * variance * root) * beyond)


def _of_quantile(at: AtDraws, entry: int, level: float) -> DrawInfluence:
    value, score, slope = _parts(at, entry)
    at_quantile, width = _window(at, value, level)
    if not width > 0:
        return _none(
            at, "its draws repeat at this quantile: a discrete quantity has no density there"
        )
    from scipy.special import ndtr

    unit = ((at_quantile - value) / width)[..., None]
    below = ndtr(unit)
    below = below - at.mean(below)
    kernel = np.exp(-0.5 * unit**2) / (math.sqrt(2 * math.pi) * width)
    steeper = -unit / width * kernel
    density = float(at.mean(kernel)[0])
    terms = below * score - kernel * slope
    moved = at.mean(terms)
    derivative = -moved / density
    # D'(q), by which the quantile's own error moves D.
    moved_further = at.mean(kernel * score - steeper * slope)
    by_place = -(moved_further + derivative * at.mean(steeper)) / density
    series = -(terms - moved + derivative * (kernel - density) + by_place * below) / density
    return DrawInfluence(derivative, series)


def _none(at: AtDraws, reason: str) -> DrawInfluence:
    chains, draws, count = at.score.shape
    return DrawInfluence(np.full(count, np.nan), np.full((chains, draws, count), np.nan), reason)


def _window(at: AtDraws, value: np.ndarray, level: float) -> tuple[float, float]:
    """The quantile, and the kernel's width h there: that of a window of probability ±δ about it,
    with Hall and Sheather's (1988) δ, `(1.5 φ²/(2z² + 1))^⅓ z_{.975}^⅔ n^−⅓`, for which the error
    of the spread is small beside that of the derivative; 0 for fewer than a few distinct values.
    """
    from scipy.special import ndtri

    order = np.argsort(value, axis=None)
    ordered, weights = value.ravel()[order], at.weights.ravel()[order]
    # The probability up to the middle of each draw's own share.
    reached = (np.cumsum(weights) - weights / 2) / weights.sum()
    at_quantile = float(np.interp(level, reached, ordered))
    series = at.weights * ((value <= at_quantile) - level)
    count = weights.sum() ** 2 / np.sum(weights**2) / autocorrelation_time(series)
    z = float(ndtri(level))
    density = math.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
    reach = (1.5 * density**2 / (2 * z * z + 1)) ** (1 / 3) * 1.96 ** (2 / 3) * count ** (-1 / 3)
    reach = min(reach, 0.9 * level, 0.9 * (1 - level))
    low, high = np.interp([level - reach, level + reach], reached, ordered)
    inside = ordered[(ordered >= low) & (ordered <= high)]
    if np.unique(inside).size < _LEAST_DISTINCT:
        return at_quantile, 0.0
    # The standard deviation of a uniform window of this width.
    return at_quantile, float(high - low) / 2 / math.sqrt(3)


class Judgement(eqx.Module):
    """Error and interval of a derivative from the influence at each draw, and what tells how far to
    trust them: split R̂ and effective draws.
    """

    error: float
    low: float
    high: float
    r_hat: float
    effective_draws: float


def judge(
    derivative: float, series: Float[np.ndarray, "C n"], weights: np.ndarray, level: float
) -> Judgement:
    """The error from the means over batches of about 20 autocorrelation times of this series."""
    if not np.all(np.isfinite(series)):
        return Judgement(*(math.nan,) * 5)
    weighted = weights * series
    chains, draws = series.shape
    time = autocorrelation_time(weighted)
    count = batches_per_chain(chains, draws, time)
    length = draws // count
    batches = derivative + weighted[:, draws - count * length :].reshape(-1, length).mean(axis=1)
    _, error = mean_and_error(batches)
    low, high = ends(np.asarray(derivative), error, shape(batches), chains * count, level)
    return Judgement(
        float(error),
        float(low),
        float(high),
        largest_r_hat(weighted[None]),
        weights.sum() ** 2 / np.sum(weights**2) / time,
    )
