"""Small expectations that the tests of reports, traces and checks look at."""

import jax
import jax.numpy as jnp
import numpy as np

import diffmh

KEY = jax.random.key(3)
MEANS = jnp.array([-2.5, 2.0, 5.0])


def log_mixture(h, j):
    return -0.5 * ((h - MEANS[j]) / 4.0) ** 2


def log_normal(theta, x):
    return -0.5 * (x - theta) ** 2


def identity(theta, x):
    return x


LABELS = diffmh.MetropolisHastings(log_mixture, diffmh.OtherState(3))
WALK = diffmh.MetropolisHastings(log_normal, diffmh.GaussianWalk(2.38))
OCCUPANCY = diffmh.expectation(
    lambda h, j: {"p": jax.nn.one_hot(j, 3)},
    LABELS,
    init=0,
    num_samples=200,
    burn_in=20,
    num_chains=8,
)
TREE = diffmh.expectation(
    lambda theta, x: (x, [theta["mean"] * x**2]),
    diffmh.MetropolisHastings(
        lambda theta, x: -0.5 * jnp.sum((x - theta["mean"]) ** 2 * theta["precision"]),
        diffmh.GaussianWalk(1.5),
    ),
    init=jnp.zeros(2),
    num_samples=200,
    num_chains=8,
)
TREE_THETA = {"mean": jnp.array([0.5, -0.2]), "precision": jnp.float32(1.3)}


def close_trees(tree, expected, rtol=1e-5):
    assert jax.tree.structure(tree) == jax.tree.structure(expected)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-6), tree, expected
    )


BOUNDED = lambda outside: diffmh.MetropolisHastings(
    lambda theta, x: jnp.where(x > 1, outside, log_normal(theta, x)), diffmh.GaussianWalk(2.38)
)
