"""The covariance identity, at stationarity."""

from __future__ import annotations

from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from .estimator import Estimator, explicit


class Averages(eqx.Module):
    """Averages over one chain, with `s = ∂ log g/∂θ` less its value `origin` at the start: of `f
    s`, `s` and `∂f/∂θ`.
    """

    product: Float[Array, "P F *C"]
    score: Float[Array, "P *C"]
    origin: Float[Array, "P *C"]
    explicit: Float[Array, "P F *C"]


class Covariance(Estimator):
    """`Cov(f, ∂_θ log g) + E[∂_θ f]` over the samples, for an unnormalised density.

    The derivative of the *stationary* expectation with respect to parameters of the target. It is
    consistent, and where it applies it is the estimator to beat: no alternatives, and often a
    smaller variance. It is blind to burn-in (a chain that has not forgotten its start gives a
    biased answer), to parameters of the proposal, and to functions of successive states. With
    several chains the covariance between the chains' means is added, which removes the bias that is
    left at stationarity: `Cov_c + (1 − 1/C) (f̄_c − f̄_{−c}) (s̄_c − s̄_{−c})` for chain c.

    >>> import diffmh
    >>> diffmh.Covariance()
    Covariance()
    """

    differentiates_steps: ClassVar[bool] = False

    def draw(self, step, key, x, num_steps):
        return None

    def start(self, parameters, kernel, state):
        # The score at the start is subtracted throughout: a covariance does not see it, and float32
        # is spared.
        return parameters.evaluate(kernel.steps()[0].log_density, state.x).gradient

    def advance(self, parameters, kernel, step, memory, noise, own_noise):
        return memory, None

    def observe(self, parameters, kernel, observable, value, state, memory):
        gradient = parameters.evaluate(kernel.steps()[0].log_density, state.x).gradient
        score = gradient - memory
        product = score[:, None] * value.value[None, :]
        return Averages(product, score, memory, explicit(value) + jnp.zeros_like(product))

    def derivative(self, means: Averages, value):
        within = means.product - means.score[:, None, :] * value[None]
        num_chains = value.shape[-1]
        if num_chains == 1:
            return within + means.explicit
        others = lambda mean: (jnp.sum(mean, axis=-1, keepdims=True) - mean) / (num_chains - 1)
        apart = lambda mean: mean - others(mean)
        score = means.score + means.origin
        between = (1 - 1 / num_chains) * apart(score)[:, None, :] * apart(value)[None]
        return within + between + means.explicit
