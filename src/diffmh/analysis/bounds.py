"""Bounds: intervals that contain the values of a program for all finite inputs.

A comparison that the bounds decide is not a step, such as `exp(x) > 0` in the density of a
distribution on the positive numbers. Rounding, overflow and underflow are not steps either, so the
ends of an interval may be open: `exp(x)` lies in (0, ∞).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from ..jaxprs import compat
from ..jaxprs.program import Atom, Constant, Equation, Program, Variable, every_equation
from .interval import ANY, INFINITY, NOT_NEGATIVE, POSITIVE, Interval
from .interval_functions import DOMAINS, INCREASING, decided, of_function
from .terms import COMPARED

if TYPE_CHECKING:
    from .facts import Facts

# These return some of the values of the first operand, possibly rearranged.
MOVES_VALUES = {
    *("broadcast_in_dim", "copy", "copy_p", "cummax", "cummin", "device_put", "dynamic_slice"),
    *("expand_dims", "gather", "name", "optimization_barrier", "reduce_max", "reduce_min"),
    *("reduce_precision", "reshape", "rev", "slice", "split", "squeeze", "stop_gradient", "tile"),
    *("transpose", "unstack", "sort", "pvary"),
}
# Functions whose results are finite if their operands are, except for overflow.
_TOTAL = {
    *("abs", "add", "add_any", "and", "argmax", "argmin", "asinh", "atan", "atan2", "bessel_i0e"),
    *("bessel_i1e", "cbrt", "ceil", "clamp", "concatenate", "convert_element_type", "cos", "cosh"),
    *("cumlogsumexp", "cumprod", "cumsum", "dot_general", "dynamic_update_slice", "eigh", "erf"),
    *("erfc", "exp", "exp2", "expm1", "floor", "iota", "logistic", "max", "min", "mul", "neg"),
    *("not", "or"),
    *("pad", "reduce_prod", "reduce_sum", "round", "scatter", "scatter-add", "select_n", "sign"),
    *("sin", "sinh", "square", "stack", "sub", "tanh", "xor", "is_finite", "reduce_and"),
    *("reduce_or", "conv_general_dilated", "lt", "le", "gt", "ge", "eq", "ne", "integer_pow"),
    *("random_bits", "random_wrap", "random_unwrap", "shift_right_logical", "threefry2x32"),
    *("bitcast_convert_type", "complex", "conj", "fft", "imag", "real"),
    "polynomial",
} | MOVES_VALUES
# For integers, only operations that cannot overflow are followed.
_OF_INTEGERS = MOVES_VALUES | {
    *("argmax", "argmin", "clamp", "concatenate", "convert_element_type", "iota", "max", "min"),
    "select_n",
}


class Bounds:
    """The intervals of a program's values."""

    def __init__(self, facts: Facts):
        self.facts = facts
        # Proves that a matrix is positive definite; set by a caller that can see its entries.
        self.is_definite: Callable[[Atom], bool] = lambda matrix: False
        self._known: dict[Atom, Interval] = {}
        self._steady: dict[Atom, bool] = {}

    def of(self, atom: Atom) -> Interval:
        """An interval that contains all entries of an array."""
        atom = self.facts.resolve(atom)
        if isinstance(atom, Constant):
            return _of_constant(atom)
        if atom not in self._known:
            self._known[atom] = ANY  # For values that depend on themselves through a loop.
            self._known[atom] = self._of_variable(atom)
        return self._known[atom]

    def _of_variable(self, variable: Variable) -> Interval:
        equation = self.facts.defined_by.get(variable)
        if equation is None:
            return ANY
        inner = self.facts.body_output(equation, variable)
        if inner is not None:
            return self.of(inner)
        whole = not jnp.issubdtype(variable.dtype, jnp.floating)
        # Integer arithmetic wraps: the sum of two positive integers may be negative.
        if whole and equation.primitive not in _OF_INTEGERS:
            return ANY
        return self._of_equation(equation, variable)

    def _of_equation(self, equation: Equation, output: Variable) -> Interval:
        name, inputs = equation.primitive, equation.inputs
        # Every interval must contain all entries for all finite inputs; ANY is always valid.
        if name in ("sort", "unstack", "split") and output is not equation.outputs[0]:
            index = equation.outputs.index(output)
            return self.of(inputs[index] if name == "sort" else inputs[0])
        if name in MOVES_VALUES:
            return self.of(inputs[0])
        if name in ("concatenate", "pad", "stack"):
            return self._hull(inputs)
        if name == "eigh" and len(output.shape) == 1:
            return POSITIVE if self.is_definite(inputs[0]) else ANY
        if name == "select_n":
            case = self.decided_case(equation)
            return self._hull(inputs[1:] if case is None else (inputs[1 + case],))
        if name in ("argmax", "argmin"):
            return Interval(0.0, max(np.prod(inputs[0].shape, dtype=float) - 1, 0.0))
        if name == "iota":
            return Interval(0.0, float(max(max(output.shape, default=1) - 1, 0)))
        if name in _RULES:
            return _RULES[name](self, equation)
        return of_function(name, map(self.of, inputs))

    def _hull(self, atoms: Any) -> Interval:
        first, *rest = (self.of(atom) for atom in atoms)
        for interval in rest:
            first = first.hull(interval)
        return first

    def truth(self, atom: Atom) -> bool | None:
        """The value of a boolean if it is the same everywhere, else `None`."""
        atom = self.facts.resolve(atom)
        if isinstance(atom, Constant):
            value = _number(atom)
            return None if value is None else bool(value)
        equation = self.facts.defined_by.get(atom)
        if equation is None or atom.dtype != jnp.bool_:
            return None
        # Only a value that is the same in every entry and for every input is known.
        name, inputs = equation.primitive, equation.inputs
        if name in ("broadcast_in_dim", "reshape", "squeeze", "slice", "copy", "reduce_and"):
            return self.truth(inputs[0])
        if name in ("reduce_or", "transpose", "rev", "stop_gradient"):
            return self.truth(inputs[0])
        if name == "not":
            value = self.truth(inputs[0])
            return None if value is None else not value
        if name in ("and", "or"):
            values = [self.truth(operand) for operand in inputs]
            ends = name == "or"
            return ends if ends in values else (None if None in values else not ends)
        if name == "is_finite" and self.is_steady(inputs[0]) and self._is_finite(inputs[0]):
            return True
        return self._compared(equation) if name in COMPARED else None

    def _compared(self, equation: Equation) -> bool | None:
        left, right = equation.inputs
        name = equation.primitive
        # The same value on both sides: it differs from itself only if it is NaN.
        if left is right:
            # A test for NaN, with a known outcome if the value is finite.
            return name in ("eq", "le", "ge") if self._is_finite(left) else None
        if name in ("eq", "ne"):
            infinite = [_is_infinite(atom) for atom in (left, right)]
            if any(infinite):
                return name == "ne" if self._is_finite(left if infinite[1] else right) else None
        return decided(name, self.of(left), self.of(right))

    def decided_case(self, select: Equation) -> int | None:
        """The case of a `select_n` that is taken everywhere, if known."""
        truth = self.truth(select.inputs[0])
        return None if truth is None else int(truth)

    def _is_finite(self, atom: Atom) -> bool:
        """True if the value is finite for all finite inputs."""
        if isinstance(atom, Constant):
            return atom.known is not None and bool(np.all(np.isfinite(atom.known)))
        return self.is_steady(atom, finite=True)

    def is_steady(self, atom: Atom, finite: bool = False) -> bool:
        """True if random values cannot change whether the value is finite. With `finite`, True
        only if the value is finite whenever all inputs of the program are.
        """
        if isinstance(atom, Constant):
            return self._is_finite(atom) if finite else True
        # At a given theta, a value that is not random is one number: either finite or not.
        if not finite and atom not in self.facts.random:
            return True
        key = (atom, finite)
        if key not in self._steady:  # pyright: ignore
            # In a loop a value may depend on itself. Without a proof it is not steady.
            self._steady[key] = False  # pyright: ignore
            self._steady[key] = self._is_steady(atom, finite)  # pyright: ignore
        return self._steady[key]  # pyright: ignore

    def _is_steady(self, variable: Variable, finite: bool) -> bool:
        # Integers are always finite; so are inputs, by assumption.
        if not jnp.issubdtype(variable.dtype, jnp.inexact):
            return True
        if variable in self.facts.aliases:
            return self.is_steady(self.facts.aliases[variable], finite)
        equation = self.facts.defined_by.get(variable)
        if equation is None:
            return True
        inner = self.facts.body_output(equation, variable)
        if inner is not None:
            return self.is_steady(inner, finite)
        operands = equation.inputs
        if equation.control is not None:
            return all(map(self._are_total, equation.inner)) and all(
                self.is_steady(operand, finite) for operand in operands
            )
        if equation.primitive == "select_n":
            case = self.decided_case(equation)
            operands = operands[1:] if case is None else (operands[1 + case],)
        return self._has_an_answer(equation, finite) and all(
            self.is_steady(operand, finite) for operand in operands
        )

    def _are_total(self, program: Program) -> bool:
        return all(
            equation.control is not None
            or self._has_an_answer(equation)
            or not any(jnp.issubdtype(output.dtype, jnp.inexact) for output in equation.outputs)
            for equation in every_equation(program)
        )

    def _has_an_answer(self, equation: Equation, finite: bool = True) -> bool:
        """True if the results are finite where the operands are, except for overflow. Without
        `finite`, operands that are not random may have any value.
        """

        def free(atom: Atom) -> bool:
            return not finite and atom not in self.facts.random

        name, inputs = equation.primitive, equation.inputs
        last = inputs[-1] if inputs else None
        if equation.vouched:
            return True
        if name in ("div", "rem") or (name == "integer_pow" and compat.exponent(equation) < 0):
            assert last is not None
            return free(last) or not self.of(last).contains(0)
        if name == "rsqrt":
            return free(inputs[0]) or self.of(inputs[0]).is_positive
        if name == "pow":
            base = self.of(inputs[0])
            return free(inputs[0]) or base.is_positive
        if name in DOMAINS:
            least, most = DOMAINS[name]
            at = self.of(inputs[0])
            # √0 and arcsin(±1) are finite; log 0 and artanh(±1) are not.
            closed = name in ("sqrt", "asin")
            above = at.low > least or (at.low == least and (closed or at.low_open))
            below = at.high < most or (at.high == most and (closed or at.high_open))
            return free(inputs[0]) or (above and below)
        if name in ("lgamma", "digamma"):
            return free(inputs[0]) or self.of(inputs[0]).is_positive
        if name in ("igamma", "igammac", "regularized_incomplete_beta", "random_gamma"):
            return True
        if name == "cholesky":
            return free(inputs[0]) or self.is_definite(inputs[0])
        return name in _TOTAL or name in INCREASING


