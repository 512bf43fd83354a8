"""Random bits ahead of time: all that a straight piece of program draws, from one call.

A program that draws 200 times in a Python loop has 200 copies of the generator, which take a
compiler longer than all the rest. The bits of a key are the same wherever they are made, so those
of one shape are made together, as soon as their keys are known.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from typing import Any

import jax
import jax.numpy as jnp

from .._lowering import compat
from .._lowering.program import Atom, Equation, Program, Variable

BITS = "random_bits"
# Fewer are left where they are.
_FEW = 4


def hoisted(program: Program) -> Program:
    """The same program, with its random bits made together."""
    groups: dict[Any, list[Equation]] = defaultdict(list)
    for equation in program.equations:
        if equation.primitive == BITS and isinstance(equation.inputs[0], Variable):
            shape = equation.inputs[0].shape
            groups[(shape, compat.parameters_of(equation))].append(equation)
    for group in groups.values():
        if len(group) >= _FEW:
            program = _together(program, group)
    return program


def _together(program: Program, group: list[Equation]) -> Program:
    """The program with the bits of a group made by one equation, right after the keys."""
    defined_by = {output: equation for equation in program.equations for output in equation.outputs}
    members = set(group)
    before: set[Equation] = set()
    kept: list[Equation] = []
    for equation in group:
        needed = _needed(equation.inputs, defined_by)
        # A key that is made of bits of the same group cannot wait for them.
        if not needed & members:
            before |= needed
            kept.append(equation)
    moved = set(kept)
    first = kept[0]
    made = dataclasses.replace(
        first,
        inputs=tuple(equation.inputs[0] for equation in kept),
        outputs=tuple(equation.outputs[0] for equation in kept),
        _bind=lambda *keys: tuple(jax.vmap(lambda key: first.bind(key)[0])(jnp.stack(keys))),
    )
    early = [equation for equation in program.equations if equation in before]
    late = [
        equation
        for equation in program.equations
        if equation not in before and equation not in moved
    ]
    return dataclasses.replace(program, equations=(*early, made, *late))


def _needed(atoms: tuple[Atom, ...], defined_by: dict[Variable, Equation]) -> set[Equation]:
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
