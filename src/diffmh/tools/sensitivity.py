"""sensitivity: how posterior quantities move with every hyperparameter, in units that compare."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Key, PyTree

from .._expectation import expectation
from ..adapters import Posterior
from ..base import trees, validate
from ..base.validate import Checked
from ..core.adapted import Adapted
from ..estimators import Covariance, stein
from .draws import FromDraws, from_draws
from .examination import examinations_of, one_draw
from .intake import MANY_DIVERGENCES, GivenDraws, read
from .intake_sites import states_of, weights_between
from .powers import WithPowers, checked_prior, draws_predictions, refuse_unfit
from .quantities import checked_quantities
from .sensitivity_rows import FromDrawsRows, of_own_chains
from .sensitivity_table import Sensitivity
from .tails import HEAVY, pareto_shape

# Options of `expectation` that sampling by NUTS does not have: who gives them means our own chains.
_OF_OWN_CHAINS = {"burn_in", "estimator", "init", "lag", "mesh"}


def sensitivity(
    posterior: Checked[Posterior],
    f: Checked[Callable[..., PyTree]],
    key: Checked[Key[Array, ""]] | None = None,
    *,
    draws: Any = None,
    at: Any = None,
    weights: Any = None,
    quantities: Checked[Sequence[str]] = ("mean",),
    prior: Checked[Sequence[str]] | None = None,
    kernel: Any = None,
    level: Checked[float] = 0.95,
    **options: Any,
) -> Sensitivity:
    """The derivatives of posterior quantities with respect to every hyperparameter, each with its
    interval, scaled so that they can be compared.

        d/dθ E[f] = Cov(f, ∂_θ log g) + E[∂_θ f]

    and likewise for standard deviations and quantiles. Beside the hyperparameters stand two powers,
    which belong to any model: with `p(x)^a p(data | x)^b` in place of prior and likelihood, the
    derivatives with respect to a and b at 1 are `Cov(f, log p(x))` and `Cov(f, log p(data | x))`,
    as in power-scaling.

    `sensitivity(posterior, f, key)` samples by itself, by `posterior.sample(key)`: NUTS, with
    discrete sites summed out or drawn in turn.

    **Arguments**

    - `posterior`: from `diffmh.from_numpyro` or `diffmh.from_pymc`.
    - `f(theta, sites)`: a pytree of the quantities, of the sites as the model names them; or
      `f(theta, sites, key)`, which draws predictions with a key that is another for each draw.
    - `key`: for sampling, with `options` of `posterior.sample` such as `num_samples`,
      `num_warmup`, `num_chains` and `progress`; and for predictions.
    - `draws`: existing draws instead, from the same model, by the names of its sites: a NumPyro
      `MCMC`, a `DataTree` or `InferenceData` of PyMC, ArviZ or `posterior.sample`, a path to one, a
      dictionary of arrays `(chain, draw, ...)`, a list of dictionaries with one for each chain;
      flat names such as `theta[1]` are put together. A stack of BlackJAX' states,
      `(chain, draw, ...)` or `(draw, ...)` of one chain, and `diffmh.sample`'s tree have
      unconstrained states.
    - `at`: the hyperparameters that the draws were made with, by name, if they are not the
      posterior's: the draws are then weighted by the ratio of the densities. `weights`: weights of
      your own instead, as in `diffmh.from_draws`.
    - `quantities`: rows for `"mean"`, `"sd"`, `"median"` and quantiles such as `"q05"`, `"q97.5"`.
    - `prior`: names of the sites whose densities count as the prior that is raised to a power; all
      latent sites if left out. In a hierarchy these include the groups' own effects, so that the
      answer depends on how the model is written: name the top level, `prior=("mu", "tau")`.
    - `kernel`: our own chains and `Covariance()` instead, for means: a kernel made from
      `posterior.log_density`, such as `posterior.kernel(scale)`; an `Adapted` one; or a function of
      a density. `options` are then those of `diffmh.expectation`; `burn_in` or another of those
      that only it has, without a kernel, runs `posterior.kernel()`.
    - `level`: of the intervals.

    **Returns** a `Sensitivity`; its `draws` are the draws. Rows are marked, with what to do, where
    chains disagree (split R̂ above 1.05), the draws are worth fewer than 100 independent ones, the
    quantity or the weights have a heavy tail (Pareto k̂ above 0.7), the quantity has one value at
    nearly all draws, or more than 1 % of the transitions diverged.

    **Refused**: neither a key nor draws; both, unless f draws predictions; draws whose names,
    shapes or labels are not the model's, or that `posterior.sample` made at other hyperparameters
    than `at` or the posterior's.

    >>> import diffmh, jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
    >>> def model(y, scale):
    ...     mean = numpyro.sample("mean", dist.Normal(0, scale))
    ...     numpyro.sample("y", dist.Normal(mean, 1), obs=y)
    >>> posterior = diffmh.from_numpyro(model, jnp.array([1.0, 2.0]), theta={"scale": 1.0})
    >>> f = lambda theta, sites: {"mean": sites["mean"]}
    >>> draws = {"mean": 1 + jax.random.normal(jax.random.key(0), (4, 1_000)) / 3**0.5}
    >>> table = diffmh.sensitivity(posterior, f, draws=draws, quantities=("mean", "sd"))
    >>> row = table["mean", "scale"]
    >>> row.low < 2 / 3 < row.high, row.trusted          # E = 3 / (2 + scale⁻²)
    (True, True)
    >>> row = table["sd(mean)", "scale"]
    >>> row.low < 3**-1.5 < row.high                     # sd = (2 + scale⁻²)^−½
    True
    """
    where = "sensitivity(posterior, f, ...)"
    validate.instance(posterior, Posterior, where, "posterior")
    validate.function(f, where, "f", "f(theta, sites) -> pytree of quantities")
    level = validate.number(level, "sensitivity(level=...)", above=0, below=1)
    quantities, predicts = checked_quantities(quantities), draws_predictions(f)
    if key is not None and not isinstance(key, jax.Array) and draws is None:
        if isinstance(key, int):
            validate.typed_key(key)
        raise TypeError(
            f"`{where}`: `key` must be a typed key, `jax.random.key(seed)`, got an object of type"
            f" {type(key).__name__}: existing draws are passed by name, `draws=...`."
        )
    key_sample: Any = key if key is None else validate.typed_key(key)
    _refuse_sources(key, draws, kernel, at, weights, options, predicts)
    refuse_unfit(f, posterior, where, predicts)
    key_predict, impl = None, None
    if predicts:
        impl = jax.random.key_impl(key_sample)
        key_sample, key_predict = jax.random.split(key_sample)
    problem = WithPowers(posterior, f, checked_prior(prior, posterior), impl)
    if draws is None and (kernel is not None or _OF_OWN_CHAINS & set(options)):
        return _own_chains(problem, key_sample, kernel, quantities, predicts, level, options)
    if draws is None:
        draws = posterior.sample(key_sample, **options)
    given = read(draws, "sensitivity(draws=...)")
    if at is not None:
        at = posterior.other_theta(at, "sensitivity(at=...)")
    made_by = posterior if at is None else dataclasses.replace(posterior, theta=at)
    states = states_of(made_by, given, "sensitivity(draws=...)")
    if at is not None:
        weights = weights_between(made_by, posterior, states)
    if key_predict is not None:
        states = problem.with_keys(states, key_predict)
    made = _from_draws(problem, states, weights)
    return _table(made, problem.theta, given, quantities, level, draws)


def _refuse_sources(key, draws, kernel, at, weights, options: dict, predicts: bool) -> None:
    if key is None and draws is None:
        raise ValueError(
            "`sensitivity` needs a `key` for sampling, or existing `draws`, got neither."
        )
    if "theta" in options:
        raise TypeError(
            "`sensitivity` takes derivatives at the posterior's own `theta`, where it samples too:"
            " make a posterior for another `theta`."
        )
    if draws is None:
        for name, value in (("weights", weights), ("at", at)):
            if value is not None:
                raise ValueError(f"`sensitivity({name}=...)` is for `draws`, which are missing.")
        return
    if at is not None and weights is not None:
        raise ValueError(
            "`sensitivity` takes one of `at`, from which it makes weights, and `weights`, got both."
        )
    if predicts and key is None:
        raise ValueError(
            "`sensitivity`: `f(theta, sites, key)` draws predictions: pass a `key` too."
        )
    if key is not None and not predicts:
        raise ValueError(
            "`sensitivity` got both a `key` and existing `draws`: leave one out. Only an `f` that"
            " draws predictions, `f(theta, sites, key)`, needs both."
        )
    if kernel is not None or options:
        wrong = sorted([*options, *(["kernel"] if kernel is not None else [])])
        raise TypeError(
            f"`sensitivity(draws=...)` samples nothing, and has no use for {wrong}: leave them out."
        )


def _own_chains(problem, key, kernel, quantities, predicts, level, options) -> Sensitivity:
    if predicts or quantities != ("mean",):
        raise ValueError(
            "`sensitivity(kernel=...)` averages along the chains and keeps no draws, which"
            " predictions, `sd` and quantiles need: leave `kernel` out, or pass"
            " `draws=diffmh.sample(kernel, posterior.theta, key, ...)`."
        )
    made = problem.posterior.kernel_for(problem.log_density, kernel)
    start = {} if isinstance(made, Adapted) else {"init": problem.posterior.init}
    options = {**start, "estimator": Covariance(), **options}
    if isinstance(options["estimator"], Covariance):
        # The adapters have made the coordinates unconstrained.
        options["estimator"] = options["estimator"].declared_unconstrained()
    if "num_samples" not in options:
        raise TypeError(
            "`sensitivity(posterior, f, key, kernel=...)` runs chains of that kernel: pass their"
            " length, such as `num_samples=10_000, burn_in=1_000`."
        )
    run = expectation(problem.moments, made, **options).run(problem.theta, key)
    return Sensitivity(tuple(of_own_chains(run, problem.theta, level)), run, level)


def _from_draws(problem: WithPowers, states: PyTree, weights: Any) -> FromDraws:
    """The only place where `sensitivity` makes means of draws: with Stein's control variates where
    their conditions hold.
    """
    values, log_density = problem.values, problem.log_density
    made = from_draws(values, log_density, states, weights=weights)
    known = examinations_of(values, log_density, made.draws)
    made = dataclasses.replace(made, examinations=known)
    if weights is None and _suits_stein(made, problem.theta):
        return dataclasses.replace(made, control="stein")
    return made


def _suits_stein(made: FromDraws, theta: PyTree) -> bool:
    """True if the density is proved continuous in the real coordinates, which the adapters have
    made unconstrained, and every one of them has a mean: then `g ∇φ → 0` for φ of degree 3.
    """
    part, _ = stein.continuous_part(made.draws)
    if stein.dimension(one_draw(made.draws)) == 0 or made.jumps_in_x(trees.strong(theta)):
        return False
    for leaf in map(np.asarray, jax.tree.leaves(part)):
        for column in leaf.reshape(-1, math.prod(leaf.shape[2:])).T:
            if max(pareto_shape(column), pareto_shape(-column)) > HEAVY:
                return False
    return True


def _table(
    made: FromDraws,
    theta: PyTree,
    given: GivenDraws,
    quantities: tuple[str, ...],
    level: float,
    draws,
) -> Sensitivity:
    theta = trees.strong(theta)
    at = made.at_draws(theta)
    run = made.summarised(at, theta)
    doubt = ""
    if given.divergent_share > MANY_DIVERGENCES:
        doubt = (
            f"more than {MANY_DIVERGENCES:.0%} of the transitions diverged. Sample with a higher"
            " target acceptance rate, or write the hierarchy non-centred."
        )
    found = FromDrawsRows(at, run, theta, level, doubt)
    rows = tuple(found.of(quantities))
    r_hat, effective = found.health
    health = f"split R̂ at most {r_hat:.3f}, effective draws at least {effective:,.0f}"
    run = dataclasses.replace(
        run,
        notes=(*run.notes, health, *given.notes()),
        warnings=(*run.warnings, *given.warnings()),
    )
    return Sensitivity(rows, run, level, draws)
