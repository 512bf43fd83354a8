"""The common style of all figures, and the only place that loads matplotlib."""

from __future__ import annotations

import functools
import io
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

from ..base.extras import needing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

T = TypeVar("T")

INK, GREY, FAINT, PAPER = "#1f2328", "#8b949e", "#d8dee4", "#ffffff"
RED, BLUE, GREEN, AMBER, VIOLET = "#c8102e", "#1f5fbf", "#1a7f4b", "#b7791f", "#6f42c1"
COMPONENTS = (BLUE, GREEN, AMBER)
# As wide as a phone, so that text has the same size there.
NARROW = 3.9


def empty(width: float, height: float) -> Figure:
    """A figure of this size in inches, without a window and without global state. A notebook shows
    it if it is the last line of a cell.
    """
    return _shown_in_notebooks()(figsize=(width, height), layout="constrained", facecolor=PAPER)


@functools.cache
def _shown_in_notebooks() -> type[Figure]:
    advice = '`diffmh.plots` needs matplotlib, which is not installed: pip install "diffmh[plots]"'
    with needing("matplotlib", advice):
        from matplotlib.figure import Figure

    class Shown(Figure):
        """A figure with its own display method: IPython only knows figures made by pyplot."""

        def _repr_png_(self) -> bytes:
            file = io.BytesIO()
            self.savefig(file, format="png", dpi=144)
            return file.getvalue()

    return Shown


def panels(*widths: float, height: float = 3.0, narrow: bool = False) -> tuple[Figure, list[Axes]]:
    """A figure with panels of these widths in inches side by side, or one below the other if
    `narrow`.
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
    """A figure with one panel, with a separate height for phones."""
    size = (NARROW, narrow_height) if narrow else (width, height)
    figure, (ax,) = panels(size[0], height=size[1])
    return figure, ax


def plain(axes: Iterable[Axes]) -> None:
    """Two thin spines and small ticks."""
    for ax in axes:
        ax.set_facecolor(PAPER)
        ax.spines[["top", "right"]].set_visible(False)
        ax.spines[["left", "bottom"]].set_color(GREY)
        ax.tick_params(colors=INK, labelsize=9)


def name(ax: Axes, title: str, x: str = "", y: str = "") -> None:
    """Title and labels in matching sizes."""
    ax.set_title(title, fontsize=10, color=INK, loc="left")
    ax.set_xlabel(x, fontsize=9.5, color=INK)
    ax.set_ylabel(y, fontsize=9.5, color=INK)


def rows(ax: Axes, names: Sequence[str], top: float = -0.6) -> None:
    """A row for each name, the first on top."""
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.4, top)


def key(ax: Axes, **options) -> None:
    """A small legend without a frame."""
    ax.legend(frameon=False, fontsize=8.5, labelcolor=INK, **options)


def opacity(weight: float, heaviest: float) -> float:
    """The opacity of an alternative's line: it grows with the weight and is always large enough to
    be seen.
    """
    return 0.25 + 0.75 * min(1.0, weight / heaviest) if heaviest > 0 else 1.0


def first(found: list[T], most: int) -> tuple[list[T], str]:
    """The first entries, at most this many, and a note about those left out."""
    left_out = f", {most} of {len(found):,} entries" if len(found) > most else ""
    return found[:most], left_out
