"""Places: the positions to which an operation moves entries, if they do not depend on inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from ..jaxprs.program import Atom, Constant, Equation

if TYPE_CHECKING:
    from .facts import Facts

# Linear operations that move entries: each entry of the result is a sum of entries.
MOVE_ENTRIES = {"dynamic_slice", "gather", "pad", "reshape", "rev", "scatter-add"}
# Operations with which indices are computed.
_COMPUTED = MOVE_ENTRIES | {
    *("add", "and", "broadcast_in_dim", "clamp", "concatenate", "convert_element_type", "cumsum"),
    *("div", "eq", "ge", "gt", "iota", "le", "lt", "max", "min", "mul", "ne", "neg", "not", "or"),
    *("rem", "select_n", "sign", "slice", "squeeze", "stack", "sub", "transpose", "xor"),
}
# Larger arrays are not evaluated.
_LARGEST = 1024
Sources = list[tuple[Atom, np.ndarray]]


class Places:
    """Evaluates values that depend on no input of the program, such as triangular indices."""

    def __init__(self, facts: Facts):
        self._facts = facts
        self._values: dict[Atom, np.ndarray | None] = {}
        self._sources: dict[Equation, Sources | None] = {}

    def sources(self, equation: Equation) -> Sources | None:
        """For each operand whose entries are moved: the number of the entry at each position of the
        result, −1 if there is none. The result is the sum of these entries. `None` if unknown, or
        if a position gets several entries of one operand.
        """
        if equation not in self._sources:
            self._sources[equation] = self._find_sources(equation)
        return self._sources[equation]

    def _find_sources(self, equation: Equation) -> Sources | None:
        # Floats are the entries to move; everything else must be known, as it decides the places.
        moved = [jnp.issubdtype(atom.dtype, jnp.floating) for atom in equation.inputs]
        operands = [
            np.zeros(atom.shape, atom.dtype) if is_moved else self._value(atom)
            for atom, is_moved in zip(equation.inputs, moved, strict=True)
        ]
        known = [operand for operand in operands if operand is not None]
        if len(known) < len(operands) or any(operand.size > _LARGEST for operand in known):
            return None
        found: Sources = []
        for number in (number for number, is_moved in enumerate(moved) if is_moved):
            source = _source(equation, known, number)
            if source is None:
                return None
            found.append((equation.inputs[number], source))
        return found

    def _value(self, atom: Atom) -> np.ndarray | None:
        """The value as an array, if it is the same for all inputs; otherwise `None`."""
        atom = self._facts.resolve(atom)
        if isinstance(atom, Constant):
            return atom.known
        if atom not in self._values:
            equation = self._facts.defined_by.get(atom)
            is_small = np.prod(atom.shape) <= _LARGEST
            # Set before evaluating the operands: a value that depends on itself is unknown.
            self._values[atom] = None
            if equation is not None and equation.primitive in _COMPUTED and is_small:
                operands = list(map(self._value, equation.inputs))
                if all(operand is not None for operand in operands):
                    self._values[atom] = _computed(equation, operands)
        return self._values[atom]


def _source(equation: Equation, operands: list[np.ndarray], which: int) -> np.ndarray | None:
    """The number of the operand's entry at each position, all other operands being 0. The operation
    is linear: applied to ones it counts entries; applied to their numbers it identifies them.
    """
    like = operands[which]

    def put(entries: np.ndarray) -> np.ndarray:
        others_before, others_after = operands[:which], operands[which + 1 :]
        return _computed(equation, [*others_before, entries.astype(like.dtype), *others_after])

    # The numbers of entries must be exact as floats.
    are_exact = like.size < 1 / jnp.finfo(like.dtype).eps
    if not are_exact or not np.isin(put(np.ones(like.shape)), (0, 1)).all():
        return None
    return put(np.arange(1, like.size + 1).reshape(like.shape)).astype(int) - 1


def _computed(equation: Equation, operands: Sequence[np.ndarray | None]) -> np.ndarray:
    with jax.ensure_compile_time_eval():
        return np.asarray(equation.bind(*operands)[0])
