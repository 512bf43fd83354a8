"""One look for all figures."""

from __future__ import annotations

from collections.abc import Iterable

from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK, GREY, FAINT = "#1f2328", "#8b949e", "#d8dee4"
RED, BLUE, GREEN, AMBER, VIOLET = "#c8102e", "#1f5fbf", "#1a7f4b", "#b7791f", "#6f42c1"
COMPONENTS = (BLUE, GREEN, AMBER)


def panels(*widths: float, height: float = 3.0) -> tuple[Figure, list[Axes]]:
    """A figure with panels side by side, of these widths in inches."""
    figure = Figure(figsize=(sum(widths), height), layout="constrained")
    axes = list(figure.subplots(1, len(widths), width_ratios=widths, squeeze=False)[0])
    plain(axes)
    return figure, axes


def plain(axes: Iterable[Axes]) -> None:
    """Two thin spines and small ticks."""
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.spines[["left", "bottom"]].set_color(GREY)
        ax.tick_params(colors=INK, labelsize=9)


def name(ax: Axes, title: str, x: str = "", y: str = "") -> None:
    """Title and labels, in sizes that go together."""
    ax.set_title(title, fontsize=10, color=INK, loc="left")
    ax.set_xlabel(x, fontsize=9.5, color=INK)
    ax.set_ylabel(y, fontsize=9.5, color=INK)


def key(ax: Axes, **options) -> None:
    """A legend that stays out of the way."""
    ax.legend(frameon=False, fontsize=8.5, labelcolor=INK, **options)
