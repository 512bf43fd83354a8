"""Rounding that does not depend on what else is computed.

A compiler contracts `a * b + c` into one rounding where it can, and whether it can depends on what
else uses `a * b`. The same chain would then round differently in the program of its value and in
that of its gradient, or in two copies of one expression within a program; and a chain that differs
by one ulp soon differs altogether. Passing the bits through an integer operation that the compiler
cannot see through forbids contraction across that point.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Key, PyTree

from ..jaxprs import compat
from ..jaxprs.program import Constant, Program, Variable

# Smaller values may be fused into whatever uses them.
_FEW_ELEMENTS = 32


def opaque_false(key: Key[Array, ""], shape: tuple[int, ...] = ()) -> Bool[Array, "..."]:
    """Always False, but opaque to XLA: a normal draw does not exceed 10³⁰.

    The key stays good for other draws, since this one says nothing of it.
    """
    return jax.random.normal(jax.random.clone(key), shape) > 1e30


def round_here(tree: PyTree, opaque_false: Bool[Array, "..."]) -> PyTree:
    """`tree`, rounded here and now; values behind different falsehoods share no computation
    either. The falsehood is one for all numbers, or one for each.
    """

    def through_bits(leaf):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf ^ opaque_false.astype(leaf.dtype)
        integer = jnp.dtype(f"uint{8 * leaf.dtype.itemsize}")
        # `bits ^ 0`: the same number. It must be rounded to have bits, and no rule rewrites a float
        # operation across an integer one that depends on data.
        bits = jax.lax.bitcast_convert_type(leaf, integer)
        return jax.lax.bitcast_convert_type(bits ^ opaque_false.astype(integer), leaf.dtype)

    return jax.tree.map(through_bits, tree)


def materialise(tree: PyTree, opaque_false: Bool[Array, ""]) -> PyTree:
    """`tree`, computed once: a compiler that fuses would compute it anew for each of its uses.

    It comes out of a branch that is always taken, and compilers don't fuse across branches.
    """
    zeros = lambda tree: jax.tree.map(jnp.zeros_like, tree)
    return jax.lax.cond(opaque_false, zeros, lambda tree: tree, tree)


class Barriers(eqx.Module):
    """Two opaque falsehoods, and where the core of a step puts them against the compiler.

    What is computed behind the second shares no instruction with what is computed behind the
    first, so that derivatives leave the primal's own instructions as they are.
    """

    opaque_false: Bool[Array, "2"]

    @staticmethod
    def draw(key: Key[Array, ""]) -> Barriers:
        return Barriers(opaque_false(key, (2,)))

    def for_derivatives(self, tree: PyTree) -> PyTree:
        """The primal's values, to compute derivatives from."""
        size = sum(leaf.size for leaf in jax.tree.leaves(tree))
        # Both separate the derivative's instructions from the primal's; the second costs nothing
        # for few numbers, but lets the compiler compute many of them again for each use.
        barrier = materialise if size > _FEW_ELEMENTS else round_here
        return barrier(tree, self.opaque_false[1])

    def materialise(self, tree: PyTree) -> PyTree:
        """`tree`, computed once."""
        return materialise(tree, self.opaque_false[0])

    def materialise_slots(self, slots: PyTree) -> PyTree:
        """Several large alternatives, computed once, not anew for each use of an element."""
        leaves = jax.tree.leaves(slots)
        is_large = leaves[0].shape[0] > 1 and sum(leaf.size for leaf in leaves) > _FEW_ELEMENTS
        return self.materialise(slots) if is_large else slots


# Operations that may end in a product, which a compiler would contract with a sum that follows.
_PRODUCTS = set(
    """
    mul integer_pow square pow dot_general exp exp2 expm1 log log1p logistic tanh sin cos
    tan sinh cosh erf erfc erf_inv lgamma digamma rsqrt cbrt reduce_prod cumprod
    """.split()  # noqa: SIM905
)


def with_fixed_rounding(
    function: Callable[..., tuple[PyTree, PyTree]], opaque_false: Bool[Array, ""]
) -> Callable[..., tuple[PyTree, PyTree]]:
    """`function`, whose first result is rounded the same in whatever program it stands.

    Every product on the way to the first result is rounded, so that nothing is contracted; what
    only the second result needs, such as derivatives, is left to the compiler. Whoever writes the
    function need not know of it.
    """

    def call(*arguments):
        leaves, structure = jax.tree.flatten(arguments)

        def flat(*leaves):
            return function(*structure.unflatten(leaves))

        program, form = compat.program(flat, *leaves, differentiated=False)
        count = jax.tree.structure(form[0]).num_leaves
        # Only what the first result needs has to be the same everywhere.
        deciding = _needed(program, program.outputs[:count])
        values = dict(zip(program.inputs, leaves, strict=True))

        def read(atom):
            return atom.value if isinstance(atom, Constant) else values[atom]

        for equation in program.equations:
            results = equation.bind(*map(read, equation.inputs))
            if equation.primitive in _PRODUCTS and not deciding.isdisjoint(equation.outputs):
                results = _round_floats(results, opaque_false)
            values.update(zip(equation.outputs, results, strict=True))
        return jax.tree.structure(form).unflatten(map(read, program.outputs))

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
