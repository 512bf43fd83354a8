"""Patterns: equations that compute a known function, anywhere in a program.

A pattern has the operations, the constants and the data flow, without shapes. Values from outside
are arbitrary, so equations that match compute the known function of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy
from jax.core import Tracer

from .params import exponent
from .program import Constant, Equation, Variable

# An operation, its operands, and the same for its inner programs.
Pattern = tuple[tuple[Any, ...], ...]


def pattern_of(equations: Sequence[Equation]) -> Pattern:
    """Values are named by their origin: an earlier operation, a constant, or outside."""
    names: dict[Any, Any] = {}
    rows = []
    for number, equation in enumerate(equations):
        operands = tuple(_named(atom, names) for atom in equation.inputs)
        inner = tuple(pattern_of(program.equations) for program in equation.inner)
        power = exponent(equation) if equation.primitive == "integer_pow" else None
        rows.append((equation.primitive, operands, power, inner))
        names.update({output: (number, i) for i, output in enumerate(equation.outputs)})
    return tuple(rows)


def _named(atom: Any, names: dict[Any, Any]) -> Any:
    if isinstance(atom, Constant) and not isinstance(atom.value, Tracer):
        # A number may appear in a jaxpr in single or in double precision.
        return "constant", tuple(numpy.unique(numpy.asarray(atom.value).astype("float32")))
    outside = sum(name[0] == "outside" for name in names.values())
    return names.setdefault(atom, ("outside", outside))


def _matches(equations: Sequence[Equation], pattern: Pattern) -> bool:
    """True if the equations match the pattern, with arbitrary values from outside."""
    names: dict[Any, Any] = {}
    outside: dict[Any, Any] = {}
    for number, (equation, row) in enumerate(zip(equations, pattern, strict=True)):
        _, operands, power, inner = row
        if len(operands) != len(equation.inputs):
            return False
        for atom, wanted in zip(equation.inputs, operands, strict=True):
            if wanted[0] == "outside":
                # Operands that are one value in the pattern must be one value here, and must come
                # from outside: a different data flow is a different function.
                same = atom if isinstance(atom, Variable) else _named(atom, {})
                if atom in names or outside.setdefault(wanted, same) != same:
                    return False
            elif (names.get(atom) if isinstance(atom, Variable) else _named(atom, {})) != wanted:
                return False
        if power is not None and exponent(equation) != power:
            return False
        if len(inner) != len(equation.inner) or not all(
            len(pattern) == len(program.equations) and _matches(program.equations, pattern)
            for program, pattern in zip(equation.inner, inner, strict=True)
        ):
            return False
        names.update({output: (number, i) for i, output in enumerate(equation.outputs)})
    return True


def vouch_for_known(equations: list[tuple[Equation, bool]], patterns: Sequence[Pattern]) -> None:
    """Mark the equations that match a pattern as continuous (`vouched`), in place."""
    plain = [equation for equation, _ in equations]
    for pattern in patterns:
        primitives = [row[0] for row in pattern]
        for begin in range(len(plain) - len(pattern) + 1):
            run = plain[begin : begin + len(pattern)]
            if [one.primitive for one in run] == primitives and _matches(run, pattern):
                for number in range(begin, begin + len(pattern)):
                    one, acts = equations[number]
                    equations[number] = dataclasses.replace(one, vouched=True), acts
