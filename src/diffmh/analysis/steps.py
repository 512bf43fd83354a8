"""Steps: the primitives of JAX that are continuous, and the results of others that jump."""

from __future__ import annotations

import numpy as np

from ..jaxprs import compat
from ..jaxprs.program import Atom, Constant, Equation, Variable
from .bounds import MOVES_VALUES
from .facts import ANALYTIC, Facts, is_complex, is_inexact

ORDERS = frozenset({"ge", "gt", "le", "le_to", "lt", "lt_to"})
EQUALITIES = frozenset({"eq", "eq_to", "ne"})
ROUNDINGS = frozenset({"ceil", "floor", "round", "sign"})
STEPS = ORDERS | EQUALITIES | ROUNDINGS | {"argmax", "argmin", "rem", "sort"}

# Continuous but not analytic.
_CONTINUOUS = frozenset(
    {
        *("abs", "atan2", "clamp", "complex", "conj", "cummax", "cummin", "dynamic_update_slice"),
        *("eig", "eigh", "householder_product", "linear_call", "lu", "max", "min", "nextafter"),
        *("one_minus_square", "qr", "reduce_max", "reduce_min", "reduce_window_max", "schur"),
        *("reduce_window_min", "reduce_window_sum", "scatter", "scatter-add", "scatter-max"),
        *("scatter-min", "scatter-mul", "scatter_add", "scatter_max", "scatter_min", "scatter_mul"),
        *("select_and_gather_add", "select_and_scatter_add", "select_n", "svd", "top_k", "zeta"),
        *("tridiagonal_solve", "custom_jvp_call", "custom_vjp_call", "igamma_grad_a"),
        *("random_gamma_grad", "psum", "pmax", "all_gather", "broadcast_to_rank", "clz"),
        *("lgamma", "logistic"),
    }
)
# On booleans, integers and keys, and sources of random bits.
_DISCRETE = frozenset(
    {
        *("and", "empty", "empty2", "iota", "is_finite", "not", "or", "population_count"),
        *("random_bits", "random_clone", "random_fold_in", "random_seed", "random_split"),
        *("random_unwrap", "random_wrap", "reduce_and", "reduce_or", "reduce_xor", "shift_left"),
        *("shift_right_arithmetic", "shift_right_logical", "threefry2x32", "xor"),
        *("bitcast_convert_type", "rng_bit_generator", "rng_uniform"),
    }
)
KNOWN = ANALYTIC | _CONTINUOUS | _DISCRETE | STEPS | MOVES_VALUES

# Decompositions whose factors have signs, or an order, by convention: where the number that decides
# it crosses 0, or two eigenvalues cross, the factors jump. `eigh` and `svd` sort their values.
_FACTORS = {"eig", "geqrf", "hessenberg", "qr", "schur"}
_SORTED_FACTORS = {"eigh", "svd"}

# Complex functions with a branch cut.
_BRANCH_CUTS = {"acos", "acosh", "asin", "asinh", "atan", "atanh"} | {
    *("cbrt", "log", "log1p", "log2", "pow", "sign", "sqrt")
}


def steps(facts: Facts, equation: Equation) -> tuple[Variable, ...]:
    """The results that jump somewhere, given moved operands, or that are integers computed from
    floats.
    """
    name, inputs, outputs = equation.primitive, equation.inputs, equation.outputs
    if name == "sort":
        # The sorted first keys are continuous; the values carried along with them are not.
        return outputs[1:]
    if name == "top_k":
        return outputs[1:]
    if name == "lu" or name in _FACTORS:
        return outputs  # They depend on the choice of pivots, or of signs.
    if name in _SORTED_FACTORS:
        matrix = len(inputs[0].shape)
        return tuple(output for output in outputs if len(output.shape) == matrix)
    if name == "is_finite" or (name in EQUALITIES and _is_nan_test(facts, inputs)):
        return () if all(map(facts.bounds.is_steady, inputs)) else outputs
    # Two analytic functions agree everywhere or on a set of measure 0, which has no effect.
    if name in EQUALITIES and all(map(facts.is_analytic, inputs)):
        return ()
    if name in ORDERS | EQUALITIES:
        return () if facts.bounds.truth(outputs[0]) is not None else outputs
    if name in STEPS or name == "nextafter" or name == "bitcast_convert_type":
        return outputs
    if name == "atan2":
        # The branch cut of the angle is at x ≤ 0.
        x = facts.bounds.of(inputs[1])
        return () if x.is_positive else outputs
    if name in _BRANCH_CUTS and is_complex(inputs[0]):
        return outputs
    if name in ("custom_jvp_call", "custom_vjp_call"):
        return _flat_results(facts, equation)
    if _is_singular(facts, equation):
        return outputs
    if not any(map(is_inexact, inputs)):
        return ()
    return tuple(output for output in outputs if not is_inexact(output))


def _is_nan_test(facts: Facts, operands: tuple[Atom, ...]) -> bool:
    """True if a value is compared with itself, or with infinity."""
    a, b = operands
    known = [atom.known for atom in operands if isinstance(atom, Constant)]
    infinite = any(one is not None and np.any(np.isinf(one.astype(float))) for one in known)
    return infinite or facts.number(a) == facts.number(b)


def _flat_results(facts: Facts, equation: Equation) -> tuple[Variable, ...]:
    """The results of a function with a custom derivative for which that derivative is zero: steps,
    such as the sign of `slogdet`.
    """
    flat = [output for output in equation.outputs if not is_inexact(output)]
    if equation.primitive == "custom_jvp_call":
        moving = [atom in facts.theta or atom in facts.random for atom in equation.inputs]
        moving = [m and is_inexact(atom) for m, atom in zip(moving, equation.inputs, strict=True)]
        moved = compat.moved(equation, moving)
        flat += [output for output, moves in zip(equation.outputs, moved, strict=True) if not moves]
    return tuple(dict.fromkeys(flat))


