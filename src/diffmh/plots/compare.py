"""plots.compare: estimators side by side."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import jax
import numpy as np

from ..base import validate
from ..base.validate import Checked
from ..reports.comparison import Comparison, EstimatorRow
from . import style

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def compare(comparison: Checked[Comparison], *, entry: Checked[int] = 0) -> Figure:
    """One entry of the gradient by each estimator with two standard errors (left), and variance ×
    time relative to the recommended estimator, on a logarithmic scale (right).

    Markers of estimators of another quantity are hollow.

    **Arguments**

    - `comparison`: the result of `diffmh.compare`.
    - `entry`: the entry of the flattened gradient to show.

    **Refused**: an entry that the gradient does not have.

    >>> import jax, diffmh
    >>> from diffmh.models import mixture
    >>> p = diffmh.expectation(mixture.indicator, mixture.sampler(), init=0, num_samples=200)
    >>> found = diffmh.compare(p, 0.4, jax.random.key(0))
    >>> [ax.get_title(loc="left") for ax in diffmh.plots.compare(found).axes]
    ['gradient, entry 0, ± 2 errors', 'variance × time, recommended = 1']
    """
    validate.instance(comparison, Comparison, "plots.compare(comparison)", "comparison")
    size = _flat(comparison.rows[0].gradient).size
    if not validate.count(entry, "plots.compare(entry=...)", least=0) < size:
        raise ValueError(f"`plots.compare(entry=...)` must be from 0 to {size - 1}, got {entry}.")
    rows = [row for row in comparison.rows if math.isfinite(row.cost)]
    best = comparison.row(comparison.recommended)
    figure, (left, right) = style.panels(4.6, 3.4, height=1.1 + 0.36 * len(rows))
    for y, row in enumerate(rows):
        colour = style.RED if row is best else style.BLUE
        asked = row.quantity == comparison.rows[0].quantity
        mean, error = (_flat(tree)[entry] for tree in (row.gradient, row.gradient_error))
        fill = colour if asked else style.PAPER
        look = {"color": colour, "mfc": fill, "ms": 5, "elinewidth": 1.4, "capsize": 3}
        left.errorbar(mean, y, xerr=2 * error, fmt="o", **look)
        ratio = row.cost / best.cost
        right.plot([1.0, ratio], [y, y], color=style.FAINT, lw=1.4, zorder=0)
        right.plot(ratio, y, "o", color=colour, mfc=fill, ms=6)
        right.annotate(
            f"{ratio:.3g}", (ratio, y), (0, 6), textcoords="offset points", ha="center", fontsize=8
        )
    style.rows(left, [_name(row) for row in rows], top=-0.7)
    style.rows(right, [""] * len(rows), top=-0.7)
    right.set_xscale("log")
    right.margins(x=0.15)
    style.name(left, f"gradient, entry {entry}, ± 2 errors")
    style.name(right, "variance × time, recommended = 1")
    return figure


def _name(row: EstimatorRow) -> str:
    """A short name for an axis, with the quantity if it is not that of the finite chain."""
    count = getattr(row.estimator, "alternatives", None)
    name = type(row.estimator).__name__
    details = f", K = {count}" if count else ""
    return f"{name}{details}" + ("" if row.quantity == "finite chain" else f" ({row.quantity})")


def _flat(tree) -> np.ndarray:
    return np.concatenate([np.ravel(np.asarray(leaf, float)) for leaf in jax.tree.leaves(tree)])
