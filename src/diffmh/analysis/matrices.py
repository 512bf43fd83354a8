"""Matrices: the entries of products and of Cholesky factors as terms."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

from ..jaxprs import compat
from ..jaxprs.program import Atom, Equation
from .indices import Index, is_one_place
from .terms import Term

if TYPE_CHECKING:
    from .entries import Builder

# Longer sums and larger matrices are not expanded.
LONGEST = 20


def product(builder: Builder, equation: Equation, index: Index) -> Term | None:
    """An entry of a `dot_general` without batch axes."""
    summed, batches = compat.contracted(equation)
    a, b = equation.inputs
    lengths = [a.shape[axis] for axis in summed[0]]
    if any(batches) or math.prod(lengths) > LONGEST:
        return None

    def entry(operand: Atom, axes: tuple[int, ...], free: Index, places: Index) -> Term:
        at, others = dict(zip(axes, places, strict=True)), iter(free)
        index = (at[x] if x in at else next(others) for x in range(len(operand.shape)))
        return builder.term(operand, tuple(index))

    # `dot_general` orders the result's axes as the free axes of a, then those of b.
    split = len(a.shape) - len(lengths)
    return builder.algebra.add(
        *(
            builder.algebra.multiply(
                entry(a, summed[0], index[:split], places),
                entry(b, summed[1], index[split:], places),
            )
            for places in itertools.product(*map(range, lengths))
        )
    )


def cholesky(builder: Builder, equation: Equation, index: Index) -> Term | None:
    """An entry of the Cholesky factor of `L Lᵀ`: that of L."""
    root = builder.root(equation.inputs[0])
    is_below = is_one_place(index) and index[0] >= index[1]
    return builder.term(root, index) if root is not None and is_below else None


def root_of(builder: Builder, matrix: Atom) -> Atom | None:
    """A lower triangular matrix L with positive diagonal such that the matrix is proved to be
    `L Lᵀ`. Then the matrix is positive definite and L is its Cholesky factor.
    """
    made = builder.facts.definition(matrix)
    while made is not None and made.primitive in ("add", "div"):  # (M + Mᵀ) / 2
        made = builder.facts.definition(made.inputs[0])
    if made is None or made.primitive != "dot_general" or len(matrix.shape) != 2:
        return None
    root, size, algebra = made.inputs[0], matrix.shape[0], builder.algebra
    if root.shape != (size, size) or size > LONGEST:
        return None
    # The Cholesky factor is unique: a lower triangular L with positive diagonal and L Lᵀ = M.
    rows = [[builder.term(root, (i, j)) for j in range(size)] for i in range(size)]
    for i, j in itertools.product(range(size), repeat=2):
        if i < j and rows[i][j].number != 0:
            return None
        if i == j and not builder.interval(rows[i][i]).is_positive:
            return None
        entry = algebra.add(*map(algebra.multiply, rows[i], rows[j]))
        if algebra.subtract(entry, builder.term(matrix, (i, j))).number != 0:
            return None
    return root
