"""run: value and gradient of a program's expectation with their errors over independent
replicates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Key, PyTree

from .. import _trees, _validate
from .._lowering.chains import over_chains
from ..report import gradient_tree, mean_and_error, with_errors
from .expectation import flattened, value_and_jacobian


class Estimate(eqx.Module):
    """What `sad.run` returns. Print it.

    `value` and `value_error` have the form of the program's result; `gradient` and `gradient_error`
    have at each of its leaves a pytree like `theta`. Errors are standard errors over the
    replicates.
    """

    value: PyTree
    value_error: PyTree
    gradient: PyTree
    gradient_error: PyTree
    num_replicates: int

    def __str__(self) -> str:
        lines = [
            "value    " + with_errors(self.value, self.value_error),
            "gradient " + with_errors(self.gradient, self.gradient_error),
        ]
        return "\n".join([*lines, f"{self.num_replicates:,} replicates"])


def run(
    program: Callable[..., PyTree],
    theta: PyTree,
    key: Key[Array, ""],
    *args: Any,
    num_replicates: int = 1024,
    alternatives: int = 1,
) -> Estimate:
    """Runs `program(theta, key, *args)` with independent keys: the mean of its results and of their
    derivatives, with errors.

    >>> import jax
    >>> from diffmh import sad
    >>> program = lambda rate, key: sad.poisson(key, rate).astype(float) ** 2
    >>> estimate = sad.run(program, 2.0, jax.random.key(0), num_replicates=10_000)
    >>> abs(estimate.gradient - 5.0) < 5 * estimate.gradient_error           # E = λ + λ²
    Array(True, dtype=bool)
    """
    count = _validate.count(num_replicates, "sad.run(num_replicates=...)", least=2)
    num_slots = _validate.count(alternatives, "sad.run(alternatives=...)")
    theta, key = _trees.strong(_validate.theta(theta)), _validate.typed_key(key)
    if not _validate.concrete(theta, key, args):
        raise TypeError(
            "`sad.run` makes a report for people and cannot be traced: use `sad.expectation`"
            " instead."
        )
    flat, unravel = flattened(program, theta, key, args)
    replicate = lambda key: value_and_jacobian(flat, num_slots, theta, key, args)
    values, jacobians = jax.jit(over_chains(replicate))(jax.random.split(key, count))
    unflatten = jax.vmap(unravel, in_axes=-1)
    value, value_error = mean_and_error(values)
    slope, slope_error = mean_and_error(jacobians)
    gradient = lambda flat: gradient_tree(unflatten, theta, flat)
    form = lambda flat: unravel(jnp.asarray(flat))
    return Estimate(form(value), form(value_error), gradient(slope), gradient(slope_error), count)
