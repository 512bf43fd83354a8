"""Experiment: what computes, what draws, and what is claimed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Generic, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Key
from matplotlib.figure import Figure

from ..expectation import Differentiable
from .data import D
from .progress import Progress


class Refused(ValueError):
    """What cannot be run was asked for; nothing was computed. Its text says why, and what to do."""


class Row(NamedTuple):
    """A line of the table. `passed` is `None` where nothing is claimed."""

    quantity: str
    paper: str
    exact: str
    ours: str
    bar: str
    passed: bool | None


@dataclasses.dataclass(frozen=True)
class Outcome(Generic[D]):
    """What an experiment found: the data that its figure is drawn from, its settings in words,
    and its rows of the table.
    """

    data: D
    settings: str
    rows: list[Row]


@dataclasses.dataclass(frozen=True)
class Experiment(Generic[D]):
    """One figure of the paper. `compute(key, fast, progress)` is everything random;
    `plot(data, narrow)` reads what was saved of it, for a wide page or for a phone; `film(data)`
    is what the page plays, if anything.
    """

    name: str
    figure: int
    title: str
    shows: str
    data: type[D]
    compute: Callable[[Key[Array, ""], bool, Progress], Outcome[D]]
    plot: Callable[[D, bool], Figure]
    film: Callable[[D], dict[str, Any]] | None = None


Z = 5.0


def digits(value: float, error: float) -> str:
    """`value ± error`, with two digits of the error."""
    if not error > 0 or not math.isfinite(error):
        return f"{value:.5g}"
    places = max(0, 1 - math.floor(math.log10(error)))
    return f"{value:.{places}f} ± {error:.{places}f}"


def against_exact(
    quantity: str, exact: float, value: float, error: float, paper: str = "—", form: str = ".5g"
) -> Row:
    """A row that passes where `value` is within five standard errors of the exact answer, or of
    float32's last digits.
    """
    passed = abs(value - exact) <= Z * error + 1e-5 * abs(exact)
    return Row(
        quantity, paper, format(exact, form), digits(value, error), f"|z| < {Z:.0f}", bool(passed)
    )


def worst(quantity: str, what: str, exact: np.ndarray, value: np.ndarray, error: np.ndarray) -> Row:
    """One row for many points: the largest |z| among them."""
    off = np.maximum(0.0, np.abs(value - exact) - 1e-5 * np.abs(exact))
    z = float(np.max(np.where(off > 0, off / np.where(error > 0, error, 1e-30), 0.0)))
    return Row(quantity, "—", what, f"largest |z| = {z:.2f}", f"|z| < {Z:.0f}", z < Z)


class Estimate(NamedTuple):
    """Value and derivative in one parameter, with standard errors over the chains."""

    value: Float[Array, "..."]
    value_error: Float[Array, "..."]
    slope: Float[Array, "..."]
    slope_error: Float[Array, "..."]


def estimate(objective: Differentiable, theta: Float[Array, ""], key: Key[Array, ""]) -> Estimate:
    """`objective` and its derivative at a scalar theta. Traceable."""
    values, slopes = jax.jvp(
        lambda theta: objective.per_chain(theta, key), (theta,), (jax.numpy.ones_like(theta),)
    )
    mean = lambda leaf: leaf.mean(axis=0)
    error = lambda leaf: leaf.std(axis=0, ddof=1) / leaf.shape[0] ** 0.5
    return Estimate(mean(values), error(values), mean(slopes), error(slopes))
