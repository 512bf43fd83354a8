"""expectation: the expectation of a program's result as a function that JAX differentiates
without bias.
"""

from __future__ import annotations

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Key, PyTree

from .. import _trees, _validate
from .._differentiable import differentiable
from .._lowering import compat
from .._lowering.chains import mapped_over_chains
from . import control_flow as control_flow
from . import rules as rules
from .analysis import analyse
from .interpreter import evaluate
from .keys import refuse_shared
from .refusals import refuse
from .values import Value, no_alternatives

# Pruning draws from the program's key folded with this number, which no split of it reaches.
_PRUNE = 0x7072756E


def expectation(program: Callable[..., PyTree], *, alternatives: int = 1) -> Callable[..., PyTree]:
    """`E[program(theta, key, *args)]` as a function `(theta, key, *args)`: one run of the program,
    whose derivative is unbiased.

    **Arguments**

    - `program(theta, key, *args)`: plain JAX, with its discrete decisions drawn by `sad.bernoulli`,
      `sad.categorical` and so on. It returns any pytree of numbers.
    - `alternatives`: how many are followed at a time. The variance falls with it and the cost
      grows.

    **Returns** a function of `theta` (any pytree of floats), `key` (a typed key) and `args` (data)
    to which `jax.grad`, `jax.jvp`, `jax.jacobian`, `jax.vmap` and `jax.jit` apply. Its value is the
    program's. Average it over keys, or use `sad.run`.

    **Refused**: whatever would make the derivative wrong, with the line of the program: see
    `docs/sad.md`.

    >>> import jax, jax.numpy as jnp
    >>> from diffmh import sad
    >>> def program(p, key):
    ...     key_x, key_y = jax.random.split(key)
    ...     x = sad.bernoulli(key_x, p)
    ...     return x * sad.bernoulli(key_y, jnp.where(x, p, 0.5))        # E = p²
    >>> gradient = jax.vmap(jax.grad(sad.expectation(program)), in_axes=(None, 0))
    >>> round(float(gradient(0.3, jax.random.split(jax.random.key(0), 20_000)).mean()), 1)
    0.6
    """
    _validate.function(
        program,
        "sad.expectation(program)",
        "program",
        "program(theta, key, *args) -> pytree of numbers",
    )
    num_slots = _validate.count(alternatives, "sad.expectation(alternatives=...)")

    def expected(theta, key=None, *args):
        theta, key = _trees.strong(_validate.theta(theta)), _validate.typed_key(key)
        flat, unflatten = flattened(program, theta, key, args)
        value, jacobian = flat, eqx.Partial(value_and_jacobian, flat, num_slots)
        if compat.closes_over_tracers(flat, theta, key, args):
            value = eqx.filter_closure_convert(value, theta, key, args)
            jacobian = eqx.filter_closure_convert(jacobian, theta, key, args)
        value, jacobian = (
            eqx.Partial(mapped_over_chains, function) for function in (value, jacobian)
        )
        return unflatten(differentiable(value, jacobian, theta, key, args))

    return expected


def flattened(program, theta, key, args):
    """The program with its result as one vector of floats, and how to put it into its own form
    again.
    """
    shape = jax.eval_shape(
        lambda theta, key, args: _trees.strong(program(theta, key, *args)), theta, key, args
    )
    for leaf in jax.tree.leaves(shape):
        if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            _validate.real_dtype(leaf.dtype, "what `program` returns")
    as_float = lambda leaf: leaf if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf.astype(float)
    unflatten = ravel_pytree(
        jax.tree.map(lambda leaf: as_float(jnp.zeros(leaf.shape, leaf.dtype)), shape)
    )[1]

    def flat(theta, key, args):
        return ravel_pytree(jax.tree.map(as_float, _trees.strong(program(theta, key, *args))))[0]

    return flat, unflatten


def value_and_jacobian(
    flat, num_slots: int, theta: PyTree, key: Key[Array, ""], args
) -> tuple[Float[Array, "F"], Float[Array, "P F"]]:
    """One run: the value, and an unbiased estimate of the derivative of its expectation."""
    leaves, structure = jax.tree.flatten(theta)
    rest, rest_structure = jax.tree.flatten((key, args))
    function = lambda *flat_inputs: flat(
        jax.tree.unflatten(structure, flat_inputs[: len(leaves)]),
        *jax.tree.unflatten(rest_structure, flat_inputs[len(leaves) :]),
    )
    program, _ = compat.program(function, *leaves, *rest)
    analysis = analyse(program, program.inputs[: len(leaves)])
    refuse(analysis, program)
    refuse_shared(analysis, program)
    directions, unravel = ravel_pytree(theta)
    basis = jax.vmap(lambda direction: jax.tree.leaves(unravel(direction)))(
        jnp.eye(directions.size, dtype=directions.dtype)
    )
    inputs = [Value(leaf, tangent) for leaf, tangent in zip(leaves, basis, strict=True)] + [
        Value(jnp.asarray(leaf)) for leaf in rest
    ]
    world = no_alternatives(
        num_slots,
        directions.size,
        directions.dtype,
        jax.random.fold_in(key, _PRUNE),
        analysis.num_uniforms(program),
    )
    _, (result,) = evaluate(analysis, program, world, inputs, [True])
    return result.primal, result.tangents(directions.size, directions.dtype)
