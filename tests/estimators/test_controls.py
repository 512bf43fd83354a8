"""Control variates where there is nothing to control."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import diffmh
from diffmh.running import run


def test_rounding_is_not_a_control_variate():
    """Between two states by independent proposals all flips are alike and pruning changes nothing:
    the first sum is zero, not its rounding, whose mean is not zero and which least squares would
    blow up.
    """
    slopes = jnp.array([[0.3, -0.7, 1.1], [0.9, 0.2, -0.4]])
    kernel = diffmh.MetropolisHastings(
        lambda theta, x: (slopes @ theta)[x], diffmh.TransitionMatrix([[0.4, 0.6], [0.4, 0.6]])
    )
    mean = diffmh.expectation(
        lambda theta, x: jnp.stack([1.3 * x, 0.1 - x]),
        kernel,
        init=0,
        num_samples=30,
        num_chains=64,
        estimator=diffmh.StochasticDerivative(control="f"),
    )
    theta = jnp.array([0.5, -0.2, 0.7])
    averages = jax.jit(lambda key: run(mean.simulation, theta, key, ()).observed.estimator)
    found = averages(jax.random.key(0))
    assert np.all(np.asarray(found.pruned) == 0)
    assert np.any(np.asarray(found.moved) != 0) and np.any(np.asarray(found.derivative) != 0)
