"""plots.report: value and gradient of a run, with the interval of each entry."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from ..base import validate
from ..base.validate import Checked
from ..reports.display import Entry, entries, place
from ..reports.report import Report
from . import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class Line(NamedTuple):
    """One entry: its estimate, the ends of its interval, and the estimates of the chains."""

    name: str
    estimate: float
    ends: np.ndarray
    chains: np.ndarray


def report(
    report: Checked[Report], *, level: Checked[float] = 0.95, most: Checked[int] = 24
) -> Figure:
    """Every entry of the value (left) and of the gradient (right) with its interval.

    Intervals are those of `report.interval(level)`. The estimate of each chain is a faint dot
    (`report.per_chain`).

    **Arguments**

    - `report`: the result of `.run`.
    - `level`: the probability with which an interval should contain the true value.
    - `most`: the largest number of entries to show; those with the largest estimates are chosen.

    **Refused**: a level that is not between 0 and 1.

    >>> import jax, diffmh
    >>> from diffmh.models import mixture
    >>> p = diffmh.expectation(mixture.indicator, mixture.sampler(), init=0, num_samples=500)
    >>> figure = diffmh.plots.report(p.run(0.4, jax.random.key(0)))
    >>> [label.get_text() for label in figure.axes[1].get_yticklabels()]
    ['df[0] / dθ', 'df[1] / dθ', 'df[2] / dθ']
    """
    validate.instance(report, Report, "plots.report(report)", "report")
    most = validate.count(most, "plots.report(most=...)")
    level = validate.number(level, "plots.report(level=...)", above=0, below=1)
    chains, (value, gradient) = report.per_chain, report.interval(level)

    def values(tree, leading=0):
        return entries(tree, "f", leading)

    def slopes(tree, leading=0):
        return _slopes(tree, report.value, leading)

    panels = {
        "value": _lines(values, report.value, value, chains.value),
        "gradient": _lines(slopes, report.gradient, gradient, chains.gradient),
    }
    rows = max(min(most, len(lines)) for lines in panels.values())
    figure, axes = style.panels(4.2, 4.2, height=1.1 + 0.28 * rows)
    for ax, (title, lines) in zip(axes, panels.items(), strict=True):
        shown = _largest(lines, most)
        note = f", the {most} largest of {len(lines):,}" if len(lines) > most else ""
        _draw(ax, shown)
        style.name(ax, f"{title}, {100 * level:.4g} % intervals{note}")
    axes[1].axvline(0.0, color=style.FAINT, lw=1, zorder=0)
    return figure


def _lines(name_entries, tree: Any, ends: Any, chains: Any) -> list[Line]:
    ends_first = jax.tree.map(lambda leaf: np.moveaxis(np.asarray(leaf), -1, 0), ends)
    estimates, ends = name_entries(tree), name_entries(ends_first, leading=1)
    each = [entry.values for entry in name_entries(chains, leading=1)]
    return [
        Line(estimate.name, float(estimate.values), end.values, dots)
        for estimate, end, dots in zip(estimates, ends, each, strict=True)
    ]


def _slopes(gradient: Any, value: Any, leading: int) -> list[Entry]:
    """The gradient's entries, named after the entries of f and theta: at each leaf of f there is a
    tree like theta, with the axes of f before those of theta.
    """
    leaves, structure = jax.tree.flatten(value)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(value)]
    found = []
    # At each leaf of f, the gradient is a tree like theta with the axes of that leaf in front.
    for path, leaf, part in zip(paths, leaves, structure.flatten_up_to(gradient), strict=True):
        for index in np.ndindex(np.shape(leaf)):
            at = (*[slice(None)] * leading, *index)
            slope = jax.tree.map(lambda leaf, at=at: np.asarray(leaf)[at], part)
            named = entries(slope, "θ", leading)
            found += [Entry(f"df{path}{place(index)} / d{name}", values) for name, values in named]
    return found


def _largest(lines: list[Line], most: int) -> list[Line]:
    """The entries with the largest estimates, in their original order."""
    order = np.argsort([-abs(line.estimate) for line in lines], kind="stable")[:most]
    return [lines[i] for i in np.sort(order)]


def _draw(ax: Axes, lines: list[Line]) -> None:
    at = np.arange(len(lines))
    for y, line in zip(at, lines, strict=True):
        # Spread by a small fixed pattern, so that dots at one place can be distinguished.
        offsets = 0.5 * (np.arange(len(line.chains)) * 0.618 % 1.0 - 0.5)
        look = {"color": style.GREY, "alpha": 0.5, "ms": 2.5, "ls": ""}
        ax.plot(line.chains, y + offsets, marker="o", **look, zorder=1)
    estimates = np.array([line.estimate for line in lines])
    ends = np.array([line.ends for line in lines]).reshape(-1, 2)
    # The estimate lies between the ends, except for rounding.
    reach = np.maximum(0.0, [estimates - ends[:, 0], ends[:, 1] - estimates])
    look = {"color": style.BLUE, "ms": 4.5, "elinewidth": 1.4, "capsize": 3, "zorder": 2}
    ax.errorbar(estimates, range(len(lines)), xerr=reach, fmt="o", **look)
    style.rows(ax, [line.name for line in lines])
