"""Evaluation at the parameters: a value, and its derivative where one is wanted."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, PyTree

from ..fast import rounding
from ..jaxprs import compat
from .values import Value


class Parameters(eqx.Module):
    """θ and the data `args`, and how functions of them are evaluated.

    For authors of kernels: `theta`, `args`, `evaluate` and `follow`.
    """

    theta: PyTree
    args: tuple[Any, ...]
    barriers: rounding.Barriers
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
        return Parameters(self.theta, self.args, self.barriers, False)

    def evaluate(self, function: Callable[..., PyTree], *operands: PyTree | Value) -> Value:
        """`function(theta, *operands, *args)`, with its derivative if one is wanted: with respect
        to θ, and along the tangents of operands that have them (`Value`).

        The result of `function` is an array, or a pytree where tangents are carried on.
        """
        primals = (each.primal if isinstance(each, Value) else each for each in operands)
        # Evaluated by itself, not as a by-product of the derivative: the primal must be the same
        # number whether or not a derivative is wanted.
        result = function(self.theta, *primals, *self.args)
        return Value(result, self.derivative(function, result, *operands))

    def derivative(
        self, function: Callable[..., PyTree], result: PyTree, *operands: PyTree | Value
    ) -> PyTree:
        """The derivative of `evaluate` for a `result` that is known; `None` if none is wanted."""
        if not self.differentiate:
            return None
        values = [each if isinstance(each, Value) else Value(each) for each in operands]
        # The instructions of the result must be the same whether or not anybody asks for its
        # derivative, which is computed from values behind a barrier.
        primals = self.barriers.for_derivatives(tuple(value.primal for value in values))
        tangents = tuple(value.tangent for value in values)

        def at_fixed_data(theta, *primals):
            return function(theta, *primals, *self.args)

        return jacobian(at_fixed_data, self.theta, primals, tangents, result)

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
        at = self.barriers.for_derivatives((x.primal, possible))
        return Value(primal, jacobian(each, self.theta, at, (x.tangent, None)))

    def zero_tangent(self, x: PyTree) -> PyTree:
        """The tangent of a state that does not move with θ yet; `None` if it has no floats."""
        floats = eqx.filter(x, eqx.is_inexact_array)
        zeros = lambda leaf: jnp.zeros((self.size, *leaf.shape), leaf.dtype)
        return jax.tree.map(zeros, floats) if jax.tree.leaves(floats) else None

    def follow(self, function: Callable[[PyTree], PyTree], value: Value) -> Value:
        """`function(x)`, with the tangent of `x` carried on where there is one; free of θ."""
        primal = function(value.primal)
        if not self.differentiate or value.tangent is None:
            return Value(primal)
        x = self.barriers.for_derivatives(value.primal)
        return Value(primal, along(function, (x,), (value.tangent,)))


def jacobian(
    function: Callable[..., PyTree],
    theta: PyTree,
    primals: tuple[PyTree, ...] = (),
    tangents: tuple[PyTree, ...] = (),
    value: PyTree = None,
) -> PyTree:
    """The derivative of `function(theta, *primals)` with respect to the flattened theta, through
    the tangents of the primals as well, in whichever mode takes fewer passes, or in the one that
    there is: a `custom_vjp` has no forward mode, and a `while_loop` no reverse one.

    The P parameters lead; results that are not floats have `None`. If the `value` is known, entries
    that are infinite (log odds of what is impossible) do not touch the derivatives of the others.
    """
    flat, _ = ravel_pytree(theta)
    tangents = tangents or (None,) * len(primals)
    # P pushes forward or F pullbacks: the smaller number wins, unless JAX lacks that mode.
    primitives, outputs = compat.traced(function, theta, *primals)
    is_array = hasattr(outputs, "shape")
    # JAX lets a `custom_vjp` through forward, and fails only when the result is used.
    backward_only = is_array and "custom_vjp_call" in primitives
    columns = functools.partial(_by_columns, function, theta, primals, tangents)
    if not is_array or (flat.size <= outputs.size and not backward_only):
        return columns()
    rows = functools.partial(_by_rows, function, theta, primals, tangents, outputs)
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
    """True if the flag is raised anywhere along the axes that `jax.vmap` maps over: in any chain.
    All of them then branch together; on a flag of each one's own both branches would run.
    """
    call = jax.custom_batching.custom_vmap(lambda flag: flag)
    call.def_vmap(lambda size, batched, flag: (jnp.any(flag), False))
    return call(flag)


# What JAX says of a `while_loop`.
_NO_REVERSE_MODE = "Reverse-mode differentiation does not work"


def has_reverse_mode(function: Callable[..., Float[Array, "..."]], theta: PyTree, *x: Any) -> bool:
    """True if JAX differentiates `function(theta, *x)` backward with respect to theta; both may be
    shapes and dtypes.
    """
    try:
        jax.eval_shape(jax.grad(lambda theta, *x: jnp.sum(function(theta, *x))), theta, *x)
    except ValueError as error:
        if _NO_REVERSE_MODE not in str(error):
            raise
        return False
    return True


def _by_columns(function, theta, primals, tangents) -> PyTree:
    """One push forward for each parameter."""
    flat, unravel = ravel_pytree(theta)
    basis = jax.vmap(unravel)(jnp.eye(flat.size, dtype=flat.dtype))
    return along(function, (theta, *primals), (basis, *tangents))


def along(
    function: Callable[..., PyTree], primals: tuple[PyTree, ...], tangents: tuple[PyTree, ...]
) -> PyTree:
    """The derivatives of `function(*primals)` along tangents with the P parameters leading."""
    moving = _Moving.of(primals, tangents)

    def floats(*values):
        return eqx.filter(function(*moving.merged(values)), eqx.is_inexact_array)

    def push(*slopes):
        return jax.jvp(floats, moving.values, slopes)[1]

    # A `vmap` over one lane would turn indexing into gathers.
    if moving.slopes[0].shape[0] == 1:
        single = push(*(slope[0] for slope in moving.slopes))
        return jax.tree.map(lambda leaf: leaf[None], single)
    return jax.vmap(push)(*moving.slopes)


def _by_rows(function, theta, primals, tangents, outputs) -> Float[Array, "P ..."]:
    """One pullback for each output.

    With `J` the derivative with respect to θ at fixed primals, and `ẋ` the tangents of the leaves x
    that have them, a cotangent c pulls back to `c·J + Σ_x (c·∂f/∂x)·ẋ`: one pullback gives `c·J`
    and every `c·∂f/∂x`.
    """
    moving = _Moving.of(primals, tangents)

    def of_theta_and_moving(theta, *values):
        return function(theta, *moving.merged(values))

    _, pullback = jax.vjp(of_theta_and_moving, theta, *moving.values)

    def row(cotangent):
        by_theta, *by_moving = pullback(cotangent)
        total = ravel_pytree(by_theta)[0]
        for pulled, slope in zip(by_moving, moving.slopes, strict=True):
            total = total + jnp.tensordot(slope, pulled, axes=pulled.ndim).astype(total.dtype)
        return total

    if outputs.shape == ():
        return row(jnp.ones((), outputs.dtype))
    # Row f of the result is the pullback of e_f: (F, P) turned to (P, *F).
    basis = jnp.eye(outputs.size, dtype=outputs.dtype).reshape(outputs.size, *outputs.shape)
    return jnp.moveaxis(jax.vmap(row)(basis), 0, -1).reshape(-1, *outputs.shape)


class _Moving(eqx.Module):
    """The leaves of some primals that have a tangent, their tangents, and where they belong."""

    primals: tuple[PyTree, ...]
    places: tuple[int, ...]
    values: tuple[Array, ...]
    slopes: tuple[Array, ...]

    @staticmethod
    def of(primals: tuple[PyTree, ...], tangents: tuple[PyTree, ...]) -> _Moving:
        leaves = jax.tree.leaves(primals)
        # A slope, or `None`, for each leaf: a whole primal without a tangent has `None` alone.
        slopes = []
        for primal, tangent in zip(primals, tangents, strict=True):
            count = jax.tree.structure(primal).num_leaves
            own = jax.tree.leaves(tangent, is_leaf=lambda node: node is None)
            # Leaf by leaf beside `leaves`: the two lists are read by the same index below.
            slopes += [None] * count if tangent is None else own
        places = tuple(index for index, slope in enumerate(slopes) if slope is not None)
        values = tuple(jnp.asarray(leaves[index]) for index in places)
        own = tuple(slopes[i].astype(leaf.dtype) for i, leaf in zip(places, values, strict=True))
        return _Moving(primals, places, values, own)

    def merged(self, values: tuple[Array, ...]) -> tuple[PyTree, ...]:
        """The primals with other values of the moving leaves."""
        leaves, structure = jax.tree.flatten(self.primals)
        for place, value in zip(self.places, values, strict=True):
            leaves[place] = value
        return structure.unflatten(leaves)
