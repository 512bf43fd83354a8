"""Programs that Hypothesis makes up, each against an enumeration of its random choices."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import HealthCheck, given, settings
from oracles import derivative
from sad_grammar import Traced, exact_mean, programs, run
from sad_runs import QUICK
from statistics_ import assert_unbiased

from diffmh import sad

THETA = np.array([0.3, -0.4])
RUNS = 4_000
seen = set()


@settings(max_examples=64, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(programs)
def test_random_programs(program):
    if program in seen:
        return
    seen.add(program)
    traced = sad.expectation(lambda theta, key: run(Traced(key), program, theta), alternatives=1 + len(seen) % 2)
    found = jax.jit(jax.vmap(jax.grad(traced), (None, 0)), compiler_options=QUICK)(
        jnp.asarray(THETA, jnp.float32), jax.random.split(jax.random.key(len(seen)), RUNS)
    )
    assert_unbiased(found, derivative(lambda theta: exact_mean(program, theta), THETA)[1][0], str(program))


def test_there_were_enough():
    assert len(seen) >= 60
