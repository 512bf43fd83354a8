"""Trace a user's function once for each form of its arguments, however often it is used."""

from __future__ import annotations

import contextlib
import functools
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax

# Keyed by the function's identity, while its wrapper, which holds the function, is alive.
_known: weakref.WeakValueDictionary[int, TracedOnce] = weakref.WeakValueDictionary()
# Inside `with_lines`, functions are traced again.
_traced_anew = [False]


class TracedOnce:
    """A function whose equations are cached: a call with arguments of a known form replays them
    instead of running the Python code again. Results and derivatives are the same.

    A function that closes over traced values is a new object for each trace, so the cache never
    outlives them; `jax.jit` relies on the same.
    """

    def __init__(self, function: Callable[..., Any]):
        functools.update_wrapper(self, function)
        self.function = function
        self._compiled = jax.jit(function, inline=True)

    def __call__(self, *given: Any) -> Any:
        if _traced_anew[0] or not all(map(eqx.is_array, jax.tree.leaves(given))):
            return self.function(*given)
        try:
            return self._compiled(*given)
        except TypeError:
            # `jit` rejects results that are not arrays; our caller raises its own error for that.
            return self.function(*given)

    def __repr__(self) -> str:
        return repr(self.function)


def once(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, traced once; the same wrapper for the same function. Only plain functions are
    wrapped: a module is a pytree whose arrays must stay visible.
    """
    if not isinstance(function, types.FunctionType):
        return function
    found = _known.get(id(function))
    if found is None:
        found = _known[id(function)] = TracedOnce(function)
    return found


@contextlib.contextmanager
def with_lines() -> Iterator[None]:
    """Trace functions again, so that their equations know their source lines."""
    before, _traced_anew[0] = _traced_anew[0], True
    try:
        yield
    finally:
        _traced_anew[0] = before
