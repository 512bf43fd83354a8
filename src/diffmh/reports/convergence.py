"""Agreement between the parts of a run: chains, halves of chains, and stretches."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from .display import number_with_error
from .intervals import quantile, shape

# Halves differ significantly if chance makes them differ as much in one of this many runs.
_ONE_RUN_IN = 1000


def mean_and_error(values: Float[Any, "... C"]) -> tuple[np.ndarray, np.ndarray]:
    """The mean over chains, and its standard error."""
    # In double precision: in single, the square of a small number would underflow.
    values = np.asarray(values, float)
    return values.mean(axis=-1), values.std(axis=-1, ddof=1) / math.sqrt(values.shape[-1])


def drift(halves: Float[np.ndarray, "H ... C"]) -> str | None:
    """The means over the two halves of the chains, for the entry in which they differ most; None if
    chance explains the difference.
    """
    # A run of a single step has only one half.
    if len(halves) < 2:
        return None
    num_chains = halves.shape[-1]
    halves = halves.reshape(2, -1, num_chains)
    difference = halves[1] - halves[0]
    mean, error = mean_and_error(difference)
    # The entry was chosen for its difference, so the level is divided by the number of entries.
    chance = quantile(shape(difference), num_chains, 1 - 1 / (_ONE_RUN_IN * len(difference)))
    excess = np.nan_to_num(np.abs(mean) / np.where(error > 0, chance * error, np.inf))
    most = int(np.argmax(excess))
    if not excess[most] > 1:
        return None
    first, second = (number_with_error(*map(float, mean_and_error(half[most]))) for half in halves)
    return f"{first} over the first half and {second} over the second"


def split_r_hat(
    means: Float[np.ndarray, "... H"], within: Float[np.ndarray, "..."], base: float = 1.0
) -> float:
    """Split R̂, `√(base + B/W)`, with B the variance of the means over half chains and W the
    variance within a chain; the largest over the entries.
    """
    # An entry that does not vary within chains gives no information and is left out.
    ratio = means.var(axis=-1, ddof=1) / np.where(within > 0, within, np.inf)
    return math.sqrt(base + float(np.nan_to_num(ratio).max()))


def gradient_r_hat(
    halves: Float[np.ndarray, "H P F C"],
    half_length: float,
    stretches: Float[np.ndarray, "S P F C"],
    length: Int[np.ndarray, "S"],
) -> float:
    """Split R̂ of the gradient, `√(B / B₀)`, with B₀ the variance that means over half chains would
    have if a chain's stretches were independent. Near 1; larger if chains disagree for long.
    """
    if length.size < 4:
        return 1.0
    sized = length.reshape(-1, 1, 1, 1)
    mean = np.sum(sized * stretches, axis=0) / length.sum()
    num_free = stretches.shape[-1] * (len(stretches) - 1)
    # The variance of a mean over L steps is v/L, so length × squared deviation of each stretch
    # estimates v, the variance per step.
    per_step = np.sum(sized * (stretches - mean) ** 2, axis=(0, -1)) / num_free
    return split_r_hat(joined(halves), per_step / half_length, base=0.0)


def joined(parts: Float[np.ndarray, "S ... C"]) -> Float[np.ndarray, "... SC"]:
    """The parts of all chains along one last axis."""
    return np.moveaxis(parts, 0, -1).reshape(*parts.shape[1:-1], -1)


def largest_share(stretches: Float[np.ndarray, "S P F C"], length: Int[np.ndarray, "S"]) -> float:
    """The share of the largest 1 % of the stretches in the sum of the absolute contributions to the
    gradient; the largest over the entries, 0 for fewer than 50 stretches.
    """
    sizes = joined(length.reshape(-1, 1, 1, 1) * np.abs(stretches))
    count = sizes.shape[-1]
    if count < 50:
        return 0.0
    largest = np.sort(sizes, axis=-1)[..., -max(1, count // 100) :].sum(axis=-1)
    total = sizes.sum(axis=-1)
    return float(np.nan_to_num(largest / np.where(total > 0, total, np.inf)).max())


def effective_samples(
    means: Float[np.ndarray, "F C"],
    within: Float[np.ndarray, "F C"],
    batches: Float[np.ndarray, "S F C"],
    length: Int[np.ndarray, "S"],
) -> Float[np.ndarray, "F"]:
    """`C N σ² / (L s²)`, with σ² the variance of f over all samples and s² that of its means over
    batches of length L.

    If batches are too short to be independent, s² comes from the means of the chains. From ν + 1
    means, 1/s² is too large by a factor ν/(ν − 2) on average, which is corrected.
    """
    about = means.mean(axis=-1, keepdims=True)
    variance = np.mean(within + (means - about) ** 2, axis=-1)
    batch_freedom, chain_freedom = max(1, batches[:, 0].size - 1), means.shape[-1] - 1
    deviations = length.reshape(-1, 1, 1) * (batches - about) ** 2
    batch_variance = np.sum(deviations, axis=(0, 2)) / batch_freedom
    chain_variance = length.sum() * means.var(axis=-1, ddof=1)
    # If batches are dependent, chains differ more than their batches would explain.
    dependent = chain_variance > 2 * batch_variance
    longest = np.where(dependent, chain_variance, batch_variance)
    freedom = np.where(dependent, chain_freedom, batch_freedom)
    inflated = longest * (freedom / np.maximum(freedom - 2, 1))
    positive = (variance > 0) & (longest > 0)
    count = length.sum() * means.shape[-1]
    return np.where(positive, count * variance / np.where(positive, inflated, 1.0), np.nan)


def autocorrelation_time(series: Float[np.ndarray, "C n"]) -> float:
    """`1 + 2 Σ ρ_k` about the mean of all chains, summed up to the first lag beyond five times
    the sum (Sokal 1997); at least 1.

    The mean is that of the draws themselves, which takes `τ/(C n)` off every ρ: the sum up to lag W
    is `1 + (2W + 1)/(C n)` times too small (Wolff 2004), which is corrected.
    """
    chains, draws = series.shape
    # Padded to twice the length, so that the circular correlation is the linear one.
    spectrum = np.abs(np.fft.rfft(series - series.mean(), 2 * draws)) ** 2
    covariance = np.fft.irfft(spectrum.mean(axis=0))[:draws] / draws
    if not covariance[0] > 0:
        return 1.0
    lags = np.arange(draws)
    times = 2 * np.cumsum(covariance / covariance[0]) - 1
    times = times * (1 + (2 * lags + 1) / (chains * draws))
    enough = lags >= 5 * times
    return max(1.0, float(times[np.argmax(enough)] if enough.any() else draws))


def batch_inflation(time: float, length: int, draws: int, chains: int) -> float:
    """The factor by which batches of this length, for draws with this autocorrelation time, make
    the standard error too small.

    For a first-order autoregression of time τ a mean over L draws has the variance `a(L)/L`, with
    `a(L) = τ − (τ² − 1)/(2L)`, so batches that are not long differ by less than independent ones.
    And they depend on each other: with B of them the variance over B that they show is expected to
    be `(a(L)/L − v)/(B − 1)`, where `v = a(n)/(n C)` is that of the mean of all C chains.
    """

    def variance(length):
        return max(time - (time**2 - 1) / (2 * length), 0.5 * time) / length

    count, all_draws = chains * (draws // length), variance(draws) / chains
    shown = (variance(length) - all_draws) / max(1, count - 1)
    return math.sqrt(min(max(1.0, all_draws / shown), 4.0)) if shown > 0 else 2.0
