"""The covariance identity, at stationarity."""

from __future__ import annotations

from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..base.sums import mean_of_others
from ..core.estimator import Estimator, Observation


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

    def refuse(self, kernel, num_parameters, lag):
        if set(kernel.densities()) != {id(kernel.updates()[0].density_identity)}:
            raise ValueError(
                "`Covariance()` needs one density that the chain leaves invariant, and the kernels"
                " that were put together have different ones: give each the same `log_density`"
                " function, made once and not by a `Sweep` for each site; for an `Update` of your"
                " own let `target` return what they share; or use `StochasticDerivative()`."
            )
        if lag:
            raise ValueError(
                f"`Covariance()` is blind to functions of successive states, got lag={lag}: use"
                " `StochasticDerivative()`."
            )
        if any(update.has_own_parameters for update in kernel.updates()):
            raise ValueError(
                "`Covariance()` is blind to parameters of the proposal, and this kernel's proposal"
                " or step is a function of theta: use `StochasticDerivative()`."
            )

    def start(self, at):
        # The score at the start is subtracted throughout: a covariance does not see it, and
        # float32 is spared.
        return self._score(at)

    def advance(self, memory, at):
        return memory, None

    def observe(self, memory, at):
        score = self._score(at) - memory
        product = score[:, None] * at.value.primal[None, :]
        return Averages(product, score, memory, at.explicit + jnp.zeros_like(product))

    @staticmethod
    def _score(at: Observation) -> Float[Array, "P"]:
        density = at.kernel.updates()[0].log_density
        return at.parameters.evaluate(density, at.state.x).tangent

    def derivative(self, means: Averages, value):
        within = means.product - means.score[:, None, :] * value[None]
        num_chains = value.shape[-1]
        if num_chains == 1:
            return within + means.explicit
        apart = lambda mean: mean - mean_of_others(mean)
        score = means.score + means.origin
        between = (1 - 1 / num_chains) * apart(score)[:, None, :] * apart(value)[None]
        return within + between + means.explicit
