"""Sides: what a value is on both sides of a comparison, as terms.

A comparison of moved values steps where they are equal. What it chooses is continuous there if both
cases are the same number once the compared values are set equal: `where(x > t, x, t)` is t on both
sides. Everything else, data, integers and carried values included, stays unknown, so that what is
found equal is equal whatever the data are.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from .._lowering import compat
from .._lowering.program import Atom, Cond, Constant, Equation, Variable
from . import terms
from .facts import Facts, dtype_of, is_inexact, shape_of
from .terms import Algebra, Condition, Singular, Term, TooLarge

# Where an entry of an array is: on each axis a number, or `offset + stride · label`.
Index = tuple[Any, ...]
Open = Mapping[Equation, bool]

COMPARISONS = {"lt", "le", "gt", "ge", "eq", "ne"}
# Further back, and with more entries than this, a value is an unknown of its own.
_DEEPEST, _MOST_ENTRIES = 60, 500
# Functions within functions that are inverted to find where a comparison steps.
_DEEPEST_SOLUTION = 6
_SAME_VALUE = {"copy", "copy_p", "name", "optimization_barrier", "pvary", "reduce_precision"} | {
    *("stop_gradient", "device_put")
}
_FUNCTIONS = {
    *("acos", "acosh", "asin", "asinh", "atan", "atanh", "bessel_i0e", "bessel_i1e"),
    *("cbrt", "cos", "cosh", "digamma", "erf", "erf_inv", "exp", "igamma", "igammac", "lgamma"),
    *("log", "max", "min", "polygamma", "regularized_incomplete_beta", "sin", "sinh", "sqrt"),
    *("tan", "tanh"),
}


@dataclasses.dataclass(frozen=True)
class Jumping:
    """The key of an unknown that may differ on both sides: a value with steps of its own."""

    key: Hashable
    steps: frozenset[Equation]


class Builder:
    """Makes terms of the entries of a program's arrays, as far back as it can."""

    def __init__(self, facts: Facts, opens: Mapping[Variable, Open]):
        self.facts, self.algebra, self._opens = facts, Algebra(), opens
        self._terms: dict[tuple[Atom, Index], Term] = {}
        self._truths: dict[tuple[Atom, Index], Condition] = {}
        self._depth, self._num_entries = 0, 0
        # The comparisons that were made into conditions, by the term that is compared with 0.
        self.origins: dict[Term, set[Equation]] = {}
        # Remainders `rem(u, m)` by a number m.
        self.remainders: dict[terms.Atom, Equation] = {}

    def entry(self, variable: Variable) -> Term:
        """An entry of an array, its place unknown."""
        self._num_entries = 0
        return self.term(variable, _anywhere(variable.shape))

    def term(self, atom: Atom, index: Index) -> Term:
        atom = self.facts.resolve(atom)
        if isinstance(atom, Constant):
            return self._constant(atom, index)
        key = (atom, index)
        if key not in self._terms:
            if self._depth > _DEEPEST or self._num_entries > _MOST_ENTRIES:
                return self._opaque(atom, index)
            self._depth, self._num_entries = self._depth + 1, self._num_entries + 1
            try:
                self._terms[key] = self._made(atom, index)
            finally:
                self._depth -= 1
        return self._terms[key]

    def _constant(self, atom: Constant, index: Index) -> Term:
        if isinstance(atom.value, compat.Tracer):
            return self.algebra.unknown(("input", self.facts.number(atom), index))
        value = np.asarray(atom.value)
        if value.ndim and all(isinstance(place, int) for place in index):
            value = value[index]
        different = np.unique(value) if value.size else value
        if different.size != 1 or np.iscomplexobj(value):
            return self.algebra.unknown(("input", self.facts.number(atom), index))
        one = float(different.reshape(())) if value.dtype != bool else float(different.item())
        if math.isnan(one):
            return self.algebra.unknown("nan")
        return terms.number(one) if math.isfinite(one) else self.algebra.infinite(one)

    def _opaque(self, variable: Variable, index: Index) -> Term:
        kind = "value" if variable in self.facts.defined_by else "input"
        key: Hashable = (kind, self.facts.number(variable), index)
        steps = frozenset(self._opens.get(variable, ()))
        return self.algebra.unknown(Jumping(key, steps) if steps else key)

    def _made(self, variable: Variable, index: Index) -> Term:
        equation = self.facts.defined_by.get(variable)
        if equation is None:
            return self._opaque(variable, index)
        inner = self.facts.body_output(equation, variable)
        if inner is not None:
            return self.term(inner, index)
        if isinstance(equation.control, Cond):
            return self._branches(equation, equation.outputs.index(variable), index)
        place = _moved_index(equation, index)
        if place is not None:
            return self.term(equation.inputs[0], place)
        rule = _RULES.get(equation.primitive)
        if rule is not None:
            made = rule(self, equation, index)
            if made is not None:
                return made
        if equation.primitive in _FUNCTIONS:
            return self.algebra.function(equation.primitive, *self._operands(equation, index))
        return self._opaque(variable, index)

    def _operands(self, equation: Equation, index: Index) -> list[Term]:
        return [self.term(atom, _entry_of(atom, index)) for atom in equation.inputs]

    def _branches(self, equation: Equation, output: int, index: Index) -> Term:
        assert isinstance(equation.control, Cond)
        cases = [branch.outputs[output] for branch in equation.control.branches]
        chosen = self._chosen(equation.inputs[0], (), [(case, index) for case in cases])
        return self._opaque(equation.outputs[output], index) if chosen is None else chosen

    def _chosen(
        self, which: Atom, place: Index, cases: Sequence[tuple[Atom, Index]]
    ) -> Term | None:
        """The case of a number; `None` if it is not known what the number is made of."""
        conditions = self._is_number(which, place, len(cases))
        if conditions is None:
            return None
        *others, last = cases
        chosen = self.term(*last)
        for condition, case in zip(reversed(conditions[:-1]), reversed(others), strict=True):
            chosen = self.algebra.choose(condition, self.term(*case), chosen)
        return chosen

    def _is_number(self, atom: Atom, index: Index, count: int) -> list[Condition] | None:
        """Whether an integer below `count` is 0, 1, …, if it is made of truth values."""
        equation = self.facts.definition(atom)
        if equation is None:
            return None
        place = _moved_index(equation, index)
        if place is not None:
            return self._is_number(equation.inputs[0], place, count)
        if equation.primitive == "clamp":
            return self._is_number(equation.inputs[1], index, count)
        if equation.primitive == "convert_element_type":
            (operand,) = equation.inputs
            if dtype_of(operand) == jnp.bool_ and count == 2:
                truth = self.truth(operand, index)
                return [self.algebra.logic("not", truth), truth]
            return None if is_inexact(operand) else self._is_number(operand, index, count)
        if equation.primitive == "argmax" and shape_of(equation.inputs[0]) == (count,):
            return self._first_or_last(equation.inputs[0], count)
        return None

    def _first_or_last(self, array: Atom, count: int) -> list[Condition] | None:
        """Whether the first entry that is true, or the last one of running sums of truth values,
        is entry 0, 1, …; it is entry 0 if none is.
        """
        made, logic = self.facts.definition(array), self.algebra.logic
        backward = made is not None and made.primitive == "cumsum"
        if backward:
            array = made.inputs[0]  # pyright: ignore
            made = self.facts.definition(array)
            array = made.inputs[0] if made is not None else array
        if dtype_of(array) != jnp.bool_:
            return None
        truths = [self.truth(array, (entry,)) for entry in range(count)]
        conditions, rest = [], terms.TRUE
        for truth in reversed(truths) if backward else truths:
            conditions.append(logic("and", rest, truth))
            rest = logic("and", rest, logic("not", truth))
        conditions = conditions[::-1] if backward else conditions
        return [logic("or", conditions[0], rest), *conditions[1:]]

    def truth(self, atom: Atom, index: Index) -> Condition:
        atom = self.facts.resolve(atom)
        known = self.facts.bounds.truth(atom)
        if known is not None:
            return terms.known(known)
        if isinstance(atom, Constant):
            return Condition("unknown", ((self.facts.number(atom), index),))
        key = (atom, index)
        if key not in self._truths:
            self._truths[key] = self._made_truth(atom, index)
        return self._truths[key]

    def _made_truth(self, variable: Variable, index: Index) -> Condition:
        equation = self.facts.defined_by.get(variable)
        if equation is not None:
            name, inputs = equation.primitive, equation.inputs
            inner = self.facts.body_output(equation, variable)
            if inner is not None:
                return self.truth(inner, index)
            place = _moved_index(equation, index)
            if place is not None:
                return self.truth(inputs[0], place)
            if name in ("concatenate", "stack"):
                part = _part(equation, index)
                if part is not None:
                    return self.truth(*part)
            if name in ("and", "or", "not", "xor"):
                parts = [self.truth(atom, _entry_of(atom, index)) for atom in inputs]
                return self.algebra.logic(name, *parts)
            if name in ("eq", "ne") and dtype_of(inputs[0]) == jnp.bool_:
                parts = [self.truth(atom, _entry_of(atom, index)) for atom in inputs]
                differ = self.algebra.logic("xor", *parts)
                return differ if name == "ne" else self.algebra.logic("not", differ)
            if name in ("eq", "ne") and isinstance(inputs[1], Constant):
                is_number = self._is_number(inputs[0], index, 2)
                wanted = self._constant(inputs[1], ()).number
                if is_number is not None and wanted in (0.0, 1.0):
                    same = is_number[int(wanted)]
                    return same if name == "eq" else self.algebra.logic("not", same)
            if name in COMPARISONS and not any(map(_is_complex, inputs)):
                return self._comparison(equation, index)
        key: Hashable = (self.facts.number(variable), index)
        steps = frozenset(self._opens.get(variable, ()))
        return Condition("unknown", (Jumping(key, steps) if steps else key,))

    def _comparison(self, equation: Equation, index: Index) -> Condition:
        if not all(map(self.facts.bounds.is_steady, equation.inputs)):
            # A value that may stop being a number: not even `x == x` is known.
            key = ("comparison", self.facts.number(equation.outputs[0]), index)
            return Condition("unknown", (Jumping(key, frozenset({equation})),))
        difference = self.algebra.subtract(*self._operands(equation, index))
        condition = self.algebra.compare(equation.primitive, difference)
        if condition.kind != "known":
            self.origins.setdefault(condition.parts[0], set()).add(equation)  # pyright: ignore
        return condition


