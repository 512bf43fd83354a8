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

from .._expectation import expectation
from ..adapters import Posterior
from ..base import validate
from ..base.validate import Checked
from ..core.kernel import Kernel
from ..estimators import Covariance
from ..reports.display import aligned, place
from ..reports.report import Report
from .draws import from_draws

# The names under which the powers of prior and likelihood stand beside the hyperparameters.
PRIOR, LIKELIHOOD = "power of the prior", "power of the likelihood"


@dataclasses.dataclass(frozen=True)
class SensitivityRow:
    """The derivative of one quantity with respect to one hyperparameter, its interval, and the
    change that ten per cent more of the hyperparameter makes, in the quantity's units and in
    posterior standard deviations.
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
    """The result of `diffmh.sensitivity`: print it, or draw it with `diffmh.plots.sensitivity`.

    `rows` are in the order of the quantities, the strongest hyperparameter first; `report` is the
    run behind them, `level` that of the intervals.
    """

    rows: tuple[SensitivityRow, ...]
    report: Report
    level: float

    def __str__(self) -> str:
        head = ("quantity", "by", "derivative", f"{self.level:.0%} interval", "per +10 %", "in sd")
        lines = [
            (
                row.quantity,
                row.hyperparameter,
                f"{row.derivative:.4g}",
                f"[{row.low:.4g}, {row.high:.4g}]",
                f"{row.per_ten_percent:+.3g}",
                f"{row.in_deviations:+.3f}",
            )
            for row in self.rows
        ]
        warnings = [f"warning: {warning}" for warning in self.report.warnings]
        return "\n".join([*aligned([head, *lines]), *warnings])

    __repr__ = __str__


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
    """The derivatives of posterior quantities `E[f(theta, sites)]` with respect to every
    hyperparameter, each with its interval, scaled so that they can be compared.

        d/dθ E[f] = Cov(f, ∂_θ log g) + E[∂_θ f]

    Beside the hyperparameters stand two powers, which belong to any model: with
    `p(x)^a p(data | x)^b` in place of prior and likelihood, the derivatives with respect to a and b
    at 1 are `Cov(f, log p(x))` and `Cov(f, log p(data | x))`, as in power-scaling.

    **Arguments**

    - `posterior`: from `diffmh.from_numpyro` or `diffmh.from_pymc`.
    - `f(theta, sites)`: a pytree of the quantities, of the sites as the model names them.
    - `key`: for fresh chains, with `options` such as `num_samples`, `burn_in`, `num_chains` as in
      `diffmh.expectation`.
    - `kernel`: a function that makes a kernel for a density, such as `lambda density:
      Langevin(density, 0.5)`; `posterior.kernel` if left out.
    - `draws`: existing draws instead, from the same model at the same hyperparameters: of NUTS in
      NumPyro or PyMC, as ArviZ or a dictionary has them; see `diffmh.from_draws`.
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
    validate.instance(posterior, Posterior, where, "posterior")
    validate.function(f, where, "f", "f(theta, sites) -> pytree of quantities")
    level = validate.number(level, "sensitivity(level=...)", above=0, below=1)
    if kernel is not None:
        validate.function(kernel, where, "kernel", "kernel(log_density) -> Kernel")
    if (key is None) == (draws is None):
        raise ValueError("`sensitivity` takes either a `key` for fresh chains or existing `draws`.")
    if draws is None and "num_samples" not in options:
        raise TypeError(
            "`sensitivity(posterior, f, key, ...)` runs fresh chains: say how long, as in"
            " `num_samples=10_000, burn_in=1_000`."
        )
    theta = {"model": posterior.theta, PRIOR: jnp.ones(()), LIKELIHOOD: jnp.ones(())}
    tempered = _Tempered(posterior, f)
    if draws is not None:
        run = from_draws(
            tempered.moments,
            tempered.log_density,
            draws,
            state=lambda sites: posterior.unconstrain(posterior.theta, sites),
        ).run(theta)
    else:
        with_powers = dataclasses.replace(posterior, log_density=tempered.log_density)
        made = with_powers.kernel() if kernel is None else kernel(tempered.log_density)
        options = {"init": posterior.init, "estimator": Covariance(), **options}
        run = expectation(tempered.moments, made, **options).run(theta, key)
    return Sensitivity(tuple(_rows(run, theta, level)), run, level)


class _Tempered(eqx.Module):
    """A posterior with powers of its prior and its likelihood among its parameters."""

    posterior: Posterior
    f: Callable[[dict, dict], PyTree]

    def log_density(self, theta, x):
        # At powers of 1, where the derivative is taken, this is the posterior's own density.
        at = (theta["model"], x)
        powers = (theta[PRIOR] - 1) * self.posterior.log_prior(*at)
        powers += (theta[LIKELIHOOD] - 1) * self.posterior.log_likelihood(*at)
        return self.posterior.log_density(*at) + powers

    def moments(self, theta, x):
        """The quantities and their squares."""
        value = self.f(theta["model"], self.posterior.constrain(theta["model"], x))
        return value, jax.tree.map(jnp.square, value)


def _rows(report: Report, theta: PyTree, level: float) -> Iterator[SensitivityRow]:
    """The rows of each quantity, the strongest hyperparameter first."""
    value, square = report.value
    structure = jax.tree.structure(value)
    # At each leaf of the quantities, gradient and interval have a tree like theta.
    slopes = structure.flatten_up_to(report.gradient[0])
    intervals = structure.flatten_up_to(report.interval(level)[1][0])
    leaves = jax.tree_util.tree_leaves_with_path(value)
    for (path, mean), second, slope, ends in zip(
        leaves, jax.tree.leaves(square), slopes, intervals, strict=True
    ):
        for index in np.ndindex(np.shape(mean)):
            deviation = math.sqrt(max(float(second[index]) - float(mean[index]) ** 2, 0.0))
            rows = _of_quantity(_name(path, index), index, slope, ends, theta, deviation)
            yield from sorted(rows, key=lambda row: -abs(row.in_deviations))


def _of_quantity(
    quantity: str, at: tuple[int, ...], slope: PyTree, ends: PyTree, theta: PyTree, deviation: float
) -> Iterator[SensitivityRow]:
    parameters = jax.tree_util.tree_leaves_with_path(theta)
    leaves = zip(parameters, jax.tree.leaves(slope), jax.tree.leaves(ends), strict=True)
    for (path, parameter), derivatives, intervals in leaves:
        for index in np.ndindex(np.shape(parameter)):
            derivative, (low, high) = float(derivatives[*at, *index]), intervals[*at, *index]
            change = 0.1 * float(np.asarray(parameter)[index]) * derivative
            relative = change / deviation if deviation > 0 else math.nan
            name = _name(path, index).removeprefix("model.")
            yield SensitivityRow(
                quantity, name, derivative, float(low), float(high), change, relative
            )


def _name(path, index) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".") + place(index) or "f"
