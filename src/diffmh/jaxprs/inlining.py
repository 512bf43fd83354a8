"""Inlining: turn a jaxpr into a `Program`, with its calls replaced by their bodies."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import equinox
import jax
import jax.extend.core
from jax.core import Tracer
from jax.extend.core import Literal

from . import known
from .primitives import IMPLEMENTATIONS
from .program import Cond, Constant, Control, Equation, Program, Scan, Variable, While

# Each of these tables is a way to read a program; tables are compared by identity. A table maps the
# primitives that are calls to the parameter that holds their jaxpr. For differentiation:
_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "remat2": "jaxpr",
}
# Operations that newer versions of JAX keep as one primitive but that are defined by others: a
# binary search, a product of many factors. Those with a custom derivative are not included.
_WHOLE = "call_hi_primitive"
_DEFINED_BY_OTHERS = {
    *("CheckpointName", "Einsum", "Frexp", "Ldexp", "Nonzero", "RematTraced", "Scan3"),
    "SearchSorted",
}
# Calls of this name are declared continuous by the user (`diffmh.continuous`).
VOUCHED = "diffmh_continuous"
# The identity of its first operands; it only matters to `jax.vmap` (`batch_first`).
BATCH_FIRST = "diffmh_batch_first"
# The same, including equations that print or raise.
_ACTING = dict(_CALLS)
# In a program that is only evaluated, functions with custom derivatives are calls too.
_RUN = _CALLS | {"custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"}
# For examining what such a function computes.
_BODIES = dict(_RUN)


def program(
    function: Callable[..., Any],
    *arguments: Any,
    differentiated: bool = True,
    acts: bool = False,
) -> tuple[Program, Any]:
    """The program that computes the leaves of `function(*arguments)` from the leaves of
    `arguments`, and the structure of the result.

    Our own primitives and functions with custom derivatives are inlined unless the program is to be
    differentiated. Equations that print, raise or have other effects are included in a program that
    is to be evaluated; in others only with `acts`.
    """
    # One trace for the program and the structure of its result: the user's function runs once.
    closed, shape = jax.make_jaxpr(function, return_shape=True)(*arguments)
    return _program(closed, (_ACTING if acts else _CALLS) if differentiated else _RUN), shape


def body(equation: Equation) -> Program | None:
    """The program of a function with a custom derivative; `None` for other equations."""
    if equation.primitive not in ("custom_jvp_call", "custom_vjp_call"):
        return None
    return _program(equation.params["call_jaxpr"], _BODIES, equation.where)


def _program(closed: Any, calls: dict[str, str], called_at: str = "") -> Program:
    """A jaxpr as a program with fresh variables. Unused equations are removed, except those of a
    program to be evaluated that print, raise or have other effects.
    """
    inputs = tuple(_fresh(variable) for variable in closed.jaxpr.invars)
    equations: list[tuple[Equation, bool]] = []
    outputs = _inline(closed, calls, inputs, equations, called_at)
    if calls is _CALLS or calls is _BODIES:
        known.vouch_for_known(equations, _patterns())
    # Backward, so that all uses of an equation are known before the equation itself. A step whose
    # result is unused must not count as a step of the function.
    needed = {atom for atom in outputs if isinstance(atom, Variable)}
    kept = []
    for equation, acts in reversed(equations):
        if needed.intersection(equation.outputs) or (acts and calls is not _CALLS):
            kept.append(equation)
            needed.update(atom for atom in equation.inputs if isinstance(atom, Variable))
    return Program(inputs, tuple(reversed(kept)), outputs)


def _inline(
    closed: Any,
    calls: dict[str, str],
    operands: tuple[Any, ...],
    equations: list[tuple[Equation, bool]],
    called_at: str,
) -> tuple[Any, ...]:
    """Append the equations of a jaxpr applied to `operands`, each with True if it has effects, and
    return its outputs.
    """
    jaxpr = getattr(closed, "jaxpr", closed)
    names: dict[Any, Any] = dict(zip(jaxpr.invars, operands, strict=True))
    names.update(zip(jaxpr.constvars, map(Constant, getattr(closed, "consts", ())), strict=True))

    def look_up(atom):
        return Constant(atom.val) if isinstance(atom, Literal) else names[atom]

    for equation in jaxpr.eqns:
        name, inputs = equation.primitive.name, tuple(map(look_up, equation.invars))
        if name in calls:
            begin, where = len(equations), _where(equation) or called_at
            outputs = _inline(equation.params[calls[name]], calls, inputs, equations, where)
            if _is_continuous(equation, inputs):
                equations[begin:] = [
                    (dataclasses.replace(one, vouched=True), acts)
                    for one, acts in equations[begin:]
                ]
        # Only `jax.vmap` distinguishes this from the identity of the first operands.
        elif name == BATCH_FIRST:
            outputs = inputs[: len(equation.outvars)]
        elif (function := _definition(equation, calls)) is not None:
            structs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in equation.invars]
            inner, where = jax.make_jaxpr(function)(*structs), _where(equation) or called_at
            outputs = _inline(inner, calls, inputs, equations, where)
        else:
            outputs = tuple(_fresh(variable) for variable in equation.outvars)
            control = _control(equation, calls, called_at)
            where, bind = _where(equation) or called_at, functools.partial(_bind, equation)
            taken = Equation(name, inputs, outputs, equation.params, control, where, bind)
            equations.append((taken, bool(equation.effects)))
        names.update(zip(equation.outvars, outputs, strict=True))
    return tuple(map(look_up, jaxpr.outvars))


@functools.cache
def _patterns() -> tuple[known.Pattern, ...]:
    """The patterns of functions that are known to be continuous but are not calls."""
    found = []
    kinds = (dict(_CALLS), dict(_BODIES))  # Tables without patterns of their own.
    forms = itertools.product(known.LOOSE, ("float32", "float64"), ((), (2,)), kinds)
    for (function, count), dtype, shape, calls in forms:
        with jax.enable_x64(dtype == "float64"):
            closed = jax.make_jaxpr(function)(*[jax.ShapeDtypeStruct(shape, dtype)] * count)
        equations: list[tuple[Equation, bool]] = []
        inputs = tuple(_fresh(variable) for variable in closed.jaxpr.invars)
        _inline(closed, calls, inputs, equations, "")
        # An equation that hides its computation would match any other.
        if not any("custom" in equation.primitive for equation, _ in equations):
            found.append(known.pattern_of([equation for equation, _ in equations]))
    return tuple(dict.fromkeys(found))


def _is_continuous(call: Any, operands: Sequence[Any]) -> bool:
    """True if a call is declared continuous, or is a function of JAX known to be continuous."""
    name = call.params.get("name")
    constants = [
        atom.value if isinstance(atom, Constant) and not isinstance(atom.value, Tracer) else None
        for atom in operands
    ]
    if name == VOUCHED:
        return True
    # A name proves nothing: the jaxpr must equal that of the function itself for these operands.
    functions = known.references(name, constants)
    if not functions:
        return False
    forms = tuple(
        jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=v.aval.weak_type)
        for v in call.invars
    )
    text = str(call.params["jaxpr"])
    return any(_calls_like(function, name, forms, text) for function in functions)


@functools.lru_cache(maxsize=256)
def _calls_like(function: Callable[..., Any], name: str, forms: tuple[Any, ...], text: str) -> bool:
    """True if `function`, with operands of these shapes, calls something of this name and jaxpr."""
    try:
        traced = jax.make_jaxpr(function)(*forms)
    except (TypeError, ValueError):
        return False
    return any(
        one.params.get("name") == name and str(one.params.get("jaxpr")) == text
        for one in _equations(traced)
    )


def _bind(equation: Any, *operands: Any, **changed: Any) -> tuple[Any, ...]:
    primitive = equation.primitive
    with equation.ctx.manager:
        outputs = primitive.bind(
            *operands, **primitive.get_bind_params({**equation.params, **changed})
        )
    return tuple(outputs) if primitive.multiple_results else (outputs,)


def _definition(equation: Any, calls: dict[str, str]) -> Callable[..., Any] | None:
    """The function that replaces an operation which JAX, or diffmh, keeps as one primitive."""
    name, params = equation.primitive.name, equation.params
    if name == _WHOLE and type(params["_prim"]).__name__ in _DEFINED_BY_OTHERS:
        return functools.partial(equation.primitive.to_lojax, **params)
    if name in IMPLEMENTATIONS and calls is _RUN:
        return functools.partial(IMPLEMENTATIONS[name], **params)
    if name == "while" and params["cond_jaxpr"].out_avals[0].shape:
        return functools.partial(_while_of_lanes, params)
    return None


def _while_of_lanes(params: dict[str, Any], *operands: Any) -> Any:
    """`vmap` of a `while_loop` has a condition for each lane. Replace it by one condition that
    holds until all lanes have stopped, each frozen when it did.
    """
    num_condition, num_body = params["cond_nconsts"], params["body_nconsts"]
    condition, body = (
        jax.extend.core.jaxpr_as_fun(params[name]) for name in ("cond_jaxpr", "body_jaxpr")
    )

    def goes_on(carry):
        return condition(*operands[:num_condition], *carry)[0]

    def any_goes_on(carry):
        return jax.numpy.any(goes_on(carry))

    def step(carry):
        runs = goes_on(carry)
        after = body(*operands[num_condition : num_condition + num_body], *carry)

        # A lane that has stopped keeps its values, whatever the body computes for it.
        def chosen(new, old):
            wide = runs.reshape(*runs.shape, *(1,) * (new.ndim - runs.ndim))
            return jax.numpy.where(wide, new, old)

        return [chosen(new, old) for new, old in zip(after, carry, strict=True)]

    return jax.lax.while_loop(any_goes_on, step, list(operands[num_condition + num_body :]))


def _fresh(variable: Any) -> Variable:
    return Variable(tuple(variable.aval.shape), variable.aval.dtype)


def _control(equation: Any, calls: dict[str, str], called_at: str) -> Control | None:
    params = equation.params

    def inner(closed):
        return _program(closed, calls, _where(equation) or called_at)

    match equation.primitive.name:
        case "scan":
            # JAX 0.12 uses a tree of flags instead.
            if "num_carry" in params:
                num_constants, num_carry = params["num_consts"], params["num_carry"]
            else:
                num_constants, num_carry, _ = (len(part) for part in params["ft_in"].unpack())
            return Scan(
                inner(params["jaxpr"]),
                num_constants,
                num_carry,
                params["length"],
                params["reverse"],
            )
        case "while":
            condition, body = inner(params["cond_jaxpr"]), inner(params["body_jaxpr"])
            return While(condition, body, params["cond_nconsts"], params["body_nconsts"])
        case "cond":
            return Cond(tuple(inner(branch) for branch in params["branches"]))
        case _:
            return None


# Code of JAX, equinox and diffmh itself.
_NOT_USER_CODE = (
    str(pathlib.Path(jax.__file__).parent),
    str(pathlib.Path(equinox.__file__).parent),
    str(pathlib.Path(__file__).parent.parent),
)


def _where(equation: Any) -> str:
    """The line of user code that an equation comes from, if known."""
    traceback = equation.source_info.traceback
    for frame in traceback.frames if traceback is not None else ():
        if not frame.file_name.startswith(_NOT_USER_CODE):
            return f"{frame.file_name}:{frame.line_num} ({frame.function_name})"
    return ""


def inner_primitives(equation: Equation) -> set[str]:
    """The names of the primitives inside an equation that is not inlined, such as a `custom_jvp`
    function.
    """
    return {inner.primitive.name for inner in _equations(equation.params)}


def jaxprs_in(tree: Any, seen: set[int] | None = None) -> Iterator[Any]:
    """The jaxprs in a tree and those in the parameters of their equations, each once."""
    seen = set() if seen is None else seen
    for leaf in jax.tree.leaves(tree):
        if hasattr(leaf, "eqns") and id(leaf) not in seen:
            seen.add(id(leaf))
            yield leaf
            for equation in leaf.eqns:
                yield from jaxprs_in(equation.params, seen)


def _equations(tree: Any) -> Iterator[Any]:
    """The equations of all jaxprs in a tree, including inner ones."""
    return (equation for jaxpr in jaxprs_in(tree) for equation in jaxpr.eqns)


def traced(function: Callable[..., Any], *arguments: Any) -> tuple[set[str], Any]:
    """The names of the primitives that `function(*arguments)` uses, and the structure of its
    result.
    """
    closed, form = jax.make_jaxpr(function, return_shape=True)(*arguments)
    return {equation.primitive.name for equation in _equations(closed)}, form
