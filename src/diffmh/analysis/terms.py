"""Terms: numbers as polynomials in atoms, for proofs that two expressions are equal.

A term is `Σ coefficient · Π atom^exponent`. An atom is an unknown number, a function of terms such
as `exp(t)`, or `a if condition else b`. Equal polynomials in the same atoms are equal numbers for
all values of the atoms, so an equality found here is a proof. Not every equality is found.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Iterator
from typing import Any

Monomial = tuple[tuple["Atom", int], ...]


class TooLarge(Exception):
    """A term is too large for a proof."""


class Singular(Exception):
    """A term is not finite: it divides by 0, or evaluates a function at a singularity."""


@dataclasses.dataclass(frozen=True, eq=False)
class Atom:
    """`kind(*arguments)`: an unknown (`kind="unknown"`, one hashable argument), a choice (`"if"`,
    a condition and two terms), or a function of terms. `rank` orders atoms. An algebra creates only
    one atom for each kind and arguments, so atoms are compared by identity.
    """

    kind: str
    arguments: tuple[Any, ...]
    rank: int

    @property
    def is_infinite(self) -> bool:
        """True if it is `infinite(±∞)`."""
        return self.kind == "unknown" and self.arguments in _INFINITIES


_INFINITIES = ((("infinite", math.inf),), (("infinite", -math.inf),))


@dataclasses.dataclass(frozen=True)
class Term:
    """Monomials with their coefficients, in order. `sizes` are the sums of the absolute values that
    were added to form the coefficients: with float32 constants, a coefficient is known to about
    1e-7 of its size.
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
        """The infinity that the term equals, or 0 if it is finite or unknown."""
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
        """The atoms of the polynomial itself, without those inside of functions."""
        # A dictionary, not a set: proofs must not depend on hash order.
        seen = {atom: None for monomial, _ in self.monomials for atom, _ in monomial}
        yield from seen

    def contains(self, atom: Atom) -> bool:
        """True if an atom is part of the term, also inside of functions."""
        return any(part is atom for part in parts(self))


@dataclasses.dataclass(frozen=True)
class Proposition:
    """A truth value: `"known"` (its value), `"unknown"` (any hashable), a comparison of a term
    with 0 (`"lt"`, `"le"`, `"gt"`, `"ge"`, `"eq"`, `"ne"`), or `"and"`, `"or"`, `"xor"`, `"not"` of
    conditions.
    """

    kind: str
    parts: tuple[Any, ...]


def parts(term: Term | Proposition) -> Iterator[Term | Proposition | Atom]:
    """Everything inside a term."""
    seen: set[Hashable] = set()
    waiting: list[Any] = [term]
    while waiting:
        part = waiting.pop()
        if part in seen:
            continue
        seen.add(part)
        yield part
        inside = part.atoms() if isinstance(part, Term) else ()
        if isinstance(part, Proposition):
            inside = part.parts
        elif isinstance(part, Atom):
            inside = part.arguments
        waiting.extend(one for one in inside if isinstance(one, Term | Proposition | Atom))


COMPARED: dict[str, Callable[[float], bool]] = {
    "lt": lambda d: d < 0,
    "le": lambda d: d <= 0,
    "gt": lambda d: d > 0,
    "ge": lambda d: d >= 0,
    "eq": lambda d: d == 0,
    "ne": lambda d: d != 0,
}
MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq", "ne": "ne"}
TRUE, FALSE = Proposition("known", (True,)), Proposition("known", (False,))


def known(value: bool) -> Proposition:
    return TRUE if value else FALSE


def number(value: float) -> Term:
    value = float(value)
    if value == 0:
        return Term((), ())
    return Term((((), value),), (abs(value),))


ZERO, ONE = number(0.0), number(1.0)
