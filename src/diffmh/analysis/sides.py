"""Sides: the values on both sides of a comparison, as terms.

A comparison of moved values steps where they are equal. A selection by it is continuous there if
both cases are equal once the compared values are set equal: `where(x > t, x, t)` is t on both
sides. Everything else (data, integers, carried values) stays unknown, so that an equality found
here holds for all data.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from ..jaxprs.program import Equation, Variable
from . import terms
from .algebra import Algebra
from .entries import Builder, Jumping, Open
from .facts import Facts, is_complex
from .indices import Index, anywhere
from .terms import Proposition, Singular, Term, TooLarge

# The depth to which nested functions are inverted to find where a comparison steps.
_DEEPEST_SOLUTION = 6
# The entries of larger arrays are not compared one by one.
_MOST_COMPARED = 64


class Prover:
    """Proves that values do not jump where comparisons step."""

    def __init__(self, facts: Facts, opens: Mapping[Variable, Open]):
        self.facts, self._opens = facts, opens
        self._builder = Builder(facts, opens)
        self._tries: dict[Equation, int] = {}

    def forget(self) -> None:
        """Discard cached terms; call it when a step was opened at a value that was examined."""
        self._builder = Builder(self.facts, self._opens)

    def is_decided(self, comparison: Equation) -> bool:
        """True if a comparison has the same outcome everywhere: `p + (1 − p) < 1.001`."""
        (output,) = comparison.outputs
        if any(map(is_complex, comparison.inputs)):
            return False
        entries = itertools.product(*map(range, output.shape))
        few = math.prod(output.shape) <= _MOST_COMPARED
        return self._is_known(output, anywhere(output.shape)) or (
            few and all(self._is_known(output, entry) for entry in entries)
        )

    def _is_known(self, truth: Variable, index: Index) -> bool:
        self._builder.begin()
        try:
            return self._builder.truth(truth, index).kind == "known"
        except (TooLarge, Singular):
            return False

    def remaining(self, variable: Variable, steps: Open) -> dict[Equation, bool]:
        """The steps at which an entry of `variable` may jump, with True if that is proved, given
        the open steps of its operands.
        """
        left = {step: certain for step, certain in steps.items() if not self._worth_it(step)}
        tried = [step for step in steps if step not in left]
        if not tried:
            return dict(steps)
        # Any difference beyond rounding is a jump.
        is_real = jnp.issubdtype(variable.dtype, jnp.floating)
        rounding = 8 * float(jnp.finfo(variable.dtype).eps) if is_real else 0.0
        precision = min(rounding, 1e-6)
        self._builder.begin()
        try:
            term = self._builder.term(variable, anywhere(variable.shape))
        except (TooLarge, Singular):
            return dict(steps)
        hidden = {step for key in _jumping(term) for step in key.steps}
        surfaces = _surfaces(term, self._builder.origins)
        for step in tried:
            places = [place for place, origins in surfaces.items() if step in origins]
            if step.primitive == "rem":
                found = {a for a, e in self._builder.remainders.items() if e is step}
                atoms = [part for part in terms.parts(term) if part in found]
                if (
                    step in hidden
                    or not found
                    or any(self._wraps(term, a, precision) for a in atoms)
                ):
                    left[step] = steps[step]
                continue
            # Proved closed: every condition that stems from this step appears in the term
            # (otherwise the value does not depend on it), and both sides are equal at each of
            # their surfaces. A step without such a condition may be anywhere.
            if step in hidden or not any(step in found for found in self._builder.origins.values()):
                left[step] = steps[step]
                continue
            verdicts = [self._jumps(term, place, step, precision) for place in places]
            if any(verdict is not False for verdict in verdicts):
                left[step] = steps[step] or any(verdict is True for verdict in verdicts)
        return left

    def _worth_it(self, step: Equation) -> bool:
        self._tries[step] = self._tries.get(step, 0) + 1
        known = step.primitive in {*terms.COMPARED, "atan2", "rem", "sign"}
        return known and self._tries[step] <= 64

    def _jumps(self, term: Term, place: Term, step: Equation, precision: float) -> bool | None:
        """True if `term` jumps where `place` is 0, False if it does not; `None` if unproved."""
        algebra = self._builder.algebra
        # Operands that are not analytic may be equal on more than a surface: then equality (0) is a
        # third side.
        surface_only = all(map(self.facts.is_analytic, step.inputs))
        sides = (1, -1) if surface_only else (1, -1, 0)
        verdict: bool | None = None
        for solutions in _solutions(self._builder, place):
            algebra.work = 0
            try:
                # On the surface, both sides are evaluated with the solution substituted. The cases
                # together cover the surface, so equality in each proves that the value does not
                # jump there.
                found = [
                    self._differ(
                        [_beside(algebra, term, place, s, atoms, precision) for s in sides],
                        precision,
                    )
                    for atoms in solutions
                ]
            except (TooLarge, Singular):
                continue
            if not any(differ is not False for differ in found):
                return False
            # The step is reached: an input can take the value of the place.
            is_met = any(_is_plain(atom) for atoms in solutions for atom in atoms)
            verdict = verdict or (is_met and any(differ is True for differ in found)) or None
        return verdict

    def _wraps(self, term: Term, remainder: terms.Atom, precision: float) -> bool:
        """True if `term` may jump where `rem(u, m)` does: for positive u from m to 0, for negative
        u from 0 to −m.
        """
        algebra, place = self._builder.algebra, self._builder.algebra.of(remainder)
        divisor: Any = remainder.arguments[1]
        m = divisor.number
        try:
            # Both jumps must close: from m to 0 for positive u, and from 0 to −m for negative u.
            for below, above in (((m, 1), (0.0, 1)), ((0.0, -1), (-m, -1))):
                sides = [
                    _beside(algebra, term, place, sign, {remainder: terms.number(at)}, precision)
                    for at, sign in (below, above)
                ]
                if self._differ(sides, precision) is not False:
                    return True
        except (TooLarge, Singular):
            return True
        return False

    def _differ(self, sides: Sequence[Term], precision: float) -> bool | None:
        """True if the sides differ, False if not, `None` if unknown."""
        algebra = self._builder.algebra
        first, *others = sides
        if all(algebra.equal(first, other, precision) for other in others):
            return False
        if any(side.is_infinite for side in sides):
            return True
        differences = [algebra.difference(first, other) for other in others]
        proved = any(
            not difference.is_zero(precision) and all(map(_is_plain, difference.atoms()))
            for difference in differences
        )
        return True if proved else None


def _is_plain(atom: terms.Atom) -> bool:
    """True for an input or the index of an entry. These are independent numbers, so a polynomial
    in them is 0 only if all its coefficients are.
    """
    (key, *_) = atom.arguments
    return atom.kind == "unknown" and isinstance(key, tuple) and key[0] in ("input", "place")


def _jumping(term: Term) -> Iterator[Jumping]:
    for part in terms.parts(term):
        keys = part.arguments if isinstance(part, terms.Atom) else ()
        keys = part.parts if isinstance(part, Proposition) else keys
        yield from (key for key in keys if isinstance(key, Jumping))


def _surfaces(term: Term, origins: Mapping[Term, set[Equation]]) -> dict[Term, set[Equation]]:
    """The terms that its conditions compare with 0, with the comparisons they come from."""
    conditions = (part for part in terms.parts(term) if isinstance(part, Proposition))
    places = [one.parts[0] for one in conditions if one.kind in terms.COMPARED]
    return {place: origins.get(place, set()) for place in places}


def _beside(
    algebra: Algebra,
    term: Term,
    place: Term,
    side: int,
    solution: Mapping[terms.Atom, Term],
    precision: float,
) -> Term:
    """The term where `place` is 0, approached from the side where it is positive (1) or negative
    (−1), or exactly there (0).
    """

    def atoms(atom: terms.Atom) -> Term | None:
        # A value that jumps may differ between the sides: two different unknowns, which never
        # cancel.
        if atom.kind == "unknown" and isinstance(atom.arguments[0], Jumping):
            return algebra.unknown((atom.arguments[0], side))
        return solution.get(atom)

    def decide(condition: Proposition, replaced: Proposition | None) -> Proposition | None:
        if condition.kind == "unknown" and isinstance(condition.parts[0], Jumping):
            return Proposition("unknown", ((condition.parts[0], side),))
        if condition.kind not in terms.COMPARED:
            return None
        # This comparison is decided by the side of the approach.
        if condition.parts[0] == place:
            return terms.known(terms.COMPARED[condition.kind](side))
        if replaced is not None:
            (value,) = replaced.parts
            assert isinstance(value, Term)
            if value.is_zero(precision):
                # Another comparison steps at the same place in an unknown direction.
                return Proposition("unknown", ((condition, side),))
        return None

    return algebra.replace(term, atoms, decide)


Solution = dict[terms.Atom, Term]


def _solutions(builder: Builder, place: Term, depth: int = 0) -> Iterator[list[Solution]]:
    """Ways to solve `place = 0`. Each is a list of cases that together cover the surface; a case
    maps atoms to terms that they equal.
    """
    preferred = {"unknown": 0, "abs": 1, "max": 2, "sqrt": 3, "exp": 3, "log": 3}
    for atom in sorted(place.atoms(), key=lambda atom: preferred.get(atom.kind, 4))[:4]:
        if isinstance(atom.arguments[0], Jumping):
            continue
        try:
            cases = _solved_for(builder, place, atom, depth)
        except (TooLarge, Singular):
            continue
        if cases is not None:
            yield cases


def _solved_for(
    builder: Builder, place: Term, atom: terms.Atom, depth: int
) -> list[Solution] | None:
    algebra = builder.algebra
    split: dict[int, list[Term]] = {}
    for (monomial, coefficient), size in zip(place.monomials, place.sizes, strict=True):
        powers = dict(monomial)
        power = powers.pop(atom, 0)
        rest = Term(((tuple(powers.items()), coefficient),), (size,))
        split.setdefault(power, []).append(rest)
    by_power = {power: algebra.add(*parts) for power, parts in split.items()}
    # a^low · (rest + factor · a^power) = 0 can be solved for an atom a only if nothing else
    # contains it. A reciprocal is never 0.
    if any(part.contains(atom) for part in by_power.values()) or len(by_power) > 2:
        return None
    low = min(by_power)
    at_zero = _inverted(builder, atom, terms.ZERO, depth) if low > 0 else []
    rest = by_power.pop(low)
    if not by_power:
        others = _where_both_vanish(builder, rest, terms.ZERO, depth)
        return None if others is None else at_zero + others
    ((high, factor),) = by_power.items()
    power = high - low
    if power not in (1, 2):
        return None
    # Where factor and rest are both 0, the equation does not determine the atom: `u a + u r > 0`
    # steps at u = 0 too, not only at a = −r.
    both_vanish = _where_both_vanish(builder, factor, rest, depth)
    if both_vanish is None:
        return None
    value = algebra.scale(-1.0, algebra.divide(rest, factor))
    if power == 1:
        found = _inverted(builder, atom, value, depth)
    else:
        number = value.number
        if number is not None and number < 0:
            return at_zero + both_vanish
        root = algebra.function("sqrt", value)
        # Both roots: omitting one would prove continuity on half of the surface only.
        both = (root, algebra.scale(-1.0, root))
        found = [case for one in both for case in _inverted(builder, atom, one, depth)]
    return at_zero + found + both_vanish


def _where_both_vanish(
    builder: Builder, factor: Term, rest: Term, depth: int
) -> list[Solution] | None:
    """The cases in which `factor` and `rest` are both 0 on more than a lower-dimensional part of
    the surface `rest + factor · a = 0`; `None` if they cannot be found.
    """
    algebra = builder.algebra
    factor = _without_what_is_never_0(factor)
    if factor.number is not None or not builder.interval(factor).contains(0):
        return []
    if not builder.interval(rest).contains(0):
        return []
    if depth >= _DEEPEST_SOLUTION:
        return None
    solutions = next(_solutions(builder, factor, depth + 1), None)
    if solutions is None:
        return None
    cases = []
    for case in solutions:
        try:
            # Conditions are not decided: a term that depends on one stays an atom of its own.
            left = algebra.replace(rest, case.get, lambda condition, replaced: None)
            left = algebra.difference(left, terms.ZERO)
        except (TooLarge, Singular):
            return None
        # A nonzero polynomial in independent numbers is nonzero almost everywhere.
        almost_never = not left.is_zero(1e-6) and all(map(_is_plain, left.atoms()))
        if not almost_never and builder.interval(left).contains(0):
            cases.append(case)
    return cases


def _without_what_is_never_0(term: Term) -> Term:
    """A product without its reciprocals and exponentials, which are never 0."""
    if len(term.monomials) != 1:
        return term
    ((monomial, coefficient),) = term.monomials
    left = tuple((a, p) for a, p in monomial if p > 0 and a.kind not in ("exp", "inverse"))
    return Term(((left, coefficient),), term.sizes)


def _inverted(builder: Builder, atom: terms.Atom, value: Term, depth: int) -> list[Solution]:
    """The cases of `atom = value`, by inverting absolute values, maxima and other functions."""
    inside = _arguments_where(builder.algebra, atom, value) if depth < _DEEPEST_SOLUTION else []
    cases: list[Solution] = []
    for equation in inside:
        deeper = next(_solutions(builder, equation, depth + 1), None)
        cases += [{**case, atom: value} for case in ([{}] if deeper is None else deeper)]
    return cases if inside else [{atom: value}]


def _arguments_where(algebra: Algebra, atom: terms.Atom, value: Term) -> list[Term]:
    """Terms of which one is 0 where `atom = value`."""
    arguments: Any = atom.arguments
    try:
        # Together the terms must cover all solutions; extra ones only make a proof harder.
        match atom.kind:
            case "abs":
                (inside,) = arguments
                return [algebra.subtract(inside, value), algebra.add(inside, value)]
            case "max":
                return [algebra.subtract(one, value) for one in arguments]
            case "sqrt":
                return [algebra.subtract(arguments[0], algebra.multiply(value, value))]
            case "inverse":
                return [algebra.subtract(arguments[0], algebra.reciprocal(value))]
            case "exp":
                return [algebra.subtract(arguments[0], algebra.function("log", value))]
            case "log":
                return [algebra.subtract(arguments[0], algebra.function("exp", value))]
    except (TooLarge, Singular):
        pass
    return []
