"""One run of a program, and three ways to differentiate it: forward, with a tangent for each
parameter; in reverse, by JAX, with the alternatives' weights as zeros that have a derivative; and
with its draws held fixed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Key, PyTree

from .. import _trees, _validate
from .._lowering import compat
from .._lowering.program import Equation, Program, While
from .._validate import NotDifferentiable
from . import control_flow as control_flow
from . import primitives, ranges
from . import rules as rules
from .analysis import Analysis, analyse
from .baseline import Baseline
from .hoist import hoisted, lifted
from .interpreter import evaluate
from .keys import refuse_shared
from .refusals import refuse
from .replay import replay
from .replay import smoothed as smooth
from .values import Value, no_alternatives

# Pruning draws from the program's key folded with this number, which no split of it reaches.
_PRUNE = 0x7072756E
# Directions along which weights are known in the reverse mode: fewer than 2 would make heavy tails.
NUM_PROBES = 4
# With more parameters than this a tangent for each costs more than a run backward.
MOST_TANGENTS = 16


class Run(eqx.Module):
    """A program with its arguments: `program(theta, key, *args, **options)`."""

    program: Callable[..., PyTree]
    theta: PyTree
    key: Key[Array, ""]
    args: tuple[Any, ...]
    options: dict[str, Any]

    def at(self, theta: PyTree, key: Any = None) -> Run:
        """The same with other parameters, and another key if given."""
        key = self.key if key is None else key
        return dataclasses.replace(self, theta=theta, key=key)

    def value(self) -> Float[Array, "F"]:
        """The result as one vector of floats, NaN if a draw was out of range."""
        program, parameters, rest = _program(self, acts=True)
        vector, valid = ranges.run(ranges.checked(program), [*parameters, *rest])
        return ranges.nan_unless(valid, self.theta, vector)

    def result(self) -> Float[Array, "F"]:
        """What the program returns, as one vector of floats."""
        result = self.program(self.theta, self.key, *self.args, **self.options)
        return ravel_pytree(jax.tree.map(_as_float, _trees.strong(result)))[0]

    def unflatten(self) -> Callable[[Any], PyTree]:
        """How to put the vector into the result's own form again, whole numbers as floats."""
        arrays, rest = eqx.partition(self, eqx.is_array)

        def result(arrays):
            run = eqx.combine(arrays, rest)
            return _trees.strong(run.program(run.theta, run.key, *run.args, **run.options))

        shape = jax.eval_shape(result, compat.forms(arrays))
        if not jax.tree.leaves(shape):
            raise TypeError(f"`program` must return numbers, got {shape!r}.")
        for leaf in jax.tree.leaves(shape):
            if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
                _validate.real_dtype(leaf.dtype, "what `program` returns")
        zeros = lambda leaf: _as_float(jnp.zeros(leaf.shape, leaf.dtype))
        return ravel_pytree(jax.tree.map(zeros, shape))[1]


def _as_float(leaf: Array) -> Array:
    return leaf if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf.astype(float)


class Traced(eqx.Module):
    """A run as a program of its parameters and the rest, and what is known of it. Its outputs are
    the result and whether all draws were in range.
    """

    program: Program = eqx.field(static=True)
    analysis: Analysis = eqx.field(static=True)
    parameters: list[Array]
    rest: list[Array]

    @property
    def is_reversible(self) -> bool:
        """Whether JAX can differentiate it backward: not through a `while_loop`."""
        return not _has_while(self.analysis, self.program)


def trace(run: Run, any_primitive: bool = False) -> Traced:
    """Refuses what would make the derivative wrong. With `any_primitive` only JAX must know how to
    differentiate it.
    """
    program, parameters, rest = _program(run)
    analysis = analyse(program, program.inputs[: len(parameters)])
    refuse(analysis, program, any_primitive)
    refuse_shared(analysis, program)
    program = ranges.checked(program)
    program = lifted(program, lambda equation: equation.inputs[0] in analysis.branched)
    analysis = analyse(program, program.inputs[: len(parameters)])
    program = hoisted(program)
    return Traced(program, analysis, parameters, [jnp.asarray(leaf) for leaf in rest])


def _program(run: Run, acts: bool = False) -> tuple[Program, list[Any], list[Any]]:
    """The program, a function of parameters and of what else it is given; with `acts`, whatever it
    prints too.
    """
    parameters, structure = jax.tree.flatten(run.theta)
    others, static = eqx.partition((run.key, run.args, run.options), eqx.is_array)
    rest, rest_structure = jax.tree.flatten(others)

    def flat(*leaves):
        theta = jax.tree.unflatten(structure, leaves[: len(parameters)])
        given = eqx.combine(jax.tree.unflatten(rest_structure, leaves[len(parameters) :]), static)
        return Run(run.program, theta, *given).result()

    return compat.program(flat, *parameters, *rest, acts=acts)[0], parameters, rest


def _has_while(analysis: Analysis, program: Program) -> bool:
    return any(
        analysis.concerns(equation)
        and (
            isinstance(equation.control, While)
            or any(_has_while(analysis, inner) for inner in equation.inner)
        )
        for equation in program.equations
    )


