"""One look for all figures, and the only place that loads matplotlib."""

from __future__ import annotations

import functools
import io
from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

T = TypeVar("T")

INK, GREY, FAINT, PAPER = "#1f2328", "#8b949e", "#d8dee4", "#ffffff"
RED, BLUE, GREEN, AMBER, VIOLET = "#c8102e", "#1f5fbf", "#1a7f4b", "#b7791f", "#6f42c1"
COMPONENTS = (BLUE, GREEN, AMBER)
# As wide as a phone's column, so that its letters are as large there as elsewhere.
NARROW = 3.9


def empty(width: float, height: float) -> Figure:
    """A figure of this size in inches, without a window and without global state. A notebook shows
    it where it is the last line of a cell.
    """
    return _shown_in_notebooks()(figsize=(width, height), layout="constrained", facecolor=PAPER)


@functools.cache
def _shown_in_notebooks() -> type[Figure]:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "matplotlib":
            raise
        raise ModuleNotFoundError(
            "`diffmh.plots` draws with matplotlib, which is not installed:"
            ' pip install "diffmh[plots]"',
            name="matplotlib",
        ) from None

    class Shown(Figure):
        """IPython knows by itself only those figures that pyplot made."""

        def _repr_png_(self) -> bytes:
            file = io.BytesIO()
            self.savefig(file, format="png", dpi=144)
            return file.getvalue()

    return Shown


def panels(*widths: float, height: float = 3.0, narrow: bool = False) -> tuple[Figure, list[Axes]]:
    """A figure with panels of these widths in inches side by side; one below the other if
    narrow.
    """
    if narrow:
        heights = [height * min(1.0, NARROW / width) for width in widths]
        figure = empty(NARROW, sum(heights))
        axes = list(figure.subplots(len(widths), 1, height_ratios=heights, squeeze=False)[:, 0])
    else:
        figure = empty(sum(widths), height)
        axes = list(figure.subplots(1, len(widths), width_ratios=widths, squeeze=False)[0])
    plain(axes)
    return figure, axes


def one_panel(
    width: float, height: float, narrow: bool, narrow_height: float
) -> tuple[Figure, Axes]:
    """A figure with one panel, whose height on a phone is chosen too."""
    size = (NARROW, narrow_height) if narrow else (width, height)
    figure, (ax,) = panels(size[0], height=size[1])
    return figure, ax


def plain(axes: Iterable[Axes]) -> None:
    """Two thin spines and small ticks on the figure's paper."""
    for ax in axes:
        ax.set_facecolor(PAPER)
        ax.spines[["top", "right"]].set_visible(False)
        ax.spines[["left", "bottom"]].set_color(GREY)
        ax.tick_params(colors=INK, labelsize=9)


def name(ax: Axes, title: str, x: str = "", y: str = "") -> None:
    """Title and labels, in sizes that go together."""
    ax.set_title(title, fontsize=10, color=INK, loc="left")
    ax.set_xlabel(x, fontsize=9.5, color=INK)
    ax.set_ylabel(y, fontsize=9.5, color=INK)


def rows(ax: Axes, names: Sequence[str], top: float = -0.6) -> None:
    """A row for each name, the first on top."""
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.4, top)


def key(ax: Axes, **options) -> None:
    """A legend that stays out of the way."""
    ax.legend(frameon=False, fontsize=8.5, labelcolor=INK, **options)


def opacity(weight: float, heaviest: float) -> float:
    """How strong an alternative's line is: the heavier, the stronger, and never so faint that it is
    lost.
    """
    return 0.25 + 0.75 * min(1.0, weight / heaviest) if heaviest > 0 else 1.0


def first(found: list[T], most: int) -> tuple[list[T], str]:
    """The first of them, at most this many, and words for what is left out."""
    left_out = f", {most} of {len(found):,} entries" if len(found) > most else ""
    return found[:most], left_out
