"""Functions that XLA compiles separately from their callers.

XLA copies cheap operations into every use of their results. In a long program without loops, where
each draw uses the results of earlier draws, the copies add up, and the compile time grows with the
square of the number of draws or worse. Calls that are not inlined prevent that. Each costs a
fraction of a microsecond at run time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.xla_metadata import set_xla_metadata


def jit_apart(function: Callable[..., Any], static_argnums: Any = None) -> Callable[..., Any]:
    """`jax.jit(function)`; called with `apart=True`, it is not inlined by XLA."""

    def within(*arguments):
        # Inner calls are inlined into this one.
        with set_xla_metadata(inlineable=None):
            return function(*arguments)

    inlined = jax.jit(function, static_argnums=static_argnums)
    separate = jax.jit(within, static_argnums=static_argnums)

    def call(*arguments: Any, apart: bool) -> Any:
        if not apart:
            return inlined(*arguments)
        # The metadata must be around the call, not inside: it belongs to the call instruction.
        with set_xla_metadata(inlineable="false"):
            return separate(*arguments)

    return call
