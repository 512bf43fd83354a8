"""The only file that touches what JAX may change between versions: jaxprs and their parameters."""

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
import numpy
from jax.core import ShapedArray, Tracer
from jax.extend.core import Literal, Primitive
from jax.interpreters import ad, batching, mlir

from . import known, operations
from .program import Cond, Constant, Equation, Program, Scan, Variable, While


def depends_on(function: Callable[..., Any], argument: Any, *others: Any) -> bool:
    """Whether the computation of `function(argument, *others)` uses `argument` on the way to its
    result, shapes aside.

    Arguments may be pytrees of `jax.ShapeDtypeStruct`. Calls within the computation are taken
    whole, so the answer errs on the side of yes.
    """
    return any(jax.tree.leaves(dependence(function, argument, *others)[0]))


def dependence(function: Callable[..., Any], *arguments: Any) -> tuple[Any, ...]:
    """For each argument the tree of `function(*arguments)`, with true at the leaves on the way to
    which the argument is used: `depends_on`.
    """
    closed, form = jax.make_jaxpr(function, return_shape=True)(*forms(arguments))
    jaxpr, begin, found = closed.jaxpr, 0, []
    for argument in arguments:
        end = begin + len(jax.tree.leaves(argument))
        reached = set(jaxpr.invars[begin:end])
        is_reached = lambda atom: not isinstance(atom, Literal) and atom in reached
        for equation in jaxpr.eqns:
            if any(map(is_reached, equation.invars)):
                reached.update(equation.outvars)
        found.append(jax.tree.structure(form).unflatten(map(is_reached, jaxpr.outvars)))
        begin = end
    return tuple(found)


def current_trace() -> Any:
    """What stands for the transformation or loop that is being traced, to be compared."""
    return jax.extend.core.get_opaque_trace_state()


def is_traced_with(tree: Any, tracer: Any) -> bool:
    """Whether a tree has values of the same trace as `tracer`."""
    same = lambda leaf: isinstance(leaf, Tracer) and leaf._trace is tracer._trace
    return any(map(same, jax.tree.leaves(tree)))


def moved(equation: Equation, moving: Sequence[bool]) -> list[bool]:
    """Which results of an equation have a derivative, symbolically, by the operands that move."""
    described = [
        jax.ShapeDtypeStruct(jax.numpy.shape(atom.value), jax.numpy.result_type(atom.value))
        if isinstance(atom, Constant)
        else jax.ShapeDtypeStruct(atom.shape, atom.dtype)
        for atom in equation.inputs
    ]
    points = [kind for kind, moves in zip(described, moving, strict=True) if moves]

    def along(directions, operands, index):
        def of_moving(*moved):
            rest = iter(moved)
            given = [
                next(rest) if moves else operand
                for operand, moves in zip(operands, moving, strict=True)
            ]
            return equation.bind(*given)[index]

        at = [operand for operand, moves in zip(operands, moving, strict=True) if moves]
        return jax.jvp(of_moving, at, directions)[1]

    return [
        jax.numpy.issubdtype(output.dtype, jax.numpy.inexact)
        and depends_on(lambda d, o, index=index: along(d, o, index), points, described)
        for index, output in enumerate(equation.outputs)
    ]


def closes_over_tracers(function: Callable[..., Any], *arguments: Any) -> bool:
    """Whether `function` uses values, other than its arguments, that an outer `jit`, `grad` or
    `vmap` is tracing.
    """
    consts = jax.make_jaxpr(function)(*forms(arguments)).consts
    return any(isinstance(const, Tracer) for const in consts)


def constants_and_callbacks(closed: Any) -> tuple[list[Any], list[str]]:
    """All arrays within a jaxpr, in the order in which they appear; and the primitives that ask
    Python for values, which no text of the program shows.
    """
    constants, callbacks = [], []
    for inner in _with_inner(closed, set()):
        constants += getattr(inner, "consts", ())
        for equation in getattr(inner, "jaxpr", inner).eqns:
            constants += [atom.val for atom in equation.invars if isinstance(atom, Literal)]
            if "callback" in equation.primitive.name and equation.outvars:
                callbacks.append(equation.primitive.name)
    return constants, callbacks


