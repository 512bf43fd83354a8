"""Continuous functions that people use are neither refused nor warned about, wherever they are
examined: those of JAX and of textbooks, and every continuous density of NumPyro, validation on.
"""

import inspect
import itertools

import jax
import numpy as np
import numpyro.distributions as dist
import pytest
from continuous_functions import CONTINUOUS
from doors import (
    ADMITTED,
    THETA,
    in_core_density,
    in_from_draws,
    in_program,
    langevin,
    log_normal,
)
from numpyro_densities import DENSITIES, LEFT_OUT

FUNCTIONS = {**CONTINUOUS, **{f"{name} of NumPyro": made for name, made in DENSITIES.items()}}
# JAX does not go backward through a `while_loop`, as gradients of densities must.
FORWARD = {"while_loop of a fixed count"}
GROUP = 8


def groups():
    """Names of functions of an x of one shape, a few at a time: one program for all of them."""
    shape = lambda name: (np.shape(FUNCTIONS[name][1]), name in FORWARD)
    names = sorted(FUNCTIONS, key=lambda name: str(shape(name)))
    for _, grouped in itertools.groupby(names, shape):
        alike = tuple(grouped)
        yield from (alike[i : i + GROUP] for i in range(0, len(alike), GROUP))


def complaints(names, door):
    """The verdicts of a door on functions, together."""
    x = FUNCTIONS[names[0]][1]

    def f(theta, x):
        return {name: FUNCTIONS[name][0](theta, x) for name in names}

    def log_density(theta, x):
        return log_normal(theta, x) + sum(f(theta, x).values())

    backward = not FORWARD.intersection(names)
    match door:
        case "walk":
            return in_core_density(log_density, x, f=f)
        case "Langevin":
            return in_core_density(log_density if backward else log_normal, x, kernel=langevin, f=f)
        case "from_draws":
            return in_from_draws(x, f=f, log_density=log_density if backward else log_normal)
        case _:

            def program(theta, key):
                draw = jax.random.normal(key, np.shape(x))
                return sum(f(theta, draw).values())

            return in_program(program)


DOORS = ("walk", "Langevin", "from_draws", "sad")


NEWER_JAX = jax.__version_info__ >= (0, 11)
# `ndtri` of newer JAX is not recognised inside of its `custom_jvp`: not proved to be finite.
NOT_FINITE = {"GaussianCopula of NumPyro"} if NEWER_JAX else set()
# The proof that a matrix is L Lᵀ does not go through in newer JAX, where x itself moves.
MATRICES = {
    f"{name} of NumPyro"
    for name in ("InverseWishart", "InverseWishartCholesky", "LKJ", "LKJCholesky", "Wishart")
} | {"WishartCholesky of NumPyro"}


def not_proved(door):
    return NOT_FINITE | (MATRICES if NEWER_JAX and door == "Langevin" else set())


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("names", list(groups()), ids="-".join)
def test_admitted(names, door):
    names = [name for name in names if name not in not_proved(door)]
    if names:
        assert complaints(names, door) == ADMITTED


@pytest.mark.thorough
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_admitted_alone(name, door):
    assert (complaints([name], door) == ADMITTED) == (name not in not_proved(door))


def largest_increments(function, x, direction, refinements=3, points=801):
    """The largest increment of a function along a line, then within the interval where it was."""
    value = jax.jit(jax.vmap(lambda s: function(THETA, x + s * direction)))
    low, high = -3.0, 3.0
    for _ in range(refinements):
        grid = np.linspace(low, high, points)
        values = np.asarray(value(grid))
        assert np.isfinite(values).all()
        steps = np.abs(np.diff(values))
        index = int(np.argmax(steps))
        low, high = grid[index], grid[index + 1]
        yield steps[index]


@pytest.mark.thorough
@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_is_continuous(name):
    """Or the corpus would ask that jumps be admitted."""
    function, x = FUNCTIONS[name]
    with jax.enable_x64(True):
        x = np.asarray(x, np.float64)
        direction = np.linspace(1.0, -0.7, x.size).reshape(x.shape)
        first, *_, last = largest_increments(function, x, direction)
    assert last < 0.01 * first + 1e-6


def test_every_continuous_distribution_of_numpyro_is_there():
    classes = {
        name: value
        for name, value in vars(dist).items()
        if inspect.isclass(value) and issubclass(value, dist.Distribution)
    }
    continuous = {name for name, value in classes.items() if not _is_discrete(value)}
    assert continuous - LEFT_OUT <= set(DENSITIES)


def _is_discrete(distribution) -> bool:
    try:
        return distribution.support.is_discrete
    except (AttributeError, NotImplementedError):
        return False
