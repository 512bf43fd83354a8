"""Random keys and bits ahead of time: all that a straight piece of program draws, from a few calls.

A program that draws 200 times in a Python loop has 200 copies of the generator, which take a
compiler longer than all the rest. What is made of a key is the same wherever it is made, so those
of one shape are made together, as soon as their keys are known; those within the branches of a
conditional that are all run, too.
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

# What runs the generator.
_GENERATES = {"random_bits", "random_split", "random_fold_in"}
# What takes keys from an array of them.
_TAKES = {"dynamic_slice", "reshape", "slice", "split", "squeeze", "unstack"}
# Fewer are left where they are.
_FEW = 4


def lifted(program: Program, runs_all: Callable[[Equation], bool]) -> Program:
    """The same program, with what the branches of conditionals generate from keys of the program
    around them made there, where `runs_all` says that every branch is run.
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
    """The equations that a conditional is made of: those of its branches that need nothing of
    them, and itself, which takes their results.
    """
    # A key is a pure value: the same bits come of it wherever and whenever it is used, so moving an
    # equation that takes only keys changes no number.
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
    """A branch that is given what was lifted, under names of its own: a variable has one place."""
    # Variables are compared by identity: a copy is another variable of the same form.
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
    """The same program, with its keys and random bits made together."""
    groups: dict[Any, list[Equation]] = defaultdict(list)
    for equation in program.equations:
        if equation.primitive in _GENERATES and isinstance(equation.inputs[0], Variable):
            shapes = tuple(jnp.shape(_of(atom)) for atom in equation.inputs)
            groups[
                (equation.primitive, shapes, str(_dtypes(equation)), compat.parameters_of(equation))
            ].append(equation)
    for group in groups.values():
        # Of a chain of splits each waits for the one before: then one is made per round, and the
        # rest of the group is smaller each time.
        while len(group) >= _FEW:
            program, group = _together(program, group)
    return program


def _of(atom: Atom) -> Any:
    return atom.value if isinstance(atom, Constant) else atom


def _dtypes(equation: Equation) -> list[Any]:
    return [getattr(_of(atom), "dtype", None) for atom in equation.inputs]


def _together(program: Program, group: list[Equation]) -> tuple[Program, list[Equation]]:
    """The program with those of a group that do not wait for each other made by one equation, right
    after what they need; and the others.
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
    # What the group needs comes before it, in the order in which it was; all else after it.
    early = [equation for equation in program.equations if equation in before]
    late = [
        equation
        for equation in program.equations
        if equation not in before and equation not in moved
    ]
    return dataclasses.replace(program, equations=(*early, made, *late)), waiting


def _needed(atoms: Iterable[Atom], defined_by: dict[Variable, Equation]) -> set[Equation]:
    """All equations that atoms depend on."""
    found: set[Equation] = set()
    waiting = list(atoms)
    while waiting:
        atom = waiting.pop()
        equation = defined_by.get(atom) if isinstance(atom, Variable) else None
        if equation is not None and equation not in found:
            found.add(equation)
            waiting.extend(equation.inputs)
    return found
