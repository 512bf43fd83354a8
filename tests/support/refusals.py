"""Shared by the tests of refusals: a small expectation, and the parts of a good message."""

import re

import jax
import jax.numpy as jnp
import pytest

import diffmh

KEY = jax.random.key(0)
THETA = jnp.float32(0.5)
WALK = diffmh.GaussianWalk(2.38)


def log_normal(theta, x, scale=1.0):
    return -0.5 * ((x - theta) / scale) ** 2


def walk(log_density):
    return diffmh.MetropolisHastings(log_density, WALK)


NORMAL = walk(lambda theta, x: log_normal(theta, x))


def expect(
    kernel=NORMAL, f=lambda theta, x, *args: x, init=0.0, num_samples=5, num_chains=2, **options
):
    return diffmh.expectation(
        f, kernel, init=init, num_samples=num_samples, num_chains=num_chains, **options
    )


MEAN = expect()
LONE = expect(num_chains=1)


def refused(call, error, words):
    """`words` must all be in the message, in this order, with anything where they have ` … `."""
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error, (
        "a refusal of our own, not one of JAX's that happens to be a kind of it"
    )
    message, pattern = str(caught.value), ".*".join(re.escape(part) for part in words.split(" … "))
    assert re.search(pattern, message, re.DOTALL), f"{message!r} does not say {words!r}"


def cases(**cases):
    """Each by name: what is called, the exception, words of its message."""
    return pytest.mark.parametrize(
        "call, error, words", [pytest.param(*case, id=name) for name, case in cases.items()]
    )
