"""One run of a program and three ways to differentiate it: forward, with a tangent for each
parameter; in reverse, by JAX, where the alternatives' weights enter as zeros whose derivative is
the weight; and with the draws held fixed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, PyTree

from . import conditionals as conditionals
from . import control_flow as control_flow
from . import ranges
from . import rules as rules
from .baseline import Baseline
from .interpreter import evaluate
from .plan import MOST_TANGENTS as MOST_TANGENTS
from .plan import Run as Run
from .score_pass import replay
from .score_pass import smoothed as smooth
from .values import Value, no_alternatives

# Pruning uses the program's key folded with this number, which no split of the key yields.
_PRUNE = 0x7072756E
# The number of directions along which the reverse mode measures weights. Fewer than 2 would give
# heavy tails.
NUM_PROBES = 4


def _evaluate(
    run: Run, num_slots: int, directions: Float[Array, "D P"], reverse: bool
) -> tuple[Value, Bool[Array, ""], Bool[Array, ""]]:
    """The result with a tangent along each direction, by alternatives; True if all draws were in
    range; and True if one of them has no score.
    """
    analysed = run.plan.by_jax if reverse else run.plan.by_rules
    # Inputs are the parameters, with tangents, followed by everything else, without.
    _, unravel = ravel_pytree(run.theta)
    tangents = jax.vmap(lambda direction: jax.tree.leaves(unravel(direction)))(directions)
    leaves = run.leaves
    inputs = [
        *map(Value, leaves[: len(tangents)], tangents),
        *map(Value, leaves[len(tangents) :]),
    ]
    world = no_alternatives(
        num_slots,
        directions.shape[0],
        directions.dtype,
        jax.random.fold_in(run.key, _PRUNE),
        analysed.analysis.num_uniforms(analysed.program),
        reverse,
    )
    world, (result, valid) = evaluate(
        analysed.analysis, analysed.program, world, inputs, [True, False]
    )
    return result, valid.primal, world.lanes.scoreless


def forward(
    run: Run, num_slots: int
) -> tuple[Float[Array, "F"], Float[Array, "P F"], Bool[Array, ""]]:
    """The value, an unbiased estimate of the derivative of its expectation, and True if a draw has
    no score.
    """
    flat = ravel_pytree(run.theta)[0]
    directions = jnp.eye(flat.size, dtype=flat.dtype)
    result, valid, scoreless = _evaluate(run, num_slots, directions, False)
    tangents = result.tangents(flat.size, flat.dtype)
    value, slope = (ranges.nan_unless(valid, run.theta, part) for part in (result.primal, tangents))
    return value, slope, scoreless


def probes(run: Run, scale: Float[Array, "P"]) -> Float[Array, "D P"]:
    """Random directions along which the reverse mode measures weights, each parameter in units of
    its `scale`. They are independent of the requested direction and of the pruning, so all
    replicates may share them.
    """
    flat = ravel_pytree(run.theta)[0]
    key = jax.random.fold_in(run.key, _PRUNE + 1)
    shape = (min(NUM_PROBES, flat.size), flat.size)
    # Any directions are unbiased, since they only decide what is pruned. In units of the scores, no
    # parameter's weights dominate. A parameter without a score gets the scale of the others.
    known = jnp.isfinite(scale) & (scale > 0)
    usual = jnp.mean(jnp.where(known, scale, 0.0)) / jnp.maximum(jnp.mean(known), 1 / flat.size)
    unit = jnp.where(known, scale, jnp.where(usual > 0, usual, 1.0))
    return jax.random.normal(key, shape, flat.dtype) / jax.lax.stop_gradient(unit)


def backward(
    run: Run, num_slots: int, directions: Float[Array, "D P"]
) -> tuple[Float[Array, "F"], Bool[Array, ""]]:
    """The value, from which JAX derives an unbiased estimate of the derivative of its mean, and
    True if a draw has no score.
    """
    result, valid, scoreless = _evaluate(run, num_slots, directions, True)
    return ranges.nan_unless(valid, run.theta, result.primal), scoreless


class Scored(eqx.Module):
    """The program's result with its draws held fixed, the credit of the result, and the log
    probability of the draws. The credit is a sum over the terms of the result, whose derivative is
    each term, less its baseline, times the score of the draws before it; only this derivative is
    used.
    """

    value: Float[Array, "F"]
    credit: Float[Array, "F"]
    log_prob: Float[Array, ""]


def scored(run: Run, baseline: Baseline) -> Scored:
    """The derivative of `value + credit` is an unbiased estimate; the derivative of `log_prob` has
    mean zero.
    """
    analysed, anchor = run.plan.by_jax, jax.random.key_data(run.key)

    def of_others(value):
        return baseline(value, anchor)

    (value, valid), (credit, _), log_prob = replay(
        analysed.terms, analysed.program, run.leaves, of_others
    )
    parts = value, credit, log_prob
    return Scored(*(ranges.nan_unless(valid, run.theta, part) for part in parts))


def smoothed(run: Run) -> Float[Array, "F"]:
    """The value, where the derivative of each draw is taken to be that of its mean."""
    analysed = run.plan.by_jax
    result, valid = smooth(analysed.analysis, analysed.program, run.leaves)
    return ranges.nan_unless(valid, run.theta, result)


def jacobian(
    function: Callable[[PyTree], tuple[Float[Array, "N"], Any]], theta: PyTree, reverse: bool
) -> tuple[Any, Float[Array, "P N"]]:
    """Split the result of `function`, a vector and something else, into the latter and the
    derivative of the vector by JAX.
    """
    flat, unravel = ravel_pytree(theta)
    of_flat = lambda flat: function(unravel(flat))
    if reverse:
        vector, pull, other = jax.vjp(of_flat, flat, has_aux=True)
        rows = [pull(row)[0] for row in jnp.eye(vector.size, dtype=vector.dtype)]
        return other, jnp.stack(rows, axis=1)
    along = lambda direction: jax.jvp(of_flat, (flat,), (direction,), has_aux=True)[1:]
    slopes, other = jax.vmap(along, out_axes=(0, None))(jnp.eye(flat.size, dtype=flat.dtype))
    return other, slopes
