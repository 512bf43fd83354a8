"""Entries: the entries of a program's arrays as terms.

Data, integers and carried values are unknowns, so that what is proved of a term holds whatever they
are. A value that may jump itself is an unknown of its own kind, which may differ from one side of a
step to the other.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..jaxprs import compat
from ..jaxprs.program import Atom, Cond, Constant, Equation, Variable
from . import matrices, terms
from .algebra import Algebra
from .bounds import DECIDED, of_function
from .facts import Facts, is_complex, is_inexact
from .interval import ANY, Interval
from .places import MOVE_ENTRIES
from .terms import Condition, Term, TooLarge

# Where an entry of an array is: on each axis a number, or `offset + stride · label`.
Index = tuple[Any, ...]
Open = Mapping[Equation, bool]

COMPARISONS = {"lt", "le", "gt", "ge", "eq", "ne"}
# Further back, and with more entries than this, a value is an unknown of its own.
_DEEPEST, _MOST_ENTRIES = 60, 2000
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
        self._intervals: dict[terms.Atom, Interval] = {}
        self._depth, self._num_entries = 0, 0
        self._roots: dict[Atom, Atom | None] = {}
        facts.bounds.is_definite = lambda matrix: self.root(matrix) is not None
        # The comparisons that were made into conditions, by the term that is compared with 0.
        self.origins: dict[Term, set[Equation]] = {}
        # Remainders `rem(u, m)` by a number m.
        self.remainders: dict[terms.Atom, Equation] = {}

    def begin(self) -> None:
        """To be called before a proof: each may take so much work and no more."""
        self._num_entries, self.algebra.work = 0, 0

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
        atom = self.algebra.atom("unknown", Jumping(key, steps) if steps else key)
        self._intervals[atom] = self.facts.bounds.of(variable)
        return self.algebra.of(atom)

    def interval(self, term: Term) -> Interval:
        """The interval in which a term lies, for all finite inputs."""
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
        place = _moved_index(equation, index)
        if place is not None:
            return self.term(equation.inputs[0], place)
        rule = _RULES.get(equation.primitive)
        if rule is not None and _is_arithmetic(equation):
            try:
                made = rule(self, equation, index)
            except TooLarge:
                if self.algebra.is_exhausted:
                    raise
                made = None
            if made is not None:
                return made
        if equation.primitive in _FUNCTIONS and is_inexact(variable):
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
        """The case of a number; `None` if the cases differ and it is not known what the number is
        made of.
        """
        conditions = self._is_number(which, place, len(cases))
        if conditions is None:
            first, *others = (self.term(*case) for case in cases)
            return first if all(other == first for other in others) else None
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
            if operand.dtype == jnp.bool_ and count == 2:
                truth = self.truth(operand, index)
                return [self.algebra.logic("not", truth), truth]
            return None if is_inexact(operand) else self._is_number(operand, index, count)
        if equation.primitive == "argmax" and equation.inputs[0].shape == (count,):
            return self._first_or_last(equation.inputs[0], count)
        return None

    def _first_or_last(self, array: Atom, count: int) -> list[Condition] | None:
        """Whether the first entry that is true, or the last one of running sums of truth values,
        is entry 0, 1, …; it is entry 0 if none is.
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
            if name in ("eq", "ne") and inputs[0].dtype == jnp.bool_:
                parts = [self.truth(atom, _entry_of(atom, index)) for atom in inputs]
                differ = self.algebra.logic("xor", *parts)
                return differ if name == "ne" else self.algebra.logic("not", differ)
            if name in ("eq", "ne") and isinstance(inputs[1], Constant):
                is_number = self._is_number(inputs[0], index, 2)
                wanted = self._constant(inputs[1], ()).number
                if is_number is not None and wanted in (0.0, 1.0):
                    same = is_number[int(wanted)]
                    return same if name == "eq" else self.algebra.logic("not", same)
            if name in COMPARISONS and not any(map(is_complex, inputs)):
                return self._comparison(equation, index)
        key: Hashable = (self.facts.number(variable), index)
        steps = frozenset(self._opens.get(variable, ()))
        return Condition("unknown", (Jumping(key, steps) if steps else key,))

    def _comparison(self, equation: Equation, index: Index) -> Condition:
        if not all(map(self.facts.bounds.is_steady, equation.inputs)):
            # A value that may stop being a number: not even `x == x` is known.
            key = ("comparison", self.facts.number(equation.outputs[0]), index)
            return Condition("unknown", (Jumping(key, frozenset({equation})),))
        left, right = equation.inputs
        if left is right and not self.facts.bounds.is_steady(left, finite=True):
            # The same wherever random values lie, but NaN at some theta.
            return Condition("unknown", (("comparison", self.facts.number(left), index),))
        difference = self.algebra.subtract(*self._operands(equation, index))
        condition = self.algebra.compare(equation.primitive, difference)
        if condition.kind != "known":
            decided = DECIDED[equation.primitive](self.interval(difference), Interval(0.0, 0.0))
            if decided is not None:
                return terms.known(decided)
            self.origins.setdefault(condition.parts[0], set()).add(equation)  # pyright: ignore
        return condition


