"""Functions that are compiled apart from what calls them.

XLA copies cheap operations into whatever uses their results. In a long program without loops, where
each draw uses what the draws before it left, the copies add up, and the time to compile grows with
the square of the draws or worse. Calls that it is told not to inline end that; each takes a
fraction of a microsecond when it is run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.xla_metadata import set_xla_metadata


def jit_apart(function: Callable[..., Any], static_argnums: Any = None) -> Callable[..., Any]:
    """`jax.jit(function)`; called with `apart=True`, it is not inlined by XLA."""

    def within(*arguments):
        # What it calls is inlined into it.
        with set_xla_metadata(inlineable=None):
            return function(*arguments)

    inlined = jax.jit(function, static_argnums=static_argnums)
    separate = jax.jit(within, static_argnums=static_argnums)

    def call(*arguments: Any, apart: bool) -> Any:
        if not apart:
            return inlined(*arguments)
        # Around the call and not inside of it: the mark belongs to the call's own instruction.
        with set_xla_metadata(inlineable="false"):
            return separate(*arguments)

    return call
