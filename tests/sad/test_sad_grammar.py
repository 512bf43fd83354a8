"""Programs that Hypothesis makes up, each against an enumeration of its random choices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from oracles import derivative
from sad_grammar import Statement, Traced, exact_mean, programs, run
from sad_runs import QUICK
from unbiasedness import assert_unbiased, is_caught

from diffmh import sad
from diffmh.sad import derivative as one_run
from diffmh.sad import interpreter
from diffmh.sad.derivative import Run
from diffmh.sad.estimators import Runs

THETA = np.array([0.3, -0.4])
RUNS = 4_000
TOGETHER = 10
DEFAULT, ALL = 60, 500


@functools.cache
def sentences():
    """The first programs that Hypothesis makes up, always the same."""
    found = {}

    @settings(
        max_examples=ALL + 50,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(programs)
    def each(program):
        found.setdefault(program)

    each()
    assert len(found) >= ALL
    return list(found)[:ALL]


PIECES = [
    pytest.param(first, marks=[pytest.mark.thorough] if first >= DEFAULT else [])
    for first in range(0, ALL, TOGETHER)
]


@pytest.mark.parametrize("first", PIECES)
def test_random_programs(first):
    """500 programs with `--thorough`, the first 60 of them without: K = 1 and 3 in turn, forward
    and in reverse where JAX goes backward; and every third by the score too. Several are compiled
    together, which takes less than each by itself.
    """
    numbered = list(enumerate(sentences()))[first : first + TOGETHER]
    kinds = [[(1 + 2 * (number % 2), number // 2)] for number, _ in numbered]
    for (number, _), kind in zip(numbered, kinds, strict=True):
        kind.extend([SCORE] if number % 3 == 0 else [])
    found = gradients([program for _, program in numbered], kinds, first)
    for (number, program), by_kind in zip(numbered, found, strict=True):
        exact = derivative(lambda theta, program=program: exact_mean(program, theta), THETA)[1][0]
        for slopes in by_kind:
            assert_unbiased(slopes, exact, f"{number}: {program}")


SCORE = "score"


def gradients(programs, kinds, seed):
    """Of each program and each of its kinds, one for each of many runs. A kind is the number of
    alternatives with the mode, in reverse if that is odd and nothing is in the way; or the score.
    """
    keys = jax.random.split(jax.random.key(seed), RUNS)
    both = list(zip(programs, kinds, strict=True))
    everything = lambda keys: [
        [gradient(program, kind)(keys) for kind in ks] for program, ks in both
    ]
    return jax.jit(everything, compiler_options=QUICK)(keys)


def gradient(program, kind):
    traced = lambda theta, key: run(Traced(key), program, theta)
    theta = jnp.asarray(THETA, jnp.float32)

    def one(key):
        this, (alternatives, mode) = Run(traced, theta, key, (), {}), kind
        if mode % 2 and one_run.trace(this).is_reversible:
            probes = one_run.probes(this, jnp.ones(theta.shape))
            in_reverse = lambda theta: one_run.backward(this.at(theta), alternatives, probes)[0]
            return jax.grad(in_reverse)(theta)
        return one_run.forward(this, alternatives)[1][:, 0]

    if kind != SCORE:
        return jax.vmap(one)
    runs = lambda keys: Runs(Run(traced, theta, keys[0], (), {}), keys, False)
    return lambda keys: sad.Score().find(runs(keys)).jacobian[:, 0].T


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
    ((found,),) = gradients([OUTLIVED], [[(1, 0)]], 1)
    assert is_caught(found, exact) == mistaken
