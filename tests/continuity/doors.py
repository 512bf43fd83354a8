"""The places where a function is examined for moving jumps, each by the cheapest call that
does it: nothing is compiled.
"""

import contextlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import diffmh
from diffmh import sad

KEY = jax.random.key(0)
THETA = 0.5
_DRAWS = np.random.default_rng(0).normal(size=(2, 8, 5)).astype(np.float32)

ADMITTED = ""


def log_normal(theta, x, *_):
    """A density of a scalar or a vector that depends on theta."""
    return -0.5 * jnp.sum((x - theta) ** 2)


def identity(theta, x, *_):
    return x


def walk(log_density):
    return diffmh.MetropolisHastings(log_density, diffmh.GaussianWalk(2.4))


def langevin(log_density):
    return diffmh.Langevin(log_density, 0.3)


def verdict(call: Callable[[], str]) -> str:
    """Why a function is refused or warned about; empty if it is admitted."""
    try:
        return call()
    except diffmh.NotDifferentiable as error:
        return f"refused: {error}"


def expect(f, kernel, x):
    return diffmh.expectation(f, kernel, init=jnp.asarray(x), num_samples=2, num_chains=2)


def admitted(mean, *args, theta=THETA) -> str:
    """The core's verdict before it runs anything: an error, or what `Report.warnings` would hold
    (`test_the_warning_is_in_the_report`).
    """
    warned = []

    def trace(theta):
        # Not a call, which would trace the whole simulation as well: that takes ten times as long.
        warned.extend(mean._admit(theta, KEY, args)[0].admission.jumps)

    jax.eval_shape(trace, theta)
    return f"warned: {warned}" if warned else ADMITTED


def in_core_density(log_density, x, *args, kernel=walk, f=identity) -> str:
    """As a density of the core."""
    return verdict(lambda: admitted(expect(f, kernel(log_density), x), *args))


def in_core_f(f, x, *args, kernel=walk, log_density=log_normal) -> str:
    """As an f of the core."""
    return verdict(lambda: admitted(expect(f, kernel(log_density), x), *args))


def draws_like(x):
    """Draws for `from_draws` of a scalar or of a vector of at most five entries."""
    return _DRAWS[..., : np.size(x)].reshape(2, 8, *np.shape(x))


def in_from_draws(x, *args, f=identity, log_density=log_normal) -> str:
    def call():
        made = diffmh.from_draws(f, log_density, draws_like(x))
        # Once admitted, it needs numbers, and here are none.
        with contextlib.suppress(jax.errors.TracerArrayConversionError):
            jax.eval_shape(lambda theta: made.run(theta, *args).value, THETA)
        return ADMITTED

    return verdict(call)


def in_program(program, *args, theta=THETA) -> str:
    """As a program of `sad`."""

    def call():
        gradient = jax.grad(lambda t: jnp.sum(sad.expectation(program)(t, KEY, *args)))
        jax.eval_shape(gradient, theta)
        return ADMITTED

    return verdict(call)
