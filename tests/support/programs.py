"""Programs that tests share: many problems in one, and what runs longer than it compiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import numpy as np

import diffmh


def optimised(function: Callable) -> Callable:
    """`jax.jit(function)` for what takes seconds to run: `make test` compiles without
    optimisations, which costs less than it saves elsewhere.
    """
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 3})


def derivatives(expectation: diffmh.Expectation, theta, key, *args):
    """The derivative of each chain, by one program: eagerly, each operation around the chains' loop
    is another.
    """
    return jax.jit(jax.jacfwd(expectation.per_chain))(theta, key, *args)


def each(one: Callable, problems: Sequence, seed: int) -> np.ndarray:
    """`one(problem, key)` of every problem, their numbers being arguments of one program.

    One after the other: mapped at once, they would be traced with another axis, and the chains of
    all of them leave the cache.
    """
    keys = jax.random.split(jax.random.key(seed), len(problems))
    single = lambda *leaves: np.stack(leaves).astype(np.float32)
    stacked = jax.tree.map(single, *problems)
    run = lambda *operands: jax.lax.map(lambda operand: one(*operand), operands)
    # Ten problems have run before a compiler would have optimised them.
    compiled = optimised(run) if len(problems) > 10 else jax.jit(run)
    return np.asarray(compiled(stacked, keys))
