"""Functions of JAX that are continuous though they contain steps, such as the search of `interp`.

They are recognised by what they compute, in the running version of JAX; a name alone proves
nothing. A call must have the jaxpr that the function itself has for operands of these shapes. For
functions that are not calls, a program must contain their equations consecutively, with the same
operations, constants and data flow.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import jax.scipy.linalg
import jax.scipy.special
import numpy as np

# Not calls: the number and kinds of their operands.
LOOSE: tuple[tuple[Callable[..., Any], int], ...] = (
    (jax.scipy.special.betaln, 2),
    (jax.scipy.special.ndtri, 1),
)
# By the name of the call: functions of the same operands whose jaxprs contain it.
_REFERENCES: dict[str, tuple[Callable[..., Any], ...]] = {
    "_interp": (jnp.interp,),
    "expm": (
        jax.scipy.linalg.expm,
        functools.partial(jax.scipy.linalg.expm, upper_triangular=True),
    ),
    "sinc": (jnp.sinc,),
}


def references(name: Any, constants: Sequence[Any]) -> tuple[Callable[..., Any], ...]:
    """The functions that a call of this name may be. `constants` are its operands where known,
    otherwise `None`.
    """
    # Continuity of an interpolation requires distinct knots, which the equations do not show.
    if name == "_interp" and _has_double_knots(constants[1]):
        return ()
    return _REFERENCES.get(name, ()) if isinstance(name, str) else ()


def _has_double_knots(knots: Any) -> bool:
    """True if two knots are equal, which allows a jump. Unknown knots are assumed distinct."""
    return knots is not None and not np.all(np.diff(np.asarray(knots, float)) > 0)
