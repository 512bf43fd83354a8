"""The generator by itself: what it promises to cover is covered."""

from __future__ import annotations

import itertools

import pytest
from arrays import (
    Absent,
    Excluded,
    Refused,
    Table,
    covering_array,
    forbidden,
    groups_of,
    required,
    tuples_of,
    without_repeats,
)
from options import TABLE, array

SMALL = Table(
    factors={"a": (1, 2, 3), "b": ("x", "y"), "c": (True, False), "d": (0, 1, 2)},
    rules=(
        Refused({"a": (3,), "b": ("y",)}, ValueError, "a"),
        Absent({"b": ("x",)}, ("c",)),
        Excluded(lambda row: row["a"] + row["d"] < 5, ("a", "d")),
    ),
    triples=(("a", "b", "c"),),
    rare=frozenset({("d", 1)}),
    together=lambda row: [row],
    cost=lambda row: 1.0 + row["d"],
    cheaper=lambda row: (row | {"d": d} for d in (0, 1, 2)),
)


def rows_of(table: Table) -> list[dict]:
    """Every row that the rules allow, one by one."""
    absent = [rule for rule in table.rules if isinstance(rule, Absent)]
    may_lack = {name for rule in absent for name in rule.factors}
    names = list(table.factors)
    levels = [(*table.factors[name], *[None] * (name in may_lack)) for name in names]
    every = (dict(zip(names, row, strict=True)) for row in itertools.product(*levels))

    def exists(row, name):
        return not any(
            name in rule.factors and all(row[key] in found for key, found in rule.when.items())
            for rule in absent
        )

    allowed = (row for row in every if not forbidden(table.rules, row))
    return [row for row in allowed if all((row[n] is not None) == exists(row, n) for n in names)]


@pytest.mark.parametrize("strength", [2, 3])
def test_small_table(strength):
    """Against enumeration: all that some row may have is in the array, and what is refused in a
    row for it.
    """
    every, groups = covering_array(SMALL, strength), groups_of(SMALL, strength)
    found = without_repeats(SMALL, every, strength)
    possible = rows_of(SMALL)
    assert all(row in possible for row in found.rows)
    wanted = {
        levels
        for row in possible
        for levels in tuples_of(row, groups)
        if None not in dict(levels).values()
    }
    covered = {levels for row in found.rows for levels in tuples_of(row, groups)}
    assert wanted <= covered
    assert sum(map(SMALL.cost, found.rows)) <= sum(map(SMALL.cost, every.rows))
    assert found.refusals and all(row["a"] == 3 and row["b"] == "y" for row, _ in found.refusals)
    assert len(found.rows) < len(possible) or strength == 3


def test_every_pair_of_options():
    """Of the core's: each is covered, or is refused in a row of its own, does not exist or is too
    long.
    """
    found, groups = array(thorough=False), groups_of(TABLE, 2)
    rows = [one for row in found.rows for one in TABLE.together(row)]
    assert not any(forbidden(TABLE.rules, row) for row in rows)
    covered = {levels for row in rows for levels in tuples_of(row, groups)}
    refused = {levels for row, _ in found.refusals for levels in tuples_of(row, groups)}
    left = [levels for levels in required(TABLE.factors, groups) if levels not in covered | refused]
    known = [rule for rule in TABLE.rules if not isinstance(rule, Refused)]
    for levels in left:
        apart = [rule for rule in known if rule.forbids(dict(levels))]
        named = {name for name, _ in levels}
        options = {name for rule in known if isinstance(rule, Absent) for name in rule.factors}
        # Where two refusals meet, either may come first: each has a row of its own elsewhere.
        several = sum(rule.forbids(dict(levels)) for rule in TABLE.rules) > 1
        assert apart or several or named & options, levels
    # Each refusal is in some row.
    assert {id(rule) for _, rule in found.refusals} | {id(rule) for rule in known} >= {
        id(rule) for rule in TABLE.rules if isinstance(rule, Refused) and len(rule.when) == 2
    }
