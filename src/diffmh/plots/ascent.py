"""plots.ascent: the iterates of an optimisation, with values and gradients."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

from ..base import validate
from ..base.validate import Checked
from ..reports.display import entries
from ..tools.optimise import Ascent
from . import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = (style.BLUE, style.RED, style.GREEN, style.AMBER, style.VIOLET, style.GREY)


def ascent(ascent: Checked[Ascent], *, most: Checked[int] = 6) -> Figure:
    """The parameters, the objective and its gradient over the iterations, in three panels.

    Bands are one standard error over the chains, if the objective has chains. Dotted lines are the
    average over the last iterates, which scatters less than the iterates. If the last iterates
    still drift, or the gradient stays on one side of zero, the optimisation has not converged.

    **Arguments**

    - `ascent`: the result of `diffmh.optimise`.
    - `most`: the largest number of entries of theta to show, in the order of its leaves.

    >>> import jax, optax, diffmh
    >>> from diffmh.models import gaussian
    >>> normal = gaussian.sampler()
    >>> square = diffmh.expectation(lambda t, x: x**2, normal, init=0.0, num_samples=200)
    >>> adam = optax.adam(0.1)
    >>> path = diffmh.optimise(square, 1.0, jax.random.key(0), optimizer=adam, num_iterations=20)
    >>> figure = diffmh.plots.ascent(path)
    >>> [ax.get_title(loc="left") for ax in figure.axes]
    ['parameters', 'objective', 'gradient']
    """
    validate.instance(ascent, Ascent, "plots.ascent(ascent)", "ascent")
    most = validate.count(most, "plots.ascent(most=...)")
    # All four trees have the structure of theta, so their entries are in the same order.
    average = entries(ascent.average, "θ")
    paths = (ascent.theta, ascent.gradient, ascent.gradient_error)
    along = (entries(path, "θ", leading=1) for path in paths)
    shown, left_out = style.first(list(zip(average, *along, strict=True)), most)

    figure, (parameters, objective, slopes) = style.panels(3.3, 3.3, 3.3, height=3.1)
    _banded(objective, np.asarray(ascent.value), np.asarray(ascent.value_error), style.INK)
    slopes.axhline(0.0, color=style.FAINT, lw=1, zorder=0)
    for (end, path, slope, error), colour in zip(shown, itertools.cycle(COLOURS), strict=False):
        parameters.plot(path.values, color=colour, lw=1.3, label=path.name)
        parameters.axhline(float(end.values), color=colour, lw=0.9, ls=":")
        _banded(slopes, slope.values, error.values, colour)
    for ax, title in zip(
        figure.axes, ("parameters" + left_out, "objective", "gradient"), strict=True
    ):
        style.name(ax, title, "iteration")
    style.key(parameters, loc="best")
    return figure


def _banded(ax: Axes, values: np.ndarray, errors: np.ndarray, colour: str) -> None:
    """A line with a band of one standard error; without the band if the error is unknown."""
    ax.plot(values, color=colour, lw=1.1)
    if np.all(np.isfinite(errors)):
        ends = (values - errors, values + errors)
        ax.fill_between(range(len(values)), *ends, color=colour, alpha=0.2, lw=0)
