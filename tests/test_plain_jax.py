"""The door to `fast` open and shut: `jax.vmap` and `jax.random` in place of chains last and of
the words that we draw, the same numbers by both.
"""

from __future__ import annotations

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import derivative, mixture_occupancy
from unbiasedness import assert_unbiased

import diffmh
from diffmh import sad
from diffmh.fast import plain_jax
from diffmh.fast.chains import over_chains
from diffmh.models import gaussian, ising, mixture

KEY = jax.random.key(3)
CHAINS = 4000


def sampled(f, kernel, init, num_samples, burn_in):
    """The values and derivatives of each chain, as a function of theta."""
    mean = diffmh.expectation(
        f, kernel, init=init, num_samples=num_samples, burn_in=burn_in, num_chains=CHAINS
    )

    def both(theta):
        chains = lambda theta: mean.per_chain(theta, KEY)
        return jax.jvp(chains, (theta,), (jnp.ones_like(theta),))

    return both


def walk(theta, key):
    """A biased walk on 0..4 in plain code: E of its end is differentiated through the flips."""

    def step(x, key):
        up = sad.bernoulli(key, jax.nn.sigmoid(theta - 0.3 * x))
        return jnp.clip(x + jnp.where(up, 1, -1), 0, 4), None

    return jax.lax.scan(step, 2, jax.random.split(key, 6))[0].astype(float)


def walk_exactly(theta):
    places = np.arange(5)
    up = 1 / (1 + np.exp(-(theta[0] - 0.3 * places)))
    matrix = np.zeros((5, 5), complex)
    matrix[places, np.minimum(places + 1, 4)] += up
    matrix[places, np.maximum(places - 1, 0)] += 1 - up
    return np.linalg.matrix_power(matrix, 6)[2:3] @ places


def sad_walk(theta):
    runs = jax.vmap(sad.expectation(walk), (None, 0))
    chains = lambda theta: runs(theta, jax.random.split(KEY, CHAINS))
    return jax.jvp(chains, (theta,), (jnp.ones_like(theta),))


def ising_exactly():
    found = ising.exact(4, 4.0)
    return found.energy, found.heat_capacity


PROBLEMS = {
    "N(θ, 1)": (
        sampled(lambda theta, x: x, gaussian.sampler(), 0.0, 60, 60),
        0.5,
        lambda: (0.5, 1.0),
    ),
    "mixture": (
        sampled(mixture.indicator, mixture.sampler(), 0, 20, 0),
        0.4,
        lambda: tuple(
            np.squeeze(part) for part in derivative(mixture_occupancy(20, 0), np.array(0.4))
        ),
    ),
    "Ising 4×4": (
        sampled(ising.energy, ising.sampler(), ising.cold(4), 30, 30),
        4.0,
        ising_exactly,
    ),
    "sad": (sad_walk, 0.2, lambda: tuple(map(np.squeeze, derivative(walk_exactly, 0.2)))),
}
WAYS = pytest.mark.parametrize("plain", [False, True], ids=["lowered", "plain"])
# What each way computed, kept for the comparison of both.
FOUND: dict[tuple[str, bool], tuple[np.ndarray, np.ndarray]] = {}


def found(name, plain):
    if (name, plain) not in FOUND:
        function, theta, _ = PROBLEMS[name]
        with plain_jax(plain):
            values, slopes = jax.jit(function)(jnp.float32(theta))
        FOUND[name, plain] = np.asarray(values), np.asarray(slopes)
    return FOUND[name, plain]


@pytest.mark.optimised  # the comparison below has the same programs
@WAYS
@pytest.mark.parametrize("name", PROBLEMS)
def test_unbiased_both_ways(name, plain):
    values, slopes = found(name, plain)
    value, slope = PROBLEMS[name][2]()
    assert_unbiased(values, value, f"{name}, value")
    assert_unbiased(slopes, slope, f"{name}, derivative")


@pytest.mark.optimised
@pytest.mark.parametrize("name", PROBLEMS)
def test_the_same_numbers_both_ways(name):
    """Every chain takes the same path, bit for bit; derivatives round as the compiler pleases."""
    (values, slopes), (values_plain, slopes_plain) = found(name, False), found(name, True)
    np.testing.assert_array_equal(values, values_plain)
    np.testing.assert_allclose(slopes, slopes_plain, rtol=1e-4, atol=1e-5)


def test_plain_is_vmap():
    """A plain trace has neither chains last nor random bits of ours, and `jit` tells the two
    apart.
    """

    def draw(x, key):
        return jnp.roll(x, 1, 0) + jax.random.uniform(key, (3, 4))

    x, keys = jnp.zeros((3, 4, 5)), jax.random.split(KEY, 5)
    text = lambda function: str(jax.make_jaxpr(function)(x, keys))
    with plain_jax(True):
        assert text(over_chains(draw)) == text(jax.vmap(draw, -1, -1))
    assert "random_bits" not in text(over_chains(draw))
    mapped = jax.jit(lambda x, keys: over_chains(draw)(x, keys))
    lowered = mapped.lower(x, keys).as_text()
    with plain_jax(True):
        assert mapped.lower(x, keys).as_text() != lowered


@pytest.mark.parametrize("setting, plain", [("1", True), ("0", False), ("", False)])
def test_the_environment_decides(setting, plain):
    """Read once, when diffmh is imported."""
    text = "from diffmh.fast import plain_jax; print(plain_jax.value)"
    environment = {"DIFFMH_PLAIN_JAX": setting, "PYTHONPATH": ":".join(sys.path)}
    run = [sys.executable, "-c", text]
    done = subprocess.run(run, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(plain)
