"""influence: which observations move a posterior expectation, from draws of the posterior."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, PyTree

from ..adapters import Posterior
from ..base import validate
from ..base.validate import Checked
from ..reports import display
from ..reports.report import Report, gradient_matrix
from .draws import from_draws
from .examination import one_draw
from .intake import few, read
from .intake_sites import states_of
from .powers import refuse_unfit

# The observations of each quantity that are printed; the rows have all of them.
_PRINTED = 8


@dataclasses.dataclass(frozen=True)
class InfluenceRow:
    """The influence of one observation on one quantity: the derivative of `E[f]` with respect to
    the observation's weight in the likelihood, its standard error and interval, and the change
    that leaving it out makes, to first order, in posterior standard deviations.
    """

    quantity: str
    observation: str
    influence: float
    error: float
    low: float
    high: float
    left_out: float


@dataclasses.dataclass(frozen=True)
class QuantityVariance:
    """The variances of one quantity: the posterior's, and the infinitesimal jackknife's of its mean
    over data sets, with its standard error.
    """

    quantity: str
    mean: float
    posterior: float
    jackknife: float
    jackknife_error: float


@dataclasses.dataclass(frozen=True)
class Influence:
    """The result of `diffmh.influence`: print it, index it by number or by an observation's name,
    or draw it with `diffmh.plots.influence`.

    `rows` are in the order of the quantities, the strongest observation first; `variances` has the
    posterior's and the jackknife's variance of each quantity; `report` is the run behind them.
    What is printed are the strongest observations of each quantity.
    """

    rows: tuple[InfluenceRow, ...]
    variances: tuple[QuantityVariance, ...]
    report: Report
    level: float

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[InfluenceRow]:
        return iter(self.rows)

    def __getitem__(self, at: Any) -> Any:
        """A row by its number, or the rows of an observation or of a quantity by name."""
        if not isinstance(at, str):
            return self.rows[at]
        found = tuple(row for row in self.rows if at in (row.observation, row.quantity))
        if not found:
            raise KeyError(
                f"no observation or quantity {at!r}: quantities are"
                f" {few(one.quantity for one in self.variances)}, observations"
                f" {few(sorted({row.observation for row in self.rows}))}."
            )
        return found

    def to_dataframe(self) -> Any:
        """The rows as a pandas `DataFrame`."""
        import pandas

        return pandas.DataFrame([dataclasses.asdict(row) for row in self.rows])

    def _lines(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        head = ("quantity", "observation", "influence", f"{self.level:.0%} interval", "left out")
        lines: list[tuple[str, ...]] = []
        for one in self.variances:
            rows = [row for row in self.rows if row.quantity == one.quantity]
            lines += map(_line, rows[:_PRINTED])
            if len(rows) > _PRINTED:
                lines.append((one.quantity, f"… {len(rows) - _PRINTED:,} weaker ones", "", "", ""))
        return head, lines

    def _notes(self) -> list[str]:
        found = [
            f"{one.quantity}: mean {one.mean:.6g}, posterior sd {math.sqrt(one.posterior):.4g},"
            f" {_over_data_sets(one)}"
            for one in self.variances
        ]
        return [*found, *(f"warning: {warning}" for warning in self.report.warnings)]

    def __str__(self) -> str:
        head, lines = self._lines()
        return "\n".join([*display.aligned([head, *lines]), *self._notes()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head, lines = self._lines()
        return display.table(head, lines) + display.paragraphs(self._notes())


def _line(row: InfluenceRow) -> tuple[str, ...]:
    return (
        row.quantity,
        row.observation,
        display.number_with_error(row.influence, row.error),
        f"[{row.low:.4g}, {row.high:.4g}]",
        f"{row.left_out:+.3f} sd",
    )


def _over_data_sets(one: QuantityVariance) -> str:
    if math.isnan(one.jackknife):
        return "no infinitesimal jackknife of a single observation"
    deviation = math.sqrt(max(one.jackknife, 0.0))
    return f"sd over data sets by the infinitesimal jackknife {deviation:.4g}"


def influence(
    posterior: Checked[Posterior],
    f: Checked[Callable[[dict, dict], PyTree]],
    draws: Any,
    *,
    weights: Any = None,
    control: Checked[Literal["stein"]] | None = None,
    level: Checked[float] = 0.95,
) -> Influence:
    """The influence of each observation on posterior quantities `E[f(theta, sites)]`.

    With weights w_n on the observations, `p(x) Π p(y_n | x)^{w_n}`, the influence of observation n
    is the derivative at w = 1,

        dE[f]/dw_n = Cov(f, ℓ_n),        ℓ_n = log p(y_n | x),

    so leaving it out changes `E[f]` by `−Cov(f, ℓ_n)` to first order. Beside the posterior's
    variance stands that of `E[f]` over data sets, by the infinitesimal jackknife over N
    observations, `(1/N)(mean ψ² − (mean ψ)²)` with `ψ_n = N Cov(f, ℓ_n)`. It assumes that the
    observations are independent given the sites, not that the model is right. What the noise of
    the draws adds to the squares is subtracted.

    **Arguments**

    - `posterior`: from `diffmh.from_numpyro` or `diffmh.from_pymc`; an observation is an entry of
      an observed site's log probability.
    - `f(theta, sites)`: a pytree of the quantities, of the sites as the model names them.
    - `draws`: from the model at `posterior.theta`, in any form that `diffmh.sensitivity` takes.
    - `weights`: of the draws, as of `diffmh.from_draws`.
    - `control="stein"`: Stein's control variates, as of `diffmh.from_draws`.
    - `level`: of the intervals.

    **Refused**: a posterior without the log likelihood of each observation, or without
    observations.

    >>> import diffmh, jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
    >>> def model(y, scale):
    ...     mean = numpyro.sample("mean", dist.Normal(0, scale))
    ...     numpyro.sample("y", dist.Normal(mean, 1), obs=y)
    >>> posterior = diffmh.from_numpyro(model, jnp.array([1.0, 4.0]), theta={"scale": 1.0})
    >>> draws = 5 / 3 + jax.random.normal(jax.random.key(0), (4, 1_000)) / 3**0.5
    >>> table = diffmh.influence(posterior, lambda theta, sites: sites["mean"], {"mean": draws})
    >>> row = table["y[1]"][0]
    >>> row.low < 7 / 9 < row.high                       # Var(mean) (4 − E[mean])
    True
    """
    where = "influence(posterior, f, draws)"
    validate.instance(posterior, Posterior, where, "posterior")
    validate.function(f, where, "f", "f(theta, sites) -> pytree of quantities")
    level = validate.number(level, "influence(level=...)", above=0, below=1)
    if posterior.log_likelihoods is None:
        raise ValueError(
            f"`{where}`: the posterior does not know the log likelihood of each observation"
            " (`log_likelihoods`): make it with `from_numpyro` or `from_pymc`."
        )
    refuse_unfit(f, posterior, where, predicts=False)
    weighted = _Weighted(posterior, f)
    given = read(draws, "influence(draws=...)")
    over = from_draws(
        weighted.quantities,
        weighted.log_density,
        states_of(posterior, given, "influence(draws=...)"),
        weights=weights,
        control=control,
        unconstrained=True,
    )
    over = dataclasses.replace(over, sampler=given.sampler())
    form = jax.eval_shape(posterior.log_likelihoods, posterior.theta, one_draw(over.draws))
    if not jax.tree.leaves(form):
        raise ValueError(f"`{where}`: the model has no observed site.")
    ones = jax.tree.map(lambda leaf: jnp.ones(leaf.shape), form)
    at = over.at_draws(ones)
    report = over.summarised(at, ones)
    deviations = np.sqrt(at.mean((at.value - at.mean(at.value)) ** 2))
    rows, variances = _table(report, ones, deviations, level)
    return Influence(tuple(rows), tuple(variances), report, level)


class _Weighted(eqx.Module):
    """A posterior with a weight on each observation."""

    posterior: Posterior
    f: Callable[[dict, dict], PyTree]

    def log_density(self, weights, x):
        # At weights of 1, where the derivative is taken, this is the posterior's own density.
        assert self.posterior.log_likelihoods is not None
        each = self.posterior.log_likelihoods(self.posterior.theta, x)
        more = jax.tree.map(lambda weight, term: jnp.sum((weight - 1) * term), weights, each)
        return self.posterior.log_density(self.posterior.theta, x) + sum(jax.tree.leaves(more))

    def quantities(self, weights, x):
        return self.f(self.posterior.theta, self.posterior.constrain(self.posterior.theta, x))


def _table(report: Report, weights: PyTree, deviations: Float[np.ndarray, "F"], level: float):
    """The rows of each quantity, the strongest observation first, and the quantities' variances;
    `deviations` are the quantities' posterior standard deviations.
    """
    observations = [entry.name for entry in display.entries(weights)]
    quantities = display.entries(report.value)
    slopes = gradient_matrix(report.value, report.gradient)
    errors = gradient_matrix(report.value, report.gradient_error)
    ends = gradient_matrix(report.value, report.interval(level)[1], after=1)
    batches = gradient_matrix(report.value, report.per_chain.gradient, before=1)
    rows: list[InfluenceRow] = []
    variances: list[QuantityVariance] = []
    for i, (quantity, mean) in enumerate(quantities):
        found, spread = [], float(deviations[i])
        for n, observation in enumerate(observations):
            slope, error = float(slopes[i, n]), float(errors[i, n])
            low, high = (float(end) for end in ends[i, n])
            left_out = -slope / spread if spread > 0 else math.nan
            found.append(InfluenceRow(quantity, observation, slope, error, low, high, left_out))
        rows += sorted(found, key=lambda row: -abs(row.influence))
        variances.append(
            QuantityVariance(quantity, float(mean), spread**2, *_jackknife(batches[:, i]))
        )
    return rows, variances


def _jackknife(each: Float[np.ndarray, "B N"]) -> tuple[float, float]:
    """`Σ_n (C_n − C̄)²`, the infinitesimal jackknife, from the influences C of B batches of draws,
    and its standard error.

    Products of *different* batches have no noise to square: with d the deviations from the mean of
    all n, `Σ_{b ≠ c} d_b · d_c / (B (B − 1))`. NaN for a single observation, which does not tell
    how others would vary.
    """
    if each.shape[1] < 2:
        return math.nan, math.nan
    deviations = each - each.mean(axis=1, keepdims=True)
    count = len(deviations)
    total = deviations.sum(axis=0)
    squares = np.sum(deviations**2, axis=1)
    value = (np.sum(total**2) - squares.sum()) / (count * (count - 1))
    # Of a U-statistic: twice the variance of what one batch contributes.
    part = deviations @ total - squares
    return float(value), float(2 * np.std(part / (count - 1), ddof=1) / math.sqrt(count))
