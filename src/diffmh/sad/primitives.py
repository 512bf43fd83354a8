"""What is known of JAX's primitives: a table. Whatever is not in it is refused where a
derivative depends on it.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp

from .._lowering.program import Constant, Equation, Variable
from .marker import LINEAR
from .propose import PROPOSE
from .samplers import SAMPLE


def _names(text: str) -> set[str]:
    return set(text.split())


# Tangent by JAX's own JVP, alternative by evaluation. Continuous functions, differentiable almost
# everywhere.
SMOOTH = _names(
    "abs acos acosh add add_any asin asinh atan atan2 atanh bessel_i0e bessel_i1e broadcast_in_dim"
    " cbrt cholesky clamp concatenate"
    " conv_general_dilated convert_element_type copy copy_p cos cosh cumlogsumexp cummax cummin"
    " cumprod cumsum custom_jvp_call"
    " custom_linear_solve digamma div dot_general dynamic_slice dynamic_update_slice erf erf_inv"
    " erfc exp exp2 expm1 gather igamma"
    " igammac integer_pow lgamma log log1p log2 logistic lu max min mul name neg one_minus_square"
    " optimization_barrier pad"
    " polygamma pow random_gamma reduce_max reduce_min reduce_precision reduce_prod reduce_sum"
    " reduce_window_max reduce_window_min"
    " reduce_window_sum regularized_incomplete_beta reshape rev rsqrt scatter scatter-add"
    " scatter-max scatter-min scatter-mul"
    " select_n sin sinh slice split sqrt square squeeze stack stop_gradient sub tan tanh tile top_k"
    " transpose triangular_solve"
    f" unstack {LINEAR}"
)

# Steps: the tangent is that of the pieces, often zero. Refused on a continuous random value: where
# it jumps has a derivative too.
JUMPS = _names("argmax argmin ceil eq eq_to floor ge gt le le_to lt lt_to ne rem round sign sort")

# Never differentiated; alternative by evaluation.
EVALUATED = _names(
    "and bitcast_convert_type clz empty2 iota is_finite nextafter not or population_count"
    " random_bits random_clone random_fold_in"
    " random_seed random_split random_unwrap random_wrap reduce_and reduce_or reduce_xor shift_left"
    " shift_right_arithmetic"
    f" shift_right_logical threefry2x32 xor {SAMPLE} {PROPOSE}"
)

# Linear in all operands together; in the first, the others fixed; in each, the other fixed; in
# some, the rest fixed.
LINEAR_IN_ALL = _names(
    "add add_any broadcast_in_dim concatenate convert_element_type copy copy_p cumsum name neg"
    " optimization_barrier pad reduce_sum"
    f" reduce_window_sum reshape rev slice split squeeze stack sub tile transpose unstack {LINEAR}"
)
LINEAR_IN_FIRST = {"div", "dynamic_slice", "gather"}
BILINEAR = {"mul", "dot_general"}
LINEAR_IN_VALUES = {"scatter-add": (0, 2), "scatter": (0, 2), "dynamic_update_slice": (0, 1)}


def linear_in(equation: Equation, fixed: Sequence[bool]) -> list[bool]:
    """In which float operands a primitive is linear, given those that are `fixed`: the same in
    every alternative.
    """
    if not all(_is_float(output) for output in equation.outputs):
        return [False] * len(equation.inputs)
    flags = _linear_in(equation, fixed)
    return [flag and _is_float(atom) for flag, atom in zip(flags, equation.inputs, strict=True)]


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
        values = LINEAR_IN_VALUES[name]
        rest = all(fixed[index] for index in range(count) if index not in values)
        return [index in values and rest for index in range(count)]
    return [False] * count


def jumps(equation: Equation) -> bool:
    """Whether the primitive is a step function of an operand."""
    if equation.primitive == "ne" and equation.inputs[0] is equation.inputs[1]:
        return False  # isnan
    if equation.primitive == "convert_element_type":
        return not _is_float(equation.outputs[0])
    if equation.primitive == "sort":
        return len(equation.inputs) > 1
    if equation.primitive == "top_k":
        return True
    return equation.primitive in JUMPS


def continuous(equation: Equation, operands: Sequence[bool]) -> bool:
    """Whether a float result has a continuous distribution, given which operands do (random bits
    count as such).
    """
    if equation.primitive in ("random_bits", "random_gamma"):
        return True
    if equation.primitive == PROPOSE:
        return any(operands) or any(_is_float(output) for output in equation.outputs)
    if equation.primitive == SAMPLE:
        return False
    whole = not _is_float(equation.outputs[0])
    if equation.primitive in ("rem", "convert_element_type") and whole:
        # randint takes the remainder of random bits; a float that becomes an integer is rounded.
        return (
            any(operands)
            and equation.primitive == "convert_element_type"
            and not _is_float(equation.inputs[0])
        )
    return any(operands) and equation.primitive not in JUMPS - {"sort", "rem"}


def _is_float(atom: Variable | Constant) -> bool:
    return jnp.issubdtype(
        atom.dtype if isinstance(atom, Variable) else jnp.result_type(atom.value), jnp.floating
    )
