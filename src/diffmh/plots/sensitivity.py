"""plots.sensitivity: a tornado: how far ten per cent of each hyperparameter move each quantity."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..base import validate
from ..base.validate import Checked
from ..tools.sensitivity_table import MARK, Sensitivity, SensitivityRow
from . import style, tornado

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def sensitivity(table: Checked[Sensitivity], *, most: Checked[int] = 12) -> Figure:
    """For each quantity a bar by hyperparameter, the longest on top: by how many posterior standard
    deviations it moves with ten per cent more of the hyperparameter, and the interval of that. Rows
    that cannot be trusted are hatched in grey and marked with `!`.

    **Arguments**

    - `table`: what `diffmh.sensitivity` returns.
    - `most`: of more hyperparameters, those that matter most.

    >>> import diffmh, jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
    >>> def model(y, scale):
    ...     mean = numpyro.sample("mean", dist.Normal(0, scale))
    ...     numpyro.sample("y", dist.Normal(mean, 1), obs=y)
    >>> posterior = diffmh.from_numpyro(model, jnp.array([1.0, 2.0]), theta={"scale": 1.0})
    >>> mean = lambda theta, sites: sites["mean"]
    >>> draws = {"mean": 1 + jax.random.normal(jax.random.key(0), (4, 500)) / 3**0.5}
    >>> table = diffmh.sensitivity(posterior, mean, draws=draws)
    >>> figure = diffmh.plots.sensitivity(table)
    >>> len(figure.axes)
    1
    """
    validate.instance(table, Sensitivity, "plots.sensitivity(table)", "table")
    figure, groups, axes = tornado.panels(table.rows, most, "sensitivity", sharex=True)
    for ax, (quantity, rows) in zip(axes, groups.items(), strict=True):
        _draw(ax, rows)
        title = f"E[{quantity}]" if rows[0].statistic == "mean" else quantity
        style.name(ax, title, "posterior sd per +10 %")
    shown = [row for rows in groups.values() for row in rows]
    if not all(row.trusted for row in shown):
        # Intervals of rows that mean nothing do not set the scale of those that do.
        trusted = [row for row in shown if row.trusted]
        if trusted:
            reach = 1.1 * float(np.abs(_ends(trusted)).max())
            axes[0].set_xlim(-reach, reach)
        note = f"{MARK} hatched: not to be trusted; print the table for the reason"
        figure.supxlabel(note, fontsize="small", color=style.RED)
    return figure


def _ends(rows: list[SensitivityRow]) -> np.ndarray:
    """The intervals `(row, 2)`, which are of the derivative, in the bars' units."""
    scale = np.array([row.in_deviations / row.derivative if row.derivative else 0 for row in rows])
    return np.nan_to_num(np.array([[row.low, row.high] for row in rows]) * scale[:, None])


def _draw(ax: Axes, rows: list[SensitivityRow]) -> None:
    change = np.nan_to_num([row.in_deviations for row in rows])
    ends = _ends(rows)
    reach = np.abs(np.stack([change - ends.min(axis=1), ends.max(axis=1) - change]))
    names = [row.hyperparameter + ("" if row.trusted else f" {MARK}") for row in rows]
    for bar, row in zip(tornado.bars(ax, change, reach, names), rows, strict=True):
        if not row.trusted:
            bar.set(facecolor=style.FAINT, edgecolor=style.GREY, hatch="////", alpha=1.0)
