"""Derivatives that are refused: second ones, and those with respect to what is not theta; and
closures that are allowed.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import KEY, MEAN, THETA, expect, log_normal, refused, walk

import diffmh


def twice(body, start):
    """The carry after two steps of a scan."""
    return jax.lax.scan(lambda carry, _: (body(carry), None), start, None, length=2)[0]


class Scaled(eqx.Module):
    scale: jax.Array

    def log_density(self, theta, x):
        return log_normal(theta, x, self.scale)


def with_its_own_rule(scale):
    """A density with `jax.custom_jvp`, under which JAX is strict about what it closes over."""
    log_density = jax.custom_jvp(lambda theta, x: log_normal(theta, x, scale))
    log_density.defjvp(
        lambda primals, tangents: jax.jvp(
            lambda theta, x: log_normal(theta, x, scale), primals, tangents
        )
    )
    return log_density


def closing(scale):
    return expect(walk(lambda theta, x: log_normal(theta, x, scale)))


SCALED = expect(walk(log_normal))
SQUARE = diffmh.compose(lambda theta, m: m**2, MEAN)
# Functions that hand a value to an expectation otherwise than as theta.
DATA = {
    "args": lambda value, theta: SCALED(theta, KEY, value),
    "args per chain": lambda value, theta: SCALED.per_chain(theta, KEY, value).sum(),
    "args of a composition": lambda value, theta: diffmh.compose(lambda theta, m: m**2, SCALED)(
        theta, KEY, value
    ),
    "args in scan": lambda value, theta: twice(
        lambda total: total + SCALED(theta, KEY, value), 0.0
    ),
    "args carried by scan": lambda value, theta: twice(
        lambda last: SCALED(theta, KEY, last), value
    ),
}
CLOSED_OVER = {
    "init": lambda value, theta: expect(init=value)(theta, KEY),
    "init's function": lambda value, theta: expect(init=lambda key: value + jax.random.normal(key))(
        theta, KEY
    ),
    "scale": lambda value, theta: expect(
        diffmh.MetropolisHastings(log_normal, diffmh.GaussianWalk(value))
    )(theta, KEY),
    "log_density": lambda value, theta: closing(value)(theta, KEY),
    "log_density in scan": lambda value, theta: twice(
        lambda total: total + closing(value)(theta, KEY), 0.0
    ),
    "jitted log_density": lambda value, theta: expect(
        walk(jax.jit(lambda theta, x: log_normal(theta, x, value)))
    )(theta, KEY),
    "log_density with a rule": lambda value, theta: expect(walk(with_its_own_rule(value)))(
        theta, KEY
    ),
    "module's log_density": lambda value, theta: expect(walk(Scaled(value).log_density))(
        theta, KEY
    ),
    "f": lambda value, theta: expect(f=lambda theta, x: value * x)(theta, KEY),
}
WORDS = {
    **dict.fromkeys(DATA, "derivative … `args` … data … part of `theta`"),
    **dict.fromkeys(
        CLOSED_OVER,
        "derivative … `init` … kernel … `log_density`, `f` or … closes over … `theta` …"
        " stop_gradient",
    ),
}


@pytest.mark.parametrize(
    "derivative",
    [
        lambda function: jax.grad(function)(1.0, THETA),
        lambda function: jax.jvp(lambda value: function(value, THETA), (1.0,), (1.0,)),
        lambda function: jax.jit(jax.grad(function))(1.0, 0.5),
        lambda function: jax.grad(jax.jit(function))(1.0, 0.5),
        lambda function: jax.grad(function, (0, 1))(1.0, 0.5),
        lambda function: jax.grad(jax.jit(lambda value: function(value, value)))(1.0),
    ],
    ids=["grad", "jvp", "jit of grad", "grad of jit", "with theta", "with theta, jitted"],
)
@pytest.mark.parametrize("where", WORDS)
def test_derivative_in_what_is_not_theta(where, derivative):
    function = {**DATA, **CLOSED_OVER}[where]
    refused(lambda: derivative(function), diffmh.NotDifferentiable, WORDS[where])


@pytest.mark.parametrize("function", [MEAN, SQUARE], ids=["expectation", "composition"])
@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["plain", "jit"])
@pytest.mark.parametrize(
    "second",
    [
        jax.hessian,
        lambda f: jax.grad(jax.grad(f)),
        lambda f: jax.jacfwd(jax.jacfwd(f)),
        lambda f: jax.jacrev(jax.jacfwd(f)),
        lambda f: (
            lambda theta, key: jax.jvp(jax.grad(lambda theta: f(theta, key)), (theta,), (1.0,))
        ),
        lambda f: jax.grad(jax.jit(jax.grad(f))),
        lambda f: jax.grad(
            lambda theta, key: twice(lambda total: total + jax.grad(f)(theta, key), 0.0)
        ),
    ],
    ids=[
        "hessian",
        "grad of grad",
        "jacfwd of jacfwd",
        "jacrev of jacfwd",
        "jvp of grad",
        "grad of jit of grad",
        "scan",
    ],
)
def test_second_derivatives(function, jit, second):
    words = (
        "second derivative … first derivatives only … `diffmh.hessian(expectation)` … Covariance()"
    )
    refused(lambda: jit(second(function))(0.5, KEY), diffmh.NotDifferentiable, words)


CONCRETE = closing(2.0)


@pytest.mark.parametrize("differentiate", [lambda f: f, jax.grad], ids=["value", "grad"])
def test_closing_over_traced_values_is_allowed(differentiate):
    """As long as nobody differentiates with respect to them."""
    at = lambda scale: differentiate(closing(scale))(0.5, KEY)
    expected = differentiate(CONCRETE)(0.5, KEY)
    np.testing.assert_allclose(jax.jit(at)(2.0), expected, rtol=1e-5)
    one, two = jax.vmap(at)(jnp.array([1.0, 2.0]))
    np.testing.assert_allclose(two, expected, rtol=1e-5)
    assert abs(one - expected) > 0.01, "the scale matters here"


def test_stopped_closures_and_args_are_allowed():
    stopped = lambda theta: jax.lax.stop_gradient(4 * theta)
    expected = jax.grad(CONCRETE)(0.5, KEY)
    np.testing.assert_allclose(
        jax.grad(lambda theta: closing(stopped(theta))(theta, KEY))(0.5), expected, rtol=1e-5
    )
    np.testing.assert_allclose(
        jax.grad(lambda theta: SCALED(theta, KEY, stopped(theta)))(0.5), expected, rtol=1e-5
    )


def test_constants_inside_traced_code_are_allowed():
    expected = MEAN(0.5, KEY)
    np.testing.assert_allclose(
        jax.jit(lambda scale: scale * MEAN(THETA, KEY))(2.0), 2 * expected, rtol=1e-6
    )
    np.testing.assert_allclose(
        jax.grad(lambda scale: scale * MEAN(THETA, KEY))(2.0), expected, rtol=1e-6
    )
    np.testing.assert_allclose(
        twice(lambda total: total + MEAN(THETA, KEY), 0.0), 2 * expected, rtol=1e-6
    )


def test_integer_args_are_allowed():
    """They have tangents of type float0, which say nothing."""
    counts = jnp.array([2, 5])
    posterior = expect(
        walk(lambda theta, x, counts: jnp.sum(counts * (theta * x) - jnp.exp(theta * x)))
    )
    expected = jax.grad(posterior)(0.5, KEY, counts)
    assert np.isfinite(expected) and expected != 0
    np.testing.assert_allclose(jax.jit(jax.grad(posterior))(0.5, KEY, counts), expected, rtol=1e-5)
    body = lambda carry, row: (carry + posterior(0.5 * carry, KEY, row), None)
    through_scan = jax.grad(lambda theta: jax.lax.scan(body, theta, counts[None])[0])(1.0)
    np.testing.assert_allclose(through_scan, 1 + 0.5 * expected, rtol=1e-5)
