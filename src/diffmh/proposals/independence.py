"""Proposals that do not depend on the current state."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from ..base import validate
from .proposal import NoiseProposal


class Independence(NoiseProposal):
    """`x' ~ distribution`, independent of the state. `distribution` is any object with
    `sample(key)` and `log_prob(x)`, such as those of NumPyro.

    The log probabilities of a batch are summed. With common random numbers, its default coupling,
    both chains propose the same state, so they meet whenever both accept.

    >>> import diffmh, jax, jax.numpy as jnp
    >>> class Standard:
    ...     def sample(self, key): return jax.random.normal(key)
    ...     def log_prob(self, x): return jax.scipy.stats.norm.logpdf(x)
    >>> diffmh.Independence(Standard()).sample(jax.random.key(0), jnp.array(0.0)).shape
    ()
    """

    distribution: Any
    symmetric: bool = eqx.field(static=True)

    def __init__(self, distribution: Any):
        for method in ("sample", "log_prob"):
            validate.function(
                getattr(distribution, method, None),
                "Independence(distribution)",
                f"distribution.{method}",
                "...",
            )
        self.distribution = distribution
        self.symmetric = False

    def noise(self, key, x, num_steps):
        return jax.vmap(self.distribution.sample)(jax.random.split(key, num_steps))

    def move(self, x, noise):
        return noise

    def log_prob(self, x, x_new):
        return jnp.sum(self.distribution.log_prob(x_new))
