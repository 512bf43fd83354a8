"""Linear functions with explicit transposes. JAX cannot transpose a loop that stores nothing of its
path, so we tell it the transpose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, PyTree

from ..jaxprs import compat


@dataclass(frozen=True)
class Way:
    """A flat function of residuals and directions, and the shapes of its results, which are given
    so that no tracing is needed to find them.
    """

    function: Callable[..., list[Array]]
    results: tuple[tuple[tuple[int, ...], Any], ...]


def linear_call(
    function: Callable[[PyTree, PyTree], PyTree],
    transpose: Callable[[PyTree, PyTree], PyTree],
    residuals: PyTree,
    direction: PyTree,
    result: PyTree,
) -> PyTree:
    """`function(residuals, direction)`, linear in `direction`, with the structure of `result`. JAX
    transposes it as `transpose(residuals, cotangent)`, with the structure of `direction`. Both may
    be mapped.

    It has no derivative with respect to the residuals; asking for one raises an error.
    """
    fixed, of_residuals = jax.tree.flatten(residuals)
    moving, of_direction = jax.tree.flatten(direction)
    results, of_result = jax.tree.flatten(result)
    count = len(fixed)
    # Under `jax.shard_map`, the transpose of this sums the contributions of the devices.
    axes = compat.varies_over([*fixed, *moving]) if compat.inside_shard_map() else frozenset()
    moving = [compat.vary(leaf, axes) for leaf in moving] if axes else moving

    def forward(*leaves):
        given = of_residuals.unflatten(leaves[:count]), of_direction.unflatten(leaves[count:])
        return jax.tree.leaves(function(*given))

    def backward(*leaves):
        given = of_residuals.unflatten(leaves[:count]), of_result.unflatten(leaves[count:])
        return jax.tree.leaves(transpose(*given))

    flat = _linear.bind(
        *fixed,
        *moving,
        way=Way(forward, _forms(results)),
        back=Way(backward, _forms(moving)),
        num_residuals=count,
        axes=axes,
    )
    return of_result.unflatten(flat)


def _forms(leaves: Sequence[Any]) -> tuple[tuple[tuple[int, ...], Any], ...]:
    return tuple((jnp.shape(leaf), leaf.dtype) for leaf in leaves)


_linear = Primitive("diffmh_linear")
_linear.multiple_results = True


def _call(*leaves: Array, way: Way, **_: Any) -> list[Array]:
    return way.function(*leaves)


def _abstract(*_: Any, way: Way, axes: frozenset[str], **__: Any) -> list[ShapedArray]:
    zeros = lambda: [compat.vary(jnp.zeros(*form), axes) for form in way.results]
    return compat.result_types(zeros)


def _jvp(primals, tangents, *, num_residuals, **rest):
    is_zero = lambda tangent: isinstance(tangent, ad.Zero)
    if not all(map(is_zero, tangents[:num_residuals])):
        raise TypeError("`linear_call` has no derivative with respect to its residuals.")
    # A linear function is its own derivative.
    along = [ad.instantiate_zeros(tangent) for tangent in tangents[num_residuals:]]

    def call(moving):
        return _linear.bind(*primals[:num_residuals], *moving, num_residuals=num_residuals, **rest)

    return call(primals[num_residuals:]), call(along)


def _transpose(cotangents, *leaves, way: Way, back: Way, num_residuals: int, axes):
    residuals, moving = leaves[:num_residuals], leaves[num_residuals:]
    given = [ad.instantiate_zeros(cotangent) for cotangent in cotangents]
    pulled = _linear.bind(
        # (Aᵀ)ᵀ = A: the two directions are exchanged.
        *residuals,
        *given,
        way=back,
        back=way,
        num_residuals=num_residuals,
        axes=axes,
    )
    # A direction that is not differentiated is known and has no cotangent.
    varied = zip(pulled, moving, strict=True)
    own = [leaf if ad.is_undefined_primal(direction) else None for leaf, direction in varied]
    return [None] * num_residuals + own


def _batch(leaves, axes_of, *, way: Way, back: Way, num_residuals: int, axes):
    """A mapped call is still linear. The cotangent of an unmapped operand is the sum over lanes."""
    fixed, moving = tuple(axes_of[:num_residuals]), axes_of[num_residuals:]
    mapped_axes = zip(leaves, axes_of, strict=True)
    size = next(leaf.shape[axis] for leaf, axis in mapped_axes if axis is not None)

    def forward(*leaves):
        return jax.vmap(way.function, tuple(axes_of))(*leaves)

    def backward(*leaves):
        ahead = (0,) * (len(leaves) - num_residuals)
        pulled = jax.vmap(back.function, (*fixed, *ahead))(*leaves)
        own = zip(pulled, moving, strict=True)
        return [
            # The transpose of a broadcast is a sum.
            jnp.sum(leaf, axis=0) if axis is None else jnp.moveaxis(leaf, 0, axis)
            for leaf, axis in own
        ]

    results = _linear.bind(
        *leaves,
        way=Way(forward, tuple(((size, *shape), dtype) for shape, dtype in way.results)),
        back=Way(backward, _forms(leaves[num_residuals:])),
        num_residuals=num_residuals,
        axes=axes,
    )
    return results, [0] * len(results)


_linear.def_impl(_call)
_linear.def_abstract_eval(_abstract)
ad.primitive_jvps[_linear] = _jvp
ad.primitive_transposes[_linear] = _transpose
batching.primitive_batchers[_linear] = _batch
mlir.register_lowering(_linear, mlir.lower_fun(_call, multiple_results=True))