def _with_inner(jaxpr: Any, seen: set[int]) -> Iterator[Any]:
    """A jaxpr and those in the parameters of its equations, each once."""
    if id(jaxpr) in seen:
        return
    seen.add(id(jaxpr))
    yield jaxpr
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        for value in jax.tree.leaves(equation.params):
            if hasattr(getattr(value, "jaxpr", value), "eqns"):
                yield from _with_inner(value, seen)


def forms(tree: Any) -> Any:
    """The shapes and types of a tree's arrays, without the axes of a mesh that they vary over."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if _is_shaped(leaf) else leaf,
        tree,
    )


def _is_shaped(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)


def inside_shard_map() -> bool:
    """Whether what is being traced runs on each device by itself."""
    return bool(jax.sharding.get_abstract_mesh().manual_axes)


def varies_over(leaves: Sequence[jax.Array]) -> frozenset[str]:
    """The axes of the mesh that any of the arrays varies over, as far as `jax.shard_map` checks."""
    return frozenset().union(*map(_varies_over, leaves))


def _varies_over(leaf: jax.Array) -> frozenset[str]:
    kind: Any = jax.typeof(leaf)
    # JAX 0.10 keeps them with what else it knows of manual axes, before it was by themselves.
    return kind.mat.varying if hasattr(kind, "mat") else getattr(kind, "vma", frozenset())


def vary(value: Any, axes: frozenset[str]) -> jax.Array:
    """The same value, said to vary over `axes`."""
    value = jax.numpy.asarray(value)
    missing = tuple(sorted(axes - _varies_over(value)))
    return jax.lax.pcast(value, missing, to="varying") if missing else value


def only_says_that_it_varies(equation: Equation) -> bool:
    """Whether an equation is what `vary` makes."""
    return equation.primitive == "pvary"


_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "remat2": "jaxpr",
}
# Operations that newer JAX keeps whole, and that are defined by others: a binary search, a product
# of many factors. One with a derivative of its own is not among them.
_WHOLE = "call_hi_primitive"
_DEFINED_BY_OTHERS = {
    *("CheckpointName", "Einsum", "Frexp", "Ldexp", "Nonzero", "RematTraced", "Scan3"),
    "SearchSorted",
}
# Calls of this name are vouched for (`diffmh.continuous`).
VOUCHED = "diffmh_continuous"
# The identity, of its first operands: it matters to `jax.vmap` alone (`batch_first`).
BATCH_FIRST = "diffmh_batch_first"
# Primitives of our own, by what they compute.
_OURS: dict[str, Callable[..., list[Any]]] = {}
# In a program that is to be run only, functions with derivatives of their own are calls too.
_ACTING = dict(_CALLS)
_RUN = _CALLS | {"custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"}
# And where it is only asked what such a function computes.
_BODIES = dict(_RUN)


def program(
    function: Callable[..., Any],
    *arguments: Any,
    differentiated: bool = True,
    acts: bool = False,
) -> tuple[Program, Any]:
    """The program that computes the leaves of `function(*arguments)` from the leaves of
    `arguments`, and the result's form.

    Primitives of ours and functions with derivatives of their own are inlined unless the program is
    to be differentiated. What prints, raises or otherwise `acts` is in a program to be run, and
    in others if asked for.
    """
    closed, shape = jax.make_jaxpr(function, return_shape=True)(*arguments)
    return _program(closed, (_ACTING if acts else _CALLS) if differentiated else _RUN), shape


def body(equation: Equation) -> Program | None:
    """What a function with a derivative of its own computes; `None` for other equations."""
    if equation.primitive not in ("custom_jvp_call", "custom_vjp_call"):
        return None
    return _program(equation.params["call_jaxpr"], _BODIES, equation.where)


def _program(closed: Any, calls: dict[str, str], called_at: str = "") -> Program:
    """A jaxpr as a program of fresh variables; equations that nothing needs are left out, but
    not those of a program to be run that print, raise or otherwise act.
    """
    inputs = tuple(_fresh(variable) for variable in closed.jaxpr.invars)
    equations: list[tuple[Equation, bool]] = []
    outputs = _inline(closed, calls, inputs, equations, called_at)
    if calls is _CALLS or calls is _BODIES:
        _vouch_for_known(equations)
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
    """Appends the equations of a jaxpr applied to `operands`, each with whether it has effects;
    returns its outputs.
    """
    jaxpr = getattr(closed, "jaxpr", closed)
    names: dict[Any, Any] = dict(zip(jaxpr.invars, operands, strict=True))
    names.update(zip(jaxpr.constvars, map(Constant, getattr(closed, "consts", ())), strict=True))
    look_up = lambda atom: Constant(atom.val) if isinstance(atom, Literal) else names[atom]
    for equation in jaxpr.eqns:
        name, inputs = equation.primitive.name, tuple(map(look_up, equation.invars))
        if name in calls:
            begin, where = len(equations), _where(equation) or called_at
            outputs = _inline(equation.params[calls[name]], calls, inputs, equations, where)
            if _is_continuous(equation, inputs):
                vouch = lambda one: dataclasses.replace(one, vouched=True)
                equations[begin:] = [(vouch(one), acts) for one, acts in equations[begin:]]
        elif name == BATCH_FIRST:
            outputs = inputs[: len(equation.outvars)]
        elif _is_defined_by_others(equation):
            function = functools.partial(equation.primitive.to_lojax, **equation.params)
            inner = jax.make_jaxpr(function)(*(_struct(v.aval) for v in equation.invars))
            outputs = _inline(inner, calls, inputs, equations, _where(equation) or called_at)
        elif name in _OURS and calls is _RUN:
            function = functools.partial(_OURS[name], **equation.params)
            inner = jax.make_jaxpr(function)(*(_struct(v.aval) for v in equation.invars))
            outputs = _inline(inner, calls, inputs, equations, called_at)
        elif name == "while" and equation.params["cond_jaxpr"].out_avals[0].shape:
            inner = jax.make_jaxpr(functools.partial(_while_of_lanes, equation.params))(
                *(_struct(v.aval) for v in equation.invars)
            )
            where = _where(equation) or called_at
            outputs = _inline(inner, calls, inputs, equations, where)
        else:
            outputs = tuple(_fresh(variable) for variable in equation.outvars)
            control = _control(equation, calls, called_at)
            where, bind = _where(equation) or called_at, functools.partial(_bind, equation)
            taken = Equation(name, inputs, outputs, equation.params, control, where, bind)
            equations.append((taken, bool(equation.effects)))
        names.update(zip(equation.outvars, outputs, strict=True))
    return tuple(map(look_up, jaxpr.outvars))


# An operation, what its operands are, and the same of the programs within it.
_Pattern = tuple[tuple[Any, ...], ...]


@functools.cache
def _patterns() -> tuple[_Pattern, ...]:
    """Of the functions that are known to be continuous and are not calls."""
    found = []
    kinds = (dict(_CALLS), dict(_BODIES))  # Not searched for patterns themselves.
    forms = itertools.product(known.LOOSE, ("float32", "float64"), ((), (2,)), kinds)
    for (function, count), dtype, shape, calls in forms:
        with jax.enable_x64(dtype == "float64"):
            closed = jax.make_jaxpr(function)(*[jax.ShapeDtypeStruct(shape, dtype)] * count)
        equations: list[tuple[Equation, bool]] = []
        inputs = tuple(_fresh(variable) for variable in closed.jaxpr.invars)
        _inline(closed, calls, inputs, equations, "")
        # An equation that hides what it computes would match any other.
        if not any("custom" in equation.primitive for equation, _ in equations):
            found.append(_pattern([equation for equation, _ in equations]))
    return tuple(dict.fromkeys(found))


def _pattern(equations: Sequence[Equation]) -> _Pattern:
    """Values are named by where they come from: an operation before, a constant, or outside."""
    names: dict[Any, Any] = {}
    rows = []
    for number, equation in enumerate(equations):
        operands = tuple(_named(atom, names) for atom in equation.inputs)
        inner = tuple(_pattern(program.equations) for program in equation.inner)
        power = exponent(equation) if equation.primitive == "integer_pow" else None
        rows.append((equation.primitive, operands, power, inner))
        names.update({output: (number, i) for i, output in enumerate(equation.outputs)})
    return tuple(rows)


def _named(atom: Any, names: dict[Any, Any]) -> Any:
    if isinstance(atom, Constant) and not isinstance(atom.value, Tracer):
        # A number may stand in a jaxpr in single or in double precision.
        return "constant", tuple(numpy.unique(numpy.asarray(atom.value).astype("float32")))
    outside = sum(name[0] == "outside" for name in names.values())
    return names.setdefault(atom, ("outside", outside))


def _vouch_for_known(equations: list[tuple[Equation, bool]]) -> None:
    plain = [equation for equation, _ in equations]
    for pattern in _patterns():
        primitives = [row[0] for row in pattern]
        for begin in range(len(plain) - len(pattern) + 1):
            run = plain[begin : begin + len(pattern)]
            if [one.primitive for one in run] == primitives and _matches(run, pattern):
                for number in range(begin, begin + len(pattern)):
                    one, acts = equations[number]
                    equations[number] = dataclasses.replace(one, vouched=True), acts


def _matches(equations: Sequence[Equation], pattern: _Pattern) -> bool:
    """Whether equations do what the pattern says, with anything for what comes from outside."""
    names: dict[Any, Any] = {}
    outside: dict[Any, Any] = {}
    for number, (equation, row) in enumerate(zip(equations, pattern, strict=True)):
        _, operands, power, inner = row
        if len(operands) != len(equation.inputs):
            return False
        for atom, wanted in zip(equation.inputs, operands, strict=True):
            if wanted[0] == "outside":
                same = atom if isinstance(atom, Variable) else _named(atom, {})
                if atom in names or outside.setdefault(wanted, same) != same:
                    return False
            elif (names.get(atom) if isinstance(atom, Variable) else _named(atom, {})) != wanted:
                return False
        if power is not None and exponent(equation) != power:
            return False
        if len(inner) != len(equation.inner) or not all(
            len(pattern) == len(program.equations) and _matches(program.equations, pattern)
            for program, pattern in zip(equation.inner, inner, strict=True)
        ):
            return False
        names.update({output: (number, i) for i, output in enumerate(equation.outputs)})
    return True


def _is_continuous(call: Any, operands: Sequence[Any]) -> bool:
    """Whether a call is vouched for, or one of JAX's functions that are known to be continuous."""
    name = call.params.get("name")
    constants = [
        atom.value if isinstance(atom, Constant) and not isinstance(atom.value, Tracer) else None
        for atom in operands
    ]
    if name == VOUCHED:
        return True
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
    """Whether `function`, of operands of these forms, calls something of this name and jaxpr."""
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


