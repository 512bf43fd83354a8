"""continuous: a user vouches for a function that the analysis cannot see through."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax

from ..base.validate import Checked
from ..jaxprs import compat

T = TypeVar("T")

# The functions of a posterior that are differentiated.
_OF_A_POSTERIOR = ("log_density", "log_prior", "log_likelihood", "constrain")


def continuous(function: Checked[T]) -> T:
    """Vouch that `function` is continuous, whatever comparisons it makes inside.

    Use it for a part of a density, of f or of a program of `diffmh.sad` that steps from one formula
    to another where both agree, and that the analysis cannot see through; or for all of it: a
    density, f, a program, or a posterior of `from_numpyro` or `from_pymc`. A function that jumps at
    a place that depends on theta gets a wrong derivative if it is vouched for.

    **Refused**: what is neither a function nor a posterior.

    >>> import jax.numpy as jnp, diffmh
    >>> def distance_to_integer(z):
    ...     return jnp.abs(z - jnp.round(z))
    >>> def log_density(theta, x):
    ...     return jnp.sum(diffmh.continuous(distance_to_integer)(x - theta) - x**2)
    """
    if dataclasses.is_dataclass(function) and hasattr(function, "log_density"):
        parts = {name: _vouched(getattr(function, name)) for name in _OF_A_POSTERIOR}
        return dataclasses.replace(function, **parts)  # pyright: ignore
    if not callable(function):
        raise TypeError(
            "`continuous(function)`: `function` must be a function or a posterior of"
            f" `from_numpyro` or `from_pymc`, got {function!r}."
        )
    return _vouched(function)  # pyright: ignore


def _vouched(function: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*arguments: Any, **options: Any) -> Any:
        arrays, rest = eqx.partition((arguments, options), eqx.is_array_like)

        def inside(arrays):
            arguments, options = eqx.combine(arrays, rest)
            return function(*arguments, **options)

        # The name of the call is what tells the analysis.
        inside.__name__ = compat.VOUCHED
        return jax.jit(inside)(arrays)

    return wrapped
