"""sensitivity: how posterior quantities move with every hyperparameter, in units that compare."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key, PyTree

from . import _validate
from ._display import aligned
from ._validate import Checked
from .adapters import Posterior
from .draws import from_draws
from .estimators import Covariance
from .expectation import expectation
from .kernel import Kernel
from .report import Report

# The names under which the powers of prior and likelihood stand beside the hyperparameters.
PRIOR, LIKELIHOOD = "power of the prior", "power of the likelihood"


@dataclasses.dataclass(frozen=True)
class Row:
    """One quantity by one hyperparameter: the derivative and its interval; and the change that ten
    per cent more of the hyperparameter make, in the quantity's units and in posterior standard
    deviations.
    """

    quantity: str
    hyperparameter: str
    derivative: float
    low: float
    high: float
    per_ten_percent: float
    in_deviations: float


@dataclasses.dataclass(frozen=True)
class Sensitivity:
    """What `diffmh.sensitivity` returns: print it, or draw it with `diffmh.plots.sensitivity`.

    `rows` are in the order of the quantities, the strongest hyperparameter first; `report` is the
    run behind them, `level` that of the intervals.
    """

    rows: tuple[Row, ...]
    report: Report
    level: float

    def __str__(self) -> str:
        head = ("quantity", "by", "derivative", f"{self.level:.0%} interval", "per +10 %", "in sd")
        warnings = [f"warning: {warning}" for warning in self.report.warnings]
        return "\n".join([*aligned([head, *map(_cells, self.rows)]), *warnings])

    __repr__ = __str__


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.quantity,
        row.hyperparameter,
        f"{row.derivative:.4g}",
        f"[{row.low:.4g}, {row.high:.4g}]",
        f"{row.per_ten_percent:+.3g}",
        f"{row.in_deviations:+.3f}",
    )


def sensitivity(
    posterior: Checked[Posterior],
    f: Checked[Callable[[dict, dict], PyTree]],
    key: Checked[Key[Array, ""]] | None = None,
    *,
    draws: Any = None,
    kernel: Checked[Callable[[Callable[..., Array]], Kernel]] | None = None,
    level: Checked[float] = 0.95,
    **options: Any,
) -> Sensitivity:
    """The derivatives of posterior quantities `E[f(theta, sites)]` by every hyperparameter, each
    with its interval, scaled so that they can be compared.

        d/dθ E[f] = Cov(f, ∂_θ log g) + E[∂_θ f]

    Beside the hyperparameters stand two powers, which belong to any model: with
    `p(x)^a p(data | x)^b` in place of prior and likelihood, the derivatives by a and b at 1 are
    `Cov(f, log p(x))` and `Cov(f, log p(data | x))`, what power-scaling looks at.

    **Arguments**

    - `posterior`: from `diffmh.from_numpyro` or `diffmh.from_pymc`.
    - `f(theta, sites)`: a pytree of the quantities, of the sites as the model names them.
    - `key`: for fresh chains, with `options` such as `num_samples`, `burn_in`, `num_chains` as in
      `diffmh.expectation`.
    - `kernel`: a function that makes a kernel for a density, such as `lambda density:
      Langevin(density, 0.5)`; `posterior.kernel` if left out.
    - `draws`: or draws that are there already, from the same model at the same hyperparameters: of
      NUTS in NumPyro or PyMC, as ArviZ or a dictionary has them; see `diffmh.from_draws`.
    - `level`: of the intervals.

    **Refused**: neither a key nor draws, or both.

    >>> import diffmh, jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
    >>> def model(y, scale):
    ...     mean = numpyro.sample("mean", dist.Normal(0, scale))
    ...     numpyro.sample("y", dist.Normal(mean, 1), obs=y)
    >>> posterior = diffmh.from_numpyro(model, jnp.array([1.0, 2.0]), theta={"scale": 1.0})
    >>> mean = lambda theta, sites: {"mean": sites["mean"]}
    >>> table = diffmh.sensitivity(
    ...     posterior, mean, jax.random.key(0), num_samples=4_000, burn_in=100
    ... )
    >>> row = next(row for row in table.rows if row.hyperparameter == "scale")
    >>> row.low < 2 / 3 < row.high                       # E = 3 / (2 + scale⁻²)
    True
    """
    where = "sensitivity(posterior, f, ...)"
    _validate.instance(posterior, Posterior, where, "posterior")
    _validate.function(f, where, "f", "f(theta, sites) -> pytree of quantities")
    level = _validate.number(level, "sensitivity(level=...)", above=0, below=1)
    if kernel is not None:
        _validate.function(kernel, where, "kernel", "kernel(log_density) -> Kernel")
    if (key is None) == (draws is None):
        raise ValueError(
            "`sensitivity` takes a `key` for fresh chains, or `draws` that are there already."
        )
    if draws is None and "num_samples" not in options:
        raise TypeError(
            "`sensitivity(posterior, f, key, ...)` runs fresh chains: say how long, as in"
            " `num_samples=10_000, burn_in=1_000`."
        )
    theta = {"model": posterior.theta, PRIOR: jnp.ones(()), LIKELIHOOD: jnp.ones(())}

    tempered = _Tempered(posterior, f)
    if draws is not None:
        state = lambda sites: posterior.unconstrain(posterior.theta, sites)
        run = from_draws(tempered.moments, tempered.log_density, draws, state=state).run(theta)
        return Sensitivity(tuple(_rows(run, theta, level)), run, level)
    with_powers = dataclasses.replace(posterior, log_density=tempered.log_density)
    make = (lambda density: with_powers.kernel()) if kernel is None else kernel
    options = {"init": posterior.init, "estimator": Covariance(), **options}
    chains = expectation(tempered.moments, make(tempered.log_density), **options)
    run = chains.run(theta, key)
    return Sensitivity(tuple(_rows(run, theta, level)), run, level)


class _Tempered(eqx.Module):
    """A posterior with powers of its prior and its likelihood among its parameters."""

    posterior: Posterior
    f: Callable[[dict, dict], PyTree]

    def log_density(self, theta, x):
        at = (theta["model"], x)
        powers = (theta[PRIOR] - 1) * self.posterior.log_prior(*at)
        powers += (theta[LIKELIHOOD] - 1) * self.posterior.log_likelihood(*at)
        return self.posterior.log_density(*at) + powers

    def moments(self, theta, x):
        """The quantities and their squares."""
        value = self.f(theta["model"], self.posterior.constrain(theta["model"], x))
        return value, jax.tree.map(jnp.square, value)


def _rows(report: Report, theta: PyTree, level: float) -> Iterator[Row]:
    """For each quantity, the strongest hyperparameter first."""
    value, square = report.value
    leaves, structure = jax.tree.flatten(value)
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(value)]
    squares = jax.tree.leaves(square)
    slopes = structure.flatten_up_to(report.gradient[0])
    ends = structure.flatten_up_to(report.interval(level)[1][0])
    for path, mean, second, slope, end in zip(paths, leaves, squares, slopes, ends, strict=True):
        for index in np.ndindex(np.shape(mean)):
            at = lambda tree, index=index: jax.tree.map(lambda leaf: np.asarray(leaf)[index], tree)
            deviation = math.sqrt(max(float(second[index]) - float(mean[index]) ** 2, 0.0))
            rows = _of_quantity(_name(path, index), at(slope), at(end), theta, deviation)
            yield from sorted(rows, key=lambda row: -abs(row.in_deviations))


def _of_quantity(quantity: str, slope, ends, theta, deviation: float) -> Iterator[Row]:
    slopes, limits = jax.tree.leaves(slope), jax.tree.leaves(ends)
    parameters = jax.tree_util.tree_leaves_with_path(theta)
    for (path, parameter), leaf, limit in zip(parameters, slopes, limits, strict=True):
        for index in np.ndindex(np.shape(parameter)):
            derivative, (low, high) = float(leaf[index]), map(float, limit[index])
            change = 0.1 * float(np.asarray(parameter)[index]) * derivative
            relative = change / deviation if deviation > 0 else math.nan
            name = _name(path, index).removeprefix("model.")
            yield Row(quantity, name, derivative, low, high, change, relative)


def _name(path, index) -> str:
    name = jax.tree_util.keystr(path, simple=True, separator=".")
    return name + (f"[{', '.join(map(str, index))}]" if index else "") or "f"
