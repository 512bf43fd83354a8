"""For each kernel of the table of tools a small problem, and the equilibrium's answers in closed
form: the log normaliser and the mean of f as functions of θ that JAX differentiates to any order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from problems import (
    BETAS,
    PROPOSAL,
    SCALE,
    V0,
    V1,
    Tables,
    _closed,
    discrete_density,
    discrete_f_of_theta,
    discrete_tables,
    normal_density,
    normal_f_of_theta,
    normal_tables,
    of_first,
    softmax_rows,
)

import diffmh

STAGES = 2


class ToolProblem(NamedTuple):
    """`density` and `f` look at what the kernel moves, `bare` and `bare_f` at the one of several
    replicas that `state` takes from a draw. `start` is a state, and `draw(key)` one of the
    equilibrium at theta. `tables` are the arguments, or `None` if they are closed over.
    """

    theta: np.ndarray
    tables: Tables | None
    kernel: diffmh.extend.Kernel
    start: Any
    draw: Callable[[Any], Any]
    density: Callable[..., Any]
    f: Callable[..., Any]
    bare: Callable[..., Any]
    bare_f: Callable[..., Any]
    state: Callable[[Any], Any]
    log_normaliser: Callable[[Any], Any]
    mean: Callable[[Any], Any]


def tool_problem(kernel: str, parameters: int, in_args: bool) -> ToolProblem:
    make = _walk if kernel == "walk" else _labels
    return make(kernel, parameters, in_args)


def _walk(kernel: str, parameters: int, in_args: bool) -> ToolProblem:
    theta, tables = normal_tables(parameters, False)
    own = lambda function: function if in_args else _closed(function, "normal", parameters, False)
    density, f = own(normal_density), own(normal_f_of_theta)

    def moments(theta):
        return jnp.asarray(tables["mean"]) @ theta, jnp.asarray(tables["log_precision"]) @ theta

    def mean(theta):
        m, log_precision = moments(theta)
        v, shrunk = jnp.exp(-log_precision), jnp.exp(-0.5 * jnp.exp(-log_precision))
        first = jnp.stack([m, jnp.cos(m) * shrunk])
        return first + theta[0] * jnp.stack([0.5 * (m**2 + v), jnp.sin(m) * shrunk])

    def draw(key):
        m, log_precision = moments(jnp.asarray(theta))
        return m + jnp.exp(-0.5 * log_precision) * jax.random.normal(key)

    return ToolProblem(
        theta,
        tables if in_args else None,
        diffmh.MetropolisHastings(density, diffmh.GaussianWalk(SCALE)),
        1.5,
        draw,
        density,
        f,
        density,
        f,
        lambda x: x,
        lambda theta: -0.5 * moments(theta)[1],
        mean,
    )


def _labels(kernel: str, parameters: int, in_args: bool) -> ToolProblem:
    theta, tables = discrete_tables(parameters, False)
    own = lambda function: function if in_args else _closed(function, "discrete", parameters, False)
    density, f = own(discrete_density), own(discrete_f_of_theta)
    # Labels alone move: the units stay 0.
    here = np.flatnonzero((V0 == 0) & (V1 == 0))

    table = {name: array[here] for name, array in tables.items() if len(array) == 12}

    def log_g(theta):
        return table["base"] + table["slope"] @ theta

    def mean(theta):
        return jax.nn.softmax(log_g(theta)) @ (table["values"] + theta[0] * table["slopes"])

    def metropolis(density, stage=0):
        rows = jnp.asarray(softmax_rows(PROPOSAL, None, False, np), jnp.float32)
        # Two proposals for the stages of a schedule that has one density.
        proposal = diffmh.TransitionMatrix(jnp.stack([rows, rows[::-1, ::-1]])[stage])
        return diffmh.MetropolisHastings(density, diffmh.On(lambda x: x["h"], proposal))

    def heated(beta):
        return metropolis(lambda theta, x, *args: beta * density(theta, x, *args))

    kernels = {
        "labels": lambda: metropolis(density),
        "schedule": lambda: diffmh.Schedule(functools.partial(metropolis, density), STAGES, 2),
        "annealing": lambda: diffmh.Schedule(
            lambda stage: heated(jnp.asarray(BETAS, jnp.float32)[stage]), len(BETAS), 2
        ),
        "tempering": lambda: diffmh.Tempering(heated, BETAS.astype(np.float32)),
    }
    made, tempering = kernels[kernel](), kernel == "tempering"
    betas = BETAS if tempering else (1.0,)

    def state_of(h):
        """Of one replica, or of all."""
        h = jnp.asarray(h if tempering else h[0], jnp.int32)
        return {"v": jnp.zeros((*h.shape, 2), jnp.int32), "h": h}

    # JAX makes an array of a NumPy array that a function closes over once, whatever the precision
    # is later: a number of its own for draws.
    log_p = log_g(theta).astype(np.float32)

    def draw(key):
        keys = jax.random.split(key, len(betas))
        each = zip(keys, betas, strict=True)
        labels = [jax.random.categorical(key, np.float32(beta) * log_p) for key, beta in each]
        return state_of(jnp.stack(labels))

    return ToolProblem(
        theta,
        tables if in_args else None,
        made,
        jax.tree.map(np.asarray, state_of(np.zeros(len(betas), int))),
        draw,
        made.density if tempering else density,
        of_first(f) if tempering else f,
        density,
        f,
        (lambda x: jax.tree.map(lambda leaf: leaf[0], x)) if tempering else (lambda x: x),
        # Of all replicas together.
        lambda theta: sum(jax.nn.logsumexp(beta * log_g(theta)) for beta in betas),
        mean,
    )