def _is_defined_by_others(equation: Any) -> bool:
    """Whether an operation that JAX keeps whole can be replaced by what it is defined by."""
    if equation.primitive.name != _WHOLE:
        return False
    return type(equation.params["_prim"]).__name__ in _DEFINED_BY_OTHERS


def _while_of_lanes(params: dict[str, Any], *operands: Any) -> Any:
    """`vmap` of a `while_loop` has a condition per lane; here one condition, until all lanes have
    stopped, each as it was when it did.
    """
    num_condition, num_body = params["cond_nconsts"], params["body_nconsts"]
    condition, body = (
        jax.extend.core.jaxpr_as_fun(params[name]) for name in ("cond_jaxpr", "body_jaxpr")
    )
    goes_on = lambda carry: condition(*operands[:num_condition], *carry)[0]

    def step(carry):
        runs = goes_on(carry)
        after = body(*operands[num_condition : num_condition + num_body], *carry)
        wide = lambda leaf: runs.reshape(*runs.shape, *(1,) * (leaf.ndim - runs.ndim))
        return [jax.numpy.where(wide(new), new, old) for new, old in zip(after, carry, strict=True)]

    return jax.lax.while_loop(
        lambda carry: jax.numpy.any(goes_on(carry)),
        step,
        list(operands[num_condition + num_body :]),
    )


