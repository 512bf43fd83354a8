"""Fig. 5: variance of the derivative against the length of the chain."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from . import style

LOOKS = {
    "score": (style.AMBER, "score"),
    "one-sided": (style.RED, "stochastic derivative, one-sided (the paper's)"),
    "two-sided": (style.BLUE, "two-sided weights"),
    "K = 8": (style.VIOLET, "two-sided, 8 alternatives"),
    "covariance": (style.GREEN, "covariance (at stationarity)"),
}


def figure(data: dict[str, np.ndarray]) -> Figure:
    figure, (ax,) = style.panels(6.6, height=4.0)
    length = data["length"]
    for name, (colour, label) in LOOKS.items():
        ax.loglog(length, data[name], "o-", color=colour, lw=1.5, ms=4, label=label)
    for name in ("one-sided", "score"):
        ax.loglog(
            data["paper_length"],
            data[f"paper_{name}"],
            "x",
            color=style.INK,
            ms=6,
            label="read off the paper" if name == "score" else None,
        )
    ax.loglog(
        length,
        data["one-sided"][0] * length[0] / length,
        color=style.GREY,
        lw=1,
        ls=":",
        label="1/N",
    )
    style.name(ax, "", "samples N", "variance of the entropy's derivative")
    style.key(ax, loc="center right", bbox_to_anchor=(1.0, 0.56))
    return figure
