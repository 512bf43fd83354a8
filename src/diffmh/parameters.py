"""Evaluation at the parameters: a value, and its derivative where one is wanted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, PyTree

from ._lowering import compat, rounding
from .values import Value

# Fewer may be fused into whatever uses them.
_FEW_ELEMENTS = 32


class Parameters(eqx.Module):
    """θ and the data `args`, and how functions of them are evaluated.

    `never` are two falsehoods that no compiler sees through (`_lowering.rounding`).
    """

    theta: PyTree
    args: tuple[Any, ...]
    never: Bool[Array, "2"]
    differentiate: bool = eqx.field(static=True)

    @property
    def size(self) -> int:
        """P, the number of scalar parameters."""
        return sum(jnp.size(leaf) for leaf in jax.tree.leaves(self.theta))

    @property
    def dtype(self) -> Any:
        return jnp.result_type(*jax.tree.leaves(self.theta))

    def value_only(self) -> Parameters:
        """The same parameters, with no derivative wanted."""
        return Parameters(self.theta, self.args, self.never, False)

    def evaluate(self, function: Callable[..., PyTree], *operands: PyTree | Value) -> Value:
        """`function(theta, *operands, *args)`, with its derivative if one is wanted: by θ, and
        along the tangents of operands that have them (`Value`).

        The result of `function` is an array, or a pytree where tangents are carried on. The
        derivative is computed apart from the value, whose instructions are then the same whether
        or not anybody asks for a derivative.
        """
        primals, tangents = _split(operands)
        value = function(self.theta, *primals, *self.args)
        if not self.differentiate:
            return Value(value)
        primals = self.apart(primals)
        at_fixed_data = lambda theta, *primals: function(theta, *primals, *self.args)
        return Value(value, jacobian(at_fixed_data, self.theta, primals, tangents, value))

    def evaluate_each(
        self, log_weight: Callable[..., Float[Array, ""]], x: Value, values: Array, here: Array
    ) -> Value:
        """`log_weight(theta, x, value, *args)` for each of `values`, of which `here` is possible.

        Where it is −inf the value is impossible, and its derivative counts for nothing. It is taken
        at `here` instead: backward, `0 · ∞` at one value would reach the parameters of all others.
        """

        def each(theta, x, values):
            return jax.vmap(lambda value: log_weight(theta, x, value, *self.args))(values)

        primal = each(self.theta, x.primal, values)
        if not self.differentiate:
            return Value(primal)
        possible = jnp.where(jnp.isneginf(primal), here.astype(values.dtype), values)
        at = self.apart((x.primal, possible))
        return Value(primal, jacobian(each, self.theta, at, (x.tangent, None)))

    def apart(self, tree: PyTree) -> PyTree:
        """The same values, to compute derivatives from: whatever is done with them leaves the
        primal's own instructions as they are.
        """
        size = sum(leaf.size for leaf in jax.tree.leaves(tree))
        return (rounding.whole if size > _FEW_ELEMENTS else rounding.settle)(tree, self.never[1])

    def kept(self, slots: PyTree) -> PyTree:
        """The same, computed once: several large alternatives would be computed anew for each use
        of any of their elements.
        """
        leaves = jax.tree.leaves(slots)
        is_large = leaves[0].shape[0] > 1 and sum(leaf.size for leaf in leaves) > _FEW_ELEMENTS
        return rounding.whole(slots, self.never[0]) if is_large else slots

    def once(self, tree: PyTree) -> PyTree:
        """The same, computed once: not anew for each of its uses."""
        return rounding.whole(tree, self.never[0])

    def follow(self, function: Callable[[PyTree], PyTree], value: Value) -> Value:
        """`function(x)`, with the tangent of `x` carried on where there is one; free of θ."""
        primal = function(value.primal)
        if not self.differentiate or value.tangent is None:
            return Value(primal)
        return Value(primal, along(function, (self.apart(value.primal),), (value.tangent,)))


def _split(operands: tuple[PyTree | Value, ...]) -> tuple[tuple[PyTree, ...], tuple[PyTree, ...]]:
    primals = tuple(o.primal if isinstance(o, Value) else o for o in operands)
    tangents = tuple(o.tangent if isinstance(o, Value) else None for o in operands)
    return primals, tangents


def jacobian(
    function: Callable[..., PyTree],
    theta: PyTree,
    primals: tuple[PyTree, ...] = (),
    tangents: tuple[PyTree, ...] = (),
    value: PyTree = None,
) -> PyTree:
    """The derivative of `function(theta, *primals)` by the flattened theta, through the tangents
    of the primals as well, by whichever mode takes fewer passes, or by the one that there is: a
    `custom_vjp` has no forward mode, and a `while_loop` no reverse one.

    The P parameters lead; results that are not floats have `None`. If the `value` is known, entries
    that are infinite (log odds of what is impossible) do not touch the derivatives of the others.
    """
    flat, _ = ravel_pytree(theta)
    tangents = tangents or (None,) * len(primals)
    primitives, outputs = compat.traced(function, theta, *primals)
    is_array = hasattr(outputs, "shape")
    # JAX lets a `custom_vjp` through forward, and fails only when the result is used.
    backward_only = is_array and "custom_vjp_call" in primitives
    if not is_array or (flat.size <= outputs.size and not backward_only):
        return _by_columns(function, theta, primals, tangents)
    rows = lambda: _by_rows(function, theta, primals, tangents, outputs)
    columns = lambda: _by_columns(function, theta, primals, tangents)
    try:
        if value is None or outputs.shape == () or backward_only:
            return rows()
        # Backward, `0 · ∞` at an infinite entry reaches the parameters of all others; forward each
        # entry has a derivative of its own.
        infinite = any_mapped(jnp.any(jnp.isinf(value)))
        return jax.lax.cond(infinite, lambda: columns().astype(flat.dtype), rows)
    except ValueError as error:
        if _NO_REVERSE_MODE not in str(error):
            raise
    return columns()


def any_mapped(flag: Bool[Array, ""]) -> Bool[Array, ""]:
    """Whether the flag is raised anywhere along the axes that `jax.vmap` maps over: in any chain.
    All of them then branch together; on a flag of each one's own both branches would run.
    """
    call = jax.custom_batching.custom_vmap(lambda flag: flag)
    call.def_vmap(lambda size, batched, flag: (jnp.any(flag), False))
    return call(flag)


# What JAX says of a `while_loop`.
_NO_REVERSE_MODE = "Reverse-mode differentiation does not work"


def _by_columns(function, theta, primals, tangents) -> PyTree:
    """One push forward for each parameter."""
    flat, unravel = ravel_pytree(theta)
    basis = jax.vmap(unravel)(jnp.eye(flat.size, dtype=flat.dtype))
    return along(function, (theta, *primals), (basis, *tangents))


def along(
    function: Callable[..., PyTree], primals: tuple[PyTree, ...], tangents: tuple[PyTree, ...]
) -> PyTree:
    """The derivatives of `function(*primals)` along tangents with the P parameters leading."""
    of_moving, moving, slopes = _moving_part(function, primals, tangents)
    floats = lambda *leaves: eqx.filter(of_moving(*leaves), eqx.is_inexact_array)
    one = lambda *slopes: jax.jvp(floats, moving, slopes)[1]
    if slopes[0].shape[0] == 1:
        single = one(*(slope[0] for slope in slopes))
        return jax.tree.map(lambda leaf: leaf[None], single)
    return jax.vmap(one)(*slopes)


def _by_rows(function, theta, primals, tangents, outputs) -> Float[Array, "P ..."]:
    """One pullback for each output."""
    of_moving, moving, slopes = _moving_part(
        lambda *primals: lambda theta: function(theta, *primals), primals, tangents
    )
    _, pullback = jax.vjp(lambda theta, *moving: of_moving(*moving)(theta), theta, *moving)

    def row(cotangent):
        by_theta, *by_moving = pullback(cotangent)
        total = ravel_pytree(by_theta)[0]
        for pulled, slope in zip(by_moving, slopes, strict=True):
            total = total + jnp.tensordot(slope, pulled, axes=pulled.ndim).astype(total.dtype)
        return total

    if outputs.shape == ():
        return row(jnp.ones((), outputs.dtype))
    basis = jnp.eye(outputs.size, dtype=outputs.dtype).reshape(outputs.size, *outputs.shape)
    return jnp.moveaxis(jax.vmap(row)(basis), 0, -1).reshape(-1, *outputs.shape)


def _moving_part(function, primals, tangents):
    """`function` of those leaves that have a tangent, those leaves, and their tangents."""
    leaves, structure = jax.tree.flatten(primals)
    slopes = []
    for primal, tangent in zip(primals, tangents, strict=True):
        size = jax.tree.structure(primal).num_leaves
        here = jax.tree.leaves(tangent, is_leaf=lambda node: node is None)
        slopes += [None] * size if tangent is None else here
    moving = [index for index, slope in enumerate(slopes) if slope is not None]

    def of_moving(*moved):
        merged = dict(enumerate(leaves)) | dict(zip(moving, moved, strict=True))
        return function(*structure.unflatten(merged.values()))

    values = tuple(jnp.asarray(leaves[index]) for index in moving)
    slopes = tuple(slope for slope in slopes if slope is not None)
    directions = tuple(t.astype(value.dtype) for t, value in zip(slopes, values, strict=True))
    return of_moving, values, directions
