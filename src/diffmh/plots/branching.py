"""Fig. 1: the primal's path and the alternatives that branch off it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from . import style


class Branch(NamedTuple):
    """An alternative from the primal's state before it was born to where it met the primal, or
    was pruned away.
    """

    start: int
    values: np.ndarray
    weights: np.ndarray


def branches(data: dict[str, np.ndarray]) -> list[Branch]:
    """The alternatives of a trace with one slot: `primal` has the start first, the other arrays
    begin at step 1.
    """
    primal, alternative, weight = data["primal"], data["alternative"], data["weight"]
    found = []
    for birth in np.flatnonzero(data["born"]):
        values, weights = [primal[birth], alternative[birth]], [weight[birth]]
        t = birth + 1
        while t < len(alternative) and data["alive"][t] and not data["born"][t]:
            values.append(alternative[t])
            weights.append(weight[t])
            t += 1
        if t < len(alternative) and data["recoupled"][t]:
            values.append(primal[t + 1])
            weights.append(weights[-1])
        found.append(Branch(int(birth), np.array(values), np.array(weights)))
    return found


def figure(data: dict[str, np.ndarray]) -> Figure:
    low, high = (int(end) for end in data["window"])
    figure, (ax,) = style.panels(7.6, height=3.2)
    steps = np.arange(low, high + 1)
    shown = [
        branch
        for branch in branches(data)
        if low <= branch.start and branch.start + len(branch.values) - 1 <= high
    ]
    heaviest = max((np.abs(branch.weights).max() for branch in shown), default=1.0)
    for branch in shown:
        for i, weight in enumerate(np.abs(branch.weights)):
            at = branch.start + i
            opacity = 0.25 + 0.75 * weight / heaviest
            ax.plot(
                [at, at + 1],
                branch.values[i : i + 2],
                color=style.RED,
                alpha=opacity,
                lw=1.4,
                solid_capstyle="round",
                zorder=2,
            )
    ax.plot(
        steps,
        data["primal"][low : high + 1],
        color=style.GREY,
        lw=1.6,
        marker="o",
        ms=2.6,
        label="primal",
        zorder=3,
    )
    ax.plot([], [], color=style.RED, lw=1.4, label="alternatives, opacity by weight")
    ax.axhline(float(data["theta"]), color=style.FAINT, lw=1, zorder=0)
    ax.set(xlim=(low - 0.5, high + 0.5))
    style.name(ax, "", "step", "x")
    style.key(ax, loc="upper right", ncols=2)
    ax.margins(y=0.12)
    return figure