def _is_complex(atom: Atom) -> bool:
    return jnp.issubdtype(dtype_of(atom), jnp.complexfloating)


def _anywhere(shape: Sequence[int]) -> Index:
    return tuple(0 if size == 1 else (axis, 1, 0) for axis, size in enumerate(shape))


def _entry_of(atom: Atom, index: Index) -> Index:
    """Operands of an elementwise operation have its shape, no axes, or axes of length one."""
    shape = shape_of(atom)
    return tuple(0 if size == 1 else place for size, place in zip(shape, index, strict=bool(shape)))


def _moved_index(equation: Equation, index: Index) -> Index | None:
    """Where an entry of the result stood in the first operand, if the equation only moves it."""
    name = equation.primitive
    if name in _SAME_VALUE:
        return index
    if name == "expand_dims" or not equation.inputs:
        return None
    shape = shape_of(equation.inputs[0])
    moved = compat.moved_entry(equation, index)
    if moved is not None:
        return tuple(0 if size == 1 else place for size, place in zip(shape, moved, strict=True))
    if name in ("reshape", "squeeze"):
        return _reshaped(shape, equation.outputs[0].shape, index)
    return None


def _reshaped(shape: Sequence[int], into: Sequence[int], index: Index) -> Index | None:
    """Where only axes of length one come or go."""
    if [n for n in shape if n != 1] != [n for n in into if n != 1]:
        return None
    places = iter(place for size, place in zip(into, index, strict=True) if size != 1)
    return tuple(0 if size == 1 else next(places) for size in shape)


