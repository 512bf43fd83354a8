"""From a NumPyro model to its posterior as a function of hyperparameters."""

from __future__ import annotations

import copy
import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ..base import validate
from ..base.validate import Checked
from ..jaxprs import compat
from .posterior import OfModel, Posterior, Sites, checked_theta, extra


class _Model(OfModel):
    """A model with its data; hyperparameters come as keyword arguments."""

    model: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    discrete: tuple[str, ...] = eqx.field(static=True)
    continuous: tuple[str, ...] = eqx.field(static=True)

    @property
    def latent(self) -> tuple[str, ...]:
        return (*self.continuous, *self.discrete)

    def _given(self, x: Sites) -> Callable[..., Any]:
        """The model with its discrete sites in place."""
        from numpyro import handlers

        data = {name: x[name] for name in self.discrete}
        return handlers.substitute(self._of_latent(), data=data)

    def _of_latent(self) -> Callable[..., Any]:
        """The model without NumPyro's check that a continuous latent site lies in its support: the
        transform onto the support has put it there, and the check would be a jump at a place that
        depends on theta, as in `Uniform(0, theta)`. Discrete sites are always checked, even if the
        user has switched checks off: outside its support a density may be any number.
        """
        from numpyro.primitives import Messenger

        continuous, discrete = self.continuous, self.discrete

        class OfLatent(Messenger):
            def process_message(self, msg):
                if msg["type"] == "sample" and msg["name"] in (*continuous, *discrete):
                    msg["fn"] = with_check(msg["fn"], msg["name"] in discrete)

        return OfLatent(self.model)

    def log_density(self, theta: Sites, x: Sites) -> Array:
        from numpyro.infer.util import potential_energy

        rest = {name: x[name] for name in self.continuous}
        kwargs = {**self.kwargs, **theta}
        return -jnp.asarray(potential_energy(self._given(x), self.args, kwargs, rest))

    def log_prior(self, theta: Sites, x: Sites) -> Array:
        return sum(self.log_prior_by_site(theta, x).values(), jnp.zeros(()))

    def log_prior_by_site(self, theta: Sites, x: Sites) -> dict[str, Array]:
        terms = self._log_probs(theta, x)
        return {name: jnp.asarray(terms[name]) for name in self.latent}

    def log_likelihood(self, theta: Sites, x: Sites) -> Array:
        terms = self._log_probs(theta, x)
        return sum((term for name, term in terms.items() if name not in self.latent), jnp.zeros(()))

    def log_likelihoods(self, theta: Sites, x: Sites) -> Sites:
        terms = self._log_probs(theta, x, sum_log_prob=False)
        return {name: term for name, term in terms.items() if name not in self.latent}

    def _log_probs(self, theta: Sites, x: Sites, sum_log_prob: bool = True) -> dict[str, Any]:
        """The log probability of each site, latent or observed; of each of its entries, if they
        are not to be added up.
        """
        from numpyro.infer.util import compute_log_probs

        sites = self.constrain(theta, x)
        latent = {name: sites[name] for name in self.latent}
        kwargs = {**self.kwargs, **theta}
        return compute_log_probs(self._of_latent(), self.args, kwargs, latent, sum_log_prob)[0]

    def unconstrain(self, theta: Sites, sites: Sites) -> Sites:
        from numpyro.distributions import biject_to

        at = self.sites_at(theta, sites)
        free = {
            name: biject_to(at[name]["fn"].support).inv(at[name]["value"])
            for name in self.continuous
        }
        return {**free, **{name: jnp.asarray(sites[name], int) for name in self.discrete}}

    def sites_at(self, theta: Sites, sites: Sites) -> dict[str, Any]:
        """The latent sites of the model where they have these values."""
        from numpyro import handlers

        given = handlers.substitute(self.model, data=sites)
        traced = handlers.trace(given).get_trace(*self.args, **self.kwargs, **theta)
        return {name: traced[name] for name in self.latent}

    def constrain(self, theta: Sites, x: Sites) -> Sites:
        from numpyro.infer.util import constrain_fn

        rest = {name: x[name] for name in self.continuous}
        kwargs = {**self.kwargs, **theta}
        sites = constrain_fn(self._given(x), self.args, kwargs, rest, return_deterministic=True)
        return {**sites, **{name: x[name] for name in self.discrete}}


