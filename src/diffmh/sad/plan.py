"""Plans: everything known about a program before it runs, computed once for each form of its
arguments.

The form is what `jax.jit` would compile for: the program, the structures of theta, `args` and
options, the shapes and dtypes of their arrays, and all other objects by identity. The numbers in
theta and `args`, and the key, are not part of it.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Key, PyTree

from ..base import trees, validate
from ..base.validate import NotDifferentiable
from ..jaxprs import compat
from ..jaxprs.program import Constant, Equation, Program, While, every_equation
from . import primitives, ranges, refusals
from .analysis import Analysis, analyse, by_terms
from .hoist import hoisted, lifted
from .keys import refuse_shared
from .marker import as_float

# With more parameters than this, a tangent for each costs more than the reverse mode.
MOST_TANGENTS = 16
# At most this many plans are stored, the most recently used.
_MOST_PLANS = 256
# These settings of JAX change what a program computes from the same arguments.
_SETTINGS = (
    "jax_enable_x64",
    "jax_numpy_dtype_promotion",
    "jax_default_matmul_precision",
    "jax_threefry_partitionable",
)


class Run(eqx.Module):
    """A program with its arguments: `program(theta, key, *args, **options)`."""

    program: Callable[..., PyTree]
    theta: PyTree
    key: Key[Array, ""]
    args: tuple[Any, ...]
    options: dict[str, Any]

    def at(self, theta: PyTree, key: Any = None) -> Run:
        """The same run with other parameters and, if given, another key."""
        key = self.key if key is None else key
        return dataclasses.replace(self, theta=theta, key=key)

    def value(self) -> Float[Array, "F"]:
        """The result as one vector of floats; NaN if a draw was out of range."""
        vector, valid = ranges.run(self.plan.acting, self.leaves)
        return ranges.nan_unless(valid, self.theta, vector)

    @property
    def leaves(self) -> list[Array]:
        """The inputs of the traced program: first the parameters, then the other arrays."""
        arrays = eqx.filter((self.key, self.args, self.options), eqx.is_array)
        return [jnp.asarray(leaf) for leaf in jax.tree.leaves((self.theta, arrays))]

    @property
    def plan(self) -> Plan:
        """The plan of this run, shared by all runs of the same form."""
        form = _form(self)
        plan = _plans.pop(form, None) if form is not None else None
        if plan is None:
            plan = _make(self)
            if form is None or plan.closes_over_tracers:
                return plan  # A tracer must not outlive its trace.
        _plans[form] = plan
        while len(_plans) > _MOST_PLANS:
            del _plans[next(iter(_plans))]
        return plan


@dataclasses.dataclass(frozen=True, eq=False)
class Analysed:
    """A program with two outputs, the result and True if all draws were in range, together with
    the facts on which its derivative rests.
    """

    program: Program
    analysis: Analysis

    @functools.cached_property
    def is_reversible(self) -> bool:
        """True if JAX can differentiate it in reverse, which a `while_loop` prevents."""
        return not any(isinstance(equation.control, While) for equation in self.concerned)

    @functools.cached_property
    def terms(self) -> Analysis:
        """The analysis for the primal's path alone."""
        return by_terms(self.analysis, self.program)

    @property
    def concerned(self) -> Iterator[Equation]:
        """The equations on which a derivative depends."""
        return filter(self.analysis.concerns, every_equation(self.program))


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """A program as a function of its parameters and other inputs. `acting` also performs the
    program's prints, and has one more output: True if all draws were in range. What only a
    derivative needs is computed on request, and errors about the derivative are raised then.
    """

    program: Program
    acting: Program
    num_parameters: int
    num_leaves: int
    unflatten: Callable[[Any], PyTree]

    @functools.cached_property
    def closes_over_tracers(self) -> bool:
        """True if the program uses values that an outer transformation is tracing."""
        atoms = [*self.acting.outputs]
        for equation in every_equation(self.acting):
            atoms += [*equation.inputs, *(a for inner in equation.inner for a in inner.outputs)]
        constants = [atom.value for atom in atoms if isinstance(atom, Constant)]
        return not validate.concrete(constants)

    @functools.cached_property
    def _facts(self) -> Analysis:
        return analyse(self.program, self.program.inputs[: self.num_leaves])

    @functools.cached_property
    def by_rules(self) -> Analysed:
        """The program for a derivative by our own rules."""
        refusals.refuse_equations(self._facts, self.program, any_primitive=False)
        return self.by_jax

    @functools.cached_property
    def by_jax(self) -> Analysed:
        """The program for a derivative that JAX takes where we have no rule."""
        facts = self._facts
        # Refusals come before any transformation, so they name the user's own equations.
        refusals.refuse_equations(facts, self.program, any_primitive=True)
        refusals.refuse_jumps(facts, self.program)
        refuse_shared(facts, self.program)
        program = ranges.checked(self.program)
        program = lifted(program, lambda equation: equation.inputs[0] in facts.branched)
        # Analysed again: facts are about variables, and both passes have created new ones.
        # `hoisted` comes last: it moves equations but keeps all variables.
        analysis = analyse(program, program.inputs[: self.num_leaves])
        return Analysed(hoisted(program), analysis)

    @functools.cached_property
    def goes_backward(self) -> bool:
        """True if JAX differentiates in reverse: with many parameters, or if a primitive has no
        rule of ours; never through a `while_loop`.
        """
        if self.num_parameters <= MOST_TANGENTS:
            return self._must_go_backward()
        if self.by_jax.is_reversible:
            return True
        warnings.warn(
            "the program has a `while_loop` that depends on theta, which JAX cannot differentiate"
            f" in reverse: a tangent is carried for each of its {self.num_parameters:,} parameters."
            " A `scan` of bounded length would be faster.",
            stacklevel=4,
        )
        return False

    def _must_go_backward(self) -> bool:
        """True if the program has a step without a rule that JAX can differentiate in reverse."""
        if not any(map(_is_left_to_jax, every_equation(self.program))):
            return False
        try:
            return self.by_jax.is_reversible and any(map(_is_left_to_jax, self.by_jax.concerned))
        except NotDifferentiable:
            return False  # The error is raised when a derivative is requested.