Rule = Callable[[Builder, Equation, Index], Term | None]


def _elementwise(operation: Callable[..., Term]) -> Rule:
    return lambda builder, equation, index: operation(
        builder.algebra, *builder._operands(equation, index)
    )


def _select(builder: Builder, equation: Equation, index: Index) -> Term | None:
    which, *cases = equation.inputs
    entries = [(case, _entry_of(case, index)) for case in cases]
    place = _entry_of(which, index)
    if dtype_of(which) != jnp.bool_:
        return builder._chosen(which, place, entries)
    condition = builder.truth(which, place)
    if condition.kind == "known":
        return builder.term(*entries[int(bool(condition.parts[0]))])
    if_false, if_true = (builder.term(*entry) for entry in entries)
    return builder.algebra.choose(condition, if_true, if_false)


def _convert(builder: Builder, equation: Equation, index: Index) -> Term | None:
    (operand,) = equation.inputs
    if dtype_of(operand) == jnp.bool_:
        return builder.algebra.choose(builder.truth(operand, index), terms.ONE, terms.ZERO)
    if is_inexact(operand) and not is_inexact(equation.outputs[0]):
        return None
    return None if _is_complex(operand) else builder.term(operand, index)


def _sign(builder: Builder, equation: Equation, index: Index) -> Term | None:
    algebra = builder.algebra
    (operand,) = builder._operands(equation, index)
    if _is_complex(equation.inputs[0]):
        return None
    for kind in ("gt", "lt"):
        condition = algebra.compare(kind, operand)
        if condition.kind != "known":
            builder.origins.setdefault(condition.parts[0], set()).add(equation)  # pyright: ignore
    below = algebra.choose(algebra.compare("lt", operand), terms.number(-1.0), terms.ZERO)
    return algebra.choose(algebra.compare("gt", operand), terms.ONE, below)