def _is_infinite(atom: Atom) -> bool:
    known = atom.known if isinstance(atom, Constant) else None
    return known is not None and bool(np.all(np.isinf(known)))


def _of_constant(atom: Constant) -> Interval:
    value = atom.known
    if value is None:
        return ANY
    is_number = np.issubdtype(value.dtype, np.number) or value.dtype == jnp.bfloat16
    if not is_number or not value.size or np.any(np.isnan(value)) or np.iscomplexobj(value):
        return ANY
    low, high = float(value.min()), float(value.max())
    return Interval(low, high)


def _power(bounds: Bounds, equation: Equation) -> Interval:
    base = bounds.of(equation.inputs[0])
    if base.is_positive:
        return POSITIVE
    return NOT_NEGATIVE if base.low >= 0 else ANY


def _sum(bounds: Bounds, equation: Equation) -> Interval:
    (operand,) = equation.inputs
    count = math.prod(operand.shape) / max(math.prod(equation.outputs[0].shape), 1)
    # An empty sum.
    if not count:
        return Interval(0.0, 0.0)
    return bounds.of(operand).increasing(lambda end: end * count)


def _running_sum(bounds: Bounds, equation: Equation) -> Interval:
    one = bounds.of(equation.inputs[0])
    if one.low >= 0:
        return Interval(one.low, INFINITY, one.low_open, True)
    return Interval(-INFINITY, one.high, True, one.high_open) if one.high <= 0 else ANY


