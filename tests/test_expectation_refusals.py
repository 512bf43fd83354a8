"""Errors of `expectation` and `.run`: messages that name the argument, what came and what to do;
and input that is accepted.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import KEY, LONE, MEAN, NORMAL, THETA, cases, expect, log_normal, refused, walk

import diffmh


@pytest.mark.parametrize(
    "theta, error, words",
    [
        (1, TypeError, "`theta` is int32 … float32"),
        (jnp.arange(3), TypeError, "`theta` is int32 … float32"),
        (True, TypeError, "`theta` is bool … float32"),
        (jnp.array(1j), TypeError, "`theta` is complex64 … real"),
        (jnp.float16(1), TypeError, "`theta` is float16 … float32"),
        (jnp.bfloat16(1), TypeError, "`theta` is bfloat16 … float32"),
        (jnp.nan, ValueError, "`theta` is not finite, got nan"),
        ({"a": jnp.array([0.0, jnp.inf])}, ValueError, "`theta['a']` is not finite … inf"),
        (
            {"w": 0.5, "activation": jax.nn.relu},
            TypeError,
            "`theta['activation']` … not an array … equinox.partition",
        ),
        ("0.5", TypeError, "`theta` is '0.5', not an array"),
        (None, TypeError, "`theta` has no parameters, got None"),
        ({}, TypeError, "`theta` has no parameters, got {}"),
    ],
)
def test_theta(theta, error, words):
    refused(lambda: MEAN(theta, KEY), error, words)
    refused(lambda: diffmh.trace(NORMAL, theta, KEY, init=0.0, num_steps=5), error, words)
    refused(lambda: diffmh.check(NORMAL, theta, KEY, init=0.0), error, words)


@pytest.mark.parametrize(
    "log_density, error, words",
    [
        (lambda theta, x: theta * x * jnp.ones(2), TypeError, "log_density … scalar … (2,) … sum"),
        (lambda theta, x: (theta * x, x), TypeError, "log_density … scalar"),
        (lambda theta, x: None, TypeError, "log_density … scalar … None"),
        (lambda theta, x: "a", TypeError, "`log_density` … 'a'"),
        (lambda theta, x: theta * x * 1j, TypeError, "log_density … complex64 … real"),
        (
            lambda theta, x: (theta * x).astype(jnp.float16),
            TypeError,
            "log_density … float16 … float32",
        ),
        (lambda theta, x: jnp.int32(theta * x), TypeError, "log_density … int32 … float32"),
        (
            lambda theta, x: jnp.log(theta * x),
            ValueError,
            "log_density … nan … start state -7.25 … init",
        ),
        (
            lambda theta, x: jnp.where(x > 0, theta * x, -jnp.inf),
            ValueError,
            "log_density … -inf … start state -7.25 … init",
        ),
        (3.0, TypeError, "`log_density` … function … 3.0"),
    ],
    ids=[
        "vector",
        "pair",
        "nothing",
        "string",
        "complex",
        "half",
        "integer",
        "nan",
        "outside",
        "number",
    ],
)
def test_log_density(log_density, error, words):
    refused(lambda: expect(walk(log_density), init=-7.25)(0.5, KEY), error, words)
    if error is TypeError:
        refused(
            lambda: expect(diffmh.Cycle(NORMAL, walk(log_density)), init=-7.25)(0.5, KEY),
            error,
            words,
        )


def test_start_state_is_printed_as_a_tree():
    outside = expect(walk(lambda theta, x: jnp.log(theta * x["a"])), init={"a": jnp.float32(-7.25)})
    refused(
        lambda: outside(0.5, KEY),
        ValueError,
        "log_density … nan … start state {'a': … -7.25 … init",
    )


@pytest.mark.parametrize(
    "f, error, words",
    [
        (lambda theta, x: "a", TypeError, "`f` … 'a'"),
        (lambda theta, x: {"x": x, "name": "a"}, TypeError, "`f` … 'a'"),
        (lambda theta, x: None, TypeError, "`f` must return numbers, got None"),
        (lambda theta, x: x * 1j, TypeError, "`f` … complex64 … real"),
        (
            lambda theta, x: {"half": x.astype(jnp.float16)},
            TypeError,
            "`f` … ['half'] … float16 … float32",
        ),
        (lambda theta, x: jnp.log(x), ValueError, "`f` is NaN … start state -7.25"),
        (3.0, TypeError, "`f` … function … 3.0"),
    ],
    ids=["string", "string leaf", "nothing", "complex", "half", "nan", "number"],
)
def test_f(f, error, words):
    refused(lambda: expect(f=f, init=-7.25)(0.5, KEY), error, words)


@pytest.mark.parametrize(
    "log_density",
    [
        lambda theta, x: -(x**2),
        lambda theta, x: -(theta**2) - x**2,
        lambda theta, x: jnp.where(theta > 0, -(x**2), -(x**4)),
        lambda theta, x: -(x**2) * jnp.floor(theta),
        lambda theta, x: -(x**2) * jax.lax.stop_gradient(theta),
    ],
    ids=["unused", "only a factor", "only compared", "rounded", "stopped"],
)
def test_nothing_depends_on_theta(log_density):
    words = "`log_density` does not depend on `theta` … `f` does not … Use `theta`"
    refused(lambda: expect(walk(log_density))(0.5, KEY), ValueError, words)


def test_only_f_depends_on_theta():
    """Allowed: there is something to differentiate."""
    product = expect(walk(lambda theta, x: -(theta**2) - x**2), f=lambda theta, x: theta * x)
    value, derivative = jax.value_and_grad(product)(0.5, KEY)
    np.testing.assert_allclose(derivative, 2 * value, rtol=1e-5)


COUNTED = {
    "num_samples": lambda count: expect(num_samples=count),
    "burn_in": lambda count: expect(burn_in=count),
    "num_chains": lambda count: expect(num_chains=count),
    "alternatives": lambda count: diffmh.StochasticDerivative(alternatives=count),
    "num_steps": lambda count: diffmh.trace(NORMAL, 0.5, KEY, init=0.0, num_steps=count),
    "Repeat": lambda count: diffmh.Repeat(NORMAL, count),
    "OtherState": lambda count: diffmh.OtherState(count),
}


@pytest.mark.parametrize("name", COUNTED)
@pytest.mark.parametrize("count", [2.0, True, np.float32(2), np.True_, "2", None], ids=repr)
def test_counts_that_are_not_whole(name, count):
    if (name, count) == ("alternatives", None):
        assert COUNTED[name](None).alternatives is None  # the default
        return
    refused(lambda: COUNTED[name](count), TypeError, f"{name} … integer … {count!r}")


@pytest.mark.parametrize("name", COUNTED)
@pytest.mark.parametrize("count", [-1, 0])
def test_counts_that_are_too_small(name, count):
    if (name, count) == ("burn_in", 0):
        assert COUNTED[name](0).simulation.burn_in == 0
    else:
        refused(lambda: COUNTED[name](count), ValueError, f"{name} … at least … {count}")


@pytest.mark.parametrize("name", COUNTED)
def test_advice_on_counts_is_code(name):
    with pytest.raises(TypeError) as caught:
        COUNTED[name](2.0)
    advice = re.search("write `(.*)`", str(caught.value))
    assert advice is not None
    compile(advice.group(1).replace("...", "2"), "advice", "exec")


@pytest.mark.parametrize(
    "keys, error, words",
    [
        ((jax.random.PRNGKey(0),), TypeError, "`key` … typed key … uint32 … jax.random.key"),
        ((), TypeError, "`key` is missing … jax.random.key"),
        ((0,), TypeError, "`key` … typed key, got 0 … jax.random.key"),
        ((jax.random.split(KEY, 3),), ValueError, "`key` must be one key … (3,) … vmap"),
    ],
    ids=["raw", "missing", "seed", "several"],
)
def test_key(keys, error, words):
    composed = diffmh.compose(lambda theta, m: m, MEAN)
    for function in (MEAN, MEAN.per_chain, MEAN.run, composed, composed.run):
        refused(lambda: function(0.5, *keys), error, words)
    if keys:
        refused(lambda: diffmh.trace(NORMAL, 0.5, *keys, init=0.0, num_steps=5), error, words)


@pytest.mark.parametrize(
    "init, words",
    [
        (jnp.float16(0), "`init` is float16 … float32"),
        ({"a": jnp.float16(0)}, "`init`['a'] is float16 … float32"),
        (
            lambda key: jax.random.normal(key, (), jnp.float16),
            "`init(key)` returns is float16 … float32",
        ),
        (jnp.array(1j), "`init` is complex64 … real"),
        ({}, "`init` has no arrays, got {}"),
        (lambda key: {}, "`init(key)` returns has no arrays, got {}"),
        ("0", "`init` is '0', not an array"),
        (0, "`GaussianWalk` moves floats … int32 … start from a float"),
        ({"a": 0, "b": 0.0}, "`GaussianWalk` moves floats … ['a'] is int32 … On"),
    ],
    ids=[
        "half",
        "half leaf",
        "half drawn",
        "complex",
        "empty",
        "empty drawn",
        "string",
        "integer",
        "integer leaf",
    ],
)
def test_init(init, words):
    kernel = walk(lambda theta, x: theta * jax.tree.leaves(x)[0])
    refused(lambda: expect(kernel, init=init)(0.5, KEY), TypeError, words)


@cases(
    one_chain=(
        lambda: diffmh.compose(lambda theta, m: m, LONE),
        ValueError,
        "`compose` … `num_chains` of at least 2, got 1",
    ),
    nothing=(
        lambda: diffmh.compose(lambda theta, m: m),
        ValueError,
        "`compose … at least one expectation, got none",
    ),
    unequal=(
        lambda: diffmh.compose(max, MEAN, expect(num_chains=3)),
        ValueError,
        "`compose` … equal `num_chains`, got [2, 3]",
    ),
    function=(
        lambda: diffmh.compose(max, log_normal),
        TypeError,
        "`compose … diffmh.expectation … got … log_normal",
    ),
    number=(
        lambda: diffmh.compose(max, MEAN, 3.0),
        TypeError,
        "`compose … diffmh.expectation … got 3.0",
    ),
    phi=(lambda: diffmh.compose(3.0, MEAN), TypeError, "`phi` must be a function … got 3.0"),
    run_of_one=(
        lambda: LONE.run(0.5, KEY),
        ValueError,
        "`.run` … `num_chains` of at least 2, got 1",
    ),
    jit=(
        lambda: jax.jit(lambda t: MEAN.run(t, KEY).value)(0.5),
        TypeError,
        "`.run` … cannot be traced: call the expectation",
    ),
    jit_of_constants=(
        lambda: jax.jit(lambda scale: scale * MEAN.run(THETA, KEY).value)(1.0),
        TypeError,
        "`.run` … cannot be traced: call the expectation",
    ),
)
def test_compose_and_run(call, error, words):
    refused(call, error, words)
