"""The only file that touches what JAX may change between versions: jaxprs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.extend.core import JaxprEqn as Equation


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


def evaluate(jaxpr: Jaxpr, consts: list, arguments: list, apply: Callable[[Equation, list], list], literal: Callable) -> list:
    """The results of a jaxpr on values of any kind: `apply(equation, operands)` for each equation in turn."""
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *arguments), strict=True))
    read = lambda variable: literal(variable.val) if isinstance(variable, Literal) else values[variable]
    for equation in jaxpr.eqns:
        values.update(zip(equation.outvars, apply(equation, [read(variable) for variable in equation.invars]), strict=True))
    return [read(variable) for variable in jaxpr.outvars]


def bind(equation: Equation, *operands: Any, **changed: Any) -> list:
    """The equation's operation on other operands, with some of its parameters changed."""
    primitive = equation.primitive
    with equation.ctx.manager:
        results = primitive.bind(*operands, **primitive.get_bind_params({**equation.params, **changed}))
    return list(results) if primitive.multiple_results else [results]


def inner_jaxpr(equation: Equation) -> ClosedJaxpr | None:
    """What an equation that merely calls another jaxpr calls, where no derivative is to be taken any more."""
    called = {
        "jit": "jaxpr",
        "pjit": "jaxpr",
        "closed_call": "call_jaxpr",
        "custom_jvp_call": "call_jaxpr",
        "custom_vjp_call": "call_jaxpr",
    }
    name = equation.primitive.name
    return equation.params[called[name]] if name in called else None


def shape_of(variable: Any) -> tuple[int, ...]:
    """The shape of a variable of a jaxpr."""
    return variable.aval.shape