def _is_left_to_jax(equation: Equation) -> bool:
    name = equation.primitive
    return name in primitives.BY_JAX and not primitives.is_known(name)


def _make(run: Run) -> Plan:
    parameters, structure = jax.tree.flatten(run.theta)
    others, static = eqx.partition((run.key, run.args, run.options), eqx.is_array)
    rest, rest_structure = jax.tree.flatten(others)

    # One trace of the user's program serves both programs and the shape of the result.
    @jax.jit
    def result(*leaves):
        theta = jax.tree.unflatten(structure, leaves[: len(parameters)])
        given = jax.tree.unflatten(rest_structure, leaves[len(parameters) :])
        key, args, options = eqx.combine(given, static)
        return trees.strong(run.program(theta, key, *args, **options))

    def flat(*leaves):
        return ravel_pytree(jax.tree.map(as_float, result(*leaves)))[0]

    leaves = [*parameters, *rest]
    unflatten = _unflatten(jax.eval_shape(result, *leaves))
    program, acting = (compat.program(flat, *leaves, acts=acts)[0] for acts in (False, True))
    num_parameters = sum(jnp.size(leaf) for leaf in parameters)
    return Plan(program, ranges.checked(acting), num_parameters, len(parameters), unflatten)


def _unflatten(shape: PyTree) -> Callable[[Any], PyTree]:
    """Return the function that turns a vector into the result's structure, integers as floats."""
    if not jax.tree.leaves(shape):
        raise TypeError(f"`program` must return numbers, got {shape!r}.")
    for leaf in jax.tree.leaves(shape):
        if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            validate.real_dtype(leaf.dtype, "what `program` returns")

    def zeros(leaf):
        return as_float(jnp.zeros(leaf.shape, leaf.dtype))

    return ravel_pytree(jax.tree.map(zeros, shape))[1]


@dataclasses.dataclass(frozen=True, eq=False)
class _Same:
    """An object by identity, kept alive. Two objects that look alike may compute differently."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


_plans: dict[Any, Plan] = {}


def forget_plans() -> None:
    """Delete all plans. Call it after changing the tables of primitives, on which plans rest."""
    _plans.clear()


def _form(run: Run) -> Any:
    """The form that a plan depends on; `None` if it is unknown: for unhashable objects, which may
    change, and inside of `jax.shard_map`, where it also depends on the mesh.
    """
    if compat.inside_shard_map():
        return None
    given = (run.theta, run.key, run.args, run.options)
    arrays, rest = eqx.partition(given, eqx.is_array)
    leaves, structure = jax.tree.flatten(arrays)
    static, static_structure = jax.tree.flatten(rest)
    try:
        # An unhashable object may change between two calls, which would invalidate the plan.
        hash(tuple(static))
    except TypeError:
        return None
    return (
        _Same(run.program),
        structure,
        static_structure,
        tuple(jax.typeof(leaf) for leaf in leaves),
        tuple(map(_identity, static)),
        tuple(getattr(jax.config, name) for name in _SETTINGS),
    )


def _identity(leaf: Any) -> Any:
    plain = isinstance(leaf, str | bytes | int | float | complex | None)
    return (type(leaf), leaf) if plain else _Same(leaf)
