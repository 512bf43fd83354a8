"""The algebra of terms: sums, products, functions, choices and replacement."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import numpy as np

from .functions import EVALUATED, SIMPLIFIED
from .terms import (
    COMPARED,
    MIRRORED,
    ONE,
    ZERO,
    Atom,
    Monomial,
    Proposition,
    Singular,
    Term,
    TooLarge,
    known,
    number,
)

# Larger polynomials (in monomials) and functions nested deeper than this are given up.
_MOST_MONOMIALS, _MOST_WORK = 300, 20_000
# A coefficient below this fraction of the terms that were summed is treated as our own rounding.
_ROUNDING = 1e-13


class Algebra:
    """Creates terms. Each atom gets a rank when it is first seen; monomials are sorted by rank."""

    def __init__(self) -> None:
        # Number of products of monomials since it was last reset.
        self.work = 0
        self._ranks: dict[tuple[str, tuple[Hashable, ...]], Atom] = {}

    @property
    def is_exhausted(self) -> bool:
        return self.work > _MOST_WORK

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
        if len(a.monomials) * len(b.monomials) > _MOST_MONOMIALS or self.is_exhausted:
            raise TooLarge
        if not (a.monomials and b.monomials) and (a.is_infinite or b.is_infinite):
            raise Singular  # 0 · ∞
        sums: dict[Monomial, tuple[float, float]] = {}
        rewritten: list[Term] = []
        # Products that contain √u² or |u|² are rewritten, and their factors multiplied out again.
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
            # Written so that NaN is kept: a NaN coefficient must not vanish.
            if not abs(value) <= _ROUNDING * size
        ]
        # A canonical order: equal polynomials are equal tuples.
        kept.sort(key=lambda item: tuple((atom.rank, power) for atom, power in item[0][0]))
        return Term(tuple(one for one, _ in kept), tuple(size for _, size in kept))

    def _joined(self, left: Monomial, right: Monomial) -> tuple[Monomial, Term | None]:
        """The product of two monomials, and a factor from squares of roots and absolute values:
        `√u² = u`, `|u|² = u²`.
        """
        powers = dict(left)
        for atom, power in right:
            powers[atom] = powers.get(atom, 0) + power
        factor: Term | None = None
        for atom in [a for a in powers if a.kind in ("sqrt", "abs") and abs(powers[a]) > 1]:
            # √u is real only where u ≥ 0, and there √u √u = u; |u| |u| = u² everywhere.
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
        """`1 / t`. The reciprocal of 0 raises `Singular`."""
        if len(term.monomials) == 1:
            ((monomial, coefficient),) = term.monomials
            inverse = tuple((atom, -power) for atom, power in monomial)
            return Term(((inverse, 1 / coefficient),), (abs(1 / coefficient),))
        # 1/0: the caller gives up the proof.
        if not term.monomials:
            raise Singular
        # Normalised to a first coefficient of 1, so that 1/(2u) and 1/u share an atom.
        scale = term.monomials[0][1]
        return self.scale(1 / scale, self.of(self.atom("inverse", self.scale(1 / scale, term))))

    def divide(self, a: Term, b: Term) -> Term:
        return self.multiply(a, self.reciprocal(b))

    def equal(self, a: Term, b: Term, precision: float) -> bool:
        """True if two terms are proved equal, up to rounding; equal infinities count as equal."""
        if a.infinity and a.infinity == b.infinity:
            return True
        return self.difference(a, b).is_zero(precision)

    def difference(self, a: Term, b: Term) -> Term:
        """`a − b`, times its denominators."""
        # a = b iff (a − b) · d = 0 for a denominator d ≠ 0. Where d is 0 the program divides by 0,
        # which is a step of its own (`steps`).
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
        """`name(*arguments)`, simplified where a rule is known."""
        if name in SIMPLIFIED:
            found = SIMPLIFIED[name](self, *arguments)
            if found is not None:
                return found
        terms = [a for a in arguments if isinstance(a, Term)]
        if name in EVALUATED and len(terms) == len(arguments):
            numbers = [term.number for term in terms]
            if all(value is not None for value in numbers):
                return self._evaluated(name, numbers)
        return self.of(self.atom(name, *arguments))

    def log1p(self, term: Term) -> Term:
        """`log(1 + t)`, evaluated to full precision where t is a small number."""
        value = term.number
        if value is not None and value > -1:
            return self._evaluated("log1p", [value])
        return self.function("log", self.add(ONE, term))

    def _evaluated(self, name: str, numbers: list[Any]) -> Term:
        with np.errstate(all="ignore"):
            value = float(EVALUATED[name](*numbers))
        if not math.isfinite(value):
            raise Singular
        return number(value)

    def multiplied_out(self, term: Term) -> Term:
        """The term with factors of running products expanded. The last factors are expanded first,
        so that telescoping sums stay small: `a (1 − b) + a b = a`.
        """
        factors = [atom for atom in term.atoms() if atom.kind == "factor"]
        while factors:
            last = max(factors, key=lambda atom: atom.rank)
            inside = {last: last.arguments[0]}
            term = self.replace(term, inside.get, lambda condition, replaced: None)
            factors = [atom for atom in term.atoms() if atom.kind == "factor"]
        return term

    def compare(self, kind: str, term: Term) -> Proposition:
        """The comparison of a term with 0, scaled to a first coefficient of 1."""
        value = term.number
        if value is not None:
            return known(COMPARED[kind](value))
        first = term.monomials[0][1]
        kind = kind if first > 0 else MIRRORED[kind]
        return Proposition(kind, (self.scale(1 / first, term),))

    def logic(self, kind: str, *parts: Proposition) -> Proposition:
        values = [part.parts[0] if part.kind == "known" else None for part in parts]
        if kind == "not":
            return known(not values[0]) if values[0] is not None else Proposition("not", parts)
        if kind in ("and", "or"):
            # `or` is decided by a True part, `and` by a False part; decided parts are dropped.
            ends = kind == "or"
            if ends in values:
                return known(ends)
            left = [part for part, value in zip(parts, values, strict=True) if value is None]
            if len(left) < 2:
                return left[0] if left else known(not ends)
            return left[0] if left[0] == left[1] else Proposition(kind, tuple(left))
        if None not in values:
            return known(values[0] != values[1])
        if True in values or False in values:
            other = parts[1] if values[0] is not None else parts[0]
            return self.logic("not", other) if True in values else other
        return Proposition("xor", parts)

    def infinite(self, end: float) -> Term:
        return self.unknown(("infinite", end))

    def choose(self, condition: Proposition, if_true: Term, if_false: Term) -> Term:
        if condition.kind == "known":
            return if_true if condition.parts[0] else if_false
        # Equal cases: the condition does not matter, so the value cannot jump there.
        if if_true == if_false:
            return if_true
        return self.of(self.atom("if", condition, if_true, if_false))

    # Replacement.

    def replace(
        self,
        term: Term,
        atoms: Callable[[Atom], Term | None],
        decide: Callable[[Proposition, Proposition | None], Proposition | None],
        memo: dict[Hashable, Any] | None = None,
    ) -> Term:
        """The term with atoms replaced by terms, also inside of functions, and with conditions
        decided. `decide` is called before the terms in a comparison are replaced and again with
        the result; it returns `None` if the outcome is unknown.
        """
        memo = {} if memo is None else memo
        if term in memo:
            return memo[term]
        # Atoms are replaced one by one and the products formed again, so terms stay canonical.
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
            # Only the case that is taken is replaced: the other may be singular here.
            if condition.kind == "known":
                taken = if_true if condition.parts[0] else if_false
                result = self.replace(taken, atoms, decide, memo)
            else:
                result = self.choose(
                    condition,
                    self.replace(if_true, atoms, decide, memo),
                    self.replace(if_false, atoms, decide, memo),
                )
        elif atom.kind == "log" and ((), 1.0) in atom.arguments[0].monomials:
            # The sum 1 + t would round a small t away.
            rest = self.subtract(atom.arguments[0], ONE)
            result = self.log1p(self.replace(rest, atoms, decide, memo))
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

    def replace_in(self, condition: Proposition, atoms, decide, memo) -> Proposition:
        decided = decide(condition, None)
        if decided is not None or condition.kind in ("known", "unknown"):
            return decided or condition
        if condition.kind in COMPARED:
            term = self.replace(condition.parts[0], atoms, decide, memo)
            replaced = Proposition(condition.kind, (term,))
            return decide(condition, replaced) or self.compare(condition.kind, term)
        return self.logic(
            condition.kind,
            *(self.replace_in(part, atoms, decide, memo) for part in condition.parts),
        )
