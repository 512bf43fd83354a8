"""Group similar random draws of a program, so that they are made at once.

Unrolled Threefry has about a hundred operations, and a cycle of n different kernels draws n times
from different keys. Compiled one by one, the draws would take longer than everything else. Stacked,
n draws have the operations of one.
"""

from __future__ import annotations

from collections.abc import Hashable

from ..jaxprs import compat, operations
from ..jaxprs.program import Constant, Equation, Program

# Smaller groups of draws stay where they are, next to their uses.
_MANY = 4


def in_groups(program: Program) -> list[list[Equation]]:
    """The equations in a valid order of evaluation, with similar draws grouped.

    The *round* of a draw is the length of the longest chain of draws that it depends on. Draws of
    the same round do not depend on each other.
    """
    rounds: dict[Equation, int] = {}
    after: dict[object, int] = {}
    alike: dict[Hashable, list[Equation]] = {}
    for equation in program.equations:
        number = max((after.get(atom, 0) for atom in equation.inputs), default=0)
        kind = _kind(equation)
        # Every operand of an equation in round n is computed in a round ≤ n, and by a draw only in
        # a round < n. So sorting by rounds, draws last, puts every value before its uses.
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
        # Draws come last in their round: the values that their keys need are in it or earlier.
        return rounds[group[0]], _kind(group[0]) is not None

    return sorted([*single, *groups], key=order)


def _kind(equation: Equation) -> Hashable | None:
    """A key that is equal for similar draws; `None` if the equation is not a draw."""
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
