"""linear: the declaration that a value enters the result linearly."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from ..base import trees, validate
from ..jaxprs import compat

LINEAR = "sad_linear"


def linear(value: PyTree) -> PyTree:
    """Return `value` and declare that it enters the program's result only linearly.

    The analysis finds most linear uses by itself; the marker guarantees it. A nonlinear use raises
    an error that names the line of the marker. Integers and booleans become floats.

    >>> import jax, jax.numpy as jnp
    >>> from diffmh import sad
    >>> mean = sad.expectation(lambda p, key: sad.linear(sad.bernoulli(key, jnp.full(9, p))).mean())
    >>> round(float(jax.grad(mean)(0.3, jax.random.key(0))), 3)
    1.0
    """
    validate.state(value, "`sad.linear(value)`")
    return jax.tree.map(lambda leaf: _linear(as_float(leaf))[0], trees.strong(value))


def as_float(leaf: Array) -> Array:
    """A float as it is; an integer or boolean as a float."""
    return leaf if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf.astype(float)


_linear = compat.new_primitive(
    LINEAR,
    lambda x: [x],
    lambda x: [compat.shaped(x.shape, x.dtype)],
    jvp=lambda primals, tangents: (_linear(*primals), [tangents[0]]),
)