def _angle(builder: Builder, equation: Equation, index: Index) -> Term | None:
    """`atan2(y, x)` for negative x, where it steps from −π to π."""
    if not builder.facts.bounds.of(equation.inputs[1]).is_negative:
        return None
    algebra = builder.algebra
    y, x = builder._operands(equation, index)
    condition = algebra.compare("lt", y)
    if condition.kind != "known":
        builder.origins.setdefault(condition.parts[0], set()).add(equation)  # pyright: ignore
    turn = algebra.choose(condition, terms.number(-math.pi), terms.number(math.pi))
    return algebra.add(algebra.function("atan", algebra.divide(y, x)), turn)


def _remainder(builder: Builder, equation: Equation, index: Index) -> Term | None:
    value, divisor = builder._operands(equation, index)
    if divisor.number is None or divisor.number <= 0 or not is_inexact(equation.outputs[0]):
        return None
    atom = builder.algebra.atom("rem", value, divisor)
    builder.remainders[atom] = equation
    return builder.algebra.of(atom)


def _integer_power(builder: Builder, equation: Equation, index: Index) -> Term:
    (base,) = builder._operands(equation, index)
    return builder.algebra.power(base, compat.exponent(equation))


def _power(builder: Builder, equation: Equation, index: Index) -> Term | None:
    base, exponent = builder._operands(equation, index)
    if exponent.number is not None and exponent.number == round(exponent.number):
        return builder.algebra.power(base, round(exponent.number))
    return builder.algebra.function("pow", base, exponent)


def _iota(builder: Builder, equation: Equation, index: Index) -> Term:
    place = index[compat.counted_axis(equation)]
    if isinstance(place, int):
        return terms.number(place)
    label, stride, offset = place
    counted = builder.algebra.scale(stride, builder.algebra.unknown(("place", label)))
    return builder.algebra.add(counted, terms.number(offset))


def _clamp(builder: Builder, equation: Equation, index: Index) -> Term:
    least, value, most = builder._operands(equation, index)
    return builder.algebra.function("min", builder.algebra.function("max", value, least), most)


def _joined(builder: Builder, equation: Equation, index: Index) -> Term | None:
    part = _part(equation, index)
    return None if part is None else builder.term(*part)


