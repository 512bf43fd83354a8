"""Inside `jax.shard_map`, the type of a value has the axes of the mesh over which it varies.

JAX requires both sides of a loop or a branch to vary over the same axes. It rejects a loop that
starts from zeros and sums values that differ between devices. Declaring that a value varies is
always valid, so here all values vary over the axes of any of a function's arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import equinox as eqx
import jax
from jaxtyping import Array, PyTree

from ..jaxprs import compat
from ..jaxprs.program import Cond, Constant, Equation, Program, Scan, While

Function = TypeVar("Function", bound=Callable[..., PyTree])


def varying(function: Function) -> Function:
    """The same function. Under `jax.shard_map` everything that it computes, including loops and
    constants, varies over the axes that any of its arguments varies over.
    """

    @functools.wraps(function)
    def mapped(*arguments, **keywords):
        if not compat.inside_shard_map():
            return function(*arguments, **keywords)
        arrays, rest = eqx.partition((arguments, keywords), eqx.is_array)
        leaves, structure = jax.tree.flatten(arrays)
        axes = compat.varies_over(leaves)
        if not axes:
            return function(*arguments, **keywords)

        def flat(*leaves):
            arguments, keywords = eqx.combine(structure.unflatten(leaves), rest)
            results = function(*arguments, **keywords)
            static.append(eqx.filter(results, eqx.is_array, inverse=True))
            return eqx.filter(results, eqx.is_array)

        # Objects that are not arrays do not pass through a program; they are put back at the end.
        static: list[PyTree] = []
        program, form = compat.program(flat, *compat.forms(leaves), differentiated=False)
        results = _run(program, axes, [compat.vary(leaf, axes) for leaf in leaves])
        return eqx.combine(jax.tree.structure(form).unflatten(results), static[0])

    return mapped  # pyright: ignore


def _run(program: Program, axes: frozenset[str], inputs: Sequence[Array]) -> list[Array]:
    values = dict(zip(program.inputs, inputs, strict=True))

    def read(atom):
        return compat.vary(atom.value, axes) if isinstance(atom, Constant) else values[atom]

    for equation in program.equations:
        outputs = _apply(equation, axes, [read(atom) for atom in equation.inputs])
        # After each equation, so that by induction both sides of every loop and branch agree.
        varied = [compat.vary(output, axes) for output in outputs]
        values.update(zip(equation.outputs, varied, strict=True))
    return [read(atom) for atom in program.outputs]


def _apply(equation: Equation, axes: frozenset[str], operands: list[Array]) -> Sequence[Array]:
    match equation.control:
        case Scan() as loop:
            return _scan(loop, axes, operands)
        case While() as loop:
            return _while(loop, axes, operands)
        case Cond(branches):
            index, *rest = operands
            runs = [_running(branch, axes) for branch in branches]
            return jax.lax.switch(index, runs, *rest)
        case _ if compat.only_says_that_it_varies(equation):
            return operands
        case _:
            return equation.bind(*operands)


def _running(program: Program, axes: frozenset[str]) -> Callable[..., Any]:
    return lambda *inputs: _run(program, axes, inputs)


def _scan(loop: Scan, axes: frozenset[str], operands: list[Array]) -> Sequence[Array]:
    edge = loop.num_constants + loop.num_carry
    constants, carry = operands[: loop.num_constants], operands[loop.num_constants : edge]
    xs = operands[edge:]

    def step(carry, xs):
        results = _run(loop.body, axes, [*constants, *carry, *xs])
        return results[: loop.num_carry], results[loop.num_carry :]

    carry, ys = jax.lax.scan(step, carry, xs, loop.length, loop.reverse)
    return [*carry, *ys]


def _while(loop: While, axes: frozenset[str], operands: list[Array]) -> Sequence[Array]:
    edge = loop.num_condition_constants + loop.num_body_constants
    for_condition = operands[: loop.num_condition_constants]
    for_body = operands[loop.num_condition_constants : edge]

    def condition(carry):
        return _run(loop.condition, axes, [*for_condition, *carry])[0]

    def body(carry):
        return _run(loop.body, axes, [*for_body, *carry])

    return jax.lax.while_loop(condition, body, operands[edge:])
