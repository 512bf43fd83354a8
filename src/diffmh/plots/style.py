"""One look for all figures."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK, GREY, FAINT = "#1f2328", "#8b949e", "#d8dee4"
RED, BLUE, GREEN, AMBER, VIOLET = "#c8102e", "#1f5fbf", "#1a7f4b", "#b7791f", "#6f42c1"
COMPONENTS = (BLUE, GREEN, AMBER)


def panels(*widths: float, height: float = 3.0) -> tuple[Figure, list[Axes]]:
    """A figure with panels side by side, of these widths in inches."""
    figure = Figure(figsize=(sum(widths), height), layout="constrained")
    axes = figure.subplots(1, len(widths), width_ratios=widths, squeeze=False)[0]
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.spines[["left", "bottom"]].set_color(GREY)
        ax.tick_params(colors=INK, labelsize=9)
        ax.title.set_size(10)
        ax.xaxis.label.set_size(10)
        ax.yaxis.label.set_size(10)
    return figure, list(axes)


def key(ax: Axes, **options) -> None:
    """A legend that stays out of the way."""
    ax.legend(frameon=False, fontsize=8.5, labelcolor=INK, **options)
