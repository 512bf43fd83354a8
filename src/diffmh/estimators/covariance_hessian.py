"""The second derivative at stationarity, by the cumulants of f and the score across chains."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PyTree

from ..base.sums import mean_of_others
from ..core.estimator import Estimator, Observation, SecondOrder
from ..core.parameters import Parameters, jacobian


class Origin(eqx.Module):
    """f, `s = ∂ log g/∂θ` and `h = ∂s/∂θ` at a chain's start: sums are about them, so that float32
    is spared; cumulants do not see them.
    """

    f: Float[Array, "F *C"]
    s: Float[Array, "P *C"]
    h: Float[Array, "Q P *C"]


class Explicit(eqx.Module):
    """Averages that are there only if f itself depends on θ, s about its start: of `∂_i f`, of
    `s_q ∂_i f + s_i ∂_q f`, and of `∂_qi f`.
    """

    slope: Float[Array, "P F *C"]
    crossed: Float[Array, "Q P F *C"]
    bent: Float[Array, "Q P F *C"]


class HessianMoments(eqx.Module):
    """Averages over one chain of products of f, s = ∂ log g/∂θ and h = ∂s/∂θ, each less its value
    at the chain's start (`Origin`); q runs over the directions, i over the parameters.
    """

    f: Float[Array, "F *C"]
    s: Float[Array, "P *C"]
    fs: Float[Array, "P F *C"]
    ss: Float[Array, "Q P *C"]
    fss: Float[Array, "Q P F *C"]
    h: Float[Array, "Q P *C"]
    fh: Float[Array, "Q P F *C"]
    explicit: Explicit | None
    origin: Origin | None


class CovarianceHessian(SecondOrder):
    """The observations of `Covariance()`, and those that second derivatives need:

        ∂_qi E f = κ₃(f, s_q, s_i) + Cov(f, ∂_q s_i) + Cov(s_q, ∂_i f) + Cov(s_i, ∂_q f) + E ∂_qi f

    with every product of expectations taken over different chains, so that it is free of bias at
    stationarity. `direction` is one direction of q instead of all parameters.
    """

    covariance: Estimator
    direction: Float[Array, "P"] | None = None

    differentiates_steps: ClassVar[bool] = False

    @property
    def first_order(self):
        return self.covariance

    def refuse(self, kernel, num_parameters, lag):
        self.covariance.refuse(kernel, num_parameters, lag)

    def along(self, direction):
        return CovarianceHessian(self.covariance, direction)

    def start(self, at):
        score, curvature = self._score(at)
        return Origin(at.value.primal, score, curvature)

    def advance(self, memory, at):
        return memory, None

    def observe(self, memory: Origin, at):
        score, curvature = self._score(at)
        # About the values at the start: cumulants do not see constants, and float32 is spared.
        f, s, h = at.value.primal - memory.f, score - memory.s, curvature - memory.h
        ss = self._rows(s)[:, None] * s
        return HessianMoments(
            f=f,
            s=s,
            fs=s[:, None] * f,
            ss=ss,
            fss=ss[:, :, None] * f,
            h=h,
            fh=h[:, :, None] * f,
            explicit=self._explicit(at, s),
            origin=memory,
        )

    def _rows(self, along_parameters: Float[Array, "P ..."]) -> Float[Array, "Q ..."]:
        """The entries along the directions q of what has one for each parameter."""
        if self.direction is None:
            return along_parameters
        return jnp.tensordot(self.direction, along_parameters, axes=1)[None]

    def _score(self, at: Observation) -> tuple[Float[Array, "P"], Float[Array, "Q P"]]:
        density = at.kernel.updates()[0].log_density

        def score(theta, x, *args):
            return jacobian(lambda theta: density(theta, x, *args), theta)

        return self._with_slope(at.parameters, score, at.state.x)

    def _explicit(self, at: Observation, s: Float[Array, "P"]) -> Explicit | None:
        if at.value.tangent is None:
            return None

        def slope(theta, x, *args):
            def f(theta):
                parameters = dataclasses.replace(
                    at.parameters, theta=theta, args=args, differentiate=False
                )
                return at.observable(parameters, x, None).primal

            return jacobian(f, theta)

        slopes, bent = self._with_slope(at.parameters, slope, at.state.x)
        crossed = self._rows(s)[:, None, None] * slopes
        crossed = crossed + s[:, None] * self._rows(slopes)[:, None]
        return Explicit(slopes, crossed, bent)

    def _with_slope(
        self, parameters: Parameters, function: Callable[..., Array], x: PyTree
    ) -> tuple[Array, Array]:
        """`function(theta, x, *args)`, and its derivative along the directions, which lead."""
        if self.direction is None:
            found = parameters.evaluate(function, x)
            return found.primal, found.tangent
        _, unravel = ravel_pytree(parameters.theta)
        x = parameters.barriers.for_derivatives(x)

        def of_theta(theta):
            return function(theta, x, *parameters.args)

        value, slope = jax.jvp(of_theta, (parameters.theta,), (unravel(self.direction),))
        return value, slope[None]

    def derivative(self, means: HessianMoments, value):
        about = self._about_the_mean(means)
        found = about.fs - in_pairs(about.s[:, None], about.f)
        return found if about.explicit is None else found + about.explicit.slope

    def second_derivative(self, means: HessianMoments, value):
        if value.shape[-1] < 3:
            raise ValueError(
                "A second derivative takes products of the means of three different chains: it"
                f" needs `num_chains` of at least 3, got {value.shape[-1]}."
            )
        m = self._about_the_mean(means)
        f, s_i, s_q = m.f, m.s[:, None], self._rows(m.s)[:, None, None]
        # κ₃(f, s_i, s_q) = E f s_i s_q − E[f s_q] E s_i − E[f s_i] E s_q − E[s_i s_q] E f + 2 E f E
        # s_i E s_q, each product of means over different chains: products of one chain's own means
        # are biased by their covariance.
        cumulant = (
            m.fss
            - in_pairs(self._rows(m.fs)[:, None], s_i)
            - in_pairs(m.fs, s_q)
            - in_pairs(m.ss[:, :, None], f)
            + 2 * in_triples(f, s_i, s_q)
        )
        # Cov(f, ∂_q s_i).
        found = cumulant + m.fh - in_pairs(m.h[:, :, None], f)
        if m.explicit is None:
            return found
        slope, along = m.explicit.slope, self._rows(m.explicit.slope)[:, None]
        # Cov(∂_i f, s_q) + Cov(∂_q f, s_i), and below E ∂_iq f.
        apart = m.explicit.crossed - in_pairs(slope, s_q) - in_pairs(along, s_i)
        return found + apart + m.explicit.bent

    def _about_the_mean(self, means: HessianMoments) -> HessianMoments:
        """The moments about the means over all chains, instead of each chain's start."""
        origin = means.origin
        assert origin is not None

        def shift(start, average):
            return start - jnp.mean(start + average, axis=-1, keepdims=True)

        # One centre for all chains: each has its own start as its origin, and products of means
        # over different chains need a common one.
        u, v = shift(origin.f, means.f), shift(origin.s, means.s)
        w = shift(origin.h, means.h)
        return _shifted(means, u, v, w, self._rows)


