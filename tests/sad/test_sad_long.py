"""Many draws without a loop around them: what is compiled for them grows no faster than they do."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sad_runs import QUICK
from unbiasedness import assert_unbiased

from diffmh import sad


def nested(theta, key, depth):
    """`2^depth − 1` draws, in all branches of conditionals within each other."""
    if not depth:
        return theta
    key_draw, key_rest = jax.random.split(key)
    return jax.lax.cond(
        sad.bernoulli(key_draw, theta),
        lambda: nested(theta, jax.random.fold_in(key_rest, 0), depth - 1) + 1.0,
        lambda: nested(theta, jax.random.fold_in(key_rest, 1), depth - 1) * 0.5,
    )


def mean_of_nested(theta, depth):
    below = mean_of_nested(theta, depth - 1) if depth else theta
    return theta * (below + 1) + (1 - theta) * below * 0.5 if depth else theta


@pytest.mark.parametrize("num_alternatives", [pytest.param(1, marks=pytest.mark.thorough), 3])
def test_nested_conditionals(num_alternatives):
    """15 draws, compiled apart, whose keys are made ahead of the conditionals."""
    program = lambda theta, key: nested(theta, key, 4) ** 2
    of_square = sad.expectation(program, estimator=sad.Alternatives(num_alternatives))
    keys = jax.random.split(jax.random.key(0), 4000)
    both = jax.jit(jax.vmap(jax.value_and_grad(of_square), (None, 0)), compiler_options=QUICK)
    values, slopes = both(0.3, keys)
    plain = jax.jit(jax.vmap(lambda key: program(0.3, key)), compiler_options=QUICK)(keys)
    np.testing.assert_allclose(values, plain, rtol=1e-6)
    assert_unbiased(slopes, jax.grad(second_moment_of_nested)(0.3, 4), "nested conditionals")


def second_moment_of_nested(theta, depth):
    if not depth:
        return theta**2
    below, square = mean_of_nested(theta, depth - 1), second_moment_of_nested(theta, depth - 1)
    return theta * (square + 2 * below + 1) + (1 - theta) * square * 0.25


def unrolled(theta, key, count):
    total = 0
    for key_draw in jax.random.split(key, count):
        total = total + sad.bernoulli(key_draw, jax.nn.sigmoid(theta - 0.1 * total))
    return 1.0 * total


def lowered(program, size: int) -> str:
    slope = jax.grad(sad.expectation(lambda theta, key: program(theta, key, size)))
    return jax.jit(slope).lower(0.3, jax.random.key(0)).as_text()


def generators(text: str) -> int:
    """Where the generator of random numbers is run."""
    return len(re.findall(r"call @\w*threefry2x32", text))


@pytest.mark.parametrize("program, few, many", [(unrolled, 10, 24), (nested, 3, 5)])
def test_the_generator_is_not_copied_for_every_draw(program, few, many):
    """At most once more for each level of a conditional."""
    few, many = (generators(lowered(program, size)) for size in (few, many))
    assert 0 < few <= many <= few + 8, (few, many)


@pytest.mark.parametrize("program, few, many", [(unrolled, 4, 10), (nested, 2, 4)])
def test_many_draws_are_compiled_apart(program, few, many):
    marked = [lowered(program, size).count('inlineable = "false"') for size in (few, many)]
    assert marked[0] == 0 < marked[1], marked


def test_chances_within_a_loop_are_new_in_each_iteration():
    """A conditional within a scan takes its uniforms from the iteration's."""

    def program(theta, key):
        def step(total, key):
            key_draw, key_inner = jax.random.split(key)
            chosen = sad.bernoulli(key_draw, theta)
            more = jax.lax.cond(
                chosen,
                lambda: 1.0 * sad.binomial(key_inner, 3, theta),
                lambda: 2.0 * sad.bernoulli(key_inner, theta**2),
            )
            return total + more, None

        return jax.lax.scan(step, 0.0, jax.random.split(key, 3))[0] ** 2

    one = lambda theta: 3 * theta * theta + (1 - theta) * 2 * theta**2
    of_square = lambda theta: (
        theta * (3 * theta * (1 - theta) + 9 * theta**2) + (1 - theta) * 4 * theta**2
    )
    exact = lambda theta: 3 * of_square(theta) + 6 * one(theta) ** 2
    keys = jax.random.split(jax.random.key(1), 20_000)
    slopes = jax.jit(
        jax.vmap(jax.grad(sad.expectation(program)), (None, 0)), compiler_options=QUICK
    )
    assert_unbiased(slopes(0.4, keys), jax.grad(exact)(jnp.float32(0.4)), "a loop's conditional")
