"""Fig. 6: climbing the heat capacity of the Ising model."""

from __future__ import annotations

import jax
import numpy as np
import optax
from jaxtyping import Array, Float, Key
from matplotlib.figure import Figure

from ..estimators import StochasticDerivative
from ..models import ising as model
from ..optimise import optimise
from ..plots import style
from .data import Data
from .experiment import Experiment, Outcome, Row, digits
from .lattice import SIZE, START, climb, moments
from .progress import Progress


class Climb(Data):
    """Temperature and heat capacity at each iteration."""

    theta: Float[np.ndarray, "n"]
    value: Float[np.ndarray, "n"]


class Ascents(Data):
    """The paper's budget with one coupled and one uncoupled chain, many chains across, the average
    of the latter's second half, and the exact peak.
    """

    coupled: Climb
    uncoupled: Climb
    ours: Climb
    average: float
    peak: float


def of_one_chain(flip: bool):
    """The paper's objective: both moments from one cold-started chain of 100 + 1000 sweeps,
    plugged in.
    """
    mean = moments(1_000, 100, 1, flip=flip, estimator=StochasticDerivative("one-sided"))
    return lambda t, key: model.heat_capacity(t, mean(t, key))


def compute(key: Key[Array, ""], fast: bool, progress: Progress) -> Outcome[Ascents]:
    paper_iterations, rate = (100, 0.03) if fast else (1_000, 0.003)
    paper = {}
    for i, name in enumerate(
        progress.over(("coupled", "uncoupled"), lambda name: f"one {name} chain")
    ):
        paper[name] = optimise(
            of_one_chain(name == "uncoupled"),
            START,
            jax.random.fold_in(key, i),
            optimizer=optax.adam(rate),
            num_iterations=paper_iterations,
            maximise=True,
            progress=progress.along(f"iteration with one {name} chain"),
        )
    num_iterations, tolerance = (60, 0.1) if fast else (240, 0.02)
    num_samples, burn_in, num_chains = (200, 200, 64) if fast else (400, 300, 256)
    mean = moments(num_samples, burn_in, num_chains, estimator=StochasticDerivative(alternatives=4))
    ours = climb(jax.random.fold_in(key, 2), mean, num_iterations, progress)
    paths = {
        name: Climb(np.asarray(path.theta), np.asarray(path.value))
        for name, path in (*paper.items(), ("ours", ours))
    }
    data = Ascents(**paths, average=float(ours.average), peak=model.peak(SIZE))
    budget = f"{paper_iterations} iterations of Adam {rate}"
    settings = (
        f"L = {SIZE}, from T = {START}. One chain: 100 + 1,000 sweeps, {budget}. Across chains:"
        f" {num_chains} chains of {burn_in} + {num_samples} sweeps, 4 alternatives,"
        f" {num_iterations} iterations."
    )
    return Outcome(data, settings, _rows(data, budget, tolerance))


def _rows(data: Ascents, budget: str, tolerance: float) -> list[Row]:
    def last(climb):
        return float(np.mean(climb.theta[-(len(climb.theta) // 20) :]))

    coupled, uncoupled = last(data.coupled), last(data.uncoupled)
    error = batch_error(data.ours.theta[len(data.ours.theta) // 2 :])
    exact = f"{data.peak:.4f}"
    return [
        Row(
            "T of greatest C: averaged iterates, across chains",
            "≈ 2.42",
            exact,
            digits(data.average, error),
            f"within {tolerance}",
            abs(data.average - data.peak) < tolerance,
        ),
        Row(
            f"T at the end, one coupled chain, {budget}",
            "≈ 2.42",
            exact,
            f"{coupled:.3f}",
            "within 0.3",
            abs(coupled - data.peak) < 0.3,
        ),
        Row(
            f"T at the end, one uncoupled chain, {budget}",
            "≈ 6",
            exact,
            f"{uncoupled:.3f}",
            "fails: further than 1",
            abs(uncoupled - data.peak) > 1,
        ),
    ]


def batch_error(values: np.ndarray, num_batches: int = 8) -> float:
    """The standard error of a correlated sequence's mean, from the means of its batches."""
    means = [batch.mean() for batch in np.array_split(values, num_batches)]
    return float(np.std(means, ddof=1) / num_batches**0.5)


def plot(data: Ascents, narrow: bool) -> Figure:
    figure, (temperature, capacity, ours) = style.panels(
        3.3, 3.3, 3.3, height=2.8 if narrow else 3.1, narrow=narrow
    )
    for path, colour, label in (
        (data.coupled, style.RED, "one coupled chain"),
        (data.uncoupled, style.GREY, "one uncoupled chain"),
    ):
        temperature.plot(path.theta, color=colour, lw=1.4, label=label)
        capacity.plot(path.value, color=colour, lw=0.5, alpha=0.8)
    style.name(temperature, "a) the paper's budget", "iteration", "T")
    style.name(capacity, "b) C on the way", "iteration", "C")
    style.key(temperature, loc="lower left", bbox_to_anchor=(0.0, 0.1))

    length = len(data.ours.theta)
    ours.plot(data.ours.theta, color=style.BLUE, lw=1.2, label="iterates")
    level, label = [data.average] * 2, f"average {data.average:.4f}"
    ours.plot([length // 2, length], level, color=style.INK, lw=1.4, label=label)
    style.name(ours, "c) many chains, averaged", "iteration", "T")
    peak = {"color": style.GREY, "lw": 0.9, "ls": ":", "label": f"exact peak {data.peak:.4f}"}
    for ax in (temperature, ours):
        ax.axhline(data.peak, **peak)
    style.key(ours, loc="upper right")
    return figure


EXPERIMENT = Experiment(
    name="ascent",
    figure=6,
    title="Climbing the heat capacity",
    shows=(
        "Gradient ascent on the heat capacity from T = 6. With the coupled proposal the paper's"
        " budget leads near the peak, without it nowhere. Many chains, several alternatives and"
        " averaging the iterates find the peak of the finite lattice."
    ),
    data=Ascents,
    compute=compute,
    plot=plot,
)
