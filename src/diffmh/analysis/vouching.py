"""continuous: a user declares that a function is continuous where the analysis cannot prove it."""

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
_OF_A_POSTERIOR = ("log_density", "log_prior", "log_likelihood", "constrain", "log_likelihoods")


def continuous(function: Checked[T]) -> T:
    """Declare that `function` is continuous, whatever comparisons it makes inside.

    Use it for a part of a density, of f or of a program of `diffmh.sad` that switches between
    formulas where they agree, if the analysis cannot prove it. It also applies to a complete
    density, f or program, or to a posterior of `from_numpyro` or `from_pymc`. If the function does
    jump at a place that depends on theta, the derivative will be wrong.

    **Refused**: anything that is neither a function nor a posterior.

    >>> import jax.numpy as jnp, diffmh
    >>> def distance_to_integer(z):
    ...     return jnp.abs(z - jnp.round(z))
    >>> def log_density(theta, x):
    ...     return jnp.sum(diffmh.continuous(distance_to_integer)(x - theta) - x**2)
    """
    if dataclasses.is_dataclass(function) and hasattr(function, "log_density"):
        own = {name: getattr(function, name, None) for name in _OF_A_POSTERIOR}
        parts = {name: _vouched(part) for name, part in own.items() if part is not None}
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

        # The analysis recognises the call by this name.
        inside.__name__ = compat.VOUCHED
        return jax.jit(inside)(arrays)

    wrapped.vouched_for = function  # pyright: ignore[reportFunctionMemberAccess]
    return wrapped
