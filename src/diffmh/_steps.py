"""Steps: which results of JAX's primitives jump somewhere, or are whole numbers of real ones."""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp

from ._lowering import compat
from ._lowering.program import Atom, Constant, Equation, Variable

ORDERS = {"ge", "gt", "le", "le_to", "lt", "lt_to"}
EQUALITIES = {"eq", "eq_to", "ne"}
ROUNDINGS = {"ceil", "floor", "round", "sign"}
STEPS = ORDERS | EQUALITIES | ROUNDINGS | {"argmax", "argmin", "rem", "sort"}

# Complex functions with a branch cut; of two operands, `atan2` has one too.
_BRANCH_CUTS = {"acos", "acosh", "asin", "asinh", "atan", "atanh"} | {
    *("cbrt", "log", "log1p", "log2", "pow", "sign", "sqrt")
}


def steps(equation: Equation, defined_by: Mapping[Variable, Equation]) -> tuple[Variable, ...]:
    """The results that are step functions of an operand, or jump somewhere.

    `defined_by` has the equations of the same program, by their outputs.
    """
    name, inputs, outputs = equation.primitive, equation.inputs, equation.outputs
    if name in ("sort", "top_k"):
        return outputs[compat.num_sort_keys(equation) :]
    if name in STEPS or name == "is_finite" or name == "atan2":
        return outputs
    if name in _BRANCH_CUTS and is_complex(inputs[0]):
        return outputs
    if name == "div" and _is_abs(inputs[1], inputs[0], defined_by):
        return outputs
    if not any(map(is_inexact, inputs)):
        return ()
    return tuple(output for output in outputs if not is_inexact(output))


def _is_abs(atom: Atom, of: Atom, defined_by: Mapping[Variable, Equation]) -> bool:
    """Whether `atom` is `|of|`, whose quotient `of / |of|` is a step; the phase of a complex number
    is none.
    """
    while isinstance(atom, Variable) and atom in defined_by:
        equation = defined_by[atom]
        if equation.primitive == "abs":
            return _same(equation.inputs[0], of, defined_by) and not is_complex(of)
        if equation.primitive not in ("convert_element_type", "broadcast_in_dim"):
            return False
        atom = equation.inputs[0]
    return False


def _same(a: Atom, b: Atom, defined_by: Mapping[Variable, Equation]) -> bool:
    """Whether two values are computed by the same expression, which a program may do twice."""
    if a is b:
        return True
    if isinstance(a, Constant) and isinstance(b, Constant):
        return jnp.ndim(a.value) == 0 and str(a.value) == str(b.value)
    if isinstance(a, Constant) or isinstance(b, Constant):
        return False
    one, other = defined_by.get(a), defined_by.get(b)
    if one is None or other is None or one.primitive != other.primitive or one.control is not None:
        return False
    pairs = zip(one.inputs, other.inputs, strict=True)
    return (
        one.outputs.index(a) == other.outputs.index(b)
        and compat.parameters_of(one) == compat.parameters_of(other)
        and all(_same(*pair, defined_by) for pair in pairs)
    )


def _dtype(atom: Atom):
    return atom.dtype if isinstance(atom, Variable) else jnp.result_type(atom.value)


def is_inexact(atom: Atom) -> bool:
    return jnp.issubdtype(_dtype(atom), jnp.inexact)


def is_complex(atom: Atom) -> bool:
    return jnp.issubdtype(_dtype(atom), jnp.complexfloating)
