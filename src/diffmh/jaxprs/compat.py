"""The entry to everything that JAX may change between versions. Only this folder reads jaxprs.

`inlining` turns jaxprs into programs, `params` reads the operation of an equation, `known`
recognises known functions and `primitives` defines our own primitives. The functions in this file
answer questions about a function by tracing it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core
from jax.core import Tracer as Tracer
from jax.extend.core import Literal

from .inlining import BATCH_FIRST as BATCH_FIRST
from .inlining import VOUCHED as VOUCHED
from .inlining import body as body
from .inlining import inner_primitives as inner_primitives
from .inlining import jaxprs_in
from .inlining import program as program
from .inlining import traced as traced
from .params import contracted as contracted
from .params import counted_axis as counted_axis
from .params import exponent as exponent
from .params import into_floats as into_floats
from .params import joined_axis as joined_axis
from .params import moved_entry as moved_entry
from .params import operation as operation
from .params import parameters_of as parameters_of
from .params import reduced_axes as reduced_axes
from .params import running_axis as running_axis
from .params import sums_over_first as sums_over_first
from .primitives import new_primitive as new_primitive
from .primitives import result_types as result_types
from .primitives import shaped as shaped
from .program import Equation


def depends_on(function: Callable[..., Any], argument: Any, *others: Any) -> bool:
    """True if the result of `function(argument, *others)` depends on `argument`, not counting
    shapes.

    Arguments may be pytrees of `jax.ShapeDtypeStruct`. Inner calls are not examined, so the answer
    may be True without need, but never False by mistake.
    """
    return any(jax.tree.leaves(dependence(function, argument, *others)[0]))


def dependence(function: Callable[..., Any], *arguments: Any) -> tuple[Any, ...]:
    """For each argument, the structure of `function(*arguments)` with True at the leaves that
    depend on it (see `depends_on`).
    """
    closed, form = jax.make_jaxpr(function, return_shape=True)(*forms(arguments))
    jaxpr, begin, found = closed.jaxpr, 0, []
    for argument in arguments:
        end = begin + len(jax.tree.leaves(argument))
        # Equations are in order of evaluation, so one pass is enough.
        reached = set(jaxpr.invars[begin:end])
        for equation in jaxpr.eqns:
            if any(_is_among(atom, reached) for atom in equation.invars):
                reached.update(equation.outvars)
        leaves = [_is_among(atom, reached) for atom in jaxpr.outvars]
        found.append(jax.tree.structure(form).unflatten(leaves))
        begin = end
    return tuple(found)


def _is_among(atom: Any, reached: set[Any]) -> bool:
    return not isinstance(atom, Literal) and atom in reached


def current_trace() -> Any:
    """An object that identifies the current trace, for comparison."""
    return jax.extend.core.get_opaque_trace_state()


def is_traced_with(tree: Any, tracer: Any) -> bool:
    """True if a tree contains values of the same trace as `tracer`."""
    leaves = jax.tree.leaves(tree)
    return any(isinstance(leaf, Tracer) and leaf._trace is tracer._trace for leaf in leaves)


def moved(equation: Equation, moving: Sequence[bool]) -> list[bool]:
    """For each result of an equation, True if it has a symbolic derivative along `moving`."""
    described = [jax.ShapeDtypeStruct(atom.shape, atom.dtype) for atom in equation.inputs]
    points = [kind for kind, moves in zip(described, moving, strict=True) if moves]

    def along(directions, operands, index):
        def of_moving(*moved):
            rest = iter(moved)
            given = [
                next(rest) if moves else operand
                for operand, moves in zip(operands, moving, strict=True)
            ]
            return equation.bind(*given)[index]

        # JAX removes symbolically zero derivatives from the jaxpr. So a result has a derivative
        # iff its tangent depends on the directions.
        at = [operand for operand, moves in zip(operands, moving, strict=True) if moves]
        return jax.jvp(of_moving, at, directions)[1]

    return [
        jax.numpy.issubdtype(output.dtype, jax.numpy.inexact)
        and depends_on(lambda d, o, index=index: along(d, o, index), points, described)
        for index, output in enumerate(equation.outputs)
    ]


def closes_over_tracers(function: Callable[..., Any], *arguments: Any) -> bool:
    """True if `function` uses values other than its arguments that an outer `jit`, `grad` or
    `vmap` is tracing.
    """
    consts = jax.make_jaxpr(function)(*forms(arguments)).consts
    return any(isinstance(const, Tracer) for const in consts)


def constants_and_callbacks(closed: Any) -> tuple[list[Any], list[str]]:
    """All arrays within a jaxpr, in order of appearance, and the primitives that call back into
    Python, whose values the text of the program does not show.
    """
    constants, callbacks = [], []
    for inner in jaxprs_in(closed):
        constants += getattr(inner, "consts", ())
        for equation in inner.eqns:
            constants += [atom.val for atom in equation.invars if isinstance(atom, Literal)]
            if "callback" in equation.primitive.name and equation.outvars:
                callbacks.append(equation.primitive.name)
    return constants, callbacks


def largest_array(function: Callable[..., Any], *arguments: Any) -> int:
    """The bytes of the largest array that a function takes, closes over or computes."""
    closed = jax.make_jaxpr(function)(*arguments)
    arrays = list(closed.consts)
    for inner in jaxprs_in(closed):
        jaxpr = getattr(inner, "jaxpr", inner)
        atoms = [*jaxpr.invars, *jaxpr.constvars]
        atoms += [atom for equation in jaxpr.eqns for atom in equation.outvars]
        arrays += [atom.aval for atom in atoms]
    return max((math.prod(a.shape) * a.dtype.itemsize for a in arrays), default=0)


def forms(tree: Any) -> Any:
    """The shapes and dtypes of a tree's arrays, without the mesh axes they vary over."""
    return jax.tree.map(_form, tree)


def _form(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def backend_has_started() -> bool:
    """True once JAX has a backend: XLA has read its flags then, and reads them no more."""
    # The only public trace of it: the number of devices cannot be changed any more.
    count = jax.config.jax_num_cpu_devices  # pyright: ignore[reportAttributeAccessIssue]
    try:
        jax.config.update("jax_num_cpu_devices", 2 if count == 1 else 1)
    except RuntimeError:
        return True
    jax.config.update("jax_num_cpu_devices", count)
    return False


def inside_shard_map() -> bool:
    """True if the code being traced runs separately on each device."""
    return bool(jax.sharding.get_abstract_mesh().manual_axes)


def varies_over(leaves: Sequence[jax.Array]) -> frozenset[str]:
    """The mesh axes that any of the arrays varies over, if `jax.shard_map` tracks them."""
    return frozenset().union(*map(_varies_over, leaves))


def _varies_over(leaf: jax.Array) -> frozenset[str]:
    kind: Any = jax.typeof(leaf)
    # JAX 0.10 stores them with other information on manual axes; before, they were separate.
    return kind.mat.varying if hasattr(kind, "mat") else getattr(kind, "vma", frozenset())


def vary(value: Any, axes: frozenset[str]) -> jax.Array:
    """The same value, declared to vary over `axes`."""
    value = jax.numpy.asarray(value)
    missing = tuple(sorted(axes - _varies_over(value)))
    return jax.lax.pcast(value, missing, to="varying") if missing else value
