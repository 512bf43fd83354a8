"""Random draws of a program that are alike, gathered to be made at once.

Threefry written out is some hundred operations, and a cycle of n unlike kernels draws n times from
keys of its own: to compile those, one by one, takes longer than everything else. Stacked, n draws
are the operations of one.
"""

from __future__ import annotations

from collections.abc import Hashable

from ..jaxprs import compat, operations
from ..jaxprs.program import Constant, Equation, Program

# Fewer draws than this are left as they stand, each next to what uses it.
_MANY = 4


def in_groups(program: Program) -> list[list[Equation]]:
    """The equations in an order in which they can be evaluated, draws that are alike together.

    A draw's *round* is the number of draws that lead up to it, one from another: those of a round
    don't depend on each other.
    """
    rounds: dict[Equation, int] = {}
    after: dict[object, int] = {}
    alike: dict[Hashable, list[Equation]] = {}
    for equation in program.equations:
        number = max((after.get(atom, 0) for atom in equation.inputs), default=0)
        kind = _kind(equation)
        # Every operand of an equation in round n is made in a round ≤ n, and by a draw only in a
        # round < n. So sorting by rounds, draws last, keeps every value ahead of its uses.
        rounds[equation] = number
        after.update(dict.fromkeys(equation.outputs, number + (kind is not None)))
        if kind is not None:
            alike.setdefault((number, kind), []).append(equation)
    groups = [group for group in alike.values() if len(group) >= _MANY]
    if not groups:
        return [[equation] for equation in program.equations]
    gathered = {equation for group in groups for equation in group}
    single = [[equation] for equation in program.equations if equation not in gathered]

    def order(group: list[Equation]) -> tuple[int, bool]:
        # Draws come last in their round: whatever their keys are made of is in it, or earlier.
        return rounds[group[0]], _kind(group[0]) is not None

    return sorted([*single, *groups], key=order)


def _kind(equation: Equation) -> Hashable | None:
    """A key that is equal for draws that are alike; `None` for what is not a draw by itself."""
    if not equation.primitive.startswith("random_"):
        return None
    key, *others = equation.inputs
    if isinstance(key, Constant):
        return None
    operation = compat.operation(equation)
    match operation:
        case operations.SplitKeys() | operations.DrawWords():
            return operation, key.shape
        case operations.FoldIn() if isinstance(others[0], Constant):
            return operation, key.shape, int(others[0].value)
        case _:
            return None
