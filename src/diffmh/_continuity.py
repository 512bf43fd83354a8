"""Where a density jumps at a place that moves with θ.

The flips of decisions carry the derivative of `log g_θ(x)` at fixed x. Where the *place* of a jump
in x depends on θ (a bound of the support, a threshold), that derivative is zero, and what the jump
contributes is lost without a sign. This analysis looks for steps (comparisons, rounding, signs) of
a continuous value that depends on both θ and x, on the way to the density.

A step that chooses between two cases which agree where it steps makes no jump (a ReLU written with
`where`). That is tried by evaluating both cases with the two sides of the comparison set equal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ._lowering import compat
from ._lowering.program import Constant, Equation, Program, Variable

_COMPARISONS = {"ge", "gt", "le", "lt"}
_STEPS = _COMPARISONS | {"ceil", "floor", "round", "sign"}
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


def continuous(function: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Vouches that `function` is continuous, whatever comparisons it makes inside.

    Use it for parts of a density (or of a program of `diffmh.sad`) that step from one formula to
    another where both agree, and that the analysis cannot see through.

    >>> import jax.numpy as jnp, diffmh
    >>> def huber(z):
    ...     return jnp.where(jnp.abs(z) < 1.0, 0.5 * z**2, jnp.abs(z) - 0.5)
    >>> def log_density(theta, x):
    ...     return -jnp.sum(diffmh.continuous(huber)(x - theta))
    """

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
    for equation in program.equations:
        from_theta, from_x = (any(atom in s for atom in equation.inputs) for s in (by_theta, by_x))
        by_theta.update(equation.outputs if from_theta else ())
        by_x.update(equation.outputs if from_x else ())
        if equation.vouched:
            continue
        steps = _steps_into(equation, hot)
        if equation.primitive in _STEPS and from_theta and from_x:
            hot[equation.outputs[0]] = [equation]
        elif steps and equation.primitive in _LOGIC and _is_bool(equation.outputs[0]):
            hot[equation.outputs[0]] = steps
        elif steps and equation.primitive == "select_n" and equation.inputs[0] in hot:
            found += [_judge(program, step, equation, by_x) for step in steps]
        elif steps:
            certain = equation.primitive == "convert_element_type"
            found += [Jump(step.where, step.primitive, certain) for step in steps]
        elif equation.control is not None and from_theta and from_x:
            found += _inside(equation)
    for output in program.outputs:
        found += [Jump(step.where, step.primitive, True) for step in hot.get(output, [])]
    return [jump for jump in found if jump is not None]


def _steps_into(equation: Equation, hot: dict[Variable, list[Equation]]) -> list[Equation]:
    return [step for atom in equation.inputs if atom in hot for step in hot[atom]]  # pyright: ignore


def _is_bool(variable: Variable) -> bool:
    return variable.dtype == jnp.bool_


def _inside(equation: Equation) -> list[Jump | None]:
    """Loops and conditionals are taken whole: any step inside may be one of both."""
    names = compat.inner_primitives(equation)
    return [Jump(equation.where, equation.primitive, False)] if names & _STEPS else []


def _judge(program: Program, step: Equation, select: Equation, by_x: set[Any]) -> Jump | None:
    """Whether a choice by a step jumps: certainly, perhaps, or not (`None`)."""
    cases = select.inputs[1:]
    known = [_constant(program, case) for case in cases]
    infinite = any(value is not None and not np.all(np.isfinite(value)) for value in known)
    if infinite or not any(case in by_x for case in cases):
        # −∞ beyond a bound of the support; or two levels, neither of which depends on x.
        levels = [value for value in known if value is not None]
        same = len(levels) == len(known) and all(np.array_equal(v, levels[0]) for v in levels)
        return None if same else Jump(step.where, step.primitive, True)
    if step.primitive in _COMPARISONS and agree_at_the_step(program, step, select):
        return None
    return Jump(step.where, step.primitive, False)


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


def agree_at_the_step(program: Program, step: Equation, select: Equation) -> bool:
    """Whether the cases of a choice are equal where the two sides of its comparison are: tried at
    random inputs, with one side set to the other wherever it is used.
    """
    moved, other = step.inputs if isinstance(step.inputs[0], Variable) else step.inputs[::-1]
    closed_over = [a.value for e in program.equations for a in e.inputs if isinstance(a, Constant)]
    if not isinstance(moved, Variable) or any(isinstance(v, compat.Tracer) for v in closed_over):
        return False
    tried = [_cases_at_the_step(program, moved, other, select, seed) for seed in range(3)]
    tried = [cases for cases in tried if cases is not None]
    close = lambda a, b: np.allclose(a, b, rtol=1e-4, atol=1e-5)
    return bool(tried) and all(close(cases[0], case) for cases in tried for case in cases)


def _cases_at_the_step(program, moved, other, select, seed: int) -> list[np.ndarray] | None:
    """The cases of `select` at random inputs, with `moved` set to `other`; `None` if not finite."""
    rng = np.random.default_rng(seed)
    draw = lambda variable: jnp.asarray(rng.normal(size=variable.shape)).astype(variable.dtype)
    inputs = {variable: draw(variable) for variable in program.inputs}
    read = lambda atom, values: atom.value if isinstance(atom, Constant) else values[atom]
    side = read(other, _evaluated(program, inputs, {}))
    twins = _same_expression(program, moved)
    values = _evaluated(program, inputs, dict.fromkeys(twins, side))
    shape = select.outputs[0].shape
    found = [np.broadcast_to(np.asarray(read(c, values), float), shape) for c in select.inputs[1:]]
    return found if all(np.all(np.isfinite(value)) for value in found) else None


def _evaluated(program: Program, inputs: dict, instead: dict) -> dict:
    """The values of all variables; those in `instead` are what it says, whatever they would be."""
    values = dict(inputs)
    put = lambda variable, value: jnp.broadcast_to(instead.get(variable, value), variable.shape)
    for variable in inputs:
        values[variable] = put(variable, inputs[variable]).astype(variable.dtype)
    for equation in program.equations:
        operands = [a.value if isinstance(a, Constant) else values[a] for a in equation.inputs]
        results = equation.bind(*operands)
        for variable, value in zip(equation.outputs, results, strict=True):
            replaced = variable in instead
            values[variable] = put(variable, value).astype(variable.dtype) if replaced else value
    return values


def _same_expression(program: Program, wanted: Variable) -> list[Variable]:
    """The variables that are computed by the same expression as `wanted`: a reader writes it once,
    a program may compute it twice.
    """
    numbers: dict[Any, Any] = {variable: variable for variable in program.inputs}
    seen: dict[Any, Any] = {}

    def number(atom):
        if not isinstance(atom, Constant):
            return numbers[atom]
        return str(atom.value) if np.ndim(atom.value) == 0 else id(atom.value)

    for equation in program.equations:
        operands = tuple(map(number, equation.inputs))
        key = (equation.primitive, operands, compat.parameters_of(equation))
        first = seen.setdefault(key, equation)
        for variable, twin in zip(equation.outputs, first.outputs, strict=True):
            numbers[variable] = numbers.get(twin, twin)
    return [variable for variable, twin in numbers.items() if twin is numbers[wanted]]
