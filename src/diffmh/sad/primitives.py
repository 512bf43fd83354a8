"""A table of JAX's primitives. A primitive that is not in it raises an error if a derivative
depends on it.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..analysis.facts import is_complex, is_inexact
from ..analysis.steps import STEPS
from ..jaxprs.program import Equation
from .draw import SAMPLE
from .marker import LINEAR
from .propose import PROPOSE


def _names(text: str) -> set[str]:
    return set(text.split())


# Continuous and differentiable almost everywhere: tangent by JAX's own JVP, alternatives by
# evaluation.
SMOOTH = _names(
    "abs acos acosh add add_any asin asinh atan atan2 atanh bessel_i0e bessel_i1e broadcast_in_dim"
    " cbrt cholesky clamp complex concatenate conj"
    " conv_general_dilated convert_element_type copy copy_p cos cosh cumlogsumexp cummax cummin"
    " cumprod cumsum custom_jvp_call"
    " custom_linear_solve digamma div dot_general dynamic_slice dynamic_update_slice erf erf_inv"
    " erfc exp exp2 expm1 fft gather igamma imag"
    " igammac integer_pow lgamma log log1p log2 logistic lu max min mul name neg one_minus_square"
    " optimization_barrier pad"
    " polygamma polynomial pow random_gamma real reduce_max reduce_min reduce_precision"
    " reduce_prod reduce_sum"
    " reduce_window_max reduce_window_min"
    " reduce_window_sum regularized_incomplete_beta reshape rev rsqrt scatter scatter-add"
    " scatter-max scatter-min scatter-mul"
    " select_n sin sinh slice split sqrt square squeeze stack stop_gradient sub tan tanh tile top_k"
    " transpose triangular_solve"
    f" unstack {LINEAR}"
)

# JAX differentiates these. They have no rule here, so they need the reverse mode.
BY_JAX = _names(
    "custom_vjp_call custom_vjp_call_jaxpr eig eigh householder_product qr svd tridiagonal_solve"
)

# No tangent passes, at the user's request.
STOPPED = {"stop_gradient"}

# Steps: the tangent is that of the pieces, often zero. An error on a continuous random value, since
# the position of its jump has a derivative too.
JUMPS = set(STEPS)

# Never differentiated; alternatives by evaluation.
LOGIC = _names("and empty2 iota is_finite not or reduce_and reduce_or reduce_xor xor")
EVALUATED = LOGIC | _names(
    "bitcast_convert_type clz nextafter population_count random_bits random_clone random_fold_in"
    " random_seed random_split random_unwrap random_wrap shift_left shift_right_arithmetic"
    f" shift_right_logical threefry2x32 {SAMPLE} {PROPOSE}"
)

# Linear in all operands together; in the first if the others are fixed; in each if the other is
# fixed; in some if the rest is fixed.
LINEAR_IN_ALL = _names(
    "add add_any broadcast_in_dim complex concatenate conj convert_element_type copy copy_p cumsum"
    " fft imag name neg optimization_barrier pad real reduce_sum"
    f" reduce_window_sum reshape rev slice split squeeze stack sub tile transpose unstack {LINEAR}"
)
LINEAR_IN_FIRST = {"div", "dynamic_slice", "gather"}
BILINEAR = {"mul", "dot_general"}
LINEAR_IN_VALUES = {"scatter-add": (0, 2), "scatter": (0, 2), "dynamic_update_slice": (0, 1)}


def is_known(name: str) -> bool:
    return name in SMOOTH or name in JUMPS or name in EVALUATED


def linear_in(equation: Equation, fixed: Sequence[bool]) -> list[bool]:
    """For each operand, True if it is a float in which the primitive is linear, given which
    operands are `fixed`: the same in every alternative.
    """
    if not all(is_inexact(output) for output in equation.outputs):
        return [False] * len(equation.inputs)
    flags = _linear_in(equation, fixed)
    return [flag and is_inexact(atom) for flag, atom in zip(flags, equation.inputs, strict=True)]


def _linear_in(equation: Equation, fixed: Sequence[bool]) -> list[bool]:
    name, count = equation.primitive, len(equation.inputs)
    if name in LINEAR_IN_ALL:
        return [True] * count
    if name in LINEAR_IN_FIRST:
        return [index == 0 and all(fixed[1:]) for index in range(count)]
    if name in BILINEAR:
        return [fixed[1], fixed[0]]
    if name == "select_n":
        return [index > 0 and fixed[0] for index in range(count)]
    if name in LINEAR_IN_VALUES:
        # Linear in all values together if the indices are the same in every alternative.
        values = LINEAR_IN_VALUES[name]
        rest = all(fixed[index] for index in range(count) if index not in values)
        return [index in values and rest for index in range(count)]
    return [False] * count


# Sources of random numbers of unknown distribution.
_RANDOM = _names(
    "io_callback pure_callback random_bits random_gamma random_unwrap rng_bit_generator rng_uniform"
)


def is_flat(equation: Equation) -> bool:
    """True if JAX has no derivative for the primitive or a wrong one: JAX returns zero for the sign
    of a complex number, `z / |z|`.
    """
    if equation.primitive == "sign":
        return is_complex(equation.inputs[0])
    return equation.primitive in EVALUATED - {SAMPLE, "is_finite"}


def continuous(equation: Equation, operands: Sequence[bool]) -> bool:
    """True if a float result has a continuous distribution, given which operands have (random bits
    count as continuous).
    """
    if equation.primitive in _RANDOM:
        return True
    if equation.primitive == PROPOSE:
        return any(operands) or any(is_inexact(output) for output in equation.outputs)
    if equation.primitive == SAMPLE:
        return False
    # A step has finitely many values: its result is discrete for any operand.
    whole = not is_inexact(equation.outputs[0])
    if equation.primitive in ("rem", "convert_element_type") and whole:
        # randint takes the remainder of random bits, and converting a float to an integer rounds.
        return (
            any(operands)
            and equation.primitive == "convert_element_type"
            and not is_inexact(equation.inputs[0])
        )
    return any(operands) and equation.primitive not in JUMPS - {"sort", "rem"}
