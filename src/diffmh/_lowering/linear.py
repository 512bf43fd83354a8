"""Linear functions that know their own transposes: JAX transposes what it can see through, and a
loop that keeps nothing of its path is not such a thing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, PyTree

from . import compat


def linear_call(
    function: Callable[[PyTree, PyTree], PyTree],
    transpose: Callable[[PyTree, PyTree], PyTree],
    residuals: PyTree,
    direction: PyTree,
) -> PyTree:
    """`function(residuals, direction)`, linear in `direction`; JAX transposes it by
    `transpose(residuals, cotangent)`, of the form of `direction`, and maps either.

    It is not differentiable by the residuals, and refused there.
    """
    fixed, of_residuals = jax.tree.flatten(residuals)
    moving, of_direction = jax.tree.flatten(direction)
    form = jax.eval_shape(function, residuals, direction)
    count, of_result = len(fixed), jax.tree.structure(form)

    def flat(*leaves):
        given = of_residuals.unflatten(leaves[:count]), of_direction.unflatten(leaves[count:])
        return jax.tree.leaves(function(*given))

    def flat_transpose(*leaves):
        given = of_residuals.unflatten(leaves[:count]), of_result.unflatten(leaves[count:])
        return jax.tree.leaves(transpose(*given))

    results = _linear.bind(
        *fixed, *moving, function=flat, transpose=flat_transpose, num_residuals=count
    )
    return of_result.unflatten(results)


_linear = Primitive("diffmh_linear")
_linear.multiple_results = True


def _call(*leaves: Array, function, transpose, num_residuals) -> list[Array]:
    return function(*leaves)


def _forms(*avals: Any, function, transpose, num_residuals) -> list[ShapedArray]:
    return compat.result_types(function, *avals)


def _jvp(primals, tangents, *, num_residuals, **functions):
    is_zero = lambda tangent: isinstance(tangent, ad.Zero)
    if not all(map(is_zero, tangents[:num_residuals])):
        raise TypeError("`linear_call` was differentiated by its residuals.")
    along = [ad.instantiate_zeros(tangent) for tangent in tangents[num_residuals:]]
    call = lambda moving: _linear.bind(
        *primals[:num_residuals], *moving, num_residuals=num_residuals, **functions
    )
    return call(primals[num_residuals:]), call(along)


def _transpose(cotangents, *leaves, function, transpose, num_residuals):
    residuals, moving = leaves[:num_residuals], leaves[num_residuals:]
    given = [ad.instantiate_zeros(cotangent) for cotangent in cotangents]
    pulled = _linear.bind(
        *residuals, *given, function=transpose, transpose=function, num_residuals=num_residuals
    )
    # A direction that nobody varies is known, and has no cotangent.
    varied = zip(pulled, moving, strict=True)
    own = [leaf if ad.is_undefined_primal(direction) else None for leaf, direction in varied]
    return [None] * num_residuals + own


def _batch(leaves: Sequence[Array], axes: Sequence[int | None], *, function, transpose, **count):
    """Mapped, it is linear still; what is common to all has the sum of all cotangents."""
    num_residuals = count["num_residuals"]
    fixed, moving = tuple(axes[:num_residuals]), axes[num_residuals:]

    def mapped(*leaves):
        return jax.vmap(function, tuple(axes))(*leaves)

    def transposed(*leaves):
        ahead = (0,) * (len(leaves) - num_residuals)
        pulled = jax.vmap(transpose, (*fixed, *ahead))(*leaves)
        own = zip(pulled, moving, strict=True)
        return [
            jnp.sum(leaf, axis=0) if axis is None else jnp.moveaxis(leaf, 0, axis)
            for leaf, axis in own
        ]

    results = _linear.bind(*leaves, function=mapped, transpose=transposed, **count)
    return results, [0] * len(results)


_linear.def_impl(_call)
_linear.def_abstract_eval(_forms)
ad.primitive_jvps[_linear] = _jvp
ad.primitive_transposes[_linear] = _transpose
batching.primitive_batchers[_linear] = _batch
mlir.register_lowering(_linear, mlir.lower_fun(_call, multiple_results=True))