def _is_arithmetic(equation: Equation) -> bool:
    """Whether it computes as algebra does: of integers, what does not round or wrap."""
    kind = equation.outputs[0].dtype
    if jnp.issubdtype(kind, jnp.floating) or equation.primitive in ("select_n", "iota", "stack"):
        return True
    exact = equation.primitive in ("add", "sub", "mul", "neg", "max", "min", "concatenate")
    return exact and jnp.issubdtype(kind, jnp.signedinteger) and jnp.iinfo(kind).bits >= 32


def anywhere(shape: Sequence[int]) -> Index:
    return tuple(0 if size == 1 else (axis, 1, 0) for axis, size in enumerate(shape))


def _entry_of(atom: Atom, index: Index) -> Index:
    """Operands of an elementwise operation have its shape, no axes, or axes of length one."""
    shape = atom.shape
    return tuple(0 if size == 1 else place for size, place in zip(shape, index, strict=bool(shape)))


def _moved_index(equation: Equation, index: Index) -> Index | None:
    """Where an entry of the result stood in the first operand, if the equation only moves it."""
    name = equation.primitive
    if name in _SAME_VALUE:
        return index
    if name == "expand_dims" or not equation.inputs:
        return None
    shape = equation.inputs[0].shape
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
    if which.dtype != jnp.bool_:
        return builder._chosen(which, place, entries)
    condition = builder.truth(which, place)
    if condition.kind == "known":
        return builder.term(*entries[int(bool(condition.parts[0]))])
    if_false, if_true = (builder.term(*entry) for entry in entries)
    return builder.algebra.choose(condition, if_true, if_false)


def _convert(builder: Builder, equation: Equation, index: Index) -> Term | None:
    (operand,) = equation.inputs
    if operand.dtype == jnp.bool_:
        return builder.algebra.choose(builder.truth(operand, index), terms.ONE, terms.ZERO)
    if is_inexact(operand) and not is_inexact(equation.outputs[0]):
        return None
    return None if is_complex(operand) else builder.term(operand, index)


def _sign(builder: Builder, equation: Equation, index: Index) -> Term | None:
    algebra = builder.algebra
    (operand,) = builder._operands(equation, index)
    if is_complex(equation.inputs[0]):
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
        length = part.shape[axis]
        if place < length:
            return part, (*index[:axis], place, *rest)
        place -= length
    return None


def _sources(builder: Builder, equation: Equation, index: Index) -> Term | None:
    """The entries that are put at a place."""
    found = builder.facts.places.sources(equation) if _is_one_place(index) else None
    if found is None:
        return None
    entries = [
        (atom, np.unravel_index(source[index], atom.shape))
        for atom, source in found
        if source[index] >= 0
    ]
    return builder.algebra.add(*(builder.term(a, tuple(map(int, at))) for a, at in entries))


def _running_product(builder: Builder, equation: Equation, index: Index) -> Term | None:
    axis, is_reversed = compat.running_axis(equation)
    place, length = index[axis], equation.outputs[0].shape[axis]
    if not isinstance(place, int) or length > matrices.LONGEST:
        return None
    entries = range(place, length) if is_reversed else range(place + 1)
    at = lambda entry: (*index[:axis], entry, *index[axis + 1 :])
    algebra, operand = builder.algebra, equation.inputs[0]
    factors = [algebra.function("factor", builder.term(operand, at(entry))) for entry in entries]
    return functools.reduce(algebra.multiply, factors)


def _is_one_place(index: Index) -> bool:
    return all(isinstance(place, int) for place in index)


def _sum(builder: Builder, equation: Equation, index: Index) -> Term | None:
    """Of few entries."""
    (operand,) = equation.inputs
    shape, axes = operand.shape, compat.reduced_axes(equation)
    if math.prod(shape[axis] for axis in axes) > matrices.LONGEST:
        return None
    kept = iter(index)
    places = [range(size) if axis in axes else (next(kept),) for axis, size in enumerate(shape)]
    entries = (builder.term(operand, entry) for entry in itertools.product(*places))
    return builder.algebra.multiplied_out(builder.algebra.add(*entries))


def _log1p(algebra: Algebra, term: Term) -> Term:
    return algebra.function("log", algebra.add(terms.ONE, term))


def _logistic(algebra: Algebra, term: Term) -> Term:
    below = algebra.function("exp", algebra.scale(-1.0, term))
    return algebra.reciprocal(algebra.add(terms.ONE, below))


_RULES: dict[str, Rule] = {
    **dict.fromkeys(MOVE_ENTRIES, _sources),
    "abs": _elementwise(lambda algebra, a: algebra.function("abs", a)),
    "add": _elementwise(Algebra.add),
    "add_any": _elementwise(Algebra.add),
    "atan2": _angle,
    "cholesky": matrices.cholesky,
    "clamp": _clamp,
    "concatenate": _joined,
    "convert_element_type": _convert,
    "cumprod": _running_product,
    "div": _elementwise(Algebra.divide),
    "dot_general": matrices.product,
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
