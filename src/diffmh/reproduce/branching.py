"""Fig. 1: a chain on N(θ, 1) and the alternatives that branch off it."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Key
from matplotlib.figure import Figure

from .._expectation import expectation
from ..estimators import StochasticDerivative
from ..models import gaussian
from ..plots import style
from ..plots.trace import Branch, branch, plot_branches, plot_primal, spans
from ..tools.trace import trace
from .experiment import Claim, Data, Experiment, Result, Size, against_exact
from .progress import Status

THETA, NUM_STEPS, WINDOW = 0.5, 200, (50, 100)


class Branching(Data):
    """The path including its start; the alternative in the only slot after each step; the first and
    last step shown.
    """

    primal: Float[np.ndarray, "start_and_n"]
    alternative: Float[np.ndarray, "n"]
    weight: Float[np.ndarray, "n"]
    alive: Bool[np.ndarray, "n"]
    born: Bool[np.ndarray, "n"]
    recoupled: Bool[np.ndarray, "n"]
    first: int
    last: int
    theta: float


def compute(key: Key[Array, ""], size: Size, progress: Status) -> Result[Branching]:
    key_path, key_mean = jax.random.split(key)
    one_sided = StochasticDerivative("one-sided")
    runs = {"init": 0.0, "num_steps": NUM_STEPS, "estimator": one_sided}
    path = trace(gaussian.sampler(), THETA, key_path, **runs)
    num_chains = size.pick(1_000, 10_000, 10_000)
    progress.say(f"{num_chains:,} chains")
    runs = {"init": 0.0, "num_samples": 150, "burn_in": 50, "num_chains": num_chains}
    one = StochasticDerivative(alternatives=1)
    mean = expectation(lambda theta, x: x, gaussian.sampler(), estimator=one, **runs)
    report = mean.run(THETA, key_mean)
    slot = ("alternative", "weight", "alive", "born", "recoupled")
    data = Branching(
        primal=np.concatenate([np.asarray(path.init)[None], path.primal]),
        **{name: np.asarray(getattr(path, name)[:, 0]) for name in slot},
        first=WINDOW[0],
        last=WINDOW[1],
        theta=THETA,
    )
    time, what = float(report.recoupling_time), "steps until an alternative meets the primal"
    slope, error = float(report.gradient), float(report.gradient_error)
    rows = [
        Claim(f"{what}, N(θ,1)", "≈ 5", "—", f"{time:.2f}", "1 to 10", 1 < time < 10),
        against_exact("dE[x]/dθ, N(θ,1)", 1.0, slope, error, form=".4f"),
    ]
    settings = (
        f"θ = 0.5, Gaussian walk of scale 2.38 from 0, maximal reflection, {NUM_STEPS} steps;"
        f" dE[x]/dθ from {num_chains:,} chains."
    )
    return Result(data, settings, rows)


def branches(data: Branching) -> list[Branch]:
    found = spans(data.alive, data.born, data.recoupled)
    return [branch(span, data.primal, data.alternative, np.abs(data.weight)) for span in found]


def plot(data: Branching, narrow: bool) -> Figure:
    figure, ax = style.one_panel(7.6, 3.2, narrow, 3.4)
    plot_branches(ax, branches(data), data.first, data.last)
    plot_primal(ax, data.primal, data.first, data.last)
    ax.axhline(data.theta, color=style.FAINT, lw=1, zorder=0)
    ax.set(xlim=(data.first - 0.5, data.last + 0.5))
    style.name(ax, "", "step", "x")
    place = {"loc": "lower left", "bbox_to_anchor": (0.0, 1.0), "borderpad": 0}
    style.key(ax, ncols=1 if narrow else 3, **place)
    return figure


def film(data: Branching) -> dict[str, Any]:
    """The data of the film on the page: the path up to a step, and the alternatives so far."""
    return {
        "kind": "branching",
        "title": "Branching paths, step by step",
        "first": data.first,
        "primal": np.round(data.primal, 3).tolist()[data.first : data.last + 1],
        "branches": [
            {
                "start": branch.start - data.first,
                "values": np.round(branch.values, 3).tolist(),
                "weights": np.round(branch.weights, 3).tolist(),
                "end": branch.end,
            }
            for branch in branches(data)
            if data.first <= branch.start and branch.last <= data.last
        ],
    }


EXPERIMENT = Experiment(
    name="branching",
    figure=1,
    title="Branching paths",
    shows=(
        "The primal chain (grey) and the alternatives (red) that branch off where an accept/reject"
        " decision could have gone the other way. Coupled to the primal by maximal reflection,"
        " they soon meet it again. The stronger the red, the larger the weight. A cross ends an"
        " alternative that was pruned: only one is followed at a time, so when another is born,"
        " one of the two is kept at random, with probability in proportion to its weight, and"
        " gets the weight of both. On average nothing is lost."
    ),
    data=Branching,
    compute=compute,
    plot=plot,
    film=film,
)
