"""Inside `jax.shard_map`, the type of a value has the axes of the mesh over which it varies.

JAX requires both sides of a loop or a branch to vary over the same axes. It rejects a loop that
starts from zeros and sums values that differ between devices. Declaring that a value varies is
always valid, so here all values vary over the axes of any of a function's arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import equinox as eqx
import jax
from jaxtyping import Array, PyTree

from ..jaxprs import compat
from ..jaxprs.program import Equation, Program

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
        results = _run(axes, program, [compat.vary(leaf, axes) for leaf in leaves])
        return eqx.combine(jax.tree.structure(form).unflatten(results), static[0])

    return mapped  # pyright: ignore


def _run(axes: frozenset[str], program: Program, inputs: Sequence[Array]) -> list[Array]:
    vary = functools.partial(compat.vary, axes=axes)

    def apply(equation: Equation, operands: list[Array]) -> Iterable[Array]:
        if equation.primitive == "pvary":  # Created by `compat.vary`.
            return operands
        if equation.control is None:
            outputs = equation.bind(*operands)
        else:
            outputs = equation.control.run(functools.partial(_run, axes), *operands)
        # After each equation, so that by induction both sides of every loop and branch agree.
        return map(vary, outputs)

    return program.run(inputs, apply, vary)
