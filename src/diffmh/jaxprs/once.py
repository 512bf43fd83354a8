"""A user's function traced once for each form of its arguments, however often it is used."""

from __future__ import annotations

import contextlib
import functools
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax

# By the function's identity, for as long as anybody holds the wrapper, which holds the function.
_known: weakref.WeakValueDictionary[int, TracedOnce] = weakref.WeakValueDictionary()
# Inside `with_lines`, functions are traced anew.
_traced_anew = [False]


class TracedOnce:
    """A function whose equations are kept: a call with arguments of a form that was seen before
    repeats them instead of running its Python again. It computes and differentiates the same.

    A function that closes over traced values is a new object each time that they are traced, so
    what is kept never outlives them; `jax.jit` relies on the same.
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
            # `jit` refuses results that are not arrays; whoever called says so in our words.
            return self.function(*given)

    def __repr__(self) -> str:
        return repr(self.function)


def once(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, traced once; the same object for the same function. Only plain functions are
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
    """Traces functions anew, so that their equations know the lines that they come from."""
    before, _traced_anew[0] = _traced_anew[0], True
    try:
        yield
    finally:
        _traced_anew[0] = before
