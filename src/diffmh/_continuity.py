"""Where a density jumps at a place that moves with θ.

The flips of decisions carry the derivative of `log g_θ(x)` at fixed x. Where the *place* of a jump
in x depends on θ (a bound of the support, a threshold), that derivative is zero, and what the jump
contributes is lost without a sign. This analysis looks for steps (comparisons, rounding, signs) of
a continuous value that depends on both θ and x, on the way to the density.

A step that chooses between two cases which agree where it steps makes no jump (a ReLU written with
`where`): `_crossing` tries both sides of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from . import _validate
from ._bounds import decided
from ._crossing import makes_no_jump
from ._lowering import compat
from ._lowering.program import Constant, Equation, Program, Variable, While
from ._steps import EQUALITIES, ORDERS, STEPS, is_inexact, steps
from ._validate import Checked

_LOGIC = {
    "and",
    "or",
    "not",
    "xor",
    "broadcast_in_dim",
    "reshape",
    "squeeze",
    "convert_element_type",
}


class Jump(eqx.Module):
    """A step that may make the density jump at a place that depends on θ: where it is written, and
    whether it certainly does.
    """

    where: str
    primitive: str
    certain: bool


def continuous(function: Checked[Callable[..., PyTree]]) -> Callable[..., PyTree]:
    """Vouches that `function` is continuous, whatever comparisons it makes inside.

    Use it for parts of a density (or of a program of `diffmh.sad`) that step from one formula to
    another where both agree, and that the analysis cannot see through.

    >>> import jax.numpy as jnp, diffmh
    >>> def triangle_wave(z):
    ...     return jnp.abs(z % 2.0 - 1.0)
    >>> def log_density(theta, x):
    ...     return jnp.sum(diffmh.continuous(triangle_wave)(x - theta) - x**2)
    """

    _validate.function(function, "continuous(function)", "function", "(*arrays) -> arrays")

    def vouched(*arguments):
        return function(*arguments)

    vouched.__name__ = compat.VOUCHED
    return jax.jit(vouched)


def moving_jumps(
    function: Callable[..., Any], theta: PyTree, x: PyTree, x_moves: bool = False
) -> list[Jump]:
    """The jumps of `function(theta, x)` in continuous x whose place depends on theta; or all of
    them, where x itself moves with theta.

    Arguments may be pytrees of `jax.ShapeDtypeStruct`.
    """
    form = lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf))
    theta, x = jax.tree.map(form, (theta, x))
    if not any(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(x)):
        return []
    program, _ = compat.program(function, theta, x, differentiated=False)
    count = len(jax.tree.leaves(theta))
    with jax.ensure_compile_time_eval():
        by_x = set(_floats(program.inputs[count:]))
        by_theta = set(program.inputs[:count]) | (by_x if x_moves else set())
        return _find(program, by_theta, by_x)


def _floats(variables: Any) -> list[Variable]:
    return [v for v in variables if jnp.issubdtype(v.dtype, jnp.floating)]


def _find(program: Program, by_theta: set[Any], by_x: set[Any]) -> list[Jump]:
    """Follows what depends on θ and on x through a program and looks at its steps."""
    found: list[Jump | None] = []
    hot: dict[Any, list[Equation]] = {}
    defined_by = {output: equation for equation in program.equations for output in equation.outputs}
    for equation in program.equations:
        # Whole numbers of real ones are made by steps, each of which is looked at itself.
        real = [atom for atom in equation.inputs if is_inexact(atom)]
        from_theta, from_x = (any(atom in s for atom in real) for s in (by_theta, by_x))
        by_theta.update(equation.outputs if from_theta else ())
        by_x.update(equation.outputs if from_x else ())
        if equation.vouched:
            continue
        into = _steps_into(equation, hot)
        if into and equation.primitive in _LOGIC and _is_bool(equation.outputs[0]):
            hot[equation.outputs[0]] = into
        elif into and equation.primitive == "select_n" and equation.inputs[0] in hot:
            found += [_judge(program, step, equation, by_x) for step in into]
        elif into:
            certain = equation.primitive == "convert_element_type"
            found += [_jump(program, step, certain) for step in into]
        elif from_theta and from_x and equation.control is not None:
            found += _inside(program, equation)
        elif from_theta and from_x and not _is_decided(program, equation):
            hot.update({output: [equation] for output in steps(equation, defined_by)})
    for output in program.outputs:
        found += [Jump(step.where, step.primitive, True) for step in hot.get(output, [])]
    return [jump for jump in found if jump is not None]


def _is_decided(program: Program, equation: Equation) -> bool:
    """Whether a comparison has the same outcome everywhere."""
    return equation.primitive in ORDERS | EQUALITIES and decided(program, equation, of_numbers=True)


def _jump(program: Program, step: Equation, certain: bool) -> Jump | None:
    if _is_plain(step) and makes_no_jump(program, step, _is_plain):
        return None
    return Jump(step.where, step.primitive, certain)


def _steps_into(equation: Equation, hot: dict[Variable, list[Equation]]) -> list[Equation]:
    return [step for atom in equation.inputs if atom in hot for step in hot[atom]]  # pyright: ignore


def _is_bool(variable: Variable) -> bool:
    return variable.dtype == jnp.bool_


def _inside(program: Program, equation: Equation) -> list[Jump | None]:
    """Loops and conditionals are taken whole: any step inside may be one of both."""
    has_steps = compat.inner_primitives(equation) & STEPS
    return [_jump(program, equation, False)] if has_steps else []


def _judge(program: Program, step: Equation, select: Equation, by_x: set[Any]) -> Jump | None:
    """Whether a choice by a step jumps: certainly, perhaps, or not (`None`)."""
    cases = select.inputs[1:]
    known = [_constant(program, case) for case in cases]
    infinite = any(value is not None and not np.all(np.isfinite(value)) for value in known)
    if infinite or not any(case in by_x for case in cases):
        # −∞ beyond a bound of the support; or two levels, neither of which depends on x.
        levels = [value for value in known if value is not None]
        same = len(levels) == len(known) and all(np.array_equal(v, levels[0]) for v in levels)
        return None if same else _jump(program, step, True)
    return _jump(program, step, False)


def _is_plain(equation: Equation) -> bool:
    """Whether it ends, for whatever numbers."""
    inner = all(_is_plain(one) for program in equation.inner for one in program.equations)
    return inner and not isinstance(equation.control, While)


def _constant(program: Program, atom: Variable | Constant) -> np.ndarray | None:
    """The value of what depends on no input, else `None`."""
    if isinstance(atom, Constant):
        return None if isinstance(atom.value, compat.Tracer) else np.asarray(atom.value)
    made = next((e for e in program.equations if atom in e.outputs), None)
    if made is None or made.control is not None:
        return None
    operands = [_constant(program, operand) for operand in made.inputs]
    if any(operand is None for operand in operands):
        return None
    return np.asarray(made.bind(*operands)[made.outputs.index(atom)])
