"""Continuity: find jumps of a function at a place that moves with θ.

The derivative of an expectation is taken at fixed random values. If the *place* of a jump in such a
value depends on θ (a bound of a support, a threshold), the derivatives on both sides do not see it
move, so the estimated derivative would be wrong. This analysis follows the steps of moved values
(comparisons, rounding, searches, divisions by values that may be 0) through a program. A step is
closed where the values computed from it are proved to be continuous. A step that is still open at a
result is a jump, proved or possible. Everything is proved, nothing is tried on sample inputs;
docs/continuity.md has the rules and their limits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from ..base.validate import NotDifferentiable
from ..jaxprs import compat
from ..jaxprs.once import with_lines
from ..jaxprs.program import (
    Atom,
    Cond,
    Control,
    Equation,
    Program,
    Variable,
    every_equation,
    spread,
    until_stable,
)
from .entries import Open
from .facts import Facts, is_inexact
from .sides import Prover
from .steps import KNOWN, steps
from .terms import COMPARED

# A jump of an operand is a jump of the result, if the other operands are fixed.
_PASSES_JUMPS = {
    *("add", "add_any", "broadcast_in_dim", "concatenate", "convert_element_type", "copy"),
    *("copy_p", "cumsum", "name", "neg", "optimization_barrier", "pad", "reduce_sum", "reshape"),
    *("rev", "slice", "squeeze", "stack", "sub", "tile", "transpose", "unstack"),
}


class Jump(eqx.Module):
    """A step that may make a function jump at a place that depends on θ: its line in the user's
    code, and True if it certainly jumps.
    """

    where: str
    primitive: str
    certain: bool


def moving_jumps(
    function: Callable[..., Any],
    theta: PyTree,
    x: PyTree,
    x_moves: bool = False,
    fixes: bool = False,
) -> list[Jump]:
    """The jumps of `function(theta, x)` in continuous x whose place depends on theta; all jumps if
    x itself moves with theta. With `fixes`, the function returns a pair: its results, and
    intermediate values that are taken as given.

    Arguments may be pytrees of `jax.ShapeDtypeStruct`.
    """
    form = lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf))
    theta, x = jax.tree.map(form, (theta, x))
    # Traced with lines, so that a jump is reported with its line in the user's function.
    with with_lines():
        program, made = compat.program(function, theta, x)
    if fixes:
        program = _fixed(program, *(len(jax.tree.leaves(part)) for part in made))
    count = len(jax.tree.leaves(theta))
    of_x = [v for v in program.inputs[count:] if jnp.issubdtype(v.dtype, jnp.floating)]
    by_theta, by_x = set(program.inputs[:count]), set(of_x)
    if x_moves:
        by_theta |= by_x
    _follow(program, by_theta)
    _follow(program, by_x)
    _refuse_unknown(program, by_theta)
    return jumps(program, by_theta, by_x)


def _fixed(program: Program, num_results: int, num_fixed: int) -> Program:
    """The program of the first outputs, where the outputs after them are taken as given."""
    results, fixed = program.outputs[:num_results], program.outputs[num_results:]
    assert len(fixed) == num_fixed
    # A given value becomes an input: the caller is responsible for jumps before it.
    given = {atom for atom in fixed if isinstance(atom, Variable)} - set(program.inputs)
    equations = tuple(one for one in program.equations if not given.issuperset(one.outputs))
    return Program((*program.inputs, *given), equations, results)


def jumps(
    program: Program,
    theta: Iterable[Variable],
    random: Iterable[Variable],
    decisions: Container[str] = frozenset(),
    stepping: Container[str] = frozenset(),
) -> list[Jump]:
    """The jumps of a program, given which of its values depend on θ and on continuous random
    values. Primitives in `decisions` have their own estimators and make no step. Primitives in
    `stepping` are steps in addition to JAX's.
    """
    walk = _Walk(Facts(program, theta, random), decisions, stepping)
    walk.through(program)
    # A step that is open at any output is a jump; it is certain if it is at one of them.
    found = _merged(*map(walk.open, program.outputs))
    return [Jump(step.where, step.primitive, certain) for step, certain in found.items()]


def _follow(program: Program, reached: set[Variable]) -> None:
    """Add everything that is computed from variables in the set."""
    until_stable(functools.partial(_follow_once, reached, program), (reached,))


def _follow_once(reached: set[Variable], program: Program) -> None:
    for equation in program.equations:
        if equation.primitive == "stop_gradient":
            continue
        if equation.control is None:
            if any(atom in reached for atom in equation.inputs):
                reached.update(equation.outputs)
            continue
        spread(equation, (reached,), functools.partial(_follow_once, reached))
        # A predicate affects every output.
        if equation.decider in reached:
            reached.update(equation.outputs)


def _refuse_unknown(program: Program, theta: set[Variable]) -> None:
    for equation in every_equation(program):
        known = equation.control is not None or equation.primitive in KNOWN or equation.vouched
        if not known and any(atom in theta for atom in equation.inputs):
            raise NotDifferentiable(
                f"diffmh does not know the primitive `{equation.primitive}` at {equation.where},"
                " which depends on theta, so it cannot prove that it is continuous. If it is, wrap"
                " the function that uses it: `diffmh.continuous(function)`."
            )


class _Walk:
    """Follows the open steps through a program, equation by equation."""

    def __init__(self, facts: Facts, decisions: Container[str], stepping: Container[str]):
        self.facts, self._decisions, self._stepping = facts, decisions, stepping
        self._opens: dict[Variable, Open] = {}
        self._prover = Prover(facts, self._opens)

    def open(self, atom: Atom | None) -> Open:
        return self._opens.get(atom, {}) if isinstance(atom, Variable) else {}

    def through(self, program: Program) -> None:
        for equation in program.equations:
            if equation.primitive == "stop_gradient":
                continue
            # Loops that the user declared continuous are not examined.
            if equation.control is None or equation.vouched:
                self._primitive(equation)
            else:
                self._control(equation, equation.control)

    def _primitive(self, equation: Equation) -> None:
        incoming = self._incoming(equation)
        new = self._new(equation)
        for output in equation.outputs:
            # An integer result of a moved value certainly jumps. A float may still be proved
            # continuous below.
            certain = not is_inexact(output) or equation.primitive in ("floor", "ceil", "round")
            born = {equation: certain} if output in new else {}
            if equation.primitive in {*COMPARED, "is_finite", "sign"}:
                born = dict.fromkeys(born, False)
            self._leave(output, {**incoming, **born})

    def _new(self, equation: Equation) -> tuple[Variable, ...]:
        if equation.vouched or not self.facts.is_moved(equation.inputs):
            return ()
        if equation.primitive in self._decisions:
            return ()
        if equation.primitive in self._stepping:
            return equation.outputs
        # A step needs a moved operand: a jump at a place that does not depend on theta contributes
        # nothing to the derivative.
        found = steps(self.facts, equation)
        if found and equation.primitive in COMPARED and self._prover.is_decided(equation):
            return ()
        return found

    def _incoming(self, equation: Equation) -> Open:
        """The open steps of the operands. A proved jump stays proved if it only passes through."""
        passes = equation.primitive in _PASSES_JUMPS or self._is_scaling(equation)
        index = self._own_order(equation)
        inputs = equation.inputs
        if equation.primitive == "select_n":
            case = self.facts.bounds.decided_case(equation)
            inputs = inputs if case is None else (inputs[1 + case],)
        found = _merged(*map(self.open, inputs)).items()
        return {step: certain and passes for step, certain in found if step is not index}

    def _is_scaling(self, equation: Equation) -> bool:
        """True if the equation multiplies or divides by nonzero numbers, or selects by a condition
        that does not jump.
        """
        jumping = [bool(self.open(atom)) for atom in equation.inputs]
        if equation.primitive in ("mul", "div") and sum(jumping) == 1:
            other = equation.inputs[jumping.index(False)]
            return not self.facts.bounds.of(other).contains(0)
        return equation.primitive == "select_n" and not jumping[0]

    def _own_order(self, equation: Equation) -> Equation | None:
        """The search or sort, if an array is read at the indices that were found in the same array.
        `v[argmax(v)]` is continuous, since indices change only where entries are equal.
        """
        if equation.primitive not in ("gather", "dynamic_slice") or len(equation.inputs) < 2:
            return None
        array, *places = equation.inputs
        found = [self._searched(place) for place in places]
        (search, *others) = [one for one in found if one is not None] or [None]
        if search is None or any(other is not search for other in others):
            return None
        same = self.facts.number(search.inputs[0]) == self.facts.number(array)
        return search if same and len(array.shape) == 1 else None

    def _searched(self, atom: Atom) -> Equation | None:
        """The search whose results an array of indices holds, possibly rearranged."""
        atom = self.facts.resolve(atom)
        equation = self.facts.definition(atom)
        if equation is None:
            return None
        name, inputs = equation.primitive, equation.inputs
        # Only rearrangements are followed: each place must be one that the search returned.
        if name in ("argmax", "argmin", "top_k"):
            return equation if name != "top_k" or atom is equation.outputs[1] else None
        if name == "sort":
            return equation if self._sorts_places(equation, atom) else None
        if name in ("broadcast_in_dim", "reshape", "squeeze", "slice", "rev", "transpose", "copy"):
            return self._searched(inputs[0])
        if name == "convert_element_type" and not is_inexact(inputs[0]):
            return self._searched(inputs[0])
        if name in ("dynamic_slice", "gather") and not any(map(self.open, inputs[1:])):
            return self._searched(inputs[0])
        if name == "select_n":
            case = self.facts.bounds.decided_case(equation)
            return None if case is None else self._searched(inputs[1 + case])
        return None

    def _sorts_places(self, equation: Equation, output: Atom) -> bool:
        """True if a sort carries the indices 0, 1, … along with one array of keys."""
        if len(equation.inputs) != 2 or output is not equation.outputs[1]:
            return False
        counted = self.facts.definition(equation.inputs[1])
        return counted is not None and counted.primitive == "iota"

    def _leave(self, output: Variable, steps: Open) -> None:
        # Steps stay open until proved closed. A value that cannot be analysed keeps them.
        self._opens[output] = steps
        if steps and is_inexact(output):
            self._opens[output] = self._prover.remaining(output, steps)

    def _control(self, equation: Equation, control: Control) -> None:
        """Repeat until the set of carried steps no longer grows."""
        edges = control.edges()
        for operand, targets in zip(equation.inputs, edges.into, strict=True):
            for target in targets:
                self._opens[target] = self.open(operand)
        before = -1
        while before != (size := sum(len(self.open(target)) for _, target in edges.around)):
            before = size
            if edges.around:
                # Discard terms that were built with fewer open steps: an unknown may jump only now.
                self._prover.forget()
            for inner in equation.inner:
                self.through(inner)
            for source, target in edges.around:
                self._opens[target] = _merged(self.open(target), self.open(source))
        # Where the index of a conditional jumps, another branch is taken; where a condition does,
        # a loop ends. Each output may jump there.
        deciding = dict.fromkeys(self.open(equation.decider), False)
        for output, sources in zip(equation.outputs, edges.out, strict=True):
            opened = _merged(deciding, *map(self.open, sources))
            if isinstance(control, Cond):
                # Unless its branches agree, which `_leave` tries to prove.
                self._leave(output, opened)
            elif opened:
                # The results of a loop are those of its last iteration, whose steps were examined.
                self._opens[output] = opened


def _merged(*several: Open) -> dict[Equation, bool]:
    """All of the steps; one is certain if it is in any of them."""
    found: dict[Equation, bool] = {}
    for opened in several:
        for step, certain in opened.items():
            found[step] = found.get(step, False) or certain
    return found