def _struct(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _fresh(variable: Any) -> Variable:
    return Variable(tuple(variable.aval.shape), variable.aval.dtype)


def _control(equation: Any, calls: dict[str, str], called_at: str) -> Scan | While | Cond | None:
    params = equation.params
    inner = lambda closed: _program(closed, calls, _where(equation) or called_at)
    match equation.primitive.name:
        case "scan":
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


def _of_python(value: Any) -> Any:
    """Tuples of whole numbers, which JAX may give as NumPy's."""
    if type(value) is tuple:
        return tuple(map(_of_python, value))
    return value.item() if isinstance(value, numpy.integer) else value


def operation(equation: Equation) -> operations.Operation | None:
    """What an equation does, if it is one of those that `chains` rewrites and in a form that it
    knows: shapes that are not operands, words of 32 bits.
    """
    params = {name: _of_python(value) for name, value in equation.params.items()}
    num_operands = len(equation.inputs)
    match equation.primitive:
        case "broadcast_in_dim" if num_operands == 1:
            return operations.Broadcast(params["shape"], params["broadcast_dimensions"])
        case "reshape" if num_operands == 1 and params["dimensions"] is None:
            return operations.Reshape(params["new_sizes"])
        case "slice":
            starts, strides = params["start_indices"], params["strides"]
            strides = (1,) * len(starts) if strides is None else strides
            return operations.Slice(starts, params["limit_indices"], strides)
        case "pad":
            return operations.Pad(tuple(params["padding_config"]))
        case "transpose":
            return operations.Transpose(params["permutation"])
        case "reduce_and" | "reduce_or" as name if equation.outputs[0].dtype == bool:
            return operations.Logical(tuple(params["axes"]), name == "reduce_and")
        case "dynamic_slice" if num_operands == 1 + len(params["slice_sizes"]):
            return operations.DynamicSlice(params["slice_sizes"])
        case "dynamic_update_slice":
            return operations.DynamicUpdate()
        case "random_split":
            return operations.SplitKeys(tuple(params["shape"]))
        case "random_bits" if params["bit_width"] == 32:
            return operations.DrawWords(tuple(params["shape"]))
        case "random_fold_in":
            return operations.FoldIn()
        case _:
            return None


def inner_primitives(equation: Equation) -> set[str]:
    """The names of the primitives inside an equation that is taken whole, such as a `custom_jvp`
    function.
    """
    return {inner.primitive.name for inner in _equations(tuple(equation.params.values()))}


def _equations(parameter: Any) -> Iterator[Any]:
    """Of all jaxprs that a parameter holds, and of those within them."""
    if isinstance(parameter, tuple | list):
        for part in parameter:
            yield from _equations(part)
    for inner in getattr(parameter, "eqns", ()):
        yield inner
        yield from _equations(tuple(inner.params.values()))


def traced(function: Callable[..., Any], *arguments: Any) -> tuple[set[str], Any]:
    """The names of the primitives that `function(*arguments)` comes down to, and its result's
    form.
    """
    closed, form = jax.make_jaxpr(function, return_shape=True)(*arguments)
    return {equation.primitive.name for equation in _equations(closed)}, form


# JAX, equinox, and diffmh itself.
_NOT_USER_CODE = (
    str(pathlib.Path(jax.__file__).parent),
    str(pathlib.Path(equinox.__file__).parent),
    str(pathlib.Path(__file__).parent.parent),
)


def _where(equation: Any) -> str:
    """The line of user code that an equation comes from, as far as is known."""
    traceback = equation.source_info.traceback
    for frame in traceback.frames if traceback is not None else ():
        if not frame.file_name.startswith(_NOT_USER_CODE):
            return f"{frame.file_name}:{frame.line_num} ({frame.function_name})"
    return ""


def new_primitive(
    name: str,
    implementation: Callable[..., list[Any]],
    abstract: Callable[..., list[Any]],
    batched: Callable[..., dict[str, Any]] = lambda **params: params,
    jvp: Callable[..., Any] | None = None,
) -> Callable[..., list[Any]]:
    """A primitive with several results: how it is computed, and what shapes come out. Returns its
    `bind`.

    A batch becomes the leading axis of every operand and of every result; `batched` are the
    parameters that say so. `jvp(primals, tangents, **params)` is JAX's own rule, or refuses.
    """
    primitive = Primitive(name)
    primitive.multiple_results = True
    _OURS[name] = implementation
    primitive.def_impl(
        lambda *operands, **params: jax.jit(lambda *xs: implementation(*xs, **params))(*operands)
    )
    primitive.def_abstract_eval(abstract)
    mlir.register_lowering(primitive, mlir.lower_fun(implementation, multiple_results=True))

    def batch(operands, axes, **params):
        size = next(
            operand.shape[axis]
            for operand, axis in zip(operands, axes, strict=True)
            if axis is not None
        )
        repeat = lambda operand: jax.numpy.broadcast_to(operand, (size, *jax.numpy.shape(operand)))

        def lead(operand, axis):
            return repeat(operand) if axis is None else jax.numpy.moveaxis(operand, axis, 0)

        outputs = primitive.bind(*map(lead, operands, axes), **batched(**params))
        return outputs, [0] * len(outputs)

    batching.primitive_batchers[primitive] = batch
    if jvp is not None:
        ad.primitive_jvps[primitive] = jvp
    return primitive.bind


def shaped(shape: tuple[int, ...], dtype: Any) -> ShapedArray:
    """The abstract value of an array."""
    return ShapedArray(shape, dtype)


def result_types(function: Callable[..., Any], *types: Any) -> list[ShapedArray]:
    """The abstract values of a function's flat results."""
    structs = [jax.ShapeDtypeStruct(kind.shape, kind.dtype) for kind in types]
    return list(jax.make_jaxpr(function)(*structs).out_avals)


def parameters_of(equation: Equation) -> str:
    """What an operation does, as text: equations of one primitive with equal texts are the same
    function of their operands.
    """
    return str(sorted((name, str(value)) for name, value in equation.params.items()))


def exponent(equation: Equation) -> int:
    """Of an `integer_pow`."""
    return equation.params["y"]


def joined_axis(equation: Equation) -> int:
    """Of a `concatenate` or a `stack`."""
    return equation.params["dimension" if equation.primitive == "concatenate" else "axis"]


def reduced_axes(equation: Equation) -> tuple[int, ...]:
    """Of a `reduce_sum`."""
    return tuple(equation.params["axes"])


def running_axis(equation: Equation) -> tuple[int, bool]:
    """Of a `cumprod`: the axis along which it runs, and whether it runs backward."""
    return equation.params["axis"], equation.params["reverse"]


def contracted(equation: Equation) -> tuple[Any, Any]:
    """Of a `dot_general`: the axes of both operands that are summed over, and their batches."""
    summed, batches = equation.params["dimension_numbers"]
    return tuple(map(tuple, summed)), tuple(map(tuple, batches))


def counted_axis(equation: Equation) -> int:
    """Of an `iota`: the axis along which it counts."""
    return equation.params["dimension"]


def moved_entry(equation: Equation, index: Sequence[Any]) -> tuple[Any, ...] | None:
    """Where an entry of the result stands in the operand of an operation that only moves entries;
    `None` for other operations. A place on an axis is a number, or `(label, stride, offset)` for
    `offset + stride · label`.
    """
    match operation(equation):
        case operations.Broadcast(_, axes):
            return tuple(index[axis] for axis in axes)
        case operations.Transpose(axes):
            return tuple(index[axes.index(axis)] for axis in range(len(axes)))
        case operations.Slice(starts, _, strides):
            return tuple(map(_further, index, strides, starts))
        case _:
            return None


def _further(place: Any, stride: int, start: int) -> Any:
    if isinstance(place, int):
        return start + stride * place
    label, old_stride, offset = place
    return label, old_stride * stride, offset * stride + start


def sums_over_first(equation: Equation) -> bool:
    """Whether it is a sum over the first axis, and perhaps over others."""
    return equation.primitive == "reduce_sum" and 0 in equation.params["axes"]


def into_floats(equation: Equation) -> dict[str, Any]:
    """The changed parameters with which an operation on whole numbers makes floats of floats."""
    kinds = {"new_dtype", "preferred_element_type"} & set(equation.params)
    if any(equation.params[name] is None for name in kinds):
        return {}
    return dict.fromkeys(kinds, jax.numpy.result_type(float))
