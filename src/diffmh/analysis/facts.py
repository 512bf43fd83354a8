"""Facts about the values of a program and of its inner programs."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Hashable, Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..jaxprs import compat
from ..jaxprs.program import Atom, Constant, Equation, Program, Scan, Variable, every_equation
from .bounds import Bounds
from .places import Places


class Facts:
    """`theta` and `random` are the values that depend on θ and on continuous random values. A
    value that depends on both is *moved*: the place where it crosses a threshold depends on θ, and
    a derivative with the random values held fixed does not see that.
    """

    def __init__(self, program: Program, theta: Iterable[Variable], random: Iterable[Variable]):
        self.theta, self.random = set(theta), set(random)
        self.defined_by: dict[Variable, Equation] = {}
        # Inputs of inner programs that equal one outside value in every iteration.
        self.aliases: dict[Variable, Atom] = {}
        self._bodies: dict[Equation, Program] = {}
        self._numbers: dict[Atom, int] = {}
        self._numbered: dict[Hashable, int] = {}
        self._enter(program)
        self.places, self.bounds = Places(self), Bounds(self)
        self._analytic: dict[Atom, bool] = {}

    def _enter(self, program: Program) -> None:
        for equation in every_equation(program):
            self.defined_by.update(dict.fromkeys(equation.outputs, equation))
            self._alias(equation)

    def _alias(self, equation: Equation) -> None:
        control = equation.control
        if control is None:
            return
        edges = control.edges()
        # The operands of a conditional and the constants of a loop are the same value in every
        # iteration. Carried values and slices are not, so they have no alias.
        changing = {target for _, target in edges.around}
        if isinstance(control, Scan):
            changing.update(control.parts(control.body.inputs)[2])
        for operand, targets in zip(equation.inputs, edges.into, strict=True):
            self.aliases.update((target, operand) for target in targets if target not in changing)

    def body_output(self, equation: Equation, output: Variable) -> Atom | None:
        """The value of this output inside the body of a function with a custom derivative."""
        if equation not in self._bodies:
            body = compat.body(equation)
            if body is None:
                return None
            self._bodies[equation] = body
            self._enter(body)
            self.aliases.update(zip(body.inputs, equation.inputs, strict=True))
            # The body is not searched for steps, so its result is unknown.
            self.random.update(v for e in body.equations for v in e.outputs)
        return self._bodies[equation].outputs[equation.outputs.index(output)]

    def resolve(self, atom: Atom) -> Atom:
        """The outside value of an input of an inner program."""
        while isinstance(atom, Variable) and atom in self.aliases:
            atom = self.aliases[atom]
        return atom

    def definition(self, atom: Atom) -> Equation | None:
        atom = self.resolve(atom)
        return self.defined_by.get(atom) if isinstance(atom, Variable) else None

    def is_moved(self, atoms: Iterable[Any]) -> bool:
        """True if a function of these values may be moved."""
        atoms = [atom for atom in atoms if is_inexact(atom)]
        return any(a in self.theta for a in atoms) and any(a in self.random for a in atoms)

    def number(self, atom: Atom) -> int:
        """A number for the value: equal for the same operations on the same values."""
        atom = self.resolve(atom)
        if atom not in self._numbers:
            self._numbers[atom] = -1 - len(self._numbers)  # Within a loop: a unique number.
            key = self._key(atom)
            self._numbers[atom] = self._numbered.setdefault(key, len(self._numbered))
        return self._numbers[atom]

    def _key(self, atom: Atom) -> Hashable:
        if isinstance(atom, Constant):
            if isinstance(atom.value, compat.Tracer):
                return ("tracer", id(atom.value))
            value = np.asarray(atom.value)
            # By content: equal constants are equal values.
            digest = hashlib.sha256(value.tobytes()).digest()
            return ("constant", value.shape, str(value.dtype), digest)
        equation = self.defined_by.get(atom)
        if equation is None or equation.control is not None or "custom" in equation.primitive:
            return ("itself", id(atom))
        # Hash-consing: the same primitive with the same parameters and operands gives the same
        # value. Random primitives take their key as an operand, so two draws differ.
        operands = tuple(map(self.number, equation.inputs))
        output = equation.outputs.index(atom)
        return (equation.primitive, compat.parameters_of(equation), operands, output)

    def is_analytic(self, atom: Atom) -> bool:
        """True if the value is an analytic function of the continuous random values, all else
        fixed. Such a function equals a given number everywhere or almost nowhere.
        """
        atom = self.resolve(atom)
        if isinstance(atom, Constant) or atom not in self.random:
            return True
        if atom not in self._analytic:
            self._analytic[atom] = False
            self._analytic[atom] = self._is_analytic(atom)
        return self._analytic[atom]

    def _is_analytic(self, variable: Variable) -> bool:
        equation = self.defined_by.get(variable)
        if equation is None:
            return is_inexact(variable)
        inner = self.body_output(equation, variable)
        if inner is not None:
            return self.is_analytic(inner)
        inputs = equation.inputs
        if equation.primitive == "select_n":
            case = self.bounds.decided_case(equation)
            if case is None:
                return False
            inputs = (inputs[1 + case],)
        elif equation.primitive in ("max", "min"):
            larger = self.decided_larger(equation)
            if larger is None:
                return False
            inputs = (inputs[larger if equation.primitive == "max" else 1 - larger],)
        elif equation.primitive == "bitcast_convert_type":
            return True  # Random bits.
        elif equation.primitive not in ANALYTIC or not self._has_one_branch(equation):
            return False
        # A random integer is not analytic; a fixed integer is a constant.
        return all(is_inexact(a) or a not in self.random for a in inputs) and all(
            map(self.is_analytic, inputs)
        )

    def _has_one_branch(self, equation: Equation) -> bool:
        """True if the equation computes a single analytic function on the range of its operand.
        `sqrt(x²)` does not: it is x on one side of 0 and −x on the other.
        """
        operand = equation.inputs[0] if equation.inputs else None
        if operand not in self.random or equation.primitive not in _BRANCHES:
            return True
        assert operand is not None
        least, most = _BRANCHES[equation.primitive]
        at = self.bounds.of(operand)
        return (
            not at.contains(least) and least <= at.low and not at.contains(most) and at.high <= most
        )

    def decided_larger(self, equation: Equation) -> int | None:
        """The index of the operand that is larger everywhere, if known."""
        a, b = (self.bounds.of(atom) for atom in equation.inputs)
        return 0 if a.low >= b.high else (1 if b.low >= a.high else None)


def is_inexact(atom: Atom) -> bool:
    return jnp.issubdtype(atom.dtype, jnp.inexact)


def is_complex(atom: Atom) -> bool:
    return jnp.issubdtype(atom.dtype, jnp.complexfloating)


# The intervals on which functions with several branches or singularities are one analytic function.
_POSITIVE, _UNIT = (0.0, math.inf), (-1.0, 1.0)
_BRANCHES = {
    **dict.fromkeys(("cbrt", "digamma", "lgamma", "log", "log2", "polygamma", "pow"), _POSITIVE),
    **dict.fromkeys(("rsqrt", "sqrt"), _POSITIVE),
    **dict.fromkeys(("acos", "asin", "atanh", "erf_inv"), _UNIT),
    "acosh": (1.0, math.inf),
    "cholesky": (math.inf, math.inf),
    "log1p": (-1.0, math.inf),
}
# Analytic where they are defined.
ANALYTIC = {
    *("acos", "acosh", "add", "add_any", "asin", "asinh", "atan", "atanh", "bessel_i0e"),
    *("bessel_i1e", "broadcast_in_dim", "cbrt", "cholesky", "concatenate", "conv_general_dilated"),
    *("convert_element_type", "copy", "copy_p", "cos", "cosh", "cumlogsumexp", "cumprod", "cumsum"),
    *("custom_linear_solve", "digamma", "div", "dot_general", "dynamic_slice", "erf", "erf_inv"),
    *("erfc", "exp", "exp2", "expand_dims", "expm1", "fft", "gather", "igamma", "igammac", "imag"),
    *("integer_pow", "lgamma", "log", "log1p", "log2", "logistic", "mul", "name", "neg"),
    "polynomial",
    *("optimization_barrier", "pad", "polygamma", "pow", "random_gamma", "real"),
    "reduce_precision",
    *("reduce_prod", "reduce_sum", "regularized_incomplete_beta", "reshape", "rev", "rsqrt", "sin"),
    *("sinh", "slice", "split", "sqrt", "square", "squeeze", "stack", "stop_gradient", "sub"),
    "tan",
    *("tanh", "tile", "transpose", "triangular_solve", "unstack", "pvary"),
}
