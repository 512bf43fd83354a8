"""From which of three normal components did an observation h come? (The paper's Fig. 2.)"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..kernels import MetropolisHastings
from ..proposals import OtherState

MEANS = (-2.5, 2.0, 5.0)
SCALE = 4.0


def log_density(h: float | Float[Array, ""], j: Int[Array, ""]) -> Float[Array, ""]:
    """The posterior of component j given h under a uniform prior, unnormalised: `−((h −
    μ_j)/σ)²/2`.
    """
    return -0.5 * ((h - jnp.array(MEANS)[j]) / SCALE) ** 2


def sampler() -> MetropolisHastings:
    """Propose one of the other two components, with the maximal coupling.

    >>> import jax, diffmh
    >>> from diffmh.models import mixture
    >>> p = diffmh.expectation(
    ...     mixture.indicator, mixture.sampler(), init=0, num_samples=2_000, burn_in=50
    ... )
    >>> p(0.4, jax.random.key(0)).shape
    (3,)
    """
    return MetropolisHastings(log_density, OtherState(len(MEANS)))


def indicator(h: float | Float[Array, ""], j: Int[Array, ""]) -> Float[Array, "3"]:
    """One-hot vector of the component; its expectation is the posterior."""
    return jax.nn.one_hot(j, len(MEANS))


def posterior(h: float | Float[Array, ""]) -> Float[Array, "3"]:
    """The exact posterior, by enumeration."""
    return jax.nn.softmax(-0.5 * ((h - jnp.array(MEANS)) / SCALE) ** 2)


def entropy(p: Float[Array, "3"]) -> Float[Array, ""]:
    """`−Σ p log p`."""
    return -jnp.sum(jax.scipy.special.xlogy(p, p))
