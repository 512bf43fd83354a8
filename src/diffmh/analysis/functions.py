"""Functions of terms: their values at numbers, and simplifications."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .terms import ZERO, Atom, Term, number

if TYPE_CHECKING:
    from .algebra import Algebra

EVALUATED: dict[str, Callable[..., Any]] = {
    "acos": np.arccos,
    "acosh": np.arccosh,
    "asin": np.arcsin,
    "asinh": np.arcsinh,
    "atan": np.arctan,
    "atan2": np.arctan2,
    "atanh": np.arctanh,
    "cos": np.cos,
    "cosh": np.cosh,
    "erf": math.erf,
    "exp": np.exp,
    "lgamma": math.lgamma,
    "log": np.log,
    "log1p": np.log1p,
    "pow": np.power,
    "sin": np.sin,
    "sinh": np.sinh,
    "sqrt": np.sqrt,
    "tan": np.tan,
    "tanh": np.tanh,
}


def _sign_of_first(term: Term) -> float:
    return math.copysign(1.0, term.monomials[0][1]) if term.monomials else 1.0


def _abs(algebra: Algebra, term: Term) -> Term | None:
    value = term.number
    if value is not None:
        return number(abs(value))
    if len(term.monomials) == 1 and all(atom.kind in _POSITIVE for atom in term.atoms()):
        return algebra.scale(_sign_of_first(term), term)
    if abs(term.monomials[0][1]) != 1 or _sign_of_first(term) < 0:
        first = term.monomials[0][1]
        inside = algebra.scale(1 / first, term)
        return algebra.scale(abs(first), algebra.function("abs", inside))
    return None


def _max(algebra: Algebra, a: Term, b: Term) -> Term | None:
    if a == b:
        return a
    # Terms that differ by a constant have the same order everywhere.
    value = algebra.subtract(a, b).number
    if value is not None:
        return a if value > 0 else b

    def key(term):
        return tuple((tuple((x.rank, p) for x, p in m), c) for m, c in term.monomials)

    # max is symmetric: a canonical order makes max(a, b) and max(b, a) one atom.
    if key(b) < key(a):
        return algebra.function("max", b, a)
    return None


def _min(algebra: Algebra, a: Term, b: Term) -> Term:
    negative = algebra.function("max", algebra.scale(-1.0, a), algebra.scale(-1.0, b))
    return algebra.scale(-1.0, negative)


def _odd(name: str):
    """`f(−t) = −f(t)`."""

    def simplified(algebra: Algebra, term: Term) -> Term | None:
        if term.number is None and _sign_of_first(term) < 0:
            return algebra.scale(-1.0, algebra.function(name, algebra.scale(-1.0, term)))
        return None

    return simplified


def _only_atom(term: Term, kind: str) -> Atom | None:
    if len(term.monomials) == 1:
        ((monomial, coefficient),) = term.monomials
        if coefficient == 1 and len(monomial) == 1 and monomial[0][1] == 1:
            return monomial[0][0] if monomial[0][0].kind == kind else None
    return None


def _exp(algebra: Algebra, term: Term) -> Term | None:
    """`exp(c log u + rest) = u^c exp(rest)`, which is 0 where u is, for c > 0; `exp(−∞) = 0`."""
    choice = _only_atom(term, "if")
    if choice is not None:
        condition, *cases = choice.arguments
        return algebra.choose(condition, *(algebra.function("exp", case) for case in cases))
    if term.infinity == -math.inf:
        return ZERO
    # Pull one log out of the exponent; the recursion on `rest` takes the others.
    for (monomial, coefficient), size in zip(term.monomials, term.sizes, strict=True):
        if len(monomial) == 1 and monomial[0][0].kind == "log" and monomial[0][1] == 1:
            (inside,) = monomial[0][0].arguments
            rest = algebra.subtract(term, Term(((monomial, coefficient),), (size,)))
            if coefficient == round(coefficient):
                power = algebra.power(inside, round(coefficient))
            else:
                power = algebra.function("pow", inside, number(coefficient))
            return algebra.multiply(power, algebra.function("exp", rest))
    return None


def _log(algebra: Algebra, term: Term) -> Term | None:
    if term.number == 0:
        return algebra.infinite(-math.inf)
    atom = _only_atom(term, "exp")
    return None if atom is None else atom.arguments[0]  # pyright: ignore


def _sqrt(algebra: Algebra, term: Term) -> Term | None:
    if len(term.monomials) == 1:
        ((monomial, coefficient),) = term.monomials
        if coefficient > 0 and monomial and all(power % 2 == 0 for _, power in monomial):
            root = tuple((atom, power // 2) for atom, power in monomial)
            magnitude = algebra.function("abs", Term(((root, 1.0),), (1.0,)))
            return algebra.scale(math.sqrt(coefficient), magnitude)
    return None


_POSITIVE = {"exp", "abs", "sqrt"}
SIMPLIFIED: dict[str, Callable[..., Term | None]] = {
    "abs": _abs,
    "asinh": _odd("asinh"),
    "atan": _odd("atan"),
    "erf": _odd("erf"),
    "exp": _exp,
    # The product is not expanded, since that may create too many monomials.
    "factor": lambda algebra, term: term if len(term.monomials) < 2 else None,
    "inverse": lambda algebra, term: algebra.reciprocal(term),
    "log": _log,
    "max": _max,
    "min": _min,
    "sin": _odd("sin"),
    "sinh": _odd("sinh"),
    "sqrt": _sqrt,
    "tanh": _odd("tanh"),
}
