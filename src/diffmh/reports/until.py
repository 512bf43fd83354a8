"""Stop a run when its gradient is known well enough."""

from __future__ import annotations

import dataclasses
import math
import time

import equinox as eqx
import jax
import numpy as np

from ..base import validate
from ..base.validate import Checked
from .report import Report

# With fewer chains the error itself is too uncertain: a run that stops when its error looks small
# would too often stop because it is underestimated.
_LEAST_CHAINS = 64
# The largest number of rounds, if the user sets no limit.
_MOST_ROUNDS = 1_000


class Until(eqx.Module):
    """Stop when the interval of every entry of the gradient, at `level`, extends no further from
    its estimate than `absolute`, or than `relative` times the largest entry.

    Chains are run again with new keys, in rounds of `num_chains`, so the estimated quantity stays
    the same (stopping a chain early would give a shorter chain). The run also ends after
    `max_steps` steps of all chains together, after `max_seconds`, or otherwise after 1,000 rounds.
    Then the report has a warning.

    >>> import jax, diffmh
    >>> from diffmh.models import gaussian
    >>> mean = diffmh.expectation(lambda t, x: x, gaussian.sampler(), init=0.0, num_samples=500)
    >>> report = mean.run(0.5, jax.random.key(0), until=diffmh.Until(absolute=0.05))
    >>> low, high = report.interval(0.95)[1]
    >>> bool(high - low < 2 * 0.05), report.num_chains > 16
    (True, True)
    """

    relative: Checked[float] | None = None
    absolute: Checked[float] | None = None
    level: Checked[float] = 0.95
    max_steps: Checked[float] | None = None
    max_seconds: Checked[float] | None = None

    def __check_init__(self):
        if self.relative is None and self.absolute is None:
            raise ValueError("`Until(...)` needs `relative` or `absolute`, the error to reach.")
        for name in ("relative", "absolute", "max_steps", "max_seconds"):
            value = getattr(self, name)
            if value is not None:
                validate.number(value, f"Until({name}=...)", above=0)
        validate.number(self.level, "Until(level=...)", above=0, below=1)

    def allowed(self, gradient: list[np.ndarray]) -> float:
        """The largest allowed distance of an interval's end from its estimate."""
        largest = max(float(np.max(np.abs(leaf))) for leaf in gradient)
        return max((self.relative or 0.0) * largest, self.absolute or 0.0)

    def __str__(self) -> str:
        relative = None if self.relative is None else f"{100 * self.relative:.3g} %"
        absolute = None if self.absolute is None else f"{self.absolute:.3g}"
        return " or ".join(filter(None, (relative, absolute)))


def until_of(given: Checked[float | Until] | None) -> Until | None:
    """The `Until` for a user's `until=...`: a number is a relative error."""
    if given is None or isinstance(given, Until):
        return given
    if isinstance(given, bool) or not isinstance(given, int | float | np.number):
        raise TypeError(
            "`until=...` must be a relative error, such as 0.01, or a `diffmh.Until`, got"
            f" {given!r}."
        )
    return Until(relative=validate.number(given, "until=...", above=0))


class Stopping:
    """Decides how many rounds to run, given the rounds so far."""

    def __init__(self, until: Until, num_chains: int, num_steps: int):
        self.until = until
        limit = _MOST_ROUNDS if until.max_steps is None else until.max_steps // num_steps
        self.most = max(1, int(limit))
        self.first_rounds = min(self.most, -(-_LEAST_CHAINS // num_chains))
        self._began = time.monotonic()

    def reach(self, report: Report) -> tuple[float, float]:
        """The largest distance of an interval's end from its estimate, and the allowed one."""
        # The larger of the two sides of an interval, which need not be symmetric.
        means = [np.asarray(leaf) for leaf in jax.tree.leaves(report.gradient)]
        ends = [np.asarray(leaf) for leaf in jax.tree.leaves(report.interval(self.until.level)[1])]
        reach = max(
            float(np.max(np.abs(end - mean[..., None])))
            for mean, end in zip(means, ends, strict=True)
        )
        return reach, self.until.allowed(means)

    def next_rounds(self, report: Report, rounds: int) -> int:
        """The total number of rounds to run: the current number if that is enough, or if no more
        are allowed.
        """
        reach, allowed = self.reach(report)
        if reach <= allowed or not math.isfinite(reach):
            return rounds
        # The error falls like 1/√rounds. At most doubled, since the error itself is uncertain.
        needed = rounds * (reach / allowed) ** 2 if allowed > 0 else math.inf
        wanted = min(max(rounds + 1, math.ceil(min(needed, 2 * rounds))), self.most)
        if self.until.max_seconds is not None:
            spent = time.monotonic() - self._began
            # At the speed of the rounds so far, including compilation, so it rather stops early.
            left = (self.until.max_seconds - spent) * rounds / max(spent, 1e-9)
            wanted = min(wanted, rounds + math.floor(max(0.0, left)))
        return wanted

    def said(self, report: Report, rounds: int) -> Report:
        """The report with a note that the error is small enough, or a warning that it is not."""
        reach, allowed = self.reach(report)
        counted = f"{rounds:,} round{'s' * (rounds > 1)}"
        found = (
            f"the gradient's {100 * self.until.level:.3g} % interval reaches ± {reach:.2g},"
            f" requested {self.until}"
        )
        if reach <= allowed:
            note = f"stopped after {counted}: {found}"
            return dataclasses.replace(report, notes=(*report.notes, note))
        warning = (
            f"`until` was not reached within its limit, {counted}: {found} (here {allowed:.2g})."
            " Allow more (`Until(max_steps=..., max_seconds=...)`), or use an estimator of less"
            " variance."
        )
        return dataclasses.replace(report, warnings=(*report.warnings, warning))
