"""The covariance identity with Stein's control variates, beside the chain."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from ..core.estimator import Estimator, Problem
from ..core.plan import BLOCK_STEPS
from . import stein
from .stein import Monomials
from .stein_recorder import CentreAndScale, Seen, SteinMeans, SteinRecorder, controlled, see

# Stein's functions at most, numbers of their products in memory at most, and products for each step
# of a chain.
_MOST_FUNCTIONS, _MOST_NUMBERS, _PRODUCTS = 100, 20_000_000, 100
# Steps of the pilot chains, or `burn_in` if that is more.
_PILOT_STEPS = 100


class SteinCovariance(Estimator):
    """`Covariance(control="stein")` for one problem: the monomials, and the number of steps of
    which one enters the products that least squares needs. The reference comes from pilot chains.
    """

    monomials: Monomials
    stride: int = eqx.field(static=True)
    reference: CentreAndScale | None = None
    differentiates_steps: ClassVar[bool] = False

    @staticmethod
    def of(problem: Problem) -> SteinCovariance:
        """Refuses a density that is not proved continuous."""
        density = problem.kernel.updates()[0].log_density

        def at_args(theta, x):
            return density(theta, x, *problem.args)

        def jumps():
            return stein.jumps_in_x(at_args, problem.theta, problem.x)

        stein.refuse_unless_continuous(jumps, problem.x)
        draws = problem.num_samples * problem.num_chains
        # The Gram matrix of each chain, with its compensation, fits into memory.
        fits = math.isqrt(_MOST_NUMBERS // (2 * problem.num_chains))
        most = min(draws // stein.DRAWS_PER_FUNCTION, _MOST_FUNCTIONS, fits)
        monomials = Monomials.of(stein.dimension(problem.x), most)
        count = max(1, len(monomials))
        # They cost m² for each step that enters; ten enter for each function.
        stride = min(count**2 // _PRODUCTS, draws // (stein.DRAWS_PER_FUNCTION * count))
        return SteinCovariance(monomials, max(1, min(stride, BLOCK_STEPS)))

    @property
    def pilot_steps(self):
        return _PILOT_STEPS if self.reference is None else 0

    def prepared(self, kernel, parameters, states, observable):
        def at(x):
            slope = parameters.evaluate(kernel.updates()[0].log_density, x).tangent
            value = observable(parameters.value_only(), x, None).primal
            return ravel_pytree(stein.continuous_part(x)[0])[0], value, slope

        x, value, slope = jax.vmap(at, in_axes=-1)(states)
        spread = jnp.std(x, axis=0)
        # A coordinate that has not moved is left in its own units.
        scale = jnp.where(spread > 0, spread, 1.0)
        centre, value, slope = (jnp.mean(leaf, axis=0) for leaf in (x, value, slope))
        return dataclasses.replace(self, reference=CentreAndScale(centre, scale, value, slope))

    def recorder(self, averages):
        return SteinRecorder(averages, self.stride)

    def start(self, at):
        return None

    def advance(self, memory, at):
        return memory, None

    def observe(self, memory, at) -> Seen:
        assert self.reference is not None, "the loop prepares its estimator"
        density, parameters = at.kernel.updates()[0].log_density, at.parameters
        part, rest = stein.continuous_part(parameters.barriers.for_derivatives(at.state.x))
        place, at_place = ravel_pytree(part)

        flat, unravel = ravel_pytree(parameters.theta)

        def log_density(flat, place):
            x = eqx.combine(at_place(place), rest)
            return density(unravel(flat), x, *parameters.args)

        # One pass backward for both.
        by_theta, by_x = jax.grad(log_density, argnums=(0, 1))(flat, place)
        value = at.value.primal
        u, y = see(self.monomials, self.reference, place, by_x, value, by_theta)
        return Seen(u, y, at.explicit + jnp.zeros((flat.size, value.size), value.dtype))

    def derivative(self, means: SteinMeans | Seen, value):
        """As of `Covariance`, of the controlled averages. With d for deviations from the mean of
        all C chains, and p the average of `s f`, chain c contributes
        `p_c − s f − s d_f − f d_s + d_s d_f/(C − 1)`.
        """
        # Halves and stretches of a chain have no products of their own: they stay plain.
        seen = means if isinstance(means, Seen) else means.seen
        y = controlled(means, self.monomials.sizes) if isinstance(means, SteinMeans) else seen.y
        num_values, num_chains = value.shape
        num_scores = seen.explicit.shape[0]
        f, s, product = jnp.split(y, [num_values, num_values + num_scores])
        product = product.reshape(num_scores, num_values, num_chains) + seen.explicit
        mean_f, mean_s = (jnp.mean(leaf, axis=-1, keepdims=True) for leaf in (f, s))
        d_f, d_s = f - mean_f, s - mean_s
        linear = mean_s[:, None] * f[None] + d_s[:, None] * mean_f[None]
        between = d_s[:, None] * d_f[None] / max(1, num_chains - 1)
        return product - linear + between