def with_check(distribution: Any, check: bool) -> Any:
    """A distribution, and those that it is made of, with or without the check of their support."""
    from numpyro.distributions import Distribution

    changed = copy.copy(distribution)
    for name, part in vars(distribution).items():
        if isinstance(part, Distribution):
            setattr(changed, name, with_check(part, check))
    changed._validate_args = check
    return changed


class _Start(eqx.Module):
    """A start by one of NumPyro's strategies; discrete sites are drawn from the prior."""

    model: _Model
    theta: Sites
    strategy: Callable[..., Any]

    def __call__(self, key) -> Sites:
        from numpyro import handlers

        seeded = handlers.seed(self.model.model, key)
        started = handlers.substitute(seeded, substitute_fn=self.strategy)
        kwargs = {**self.model.kwargs, **self.theta}
        sites = handlers.trace(started).get_trace(*self.model.args, **kwargs)
        return self.model.unconstrain(
            self.theta, {name: sites[name]["value"] for name in self.model.latent}
        )


def from_numpyro(
    model: Checked[Callable[..., Any]],
    *args: Any,
    theta: Checked[dict[str, Any]],
    init_strategy: Checked[Callable[..., Any]] | None = None,
    **kwargs: Any,
) -> Posterior:
    """The posterior of a NumPyro model as a function of its hyperparameters.

    `theta` gives hyperparameters by name: they are keyword arguments of `model(*args, **kwargs,
    **theta)`, and derivatives are taken with respect to them. Continuous latent sites become
    unconstrained by NumPyro's own transforms, `z = T_θ(x)`, and the density is
    `log p(T_θ(x), data | θ) + log |det T_θ'(x)|`; discrete ones become integers. The start is drawn
    by `init_strategy`, NumPyro's `init_to_uniform` if left out.

    A model without an observed site gives a warning: data with the default `y=None` were probably
    not passed.

    The values of a discrete site are known if its support depends neither on `theta` nor on another
    latent site. Otherwise `sample` and `kernel` ask for a proposal, and values outside the support
    have the density 0.

    Refused: names in `theta` that the model does not take; `numpyro.param` sites; sites marked for
    enumeration, which would have to be summed out in every evaluation.

    >>> import diffmh, jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
    >>> def model(y, scale):
    ...     mean = numpyro.sample("mean", dist.Normal(0, scale))
    ...     numpyro.sample("y", dist.Normal(mean, 1), obs=y)
    >>> posterior = diffmh.from_numpyro(model, jnp.array([1.0, 2.0]), theta={"scale": 1.0})
    >>> length = dict(num_samples=4_000, burn_in=100, num_chains=64)
    >>> mean = posterior.expectation(lambda theta, sites: sites["mean"], **length)
    >>> round(float(mean(posterior.theta, jax.random.key(0))), 1)               # exactly 1
    1.0
    """
    with extra("from_numpyro", "numpyro"):
        import numpyro  # noqa: F401

    where = "from_numpyro(model, *args, theta=...)"
    validate.function(model, where, "model", "model(*args, **theta)")
    theta = checked_theta(theta, where)
    if init_strategy is not None:
        validate.function(init_strategy, where, "init_strategy", "(site) -> value, of NumPyro")
    _refuse_unknown_names(model, args, kwargs, theta, where)
    latent = _latent_sites(model, args, {**kwargs, **theta}, where)
    discrete = {name: site for name, site in latent.items() if site["fn"].support.is_discrete}
    continuous = tuple(name for name in latent if name not in discrete)
    with_data = _Model(model, args, kwargs, tuple(discrete), continuous)
    strategy: Any = _uniform() if init_strategy is None else init_strategy
    moving = _moving_supports(with_data, theta, {name: s["value"] for name, s in latent.items()})
    known = {
        name: None if name in moving else _values(site["fn"].support)
        for name, site in discrete.items()
    }
    ranges = {name: values for name, values in known.items() if values is not None}
    return Posterior(
        with_data.log_density,
        with_data.log_prior,
        with_data.log_likelihood,
        with_data.log_prior_by_site,
        with_data.constrain,
        with_data.unconstrain,
        _Start(with_data, theta, strategy),
        theta,
        {name: len(values) for name, values in ranges.items() if values.start == 0},
        {name: values for name, values in ranges.items() if values.start != 0},
        with_data.log_likelihoods,
    )


