"""Evaluation at the parameters: a value, and its derivative where one is wanted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Inexact, PyTree

from ._lowering import rounding


class Dual(eqx.Module):
    """A value and its derivative with respect to the `P` flattened parameters.

    `gradient` has shape `(P, *value.shape)`, or is `None` where no derivative is wanted. A `Dual`
    is a pytree, so a state that remembers one is selected, copied and compared like any other.
    """

    value: Inexact[Array, "..."]
    gradient: Float[Array, "P ..."] | None

    def __sub__(self, other: Dual) -> Dual:
        gradient = (
            None
            if self.gradient is None or other.gradient is None
            else self.gradient - other.gradient
        )
        return Dual(self.value - other.value, gradient)

    def shifted(self, amount: Array) -> Dual:
        """The dual of `value + amount`, where `amount` does not depend on the parameters."""
        return Dual(self.value + amount, self.gradient)


def without_gradients(tree: PyTree) -> PyTree:
    """Drops the derivatives that a state remembers: an alternative needs only values."""
    is_dual = lambda node: isinstance(node, Dual)
    return jax.tree.map(
        lambda node: Dual(node.value, None) if is_dual(node) else node, tree, is_leaf=is_dual
    )


class Parameters(eqx.Module):
    """θ and the data `args`, and how functions of them are evaluated.

    `never` are two falsehoods that no compiler sees through (`_rounding`).
    """

    theta: PyTree
    args: tuple[Any, ...]
    never: Bool[Array, "2"]
    differentiate: bool = eqx.field(static=True)

    @property
    def size(self) -> int:
        """P, the number of scalar parameters."""
        return sum(jnp.size(leaf) for leaf in jax.tree.leaves(self.theta))

    def value_only(self) -> Parameters:
        """The same parameters, with no derivative wanted."""
        return Parameters(self.theta, self.args, self.never, False)

    def settle(self, tree: PyTree) -> PyTree:
        """`tree`, rounded here and now: what decides the primal's path is settled, so that it is
        bit-identical in every program.
        """
        return rounding.settle(tree, self.never[0])

    def apart(self, tree: PyTree) -> PyTree:
        """`tree` again, for computations that are to share no intermediate result with those
        from `tree` itself.
        """
        return rounding.settle(tree, self.never[1])

    def whole(self, tree: PyTree) -> PyTree:
        """`tree`, computed once and kept."""
        return rounding.whole(tree, self.never[0])

    def evaluate(self, function: Callable[..., Array], *operands: PyTree) -> Dual:
        """`function(theta, *operands, *args)`, with `∂/∂θ` if a derivative is wanted.

        The derivative is computed apart from the value, whose instructions are then the same
        whether or not anybody asks for a derivative.
        """
        value = self.settle(function(self.theta, *operands, *self.args))
        if not self.differentiate:
            return Dual(value, None)
        operands = self.apart(operands)
        return Dual(
            value, jacobian(lambda theta: function(theta, *operands, *self.args), self.theta)
        )


def jacobian(function: Callable[[PyTree], Array], theta: PyTree) -> Float[Array, "P ..."]:
    """`∂ function / ∂ theta`, flattened over theta, by whichever mode takes fewer passes."""
    flat, unravel = ravel_pytree(theta)
    outputs = jax.eval_shape(function, theta)
    if flat.size <= outputs.size:
        along = lambda direction: jax.jvp(function, (theta,), (unravel(direction),))[1]
        if flat.size == 1:
            return along(jnp.ones_like(flat))[None]
        return jax.vmap(along)(jnp.eye(flat.size, dtype=flat.dtype))
    _, pullback = jax.vjp(function, theta)
    row = lambda cotangent: ravel_pytree(pullback(cotangent)[0])[0]
    if outputs.shape == ():
        return row(jnp.ones((), outputs.dtype))
    basis = jnp.eye(outputs.size, dtype=outputs.dtype).reshape(outputs.size, *outputs.shape)
    return jnp.moveaxis(jax.vmap(row)(basis), 0, -1).reshape(flat.size, *outputs.shape)
