"""Programs that Hypothesis makes up, each against an enumeration of its random choices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from oracles import derivative
from sad_grammar import Statement, Traced, exact_mean, programs, run
from sad_runs import QUICK
from unbiasedness import assert_unbiased, is_caught

from diffmh.sad import derivative as one_run
from diffmh.sad import interpreter
from diffmh.sad.derivative import Run

THETA = np.array([0.3, -0.4])
RUNS = 4_000


def test_random_programs(request):
    """500 programs with `--thorough`, the first 60 of them without: K = 1 and 3 in turn, forward
    and in reverse where JAX goes backward.
    """
    seen, most = set(), 500 if request.config.getoption("--thorough") else 60

    @settings(
        max_examples=most,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(programs)
    def each(program):
        if program not in seen:
            seen.add(program)
            number = len(seen)
            exact = derivative(lambda theta: exact_mean(program, theta), THETA)[1][0]
            found = gradients(program, number, alternatives=1 + 2 * (number % 2), mode=number // 2)
            assert_unbiased(found, exact, f"{number}: {program}")

    each()
    assert len(seen) >= 0.9 * most


def gradients(program, seed, alternatives, mode):
    """One for each of many runs; in reverse for odd `mode`, if nothing is in the way."""
    traced = lambda theta, key: run(Traced(key), program, theta)

    def one(key):
        this = Run(traced, jnp.asarray(THETA, jnp.float32), key, (), {})
        if mode % 2 and one_run.trace(this).is_reversible:
            in_reverse = lambda theta: one_run.backward(this.at(theta), alternatives)[0]
            return jax.grad(in_reverse)(this.theta)
        return one_run.forward(this, alternatives)[1][:, 0]

    keys = jax.random.split(jax.random.key(seed), RUNS)
    return np.asarray(jax.jit(jax.vmap(one), compiler_options=QUICK)(keys))


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
    found = gradients(OUTLIVED, 1, alternatives=1, mode=0)
    assert is_caught(found, exact) == mistaken
