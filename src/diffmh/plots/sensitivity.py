"""plots.sensitivity: a tornado: how far ten per cent of each hyperparameter move each quantity."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

from ..base import validate
from ..base.validate import Checked
from ..tools.sensitivity import Sensitivity, SensitivityRow
from . import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def sensitivity(table: Checked[Sensitivity], *, most: Checked[int] = 12) -> Figure:
    """For each quantity a bar by hyperparameter, the longest on top: by how many posterior standard
    deviations it moves with ten per cent more of the hyperparameter, and the interval of that.

    **Arguments**

    - `table`: what `diffmh.sensitivity` returns.
    - `most`: of more hyperparameters, those that matter most.

    >>> import diffmh, jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
    >>> def model(y, scale):
    ...     mean = numpyro.sample("mean", dist.Normal(0, scale))
    ...     numpyro.sample("y", dist.Normal(mean, 1), obs=y)
    >>> posterior = diffmh.from_numpyro(model, jnp.array([1.0, 2.0]), theta={"scale": 1.0})
    >>> mean = lambda theta, sites: sites["mean"]
    >>> table = diffmh.sensitivity(posterior, mean, jax.random.key(0), num_samples=1_000)
    >>> figure = diffmh.plots.sensitivity(table)
    >>> len(figure.axes)
    1
    """
    validate.instance(table, Sensitivity, "plots.sensitivity(table)", "table")
    most = validate.count(most, "plots.sensitivity(most=...)")
    groups = {
        quantity: list(rows)[:most]
        for quantity, rows in itertools.groupby(table.rows, lambda row: row.quantity)
    }
    longest = max(len(rows) for rows in groups.values())
    across = min(3, len(groups))
    down = -(-len(groups) // across)
    figure = style.empty(4.6 * across, down * (1.1 + 0.34 * longest))
    axes = list(figure.subplots(down, across, sharex=True, squeeze=False).ravel())
    style.plain(axes)
    for ax in axes[len(groups) :]:
        ax.set_visible(False)
    for ax, (quantity, rows) in zip(axes, groups.items(), strict=False):
        _draw(ax, rows)
        ax.locator_params(axis="x", nbins=5)
        style.name(ax, f"E[{quantity}]", "posterior sd per +10 %")
    return figure


def _draw(ax: Axes, rows: list[SensitivityRow]) -> None:
    at = np.arange(len(rows))
    change = np.array([row.in_deviations for row in rows])
    # The interval is of the derivative: in the bar's units it is scaled as the bar is.
    scale = np.array([row.in_deviations / row.derivative if row.derivative else 0 for row in rows])
    ends = np.array([[row.low, row.high] for row in rows]) * scale[:, None]
    reach = np.abs(np.stack([change - ends.min(axis=1), ends.max(axis=1) - change]))
    colours = [style.BLUE if value > 0 else style.RED for value in change]
    ax.barh(at, change, height=0.62, color=colours, alpha=0.75)
    ax.errorbar(change, at, xerr=reach, fmt="none", color=style.INK, elinewidth=1.2, capsize=3)
    ax.axvline(0.0, color=style.GREY, lw=1)
    style.rows(ax, [row.hyperparameter for row in rows])
