"""Bounds: between what numbers a value of a program lies, whatever its inputs are.

A comparison whose outcome the bounds decide is no step: `exp(x) >= 0` in the density of a
distribution on the positive numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ._lowering import compat
from ._lowering.program import Atom, Constant, Equation, Program
from ._steps import EQUALITIES, ORDERS

Bounds = tuple[float, float]

_ANY: Bounds = (-np.inf, np.inf)
# Increasing functions, with where they are defined.
_INCREASING: dict[str, tuple[Callable[[Any], Any], Bounds]] = {
    "asinh": (np.arcsinh, _ANY),
    "atan": (np.arctan, _ANY),
    "cbrt": (np.cbrt, _ANY),
    "exp": (np.exp, _ANY),
    "exp2": (np.exp2, _ANY),
    "expm1": (np.expm1, _ANY),
    "log": (np.log, (0.0, np.inf)),
    "log1p": (np.log1p, (-1.0, np.inf)),
    "log2": (np.log2, (0.0, np.inf)),
    "logistic": (lambda x: 1 / (1 + np.exp(-x)), _ANY),
    "sqrt": (np.sqrt, (0.0, np.inf)),
    "tanh": (np.tanh, _ANY),
}
_WITHIN: dict[str, Bounds] = {
    "cos": (-1.0, 1.0),
    "erf": (-1.0, 1.0),
    "erfc": (0.0, 2.0),
    "igamma": (0.0, 1.0),
    "igammac": (0.0, 1.0),
    "regularized_incomplete_beta": (0.0, 1.0),
    "sin": (-1.0, 1.0),
}
_PASSED_ON = {"convert_element_type", "copy", "copy_p", "name", "optimization_barrier"} | {
    *("broadcast_in_dim", "cummax", "cummin", "dynamic_slice", "reduce_max", "reduce_min"),
    *("reshape", "rev", "slice", "split", "squeeze", "stop_gradient", "tile", "transpose"),
    "unstack",
}
_ANY_OF_THEM = {"concatenate", "stack"}
_ALWAYS_A_NUMBER = {"add", "clamp", "cos", "dot_general", "erf", "erfc", "max", "min", "mul"} | {
    *("select_n", "sin", "sub", *ORDERS, *EQUALITIES)
}


def decided(program: Program, comparison: Equation, of_numbers: bool = False) -> bool:
    """Whether a comparison has the same outcome everywhere, NaN aside. `x != x` has, if x is a
    number wherever the program's inputs are, `of_numbers`.
    """
    defined_by = {output: equation for equation in program.equations for output in equation.outputs}
    known: dict[Atom, Bounds] = {}

    def bounds(atom: Atom) -> Bounds:
        if atom not in known:
            made = None if isinstance(atom, Constant) else defined_by.get(atom)
            known[atom] = _of_constant(atom) if made is None else _of_equation(made, bounds)
        return known[atom]

    def is_number(atom: Atom) -> bool:
        made = None if isinstance(atom, Constant) else defined_by.get(atom)
        return made is None or (_has_an_answer(made, bounds) and all(map(is_number, made.inputs)))

    if comparison.inputs[0] is comparison.inputs[1]:
        return of_numbers and is_number(comparison.inputs[0])
    (low, high), (other_low, other_high) = map(bounds, comparison.inputs)
    match comparison.primitive:
        case "lt" | "ge":
            return high < other_low or low >= other_high
        case "gt" | "le":
            return low > other_high or high <= other_low
        case "eq" | "ne":
            return high < other_low or low > other_high
    return False


def _of_constant(atom: Atom) -> Bounds:
    if not isinstance(atom, Constant) or isinstance(atom.value, compat.Tracer):
        return _ANY
    value = np.asarray(atom.value)
    if not np.issubdtype(value.dtype, np.number) or not value.size or np.any(np.isnan(value)):
        return _ANY
    return float(value.min()), float(value.max())


def _of_equation(equation: Equation, bounds: Callable[[Atom], Bounds]) -> Bounds:
    name, inputs = equation.primitive, equation.inputs
    if not all(jnp.issubdtype(output.dtype, jnp.floating) for output in equation.outputs):
        return _ANY  # Whole numbers overflow.
    if name in _INCREASING:
        function, (least, most) = _INCREASING[name]
        low, high = bounds(inputs[0])
        with np.errstate(all="ignore"):
            return _or_any(function(np.clip([low, high], least, most)))
    if name in _WITHIN:
        return _WITHIN[name]
    if name in _PASSED_ON:
        return bounds(inputs[0])
    if name in _ANY_OF_THEM:
        return _hull([bounds(atom) for atom in inputs])
    if name == "select_n":
        return _hull([bounds(atom) for atom in inputs[1:]])
    if name in _OF_ONE:
        return _OF_ONE[name](equation, *bounds(inputs[0]))
    if name in _OF_TWO:
        with np.errstate(all="ignore"):
            return _OF_TWO[name](bounds(inputs[0]), bounds(inputs[1]))
    return _ANY


def _has_an_answer(equation: Equation, bounds: Callable[[Atom], Bounds]) -> bool:
    """Whether the result is a number if the operands are, overflow aside."""
    name = equation.primitive
    low, high = bounds(equation.inputs[-1])
    if name == "div":
        return low > 0 or high < 0
    if name in _INCREASING:
        least, most = _INCREASING[name][1]
        return least <= low and high <= most
    return name in _ALWAYS_A_NUMBER or name in _OF_ONE or name in _PASSED_ON or name in _ANY_OF_THEM


def _or_any(ends: Any) -> Bounds:
    return _ANY if np.any(np.isnan(ends)) else (float(np.min(ends)), float(np.max(ends)))


def _hull(several: Sequence[Bounds]) -> Bounds:
    return min(low for low, _ in several), max(high for _, high in several)


def _even(low: float, high: float) -> Bounds:
    """Of what is never negative and grows with the magnitude: how large that is."""
    largest = max(abs(low), abs(high))
    return (0.0 if low <= 0 <= high else min(abs(low), abs(high)), largest)


def _square(equation: Equation, low: float, high: float) -> Bounds:
    low, high = _even(low, high)
    return low**2, high**2


def _power(equation: Equation, low: float, high: float) -> Bounds:
    exponent = compat.exponent(equation)
    if exponent % 2 or exponent < 0:
        return (0.0, np.inf) if low >= 0 else _ANY
    low, high = _even(low, high)
    return low**exponent, high**exponent


def _sum(equation: Equation, low: float, high: float) -> Bounds:
    return (0.0 if low >= 0 else -np.inf, 0.0 if high <= 0 else np.inf)


_OF_ONE: dict[str, Callable[[Equation, float, float], Bounds]] = {
    "abs": lambda equation, low, high: _even(low, high),
    "cumsum": _sum,
    "integer_pow": _power,
    "neg": lambda equation, low, high: (-high, -low),
    "reduce_sum": _sum,
    "square": _square,
}


def _product(a: Bounds, b: Bounds) -> Bounds:
    return _or_any([x * y if x and y else 0.0 for x in a for y in b])


def _quotient(a: Bounds, b: Bounds) -> Bounds:
    """Of a denominator that has a sign."""
    if b[0] < 0 < b[1]:
        return _ANY
    inverse = (1 / b[1] if b[1] else -np.inf, 1 / b[0] if b[0] else np.inf)
    return _product(a, inverse)


_OF_TWO: dict[str, Callable[[Bounds, Bounds], Bounds]] = {
    "add": lambda a, b: _or_any([a[0] + b[0], a[1] + b[1]]),
    "div": _quotient,
    "max": lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
    "min": lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
    "mul": _product,
    "pow": lambda a, b: (0.0, np.inf) if a[0] >= 0 else _ANY,
    "sub": lambda a, b: _or_any([a[0] - b[1], a[1] - b[0]]),
}
