"""Experiment: the computation of a figure, its plot and its claims."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, Float, Key
from matplotlib.figure import Figure

from .._expectation import Differentiable
from ..reports.display import number_with_error
from .progress import Status

V = TypeVar("V")


class Data(eqx.Module):
    """The content of a figure: named arrays and numbers, which are saved and read back unchanged.
    Every figure has its own subclass with the fields that its plot reads.
    """


D = TypeVar("D", bound=Data)


class Size(enum.StrEnum):
    """The length of the runs: `FAST` (one or two minutes), `DEMO`, or `FULL`, the lengths of the
    tables in the docs. The verdicts are the same; shorter runs have larger errors.
    """

    FAST = "fast"
    DEMO = "demo"
    FULL = "full"

    def pick(self, fast: V, demo: V, full: V) -> V:
        """The setting for this size."""
        return {Size.FAST: fast, Size.DEMO: demo, Size.FULL: full}[self]


class Refused(ValueError):
    """Raised before anything runs if the request is invalid. The text says why and what to do."""


# The column heads of the table, in the order of the fields of a `Claim`.
COLUMNS = ("quantity", "paper", "exact", "ours ± error", "bar", "verdict")


class Claim(NamedTuple):
    """A row of the table. `passed` is `None` if nothing is claimed."""

    quantity: str
    paper: str
    exact: str
    ours: str
    bar: str
    passed: bool | None


@dataclasses.dataclass(frozen=True)
class Result(Generic[D]):
    """The data of an experiment's figure, a description of its settings, and its rows of the
    table.
    """

    data: D
    settings: str
    rows: list[Claim]


@dataclasses.dataclass(frozen=True)
class Experiment(Generic[D]):
    """One figure of the paper. `compute(key, size, progress)` does everything random;
    `plot(data, narrow)` draws the saved data, for a wide page or for a phone; `film(data)` is
    the data of the animation on the page, if there is one.
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
    """`value ± error`, with two digits of the error; the value alone if the error is 0."""
    if not error > 0 or not math.isfinite(error):
        return f"{value:.5g}"
    return number_with_error(value, error)


def against_exact(
    quantity: str, exact: float, value: float, error: float, paper: str = "—", form: str = ".5g"
) -> Claim:
    """Passes if `value` is within five standard errors of the exact answer, or equal to it up to
    float32 rounding.
    """
    passed = abs(value - exact) <= Z * error + 1e-5 * abs(exact)
    ours = digits(value, error)
    return Claim(quantity, paper, format(exact, form), ours, f"|z| < {Z:.0f}", bool(passed))


def within(
    quantity: str, paper: str, exact: float, value: float, tolerance: float, ours: str = ""
) -> Claim:
    """Passes if `value` differs from the exact answer by less than a tolerance."""
    passed = abs(value - exact) < tolerance
    ours = ours or f"{value:.3f}"
    return Claim(quantity, paper, f"{exact:.4f}", ours, f"within {tolerance}", passed)


def worst(
    quantity: str, what: str, exact: np.ndarray, value: np.ndarray, error: np.ndarray
) -> Claim:
    """One row for many points: the largest |z| among them."""
    # Differences below the rounding of float32 do not count.
    off = np.maximum(0.0, np.abs(value - exact) - 1e-5 * np.abs(exact))
    z = float(np.max(np.where(off > 0, off / np.where(error > 0, error, 1e-30), 0.0)))
    return Claim(quantity, "—", what, f"largest |z| = {z:.2f}", f"|z| < {Z:.0f}", z < Z)


def length(num_samples: int, burn_in: int, num_chains: int) -> dict[str, Any]:
    """The options of `expectation` for the length and number of chains."""
    return {"num_samples": num_samples, "burn_in": burn_in, "num_chains": num_chains}


class Estimate(NamedTuple):
    """Value and derivative with respect to one parameter, with standard errors over the chains."""

    value: Float[Array, "..."]
    value_error: Float[Array, "..."]
    slope: Float[Array, "..."]
    slope_error: Float[Array, "..."]


def estimate(objective: Differentiable, theta: Float[Array, ""], key: Key[Array, ""]) -> Estimate:
    """`objective` and its derivative at a scalar theta. It can be traced."""

    def per_chain(theta):
        return objective.per_chain(theta, key)

    def mean_and_error(chains):
        return chains.mean(axis=0), chains.std(axis=0, ddof=1) / chains.shape[0] ** 0.5

    # Chains are independent, so the spread between them is the error of both means.
    values, slopes = jax.jvp(per_chain, (theta,), (jax.numpy.ones_like(theta),))
    return Estimate(*mean_and_error(values), *mean_and_error(slopes))
