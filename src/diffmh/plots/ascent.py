"""plots.ascent: the iterates of an optimisation, with values and gradients on the way."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .. import _validate
from .._validate import Checked
from ..optimise import Ascent
from . import style
from .entries import Entry, entries, first

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = (style.BLUE, style.RED, style.GREEN, style.AMBER, style.VIOLET, style.GREY)


def ascent(ascent: Checked[Ascent], *, most: Checked[int] = 6) -> Figure:
    """The parameters, the objective and its gradient over the iterations, in three panels.

    Bands are one standard error over the chains, where the objective has chains. Dotted lines are
    the average of the iterates' tail, which scatters less than the iterates: a tail that still
    drifts past it has not converged, and neither has a gradient that stays on one side of zero.

    **Arguments**

    - `ascent`: what `diffmh.optimise` returns.
    - `most`: at most so many entries of theta, in the order of its leaves.

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
    _validate.instance(ascent, Ascent, "plots.ascent(ascent)", "ascent")
    most = _validate.count(most, "plots.ascent(most=...)")
    theta, left_out = first(entries(ascent.theta, "θ", leading=1), most)
    average = first(entries(ascent.average, "θ"), most)[0]
    gradient = first(entries(ascent.gradient, "θ", leading=1), most)[0]
    gradient_error = first(entries(ascent.gradient_error, "θ", leading=1), most)[0]

    figure, (parameters, objective, slopes) = style.panels(3.3, 3.3, 3.3, height=3.1)
    iterations = np.arange(len(theta[0].values))
    for i, (path, end) in enumerate(zip(theta, average, strict=True)):
        colour = COLOURS[i % len(COLOURS)]
        parameters.plot(iterations, path.values, color=colour, lw=1.3, label=path.name)
        parameters.axhline(float(end.values), color=colour, lw=0.9, ls=":")
    _banded(objective, Entry("", np.asarray(ascent.value)), ascent.value_error, style.INK)
    slopes.axhline(0.0, color=style.FAINT, lw=1, zorder=0)
    for i, (slope, error) in enumerate(zip(gradient, gradient_error, strict=True)):
        _banded(slopes, slope, error.values, COLOURS[i % len(COLOURS)])
    style.name(parameters, "parameters" + left_out, "iteration")
    style.name(objective, "objective", "iteration")
    style.name(slopes, "gradient", "iteration")
    style.key(parameters, loc="best")
    return figure


def _banded(ax: Axes, entry: Entry, error: object, colour: str) -> None:
    """A line with its standard error about it; without, where the error is not known."""
    values, errors = entry.values, np.asarray(error)
    iterations = np.arange(len(values))
    ax.plot(iterations, values, color=colour, lw=1.1)
    if np.all(np.isfinite(errors)):
        ax.fill_between(iterations, values - errors, values + errors, color=colour, alpha=0.2, lw=0)
