"""Validation: bad input raises an error where it enters; the message names the argument, the value
and what to do.
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, PyTree

from ..jaxprs.compat import Tracer
from ..jaxprs.once import TracedOnce, once

T = TypeVar("T")
_NUMBERS = bool | int | float | complex | np.ndarray | np.generic | jax.Array

# `Checked[T]` annotates an argument that the function itself checks. Readers and static checkers
# see a `T`. When the tests check annotations at run time, it accepts anything, so that the
# function's own error is raised.
if TYPE_CHECKING:
    Checked: TypeAlias = Annotated[T, "checked by the function"]
else:

    class Checked:
        def __class_getitem__(cls, wanted):
            return Any


class NotDifferentiable(TypeError):
    """Raised for a derivative that diffmh cannot compute; it is never returned as zero."""


def concrete(*trees: Any) -> bool:
    """True if the values are known, not traced by `jit`, `grad` or `vmap`."""
    return not any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(trees))


class Condition(eqx.Module):
    """A condition on a parameter: `holds` is True if the given `value` satisfies it; `message`
    names the argument and says what it must be.

    Proposals and kernels declare the ranges of their parameters in `conditions`. A condition that
    is known to fail raises `"{message}, got {value}."`; under `jit` a failing condition makes the
    result NaN.

    >>> import diffmh
    >>> diffmh.extend.Condition(2.0 > 0, 2.0, "`Walk(scale=...)` must be positive").holds
    True
    """

    holds: bool | np.bool_ | Bool[Array | np.ndarray, "..."]
    value: PyTree
    message: str = eqx.field(static=True)


def require(conditions: Iterable[Condition]) -> None:
    """Raise `ValueError` for the first condition that is known to fail."""
    for condition in conditions:
        if concrete(condition.holds) and not np.all(condition.holds):
            raise ValueError(f"{condition.message}, got {condition.value}.")


def numpy_of(array: Any) -> tuple[Any, Any]:
    """The array and the namespace to compute with it: NumPy if its value is known, since it
    compiles nothing.
    """
    return (np.asarray(array), np) if concrete(array) else (array, jnp)


def positive(value: Any, name: str) -> tuple[Condition, ...]:
    """The conditions that every number is positive and finite."""
    array, xp = numpy_of(value)
    above_zero = Condition(xp.all(array > 0), value, f"`{name}` must be positive")
    return (above_zero, *finite(value, name))


def finite(tree: PyTree, name: str) -> tuple[Condition, ...]:
    """The conditions that every number of a pytree is finite."""

    def one(leaf):
        array, xp = numpy_of(leaf)
        return Condition(xp.all(xp.isfinite(array)), leaf, f"`{name}` must be finite")

    return tuple(map(one, jax.tree.leaves(tree)))


def probabilities(value: Any, name: str) -> tuple[Condition, ...]:
    """The conditions that no entry is negative and that rows sum to one, up to rounding."""
    array, xp = numpy_of(value)
    sums = xp.sum(array, axis=-1)
    rows = "rows that sum" if array.ndim > 1 else "entries that sum"
    return (
        Condition(xp.all(array >= 0), value, f"`{name}` must have non-negative entries"),
        Condition(xp.all(xp.abs(sums - 1.0) <= 1e-5), sums, f"`{name}` must have {rows} to one"),
    )


# Counters have 32 bits.
_MOST = 2**31 - 1


def count(value: Any, name: str, least: int = 1) -> int:
    """Return an integer between `least` and 2³¹ − 1."""
    # Checked first: that 1e10 is too large matters more than that it is a float.
    if isinstance(value, float | np.floating) and _MOST < value < math.inf:
        value = int(value)
    if isinstance(value, bool | float | np.floating | np.bool_):
        write = name.replace("...", "int(...)")
        raise TypeError(f"`{name}` must be an integer, got {value!r}: write `{write}`.")
    try:
        number = operator.index(value)
    except TypeError:
        kind = type(value).__name__
        raise TypeError(f"`{name}` must be an integer, got {value!r} of type {kind}.") from None
    if number < least:
        raise ValueError(f"`{name}` must be at least {least}, got {number}.")
    if number > _MOST:
        raise ValueError(
            f"`{name}` must be at most {_MOST:,}, got {number:,}: use more chains, or average"
            " several runs with different keys."
        )
    return number


def number(
    value: Any, name: str, above: float = -math.inf, below: float = math.inf, least: bool = False
) -> float:
    """Return a finite number between `above` and `below`, or `above` itself if `least`."""
    if not concrete(value):
        raise TypeError(f"`{name}` must be a number, got {value}: it cannot be traced by `jit`.")
    found = np.asarray(value) if isinstance(value, np.generic | np.ndarray | jax.Array) else None
    if found is not None and found.shape == () and found.dtype.kind in "iuf":
        value = found.item()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"`{name}` must be a number, got {value!r}.")
    if not (above < value < below or (least and value == above)):
        between = f"between {above:g} and {below:g}"
        wanted = "positive and finite" if (above, below) == (0, math.inf) else between
        raise ValueError(f"`{name}` must be {'0 or ' * least}{wanted}, got {value}.")
    return float(value)


def flag(value: Any, name: str) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"`{name}` must be True or False, got {value!r}.")
    return bool(value)


def choice(value: Any, name: str, among: Iterable[str]) -> str:
    """Return `value` if it is one of the given words."""
    words = tuple(among)
    if not isinstance(value, str) or value not in words:
        listed = ", ".join(map(repr, words[:-1])) + f" or {words[-1]!r}"
        raise ValueError(f"`{name}` must be {listed}, got {value!r}.")
    return value


def text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"`{name}` must be a string, got {value!r}.")
    return value


# Base classes for authors are in `diffmh.extend`.
_TO_DERIVE_FROM = ("Coupling", "Estimator", "Kernel", "Proposal")


def instance(value: Any, kind: type, where: str, name: str) -> Any:
    if not isinstance(value, kind):
        made = " (a class: call it to create an instance)" if isinstance(value, type) else ""
        place = "diffmh.extend" if kind.__name__ in _TO_DERIVE_FROM else "diffmh"
        raise TypeError(
            f"`{where}`: `{name}` must be a `{place}.{kind.__name__}`, got {value!r}{made}."
        )
    return value


def function(value: Any, where: str, name: str, signature: str) -> Any:
    if not callable(value):
        raise TypeError(f"`{where}`: `{name}` must be a function `{signature}`, got {value!r}.")
    return value


def takes(value: Any, where: str, name: str, *arguments: str) -> None:
    """Raise an error if the function `name` has a signature that does not take these arguments."""
    # By its own signature, not that of the function which it wraps: a decorator may add arguments.
    own = value.function if isinstance(value, TracedOnce) else value
    try:
        signature = inspect.signature(own, follow_wrapped=False)
    except (TypeError, ValueError):  # Some callables that are not written in Python have none.
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        data = " `args` are the data at the end of your call." if "args[0]" in arguments else ""
        raise TypeError(
            f"`{where}`: `{name}` is called as `{name}({', '.join(arguments)})`, but the function"
            f" that was passed takes `{signature}`.{data}"
        ) from error


def data_names(args: tuple[Any, ...]) -> list[str]:
    """Names for the data that a call passes on to the user's functions."""
    return [f"args[{i}]" for i in range(len(args))]


