"""Tornado plots: bars in rows, the longest on top, with a panel for each quantity."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from jaxtyping import Float

from ..tools.influence import InfluenceRow
from ..tools.sensitivity_table import SensitivityRow
from . import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.container import BarContainer
    from matplotlib.figure import Figure


Row = TypeVar("Row", InfluenceRow, SensitivityRow)


def by_quantity(rows: Iterable[Row], most: int) -> dict[str, list[Row]]:
    """The first `most` rows of each quantity, which need not stand together: a table may be
    sorted.
    """
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.quantity, []).append(row)
    return {quantity: own[:most] for quantity, own in groups.items()}


def panels(sizes: Sequence[int], *, sharex: bool) -> tuple[Figure, list[Axes]]:
    """A figure with a panel for each of these numbers of rows, at most three side by side."""
    across = min(3, len(sizes))
    down = -(-len(sizes) // across)
    figure = style.empty(4.6 * across, down * (1.1 + 0.34 * max(sizes)))
    axes = list(figure.subplots(down, across, sharex=sharex, squeeze=False).ravel())
    style.plain(axes)
    for ax in axes[len(sizes) :]:
        ax.set_visible(False)
    return figure, axes[: len(sizes)]


def bars(
    ax: Axes,
    values: Float[np.ndarray, "n"],
    reach: Float[np.ndarray, "2 n"],
    names: Sequence[str],
) -> BarContainer:
    """A bar for each value, with its interval from `value − reach[0]` to `value + reach[1]`."""
    at = np.arange(len(values))
    colours = [style.BLUE if value > 0 else style.RED for value in values]
    drawn = ax.barh(at, values, height=0.62, color=colours, alpha=0.75)
    ax.errorbar(values, at, xerr=reach, fmt="none", color=style.INK, elinewidth=1.2, capsize=3)
    ax.axvline(0.0, color=style.GREY, lw=1)
    style.rows(ax, names)
    ax.locator_params(axis="x", nbins=5)
    return drawn
