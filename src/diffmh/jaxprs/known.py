"""Functions of JAX that are continuous though they step inside: `jnp.interp` searches for a piece.

They are recognised by what they compute, in the version of JAX that is running; a name alone proves
nothing. A call must have the jaxpr that the function itself has for operands of these shapes. Of
functions that are not calls, the equations must stand in a program one after the other, with the
same operations, constants and flow of values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import jax.scipy.linalg
import jax.scipy.special
import numpy as np

# Not calls. Of how many operands, and what they are.
LOOSE: tuple[tuple[Callable[..., Any], int], ...] = (
    (jax.scipy.special.betaln, 2),
    (jax.scipy.special.ndtri, 1),
)
# By the name of the call: functions in whose jaxprs it stands, of the call's operands.
_REFERENCES: dict[str, tuple[Callable[..., Any], ...]] = {
    "_interp": (jnp.interp,),
    "expm": (
        jax.scipy.linalg.expm,
        functools.partial(jax.scipy.linalg.expm, upper_triangular=True),
    ),
    "sinc": (jnp.sinc,),
}


def references(name: Any, constants: Sequence[Any]) -> tuple[Callable[..., Any], ...]:
    """The functions that a call of this name may be, given those of its operands that are known,
    `None` for the others.
    """
    # Continuity of an interpolation rests on its knots being different, not on its equations.
    if name == "_interp" and _has_double_knots(constants[1]):
        return ()
    return _REFERENCES.get(name, ()) if isinstance(name, str) else ()


def _has_double_knots(knots: Any) -> bool:
    """Two values at one knot are a jump. Knots that are not known are taken to be different."""
    return knots is not None and not np.all(np.diff(np.asarray(knots, float)) > 0)