def density(value: Any, where: str) -> Any:
    """A log density, whose Python code runs once for each form of its arguments."""
    return once(function(value, where, "log_density", "log_density(theta, x, *args) -> scalar"))


def typed_key(key: Any) -> Any:
    """Return a single typed key, such as `jax.random.key(seed)`."""
    advice = "pass a key made by `jax.random.key(seed)`"
    if key is None:
        raise TypeError(f"`key` is missing: {advice}. There are no hidden keys.")
    if not (hasattr(key, "dtype") and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)):
        came = f"an array of {key.dtype}{list(key.shape)}" if hasattr(key, "dtype") else repr(key)
        raise TypeError(
            f"`key` must be a typed key, got {came}: {advice} (not `jax.random.PRNGKey`)."
        )
    if key.shape != ():
        raise ValueError(
            f"`key` must be one key, got an array of keys of shape {key.shape}: use `jax.vmap` over"
            " keys."
        )
    return key


def real_dtype(dtype: Any, what: str) -> None:
    """Raise an error unless the dtype is float32 or float64."""
    if dtype in (jnp.float32, jnp.float64):
        return
    advice = "it must be float32 or float64; convert it with `float(...)` or `.astype(float)`"
    if jnp.issubdtype(dtype, jnp.floating):
        advice = "half precision is too coarse for a chain; use float32 or float64"
    elif jnp.issubdtype(dtype, jnp.complexfloating):
        advice = "it must be real; take `jnp.real(...)`"
    raise TypeError(f"{what} is {dtype}: {advice}.")


