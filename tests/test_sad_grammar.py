"""Programs that Hypothesis makes up, each against an enumeration of its random choices."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import HealthCheck, given, settings
from oracles import derivative
from sad_grammar import Traced, exact_mean, programs, run
from sad_runs import QUICK
from unbiasedness import assert_unbiased

from diffmh import sad

THETA = np.array([0.3, -0.4])
RUNS = 4_000


def test_random_programs(request):
    """64 programs with `--thorough`, the first 24 of them without."""
    seen, most = set(), 64 if request.config.getoption("--thorough") else 24

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
            compare(program, jax.random.key(len(seen)), alternatives=1 + len(seen) % 2)

    each()
    assert len(seen) >= 0.9 * most


def compare(program, key, alternatives):
    traced = sad.expectation(
        lambda theta, key: run(Traced(key), program, theta), alternatives=alternatives
    )
    gradient = jax.jit(jax.vmap(jax.grad(traced), (None, 0)), compiler_options=QUICK)
    found = gradient(jnp.asarray(THETA, jnp.float32), jax.random.split(key, RUNS))
    assert_unbiased(
        found, derivative(lambda theta: exact_mean(program, theta), THETA)[1][0], str(program)
    )
