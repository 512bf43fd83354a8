"""Adaptation and tuning: what they find against what is known."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import diffmh

COVARIANCE = np.array([[1.0, 0.9 * 10], [0.9 * 10, 100.0]])
PRECISION = jnp.asarray(np.linalg.inv(COVARIANCE), jnp.float32)


def gaussian(theta, x):
    return -0.5 * (x - theta) @ PRECISION @ (x - theta)


@pytest.mark.parametrize(
    "kind", ["walk", pytest.param("Langevin", marks=pytest.mark.thorough), "Hamiltonian"]
)
def test_adapt(kind):
    """Scales of 1 and 10 and a correlation of 0.9, from a kernel that knows nothing of them."""
    make = {
        "walk": lambda: diffmh.MetropolisHastings(gaussian, diffmh.GaussianWalk(1.0)),
        "Langevin": lambda: diffmh.Langevin(gaussian, 1.0),
        "Hamiltonian": lambda: diffmh.Hamiltonian(gaussian, 1.0, 5),
    }[kind]
    made = diffmh.adapt(make(), 0.5, jax.random.key(0), init=jnp.zeros(2))
    adapted = made.kernel
    assert type(adapted) is type(make()) and made.states.shape == (16, 2)
    match kind:
        case "walk":
            factor = adapted.proposal.scale
        case "Langevin":
            factor = adapted.update.proposal.step_size
        case _:
            factor = jnp.diag(adapted.step_size)
    found = np.asarray(factor @ factor.T)
    np.testing.assert_allclose(np.sqrt(found[1, 1] / found[0, 0]), 10.0, rtol=0.2)
    if kind != "Hamiltonian":
        assert 0.8 < found[0, 1] / np.sqrt(found[0, 0] * found[1, 1]) < 0.95
    mean = diffmh.expectation(
        lambda theta, x: x, adapted, init=jnp.zeros(2), num_samples=500, estimator=diffmh.Score()
    )
    target = {"walk": 0.234, "Langevin": 0.574, "Hamiltonian": 0.8}[kind]
    assert abs(mean.run(0.5, jax.random.key(1)).acceptance_rate - target) < 0.08


def test_tune():
    """From 1.5 towards 2.4264, where the squared jump distance is largest; the figure is in the
    documentation, this is the way there.
    """
    walk = diffmh.MetropolisHastings(
        lambda scale, x: -0.5 * x**2, lambda scale: diffmh.GaussianWalk(scale)
    )
    path = diffmh.tune(
        walk,
        1.5,
        jax.random.key(0),
        init=0.0,
        num_samples=300,
        num_iterations=60,
        optimizer=optax.adam(0.05),
    )
    assert abs(float(path.average) - 2.4264) < 0.35
    with pytest.raises(ValueError, match="function of theta"):
        diffmh.tune(diffmh.Gibbs(gaussian, lambda z: z[0], 2), 1.5, jax.random.key(0), init=0)


def test_refusals():
    with pytest.raises(TypeError, match=r"use `diffmh\.tune`"):
        diffmh.adapt(
            diffmh.Langevin(gaussian, lambda theta: theta), 0.5, jax.random.key(0), init=0.0
        )