def _part(equation: Equation, index: Index) -> tuple[Atom, Index] | None:
    """Which operand of a `concatenate` or a `stack` an entry is from, where that is known."""
    axis = compat.joined_axis(equation)
    place, rest = index[axis], index[axis + 1 :]
    if not isinstance(place, int):
        return None
    if equation.primitive == "stack":
        return equation.inputs[place], (*index[:axis], *rest)
    for part in equation.inputs:
        length = shape_of(part)[axis]
        if place < length:
            return part, (*index[:axis], place, *rest)
        place -= length
    return None


def _sum(builder: Builder, equation: Equation, index: Index) -> Term | None:
    """Of few entries."""
    (operand,) = equation.inputs
    shape, axes = shape_of(operand), compat.reduced_axes(equation)
    if math.prod(shape[axis] for axis in axes) > 8:
        return None
    kept = iter(index)
    places = [range(size) if axis in axes else (next(kept),) for axis, size in enumerate(shape)]
    return builder.algebra.add(
        *(builder.term(operand, entry) for entry in itertools.product(*places))
    )


def _log1p(algebra: Algebra, term: Term) -> Term:
    return algebra.function("log", algebra.add(terms.ONE, term))


def _logistic(algebra: Algebra, term: Term) -> Term:
    below = algebra.function("exp", algebra.scale(-1.0, term))
    return algebra.reciprocal(algebra.add(terms.ONE, below))


_RULES: dict[str, Rule] = {
    "abs": _elementwise(lambda algebra, a: algebra.function("abs", a)),
    "add": _elementwise(Algebra.add),
    "add_any": _elementwise(Algebra.add),
    "atan2": _angle,
    "clamp": _clamp,
    "concatenate": _joined,
    "convert_element_type": _convert,
    "div": _elementwise(Algebra.divide),
    "erfc": _elementwise(
        lambda algebra, a: algebra.subtract(terms.ONE, algebra.function("erf", a))
    ),
    "expm1": _elementwise(
        lambda algebra, a: algebra.subtract(algebra.function("exp", a), terms.ONE)
    ),
    "integer_pow": _integer_power,
    "iota": _iota,
    "log1p": _elementwise(_log1p),
    "logistic": _elementwise(_logistic),
    "mul": _elementwise(Algebra.multiply),
    "neg": _elementwise(lambda algebra, a: algebra.scale(-1.0, a)),
    "pow": _power,
    "reduce_sum": _sum,
    "rem": _remainder,
    "rsqrt": _elementwise(lambda algebra, a: algebra.reciprocal(algebra.function("sqrt", a))),
    "select_n": _select,
    "sign": _sign,
    "stack": _joined,
    "square": _elementwise(lambda algebra, a: algebra.multiply(a, a)),
    "sub": _elementwise(Algebra.subtract),
}


