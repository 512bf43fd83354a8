"""A loop as one function of the processor.

XLA for the CPU runs a loop's body one fusion after the other, and to start each of them takes 50 to
100 ns: with few chains that is most of a step. Small loops it compiles whole instead; ours are
often a little too large to be taken for small, so they are marked as such.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
from jaxtyping import PyTree

from . import compat, plain_jax

# What can be compiled into one function: element by element, sums and the like, moving elements
# about, control flow. Not there: what calls a library (products of matrices, factorisations,
# sorting), what acts (callbacks), and scatters.
_PLAIN = set(
    """
    abs acos acosh add add_any and argmax argmin asin asinh atan atan2 atanh bitcast_convert_type
    broadcast_in_dim cbrt ceil clamp concatenate cond convert_element_type copy copy_p cos cosh
    custom_jvp_call custom_vjp_call digamma div dynamic_slice dynamic_update_slice eq erf erf_inv
    erfc exp exp2 expand_dims expm1 floor ge gt integer_pow iota is_finite jit le lgamma log log1p
    logistic lt max min mul ne neg nextafter not or pad pcast pjit population_count pow pvary
    reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor rem reshape rev
    round rsqrt scan select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh
    slice split sqrt square squeeze stack stop_gradient sub tan tanh transpose while xor
    """.split()  # noqa: SIM905
)

# Bytes that a loop carries up to which it pays. More would keep several cores busy, fusion by
# fusion.
_MOST_BYTES = 2**20


# Sums of more elements may be left to a library.
_MOST_SUMMED = 2048


def runs_kernel_by_kernel() -> bool:
    """Whether loops will be run by XLA for the CPU, as it is described above."""
    return not plain_jax.value and jax.default_backend() == "cpu"


def as_one_kernel(
    loop: Callable[[PyTree, PyTree], PyTree], carry: PyTree, given: PyTree = None
) -> PyTree:
    """`loop(carry, given)`, compiled as one function where that can be and pays; it means the
    same.
    """
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(carry))
    known = runs_kernel_by_kernel() and compat.KNOWS_SMALL_CALLS
    if not known or size > _MOST_BYTES:
        return loop(carry, given)
    leaves, structure = jax.tree.flatten((carry, given))
    traced = compat.Traced.of(lambda *leaves: loop(*structure.unflatten(leaves)), *leaves)
    run = traced.small_call if _is_plain(traced.sizes) else traced.call
    return jax.tree.structure(traced.form).unflatten(run(*leaves))


def _is_plain(sizes: dict[str, int]) -> bool:
    summed = [size for name, size in sizes.items() if name.startswith(("reduce", "arg"))]
    return set(sizes) <= _PLAIN and max(summed, default=0) <= _MOST_SUMMED
