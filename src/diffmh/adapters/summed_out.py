"""Discrete sites with few joint values, summed out of the density that NUTS follows.

Given the continuous sites x, the discrete ones z take few values together. NUTS then moves on

    log g(x) = log Σ_z exp(log g(x, z)),

which has no label to be stuck at, and z is drawn from p(z | x) afterwards: draws of x and z are
draws of the joint posterior. Gibbs draws of z in turn with steps of x would have to pass between
two modes by states that are hardly ever visited.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from .label_moves import Density, Sites

# Every step of a trajectory costs as many evaluations of the density as there are joint values.
MOST_VALUES = 256


class SummedOut(eqx.Module):
    """Discrete sites, by name, and the values that each of their entries takes."""

    names: tuple[str, ...] = eqx.field(static=True)
    ranges: tuple[range, ...] = eqx.field(static=True)

    def along(self, free: Sites, rest: Sites, log_density: Density) -> Float[Array, ""]:
        """`log Σ_z exp(log_density)` at the continuous sites `free` and the sites `rest`, with the
        gradient `Σ_z p(z | free, rest) ∇ log_density` along `free`.

        Values of probability 0 have no part in the gradient: reverse mode would multiply their
        weight 0 by a gradient that may be NaN or infinite.
        """

        @jax.custom_vjp
        def total(free):
            return forward(free)[0]

        def forward(free):
            def one(values):
                given = lambda free: log_density({**rest, **free, **values})
                return jax.value_and_grad(given)(free)

            logits, gradients = jax.vmap(one)(self.joint_values(rest))
            logits = _possible(logits)
            value = jax.nn.logsumexp(logits)
            weight = jnp.where(logits > -jnp.inf, jnp.exp(logits - value), 0.0)

            def mean(leaf):
                across = weight.reshape(-1, *(1,) * (leaf.ndim - 1))
                return jnp.sum(jnp.where(across == 0, 0.0, across * leaf), axis=0)

            return value, jax.tree.map(mean, gradients)

        def backward(gradient, cotangent):
            return (jax.tree.map(lambda leaf: cotangent * leaf, gradient),)

        total.defvjp(forward, backward)
        return total(free)

    def draw(self, key: Key[Array, ""], x: Sites, log_density: Density) -> Sites:
        """The state with these sites drawn together from their conditional distribution."""
        joint = self.joint_values(x)
        logits = jax.vmap(lambda values: log_density({**x, **values}))(joint)
        chosen = jax.random.categorical(key, _possible(logits))
        return {**x, **{name: values[chosen] for name, values in joint.items()}}

    def joint_values(self, x: Sites) -> Sites:
        """Every combination of the values of all entries, leading axis, in the form of `x`."""
        sizes = [x[name].size for name in self.names]
        each = zip(self.ranges, sizes, strict=True)
        entries = [values for values, size in each for _ in range(size)]
        table = np.array(list(itertools.product(*entries)))
        parts = np.split(table, np.cumsum(sizes)[:-1], axis=1)
        return {
            name: jnp.asarray(part.reshape(-1, *x[name].shape), x[name].dtype)
            for name, part in zip(self.names, parts, strict=True)
        }


def _possible(logits: Float[Array, "K"]) -> Float[Array, "K"]:
    """A value whose density is NaN is impossible."""
    return jnp.where(jnp.isnan(logits), -jnp.inf, logits)


def with_few_values(ranges: Mapping[str, range], sizes: Mapping[str, int]) -> SummedOut | None:
    """As many of the sites as have at most `MOST_VALUES` joint values, those with the fewest first;
    `None` if that is none of them.
    """
    logs = {name: sizes[name] * math.log(len(values)) for name, values in ranges.items()}
    names = sorted(ranges, key=lambda name: (logs[name], name))
    joint = itertools.accumulate(logs[name] for name in names)
    most = math.log(MOST_VALUES + 1)
    few = tuple(name for name, size in zip(names, joint, strict=True) if size < most)
    return SummedOut(few, tuple(ranges[name] for name in few)) if few else None
