"""Entry rules: an entry of an operation's result as a term in the entries of its operands.

A rule returns `None` if it does not know the term. Then the entry is an unknown of its own.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np

from ..jaxprs import compat
from ..jaxprs.program import Equation
from . import matrices, terms
from .algebra import Algebra
from .facts import is_complex, is_inexact
from .indices import Index, entry_of, is_one_place, part_of
from .places import MOVE_ENTRIES
from .terms import Term

if TYPE_CHECKING:
    from .entries import Builder


Rule = Callable[["Builder", Equation, Index], Term | None]


def is_arithmetic(equation: Equation) -> bool:
    """True if it follows the laws of algebra. On integers, it must neither round nor wrap."""
    kind = equation.outputs[0].dtype
    if jnp.issubdtype(kind, jnp.floating) or equation.primitive in ("select_n", "iota", "stack"):
        return True
    exact = equation.primitive in ("add", "sub", "mul", "neg", "max", "min", "concatenate")
    return exact and jnp.issubdtype(kind, jnp.signedinteger) and jnp.iinfo(kind).bits >= 32


def _elementwise(operation: Callable[..., Term]) -> Rule:
    def rule(builder: Builder, equation: Equation, index: Index) -> Term:
        return operation(builder.algebra, *builder.operands(equation, index))

    return rule


def _select(builder: Builder, equation: Equation, index: Index) -> Term | None:
    which, *cases = equation.inputs
    entries = [(case, entry_of(case, index)) for case in cases]
    place = entry_of(which, index)
    if which.dtype != jnp.bool_:
        return builder.chosen(which, place, entries)
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
    (operand,) = builder.operands(equation, index)
    if is_complex(equation.inputs[0]):
        return None
    # sign(t) = 1 if t > 0, −1 if t < 0, else 0.
    above, below = (builder.compared(kind, operand, equation) for kind in ("gt", "lt"))
    return algebra.choose(above, terms.ONE, algebra.choose(below, terms.number(-1.0), terms.ZERO))


def _angle(builder: Builder, equation: Equation, index: Index) -> Term | None:
    """`atan2(y, x)` for negative x, where it jumps from −π to π."""
    if not builder.facts.bounds.of(equation.inputs[1]).is_negative:
        return None
    algebra = builder.algebra
    y, x = builder.operands(equation, index)
    condition = builder.compared("lt", y, equation)
    # For x < 0: atan2(y, x) = atan(y/x) + π if y ≥ 0, − π if y < 0.
    turn = algebra.choose(condition, terms.number(-math.pi), terms.number(math.pi))
    return algebra.add(algebra.function("atan", algebra.divide(y, x)), turn)


def _remainder(builder: Builder, equation: Equation, index: Index) -> Term | None:
    value, divisor = builder.operands(equation, index)
    if divisor.number is None or divisor.number <= 0 or not is_inexact(equation.outputs[0]):
        return None
    # rem(u, m) is u minus a multiple of m: an atom of its own, whose jumps `Prover._wraps`
    # examines.
    atom = builder.algebra.atom("rem", value, divisor)
    builder.remainders[atom] = equation
    return builder.algebra.of(atom)


def _integer_power(builder: Builder, equation: Equation, index: Index) -> Term:
    (base,) = builder.operands(equation, index)
    return builder.algebra.power(base, compat.exponent(equation))


def _power(builder: Builder, equation: Equation, index: Index) -> Term | None:
    base, exponent = builder.operands(equation, index)
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
    least, value, most = builder.operands(equation, index)
    return builder.algebra.function("min", builder.algebra.function("max", value, least), most)


def _joined(builder: Builder, equation: Equation, index: Index) -> Term | None:
    part = part_of(equation, index)
    return None if part is None else builder.term(*part)


def _sources(builder: Builder, equation: Equation, index: Index) -> Term | None:
    """The sum of the entries that are moved to a position."""
    found = builder.facts.places.sources(equation) if is_one_place(index) else None
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
    algebra, operand = builder.algebra, equation.inputs[0]
    before, after = index[:axis], index[axis + 1 :]
    # Factors are not expanded, so that quotients of running products telescope.
    factors = [
        algebra.function("factor", builder.term(operand, (*before, entry, *after)))
        for entry in entries
    ]
    return functools.reduce(algebra.multiply, factors)


def _sum(builder: Builder, equation: Equation, index: Index) -> Term | None:
    """A sum of a few entries."""
    (operand,) = equation.inputs
    shape, axes = operand.shape, compat.reduced_axes(equation)
    if math.prod(shape[axis] for axis in axes) > matrices.LONGEST:
        return None
    kept = iter(index)
    places = [range(size) if axis in axes else (next(kept),) for axis, size in enumerate(shape)]
    entries = (builder.term(operand, entry) for entry in itertools.product(*places))
    return builder.algebra.multiplied_out(builder.algebra.add(*entries))


def _expm1(algebra: Algebra, term: Term) -> Term:
    return algebra.subtract(algebra.function("exp", term), terms.ONE)


def _erfc(algebra: Algebra, term: Term) -> Term:
    return algebra.subtract(terms.ONE, algebra.function("erf", term))


def _inverse_root(algebra: Algebra, term: Term) -> Term:
    return algebra.reciprocal(algebra.function("sqrt", term))


def _logistic(algebra: Algebra, term: Term) -> Term:
    below = algebra.function("exp", algebra.scale(-1.0, term))
    return algebra.reciprocal(algebra.add(terms.ONE, below))


RULES: dict[str, Rule] = {
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
    "erfc": _elementwise(_erfc),
    "expm1": _elementwise(_expm1),
    "integer_pow": _integer_power,
    "iota": _iota,
    "log1p": _elementwise(Algebra.log1p),
    "logistic": _elementwise(_logistic),
    "mul": _elementwise(Algebra.multiply),
    "neg": _elementwise(lambda algebra, a: algebra.scale(-1.0, a)),
    "pow": _power,
    "reduce_sum": _sum,
    "rem": _remainder,
    "rsqrt": _elementwise(_inverse_root),
    "select_n": _select,
    "sign": _sign,
    "stack": _joined,
    "square": _elementwise(lambda algebra, a: algebra.multiply(a, a)),
    "sub": _elementwise(Algebra.subtract),
}
