"""Langevin and Hamiltonian kernels on a logistic regression of ten coefficients, by the prior's
mean and scale: against long runs of the covariance formula, which at stationarity is exact here.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import derivatives

import diffmh

DIMENSION, NUM_DATA = 10, 100
THETA = {"mean": np.float32(0.3), "scale": np.float32(1.5)}


def data():
    key_features, key_labels = jax.random.split(jax.random.key(40))
    features = jax.random.normal(key_features, (NUM_DATA, DIMENSION))
    coefficients = jnp.linspace(-1.0, 1.0, DIMENSION)
    labels = jax.random.bernoulli(key_labels, jax.nn.sigmoid(features @ coefficients))
    return features, labels


def posterior(theta, x, features, labels):
    logits = features @ x
    prior = -0.5 * jnp.sum(((x - theta["mean"]) / theta["scale"]) ** 2)
    likelihood = jnp.sum(jnp.where(labels, logits, 0.0) - jax.nn.softplus(logits))
    return prior - DIMENSION * jnp.log(theta["scale"]) + likelihood


@functools.cache
def laplace():
    """The mode and a Cholesky factor of the inverse Hessian there: where the chains start."""
    log_density = lambda x: posterior(THETA, x, *data())
    newton = lambda _, x: (
        x - jnp.linalg.solve(jax.hessian(log_density)(x), jax.grad(log_density)(x))
    )

    @jax.jit
    def found():
        x = jax.lax.fori_loop(0, 10, newton, jnp.zeros(DIMENSION))
        return x, jnp.linalg.cholesky(jnp.linalg.inv(-jax.hessian(log_density)(x)))

    return found()


def langevin(density):
    return diffmh.Langevin(density, 1.5 * laplace()[1])


def hamiltonian(density):
    leaps = diffmh.Hamiltonian(density, jnp.diagonal(laplace()[1]), 3)
    return diffmh.Mixture(leaps, langevin(density))


KERNELS = {"Langevin": langevin, "Hamiltonian": hamiltonian}


def coefficients(theta, x, features, labels):
    return jnp.append(x, jnp.mean(jax.nn.sigmoid(features @ x)))


def slopes(kernel, key, num_samples, burn_in, num_chains, estimator=None):
    """The derivative of each chain, by both parameters."""
    mode, root = laplace()
    expectation = diffmh.expectation(
        coefficients,
        kernel,
        init=lambda key: mode + root @ jax.random.normal(key, (DIMENSION,)),
        num_samples=num_samples,
        burn_in=burn_in,
        num_chains=num_chains,
        estimator=estimator,
    )
    found = derivatives(expectation, THETA, key, *data())
    return np.concatenate([found["mean"], found["scale"]], axis=1)


def mean_and_error(samples):
    return samples.mean(axis=0), samples.std(axis=0, ddof=1) / np.sqrt(len(samples))


@functools.cache
def reference(num_samples):
    """A covariance within a chain of n effective samples is too small by 1/n: the chains are
    long.
    """
    kernel = KERNELS["Langevin"](posterior)
    return mean_and_error(
        slopes(kernel, jax.random.key(41), num_samples, 50, 64, diffmh.Covariance())
    )


def z_scores(found, reference):
    (mean, error), (exact, exact_error) = mean_and_error(found), reference
    return (mean - exact) / np.hypot(error, exact_error)


@pytest.mark.parametrize(
    "name", ["Langevin", pytest.param("Hamiltonian", marks=pytest.mark.thorough)]
)
def test_logistic_regression(name):
    """22 z-scores: false alarms at |z| > 5 once in 80,000 runs."""
    found = slopes(KERNELS[name](posterior), jax.random.key(42), 30, 60, 2_000)
    assert np.abs(z_scores(found, reference(4_000))).max() < 5


@pytest.mark.thorough
@pytest.mark.parametrize("name", KERNELS)
def test_the_trajectory_alone_is_biased(name, monkeypatch):
    """Through the moves, every accept and reject held fixed: what people differentiate today."""
    ignore = lambda self, weights: 0.0 * self.log_accept_gradient
    monkeypatch.setattr(diffmh.extend.Acceptance, "flip_weight", ignore)
    anew = lambda theta, x, *data: posterior(theta, x, *data)
    found = slopes(KERNELS[name](anew), jax.random.key(43), 100, 60, 2_000)
    assert np.abs(z_scores(found, reference(16_000))).max() > 10
