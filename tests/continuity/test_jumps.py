"""300 random functions with a jump whose place depends on theta: none is admitted, neither in a
density, nor in an f, in `from_draws` or in a program of `sad`.
"""

import jax
import numpy as np
import pytest
from doors import (
    ADMITTED,
    THETA,
    in_core_density,
    in_core_f,
    in_from_draws,
    in_program,
    log_normal,
)
from random_jumps import COUNT, draw, jumping_functions

FUNCTIONS = jumping_functions()


def doors_passed(number):
    """Where a function is admitted without an error and without a warning."""
    function = FUNCTIONS[number]
    x, args = function.x, function.args

    def log_density(theta, x, *args):
        return log_normal(theta, x) + function(theta, x, *args)

    def program(theta, key, *args):
        return function(theta, draw(key, x, number % 4), *args)

    from_draws = dict(log_density=log_density) if number % 2 else dict(f=function)
    verdicts = {
        "density": in_core_density(log_density, x, *args),
        "f": in_core_f(function, x, *args),
        "from_draws": in_from_draws(x, *args, **from_draws),
        "sad": in_program(program, *args),
    }
    return [name for name, verdict in verdicts.items() if verdict == ADMITTED]


@pytest.mark.parametrize("number", range(COUNT))
def test_no_jump_is_admitted(number):
    assert doors_passed(number) == [], FUNCTIONS[number].name


def wide(data):
    """The data in double precision."""
    kinds = {"f": np.float64, "i": np.int64, "b": np.bool_}
    return tuple(np.asarray(leaf).astype(kinds[np.asarray(leaf).dtype.kind]) for leaf in data)


def crossing(function, theta):
    """A state just before and one just after the place of the jump, along a line that meets it."""
    like, data = np.asarray(function.x, np.float64), wide(function.data)
    direction = np.linspace(1.0, 1.5, like.size).reshape(like.shape)
    z = jax.jit(lambda s: function.place(theta, like + s * direction, *data))
    grid = np.linspace(-2.0, 4.0, 61)
    is_below = [bool(z(s) < 0) for s in grid]
    index = next((i for i in range(60) if is_below[i] != is_below[i + 1]), None)
    assert index is not None, f"{function.name}: its place is not met"
    low, high = grid[index], grid[index + 1]
    while high - low > 1e-12:
        middle = 0.5 * (low + high)
        low, high = (middle, high) if (z(middle) < 0) == is_below[index] else (low, middle)
    return tuple(like + s * direction for s in (low - 1e-9, high + 1e-9)), low


@pytest.mark.thorough
@pytest.mark.parametrize("number", range(COUNT))
def test_every_function_jumps_at_a_place_that_moves(number):
    """Or the corpus would ask for refusals of continuous functions."""
    function = FUNCTIONS[number]
    with jax.enable_x64(True):
        (before, after), place = crossing(function, np.float64(THETA))
        _, moved = crossing(function, np.float64(THETA + 0.01))
        value = jax.jit(lambda x: function.function(np.float64(THETA), x, *wide(function.data)))
        left, right = float(value(before)), float(value(after))
        jump = abs(right - left)
    assert abs(moved - place) > 1e-4, function.name
    assert np.isfinite(jump) and jump > 1e-4 * max(1, abs(left)), (function.name, left, right)
