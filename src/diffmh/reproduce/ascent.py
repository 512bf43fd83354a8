"""Fig. 6: gradient ascent on the heat capacity of the Ising model."""

from __future__ import annotations

import jax
import numpy as np
import optax
from jaxtyping import Array, Float, Key
from matplotlib.figure import Figure

from ..estimators import StochasticDerivative
from ..models import ising as model
from ..plots import style
from ..tools.optimise import optimise
from .experiment import Claim, Data, Experiment, Result, Size, digits, within
from .lattice import SIZE, START, climb, moments
from .progress import Status


class Ascents(Data):
    """Temperature and heat capacity at each iteration, with the paper's budget for one coupled and
    one uncoupled chain, and with many chains; the average over the second half of the latter, and
    the exact peak.
    """

    coupled: Float[np.ndarray, "2 n"]
    uncoupled: Float[np.ndarray, "2 n"]
    ours: Float[np.ndarray, "2 m"]
    average: float
    peak: float


def of_one_chain(flip: bool):
    """The paper's objective: the heat capacity from the two moments of one chain of 100 + 1000
    sweeps from a cold start.
    """
    mean = moments(1_000, 100, 1, flip=flip, estimator=StochasticDerivative("one-sided"))
    return lambda t, key: model.heat_capacity(t, mean(t, key))


def compute(key: Key[Array, ""], size: Size, progress: Status) -> Result[Ascents]:
    paper_iterations, rate = (100, 0.03) if size is Size.FAST else (1_000, 0.003)
    steps = {"optimizer": optax.adam(rate), "num_iterations": paper_iterations, "maximise": True}
    found = {}
    for i, name in enumerate(("coupled", "uncoupled")):
        steps["progress"] = progress.along(f"iteration with one {name} chain")
        key_path = jax.random.fold_in(key, i)
        found[name] = optimise(of_one_chain(name == "uncoupled"), START, key_path, **steps)
    num_iterations, tolerance = (60, 0.1) if size is Size.FAST else (240, 0.02)
    num_samples, burn_in, num_chains = size.pick((200, 200, 64), (400, 300, 64), (400, 300, 256))
    mean = moments(num_samples, burn_in, num_chains, estimator=StochasticDerivative(alternatives=4))
    found["ours"] = climb(jax.random.fold_in(key, 2), mean, num_iterations, progress)
    paths = {name: np.stack([path.theta, path.value]) for name, path in found.items()}
    data = Ascents(**paths, average=float(found["ours"].average), peak=model.peak(SIZE))
    budget = f"{paper_iterations} iterations of Adam {rate}"
    settings = (
        f"L = {SIZE}, from T = {START}. One chain: 100 + 1,000 sweeps, {budget}. Across chains:"
        f" {num_chains} chains of {burn_in} + {num_samples} sweeps, 4 alternatives,"
        f" {num_iterations} iterations."
    )
    return Result(data, settings, _rows(data, budget, tolerance))


def _rows(data: Ascents, budget: str, tolerance: float) -> list[Claim]:
    def last(climb):
        return float(np.mean(climb[0, -(climb.shape[1] // 20) :]))

    peak, average = data.peak, data.average
    coupled, uncoupled = last(data.coupled), last(data.uncoupled)
    ours = digits(average, batch_error(data.ours[0, data.ours.shape[1] // 2 :]))
    averaged = "T of greatest C: averaged iterates, across chains"
    one_coupled = f"T at the end, one coupled chain, {budget}"
    failing = ("≈ 6", f"{peak:.4f}", f"{uncoupled:.3f}", "fails: further than 1")
    return [
        within(averaged, "≈ 2.42", peak, average, tolerance, ours),
        within(one_coupled, "≈ 2.42", peak, coupled, 0.3),
        Claim(f"T at the end, one uncoupled chain, {budget}", *failing, abs(uncoupled - peak) > 1),
    ]


def batch_error(values: np.ndarray, num_batches: int = 8) -> float:
    """The standard error of the mean of a correlated sequence, from the means of batches."""
    # Nearly independent, if batches are longer than the correlation time of the iterates.
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
        temperature.plot(path[0], color=colour, lw=1.4, label=label)
        capacity.plot(path[1], color=colour, lw=0.5, alpha=0.8)
    style.name(temperature, "a) the paper's budget", "iteration", "T")
    style.name(capacity, "b) C on the way", "iteration", "C")
    style.key(temperature, loc="lower left", bbox_to_anchor=(0.0, 0.1))

    length = data.ours.shape[1]
    ours.plot(data.ours[0], color=style.BLUE, lw=1.2, label="iterates")
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
        "Gradient ascent on the heat capacity from T = 6. With the coupled proposal, the paper's"
        " budget leads near the peak; without it, nowhere. Many chains, several alternatives and"
        " averaging the iterates find the peak of the finite lattice."
    ),
    data=Ascents,
    compute=compute,
    plot=plot,
)
