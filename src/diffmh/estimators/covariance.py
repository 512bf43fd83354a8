"""The covariance identity, at stationarity."""

from __future__ import annotations

from typing import ClassVar, Literal

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..base import validate
from ..base.sums import mean_of_others
from ..base.validate import Checked
from ..core.estimator import Estimator, Observation
from .covariance_hessian import CovarianceHessian
from .stein_covariance import SteinCovariance


class CovarianceAverages(eqx.Module):
    """Averages of `f s`, `s` and `∂f/∂θ` over one chain. Here `s` is `∂ log g/∂θ` minus its value
    at the start, `origin`.
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

    - `control="stein"`: subtracts from f, s and `(f − m_f)(s − m_s)` their regressions on functions
      `Δφ + ∇φ · ∇_x log g`, which have mean zero at stationarity (`docs/mathematics.md`). φ are the
      monomials up to degree 3 in the real coordinates of the state; the coefficients come from
      other chains. The degree, 0 included, is chosen on other chains; the functions are at most a
      tenth as many as the samples. It takes at least 4 chains to have an effect, and centre and
      scale of the coordinates come from pilot chains of their own.
    - `unconstrained`: declares that each real coordinate of the state takes every real value, as
      those of `from_numpyro` and `from_pymc` do (`Posterior.expectation` declares it for you).

    **Refused** with `control="stein"`: coordinates that were not declared unconstrained; a density
    that is not proved continuous in x; a state of integers alone.

    >>> import diffmh
    >>> diffmh.Covariance()
    Covariance()
    >>> diffmh.Covariance(control="stein", unconstrained=True)
    Covariance(control='stein', unconstrained=True)
    """

    control: Literal["stein"] | None = eqx.field(static=True)
    unconstrained: bool = eqx.field(static=True)
    differentiates_steps: ClassVar[bool] = False

    def __init__(
        self,
        control: Checked[Literal["stein"]] | None = None,
        unconstrained: Checked[bool] = False,
    ):
        if control is not None:
            validate.choice(control, "Covariance(control=...)", ("stein",))
        self.control = control
        self.unconstrained = validate.flag(unconstrained, "Covariance(unconstrained=...)")

    def __repr__(self) -> str:
        declared = ", unconstrained=True" if self.unconstrained else ""
        return "Covariance()" if self.control is None else f"Covariance(control='stein'{declared})"

    def declared_unconstrained(self) -> Covariance:
        """The same, for states whose real coordinates are known to be unconstrained."""
        return Covariance(self.control, unconstrained=True)

    def refuse(self, kernel, num_parameters, lag):
        # Both are held, as objects that are gone may have the same identity.
        densities, first = kernel.densities(), kernel.updates()[0]
        if set(densities) != {id(first.density_identity)}:
            raise ValueError(
                "`Covariance()` needs one density that the chain leaves invariant, and the kernels"
                " that were put together have different ones. Give each the same `log_density`"
                " function, made once and not by a `Sweep` for each site; for an `Update` of your"
                " own let `density_identity` return that function. Or use `StochasticDerivative()`;"
                " a `Schedule` needs it, because its stages have no equilibrium in common."
            )
        if lag:
            raise ValueError(
                f"`Covariance()` cannot see functions of successive states, got lag={lag}: use"
                " `StochasticDerivative()`."
            )
        if any(update.has_own_parameters for update in kernel.updates()):
            raise ValueError(
                "`Covariance()` cannot see parameters of the proposal, and this kernel's proposal"
                " or step is a function of theta: use `StochasticDerivative()`."
            )
        if self.control is not None and not self.unconstrained:
            raise ValueError(
                "`Covariance(control='stein')` needs coordinates that take every real value. If"
                " those of the state do, declare it with `unconstrained=True`; otherwise leave"
                " `control` out."
            )

    def resolve(self, problem):
        return self if self.control is None else SteinCovariance.of(problem)

    def second_order(self):
        return CovarianceHessian(self)

    def start(self, at):
        # The score at the start is subtracted throughout: a covariance does not see it, and
        # float32 is spared.
        return self._score(at)

    def advance(self, memory, at):
        return memory, None

    def observe(self, memory, at):
        score = self._score(at) - memory
        product = score[:, None] * at.value.primal[None, :]
        return CovarianceAverages(product, score, memory, at.explicit + jnp.zeros_like(product))

    @staticmethod
    def _score(at: Observation) -> Float[Array, "P"]:
        density = at.kernel.updates()[0].log_density
        return at.parameters.evaluate(density, at.state.x).tangent

    def derivative(self, means: CovarianceAverages, value):
        return contributions(means, value)


def contributions(means: CovarianceAverages, value: Float[Array, "F C"]) -> Float[Array, "P F C"]:
    """The contribution of each chain, or pair of chains, to the covariance: that within it and that
    between all of them, and the mean of ∂f.
    """
    within = means.product - means.score[:, None, :] * value[None]
    num_chains = value.shape[-1]
    if num_chains == 1:
        return within + means.explicit
    # Within a chain the constant that was taken off the score cancels exactly. Between chains it
    # does not: each took off its own.
    score = means.score + means.origin
    apart = lambda mean: mean - mean_of_others(mean)
    between = (1 - 1 / num_chains) * apart(score)[:, None, :] * apart(value)[None]
    return within + between + means.explicit