def _running_product(bounds: Bounds, equation: Equation) -> Interval:
    one = bounds.of(equation.inputs[0])
    # Products of numbers in [0, 1] stay there; with larger factors only the sign is known.
    if one.low < 0:
        return ANY
    return Interval(0.0, 1.0 if one.high <= 1 else INFINITY, one.is_positive, one.high > 1)


def _scattered(bounds: Bounds, equation: Equation) -> Interval:
    """The sum of an entry and at most one other that is added to it."""
    if bounds.facts.places.sources(equation) is None:
        return ANY
    array, _, added = map(bounds.of, equation.inputs)
    return array.hull(array + added)


def _product(bounds: Bounds, equation: Equation) -> Interval:
    a, b = equation.inputs
    return bounds.of(a).power(2) if a is b else bounds.of(a) * bounds.of(b)


def _inner_product(bounds: Bounds, equation: Equation) -> Interval:
    a, b = equation.inputs
    if a is b and len(a.shape) == 1:
        return NOT_NEGATIVE
    terms = bounds.of(a) * bounds.of(b)
    if terms.low >= 0:
        return POSITIVE if terms.is_positive else NOT_NEGATIVE
    return ANY


def _convert(bounds: Bounds, equation: Equation) -> Interval:
    (operand,) = equation.inputs
    if operand.dtype == jnp.bool_:
        return Interval(0.0, 1.0)
    if jnp.issubdtype(operand.dtype, jnp.floating) and not jnp.issubdtype(
        equation.outputs[0].dtype, jnp.floating
    ):
        return bounds.of(operand).increasing(np.trunc, strictly=False)
    return bounds.of(operand)