def _shifted(m: HessianMoments, u, v, w, rows: Callable[[Array], Array]) -> HessianMoments:
    """The moments of `f + u`, `s + v` and `h + w`, with axes (Q, P, F, C)."""
    f, s = m.f + u, m.s + v
    v_i, v_q = v[:, None], rows(v)[:, None, None]
    s_i, s_q = m.s[:, None], rows(m.s)[:, None, None]
    fs = m.fs + u * s_i + v_i * f
    ss = m.ss + rows(m.s)[:, None] * v + rows(v)[:, None] * s
    fss = (
        m.fss
        + u * m.ss[:, :, None]
        + v_q * m.fs
        + v_i * rows(m.fs)[:, None]
        + u * (v_q * s_i + v_i * s_q)
        + v_q * v_i * f
    )
    h = m.h + w
    fh = m.fh + m.h[:, :, None] * u + w[:, :, None] * f
    explicit = m.explicit
    if explicit is not None:
        crossed = explicit.crossed + v_q * explicit.slope + v_i * rows(explicit.slope)[:, None]
        explicit = dataclasses.replace(explicit, crossed=crossed)
    return HessianMoments(f, s, fs, ss, fss, h, fh, explicit, m.origin)


def in_pairs(a: Float[Array, "... C"], b: Float[Array, "... C"]) -> Float[Array, "... C"]:
    """`E a · E b` for each chain: the mean over chains is that of `a_c b_d` over all `c ≠ d`, and
    chain c has the terms with a or b of its own, `a_c b̄_{−c} + ā_{−c} b_c`, less that mean.
    """
    own = a * mean_of_others(b)
    return own + mean_of_others(a) * b - jnp.mean(own, axis=-1, keepdims=True)


def in_triples(
    a: Float[Array, "... C"], b: Float[Array, "... C"], c: Float[Array, "... C"]
) -> Float[Array, "... C"]:
    """`E a · E b · E c` for each chain, over triples of different chains, as `in_pairs`."""
    own = a * _pairs_of_others(b, c)
    both = b * _pairs_of_others(a, c) + c * _pairs_of_others(a, b)
    return own + both - 2 * jnp.mean(own, axis=-1, keepdims=True)


def _pairs_of_others(a: Float[Array, "... C"], b: Float[Array, "... C"]) -> Float[Array, "... C"]:
    """For each of n + 1 chains the mean of `a_c b_d` over pairs `c ≠ d` of the n others:
    `(n² ā b̄ − n mean(a b)) / (n (n − 1))`.
    """
    n = jnp.broadcast_shapes(a.shape, b.shape)[-1] - 1
    return (n * mean_of_others(a) * mean_of_others(b) - mean_of_others(a * b)) / (n - 1)
