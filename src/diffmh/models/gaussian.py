"""N(θ, 1), sampled by a random walk."""

from __future__ import annotations

from jaxtyping import Array, Float

from ..base.validate import Checked
from ..kernels import MetropolisHastings
from ..proposals import GaussianWalk


def log_density(theta: float | Float[Array, ""], x: Float[Array, ""]) -> Float[Array, ""]:
    """`−(x − θ)²/2`."""
    return -0.5 * (x - theta) ** 2


def sampler(scale: Checked[float] = 2.38) -> MetropolisHastings:
    """Random-walk Metropolis with steps of standard deviation `scale`, coupled by maximal
    reflection.

    >>> import jax, diffmh
    >>> from diffmh.models import gaussian
    >>> path = diffmh.trace(gaussian.sampler(), 0.5, jax.random.key(0), init=0.0, num_steps=200)
    """
    return MetropolisHastings(log_density, GaussianWalk(scale))


def mean(theta: float) -> float:
    """`E[x] = θ`."""
    return theta
