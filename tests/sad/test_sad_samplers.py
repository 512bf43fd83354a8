"""The flips of the samplers against the derivatives of their distributions, summed over all
values: exact, near the ends too.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from diffmh.sad import samplers

NEAR_ZERO_AND_ONE = (1e-6, 1e-3, 0.3, 0.5, 0.999, 1 - 1e-6)
COUNTS = np.arange(400)


def bernoulli(p):
    return np.array([1 - p, p])


def binomial(p):
    k = np.arange(8)
    return special.comb(7, k) * p**k * (1 - p) ** (7 - k)


def poisson(rate):
    return np.exp(-rate + COUNTS * np.log(rate) - special.gammaln(COUNTS + 1))


def geometric(p):
    k = np.arange(1, 20_000)
    return p * (1 - p) ** (k - 1)


def negative_binomial(p):
    return special.binom(COUNTS + 4, COUNTS) * p**5 * (1 - p) ** COUNTS


def categorical(theta):
    weights = np.exp(np.array([0.3, -1.0, 2.0, 0.0]) * theta)
    return weights / weights.sum()


def operands(name, theta):
    """The sampler, its parameters at theta, and their derivatives."""
    one = jnp.ones(())
    if name == "binomial":
        return samplers.BINOMIAL, (jnp.asarray(7), theta), (jnp.zeros(()), one)
    if name == "negative_binomial":
        return samplers.NEGATIVE_BINOMIAL, (jnp.asarray(5), theta), (jnp.zeros(()), one)
    if name == "categorical":
        slope = jnp.array([0.3, -1.0, 2.0, 0.0])
        return samplers.CATEGORICAL, (slope * theta,), (slope,)
    return getattr(samplers, name.upper()), (theta,), (one,)


def many(flips):
    """Values by flips."""
    return np.asarray(flips).reshape(len(flips), -1)


CASES = [
    *(("bernoulli", p, bernoulli, 0) for p in NEAR_ZERO_AND_ONE),
    *(("binomial", p, binomial, 0) for p in NEAR_ZERO_AND_ONE),
    *(("poisson", rate, poisson, 0) for rate in (1e-6, 1e-3, 0.5, 3.0, 40.0)),
    *(("geometric", p, geometric, 1) for p in (0.01, 0.3, 0.999, 1 - 1e-6)),
    *(("negative_binomial", p, negative_binomial, 0) for p in (0.2, 0.5, 0.999, 1 - 1e-6)),
    *(("categorical", theta, categorical, 0) for theta in (0.0, 0.7, -9.0)),
]


@pytest.mark.parametrize(
    ("name", "theta", "probabilities", "first"),
    CASES,
    ids=lambda part: getattr(part, "__name__", str(part)),
)
def test_flips_carry_the_derivative(name, theta, probabilities, first):
    """`Σ_k p_k Σ_flips w (g(flipped) − g(k)) = d/dθ Σ_k p_k g(k)` for g the square and the
    indicator of a value.
    """
    p, step = probabilities(theta), 1e-30
    slope = probabilities(theta + 1j * step).imag / step
    values = np.arange(len(p)) + first
    with jax.enable_x64(True):
        sampler, parameters, tangents = operands(name, jnp.asarray(theta, jnp.float64))
        kind = bool if name == "bernoulli" else int
        flips = lambda value: [
            (jnp.asarray(flipped, value.dtype), weight)
            for flipped, weight in sampler.flips(value, parameters, tangents)
        ]
        pairs = jax.vmap(flips)(jnp.asarray(values, kind))
    for g in (lambda k: np.asarray(k, float) ** 2, lambda k: np.asarray(k, float) == first + 1):
        found = sum(
            np.sum(p[:, None] * many(weight) * (g(many(flipped)) * 1.0 - g(values)[:, None]))
            for flipped, weight in pairs
        )
        np.testing.assert_allclose(found, np.sum(slope * g(values)), rtol=1e-8, atol=1e-12)


def test_a_wrong_weight_is_seen():
    """The negative control: flips of a Poisson draw upwards only, with the weight of both ways."""
    p, slope = poisson(2.0), poisson(2.0 + 1e-30j).imag / 1e-30
    wrong = sum(p * (COUNTS + 1) / (COUNTS + 1 + 2.0) * ((COUNTS + 1.0) ** 2 - COUNTS**2.0))
    assert abs(wrong - np.sum(slope * COUNTS**2)) > 0.5
