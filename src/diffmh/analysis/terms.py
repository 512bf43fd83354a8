"""Terms: numbers as polynomials in atoms, for proofs that two expressions are equal.

A term is `Σ coefficient · Π atom^exponent`. An atom is an unknown number, a function of terms such
as `exp(t)` that is not looked into, or `a if condition else b`. Equal polynomials in the same atoms
are equal numbers, whatever the atoms are; so an equality found here is a proof. Not every
equality is found.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import numpy as np

# Polynomials with more monomials, and functions nested deeper than this, are given up.
_MOST_MONOMIALS, _MOST_WORK = 300, 20_000
# A coefficient below this share of what was added up to it is a rounding error of our own.
_ROUNDING = 1e-13

Monomial = tuple[tuple["Atom", int], ...]


class TooLarge(Exception):
    """A term has outgrown what is worth proving."""


@dataclasses.dataclass(frozen=True, eq=False)
class Atom:
    """`kind(*arguments)`: an unknown (`kind="unknown"`, one hashable argument), a choice (`"if"`,
    a condition and two terms), or a function of terms. `rank` orders atoms. An algebra has one atom
    of a kind with the same arguments, so that atoms are compared by identity.
    """

    kind: str
    arguments: tuple[Any, ...]
    rank: int

    @property
    def is_infinite(self) -> bool:
        """Whether it is `infinite(±∞)`."""
        return self.kind == "unknown" and self.arguments in _INFINITIES


_INFINITIES = ((("infinite", math.inf),), (("infinite", -math.inf),))


@dataclasses.dataclass(frozen=True)
class Term:
    """Monomials with their coefficients, in order. `sizes` are the sums of magnitudes that the
    coefficients were added up from: a coefficient is known to some 1e-7 of its size if the
    program's constants are float32.
    """

    monomials: tuple[tuple[Monomial, float], ...]
    sizes: tuple[float, ...] = dataclasses.field(compare=False)

    @property
    def number(self) -> float | None:
        """The value of a term without atoms, else `None`."""
        if not self.monomials:
            return 0.0
        (monomial, coefficient), *rest = self.monomials
        return coefficient if not monomial and not rest else None

    @property
    def infinity(self) -> float:
        """The infinity that the term is, or 0 if it is finite or that is not known."""
        ends = [
            coefficient * monomial[0][0].arguments[0][1]  # pyright: ignore
            for monomial, coefficient in self.monomials
            if len(monomial) == 1 and monomial[0][1] == 1 and monomial[0][0].is_infinite
        ]
        return ends[0] if ends and ends.count(ends[0]) == len(ends) else 0.0

    @property
    def is_infinite(self) -> bool:
        return any(atom.is_infinite for atom in self.atoms())

    def is_zero(self, precision: float) -> bool:
        return all(
            abs(coefficient) <= precision * size
            for (_, coefficient), size in zip(self.monomials, self.sizes, strict=True)
        )

    def atoms(self) -> Iterator[Atom]:
        """The atoms of the polynomial itself, not those inside of functions."""
        seen = {atom: None for monomial, _ in self.monomials for atom, _ in monomial}
        yield from seen

    def contains(self, atom: Atom) -> bool:
        """Whether an atom is part of the term, inside of functions too."""
        return any(one == atom or _inside(one, atom) for one in self.atoms())


def _inside(outer: Atom, atom: Atom) -> bool:
    return any(
        part.contains(atom) if isinstance(part, Term | Condition) else False
        for part in outer.arguments
    )


@dataclasses.dataclass(frozen=True)
class Condition:
    """A truth value: `"known"` (its value), `"unknown"` (anything hashable), a comparison of a term
    with 0 (`"lt"`, `"le"`, `"gt"`, `"ge"`, `"eq"`, `"ne"`), or `"and"`, `"or"`, `"xor"`, `"not"` of
    conditions.
    """

    kind: str
    parts: tuple[Any, ...]

    def contains(self, atom: Atom) -> bool:
        return any(isinstance(p, Term | Condition) and p.contains(atom) for p in self.parts)

    def comparisons(self) -> Iterator[Condition]:
        if self.kind in COMPARED:
            yield self
        for part in self.parts:
            if isinstance(part, Condition):
                yield from part.comparisons()


COMPARED: dict[str, Callable[[float], bool]] = {
    "lt": lambda d: d < 0,
    "le": lambda d: d <= 0,
    "gt": lambda d: d > 0,
    "ge": lambda d: d >= 0,
    "eq": lambda d: d == 0,
    "ne": lambda d: d != 0,
}
_MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq", "ne": "ne"}
TRUE, FALSE = Condition("known", (True,)), Condition("known", (False,))


def known(value: bool) -> Condition:
    return TRUE if value else FALSE


def number(value: float) -> Term:
    value = float(value)
    if value == 0:
        return Term((), ())
    return Term((((), value),), (abs(value),))


ZERO, ONE = number(0.0), number(1.0)


class Algebra:
    """Makes terms. Each atom gets a rank when it is first seen, by which monomials are sorted."""

    def __init__(self) -> None:
        # Products of monomials since it was last set to 0.
        self.work = 0
        self._ranks: dict[tuple[str, tuple[Hashable, ...]], Atom] = {}

    def atom(self, kind: str, *arguments: Hashable) -> Atom:
        key = (kind, arguments)
        if key not in self._ranks:
            self._ranks[key] = Atom(kind, arguments, len(self._ranks))
        return self._ranks[key]

    def unknown(self, key: Hashable) -> Term:
        return self.of(self.atom("unknown", key))

    def of(self, atom: Atom, exponent: int = 1) -> Term:
        return Term(((((atom, exponent),), 1.0),), (1.0,))

    # Arithmetic.

    def add(self, *terms: Term) -> Term:
        sums: dict[Monomial, tuple[float, float]] = {}
        for term in terms:
            for (monomial, coefficient), size in zip(term.monomials, term.sizes, strict=True):
                value, total = sums.get(monomial, (0.0, 0.0))
                sums[monomial] = value + coefficient, total + size
        return self._collected(sums)

    def scale(self, factor: float, term: Term) -> Term:
        return self.multiply(number(factor), term)

    def subtract(self, a: Term, b: Term) -> Term:
        return self.add(a, self.scale(-1.0, b))

    def multiply(self, a: Term, b: Term) -> Term:
        self.work += len(a.monomials) * len(b.monomials)
        if len(a.monomials) * len(b.monomials) > _MOST_MONOMIALS or self.work > _MOST_WORK:
            raise TooLarge
        if not (a.monomials and b.monomials) and (a.is_infinite or b.is_infinite):
            raise Singular  # 0 · ∞
        sums: dict[Monomial, tuple[float, float]] = {}
        rewritten: list[Term] = []
        for (left, x), size_x in zip(a.monomials, a.sizes, strict=True):
            for (right, y), size_y in zip(b.monomials, b.sizes, strict=True):
                monomial, factor = self._joined(left, right)
                if factor is not None:
                    rest = Term(((monomial, x * y),), (size_x * size_y,))
                    rewritten.append(self.multiply(rest, factor))
                    continue
                value, total = sums.get(monomial, (0.0, 0.0))
                sums[monomial] = value + x * y, total + size_x * size_y
        return self.add(self._collected(sums), *rewritten)

    def _collected(self, sums: Mapping[Monomial, tuple[float, float]]) -> Term:
        if len(sums) > _MOST_MONOMIALS:
            raise TooLarge
        kept = [
            ((monomial, value), size)
            for monomial, (value, size) in sums.items()
            if not abs(value) <= _ROUNDING * size
        ]
        kept.sort(key=lambda item: tuple((atom.rank, power) for atom, power in item[0][0]))
        return Term(tuple(one for one, _ in kept), tuple(size for _, size in kept))

    def _joined(self, left: Monomial, right: Monomial) -> tuple[Monomial, Term | None]:
        """The product of two monomials, and a factor that squares of roots and magnitudes leave:
        `√u² = u`, `|u|² = u²`.
        """
        powers = dict(left)
        for atom, power in right:
            powers[atom] = powers.get(atom, 0) + power
        factor: Term | None = None
        for atom in [a for a in powers if a.kind in ("sqrt", "abs") and abs(powers[a]) > 1]:
            half, rest = divmod(abs(powers[atom]), 2)
            (inside,) = atom.arguments
            assert isinstance(inside, Term)
            squared = inside if atom.kind == "sqrt" else self.multiply(inside, inside)
            whole = self.power(squared, half if powers[atom] > 0 else -half)
            factor = whole if factor is None else self.multiply(factor, whole)
            powers[atom] = rest if powers[atom] > 0 else -rest
        joined = tuple(
            sorted(((a, p) for a, p in powers.items() if p), key=lambda item: item[0].rank)
        )
        return joined, factor

    def power(self, term: Term, exponent: int) -> Term:
        if exponent < 0:
            return self.power(self.reciprocal(term), -exponent)
        if exponent > 12:
            return self.function("power", term, exponent)
        result = ONE
        for _ in range(exponent):
            result = self.multiply(result, term)
        return result

    def reciprocal(self, term: Term) -> Term:
        """Of 0 it is an unknown of its own, whatever it is multiplied by (see `singular`)."""
        if len(term.monomials) == 1:
            ((monomial, coefficient),) = term.monomials
            inverse = tuple((atom, -power) for atom, power in monomial)
            return Term(((inverse, 1 / coefficient),), (abs(1 / coefficient),))
        if not term.monomials:
            raise Singular
        scale = term.monomials[0][1]
        return self.scale(1 / scale, self.of(self.atom("inverse", self.scale(1 / scale, term))))

    def divide(self, a: Term, b: Term) -> Term:
        return self.multiply(a, self.reciprocal(b))

    def equal(self, a: Term, b: Term, precision: float) -> bool:
        """Whether two terms are proved equal, up to rounding; equal infinities are."""
        if a.infinity and a.infinity == b.infinity:
            return True
        return self.difference(a, b).is_zero(precision)

    def difference(self, a: Term, b: Term) -> Term:
        """`a − b`, times what it divides by."""
        rest = self.subtract(a, b)
        for _ in range(4):
            inverse = next((atom for atom in rest.atoms() if atom.kind == "inverse"), None)
            if inverse is None:
                break
            rest = self._cleared(rest, inverse)
        return rest

    def _cleared(self, term: Term, inverse: Atom) -> Term:
        """The term times the highest power of `1 / inverse` in it."""
        most = max(dict(monomial).get(inverse, 0) for monomial, _ in term.monomials)
        (denominator,) = inverse.arguments
        parts = []
        for (monomial, coefficient), size in zip(term.monomials, term.sizes, strict=True):
            powers = dict(monomial)
            power = powers.pop(inverse, 0)
            rest = Term(((tuple(powers.items()), coefficient),), (size,))
            parts.append(self.multiply(rest, self.power(denominator, most - power)))
        return self.add(*parts)

    # Functions.

    def function(self, name: str, *arguments: Hashable) -> Term:
        """`name(*arguments)`, simplified where it is known how."""
        if name in _SIMPLIFIED:
            found = _SIMPLIFIED[name](self, *arguments)
            if found is not None:
                return found
        terms = [a for a in arguments if isinstance(a, Term)]
        if name in _EVALUATED and len(terms) == len(arguments):
            numbers = [term.number for term in terms]
            if all(value is not None for value in numbers):
                return self._evaluated(name, numbers)
        return self.of(self.atom(name, *arguments))

    def _evaluated(self, name: str, numbers: list[Any]) -> Term:
        with np.errstate(all="ignore"):
            value = float(_EVALUATED[name](*numbers))
        if not math.isfinite(value):
            raise Singular
        return number(value)

    def compare(self, kind: str, term: Term) -> Condition:
        """A comparison of a term with 0, scaled such that its first coefficient is 1."""
        value = term.number
        if value is not None:
            return known(COMPARED[kind](value))
        first = term.monomials[0][1]
        kind = kind if first > 0 else _MIRRORED[kind]
        return Condition(kind, (self.scale(1 / first, term),))

    def logic(self, kind: str, *parts: Condition) -> Condition:
        values = [part.parts[0] if part.kind == "known" else None for part in parts]
        if kind == "not":
            return known(not values[0]) if values[0] is not None else Condition("not", parts)
        if kind in ("and", "or"):
            ends = kind == "or"
            if ends in values:
                return known(ends)
            left = [part for part, value in zip(parts, values, strict=True) if value is None]
            if len(left) < 2:
                return left[0] if left else known(not ends)
            return left[0] if left[0] == left[1] else Condition(kind, tuple(left))
        if None not in values:
            return known(values[0] != values[1])
        if True in values or False in values:
            other = parts[1] if values[0] is not None else parts[0]
            return self.logic("not", other) if True in values else other
        return Condition("xor", parts)

    def infinite(self, end: float) -> Term:
        return self.unknown(("infinite", end))

    def choose(self, condition: Condition, if_true: Term, if_false: Term) -> Term:
        if condition.kind == "known":
            return if_true if condition.parts[0] else if_false
        if if_true == if_false:
            return if_true
        return self.of(self.atom("if", condition, if_true, if_false))

    # Replacement.

    def replace(
        self,
        term: Term,
        atoms: Callable[[Atom], Term | None],
        decide: Callable[[Condition, Condition | None], Condition | None],
        memo: dict[Hashable, Any] | None = None,
    ) -> Term:
        """The term with atoms replaced by terms, inside of functions too, and with conditions
        decided. `decide` is asked before the terms in a comparison are replaced, and again with
        what came of it; it returns `None` where it knows nothing.
        """
        memo = {} if memo is None else memo
        if term in memo:
            return memo[term]
        parts = []
        for (monomial, coefficient), size in zip(term.monomials, term.sizes, strict=True):
            product = Term((((), coefficient),), (size,))
            for atom, power in monomial:
                new = self._replaced(atom, atoms, decide, memo)
                product = self.multiply(product, self.power(new, power))
            parts.append(product)
        memo[term] = self.add(*parts) if parts else ZERO
        return memo[term]

    def _replaced(self, atom: Atom, atoms, decide, memo) -> Term:
        if atom in memo:
            return memo[atom]
        result = atoms(atom)
        if result is not None:
            pass
        elif atom.kind == "unknown":
            result = self.of(atom)
        elif atom.kind == "if":
            condition, if_true, if_false = atom.arguments
            condition = self.replace_in(condition, atoms, decide, memo)
            # Only the case that is taken is looked at: the other may be singular here.
            if condition.kind == "known":
                taken = if_true if condition.parts[0] else if_false
                result = self.replace(taken, atoms, decide, memo)
            else:
                result = self.choose(
                    condition,
                    self.replace(if_true, atoms, decide, memo),
                    self.replace(if_false, atoms, decide, memo),
                )
        else:
            result = self.function(
                atom.kind,
                *(
                    self.replace(part, atoms, decide, memo) if isinstance(part, Term) else part
                    for part in atom.arguments
                ),
            )
        memo[atom] = result
        return result

    def replace_in(self, condition: Condition, atoms, decide, memo) -> Condition:
        decided = decide(condition, None)
        if decided is not None or condition.kind in ("known", "unknown"):
            return decided or condition
        if condition.kind in COMPARED:
            term = self.replace(condition.parts[0], atoms, decide, memo)
            replaced = Condition(condition.kind, (term,))
            return decide(condition, replaced) or self.compare(condition.kind, term)
        return self.logic(
            condition.kind,
            *(self.replace_in(part, atoms, decide, memo) for part in condition.parts),
        )


class Singular(Exception):
    """A term is not a number: it divides by 0, or takes a function where it is not finite."""


_EVALUATED: dict[str, Callable[..., Any]] = {
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
    value = algebra.subtract(a, b).number
    if value is not None:
        return a if value > 0 else b
    key = lambda term: tuple((tuple((x.rank, p) for x, p in m), c) for m, c in term.monomials)
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
_SIMPLIFIED: dict[str, Callable[..., Term | None]] = {
    "abs": _abs,
    "asinh": _odd("asinh"),
    "atan": _odd("atan"),
    "erf": _odd("erf"),
    "exp": _exp,
    "inverse": Algebra.reciprocal,
    "log": _log,
    "max": _max,
    "min": _min,
    "sin": _odd("sin"),
    "sinh": _odd("sinh"),
    "sqrt": _sqrt,
    "tanh": _odd("tanh"),
}
