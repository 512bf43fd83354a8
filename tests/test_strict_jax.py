"""Under JAX's strict modes: no key is used twice, and no rank is promoted, in what is ours. What
users write is still held to the mode that they chose.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import diffmh
from diffmh import sad
from diffmh.models import ising, mixture

KEY = jax.random.key(0)


def log_normal(theta, x):
    return -0.5 * jnp.sum((x - theta) ** 2)


NORMAL = diffmh.MetropolisHastings(log_normal, diffmh.GaussianWalk(1.0))
TWO = diffmh.StochasticDerivative(alternatives=2)


def expectation(f, kernel, init, **options):
    return diffmh.expectation(f, kernel, init=init, num_samples=5, num_chains=4, **options)


def start(key):
    return jax.random.normal(key, (2,))


def chain(theta, key):
    def step(x, key):
        key_propose, key_accept = jax.random.split(key)
        x_new = sad.propose(key_propose, diffmh.GaussianWalk(2.38), None, x)
        log_ratio = 0.5 * (x - theta[0]) ** 2 - 0.5 * (x_new - theta[0]) ** 2
        accept = sad.bernoulli(key_accept, jnp.exp(jnp.minimum(0.0, log_ratio)))
        return jnp.where(accept, x_new, x), None

    return jax.lax.scan(step, 0.0, jax.random.split(key, 3))[0]


def draws(theta, key):
    keys = jax.random.split(key, 3)
    flips = sad.bernoulli(keys[0], theta * jnp.ones(2))
    return jnp.sum(flips * jnp.arange(2.0)) * sad.poisson(keys[1], theta[0]) + sad.categorical(
        keys[2], jnp.log(theta)
    )


MEAN = expectation(lambda theta, x: theta * x, NORMAL, start, estimator=TWO)
OCCUPANCY = expectation(mixture.indicator, mixture.sampler(), 0)
THETA = jnp.array([0.3, 0.6])
CASES = {
    "a call": lambda: MEAN(THETA, KEY),
    "a derivative": lambda: jax.jacobian(MEAN)(THETA, KEY),
    "a report": lambda: MEAN.run(THETA, KEY),
    "a trace": lambda: diffmh.trace(
        NORMAL, THETA, KEY, init=jnp.zeros(2), num_steps=5, estimator=TWO
    ),
    "a composition": lambda: jax.grad(
        diffmh.compose(lambda h, p: jnp.sum(p * jnp.log(p + 0.1)), OCCUPANCY)
    )(0.4, KEY),
    "a score": lambda: jax.grad(
        expectation(lambda h, j: j, mixture.sampler(), 0, estimator=diffmh.Score("other chains"))
    )(0.4, KEY),
    "a lattice": lambda: jax.grad(expectation(ising.energy, ising.sampler(), ising.cold(4)))(
        3.0, KEY
    ),
    "a sequential lattice": lambda: jax.grad(
        expectation(ising.energy, ising.sequential(3), jnp.ones((3, 3), jnp.int8))
    )(3.0, KEY),
    "a program's derivative": lambda: jax.grad(sad.expectation(draws, alternatives=2))(THETA, KEY),
    "a program's runs": lambda: sad.run(draws, THETA, KEY, num_replicates=4),
    "a program's chains": lambda: jax.vmap(jax.grad(sad.expectation(chain)), (None, 0))(
        THETA, jax.random.split(KEY, 3)
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_strict_modes(name):
    with jax.debug_key_reuse(True), jax.numpy_rank_promotion("raise"):
        jax.block_until_ready(CASES[name]())


def test_users_are_held_to_their_own_mode():
    """The test above can fail: a density that promotes a rank, or uses a key twice, is told."""
    promoting = diffmh.MetropolisHastings(
        lambda theta, x: log_normal(theta, x * jnp.ones((1, 2))), diffmh.GaussianWalk(1.0)
    )
    with jax.numpy_rank_promotion("raise"), pytest.raises(ValueError, match="rank_promotion"):
        expectation(lambda theta, x: x, promoting, jnp.zeros(2))(THETA, KEY)

    def twice(key):
        return jax.random.normal(key, (2,)) + jax.random.normal(key, (2,))

    with jax.debug_key_reuse(True), pytest.raises(jax.errors.KeyReuseError):
        expectation(lambda theta, x: x, NORMAL, twice)(THETA, KEY)
