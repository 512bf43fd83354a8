"""The mixture and the normal model against their exact answers."""

import jax
import numpy as np
from unbiasedness import assert_unbiased

import diffmh
from diffmh.models import gaussian, mixture


def test_mixture_and_gaussian():
    p = diffmh.expectation(
        mixture.indicator, mixture.sampler(), init=0, num_samples=200, burn_in=50, num_chains=4_000
    )
    value, slope = jax.jvp(lambda h: p.per_chain(h, jax.random.key(44)), (0.4,), (1.0,))
    exact_value, exact_slope = jax.jvp(mixture.posterior, (0.4,), (1.0,))
    assert_unbiased(np.stack([value, slope], 1), np.stack([exact_value, exact_slope]))
    np.testing.assert_allclose(
        jax.value_and_grad(lambda h: mixture.entropy(mixture.posterior(h)))(0.4),
        [1.071713, 0.018368],
        atol=1e-5,
    )
    x = diffmh.expectation(
        lambda theta, x: x,
        gaussian.sampler(),
        init=0.0,
        num_samples=100,
        burn_in=60,
        num_chains=4_000,
    )
    value, slope = jax.jvp(lambda t: x.per_chain(t, jax.random.key(45)), (0.5,), (1.0,))
    assert_unbiased(np.stack([value, slope], 1), np.array([gaussian.mean(0.5), 1.0]))
