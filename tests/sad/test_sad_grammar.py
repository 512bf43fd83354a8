"""Random programs, each with a row of a covering array of options, against an enumeration of its
random choices: what it is built of, the estimator, how many parameters there are, how it is
called, and where its data come from.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import Table, covering_array
from oracles import derivative
from sad_grammar import (
    BLOCKS,
    DATA,
    NESTED,
    RESULTS,
    Statement,
    Traced,
    exact_mean,
    run,
    sentence,
)
from sad_runs import QUICK
from unbiasedness import Z, assert_unbiased, is_caught

from diffmh import sad
from diffmh.sad import derivative as one_run
from diffmh.sad import interpreter
from diffmh.sad.derivative import Run

THETA = np.array([0.3, -0.4])
RUNS, GROUPS = 2_048, 64
FACTORS: dict[str, list[Any]] = {
    "block": list(BLOCKS),
    "result": RESULTS,
    "estimator": [sad.Alternatives(), sad.Alternatives(3), sad.Score(), sad.Combined()],
    "parameters": [1, 17, 40],
    "call": ["vmap", "per_chain", "run", "call"],
    "data": ["args", "closure"],
}


DEFAULT = covering_array(Table(FACTORS)).rows
ALL = 500


@functools.cache
def rows():
    """Options, always the same: those of the default have all pairs, and so do the next, with
    blocks within blocks; the others are drawn.
    """
    more = FACTORS | {"block": [*BLOCKS, *NESTED]}
    random = np.random.default_rng(1)
    draw = lambda: {name: levels[random.integers(len(levels))] for name, levels in more.items()}
    pairs = [*DEFAULT, *covering_array(Table(more)).rows]
    return [*pairs, *(draw() for _ in range(ALL - len(pairs)))]


@functools.cache
def mixing(count):
    """A matrix that makes the two parameters of a program of many, and those many."""
    if count == 1:
        return THETA[:, None] / THETA[0], THETA[:1]
    matrix = np.random.default_rng(count).normal(size=(2, count))
    return matrix, np.linalg.pinv(matrix) @ THETA


CASES = [
    pytest.param(number, marks=[pytest.mark.thorough] if number >= len(DEFAULT) else [])
    for number in range(ALL)
]


@pytest.mark.parametrize("number", CASES)
def test_random_programs(number):
    row = rows()[number]
    text = sentence(np.random.default_rng(number), row["block"], row["result"])
    matrix, theta = mixing(row["parameters"])
    mean, slope = derivative(lambda theta: exact_mean(text, theta), THETA)
    exact = Exact(mean[0], slope[0] @ matrix)

    def program(theta, key, *data):
        return run(Traced(key, data or DATA), text, jnp.asarray(matrix, jnp.float32) @ theta)

    data = tuple(jnp.asarray(part, jnp.float32) for part in DATA) if row["data"] == "args" else ()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the program has a `while_loop`", UserWarning)
        CALLS[row["call"]](
            functools.partial(sad.expectation, program, estimator=row["estimator"]),
            (jnp.asarray(theta, jnp.float32), jax.random.key(number), *data),
            exact,
            f"{number}: {row}, {text}",
        )


class Exact:
    """A value and its gradient."""

    def __init__(self, value, gradient):
        self.value, self.gradient = value, gradient


def by_vmap(made, arguments, exact, what):
    """Calls of one run each."""
    theta, key, *data = arguments
    one = lambda key: jax.value_and_grad(made())(theta, key, *data)
    keys = jax.random.split(key, RUNS)
    value, gradient = jax.jit(jax.vmap(one), compiler_options=QUICK)(keys)
    assert_unbiased(value, exact.value, what)
    assert_unbiased(gradient, exact.gradient, what)


def by_call(made, arguments, exact, what):
    """Calls of several runs each."""
    theta, key, *data = arguments
    one = lambda key: jax.value_and_grad(made(num_replicates=RUNS // GROUPS))(theta, key, *data)
    keys = jax.random.split(key, GROUPS)
    for found, wanted in zip(
        jax.jit(jax.vmap(one), compiler_options=QUICK)(keys),
        (exact.value, exact.gradient),
        strict=True,
    ):
        error = np.std(found, axis=0, ddof=1) / GROUPS**0.5
        assert_near(np.mean(found, axis=0), error, wanted, what)


def per_chain(made, arguments, exact, what):
    """Backward, the means of groups of replicates."""
    theta, *given = arguments
    call = made(num_replicates=RUNS)

    def groups(theta):
        value, pull = jax.vjp(lambda theta: call.per_chain(theta, *given), theta)
        means = jnp.repeat(jnp.eye(GROUPS), RUNS // GROUPS, axis=1) * GROUPS / RUNS
        return value, jax.vmap(lambda row: pull(row)[0])(means)

    value, gradient = jax.jit(groups, compiler_options=QUICK)(theta)
    assert_unbiased(value, exact.value, what)
    error = np.std(gradient, axis=0, ddof=1) / GROUPS**0.5
    assert_near(np.mean(gradient, axis=0), error, exact.gradient, what)


def by_run(made, arguments, exact, what):
    report = made(num_replicates=RUNS).run(*arguments)
    assert_near(report.value, report.value_error, exact.value, what)
    assert_near(report.gradient, report.gradient_error, exact.gradient, what)


def assert_near(found, error, exact, what):
    off = np.abs(np.asarray(found, float) - exact)
    near = off < Z * np.asarray(error) + 1e-5 * (0.1 + np.abs(exact))
    assert np.all(near), f"{what}: {found} ± {error}, exact {exact}"


CALLS = {"vmap": by_vmap, "per_chain": per_chain, "run": by_run, "call": by_call}


OUTLIVED = (
    Statement("poisson", (0, 0, 0, 0)),
    Statement("countdown", (1, 1, 1, 1)),
    Statement("smooth", (1, 1, 2, 0)),
)


@pytest.mark.parametrize("mistaken", [False, True])
def test_the_grammar_finds_loops_that_drop_what_lives(monkeypatch, mistaken):
    """A sentence of this grammar finds the mistake that lived while it had no loops without draws:
    not to pin what outlives them.
    """
    if mistaken:
        monkeypatch.setattr(interpreter, "pin", lambda world, values: world)
    exact = derivative(lambda theta: exact_mean(OUTLIVED, theta), THETA)[1][0]
    traced = lambda theta, key: run(Traced(key), OUTLIVED, theta)
    theta = jnp.asarray(THETA, jnp.float32)
    one = lambda key: one_run.forward(Run(traced, theta, key, (), {}), 1)[1][:, 0]
    keys = jax.random.split(jax.random.key(1), 4_000)
    found = jax.jit(jax.vmap(one), compiler_options=QUICK)(keys)
    assert is_caught(found, exact) == mistaken