def only_backward(run: Run) -> bool:
    """Whether a step of the program is left to JAX, and that can go backward."""
    program, _, _ = _program(run)
    if not _leaves_to_jax(program):
        return False
    try:
        traced = trace(run, True)
    except NotDifferentiable:
        return False  # Said when a derivative is asked for.
    return traced.is_reversible and _leaves_to_jax(traced.program, traced.analysis.concerns)


def _leaves_to_jax(
    program: Program, concerns: Callable[[Equation], bool] = lambda equation: True
) -> bool:
    return any(
        concerns(equation)
        and (
            primitives.is_left_to_jax(equation.primitive)
            or any(_leaves_to_jax(inner, concerns) for inner in equation.inner)
        )
        for equation in program.equations
    )


def num_parameters(theta: PyTree) -> int:
    return sum(jnp.size(leaf) for leaf in jax.tree.leaves(theta))


def _evaluate(
    run: Run, num_slots: int, directions: Float[Array, "D P"], reverse: bool
) -> tuple[Value, Bool[Array, ""]]:
    """The result with a tangent along each direction, by alternatives; and whether all draws were
    in range.
    """
    traced = trace(run, reverse)
    _, unravel = ravel_pytree(run.theta)
    tangents = jax.vmap(lambda direction: jax.tree.leaves(unravel(direction)))(directions)
    inputs = [
        *(Value(leaf, slope) for leaf, slope in zip(traced.parameters, tangents, strict=True)),
        *(Value(leaf) for leaf in traced.rest),
    ]
    world = no_alternatives(
        num_slots,
        directions.shape[0],
        directions.dtype,
        jax.random.fold_in(run.key, _PRUNE),
        traced.analysis.num_uniforms(traced.program),
        reverse,
    )
    _, (result, valid) = evaluate(traced.analysis, traced.program, world, inputs, [True, False])
    return result, valid.primal


def forward(run: Run, num_slots: int) -> tuple[Float[Array, "F"], Float[Array, "P F"]]:
    """The value, and an unbiased estimate of the derivative of its expectation."""
    flat = ravel_pytree(run.theta)[0]
    result, valid = _evaluate(run, num_slots, jnp.eye(flat.size, dtype=flat.dtype), False)
    tangents = result.tangents(flat.size, flat.dtype)
    value, slope = (ranges.nan_unless(valid, run.theta, part) for part in (result.primal, tangents))
    return value, slope


def probes(run: Run, scale: Float[Array, "P"]) -> Float[Array, "D P"]:
    """Random directions along which weights are measured in the reverse mode, each parameter in
    units of its `scale`. They have nothing to do with the one that is asked for, nor with what
    prunes: all replicates may share them.
    """
    flat = ravel_pytree(run.theta)[0]
    key = jax.random.fold_in(run.key, _PRUNE + 1)
    shape = (min(NUM_PROBES, flat.size), flat.size)
    # Of a parameter without a score nothing is known: it counts like the others.
    known = jnp.isfinite(scale) & (scale > 0)
    usual = jnp.mean(jnp.where(known, scale, 0.0)) / jnp.maximum(jnp.mean(known), 1 / flat.size)
    unit = jnp.where(known, scale, jnp.where(usual > 0, usual, 1.0))
    return jax.random.normal(key, shape, flat.dtype) / jax.lax.stop_gradient(unit)


def backward(run: Run, num_slots: int, directions: Float[Array, "D P"]) -> Float[Array, "F"]:
    """The value, whose derivative by JAX is an unbiased estimate of that of its expectation."""
    result, valid = _evaluate(run, num_slots, directions, True)
    return ranges.nan_unless(valid, run.theta, result.primal)


class Scored(eqx.Module):
    """The value with its draws held fixed, what it is credited with (of which only the derivative
    counts), and the log probability of the draws.
    """

    value: Float[Array, "F"]
    credit: Float[Array, "F"]
    log_prob: Float[Array, ""]


def scored(run: Run, baseline: Baseline) -> Scored:
    """The derivative of `value + credit` is an unbiased estimate, and that of `log_prob` has mean
    zero.
    """
    traced = trace(run, True)
    inputs: Sequence[Any] = [*traced.parameters, *traced.rest]
    anchor = jax.random.key_data(run.key)
    of_others = lambda value: baseline(value, anchor)
    replayed = replay(traced.analysis, traced.program, inputs, of_others)
    value, valid = replayed.outputs
    parts = value, replayed.credits[0], replayed.log_prob
    return Scored(*(ranges.nan_unless(valid, run.theta, part) for part in parts))


def smoothed(run: Run) -> Float[Array, "F"]:
    """The value, whose draws pass on the derivative of their mean."""
    traced = trace(run, True)
    inputs: Sequence[Any] = [*traced.parameters, *traced.rest]
    result, valid = smooth(traced.analysis, traced.program, inputs)
    return ranges.nan_unless(valid, run.theta, result)


def jacobian(
    function: Callable[[PyTree], tuple[Float[Array, "N"], Any]], theta: PyTree, reverse: bool
) -> tuple[Any, Float[Array, "P N"]]:
    """Of a function that returns a vector and something else: that, and the vector's derivative by
    JAX.
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