@functools.cache
def _uniform() -> Callable[..., Any]:
    """NumPyro's default, the same object for all models: programs are known by it."""
    from numpyro.infer import init_to_uniform

    return init_to_uniform()  # pyright: ignore[reportReturnType]


def _refuse_unknown_names(model, args, kwargs, theta: Sites, where: str) -> None:
    signature = inspect.signature(model)
    if not any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()):
        for name, given in (("theta", theta), ("**kwargs", kwargs)):
            unknown = [each for each in given if each not in signature.parameters]
            if unknown:
                raise TypeError(
                    f"`{where}`: `{name}` names {unknown}, which the model does not take: its"
                    f" arguments are {list(signature.parameters)}."
                )
    try:
        signature.bind(*args, **kwargs, **theta)
    except TypeError as error:
        raise TypeError(
            f"`{where}`: the model, whose arguments are {list(signature.parameters)}, cannot be"
            f" called with {len(args)} positional arguments and {sorted([*kwargs, *theta])}"
            f" ({error}). Pass hyperparameters in `theta`, and data after the model:"
            " `from_numpyro(model, x, y, theta=...)`."
        ) from None


def _latent_sites(model, args, kwargs, where: str) -> dict[str, Any]:
    from numpyro import handlers

    seeded = handlers.seed(model, jax.random.key(0))
    try:
        sites = handlers.trace(seeded).get_trace(*args, **kwargs)
    except Exception as error:
        error.add_note(f"`{where}`: this error is from the model at the `theta` that was passed.")
        raise
    latent = {}
    for name, site in sites.items():
        if site["type"] == "param":
            raise ValueError(
                f"`{where}`: site {name!r} is a `numpyro.param`, which has no distribution: make"
                " it an argument of the model and a part of `theta`."
            )
        if site["type"] != "sample" or site["is_observed"]:
            continue
        if site["infer"].get("enumerate"):
            raise ValueError(
                f"`{where}`: site {name!r} is marked for enumeration: drop the mark, and it is"
                " sampled as an integer, or sum it out in the model."
            )
        latent[name] = site
    if not latent:
        raise ValueError(f"`{where}`: the model has no latent site.")
    # `numpyro.factor` is an observed site, too.
    if not any(site["type"] == "sample" and site["is_observed"] for site in sites.values()):
        warnings.warn(
            f"`{where}`: the model has no observed site, so that expectations are those of the"
            f" prior, and {list(latent)} are all sampled. If data are missing, pass them after the"
            " model or by name: `from_numpyro(model, x, y=y, theta=...)`.",
            stacklevel=3,
        )
    return latent


def _moving_supports(model: _Model, theta: Sites, sites: Sites) -> set[str]:
    """The discrete sites whose support depends on theta or on other latent sites: the one that a
    trace of the model happens to have is not that of other states.
    """

    def ends(given):
        found = model.sites_at(*given)
        return {name: _ends(found[name]["fn"].support) for name in model.discrete}

    depends = compat.dependence(ends, (theta, sites))[0]
    return {name for name, each in depends.items() if any(jax.tree.leaves(each))}


def _base(support: Any) -> Any:
    """The support of one entry."""
    while hasattr(support, "base_constraint"):  # of entries that are one event
        support = support.base_constraint
    return support


def _ends(support: Any) -> tuple[Any, Any]:
    """The least and the greatest value of an entry; `None` for an end that is not known."""
    base = _base(support)
    return getattr(base, "lower_bound", None), getattr(base, "upper_bound", None)


def _values(support: Any) -> range | None:
    """The values of a site, if they are consecutive integers, the same for all of its entries."""
    from numpyro.distributions import constraints

    if _base(support) is constraints.boolean:
        return range(2)
    lower, upper = _ends(support)
    if lower is None or upper is None:
        return None
    lower, upper = np.asarray(lower), np.asarray(upper)
    if np.any(lower != lower.ravel()[0]):
        return None
    first = int(lower.ravel()[0])
    # Where entries have different upper ends, those of 0, ..., n − 1 have impossible values.
    if first != 0 and np.any(upper != upper.ravel()[0]):
        return None
    return range(first, int(np.max(upper)) + 1)
