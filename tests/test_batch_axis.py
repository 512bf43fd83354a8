"""Values whose derivatives are our own, under `jax.vmap`: wherever the mapped axis is, and however
JAX stages the computation, they are what plain JAX makes of the same function.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffmh.core.autodiff import differentiable, differentiable_both_ways, differentiable_by, moving

THETA = jnp.array([1.0, 2.0, 5.0])
# As many rows as columns: exchanged axes then go unnoticed by shapes.
ROWS = jnp.arange(9.0).reshape(3, 3) ** 1.3 / 10
KEY = jax.random.key(0)


def product(theta, row):
    return theta * row


def restacked(theta, key, row):
    """The product: `jax.vmap` leaves its axis elsewhere in a stack than in a product."""
    return jnp.stack([*(theta * row)])


def with_jacobian(theta, key, row):
    return restacked(theta, key, row), jnp.diag(row)


WAYS = {
    "differentiable": lambda theta, row: differentiable(
        lambda theta, key, row: theta * row, with_jacobian, None, theta, KEY, row
    ),
    "differentiable_both_ways": lambda theta, row: differentiable_both_ways(
        restacked,
        lambda theta, key, row, direction: row * direction,
        lambda theta, key, row, cotangent: row * cotangent,
        theta,
        KEY,
        row,
    ),
    "differentiable_by": lambda theta, row: differentiable_by(
        lambda theta, key, row: theta * row, restacked, theta, KEY, row
    ),
    "moving": lambda theta, row: moving(
        jax.lax.stop_gradient(theta * row), restacked(theta, KEY, row)
    ),
    "moving with a plain one": lambda theta, row: moving(
        jax.lax.stop_gradient(restacked(theta, KEY, row)), theta * row
    ),
}

STATES = {"vector": lambda s: s, "stack": lambda s: jnp.stack([s[2], s[0] + s[1], s[1]])}
RESULTS = {
    "sum": lambda s: (s**2).sum(),
    "vector": lambda s: s,
    "cumsum": lambda s: jnp.cumsum(s)[1],
}


def scanned(way, state, result):
    """A loop whose state and results go through `way`."""

    def program(theta, row):
        def step(s, factor):
            s = state(0.5 * s + way(theta, row * factor))
            return s, result(s)

        return jax.lax.scan(step, row, jnp.array([0.3, 0.2]))[1]

    return program


def weighted(values):
    return sum((leaf * jnp.arange(1.0, leaf.size + 1).reshape(leaf.shape)).sum() for leaf in values)


MAPS = {
    "rows": lambda program, theta: jax.vmap(program, (None, 0))(theta, ROWS),
    "columns": lambda program, theta: jax.vmap(program, (None, 1), -1)(theta, ROWS),
    "twice": lambda program, theta: jax.vmap(jax.vmap(program, (0, None)), (None, 1))(
        jnp.stack([theta, 2 * theta, -theta]), ROWS
    ),
}


@functools.cache
def derivatives(way):
    """Of all programs under all maps: values and slopes, and the gradient of a sum."""
    loops = itertools.product(STATES.values(), RESULTS.values())
    programs = [jax.jit(way), *(scanned(way, *parts) for parts in loops)]
    values = lambda theta: [mapped(each, theta) for each in programs for mapped in MAPS.values()]

    @jax.jit
    def both(theta):
        forward = jax.jvp(values, (theta,), (jnp.ones(3),))
        return *forward, jax.grad(lambda theta: weighted(values(theta)))(theta)

    return both(THETA)


@pytest.mark.parametrize("name", WAYS)
def test_a_vmapped_value_is_what_plain_jax_makes_of_it(name):
    """By itself and in a scan; mapped over rows, over columns, and twice."""
    found, expected = derivatives(WAYS[name]), derivatives(product)
    for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_an_axis_of_the_other_alone():
    """A value that is the same for all, whose derivative is not."""
    value = jnp.arange(3.0)
    mapped = jax.jit(jax.vmap(lambda theta, row: moving(value, theta * row), (None, 1)))
    found, slope = jax.jvp(lambda theta: mapped(theta, ROWS), (THETA,), (jnp.ones(3),))
    np.testing.assert_array_equal(found, jnp.broadcast_to(value, (3, 3)))
    np.testing.assert_allclose(slope, ROWS.T)


def test_a_value_is_passed_on_to_the_bit():
    """Not even an infinite or tiny one is rounded by what it moves with."""
    value = jnp.array([jnp.inf, 1e-30, -0.0])
    found, slope = jax.jvp(lambda theta: moving(value, 1e9 * theta), (THETA,), (jnp.ones(3),))
    np.testing.assert_array_equal(found, value)
    np.testing.assert_array_equal(slope, 1e9)
