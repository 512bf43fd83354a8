"""Rounding that does not depend on the surrounding program.

A compiler may contract `a * b + c` into one rounding, depending on what else uses `a * b`. Then the
same chain would round differently in the program of its value and in that of its gradient, or in
two copies of one expression within a program. A chain that differs by one ulp soon differs
completely. Passing the bits through an integer operation that is opaque to the compiler prevents
contraction across that point.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Key, PyTree

from ..jaxprs import compat
from ..jaxprs.program import Program, Variable

# Smaller values may be fused into their uses.
_FEW_ELEMENTS = 32

# A single alternative of more elements than this is computed once.
_LARGE_ALTERNATIVE = 512


def opaque_false(key: Key[Array, ""], shape: tuple[int, ...] = ()) -> Bool[Array, "..."]:
    """Always False, but opaque to XLA: a normal draw does not exceed 10³⁰.

    The key may still be used for other draws, since this one reveals nothing about it.
    """
    return jax.random.normal(jax.random.clone(key), shape) > 1e30


def round_here(tree: PyTree, opaque_false: Bool[Array, "..."]) -> PyTree:
    """Return `tree`, rounded at this point. Values rounded with different `opaque_false` flags
    share no computation either. The flag is a scalar, or has one entry for each number.
    """

    def through_bits(leaf):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf ^ opaque_false.astype(leaf.dtype)
        integer = jnp.dtype(f"uint{8 * leaf.dtype.itemsize}")
        # `bits ^ 0` is the same number. It must be rounded to have bits, and no compiler rewrites a
        # float operation across an integer operation that depends on data.
        bits = jax.lax.bitcast_convert_type(leaf, integer)
        return jax.lax.bitcast_convert_type(bits ^ opaque_false.astype(integer), leaf.dtype)

    return jax.tree.map(through_bits, tree)


def materialise(tree: PyTree, opaque_false: Bool[Array, ""]) -> PyTree:
    """Return `tree`, computed once: otherwise a compiler may recompute it for each of its uses.

    It is the result of a branch that is always taken; compilers do not fuse across branches.
    """
    zeros = lambda tree: jax.tree.map(jnp.zeros_like, tree)
    return jax.lax.cond(opaque_false, zeros, lambda tree: tree, tree)


class Barriers(eqx.Module):
    """Two opaque flags that are always False, and the places where a step uses them.

    Values computed behind the second flag share no instruction with values behind the first, so
    computing derivatives does not change the instructions of the primal.
    """

    opaque_false: Bool[Array, "2"]

    @staticmethod
    def draw(key: Key[Array, ""]) -> Barriers:
        return Barriers(opaque_false(key, (2,)))

    def for_derivatives(self, tree: PyTree) -> PyTree:
        """The primal's values, for computing derivatives."""
        size = sum(leaf.size for leaf in jax.tree.leaves(tree))
        # Both variants separate the instructions of the derivative from those of the primal. The
        # second is free for few numbers, but lets the compiler recompute many for each use.
        barrier = materialise if size > _FEW_ELEMENTS else round_here
        return barrier(tree, self.opaque_false[1])

    def materialise(self, tree: PyTree) -> PyTree:
        """Return `tree`, computed once."""
        return materialise(tree, self.opaque_false[0])

    def materialise_slots(self, slots: PyTree) -> PyTree:
        """Large alternatives, computed once instead of for each use of an element."""
        leaves = jax.tree.leaves(slots)
        least = _LARGE_ALTERNATIVE if leaves[0].shape[0] == 1 else _FEW_ELEMENTS
        return self.materialise(slots) if sum(leaf.size for leaf in leaves) > least else slots


# Operations that may end in a product, which a compiler could contract with a following sum.
_PRODUCTS = set(
    """
    mul integer_pow square pow dot_general exp exp2 expm1 log log1p logistic tanh sin cos
    tan sinh cosh erf erfc erf_inv lgamma digamma rsqrt cbrt reduce_prod cumprod
    """.split()  # noqa: SIM905
)


def with_fixed_rounding(
    function: Callable[..., tuple[PyTree, PyTree]], opaque_false: Bool[Array, ""]
) -> Callable[..., tuple[PyTree, PyTree]]:
    """Return `function` such that its first result is rounded in the same way in every program.

    Every product on which the first result depends is rounded, so nothing is contracted. Operations
    that only the second result needs, such as derivatives, are left to the compiler. The author of
    `function` need not know about this.
    """

    def call(*arguments):
        leaves, structure = jax.tree.flatten(arguments)

        def flat(*leaves):
            return function(*structure.unflatten(leaves))

        program, form = compat.program(flat, *leaves, differentiated=False)
        count = jax.tree.structure(form[0]).num_leaves
        # Only values that the first result needs must be the same everywhere.
        deciding = _needed(program, program.outputs[:count])

        def apply(equation, operands):
            results = equation.bind(*operands)
            if equation.primitive in _PRODUCTS and not deciding.isdisjoint(equation.outputs):
                return _round_floats(results, opaque_false)
            return results

        return jax.tree.structure(form).unflatten(program.run(leaves, apply))

    return call


def _round_floats(results: Any, opaque_false: Bool[Array, ""]) -> list[Array]:
    is_float = lambda leaf: jnp.issubdtype(leaf.dtype, jnp.floating)
    return [round_here(leaf, opaque_false) if is_float(leaf) else leaf for leaf in results]


def _needed(program: Program, outputs: Any) -> set[Variable]:
    """The variables on which some outputs depend."""
    needed = {atom for atom in outputs if isinstance(atom, Variable)}
    for equation in reversed(program.equations):
        if not needed.isdisjoint(equation.outputs):
            needed.update(atom for atom in equation.inputs if isinstance(atom, Variable))
    return needed
