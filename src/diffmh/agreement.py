"""Whether the parts of a run agree: its chains with each other, and each chain's first half with
its second.
"""

from __future__ import annotations

import math

import equinox as eqx
import numpy as np
from jaxtyping import Float

from .counts import Watch
from .intervals import Stretches, quantile, shape
from .simulation import Outcome

# Halves are said to differ if chance would make them differ as much once in so many runs.
_ONCE_IN = 1000


class Drift(eqx.Module):
    """The entry whose two halves differ most: mean and error over each, and the difference in units
    of what chance may do.
    """

    first: tuple[float, float]
    second: tuple[float, float]
    excess: float

    @property
    def visible(self) -> bool:
        return self.excess > 1

    def __str__(self) -> str:
        (a, da), (b, db) = self.first, self.second
        return f"{a:.3g} ± {da:.1g} over the first half and {b:.3g} ± {db:.1g} over the second"


def drift(halves: Float[np.ndarray, "H ... C"]) -> Drift:
    """How the mean over the first half differs from that over the second, entry by entry. A single
    step has one half.
    """
    if len(halves) < 2:
        return Drift((math.nan, math.nan), (math.nan, math.nan), 0.0)
    num_chains = halves.shape[-1]
    halves = halves.reshape(2, -1, num_chains)
    means = halves.mean(axis=-1)
    errors = halves.std(axis=-1, ddof=1) / math.sqrt(num_chains)
    apart = halves[1] - halves[0]
    error = apart.std(axis=-1, ddof=1) / math.sqrt(num_chains)
    chance = quantile(shape(apart), num_chains, 1 - 1 / (_ONCE_IN * len(apart)))
    reach = np.where(error > 0, chance * error, np.inf)
    excess = np.nan_to_num(np.abs(apart.mean(axis=-1)) / reach)
    most = int(np.argmax(excess))
    pair = lambda half: (float(means[half, most]), float(errors[half, most]))
    return Drift(pair(0), pair(1), float(excess[most]))


def value_r_hat(outcome: Outcome, halves: Stretches) -> float:
    """Split R̂ of f's value, `√(1 + B/W)`: B the variance of the means over half chains, W that of f
    within a chain; the largest of its entries.
    """
    assert isinstance(outcome.watch, Watch)
    means, origin = np.asarray(outcome.observed.value, float), outcome.watch.per_chain.origin
    within = np.asarray(outcome.observed.watched, float) - (means - np.asarray(origin)) ** 2
    within = np.mean(within, axis=-1)
    between = _of_half_chains(np.asarray(halves.value, float))
    ratio = between / np.where(within > 0, within, np.inf)
    return math.sqrt(1 + float(np.nan_to_num(ratio).max()))


def gradient_r_hat(halves: Stretches, stretches: Stretches) -> float:
    """The same of the gradient, `√(B / B₀)`, with B₀ the variance that means over half chains would
    have if the stretches of a chain were independent: near 1, larger where what one chain says
    for long another does not.
    """
    if stretches.length.size < 4:
        return 1.0
    length = stretches.length.reshape(-1, 1, 1, 1)
    parts = np.asarray(stretches.jacobian, float)
    mean = np.sum(length * parts, axis=0) / length.sum()
    num_free = parts.shape[-1] * (len(parts) - 1)
    per_step = np.sum(length * (parts - mean) ** 2, axis=(0, -1)) / num_free
    expected = per_step / np.mean(halves.length)
    ratio = _of_half_chains(np.asarray(halves.jacobian, float)) / np.where(
        expected > 0, expected, np.inf
    )
    return math.sqrt(float(np.nan_to_num(ratio).max()))


def _of_half_chains(halves: Float[np.ndarray, "H ... C"]) -> Float[np.ndarray, "..."]:
    return np.moveaxis(halves, 0, -1).reshape(*halves.shape[1:-1], -1).var(axis=-1, ddof=1)


def largest_share(stretches: Stretches) -> float:
    """Of the sum of the sizes of all stretches' contributions to the gradient, the share of the
    largest 1 %; of the entry where it is greatest. 0 if there are too few to say.
    """
    parts = stretches.length.reshape(-1, 1, 1, 1) * np.abs(np.asarray(stretches.jacobian, float))
    sizes = np.moveaxis(parts, 0, -1).reshape(*parts.shape[1:3], -1)
    count = sizes.shape[-1]
    if count < 50:
        return 0.0
    largest = np.sort(sizes, axis=-1)[..., -max(1, count // 100) :].sum(axis=-1)
    total = sizes.sum(axis=-1)
    return float(np.nan_to_num(largest / np.where(total > 0, total, np.inf)).max())
