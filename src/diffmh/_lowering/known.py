"""Functions of JAX that are continuous though they step inside: `jnp.interp` searches for a piece.

They are recognised by what they compute, in the version of JAX that is running; a name alone proves
nothing. A call must have the jaxpr that the function itself has for operands of these shapes. Of
functions that are not calls, the equations must stand in a program one after the other, with the
same operations, constants and flow of values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
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


def is_continuous(call: Any, jaxpr: Any, constants: Sequence[Any]) -> bool:
    """Whether a call of this name and jaxpr is a continuous function. `constants` are the operands
    that are known, `None` for the others.
    """
    name = call if isinstance(call, str) else ""
    if name not in _REFERENCES or (name == "_interp" and _has_double_knots(constants[1])):
        return False
    return _is_reference(name, str(jaxpr), tuple(_form(v.aval) for v in jaxpr.jaxpr.invars))


def _has_double_knots(knots: Any) -> bool:
    """Two values at one knot are a jump. Knots that are not known are taken to be different."""
    return knots is not None and not np.all(np.diff(np.asarray(knots, float)) > 0)


def _form(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


@functools.lru_cache(maxsize=256)
def _is_reference(name: str, text: str, forms: tuple[jax.ShapeDtypeStruct, ...]) -> bool:
    for function in _REFERENCES[name]:
        try:
            traced = jax.make_jaxpr(function)(*forms)
        except (TypeError, ValueError):
            continue
        if any(str(inner) == text for inner in _calls(traced.jaxpr, name)):
            return True
    return False


def _calls(jaxpr: Any, name: str) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        inner = equation.params.get("jaxpr")
        if inner is not None and hasattr(inner, "jaxpr"):
            if equation.params.get("name") == name:
                yield inner
            yield from _calls(inner.jaxpr, name)
