"""Our own primitives, and abstract values for their rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

# The implementation of each, by name: it replaces the equation in a program that is only evaluated.
IMPLEMENTATIONS: dict[str, Callable[..., list[Any]]] = {}


def new_primitive(
    name: str,
    implementation: Callable[..., list[Any]],
    abstract: Callable[..., list[Any]],
    batched: Callable[..., dict[str, Any]] = lambda **params: params,
    jvp: Callable[..., Any] | None = None,
) -> Callable[..., list[Any]]:
    """Define a primitive with several results, given its implementation and abstract evaluation.
    Returns its `bind`.

    A batch becomes the leading axis of every operand and of every result; `batched` updates the
    parameters accordingly. `jvp(primals, tangents, **params)` is the rule for JAX, or raises.
    """
    primitive = Primitive(name)
    # Convention for all of our primitives: operands and results are flat lists.
    primitive.multiple_results = True
    IMPLEMENTATIONS[name] = implementation
    primitive.def_impl(
        lambda *operands, **params: jax.jit(lambda *xs: implementation(*xs, **params))(*operands)
    )
    primitive.def_abstract_eval(abstract)
    mlir.register_lowering(primitive, mlir.lower_fun(implementation, multiple_results=True))

    def batch(operands, axes, **params):
        size = next(
            operand.shape[axis]
            for operand, axis in zip(operands, axes, strict=True)
            if axis is not None
        )

        def lead(operand, axis):
            if axis is None:
                return jax.numpy.broadcast_to(operand, (size, *jax.numpy.shape(operand)))
            return jax.numpy.moveaxis(operand, axis, 0)

        outputs = primitive.bind(*map(lead, operands, axes), **batched(**params))
        return outputs, [0] * len(outputs)

    batching.primitive_batchers[primitive] = batch
    if jvp is not None:
        ad.primitive_jvps[primitive] = jvp
    return primitive.bind


def shaped(shape: tuple[int, ...], dtype: Any) -> ShapedArray:
    """The abstract value of an array."""
    return ShapedArray(shape, dtype)


def result_types(function: Callable[[], Any]) -> list[ShapedArray]:
    """The abstract values of a function's flat results."""
    return list(jax.make_jaxpr(function)().out_avals)
