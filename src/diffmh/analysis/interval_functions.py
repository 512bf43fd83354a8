"""Interval functions: the images of intervals under functions, and the comparisons that intervals
decide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from .interval import ANY, INFINITY, POSITIVE, Interval

# Increasing functions with their domains.
INCREASING: dict[str, tuple[Callable[[Any], Any], tuple[float, float]]] = {
    "asin": (np.arcsin, (-1.0, 1.0)),
    "asinh": (np.arcsinh, (-INFINITY, INFINITY)),
    "atan": (np.arctan, (-INFINITY, INFINITY)),
    "atanh": (np.arctanh, (-1.0, 1.0)),
    "cbrt": (np.cbrt, (-INFINITY, INFINITY)),
    "erf": (np.vectorize(math.erf), (-INFINITY, INFINITY)),
    "exp": (np.exp, (-INFINITY, INFINITY)),
    "exp2": (np.exp2, (-INFINITY, INFINITY)),
    "expm1": (np.expm1, (-INFINITY, INFINITY)),
    "log": (np.log, (0.0, INFINITY)),
    "log1p": (np.log1p, (-1.0, INFINITY)),
    "log2": (np.log2, (0.0, INFINITY)),
    "logistic": (lambda x: 1 / (1 + np.exp(-x)), (-INFINITY, INFINITY)),
    "sinh": (np.sinh, (-INFINITY, INFINITY)),
    "sqrt": (np.sqrt, (0.0, INFINITY)),
    "tanh": (np.tanh, (-INFINITY, INFINITY)),
}
_WITHIN: dict[str, Interval] = {
    "bessel_i0e": Interval(0.0, 1.0, True),
    "cos": Interval(-1.0, 1.0),
    "cosh": Interval(1.0, INFINITY, False, True),
    "erfc": Interval(0.0, 2.0, True, True),
    "igamma": Interval(0.0, 1.0),
    "igammac": Interval(0.0, 1.0),
    "random_gamma": POSITIVE,
    "regularized_incomplete_beta": Interval(0.0, 1.0),
    "sin": Interval(-1.0, 1.0),
}
# The domains in which partial functions are finite.
DOMAINS = {name: INCREASING[name][1] for name in ("asin", "atanh", "log", "log1p", "log2")} | {
    "sqrt": (0.0, INFINITY),
    "erf_inv": (-1.0, 1.0),
    "tan": (-math.pi / 2, math.pi / 2),
}


def of_function(name: str, operands: Iterable[Interval]) -> Interval:
    """The image of these intervals under a function."""
    if name in INCREASING:
        function, (least, most) = INCREASING[name]
        (operand,) = operands
        return operand.within(least, most).increasing(function)
    if name in _WITHIN:
        return _WITHIN[name]
    return _FUNCTIONS[name](*operands) if name in _FUNCTIONS else ANY


def _smallest(a: Interval, b: Interval) -> Interval:
    # min(a, b) = −max(−a, −b), including open ends.
    return -((-a).largest(-b))


def _clamped(least: Interval, value: Interval, most: Interval) -> Interval:
    return _smallest(value.largest(least), most)


def _difference(a: Interval, b: Interval) -> Interval:
    return a + -b


def _quotient(a: Interval, b: Interval) -> Interval:
    return a * b.reciprocal


def _inverse_root(a: Interval) -> Interval:
    return a.within(0.0, INFINITY).increasing(np.sqrt).reciprocal


_FUNCTIONS: dict[str, Callable[..., Interval]] = {
    "abs": lambda a: a.magnitude,
    "add": Interval.__add__,
    "add_any": Interval.__add__,
    "clamp": _clamped,
    "div": _quotient,
    "inverse": lambda a: a.reciprocal,
    "max": Interval.largest,
    "min": _smallest,
    "neg": Interval.__neg__,
    "rsqrt": _inverse_root,
    "square": lambda a: a.power(2),
    "sub": _difference,
}


def decided(comparison: str, a: Interval, b: Interval) -> bool | None:
    """True or False if that is the outcome for all numbers of two intervals, else `None`."""
    match comparison:
        case "lt":
            return _less(a, b)
        case "gt":
            return _less(b, a)
        case "eq":
            return _equal(a, b)
    opposite = decided({"le": "gt", "ge": "lt", "ne": "eq"}[comparison], a, b)
    return None if opposite is None else not opposite


def _less(a: Interval, b: Interval) -> bool | None:
    """`a < b` for all of their numbers."""
    if a.high < b.low or (a.high == b.low and (a.high_open or b.low_open)):
        return True
    return False if a.low >= b.high else None


def _equal(a: Interval, b: Interval) -> bool | None:
    if _less(a, b) or _less(b, a):
        return False
    return True if a.low == a.high == b.low == b.high else None
