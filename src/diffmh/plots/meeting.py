"""plots.meeting: when the chains of pairs met, and how far from equilibrium a chain may be."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..base import validate
from ..base.validate import Checked
from ..reports.report import Report
from . import style

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def meeting(report: Checked[Report]) -> Figure:
    """The share of pairs that have not met after t steps (left), and the bound on the distance
    between the law of a chain after t steps and the equilibrium (right), with the suggested
    `burn_in`.

    **Arguments**: what `.run` of an expectation by `Stationary` returns.

    **Refused**: a report without pairs, or in which none has met.

    >>> import jax, diffmh
    >>> from diffmh.models import mixture
    >>> p = diffmh.expectation(
    ...     mixture.indicator, mixture.sampler(), init=0, num_samples=50,
    ...     estimator=diffmh.Stationary(alternatives=0))
    >>> figure = diffmh.plots.meeting(p.run(0.4, jax.random.key(0)))
    >>> [ax.get_xlabel() for ax in figure.axes]
    ['t', 't']
    """
    found = validate.instance(report, Report, "plots.meeting(report)", "report").meeting_time
    if found is None:
        raise ValueError(
            "`plots.meeting(report)` draws when pairs of chains met, and this report has no pairs:"
            " run an expectation with `estimator=Stationary()`."
        )
    if not found.met.size:
        raise ValueError(
            "`plots.meeting(report)` draws when pairs of chains met, and no pair of this report"
            f" has met after max_steps={found.max_steps:,}: raise `max_steps`, or use a proposal"
            " or a coupling whose chains meet sooner."
        )
    steps = np.arange(int(found.met.max()) + 2)
    late = np.where(found.times < 0, np.inf, found.times)
    apart = np.mean(late[None] > steps[:, None], axis=1)
    figure, (left, right) = style.panels(4.2, 4.2, height=2.8)
    left.step(steps, apart, where="post", color=style.BLUE)
    style.name(left, "share of pairs that have not met", x="t")
    right.plot(steps, np.minimum(1.0, found.distance(steps)), color=style.BLUE)
    right.axvline(found.burn_in, color=style.GREY, lw=1)
    style.name(right, f"distance from equilibrium ≤, burn_in={found.burn_in}", x="t")
    for ax in (left, right):
        ax.set_ylim(-0.02, 1.05)
    return figure