class Prover:
    """Proves that values do not jump where comparisons step."""

    def __init__(self, facts: Facts, opens: Mapping[Variable, Open]):
        self.facts, self._opens = facts, opens
        self._builder = Builder(facts, opens)
        self._tries: dict[Equation, int] = {}

    def forget(self) -> None:
        """To be called when a step has been opened at a value that was looked at before."""
        self._builder = Builder(self.facts, self._opens)

    def is_decided(self, comparison: Equation) -> bool:
        """Whether a comparison has the same outcome everywhere: `p + (1 − p) < 1.001`."""
        (output,) = comparison.outputs
        if any(map(_is_complex, comparison.inputs)):
            return False
        try:
            return self._builder.truth(output, _anywhere(output.shape)).kind == "known"
        except (TooLarge, Singular):
            return False

    def remaining(self, variable: Variable, steps: Open) -> dict[Equation, bool]:
        """The steps at which an entry of `variable` may jump, with whether that is proved, given
        those at which what it is computed from may.
        """
        left = {step: certain for step, certain in steps.items() if not self._worth_it(step)}
        tried = [step for step in steps if step not in left]
        if not tried:
            return dict(steps)
        precision = 8 * float(jnp.finfo(variable.dtype).eps) if _is_real(variable) else 0.0
        self._builder.algebra.work = 0
        try:
            term = self._builder.entry(variable)
        except (TooLarge, Singular):
            return dict(steps)
        hidden = {step for key in _jumping(term) for step in key.steps}
        surfaces = _surfaces(term, self._builder.origins)
        for step in tried:
            places = [place for place, origins in surfaces.items() if step in origins]
            if step.primitive == "rem":
                found = {a for a, e in self._builder.remainders.items() if e is step}
                atoms = [part for part in _parts(term) if part in found]
                if (
                    step in hidden
                    or not found
                    or any(self._wraps(term, a, precision) for a in atoms)
                ):
                    left[step] = steps[step]
                continue
            # A step that no condition stands for may be anywhere.
            if step in hidden or not any(step in found for found in self._builder.origins.values()):
                left[step] = steps[step]
                continue
            verdicts = [self._jumps(term, place, step, precision) for place in places]
            if any(verdict is not False for verdict in verdicts):
                left[step] = steps[step] or any(verdict is True for verdict in verdicts)
        return left

    def _worth_it(self, step: Equation) -> bool:
        self._tries[step] = self._tries.get(step, 0) + 1
        return step.primitive in COMPARISONS | {"atan2", "rem", "sign"} and self._tries[step] <= 64

    def _jumps(self, term: Term, place: Term, step: Equation, precision: float) -> bool | None:
        """Whether `term` jumps where `place` is 0; `None` if neither is proved."""
        algebra = self._builder.algebra
        # A number that is 0 on more than a surface is a case of its own.
        surface_only = all(map(self.facts.is_analytic, step.inputs))
        sides = (1, -1) if surface_only else (1, -1, 0)
        verdict: bool | None = None
        for solutions in _solutions(algebra, place):
            algebra.work = 0
            try:
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
            # A place that is given by the value of an input is met.
            is_met = any(_is_plain(atom) for atoms in solutions for atom in atoms)
            verdict = verdict or (is_met and any(differ is True for differ in found)) or None
        return verdict

    def _wraps(self, term: Term, remainder: terms.Atom, precision: float) -> bool:
        """Whether `term` may jump where `rem(u, m)` does: for positive u from m to 0, for negative
        u from 0 to −m.
        """
        algebra, place = self._builder.algebra, self._builder.algebra.of(remainder)
        divisor: Any = remainder.arguments[1]
        m = divisor.number
        try:
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
        """Whether the sides differ: yes, no, or not known."""
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


def _is_real(variable: Variable) -> bool:
    return jnp.issubdtype(variable.dtype, jnp.floating)


def _is_plain(atom: terms.Atom) -> bool:
    """An input, or the place of an entry: numbers that do not depend on each other, so that
    polynomials in them are 0 only if all coefficients are.
    """
    (key, *_) = atom.arguments
    return atom.kind == "unknown" and isinstance(key, tuple) and key[0] in ("input", "place")


def _parts(term: Term | Condition) -> Iterator[Term | Condition | terms.Atom]:
    """Everything inside of a term."""
    seen: set[Hashable] = set()
    waiting: list[Any] = [term]
    while waiting:
        part = waiting.pop()
        if part in seen:
            continue
        seen.add(part)
        yield part
        inside = part.atoms() if isinstance(part, Term) else ()
        if isinstance(part, Condition):
            inside = part.parts
        elif isinstance(part, terms.Atom):
            inside = part.arguments
        waiting.extend(one for one in inside if isinstance(one, Term | Condition | terms.Atom))


def _jumping(term: Term) -> Iterator[Jumping]:
    for part in _parts(term):
        keys = part.arguments if isinstance(part, terms.Atom) else ()
        keys = part.parts if isinstance(part, Condition) else keys
        yield from (key for key in keys if isinstance(key, Jumping))


