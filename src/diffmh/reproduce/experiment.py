"""Experiment: what computes, what draws, and what is claimed."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import numpy as np
from jaxtyping import Array, Float, Key
from matplotlib.figure import Figure

from .._expectation import Differentiable
from ..reports.display import number_with_error
from .data import D
from .progress import Status

V = TypeVar("V")


class Size(enum.StrEnum):
    """The length of the runs: a trial of one or two minutes, the demonstration, or the lengths of
    the tables in the docs. The verdicts are the same; the errors are larger for shorter runs.
    """

    FAST = "fast"
    DEMO = "demo"
    FULL = "full"

    def pick(self, fast: V, demo: V, full: V) -> V:
        """The setting for this size."""
        return {Size.FAST: fast, Size.DEMO: demo, Size.FULL: full}[self]


class Refused(ValueError):
    """Raised for what cannot be run, before anything is. The text says why, and what to do."""


# The heads of the table, of a `Claim`'s fields in their order.
COLUMNS = ("quantity", "paper", "exact", "ours ± error", "bar", "verdict")


class Claim(NamedTuple):
    """A line of the table. `passed` is `None` where nothing is claimed."""

    quantity: str
    paper: str
    exact: str
    ours: str
    bar: str
    passed: bool | None


@dataclasses.dataclass(frozen=True)
class Result(Generic[D]):
    """The data that an experiment's figure is drawn from, its settings in words, and its lines of
    the table.
    """

    data: D
    settings: str
    rows: list[Claim]


@dataclasses.dataclass(frozen=True)
class Experiment(Generic[D]):
    """One figure of the paper. `compute(key, size, progress)` is everything random;
    `plot(data, narrow)` reads what was saved of it, for a wide page or for a phone; `film(data)`
    is what the page plays, if anything.
    """

    name: str
    figure: int
    title: str
    shows: str
    data: type[D]
    compute: Callable[[Key[Array, ""], Size, Status], Result[D]]
    plot: Callable[[D, bool], Figure]
    film: Callable[[D], dict[str, Any]] | None = None


Z = 5.0


def digits(value: float, error: float) -> str:
    """`value ± error`, with two digits of the error; the value alone if it has none."""
    if not error > 0 or not math.isfinite(error):
        return f"{value:.5g}"
    return number_with_error(value, error)


def against_exact(
    quantity: str, exact: float, value: float, error: float, paper: str = "—", form: str = ".5g"
) -> Claim:
    """Passed where `value` is within five standard errors of the exact answer, or of float32's last
    digits.
    """
    passed = abs(value - exact) <= Z * error + 1e-5 * abs(exact)
    ours = digits(value, error)
    return Claim(quantity, paper, format(exact, form), ours, f"|z| < {Z:.0f}", bool(passed))


def within(
    quantity: str, paper: str, exact: float, value: float, tolerance: float, ours: str = ""
) -> Claim:
    """Passed where `value` is closer to the exact answer than a tolerance."""
    passed = abs(value - exact) < tolerance
    ours = ours or f"{value:.3f}"
    return Claim(quantity, paper, f"{exact:.4f}", ours, f"within {tolerance}", passed)


def worst(
    quantity: str, what: str, exact: np.ndarray, value: np.ndarray, error: np.ndarray
) -> Claim:
    """One line for many points: the largest |z| among them."""
    off = np.maximum(0.0, np.abs(value - exact) - 1e-5 * np.abs(exact))
    z = float(np.max(np.where(off > 0, off / np.where(error > 0, error, 1e-30), 0.0)))
    return Claim(quantity, "—", what, f"largest |z| = {z:.2f}", f"|z| < {Z:.0f}", z < Z)


def length(num_samples: int, burn_in: int, num_chains: int) -> dict[str, Any]:
    """The options of `expectation` that say how long the chains are, and how many."""
    return {"num_samples": num_samples, "burn_in": burn_in, "num_chains": num_chains}


class Estimate(NamedTuple):
    """Value and derivative in one parameter, with standard errors over the chains."""

    value: Float[Array, "..."]
    value_error: Float[Array, "..."]
    slope: Float[Array, "..."]
    slope_error: Float[Array, "..."]


def estimate(objective: Differentiable, theta: Float[Array, ""], key: Key[Array, ""]) -> Estimate:
    """`objective` and its derivative at a scalar theta. Traceable."""

    def per_chain(theta):
        return objective.per_chain(theta, key)

    def mean_and_error(chains):
        return chains.mean(axis=0), chains.std(axis=0, ddof=1) / chains.shape[0] ** 0.5

    values, slopes = jax.jvp(per_chain, (theta,), (jax.numpy.ones_like(theta),))
    return Estimate(*mean_and_error(values), *mean_and_error(slopes))
