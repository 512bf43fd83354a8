"""Ranges: check that the parameters of every draw were valid.

A probability of 1.3 or a NaN parameter is known only when the program runs, and a draw is an
integer, which cannot be NaN. So the program gets one more result, `valid`, which becomes False when
a draw of the primal has parameters out of range. The caller then sets value and derivative to NaN.
The flag is carried through loops and conditionals with the program's own values. It has neither a
tangent nor alternatives: if an alternative leads out of range, so do other runs of the program.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PyTree

from ..base.validate import NotDifferentiable
from ..core.autodiff import moving
from ..jaxprs.program import (
    Atom,
    Cond,
    Constant,
    Equation,
    Program,
    Scan,
    Variable,
    While,
    every_equation,
)
from .draw import SAMPLE, VALID
from .refusals import at


def checked(program: Program) -> Program:
    """The same program with one more output: True if all draws were in range."""
    start = Constant(np.ones((), bool))
    equations, valid = _checked(program, start)
    return Program(program.inputs, tuple(equations), (*program.outputs, valid))


def run(program: Program, inputs: Sequence[Any]) -> list[Any]:
    """The program's outputs."""
    return program.run(inputs, lambda equation, operands: equation.bind(*operands), jnp.asarray)


def nan_unless(valid: Bool[Array, ""], theta: PyTree, value: Float[Array, "..."]) -> Any:
    """The value; it and its derivative with respect to theta are NaN if a draw was out of range or
    a parameter is NaN.
    """
    leaves = jax.tree.leaves(theta)
    # `slope · theta` has the derivative NaN in each parameter and, through `moving`, the value 0.
    known = jnp.all(jnp.stack([valid, *(~jnp.any(jnp.isnan(leaf)) for leaf in leaves)]))
    # Not a product with the value: compilers may turn `NaN · (0 or 1)` into a choice of NaN or 0.
    slope = jnp.where(known, 0.0, jnp.nan)
    moves = sum(jnp.sum(slope.astype(leaf.dtype) * leaf) for leaf in leaves)
    moves = jnp.broadcast_to(moves, value.shape).astype(value.dtype)
    return moving(jnp.where(known, value, jnp.nan), moves)


def _flag() -> Variable:
    return Variable((), jnp.dtype(bool))


def _checked(program: Program, valid: Atom) -> tuple[list[Equation], Atom]:
    """Equations that carry `valid` along, and its value after them."""
    equations: list[Equation] = []
    for equation in program.equations:
        if equation.primitive == SAMPLE:
            check = _check(equation, valid)
            equations += [check, equation]
            valid = check.outputs[0]
        elif any(map(_draws, equation.inner)):
            equation, valid = _through(equation, valid)
            equations.append(equation)
        else:
            equations.append(equation)
    return equations, valid


def _draws(program: Program) -> bool:
    return any(equation.primitive == SAMPLE for equation in every_equation(program))


def _check(equation: Equation, valid: Atom) -> Equation:
    sampler = equation.params["sampler"]

    def bind(valid, *parameters):
        return (valid & sampler.in_ranges(*parameters),)

    inputs = (valid, *equation.inputs[1:])
    return Equation(VALID, inputs, (_flag(),), {}, None, equation.where, bind)


def _inner(program: Program, at: int, output: int) -> Program:
    """The inner program with the flag as an input and an output at these positions."""
    entering = _flag()
    equations, leaving = _checked(program, entering)
    return Program(
        _inserted(program.inputs, at, entering),
        tuple(equations),
        _inserted(program.outputs, output, leaving),
    )


def _inserted(atoms: Sequence[Any], at: int, atom: Any) -> tuple[Any, ...]:
    return (*atoms[:at], atom, *atoms[at:])


def _through(equation: Equation, valid: Atom) -> tuple[Equation, Atom]:
    """A loop or a conditional that carries the flag, and the flag after it."""
    after, control = _flag(), equation.control
    match control:
        case Scan():
            # The flag is the last carry, so that constants and slices keep their positions.
            first, last = control.num_constants + control.num_carry, control.num_carry
            body = _inner(control.body, first, last)
            control = dataclasses.replace(control, body=body, num_carry=last + 1)
        case While():
            first, last = len(equation.inputs), len(equation.outputs)
            _refuse_condition(control.condition)
            seen = (*control.condition.inputs, _flag())
            condition = dataclasses.replace(control.condition, inputs=seen)
            body = _inner(control.body, len(control.body.inputs), last)
            control = dataclasses.replace(control, condition=condition, body=body)
        case _:
            assert isinstance(control, Cond)
            first, last = len(equation.inputs), len(equation.outputs)
            branches = tuple(_inner(branch, first - 1, last) for branch in control.branches)
            control = Cond(branches)
    carried = dataclasses.replace(
        equation,
        inputs=_inserted(equation.inputs, first, valid),
        outputs=_inserted(equation.outputs, last, after),
        control=control,
        _bind=functools.partial(control.run, run),
    )
    return carried, after


def _refuse_condition(condition: Program) -> None:
    """Refuse draws in a condition, which cannot report that they were out of range."""
    for equation in condition.equations:
        known = all(isinstance(atom, Constant) for atom in equation.inputs[1:])
        if (equation.primitive == SAMPLE and not known) or any(map(_draws, equation.inner)):
            raise NotDifferentiable(
                f"A draw in the condition of a `while_loop`{at(equation)} is not supported: draw"
                " in the body and carry the result to the condition."
            )
