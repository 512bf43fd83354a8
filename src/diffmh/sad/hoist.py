"""Generate random keys and bits in advance: those of a straight piece of a program, in few calls.

A program that draws 200 times in a Python loop contains 200 copies of the generator, which take
most of the compile time. The result of a key does not depend on where it is computed, so
operations of the same shape are done together, as soon as their keys are known. This includes the
branches of a conditional if all of them run.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ..jaxprs import compat
from ..jaxprs.program import Atom, Cond, Constant, Equation, Program, Variable

# Primitives that run the generator.
_GENERATES = {"random_bits", "random_split", "random_fold_in"}
# Primitives that take keys from an array of keys.
_TAKES = {"dynamic_slice", "reshape", "slice", "split", "squeeze", "unstack"}
# Groups smaller than this stay where they are.
_FEW = 4


def lifted(program: Program, runs_all: Callable[[Equation], bool]) -> Program:
    """The same program with random keys and bits moved out of the branches of conditionals, where
    their keys come from outside and `runs_all` says that every branch runs.
    """
    equations: list[Equation] = []
    for equation in program.equations:
        if isinstance(equation.control, Cond) and runs_all(equation):
            equations += _lifted_from(equation, equation.control, runs_all)
        else:
            equations.append(equation)
    return dataclasses.replace(program, equations=tuple(equations))


def _lifted_from(
    equation: Equation, choice: Cond, runs_all: Callable[[Equation], bool]
) -> list[Equation]:
    """The equations that replace a conditional: those moved out of its branches, and the
    conditional itself, which takes their results.
    """
    # A key is a pure value: it yields the same bits wherever it is used, so moving an equation that
    # takes only keys changes no number.
    branches = [lifted(branch, runs_all) for branch in choice.branches]
    found: list[Equation] = []
    for number, branch in enumerate(branches):
        known: dict[Variable, Atom] = dict(zip(branch.inputs, equation.inputs[1:], strict=True))
        stay: list[Equation] = []
        for inner in branch.equations:
            if _is_about_keys(inner) and all(_is_known(atom, known) for atom in inner.inputs):
                inputs = _renamed(inner.inputs, known)
                found.append(dataclasses.replace(inner, inputs=inputs))
                known |= {output: output for output in inner.outputs}
            else:
                stay.append(inner)
        branches[number] = dataclasses.replace(branch, equations=tuple(stay))
    results = [output for each in found for output in each.outputs]
    taking = tuple(_taking(branch, results) for branch in branches)
    inputs = (*equation.inputs, *results)
    return [*found, dataclasses.replace(equation, inputs=inputs, control=Cond(taking))]


def _taking(branch: Program, results: list[Variable]) -> Program:
    """A branch that takes the moved results as inputs. Each variable is defined in one place."""
    # Variables are compared by identity: a copy is another variable of the same shape and dtype.
    own = {result: dataclasses.replace(result) for result in results}
    return Program(
        inputs=(*branch.inputs, *own.values()),
        equations=tuple(
            dataclasses.replace(equation, inputs=_renamed(equation.inputs, own))
            for equation in branch.equations
        ),
        outputs=_renamed(branch.outputs, own),
    )


def _renamed(atoms: Iterable[Atom], names: Mapping[Variable, Atom]) -> tuple[Atom, ...]:
    return tuple(names.get(atom, atom) if isinstance(atom, Variable) else atom for atom in atoms)


def _is_about_keys(equation: Equation) -> bool:
    if equation.primitive in _GENERATES:
        return True
    first = equation.inputs[0] if equation.primitive in _TAKES else None
    return isinstance(first, Variable) and jnp.issubdtype(first.dtype, jax.dtypes.prng_key)


def _is_known(atom: Atom, known: dict[Variable, Atom]) -> bool:
    return isinstance(atom, Constant) or atom in known


def hoisted(program: Program) -> Program:
    """The same program, with its keys and random bits generated together."""
    groups: dict[Any, list[Equation]] = defaultdict(list)
    for equation in program.equations:
        if equation.primitive in _GENERATES and isinstance(equation.inputs[0], Variable):
            forms = str([(atom.shape, atom.dtype) for atom in equation.inputs])
            groups[equation.primitive, forms, compat.parameters_of(equation)].append(equation)
    for group in groups.values():
        # In a chain of splits each waits for the one before. Then one is made per round, and the
        # group shrinks each time.
        while len(group) >= _FEW:
            program, group = _together(program, group)
    return program


def _together(program: Program, group: list[Equation]) -> tuple[Program, list[Equation]]:
    """The program in which one equation replaces those of a group that do not depend on each other,
    right after its operands; and the rest of the group.
    """
    defined_by = {output: equation for equation in program.equations for output in equation.outputs}
    members = set(group)
    before: set[Equation] = set()
    kept: list[Equation] = []
    waiting: list[Equation] = []
    for equation in group:
        needed = _needed(equation.inputs, defined_by)
        if needed & members:
            waiting.append(equation)
        else:
            before |= needed
            kept.append(equation)
    moved = set(kept)
    first = kept[0]
    columns = tuple(zip(*(equation.inputs for equation in kept), strict=True))

    def bind(*operands):
        rest = iter(operands)
        stacked = [jnp.stack([next(rest) for _ in column]) for column in columns]
        return tuple(jax.vmap(lambda *row: first.bind(*row)[0])(*stacked))

    made = dataclasses.replace(
        first,
        inputs=tuple(atom for column in columns for atom in column),
        outputs=tuple(equation.outputs[0] for equation in kept),
        _bind=bind,
    )
    # Everything that the group needs comes before it, in the original order; all else after it.
    early = [equation for equation in program.equations if equation in before]
    late = [
        equation
        for equation in program.equations
        if equation not in before and equation not in moved
    ]
    return dataclasses.replace(program, equations=(*early, made, *late)), waiting


def _needed(atoms: Iterable[Atom], defined_by: dict[Variable, Equation]) -> set[Equation]:
    """All equations on which the atoms depend."""
    found: set[Equation] = set()
    waiting = list(atoms)
    while waiting:
        atom = waiting.pop()
        equation = defined_by.get(atom) if isinstance(atom, Variable) else None
        if equation is not None and equation not in found:
            found.add(equation)
            waiting.extend(equation.inputs)
    return found