def _surfaces(term: Term, origins: Mapping[Term, set[Equation]]) -> dict[Term, set[Equation]]:
    """The terms that conditions in it compare with 0, and where they were compared."""
    compared = [p for p in _parts(term) if isinstance(p, Condition) and p.kind in terms.COMPARED]
    places: list[Any] = [condition.parts[0] for condition in compared]
    return {place: origins.get(place, set()) for place in places}


def _beside(
    algebra: Algebra,
    term: Term,
    place: Term,
    side: int,
    solution: Mapping[terms.Atom, Term],
    precision: float,
) -> Term:
    """The term where `place` is 0, as it is approached from the side where it is positive (1), or
    negative (−1), or exactly there (0).
    """

    def atoms(atom: terms.Atom) -> Term | None:
        if atom.kind == "unknown" and isinstance(atom.arguments[0], Jumping):
            return algebra.unknown((atom.arguments[0], side))
        return solution.get(atom)

    def decide(condition: Condition, replaced: Condition | None) -> Condition | None:
        if condition.kind == "unknown" and isinstance(condition.parts[0], Jumping):
            return Condition("unknown", ((condition.parts[0], side),))
        if condition.kind not in terms.COMPARED:
            return None
        if condition.parts[0] == place:
            return terms.known(terms.COMPARED[condition.kind](side))
        if replaced is not None:
            (value,) = replaced.parts
            assert isinstance(value, Term)
            if value.is_zero(precision):
                # Another comparison steps at the same place: which way is not known.
                return Condition("unknown", ((condition, side),))
        return None

    return algebra.replace(term, atoms, decide)


Solution = dict[terms.Atom, Term]


def _solutions(algebra: Algebra, place: Term, depth: int = 0) -> Iterator[list[Solution]]:
    """Ways to write `place = 0`, each as cases that together contain all of it: in each, atoms with
    what they are equal to.
    """
    preferred = {"unknown": 0, "abs": 1, "max": 2, "sqrt": 3, "exp": 3, "log": 3}
    for atom in sorted(place.atoms(), key=lambda atom: preferred.get(atom.kind, 4))[:4]:
        if isinstance(atom.arguments[0], Jumping):
            continue
        try:
            cases = _solved_for(algebra, place, atom, depth)
        except (TooLarge, Singular):
            continue
        if cases is not None:
            yield cases


def _solved_for(
    algebra: Algebra, place: Term, atom: terms.Atom, depth: int
) -> list[Solution] | None:
    split: dict[int, list[Term]] = {}
    for (monomial, coefficient), size in zip(place.monomials, place.sizes, strict=True):
        powers = dict(monomial)
        power = powers.pop(atom, 0)
        rest = Term(((tuple(powers.items()), coefficient),), (size,))
        split.setdefault(power, []).append(rest)
    by_power = {power: algebra.add(*parts) for power, parts in split.items()}
    if any(part.contains(atom) for part in by_power.values()) or len(by_power) > 2:
        return None
    rest = by_power.pop(0, terms.ZERO)
    ((power, factor),) = by_power.items()
    value = algebra.scale(-1.0, algebra.divide(rest, factor))
    if power == 1:
        return _inverted(algebra, atom, value, depth)
    if power == 2:
        number = value.number
        if number is not None and number < 0:
            return []
        root = algebra.function("sqrt", value)
        both = (root, algebra.scale(-1.0, root))
        return [case for one in both for case in _inverted(algebra, atom, one, depth)]
    return None


def _inverted(algebra: Algebra, atom: terms.Atom, value: Term, depth: int) -> list[Solution]:
    """The cases of `atom = value`, looking into magnitudes, maxima and invertible functions."""
    inside = _arguments_where(algebra, atom, value) if depth < _DEEPEST_SOLUTION else []
    cases: list[Solution] = []
    for equation in inside:
        deeper = next(_solutions(algebra, equation, depth + 1), None)
        cases += [{**case, atom: value} for case in ([{}] if deeper is None else deeper)]
    return cases if inside else [{atom: value}]


def _arguments_where(algebra: Algebra, atom: terms.Atom, value: Term) -> list[Term]:
    """Terms one of which is 0 where `atom = value`."""
    arguments: Any = atom.arguments
    try:
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
