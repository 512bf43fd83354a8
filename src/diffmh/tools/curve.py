"""A curve: an average over draws along a grid of θ, with its band and how far to trust it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, PyTree

from ..base import trees, validate
from ..core.admission import Unflatten
from ..reports.convergence import mean_and_error
from ..reports.intervals import ends, shape
from ..reports.report import value_tree
from .draw_averages import Cut
from .reweighting import refuse_another_form
from .weighted_report import Tail, jackknife, weighted_draws

if TYPE_CHECKING:
    from .draws import FromDraws


class Curve(eqx.Module):
    """Averages along a grid of n values of theta; every array has the grid as its leading axis.

    - `theta`: the grid, and `along` the n numbers of it that vary.
    - `value`, `value_error`, `low`, `high`: like f, with standard errors and 95 % intervals. NaN
      where the draws do not reach.
    - `effective_draws`, `pareto_k`: of the weights at each theta. `trusted`: at least 5 % of the
      draws are effective, and k̂ is at most 0.7.
    - `at`: the number of the grid's kind where the draws were made.
    """

    theta: PyTree
    along: Float[np.ndarray, "n"]
    value: PyTree
    value_error: PyTree
    low: PyTree
    high: PyTree
    effective_draws: Float[np.ndarray, "n"]
    pareto_k: Float[np.ndarray, "n"]
    trusted: np.ndarray
    at: float
    name: str = eqx.field(static=True, default="theta")


def curve_of(draws: FromDraws, thetas: PyTree, args: tuple[Any, ...], name: str | None) -> Curve:
    """The curve of what `from_draws(..., at=theta0)` returned."""
    if draws.at is None:
        raise TypeError(
            "A curve needs the theta that the draws were made with: `from_draws(..., at=theta)`."
        )
    grid, along, at, label = _grid(draws.at, thetas, name)
    args = trees.data(args)
    found = draws.examined(draws.at, args)
    given = draws.reweighted(draws.at, args)
    # Where the draws were made: batches are as long there as anywhere near.
    here = weighted_draws(given, draws.at, Tail.of(given, draws.at), found.explicit)
    per_chain = Cut.of(here.series()).per_chain
    rows, tails = [], []
    for index in range(len(along)):
        theta = jax.tree.map(lambda leaf, index=index: leaf[index], grid)
        tail = Tail.of(given, theta)
        ratio = jackknife(given, theta, 0, False, per_chain)
        rows.append(_row(np.asarray(ratio.value).T, tail))
        tails.append(tail)
    unflatten = Unflatten.of(found.form)

    def like_value(column):
        each = [value_tree(unflatten, row) for row in column]
        return jax.tree.map(lambda *leaves: np.stack(leaves), *each)

    value, error, low, high = map(like_value, zip(*rows, strict=True))
    return Curve(
        grid,
        along,
        value,
        error,
        low,
        high,
        effective_draws=np.array([tail.effective for tail in tails]),
        pareto_k=np.array([tail.pareto_k for tail in tails]),
        trusted=np.array([tail.trusted for tail in tails]),
        at=at,
        name=label,
    )


def _row(pseudo: Float[np.ndarray, "F B"], tail: Tail) -> tuple[np.ndarray, ...]:
    """Value, error and the ends of the interval; NaN where too few draws are effective."""
    mean, error = mean_and_error(pseudo)
    low, high = ends(mean, error, shape(pseudo), pseudo.shape[-1], 0.95)
    reached = 1.0 if tail.trusted else np.nan
    return tuple(np.asarray(part) * reached for part in (mean, error, low, high))


def _grid(
    at: PyTree, thetas: PyTree, name: str | None
) -> tuple[PyTree, Float[np.ndarray, "n"], float, str]:
    """The grid as thetas with a leading axis, the numbers that vary along it, that of the draws,
    and what it is called.
    """
    if name is None:
        grid = trees.strong(validate.theta(thetas, "thetas"))
        lengths = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(grid)}
        if len(lengths) != 1 or lengths == {()}:
            raise ValueError(
                "`curve(thetas)`: every array of `thetas` must have the grid as its leading axis,"
                f" got shapes {trees.shapes(grid)}. For the values of one number of a dictionary"
                ' pass its name: `curve(values, name="...")`.'
            )
        refuse_another_form(jax.tree.map(lambda leaf: leaf[0], grid), at, "each of `thetas`")
        return grid, *_varying(grid, at)
    validate.text(name, "curve(name=...)")
    if not isinstance(at, dict) or name not in at or jnp.shape(at[name]) != ():
        known = sorted(at) if isinstance(at, dict) else at
        raise ValueError(
            f"`curve(name=...)` must be a number's name in `at`, one of {known}, got {name!r}."
        )
    values = jnp.asarray(validate.real_array(thetas, "curve(thetas)"), at[name].dtype)
    if values.ndim != 1:
        raise ValueError(
            "`curve(thetas)` with `name` must be the values of that number, of shape (n,), got"
            f" shape {values.shape}."
        )
    grid = {key: trees.repeat(leaf, len(values)) for key, leaf in at.items()} | {name: values}
    return grid, np.asarray(values, float), float(at[name]), name


def _varying(grid: PyTree, at: PyTree) -> tuple[Float[np.ndarray, "n"], float, str]:
    """The first number that varies along the grid."""
    paths = jax.tree_util.tree_leaves_with_path(grid)
    for (path, leaf), here in zip(paths, jax.tree.leaves(at), strict=True):
        columns = np.asarray(leaf, float).reshape(len(leaf), -1)
        for column, start in zip(columns.T, np.ravel(here), strict=True):
            if np.ptp(column) > 0:
                return column, float(start), "theta" + jax.tree_util.keystr(path)
    raise ValueError("`curve(thetas)`: nothing varies along the grid: all of its thetas are equal.")
