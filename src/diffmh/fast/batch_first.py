"""State the position of `jax.vmap`'s axis in a result, rather than leaving it to JAX.

`jax.vmap` of a `custom_jvp` function maps the function and its rule separately and expects both to
put the axis at the same position of the primal result. It does not check this: when staged (in a
`scan`, under `jit`), a rule with another position gives a primal whose axes are exchanged.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import PyTree

from ..jaxprs import compat


def batch_first(value: PyTree, inputs: PyTree) -> PyTree:
    """Return `value`. Under `jax.vmap` each of its arrays is mapped over its first axis if any of
    them, or any array in `inputs`, is mapped over any axis.
    """
    leaves, structure = jax.tree.flatten(value)
    # For keys pass the data, since `jax.debug_key_reuse` counts uses of keys.
    others = [
        jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        for leaf in jax.tree.leaves(inputs)
        if isinstance(leaf, jax.Array)
    ]
    return structure.unflatten(_batch_first.bind(*leaves, *others, count=len(leaves)))


_batch_first = Primitive(compat.BATCH_FIRST)
_batch_first.multiple_results = True


def _identity(*leaves: Any, count: int) -> list[Any]:
    return list(leaves[:count])


def _jvp(primals: Any, tangents: Any, *, count: int) -> Any:
    # The identity of the first operands. The inputs only determine the axis and have no effect on
    # the derivative.
    return _batch_first.bind(*primals, count=count), list(tangents[:count])


def _batch(leaves: Any, axes: Any, *, count: int) -> Any:
    size = next(
        leaf.shape[axis] for leaf, axis in zip(leaves, axes, strict=True) if axis is not None
    )
    first = [
        jnp.broadcast_to(leaf, (size, *jnp.shape(leaf)))
        if axis is None
        else jnp.moveaxis(leaf, axis, 0)
        for leaf, axis in zip(leaves[:count], axes[:count], strict=True)
    ]
    # The inputs are returned unchanged: an outer map may have an axis in them too.
    return _batch_first.bind(*first, *leaves[count:], count=count), [0] * count


_batch_first.def_impl(_identity)
_batch_first.def_abstract_eval(_identity)
ad.primitive_jvps[_batch_first] = _jvp
batching.primitive_batchers[_batch_first] = _batch
mlir.register_lowering(_batch_first, mlir.lower_fun(_identity, multiple_results=True))
