"""Entries: the entries of a program's arrays as terms.

Data, integers and carried values are unknowns, so that a proof about a term holds for all of their
values. A value that may itself jump is a special unknown, which may differ between the two sides of
a step.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Hashable, Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from ..jaxprs.program import Atom, Cond, Constant, Equation, Variable
from . import matrices, terms
from .algebra import Algebra
from .entry_rules import RULES, is_arithmetic
from .facts import Facts, is_complex, is_inexact
from .indices import Index, entry_of, is_one_place, moved_index, part_of
from .interval import ANY, Interval
from .interval_functions import decided, of_function
from .terms import COMPARED, Proposition, Term, TooLarge

Open = Mapping[Equation, bool]

# A value with a longer history or more entries than this is an unknown of its own.
_DEEPEST, _MOST_ENTRIES = 60, 2000
_FUNCTIONS = {
    *("acos", "acosh", "asin", "asinh", "atan", "atanh", "bessel_i0e", "bessel_i1e"),
    *("cbrt", "cos", "cosh", "digamma", "erf", "erf_inv", "exp", "igamma", "igammac", "lgamma"),
    *("log", "max", "min", "polygamma", "regularized_incomplete_beta", "sin", "sinh", "sqrt"),
    *("tan", "tanh"),
}


@dataclasses.dataclass(frozen=True)
class Jumping:
    """The key of an unknown that may differ between the two sides, because it has open steps."""

    key: Hashable
    steps: frozenset[Equation]


class Builder:
    """Builds terms for the entries of a program's arrays, as far back as possible."""

    def __init__(self, facts: Facts, opens: Mapping[Variable, Open]):
        self.facts, self.algebra, self._opens = facts, Algebra(), opens
        self._terms: dict[tuple[Atom, Index], Term] = {}
        self._truths: dict[tuple[Atom, Index], Proposition] = {}
        self._intervals: dict[terms.Atom, Interval] = {}
        self._depth, self._num_entries = 0, 0
        self._roots: dict[Atom, Atom | None] = {}
        facts.bounds.is_definite = lambda matrix: self.root(matrix) is not None
        # The comparisons that were turned into conditions, by the term that is compared with 0.
        self.origins: dict[Term, set[Equation]] = {}
        # Remainders `rem(u, m)` with a constant m.
        self.remainders: dict[terms.Atom, Equation] = {}

    def begin(self) -> None:
        """Reset the work limit; call it before each proof."""
        self._num_entries, self.algebra.work = 0, 0

    def term(self, atom: Atom, index: Index) -> Term:
        atom = self.facts.resolve(atom)
        if isinstance(atom, Constant):
            return self._constant(atom, index)
        key = (atom, index)
        if key not in self._terms:
            # An unknown may be any number, so a proof that treats an entry as unknown still holds;
            # it only proves less. The entry is not cached: another proof may get further.
            if self._depth > _DEEPEST or self._num_entries > _MOST_ENTRIES:
                return self._opaque(atom, index)
            self._depth, self._num_entries = self._depth + 1, self._num_entries + 1
            try:
                self._terms[key] = self._made(atom, index)
            finally:
                self._depth -= 1
        return self._terms[key]

    def _constant(self, atom: Constant, index: Index) -> Term:
        value = atom.known
        if value is not None and value.ndim and is_one_place(index):
            value = value[index]
        different = np.unique([] if value is None else value)
        if different.size != 1 or np.iscomplexobj(different):
            return self.algebra.unknown(("input", self.facts.number(atom), index))
        one = float(different.item())
        if math.isnan(one):
            return self.algebra.unknown("nan")
        return terms.number(one) if math.isfinite(one) else self.algebra.infinite(one)

    def _opaque(self, variable: Variable, index: Index) -> Term:
        kind = "value" if variable in self.facts.defined_by else "input"
        # Keyed by the value's number, not by its variable: equal computations are one unknown and
        # cancel.
        key: Hashable = (kind, self.facts.number(variable), index)
        steps = frozenset(self._opens.get(variable, ()))
        atom = self.algebra.atom("unknown", Jumping(key, steps) if steps else key)
        self._intervals[atom] = self.facts.bounds.of(variable)
        return self.algebra.of(atom)

    def interval(self, term: Term) -> Interval:
        """An interval that contains the term for all finite inputs."""
        total = Interval(0.0, 0.0)
        for monomial, coefficient in term.monomials:
            part = Interval(coefficient, coefficient)
            for atom, exponent in monomial:
                part = part * self._interval_of(atom).power(exponent)
            total = total + part
        return total

    def _interval_of(self, atom: terms.Atom) -> Interval:
        if atom not in self._intervals:
            parts = [part for part in atom.arguments if isinstance(part, Term)]
            inside = map(self.interval, parts)
            if atom.kind == "if":
                self._intervals[atom] = functools.reduce(Interval.hull, inside)
            elif len(parts) == len(atom.arguments):
                self._intervals[atom] = of_function(atom.kind, inside)
            else:
                self._intervals[atom] = ANY
        return self._intervals[atom]

    def root(self, matrix: Atom) -> Atom | None:
        """The Cholesky factor of a matrix, if it is known (`matrices.root_of`)."""
        if matrix not in self._roots:
            self._roots[matrix] = matrices.root_of(self, matrix)
        return self._roots[matrix]

    def _made(self, variable: Variable, index: Index) -> Term:
        equation = self.facts.defined_by.get(variable)
        if equation is None:
            return self._opaque(variable, index)
        inner = self.facts.body_output(equation, variable)
        if inner is not None:
            return self.term(inner, index)
        if isinstance(equation.control, Cond):
            return self._branches(equation, equation.outputs.index(variable), index)
        place = moved_index(equation, index)
        if place is not None:
            return self.term(equation.inputs[0], place)
        rule = RULES.get(equation.primitive)
        # A rule may be too large for this entry alone; then the entry becomes an unknown.
        if rule is not None and is_arithmetic(equation):
            try:
                made = rule(self, equation, index)
            except TooLarge:
                if self.algebra.is_exhausted:
                    raise
                made = None
            if made is not None:
                return made
        if equation.primitive in _FUNCTIONS and is_inexact(variable):
            return self.algebra.function(equation.primitive, *self.operands(equation, index))
        return self._opaque(variable, index)

    def operands(self, equation: Equation, index: Index) -> list[Term]:
        return [self.term(atom, entry_of(atom, index)) for atom in equation.inputs]

    def _branches(self, equation: Equation, output: int, index: Index) -> Term:
        assert isinstance(equation.control, Cond)
        cases = [branch.outputs[output] for branch in equation.control.branches]
        chosen = self.chosen(equation.inputs[0], (), [(case, index) for case in cases])
        return self._opaque(equation.outputs[output], index) if chosen is None else chosen

    def chosen(self, which: Atom, place: Index, cases: Sequence[tuple[Atom, Index]]) -> Term | None:
        """The term that an index selects from the cases; `None` if the cases differ and the origin
        of the index is unknown.
        """
        conditions = self._is_number(which, place, len(cases))
        if conditions is None:
            # All cases are the same term.
            first, *others = (self.term(*case) for case in cases)
            return first if all(other == first for other in others) else None
        *others, last = cases
        chosen = self.term(*last)
        for condition, case in zip(reversed(conditions[:-1]), reversed(others), strict=True):
            chosen = self.algebra.choose(condition, self.term(*case), chosen)
        return chosen

    def _is_number(self, atom: Atom, index: Index, count: int) -> list[Proposition] | None:
        """The conditions that an integer below `count` is 0, 1, …, if it is made from booleans."""
        equation = self.facts.definition(atom)
        if equation is None:
            return None
        # Each rule maps the conditions exactly; anything else is unknown (`None`).
        place = moved_index(equation, index)
        if place is not None:
            return self._is_number(equation.inputs[0], place, count)
        if equation.primitive == "clamp":
            return self._is_number(equation.inputs[1], index, count)
        if equation.primitive == "convert_element_type":
            (operand,) = equation.inputs
            if operand.dtype == jnp.bool_ and count == 2:
                truth = self.truth(operand, index)
                return [self.algebra.logic("not", truth), truth]
            return None if is_inexact(operand) else self._is_number(operand, index, count)
        if equation.primitive == "argmax" and equation.inputs[0].shape == (count,):
            return self._first_or_last(equation.inputs[0], count)
        return None

    def _first_or_last(self, array: Atom, count: int) -> list[Proposition] | None:
        """For each entry, the condition that it is the first true one; entry 0 counts as first if
        none is true. For cumulative sums of booleans, whose maximum is reached at the last true
        entry, the last one instead.
        """
        made, logic = self.facts.definition(array), self.algebra.logic
        backward = made is not None and made.primitive == "cumsum"
        if backward:
            made = self.facts.definition(made.inputs[0])  # pyright: ignore
            if made is None or made.primitive != "convert_element_type":
                return None
            array = made.inputs[0]
        if array.dtype != jnp.bool_:
            return None
        truths = [self.truth(array, (entry,)) for entry in range(count)]
        conditions, rest = [], terms.TRUE
        # `rest`: no earlier entry is true. The conditions exclude each other and, with the last
        # line, exactly one of them holds.
        for truth in reversed(truths) if backward else truths:
            conditions.append(logic("and", rest, truth))
            rest = logic("and", rest, logic("not", truth))
        conditions = conditions[::-1] if backward else conditions
        return [logic("or", conditions[0], rest), *conditions[1:]]

    def truth(self, atom: Atom, index: Index) -> Proposition:
        atom = self.facts.resolve(atom)
        known = self.facts.bounds.truth(atom)
        if known is not None:
            return terms.known(known)
        if isinstance(atom, Constant):
            return Proposition("unknown", ((self.facts.number(atom), index),))
        key = (atom, index)
        if key not in self._truths:
            self._truths[key] = self._made_truth(atom, index)
        return self._truths[key]

    def _made_truth(self, variable: Variable, index: Index) -> Proposition:
        equation = self.facts.defined_by.get(variable)
        if equation is not None:
            name, inputs = equation.primitive, equation.inputs
            inner = self.facts.body_output(equation, variable)
            if inner is not None:
                return self.truth(inner, index)
            place = moved_index(equation, index)
            if place is not None:
                return self.truth(inputs[0], place)
            if name in ("concatenate", "stack"):
                part = part_of(equation, index)
                if part is not None:
                    return self.truth(*part)
            if name in ("and", "or", "not", "xor"):
                parts = [self.truth(atom, entry_of(atom, index)) for atom in inputs]
                return self.algebra.logic(name, *parts)
            if name in ("eq", "ne") and inputs[0].dtype == jnp.bool_:
                parts = [self.truth(atom, entry_of(atom, index)) for atom in inputs]
                differ = self.algebra.logic("xor", *parts)
                return differ if name == "ne" else self.algebra.logic("not", differ)
            if name in ("eq", "ne") and isinstance(inputs[1], Constant):
                is_number = self._is_number(inputs[0], index, 2)
                wanted = self._constant(inputs[1], ()).number
                if is_number is not None and wanted in (0.0, 1.0):
                    same = is_number[int(wanted)]
                    return same if name == "eq" else self.algebra.logic("not", same)
            if name in COMPARED and not any(map(is_complex, inputs)):
                return self._comparison(equation, index)
        key: Hashable = (self.facts.number(variable), index)
        steps = frozenset(self._opens.get(variable, ()))
        return Proposition("unknown", (Jumping(key, steps) if steps else key,))

    def _comparison(self, equation: Equation, index: Index) -> Proposition:
        if not all(map(self.facts.bounds.is_steady, equation.inputs)):
            # The value may be NaN, so not even `x == x` is known.
            key = ("comparison", self.facts.number(equation.outputs[0]), index)
            return Proposition("unknown", (Jumping(key, frozenset({equation})),))
        left, right = equation.inputs
        if left is right and not self.facts.bounds.is_steady(left, finite=True):
            # The same for all random values, but NaN at some theta.
            return Proposition("unknown", (("comparison", self.facts.number(left), index),))
        difference = self.algebra.subtract(*self.operands(equation, index))
        outcome = decided(equation.primitive, self.interval(difference), Interval(0.0, 0.0))
        if outcome is not None:
            return terms.known(outcome)
        return self.compared(equation.primitive, difference, equation)

    def compared(self, kind: str, term: Term, equation: Equation) -> Proposition:
        """The comparison of a term with 0 that an equation makes."""
        condition = self.algebra.compare(kind, term)
        if condition.kind != "known":
            self.origins.setdefault(condition.parts[0], set()).add(equation)
        return condition
