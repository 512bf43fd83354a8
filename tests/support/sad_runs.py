"""Many independent derivatives of one program, compiled once."""

from __future__ import annotations

import jax
import numpy as np
from jax.flatten_util import ravel_pytree

from diffmh import sad

# Compiling takes longer than running.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def derivatives(program, theta, num_runs: int, seed: int = 0, alternatives: int = 1) -> np.ndarray:
    """Shape (runs, outputs, parameters)."""

    def one(key):
        flat, unravel = ravel_pytree(theta)
        function = sad.expectation(
            lambda flat, key: ravel_pytree(program(unravel(flat), key))[0],
            alternatives=alternatives,
        )
        return jax.jacfwd(function)(flat, key)

    return np.asarray(
        jax.jit(jax.vmap(one), compiler_options=QUICK)(
            jax.random.split(jax.random.key(seed), num_runs)
        )
    )
