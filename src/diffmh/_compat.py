"""The only file that touches what JAX may change between versions: jaxprs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.core import Tracer
from jax.extend.core import Literal


def depends_on(function: Callable[..., Any], argument: Any, *others: Any) -> bool:
    """Whether the computation of `function(argument, *others)` uses `argument` on the way to its result, shapes aside.

    Arguments may be pytrees of `jax.ShapeDtypeStruct`. Calls within the computation are taken whole, so the answer errs on the
    side of yes.
    """
    jaxpr = jax.make_jaxpr(function)(argument, *others).jaxpr
    reached = set(jaxpr.invars[: len(jax.tree.leaves(argument))])
    is_reached = lambda variable: not isinstance(variable, Literal) and variable in reached
    for equation in jaxpr.eqns:
        if any(is_reached(variable) for variable in equation.invars):
            reached.update(equation.outvars)
    return any(is_reached(variable) for variable in jaxpr.outvars)


def closes_over_tracers(function: Callable[..., Any], *arguments: Any) -> bool:
    """Whether `function` uses values, other than its arguments, that an outer `jit`, `grad` or `vmap` is tracing."""
    consts = jax.make_jaxpr(function)(*arguments).consts
    return any(isinstance(const, Tracer) for const in consts)
