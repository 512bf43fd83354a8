"""plots.influence: which observations move each quantity, the strongest on top."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..base import validate
from ..base.validate import Checked
from ..tools.influence import Influence
from . import style, tornado

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def influence(table: Checked[Influence], *, most: Checked[int] = 12) -> Figure:
    """For each quantity a bar by observation, the longest on top: the derivative of its posterior
    mean with respect to the observation's weight, and its interval.

    **Arguments**

    - `table`: what `diffmh.influence` returns.
    - `most`: of more observations, those that matter most.

    >>> import diffmh, jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
    >>> def model(y, scale):
    ...     mean = numpyro.sample("mean", dist.Normal(0, scale))
    ...     numpyro.sample("y", dist.Normal(mean, 1), obs=y)
    >>> posterior = diffmh.from_numpyro(model, jnp.array([1.0, 4.0]), theta={"scale": 1.0})
    >>> draws = {"mean": 5 / 3 + jax.random.normal(jax.random.key(0), (4, 100)) / 3**0.5}
    >>> table = diffmh.influence(posterior, lambda theta, sites: sites["mean"], draws)
    >>> figure = diffmh.plots.influence(table)
    >>> len(figure.axes)
    1
    """
    validate.instance(table, Influence, "plots.influence(table)", "table")
    figure, groups, axes = tornado.panels(table.rows, most, "influence", sharex=False)
    for ax, (quantity, rows) in zip(axes, groups.items(), strict=True):
        value = np.array([row.influence for row in rows])
        # An interval may be bent (`reports.intervals`), but holds the estimate up to rounding.
        reach = [[row.influence - row.low, row.high - row.influence] for row in rows]
        reach = np.maximum(np.array(reach).T, 0)
        tornado.bars(ax, value, reach, [row.observation for row in rows])
        style.name(ax, f"E[{quantity}]", "derivative with respect to the weight")
    return figure