def _bits(bounds: Bounds, equation: Equation) -> Interval:
    """A float with the exponent of 1 and random other bits, as `uniform` makes it. Nothing steps at
    the ends of the range of a draw, so they are excluded.
    """
    made = bounds.facts.definition(equation.inputs[0])
    if made is None or made.primitive != "or":
        return ANY
    # `bits >> (width − mantissa) | exponent of 1`: a float in [1, 2).
    one = np.array(1.0, equation.outputs[0].dtype)
    pattern = one.view(f"u{one.dtype.itemsize}")
    mantissa = jnp.finfo(one.dtype).nmant
    exponents = [_number(atom) for atom in made.inputs]
    shifted = map(bounds.facts.definition, made.inputs)
    for exponent, shift in zip(reversed(exponents), shifted, strict=True):
        if exponent == pattern and shift is not None:
            places = _number(shift.inputs[1]) if shift.primitive == "shift_right_logical" else None
            if places == one.dtype.itemsize * 8 - mantissa:
                return Interval(1.0, 2.0, True, True)
    return ANY


def _number(atom: Atom) -> Any:
    known = atom.known if isinstance(atom, Constant) else None
    values = () if known is None else np.unique(known)
    return values[0] if len(values) == 1 else None


_RULES: dict[str, Callable[[Bounds, Equation], Interval]] = {
    "bitcast_convert_type": _bits,
    "convert_element_type": _convert,
    "cumprod": _running_product,
    "cumsum": _running_sum,
    "dot_general": _inner_product,
    "integer_pow": lambda bounds, e: bounds.of(e.inputs[0]).power(compat.exponent(e)),
    "mul": _product,
    "pow": _power,
    "reduce_sum": _sum,
    "scatter-add": _scattered,
}
