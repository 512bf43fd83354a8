"""plots.curve: an average over draws along a parameter, with its band, and where to stop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jaxtyping import PyTree

from ..base.validate import Checked
from ..tools.curve import Curve
from ..tools.draws import FromDraws
from . import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# A panel for each number of f, at most these.
_MOST = 9


def curve(
    draws: Checked[FromDraws | Curve],
    thetas: PyTree = None,
    *args: Any,
    name: Checked[str] | None = None,
) -> Figure:
    """Each number of f along a parameter, with 95 % intervals as a band; grey where the draws do
    not reach, a mark where they were made, and below, Pareto k̂ of the weights.

    **Arguments**

    - `draws`: what `diffmh.from_draws(..., at=theta0)` returns; or its `.curve(...)`, without the
      rest.
    - `thetas`: a grid, like theta with a leading axis; with `name`, the values of that entry of a
      dict theta.

    >>> import jax, jax.numpy as jnp, diffmh
    >>> draws = 0.5 + jax.random.normal(jax.random.key(0), (4, 1_000))
    >>> log_normal = lambda theta, x: -0.5 * (x - theta) ** 2
    >>> mean = diffmh.from_draws(lambda theta, x: x, log_normal, draws, at=0.5)
    >>> figure = diffmh.plots.curve(mean, jnp.linspace(-0.5, 1.5, 9))
    >>> len(figure.axes)
    2
    """
    if isinstance(draws, FromDraws):
        found = draws.curve(thetas, *args, name=name)
    elif isinstance(draws, Curve):
        found = draws
    else:
        raise TypeError(
            "`plots.curve(draws, thetas)` takes what `diffmh.from_draws(..., at=theta)` returns, or"
            f" its `.curve(...)`, got {draws!r}."
        )
    panels, left_out = style.first(_panels(found), _MOST)
    across = min(3, len(panels))
    down = -(-len(panels) // across)
    figure = style.empty(4.2 * across, 2.7 * down + 1.5)
    shape: list[Any] = [
        [f"{row * across + column}" for column in range(across)] for row in range(down)
    ]
    axes = figure.subplot_mosaic([*shape, ["tail"] * across], height_ratios=[2.7] * down + [1.5])
    style.plain(axes.values())
    for number in range(len(panels), down * across):
        axes[f"{number}"].set_visible(False)
    for number, (label, *numbers) in enumerate(panels):
        _draw(axes[f"{number}"], found, label, *numbers)
    _tail(axes["tail"], found, left_out)
    return figure


def _panels(found: Curve) -> list[tuple[Any, ...]]:
    """A name and the numbers of each panel: value, low and high end."""
    panels = []
    parts = map(jax.tree_util.tree_leaves_with_path, (found.value, found.low, found.high))
    for leaves in zip(*parts, strict=True):
        path = jax.tree_util.keystr(leaves[0][0])
        flat = [np.asarray(leaf, float).reshape(len(found.along), -1).T for _, leaf in leaves]
        for number, rows in enumerate(zip(*flat, strict=True)):
            index = f"[{number}]" if len(flat[0]) > 1 else ""
            panels.append((f"E f{path}{index}", *rows))
    return panels


def _draw(ax: Axes, found: Curve, label: str, value, low, high) -> None:
    ax.fill_between(found.along, low, high, color=style.BLUE, alpha=0.2, lw=0)
    ax.plot(found.along, value, color=style.BLUE, lw=1.6)
    ax.axvline(found.at, color=style.GREY, lw=1, ls=":")
    _grey(ax, found)
    style.name(ax, label, found.name)


def _tail(ax: Axes, found: Curve, left_out: str) -> None:
    known = np.where(np.isfinite(found.pareto_k), found.pareto_k, np.nan)
    ax.plot(found.along, known, color=style.AMBER, lw=1.4, marker=".", ms=4)
    ax.axhline(0.7, color=style.RED, lw=1, ls="--")
    ax.axvline(found.at, color=style.GREY, lw=1, ls=":")
    _grey(ax, found)
    style.name(ax, f"Pareto k̂ (trusted below 0.7){left_out}", found.name)


def _grey(ax: Axes, found: Curve) -> None:
    """Shade the part of the grid that the draws do not reach."""
    if found.trusted.all():
        return
    middles = (found.along[1:] + found.along[:-1]) / 2
    edges = np.concatenate([found.along[:1], middles, found.along[-1:]])
    for number in np.flatnonzero(~found.trusted):
        ax.axvspan(edges[number], edges[number + 1], color=style.FAINT, lw=0, alpha=0.6)
    ax.set_xlim(min(edges[0], edges[-1]), max(edges[0], edges[-1]))
