"""A posterior with powers of its prior and its likelihood among its parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Key, PyTree

from ..adapters import Posterior
from ..base import validate

# The names under which the powers of prior and likelihood stand beside the hyperparameters.
PRIOR, LIKELIHOOD = "power of the prior", "power of the likelihood"


class WithPowers(eqx.Module):
    """`p(x)^a p(data | x)^b` with a and b beside the hyperparameters, and f of its sites.

    `prior` names the sites whose densities are raised to the power a, all if it is None. A state is
    the posterior's x; if f draws predictions, `key_impl` is set, and a state is `{"x": x, "key":
    data of a key}`.
    """

    posterior: Posterior
    f: Callable[..., PyTree]
    prior: tuple[str, ...] | None = eqx.field(static=True)
    key_impl: Any = eqx.field(static=True, default=None)

    @property
    def theta(self) -> PyTree:
        return {"model": self.posterior.theta, PRIOR: jnp.ones(()), LIKELIHOOD: jnp.ones(())}

    def log_density(self, theta, state):
        # At powers of 1, where the derivative is taken, this is the posterior's own density.
        at = (theta["model"], self._x(state))
        powers = (theta[PRIOR] - 1) * self._log_prior(*at)
        powers += (theta[LIKELIHOOD] - 1) * self.posterior.log_likelihood(*at)
        return self.posterior.log_density(*at) + powers

    def _log_prior(self, theta, x) -> Array:
        if self.prior is None:
            return self.posterior.log_prior(theta, x)
        terms = self.posterior.log_prior_by_site(theta, x)
        return sum((terms[name] for name in self.prior), jnp.zeros(()))

    def values(self, theta, state):
        """The quantities."""
        sites = self.posterior.constrain(theta["model"], self._x(state))
        if self.key_impl is None:
            return self.f(theta["model"], sites)
        key = jax.random.wrap_key_data(state["key"], impl=self.key_impl)
        return self.f(theta["model"], sites, key)

    def moments(self, theta, x):
        """The quantities and their squares."""
        value = self.values(theta, x)
        return value, jax.tree.map(jnp.square, value)

    def _x(self, state):
        return state if self.key_impl is None else state["x"]

    def with_keys(self, states: PyTree, key: Key[Array, ""]) -> PyTree:
        """States `(chain, draw, ...)`, each with a key of its own."""
        shape = jax.tree.leaves(states)[0].shape[:2]
        return {"x": states, "key": jax.random.key_data(jax.random.split(key, shape))}


def checked_prior(prior: Any, posterior: Posterior) -> tuple[str, ...] | None:
    """Names of latent sites, None for all of them."""
    if prior is None:
        return None
    names = (prior,) if isinstance(prior, str) else prior
    form = jax.eval_shape(posterior.init, jax.random.key(0))
    sites = list(jax.eval_shape(posterior.log_prior_by_site, posterior.theta, form))
    named = isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)
    if not named or not names or not set(names) <= set(sites):
        raise ValueError(
            f"`sensitivity(prior=...)` must be names of latent sites, which are {sites}, got"
            f" {prior!r}."
        )
    return tuple(dict.fromkeys(names))


def draws_predictions(f: Callable[..., Any]) -> bool:
    """True for `f(theta, sites, key)`: a third argument by position that has no default."""
    try:
        parameters = inspect.signature(f).parameters.values()
    except (TypeError, ValueError):
        return False
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [p for p in parameters if p.kind in by_position and p.default is p.empty]
    return len(required) == 3


def refuse_unfit(f: Callable[..., Any], posterior: Posterior, where: str, predicts: bool) -> None:
    """Raise an error before anything is sampled, if f does not take the sites or asks for one that
    the model does not have.
    """
    key = jax.random.key(0)
    form = jax.eval_shape(posterior.init, key)
    sites = jax.eval_shape(posterior.constrain, posterior.theta, form)
    given = (posterior.theta, sites, *([key] if predicts else []))
    call = "f(theta, sites, key)" if predicts else "f(theta, sites)"
    validate.takes(f, where, "f", "theta", "sites", *(["key"] if predicts else []))
    try:
        jax.eval_shape(f, *given)
    except KeyError as error:
        name = error.args[0] if error.args else None
        if not isinstance(name, str):
            raise
        # Known names are found in the other argument; their order is the likely mistake.
        raise KeyError(
            f"`{where}`: `f` asks for {name!r}; it is called as `{call}`, the model's sites are"
            f" {sorted(sites)}, and theta has {sorted(posterior.theta)}."
        ) from error
