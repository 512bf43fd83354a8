"""Under JAX's strict modes: no key is used twice, and no rank is promoted, in what is ours. What
users write is still held to the mode that they chose.
"""

from __future__ import annotations

import contextlib

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
ENTROPY = diffmh.compose(lambda h, p: jnp.sum(p * jnp.log(p + 0.1)), OCCUPANCY)
SCORE = expectation(lambda h, j: j, mixture.sampler(), 0, estimator=diffmh.Score("other chains"))
LATTICE = expectation(ising.energy, ising.sampler(), ising.cold(4))
SEQUENTIAL = expectation(ising.energy, ising.sequential(3), jnp.ones((3, 3), jnp.int8))
DRAWS = sad.expectation(draws, alternatives=2)
CASES = {
    "a call": lambda key: MEAN(THETA, key),
    "a derivative": lambda key: jax.jacobian(MEAN)(THETA, key),
    "a report": lambda key: MEAN.run_chains(THETA, key).value,
    "a trace": lambda key: diffmh.trace(
        NORMAL, THETA, key, init=jnp.zeros(2), num_steps=5, estimator=TWO
    ),
    "a composition": lambda key: jax.grad(ENTROPY)(0.4, key),
    "a score": lambda key: jax.grad(SCORE)(0.4, key),
    "a lattice": lambda key: jax.grad(LATTICE)(3.0, key),
    "a sequential lattice": lambda key: jax.grad(SEQUENTIAL)(3.0, key),
    "a program's derivative": lambda key: jax.grad(DRAWS)(THETA, key),
    "a program's chains": lambda key: jax.vmap(jax.grad(sad.expectation(chain)), (None, 0))(
        THETA, jax.random.split(key, 3)
    ),
}


@contextlib.contextmanager
def strict():
    with jax.debug_key_reuse(True), jax.numpy_rank_promotion("raise"):
        yield


@pytest.mark.parametrize("name", CASES)
def test_strict_modes(name):
    """Both are checked where `jit` traces."""
    with strict():
        jax.jit(CASES[name]).trace(KEY)


def test_reports():
    with strict():
        MEAN.run(THETA, jax.random.clone(KEY))
        sad.run(draws, THETA, jax.random.clone(KEY), num_replicates=4)


def test_users_are_held_to_their_own_mode():
    """The test above can fail: a density that promotes a rank, or uses a key twice, is told."""
    promoting = diffmh.MetropolisHastings(
        lambda theta, x: log_normal(theta, x * jnp.ones((1, 2))), diffmh.GaussianWalk(1.0)
    )
    with strict(), pytest.raises(ValueError, match="rank_promotion"):
        jax.jit(expectation(lambda theta, x: x, promoting, jnp.zeros(2))).trace(THETA, KEY)

    def twice(key):
        return jax.random.normal(key, (2,)) + jax.random.normal(key, (2,))

    with strict(), pytest.raises(jax.errors.KeyReuseError):
        jax.jit(expectation(lambda theta, x: x, NORMAL, twice)).trace(THETA, KEY)
