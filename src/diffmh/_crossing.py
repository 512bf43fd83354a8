"""Whether a step makes a jump: tried on both sides of it.

A comparison, a rounding or a search is a step. Where it only chooses between formulas that agree at
the place where it steps, whatever is computed by it is continuous: Huber's loss, `jnp.interp`, a
distribution function in pieces. Random lines are laid through the inputs; where the step changes on
one of them, the place is bisected down to neighbouring floats, and what the step leads to must be
the same on both sides.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._lowering import compat
from ._lowering.program import Atom, Constant, Equation, Program, Variable
from ._steps import EQUALITIES, ORDERS, ROUNDINGS, is_inexact

# Lines of so many points through inputs of these sizes. The larger ones are tried only if the
# smaller ones crossed the step fewer than `_LEAST` times.
_LINES, _POINTS, _LEAST = 24, 65, 8
_SIZES, _LARGE_SIZES = (1.0, 0.1, 10.0), (1e2, 1e3, 1e4, 1e5, 1e6)
# Of so many crossings both sides are looked at, and so many equations behind the step: a few first.
_CROSSINGS, _FEW_BEHIND, _BEHIND = 512, 4, 64
# With large arrays there are fewer lines and crossings: at most as many numbers at a time.
_NUMBERS = 4_000_000
# Behind these made-up numbers begin: they make one number of many, or are not defined everywhere.
# What is lost is how their results hang together with their operands.
_NEVER_MADE_UP = {"conv_general_dilated", "dot_general", "erf_inv"}
_PARTIAL = {"acos", "acosh", "asin", "atanh", "div", "log", "log1p", "log2", "pow", "rsqrt", "sqrt"}
# Steps whose results are whole numbers that change only where they step.
_SEARCHES = {"argmax", "argmin", "convert_element_type", "sort", "top_k"}


def makes_no_jump(program: Program, step: Equation, plain: Callable[[Equation], bool]) -> bool:
    """Whether all that the outputs of `step` lead to is continuous where it steps. `plain` says
    which equations may be evaluated at made-up values. Where nothing is found out: no.
    """
    if not _shows_its_side(step):
        return False
    far = lambda equation: plain(equation) and equation.primitive not in _NEVER_MADE_UP
    near = lambda equation: far(equation) and equation.primitive not in _PARTIAL
    return any(
        _agrees(_Region.around(program, step, plain, before, behind))
        for before, behind in ((near, _FEW_BEHIND), (near, _BEHIND), (far, _BEHIND))
    )


def _shows_its_side(step: Equation) -> bool:
    """Whether it is known what changes where it steps, and nowhere else."""
    if step.primitive in ROUNDINGS | {"atan2"}:
        return True
    known = step.control is not None or step.primitive in ORDERS | EQUALITIES | _SEARCHES
    return known and bool(_whole(step.outputs))


def _whole(variables: Sequence[Variable]) -> list[Variable]:
    return [variable for variable in variables if not is_inexact(variable)]


def _agrees(region: _Region | None) -> bool:
    """The same region is met again in the next layer, and whenever a program is traced."""
    if region is None:
        return False
    signature = region.signature()
    if signature is None:
        return _tried(region)
    if signature not in _FOUND:
        _FOUND[signature] = _tried(region)
    return _FOUND[signature]


_FOUND: dict[Hashable, bool] = {}


def _tried(region: _Region) -> bool:
    trial, crossed = _Trial(region), 0
    with jax.ensure_compile_time_eval():
        for size in (*_SIZES, *_LARGE_SIZES):
            if size in _LARGE_SIZES and crossed >= _LEAST:
                break
            sides = trial.sides(size)
            if sides is None:
                continue
            crossed += sides.count
            if region.lets_out(functools.partial(_jumps, sides, size)):
                return False
    return crossed >= _LEAST


@dataclasses.dataclass(frozen=True)
class _Sides:
    """The values of variables on both sides of some crossings, and at them."""

    count: int
    below: dict[Variable, np.ndarray]
    above: dict[Variable, np.ndarray]
    at: dict[Variable, np.ndarray] | None


def _jumps(sides: _Sides, size: float, variable: Variable) -> bool:
    below = sides.below[variable]
    others = [sides.above[variable]] + ([] if sides.at is None else [sides.at[variable]])
    return any(not np.all(_close(below, other, size)) for other in others)


def _close(a: np.ndarray, b: np.ndarray, size: float) -> np.ndarray:
    if not np.issubdtype(a.dtype, np.inexact):
        return a == b
    known = np.isfinite(a) & np.isfinite(b)
    # Nothing is learnt where neither side is a number; it is a jump where one is.
    neither = ~np.isfinite(a) & ~np.isfinite(b)
    a, b = np.where(known, a, 0.0), np.where(known, b, 0.0)
    near = np.abs(a - b) <= 2e-5 * np.maximum(np.abs(a), np.abs(b)) + 1e-5 * size
    return np.where(known, near, neither)


@dataclasses.dataclass(frozen=True)
class _Region:
    """A step, what it is computed from, and what is computed from it."""

    step: Equation
    inputs: tuple[Variable, ...]
    equations: tuple[Equation, ...]
    behind: tuple[Equation, ...]
    leaving: frozenset[Variable]

    @classmethod
    def around(
        cls,
        program: Program,
        step: Equation,
        plain: Callable[[Equation], bool],
        before: Callable[[Equation], bool],
        num_behind: int,
    ) -> _Region | None:
        """With some of the `plain` equations behind the step, and those `before`."""
        reached = set(step.outputs)
        leaving = reached.intersection(program.outputs)
        behind: list[Equation] = []
        for equation in program.equations:
            met = reached.intersection(equation.inputs)
            if met and plain(equation) and len(behind) < num_behind:
                behind.append(equation)
                reached.update(equation.outputs)
                leaving.update(set(equation.outputs).intersection(program.outputs))
            elif met:
                leaving.update(met)
        inputs, equations = _computed_from(program, [step, *behind], before)
        constants = [a.value for e in equations for a in e.inputs if isinstance(a, Constant)]
        if any(isinstance(value, compat.Tracer) for value in constants):
            return None
        if any(jnp.issubdtype(v.dtype, jax.dtypes.prng_key) for v in inputs):
            return None
        return cls(step, inputs, equations, tuple(behind), frozenset(leaving))

    def signature(self) -> Hashable:
        """Equal for regions that compute the same; `None` if that cannot be told."""
        if any(e.control is not None or "custom" in e.primitive for e in self.equations):
            return None
        names: dict[Atom, Any] = {v: (i, v.shape, v.dtype) for i, v in enumerate(self.inputs)}
        parts: list[Hashable] = []
        for equation in self.equations:
            operands = tuple(_named(names, atom) for atom in equation.inputs)
            parts.append((equation.primitive, compat.parameters_of(equation), operands))
            for output in equation.outputs:
                names[output] = (len(names), output in self.leaving)
        return (tuple(parts), names[self.step.outputs[0]], len(self.behind))

    @property
    def num_numbers(self) -> int:
        return sum(math.prod(v.shape) for e in self.equations for v in e.outputs)

    def lets_out(self, jumps: Callable[[Variable], bool]) -> bool:
        """Whether something jumps that others, or the result, are computed from."""
        found = set(self.step.outputs)
        for equation in self.behind:
            if found.intersection(equation.inputs):
                found.update(output for output in equation.outputs if jumps(output))
        return bool(self.leaving & found)

    def signal(self, values: dict[Atom, Any]) -> Any:
        """What changes where the step is crossed. An equation does not, next to it."""
        if self.step.primitive in EQUALITIES:
            left, right = (_read(values, atom) for atom in self.step.inputs)
            return jnp.ravel(jnp.asarray(left < right))
        if self.step.primitive == "atan2":
            y, x = (_read(values, atom) for atom in self.step.inputs)
            return jnp.ravel((y < 0) & (x < 0))
        changing = _whole(self.step.outputs) or self.step.outputs
        return jnp.concatenate([jnp.ravel(values[output]) for output in changing])

    def values(self, inputs: Sequence[Any], instead: dict[Atom, Any]) -> dict[Atom, Any]:
        """Of all variables; those in `instead` are what it says."""
        values: dict[Atom, Any] = dict(zip(self.inputs, inputs, strict=True)) | instead
        for equation in self.equations:
            results = equation.bind(*(_read(values, atom) for atom in equation.inputs))
            for variable, value in zip(equation.outputs, results, strict=True):
                values.setdefault(variable, value)
        return values

    def behind_values(self, values: dict[Atom, Any]) -> list[Any]:
        return [values[output] for equation in self.behind for output in equation.outputs]


def _named(names: dict[Atom, Any], atom: Atom) -> Hashable:
    if not isinstance(atom, Constant):
        return names[atom]
    value = np.asarray(atom.value)
    return value.shape, str(value.dtype), hashlib.sha256(value.tobytes()).digest()


def _read(values: dict[Atom, Any], atom: Atom) -> Any:
    return jnp.asarray(atom.value) if isinstance(atom, Constant) else values[atom]


def _computed_from(
    program: Program, last: Sequence[Equation], before: Callable[[Equation], bool]
) -> tuple[tuple[Variable, ...], tuple[Equation, ...]]:
    """The equations that `last` are computed by, and from what."""
    defined_by = {output: equation for equation in program.equations for output in equation.outputs}
    needed: set[Equation] = set(last)
    inputs: dict[Variable, None] = {}
    waiting = [atom for equation in last for atom in equation.inputs]
    while waiting:
        atom = waiting.pop()
        if not isinstance(atom, Variable):
            continue
        equation = defined_by.get(atom)
        if equation in needed:
            continue
        if equation is None or not before(equation):
            inputs[atom] = None
        else:
            needed.add(equation)
            waiting.extend(equation.inputs)
    return tuple(inputs), tuple(equation for equation in program.equations if equation in needed)


class _Trial:
    """Evaluates a region along lines. What is compiled is used for lines of all sizes."""

    def __init__(self, region: _Region):
        self.region = region
        room = _NUMBERS // max(region.num_numbers, 1)
        self.num_lines = min(max(room // _POINTS, 2), _LINES)
        self.num_crossings = min(max(room, 16), _CROSSINGS)
        # Compiled for once: LLVM need not optimise.
        quick: dict[str, Any] = {"xla_backend_optimization_level": 0}
        self._signals = jax.jit(functools.partial(_signals, region), compiler_options=quick)
        self._sides = jax.jit(functools.partial(_both_sides, region), compiler_options=quick)

    def sides(self, size: float) -> _Sides | None:
        """Both sides of crossings along random lines; `None` if there are none."""
        rng = np.random.default_rng(round(1000 * size))
        lines = [_line(rng, self.num_lines, variable, size) for variable in self.region.inputs]
        grid = jnp.linspace(-3.0, 3.0, _POINTS)
        signals = np.asarray(self._signals(lines, grid))
        known = signals == signals
        changes = (signals[:, :-1] != signals[:, 1:]) & known[:, :-1] & known[:, 1:]
        crossings = np.argwhere(changes)
        if not crossings.shape[0]:
            return None
        chosen = np.resize(rng.permutation(crossings.shape[0]), self.num_crossings)
        line, point, element = crossings[chosen].T
        of_crossings = [(start[line], along[line]) for start, along in lines]
        first = jnp.asarray(signals[line, point, element])
        found = self._sides(of_crossings, grid[point], grid[point + 1], first, jnp.asarray(element))
        below, above, at = jax.tree.map(np.asarray, found)
        variables = [output for equation in self.region.behind for output in equation.outputs]
        named = lambda values: dict(zip(variables, values, strict=True))
        below, above = named(below), named(above)
        has_at = self.region.step.primitive in EQUALITIES
        return _Sides(
            self._num_learnt(crossings.shape[0], below, above),
            below,
            above,
            named(at) if has_at else None,
        )

    def _num_learnt(self, num_found: int, below: dict, above: dict) -> int:
        """At how many different crossings all that is left of it are numbers."""
        count = min(num_found, self.num_crossings)
        learnt = np.ones(count, bool)
        for values in (below, above):
            for variable in self.region.leaving.intersection(values):
                finite = np.isfinite(values[variable][:count])
                learnt &= finite.reshape(count, -1).all(axis=1)
        return int(learnt.sum())


def _line(rng: np.random.Generator, count: int, variable: Variable, size: float) -> tuple[Any, Any]:
    """A start and a direction for each line; whole numbers stay where they are."""
    shape = (count, *variable.shape)
    if jnp.issubdtype(variable.dtype, jnp.inexact):
        draw = lambda: jnp.asarray(size * rng.normal(size=shape), variable.dtype)
        return draw(), draw()
    start = jnp.asarray(rng.integers(0, 2, size=shape)).astype(variable.dtype)
    return start, jnp.zeros_like(start)


def _at(region: _Region, lines: Any, t: Any, instead: Callable[[Any], dict] | None = None) -> Any:
    """The values of a region at a point of a line."""
    is_float = lambda start: jnp.issubdtype(start.dtype, jnp.inexact)
    inputs = [
        start + (t * along).astype(start.dtype) if is_float(start) else start
        for start, along in lines
    ]
    values = region.values(inputs, {})
    return values if instead is None else region.values(inputs, instead(values))


def _signals(region: _Region, lines: Any, grid: Any) -> Any:
    at = lambda lines, t: region.signal(_at(region, lines, t))
    return jax.vmap(jax.vmap(at, (None, 0)), (0, None))(lines, grid)


def _both_sides(
    region: _Region, lines: Any, below: Any, above: Any, first: Any, element: Any
) -> Any:
    """What is behind the step, on both sides of each crossing and at it."""

    def of_one(lines, below, above, first, element):
        def closer(_, ends):
            middle = (ends[0] + ends[1]) / 2
            same = region.signal(_at(region, lines, middle))[element] == first
            return jnp.where(same, middle, ends[0]), jnp.where(same, ends[1], middle)

        below, above = jax.lax.fori_loop(0, 40, closer, (below, above))
        equal = functools.partial(_made_equal, region.step, element)
        places = ((below, None), (above, None), (below, equal))
        return [region.behind_values(_at(region, lines, t, how)) for t, how in places]

    return jax.vmap(of_one)(lines, below, above, first, element)


def _made_equal(step: Equation, element: Any, values: dict[Atom, Any]) -> dict[Atom, Any]:
    """An element of one side of an equation as the other side is."""
    if step.primitive not in EQUALITIES:
        return {}
    left, right = step.inputs if isinstance(step.inputs[0], Variable) else step.inputs[::-1]
    side, other = (jnp.asarray(_read(values, atom)) for atom in (left, right))
    other = jnp.broadcast_to(other, side.shape)
    return {left: side.ravel().at[element].set(other.ravel()[element]).reshape(side.shape)}
