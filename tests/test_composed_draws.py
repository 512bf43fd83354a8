"""compose of averages over draws: batches take the place of chains."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import diffmh

# N(θ_0, θ_1²): the variance is θ_1², with the gradient (0, 2 θ_1).
AT = jnp.array([0.5, 2.0])
DRAWS = 0.5 + 2.0 * jax.random.normal(jax.random.key(0), (4, 2_000))


def log_density(theta, x):
    return -0.5 * ((x - theta[0]) / theta[1]) ** 2 - jnp.log(theta[1])


def first_two(theta, x):
    return x, x**2


def variance(theta, m):
    return m[1] - m[0] ** 2


def average(f, draws: Any = DRAWS, **how):
    return diffmh.from_draws(f, log_density, draws, **how)


# Draws of another normal distribution, and the weights that make them those of θ = AT.
WIDER = 0.5 + 2.5 * jax.random.normal(jax.random.key(1), (4, 4_000))
WEIGHTS = jnp.exp(-0.5 * (WIDER - 0.5) ** 2 * (1 / 2.0**2 - 1 / 2.5**2))


@pytest.mark.parametrize(
    ("draws", "how", "theta"),
    [
        (DRAWS, {}, AT),
        (DRAWS, {"control": "stein", "unconstrained": True}, AT),
        (DRAWS, {"at": AT}, jnp.array([0.6, 2.1])),
        (WIDER, {"weights": WEIGHTS}, AT),
    ],
    ids=["plain", "stein", "at", "weights"],
)
@pytest.mark.parametrize("parts", [1, 2])
def test_a_variance(draws, how, theta, parts):
    """Of one average of two moments, and of two averages over the same draws."""
    if parts == 1:
        made = diffmh.compose(variance, average(first_two, draws, **how))
    else:
        one, two = (average(lambda theta, x, p=p: x**p, draws, **how) for p in (1, 2))
        made = diffmh.compose(lambda theta, m, square: square - m**2, one, two)
    report = made.run(theta)
    found = (report.value, *report.gradient)
    errors = (report.value_error, *report.gradient_error)
    truth = (theta[1] ** 2, 0.0, 2 * theta[1])
    for value, error, right in zip(found, errors, truth, strict=True):
        # Stein's control variates may leave nothing but rounding.
        assert abs(value - right) < 4 * error + 1e-4, report
        assert error < 0.2
    low, high = report.interval()[0]
    assert low < report.value < high


def test_the_jackknife_over_batches():
    """Of `E[x²] − E[x]²` it adds the variance of the mean of the batches, and of the derivative
    twice their covariance: the bias of plugging in, of opposite sign.
    """
    few = average(first_two, DRAWS[:, :100])
    report, moments = diffmh.compose(variance, few).run(AT), few.run(AT)
    (m, square), (dm, dsquare) = moments.value, moments.gradient
    each, slopes = moments.per_chain.value[0], moments.per_chain.gradient[0]
    count = len(each)
    more = np.var(each, ddof=1) / count
    np.testing.assert_allclose(report.value - (square - m**2), more, rtol=1e-3)
    crossed = np.mean((slopes - dm) * (each - m)[:, None], axis=0) / (count - 1)
    plugged_in = dsquare - 2 * m * dm
    np.testing.assert_allclose(report.gradient - plugged_in, 2 * crossed, rtol=1e-3, atol=1e-5)


def test_a_function_of_theta():
    moments = average(first_two, at=AT)
    made = diffmh.compose(variance, moments)
    m = moments(AT)
    np.testing.assert_allclose(made(AT), m[1] - m[0] ** 2, rtol=1e-6)
    np.testing.assert_allclose(jax.grad(made)(AT)[1], 2 * AT[1], rtol=0.1)
    scaled = lambda c: diffmh.compose(lambda theta, m: c * m[0], moments)(AT)
    np.testing.assert_allclose(jax.grad(scaled)(3.0), m[0], rtol=1e-6)
    assert "ComposedDraws(variance, FromDraws(4 chains" in repr(made)


def test_refusals():
    mean = average(lambda theta, x: x)
    with pytest.raises(TypeError, match="at=theta"):
        diffmh.compose(lambda theta, m: m, mean)(AT)
    with pytest.raises(TypeError, match=r"called as `phi\(theta, m_1\)`"):
        diffmh.compose(lambda m: m, mean)
    with pytest.raises(ValueError, match="equally many chains and draws of each"):
        diffmh.compose(lambda theta, a, b: a, mean, average(lambda theta, x: x, DRAWS[:, :1_000]))
    walk = diffmh.MetropolisHastings(log_density, diffmh.GaussianWalk(2.0))
    chains = diffmh.expectation(lambda theta, x: x, walk, init=0.0, num_samples=10)
    with pytest.raises(TypeError, match="not both together"):
        diffmh.compose(lambda theta, a, b: a, mean, chains)
    with pytest.raises(TypeError, match="`phi` must return floats"):
        diffmh.compose(lambda theta, m: (m > 0).astype(int), mean).run(AT)
    with pytest.raises(diffmh.NotDifferentiable, match=r"`compose\(...\).run` reports"):
        jax.grad(lambda theta: diffmh.compose(lambda t, m: m, mean).run(theta).value)(AT)