def array_of(value: Any, what: str) -> Array:
    """Return a number, an array or lists of numbers as an array."""
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError, OverflowError):
        raise TypeError(f"{what} must be a number or an array, got {value!r}.") from None


def real_array(value: Any, name: str, shape: tuple[int, ...] | None = None) -> Array:
    """Return a number, an array or lists of numbers as an array of float32 or float64, of the given
    shape if there is one; integers become floats.
    """
    array = array_of(value, f"`{name}`")
    if jnp.issubdtype(array.dtype, jnp.integer):
        array = array.astype(float)
    real_dtype(array.dtype, f"`{name}`")
    if not array.size:
        raise ValueError(f"`{name}` must not be empty, got shape {array.shape}.")
    if shape is not None and array.shape != shape:
        wanted = "one number" if shape == () else f"of shape {shape}"
        raise ValueError(f"`{name}` must be {wanted}, got shape {array.shape}.")
    return array


def real_arrays(tree: Any, name: str) -> Any:
    """Return a pytree of numbers or arrays as arrays: `real_array` of each."""
    if not jax.tree.leaves(tree):
        raise TypeError(f"`{name}` must be a number, an array or a pytree of them, got {tree!r}.")

    def checked(path, leaf):
        return real_array(leaf, name + jax.tree_util.keystr(path))

    return jax.tree_util.tree_map_with_path(checked, tree)


def theta(tree: Any, name: str = "theta") -> Any:
    """Return a pytree of float32 or float64 arrays, finite if their values are known."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    if not any(0 not in getattr(leaf, "shape", ()) for _, leaf in leaves):
        raise TypeError(
            f"`{name}` has no parameters, got {tree!r}: pass a number, an array or a pytree of"
            " arrays."
        )
    for path, leaf in leaves:
        where = f"`{name}{jax.tree_util.keystr(path)}`"
        if not isinstance(leaf, float | int | np.ndarray | np.generic | jax.Array):
            raise TypeError(
                f"{where} is {leaf!r}, not an array: keep only arrays in theta"
                " (`equinox.partition(model, equinox.is_array)`) and close over the rest."
            )
        array = leaf if isinstance(leaf, jax.Array) else array_of(leaf, where)
        real_dtype(array.dtype, where)
        # Under `jit` the value is unknown; then the result is NaN.
        if concrete(leaf) and not np.all(np.isfinite(np.asarray(leaf))):
            raise ValueError(f"{where} is not finite, got {leaf}: the density is undefined there.")
    return tree


def state(tree: Any, what: str) -> Any:
    """Return a pytree of boolean, integer, float32 or float64 arrays."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    if not leaves:
        raise TypeError(f"{what} has no arrays, got {tree!r}.")
    for path, leaf in leaves:
        where = f"{what}{jax.tree_util.keystr(path)}"
        shaped = isinstance(leaf, jax.ShapeDtypeStruct)
        if not (shaped or isinstance(leaf, _NUMBERS)):
            raise TypeError(f"{where} is {leaf!r}, not an array.")
        if 0 in jnp.shape(leaf):
            raise ValueError(
                f"{where} is empty, of shape {jnp.shape(leaf)}: leave it out of the state."
            )
        dtype = leaf.dtype if shaped else array_of(leaf, where).dtype
        if not (jnp.issubdtype(dtype, jnp.integer) or dtype == jnp.bool_):
            real_dtype(dtype, where)
    return tree


def numbers(tree: Any, what: str) -> Any:
    """Return a pytree of numbers or arrays, such as the result of a user's function."""
    for leaf in jax.tree.leaves(tree):
        if not isinstance(leaf, _NUMBERS):
            raise TypeError(f"{what} must return numbers, got {leaf!r}.")
    return tree


def same_form(tree: Any, expected: Any, what: str) -> None:
    """Raise an error for a pytree of another structure, or with other shapes or dtypes."""

    def form(tree):
        return jax.tree.map(lambda leaf: f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}", tree)

    got, wanted = form(tree), form(expected)
    if jax.tree.structure(tree) != jax.tree.structure(expected) or got != wanted:
        raise TypeError(f"{what} must have the form of the state, {wanted}, got {got}.")
