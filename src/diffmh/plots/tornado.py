"""Tornado plots: bars in rows, the longest on top, with a panel for each quantity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from jaxtyping import Float

from ..base import validate
from ..base.validate import Checked
from ..tools.influence import InfluenceRow
from ..tools.sensitivity_table import SensitivityRow
from . import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.container import BarContainer
    from matplotlib.figure import Figure


Row = TypeVar("Row", InfluenceRow, SensitivityRow)


def panels(
    rows: Sequence[Row], most: Checked[int], name: str, *, sharex: bool
) -> tuple[Figure, dict[str, list[Row]], list[Axes]]:
    """A figure with a panel for each quantity, at most three side by side, and the first `most`
    rows of each, which need not stand together: a table may be sorted.
    """
    most = validate.count(most, f"plots.{name}(most=...)")
    if not rows:
        raise ValueError(f"`plots.{name}(table)` has nothing to draw: the table has no rows.")
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.quantity, []).append(row)
    groups = {quantity: own[:most] for quantity, own in groups.items()}
    across = min(3, len(groups))
    down = -(-len(groups) // across)
    figure = style.empty(4.6 * across, down * (1.1 + 0.34 * max(map(len, groups.values()))))
    axes = list(figure.subplots(down, across, sharex=sharex, squeeze=False).ravel())
    style.plain(axes)
    for ax in axes[len(groups) :]:
        ax.set_visible(False)
    return figure, groups, axes[: len(groups)]


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
