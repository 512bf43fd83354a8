"""Functions of JAX that are continuous though they contain steps, such as the search of `interp`.

They are recognised by what they compute, in the running version of JAX; a name alone proves
nothing. A call must have the jaxpr that the function itself has for operands of these shapes. For
functions that are not calls, a program must contain their equations consecutively: a pattern of the
same operations, constants and data flow, without shapes. Values from outside are arbitrary, so
equations that match compute the known function of them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import jax.scipy.linalg
import jax.scipy.special
import numpy as np
from jax.core import Tracer

from .params import exponent
from .program import Constant, Equation, Variable

# Not calls: the number and kinds of their operands.
LOOSE: tuple[tuple[Callable[..., Any], int], ...] = (
    (jax.scipy.special.betaln, 2),
    (jax.scipy.special.ndtri, 1),
)
# By the name of the call: functions of the same operands whose jaxprs contain it.
_REFERENCES: dict[str, tuple[Callable[..., Any], ...]] = {
    "_interp": (jnp.interp,),
    "expm": (
        jax.scipy.linalg.expm,
        functools.partial(jax.scipy.linalg.expm, upper_triangular=True),
    ),
    "sinc": (jnp.sinc,),
}


def references(name: Any, constants: Sequence[Any]) -> tuple[Callable[..., Any], ...]:
    """The functions that a call of this name may be. `constants` are its operands where known,
    otherwise `None`.
    """
    # Continuity of an interpolation requires distinct knots, which the equations do not show.
    if name == "_interp" and _has_double_knots(constants[1]):
        return ()
    return _REFERENCES.get(name, ()) if isinstance(name, str) else ()


def _has_double_knots(knots: Any) -> bool:
    """True if two knots are equal, which allows a jump. Unknown knots are assumed distinct."""
    return knots is not None and not np.all(np.diff(np.asarray(knots, float)) > 0)


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
        return "constant", tuple(np.unique(np.asarray(atom.value).astype("float32")))
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
