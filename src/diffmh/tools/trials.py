"""Statistical tests of what a kernel's parts promise, on draws: lists of p-values.

Every p-value is valid or conservative, so that whoever takes the least of many, times their number,
knows the rate of false alarms. Means that are compared are of values in [0, 1].
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, PyTree

# All statistical tests of one check together raise a false alarm less often than this.
FALSE_ALARM = 5e-4
# A mean of rare events is not normal: means are compared where they rest on this many.
_LEAST_EVENTS = 400
# Nor is one that a single term carries: of its variance it has at most this share.
_LARGEST_SHARE = 0.02
# Outcomes of a proposal on finitely many states that are counted one by one.
_MOST_OUTCOMES = 1_000
_MOST_COLUMNS = 8


class Verdict(eqx.Module):
    """One promise, whether it was kept, and what was seen."""

    promise: str
    kept: bool
    detail: str

    @staticmethod
    def of(promise: str, kept: bool, right: str, wrong: str) -> Verdict:
        return Verdict(promise, kept, right if kept else wrong)


class Trial(eqx.Module):
    """A promise that was tried on draws: the p-values of its tests, and what a small one means."""

    promise: str
    p_values: tuple[float, ...]
    meaning: str

    def judged(self, num_tests: int) -> Verdict:
        """Broken where the least p-value is too small among all the tests of the check."""
        if not self.p_values:
            return Verdict(self.promise, True, "not tried: nothing to compare with")
        least = min(self.p_values)
        kept = bool(least * num_tests > FALSE_ALARM)
        tried = f"least p-value of {len(self.p_values)} tests {least:.2g}"
        return Verdict(self.promise, kept, tried if kept else f"{tried}: {self.meaning}")


def equal_means(a: np.ndarray, b: np.ndarray) -> float:
    """The p-value of two samples of values in [0, 1], equally long, having the same mean."""
    from scipy import stats

    if not np.all(np.isfinite(a)) or not np.all(np.isfinite(b)):
        return 0.0
    count, gap = len(a), abs(a.mean() - b.mean())
    if count * max(a.mean(), b.mean()) < _LEAST_EVENTS:
        return 1.0
    # The larger variance of the two: the other may not have seen its rare events.
    error = np.sqrt(2 * max(a.var(), b.var()) / count)
    if error < 1e-6:
        return 1.0 if gap < 1e-3 else 0.0
    return float(2 * stats.norm.sf(gap / error))


def mean_zero(terms: np.ndarray) -> float:
    """The p-value of independent terms, which may be importance-weighted, having the mean 0; 1
    where too few of them carry the sum for it to be normal.
    """
    from scipy import stats

    if not np.all(np.isfinite(terms)):
        return 0.0
    squares = np.sum(terms**2)
    if np.count_nonzero(terms) < _LEAST_EVENTS or np.max(terms**2) > _LARGEST_SHARE * squares:
        return 1.0
    spread = np.sqrt(squares - np.sum(terms) ** 2 / len(terms))
    return float(2 * stats.norm.sf(abs(np.sum(terms)) / spread)) if spread > 0 else 0.0


def bridge(at_a: np.ndarray, at_b: np.ndarray) -> list[float]:
    """Tests that two samples have the two densities that are claimed, from `log q_b − log q_a` at
    draws of the first and of the second.

    With `s = q_b / (q_a + q_b)`, the mean of `h s` over draws from `q_a` is that of `h (1 − s)`
    over draws from `q_b`, for any h: both are `∫ h q_a q_b / (q_a + q_b)`. Here with h = 1 and
    h = s.
    """

    def share(log_ratio):
        return 1 / (1 + np.exp(-np.clip(log_ratio, -700, 700)))

    # Means of values in [0, 1], whatever the densities are: no importance weight can be large.
    first, second = share(at_a), share(at_b)
    return [
        equal_means(first, 1 - second),
        equal_means(first**2, second * (1 - second)),
    ]


class Reference:
    """A normal distribution fitted to draws by medians, quartiles and ranks, which heavy tails do
    not move.
    """

    def __init__(self, draws: np.ndarray):
        from scipy import stats

        low, self.middle, high = np.quantile(draws, [0.25, 0.5, 0.75], axis=0)
        self.spread = (high - low) / 1.349
        scores = stats.norm.ppf((stats.rankdata(draws, axis=0) - 0.5) / len(draws))
        # Of normal scores: bounded influence of any single draw.
        correlation = np.atleast_2d(np.corrcoef(scores, rowvar=False))
        usable = np.all(self.spread > 0) and np.linalg.eigvalsh(correlation)[0] > 1e-6
        self.usable = bool(usable)
        self.lower = np.linalg.cholesky(correlation if usable else np.eye(len(correlation)))

    def sample(self, rng: np.random.Generator, count: int) -> np.ndarray:
        normal = rng.normal(size=(count, len(self.middle)))
        return self.middle + self.spread * (normal @ self.lower.T)

    def log_density(self, draws: np.ndarray) -> np.ndarray:
        normal = np.linalg.solve(self.lower, ((draws - self.middle) / self.spread).T)
        log_volume = np.sum(np.log(self.spread)) + np.sum(np.log(np.diagonal(self.lower)))
        size = len(self.middle)
        return -0.5 * np.sum(normal**2, axis=0) - log_volume - 0.5 * size * np.log(2 * np.pi)


def outcomes(draws: np.ndarray, log_q: np.ndarray) -> list[float]:
    """Tests that draws on finitely many states have the probabilities `exp(log_q)`: one half says
    which outcomes there are, their numbers in the other half are binomial.
    """
    from scipy import stats

    half = len(draws) // 2
    seen, first, which = np.unique(draws, axis=0, return_index=True, return_inverse=True)
    which = which.ravel()
    # Cells are chosen by one half and counted in the other: counts are binomial given the cells.
    cells = np.unique(which[:half])
    if len(seen) > _MOST_OUTCOMES:
        return []
    claimed = np.exp(log_q[first[cells]])
    if claimed.sum() > 1 + 1e-3:
        return [0.0]
    counts = np.bincount(which[half:], minlength=len(seen))[cells]
    rest = (len(draws) - half) - counts.sum()
    # The float32 sum of all that was seen may lack or exceed one by its rounding.
    missing = np.clip(1 - claimed.sum(), 1e-6 if rest else 0.0, 1.0)
    total, claimed = len(draws) - half, np.append(claimed, missing)
    counts = np.append(counts, rest)
    lower = stats.binom.cdf(counts, total, claimed)
    upper = stats.binom.sf(counts - 1, total, claimed)
    return list(np.minimum(1.0, 2 * np.minimum(lower, upper)))


def same_law(a: np.ndarray, b: np.ndarray, atoms: list[np.ndarray]) -> list[float]:
    """Tests that two samples, equally long, are of one distribution: each coordinate by
    Kolmogorov–Smirnov, by its mean rank and by its mean squared rank; coordinates jointly by
    products of ranks and by random projections; and how often each of `atoms` is hit exactly.
    """
    from scipy import stats

    p_values = [
        _same_frequency(np.all(a == atom, axis=1), np.all(b == atom, axis=1)) for atom in atoms
    ]
    # A coordinate that is constant in both samples has no ranks to compare.
    moving = np.flatnonzero((a != a[0]).any(axis=0) | (b != a[0]).any(axis=0))[:_MOST_COLUMNS]
    if not len(moving):
        return p_values
    a, b = a[:, moving], b[:, moving]
    # Ranks of both together: under the null hypothesis the two halves are exchangeable, and values
    # are bounded whatever the tails.
    ranks = (stats.rankdata(np.concatenate([a, b]), axis=0) - 0.5) / (2 * len(a))
    r, s = ranks[: len(a)], ranks[len(a) :]
    r_squared, s_squared = (2 * r - 1) ** 2, (2 * s - 1) ** 2
    for i in range(a.shape[1]):
        p_values += [
            _kolmogorov_smirnov(a[:, i], b[:, i]),
            equal_means(r[:, i], s[:, i]),
            equal_means(r_squared[:, i], s_squared[:, i]),
        ]

    def joint(u, i, j):
        return 0.5 + 2 * (u[:, i] - 0.5) * (u[:, j] - 0.5)

    for i, j in itertools.combinations(range(a.shape[1]), 2):
        p_values.append(equal_means(joint(r, i, j), joint(s, i, j)))
    if a.shape[1] > 1:
        directions = np.random.default_rng(0).normal(size=(a.shape[1], 4))
        for u, v in zip((r @ directions).T, (s @ directions).T, strict=True):
            p_values.append(_kolmogorov_smirnov(u, v))
    return p_values


def _kolmogorov_smirnov(a: np.ndarray, b: np.ndarray) -> float:
    from scipy import stats

    return float(np.asarray(stats.ks_2samp(a, b, method="asymp"))[1])


def _same_frequency(a: np.ndarray, b: np.ndarray) -> float:
    """The exact p-value of an event being as frequent in two samples: given their sum, one count is
    binomial.
    """
    from scipy import stats

    total = int(a.sum() + b.sum())
    return float(stats.binomtest(int(a.sum()), total, 0.5).pvalue) if total else 1.0


def flat(tree: PyTree) -> np.ndarray:
    """States leading, all coordinates of all leaves after, in the order of `ravel_pytree`."""
    leaves = [np.asarray(leaf, float) for leaf in jax.tree.leaves(tree)]
    return np.concatenate([leaf.reshape(leaf.shape[0], -1) for leaf in leaves], axis=1)


def directions(num_parameters: int, most: int) -> np.ndarray:
    """Directions of θ to differentiate along: each parameter, or a few of random signs."""
    if num_parameters <= most:
        return np.eye(num_parameters)
    return np.random.default_rng(0).choice([-1.0, 1.0], (most, num_parameters))


@eqx.filter_jit
def log_densities(
    log_density: Callable[..., Array], theta: PyTree, args: tuple[Any, ...], states: PyTree
) -> Array:
    """`log g` at each state."""
    return jax.vmap(lambda x: log_density(theta, x, *args))(states)