def _is_singular(facts: Facts, equation: Equation) -> bool:
    """True if it divides by a moved value that may be 0, or may meet a pole."""
    name, inputs = equation.primitive, equation.inputs
    # True means "may be singular": the value is then a step, which must be proved closed.
    if name == "div":
        return facts.is_moved([inputs[1]]) and not is_off_zero(facts, inputs[1])
    if name == "integer_pow":
        return compat.exponent(equation) < 0 and not is_off_zero(facts, inputs[0])
    if name == "rsqrt":
        return not is_off_zero(facts, inputs[0])
    if name == "pow":
        exponent = facts.bounds.of(inputs[1])
        return (
            exponent.low < 0 and facts.is_moved([inputs[0]]) and not is_off_zero(facts, inputs[0])
        )
    if name == "digamma" or name == "polygamma":
        return not facts.bounds.of(inputs[-1]).is_positive
    if name == "tan":
        angle = facts.bounds.of(inputs[0])
        return not (angle.low > -np.pi / 2 and angle.high < np.pi / 2)
    return False


def is_off_zero(facts: Facts, atom: Atom) -> bool:
    """True if a value can be 0 only where several independent random numbers take given values at
    once: its sign is known, or it is a norm or standard deviation of at least three entries.
    """
    if not facts.bounds.of(atom).contains(0):
        return True
    equation = facts.definition(atom)
    if equation is None:
        return False
    inner = facts.body_output(equation, facts.resolve(atom))  # pyright: ignore
    if inner is not None:
        return is_off_zero(facts, inner)
    name, inputs = equation.primitive, equation.inputs
    if name in ("sqrt", "broadcast_in_dim", "reshape", "squeeze", "abs", "square", "neg", "cbrt"):
        return is_off_zero(facts, inputs[0])
    if name in ("convert_element_type", "copy", "expand_dims", "slice", "integer_pow"):
        return is_inexact(inputs[0]) and is_off_zero(facts, inputs[0])
    if name in ("mul", "div"):
        return all(a not in facts.random or is_off_zero(facts, a) for a in inputs)
    if name in ("add", "max"):
        # A sum of nonnegative numbers is 0 only where all of them are.
        signs = all(facts.bounds.of(a).low >= 0 for a in inputs)
        return signs and any(is_off_zero(facts, a) for a in inputs)
    if name == "pow":
        return is_off_zero(facts, inputs[0])
    if name == "select_n":
        case = facts.bounds.decided_case(equation)
        return case is not None and is_off_zero(facts, inputs[1 + case])
    if name in ("reduce_sum", "reduce_max") and facts.bounds.of(inputs[0]).low >= 0:
        return _are_independent(facts, inputs[0])
    if name == "dot_general" and facts.number(inputs[0]) == facts.number(inputs[1]):
        return equation.outputs[0].shape == () and _are_independent(facts, inputs[0])
    return False


_ONE_TO_ONE = {"abs", "square", "integer_pow", "neg", "exp", "expm1", "tanh", "logistic", "erf"} | {
    *("asinh", "atan", "cbrt", "erf_inv", "sinh", "sqrt", "log", "log1p", "copy", "transpose"),
    "rev",
}


def _are_independent(facts: Facts, atom: Atom) -> bool:
    """True if an array has at least three entries, each a function of its own random number that
    is 0 at most at isolated values of it.
    """
    atom = facts.resolve(atom)
    if isinstance(atom, Constant) or np.prod(atom.shape) < 3 or atom not in facts.random:
        return False
    equation = facts.defined_by.get(atom)
    if equation is None:
        return is_inexact(atom)
    name, inputs = equation.primitive, equation.inputs
    # Each operation must keep entries independent and take any given value at isolated points only.
    if name in _ONE_TO_ONE or name == "convert_element_type":
        return is_inexact(inputs[0]) and _are_independent(facts, inputs[0])
    if name in ("reshape", "squeeze", "expand_dims") or (
        name == "broadcast_in_dim" and np.prod(inputs[0].shape) == np.prod(atom.shape)
    ):
        return _are_independent(facts, inputs[0])
    if name in ("add", "sub", "mul", "div", "max"):
        return _is_one_to_one(facts, equation)
    return name == "bitcast_convert_type"  # Random bits.


def _is_one_to_one(facts: Facts, equation: Equation) -> bool:
    """True if one operand has independent entries and the other is either the same for all of them
    or not random. A factor must not be 0.
    """
    a, b = equation.inputs
    if equation.primitive == "mul" and facts.number(a) == facts.number(b):
        return _are_independent(facts, a)
    if equation.primitive == "max":
        larger = facts.decided_larger(equation)
        return larger is not None and _are_independent(facts, equation.inputs[larger])
    for one, other in ((a, b), (b, a)):
        if not _are_independent(facts, one) or (equation.primitive == "div" and one is b):
            continue
        if equation.primitive in ("mul", "div"):
            scalar = other.shape == () and other not in facts.random
            if scalar or not facts.bounds.of(other).contains(0):
                return True
            if equation.primitive == "div" and other not in facts.random:
                return True
        elif other not in facts.random or _is_the_same_everywhere(facts, other):
            return True
    return False


def _is_the_same_everywhere(facts: Facts, atom: Atom) -> bool:
    if np.prod(atom.shape) == 1:
        return True
    equation = facts.definition(atom)
    if equation is None or equation.primitive != "broadcast_in_dim":
        return False
    return np.prod(equation.inputs[0].shape) == 1
