"""A random value whose derivative is estimated, as a function that JAX differentiates with respect
to theta alone: once, or twice where the estimator has second derivatives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from ..base.validate import NotDifferentiable
from ..fast.batch_first import batch_first
from ..fast.linear import linear_call

_SECOND_DERIVATIVE = (
    "A second derivative of an expectation was asked for (`jax.hessian`, `grad` of `grad`): of"
    " finite chains and of programs diffmh estimates first derivatives only. At equilibrium there"
    " is `diffmh.hessian(expectation)`, and `jax.hessian` itself, for expectations with"
    " `estimator=diffmh.Covariance()` or `diffmh.Stationary()`; from draws, those of"
    " `diffmh.from_draws(..., at=theta)`."
)
_THIRD_DERIVATIVE = (
    "A third derivative of an expectation was asked for. diffmh estimates only first and second"
    " derivatives. What `diffmh.from_draws(..., at=theta)` returns has derivatives of every order."
)


class _CustomJvp:
    """`eqx.filter_custom_jvp` of a function of arrays whose primal result, the function's and the
    rule's, has the axis of `jax.vmap` in front whenever an argument has one: JAX takes it for
    granted that the two agree, and else exchanges axes.
    """

    def __init__(self, function: Callable[..., Any]):
        self._call = eqx.filter_custom_jvp(
            lambda *primals: batch_first(function(*primals), primals)
        )

    def __call__(self, *primals: Any) -> Any:
        return self._call(*primals)

    def def_jvp(self, rule: Callable[[Any, Any], tuple[Any, Any]]) -> None:
        """`rule(primals, tangents)`: the value and its tangent."""

        def in_front(primals, tangents):
            value, tangent = rule(primals, tangents)
            return batch_first(value, primals), tangent

        self._call.def_jvp(in_front)


@_CustomJvp
def differentiable(value, jacobian, hessian, theta, key, args):
    """`value(theta, key, args)`; `jacobian(theta, key, args)` has value and derivative, the P
    flattened parameters leading; and `hessian(theta, key, args)` also the second derivative, two
    axes of the parameters leading, or it is `None`: a second derivative is refused then.
    """
    return value(theta, key, args)


@differentiable.def_jvp
def _jvp(primals, tangents):
    _, jacobian, hessian, theta, key, args = primals
    theta = jax.tree.map(jnp.asarray, theta)
    direction = ravel_pytree(_direction(theta, tangents))[0]
    # The Jacobian has a rule of its own, so that a second differentiation meets the Hessian; both
    # come from chains of the same key.
    given = (jacobian, theta, key, args)
    values, derivative = _once(*given) if hessian is None else _jacobian(hessian, *given)
    # Linear in the direction, as JAX requires of a rule: `jax.grad` transposes this product alone.
    return values, jnp.tensordot(direction, derivative, axes=1).astype(values.dtype)


@_CustomJvp
def _jacobian(hessian, jacobian, theta, key, args):
    return jacobian(theta, key, args)


@_jacobian.def_jvp
def _jacobian_jvp(primals, tangents):
    hessian, _, theta, key, args = primals
    direction = ravel_pytree(_direction(theta, tangents))[0]
    values, derivative, second = _twice_only(hessian, theta, key, args)
    along = (jnp.tensordot(direction, each, axes=1) for each in (derivative, second))
    d_values, d_derivative = along
    return (values, derivative), (
        d_values.astype(values.dtype),
        d_derivative.astype(derivative.dtype),
    )


@_CustomJvp
def moving(value, other):
    """`value`, which moves as `other` does too: the sum of their derivatives. Adding `other` and
    taking it away again would round, and be NaN where it is infinite.
    """
    return value


@moving.def_jvp
def _moving_jvp(primals, tangents):
    own, others = tangents
    if own is None or others is None:
        return primals[0], others if own is None else own
    return primals[0], own + others


def _direction(theta, tangents):
    """A direction like θ: an unperturbed leaf has the direction `None`. Refuses derivatives with
    respect to anything else.
    """
    *closed_over, d_theta, _, d_args = tangents
    if jax.tree.leaves(d_args):
        raise NotDifferentiable(
            "A derivative with respect to `args` was asked for: they are data. Make what you"
            " differentiate a part of `theta`."
        )
    if jax.tree.leaves(closed_over):
        raise NotDifferentiable(
            "A derivative was asked for with respect to `init`, to an array in the kernel, or to a"
            " value that `log_density`, `f` or the program closes over. Make what you differentiate"
            " a part of `theta` (a proposal's parameters too: `MetropolisHastings(log_density,"
            " lambda theta: GaussianWalk(...))`). If you do not want this derivative, apply"
            " `jax.lax.stop_gradient` to the value outside of `log_density`, `f` or the program;"
            " inside of them it has no effect."
        )
    leaves, structure = jax.tree.flatten(theta)
    slots = structure.flatten_up_to(d_theta)
    directions = [
        jnp.zeros_like(leaf) if d is None else d for leaf, d in zip(leaves, slots, strict=True)
    ]
    return structure.unflatten(directions)


@_CustomJvp
def differentiable_both_ways(value, pushforward, pullback, theta, key, args):
    """`value(theta, key, args)`; its derivative along a direction is `pushforward(theta, key, args,
    direction)`, and backward `pullback(theta, key, args, cotangent)`: each is computed when it is
    asked for.
    """
    return value(theta, key, args)


@differentiable_both_ways.def_jvp
def _jvp_both_ways(primals, tangents):
    value, pushforward, pullback, theta, key, args = primals
    theta = jax.tree.map(jnp.asarray, theta)
    direction = _direction(theta, tangents)
    values = _once(value, theta, key, args)
    arrays, static = eqx.partition((pushforward, pullback, theta, key, args), eqx.is_array)

    def forward(arrays, direction):
        pushforward, _, *given = eqx.combine(arrays, static)
        return pushforward(*given, direction).astype(values.dtype)

    def backward(arrays, cotangent):
        _, pullback, *given = eqx.combine(arrays, static)
        return pullback(*given, cotangent)

    return values, linear_call(forward, backward, arrays, direction, values)


@_CustomJvp
def differentiable_by(value, surrogate, theta, key, args):
    """`value(theta, key, args)`; the derivative is JAX's own of `surrogate(theta, key, args)`, so
    that many parameters are differentiated backward.
    """
    return value(theta, key, args)


@differentiable_by.def_jvp
def _jvp_by(primals, tangents):
    _, surrogate, theta, key, args = primals
    theta = jax.tree.map(jnp.asarray, theta)
    direction = _direction(theta, tangents)
    of_theta = lambda theta: surrogate(theta, key, args)
    # The surrogate's own derivative is the estimator, its second is not: it is refused, never
    # returned.
    at = jax.tree.map(_only_once, theta)
    return jax.jvp(of_theta, (at,), (direction,))


@jax.custom_jvp
def _only_once(leaf):
    """A parameter with respect to which a derivative is already being taken."""
    return leaf


@_only_once.defjvp
def _refuse_another(primals, tangents):
    raise NotDifferentiable(_SECOND_DERIVATIVE)


def _last(message: str) -> Callable[..., Any]:
    """`apply(function, theta, key, args)`, of which a derivative is refused."""

    @eqx.filter_custom_jvp
    def apply(function, theta, key, args):
        return function(theta, key, args)

    @apply.def_jvp
    def _refuse(primals, tangents):
        raise NotDifferentiable(message)

    return apply


_once, _twice_only = _last(_SECOND_DERIVATIVE), _last(_THIRD_DERIVATIVE)


def not_differentiable(tree, message: str):
    """`tree`, whose differentiation is refused with a message: it would silently be zero."""

    @eqx.filter_custom_jvp
    def passed(tree):
        return tree

    @passed.def_jvp
    def _refuse(primals, tangents):
        if jax.tree.leaves(tangents):
            raise NotDifferentiable(message)
        return passed(*primals), jax.tree.map(lambda _: None, primals[0])

    return passed(tree)
