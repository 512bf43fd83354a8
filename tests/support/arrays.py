"""Covering arrays: rows of options in which every pair, or triple, of levels occurs together.

A *rule* says which levels cannot meet, and why: a combination is `Refused` by the library, `Absent`
(an option that does not exist there has the level None) or `Excluded` (too dear to run). A tuple of
levels that no row may have because of a `Refused` rule becomes a row that tests the refusal.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

Level = Any
Row = dict[str, Level]
Pairs = tuple[tuple[str, Level], ...]
Factors = Mapping[str, Sequence[Level]]


class Refused(NamedTuple):
    """The library raises `error`, with a message that matches, where all of `when` holds."""

    when: Mapping[str, Sequence[Level]]
    error: type[Exception]
    message: str

    def forbids(self, row: Row) -> bool:
        return all(name in row and row[name] in levels for name, levels in self.when.items())


class Absent(NamedTuple):
    """Where all of `when` holds, the factors do not exist."""

    when: Mapping[str, Sequence[Level]]
    factors: Sequence[str]

    def forbids(self, row: Row) -> bool:
        here = all(name in row and row[name] in levels for name, levels in self.when.items())
        return here and any(row.get(name) is not None for name in self.factors)


class Excluded(NamedTuple):
    """Not run: `forbids` of a row that may lack factors."""

    unless: Callable[[Row], bool]
    factors: Sequence[str]

    def forbids(self, row: Row) -> bool:
        return all(name in row for name in self.factors) and not self.unless(row)


Rule = Refused | Absent | Excluded


class Table(NamedTuple):
    """Factors with their levels, the cheapest first; rules; the factors whose triples are covered
    beside all pairs; levels that a row has only if it must; the rows that one row stands for,
    since they share its programs; what it takes to run it, and rows much like it that may take
    less.
    """

    factors: Factors
    rules: Sequence[Rule] = ()
    triples: Sequence[tuple[str, ...]] = ()
    rare: frozenset[tuple[str, Level]] = frozenset()
    together: Callable[[Row], Iterable[Row]] = lambda row: [row]
    cost: Callable[[Row], float] = lambda row: 1.0
    cheaper: Callable[[Row], Iterable[Row]] = lambda row: ()


# Rows that are tried for each that is taken.
_CANDIDATES = 14


class Array(NamedTuple):
    rows: list[Row]
    refusals: list[tuple[Row, Refused]]


def in_part(rows: list, part: str | None) -> list:
    """Those of part i of n, for `i/n`."""
    if part is None:
        return rows
    index, count = map(int, part.split("/"))
    return rows[index - 1 :: count]


def forbidden(rules: Sequence[Rule], row: Row) -> bool:
    return any(rule.forbids(row) for rule in rules)


def required(factors: Factors, groups: Iterable[tuple[str, ...]]) -> dict[Pairs, None]:
    """Every combination of levels of every group of factors, in order."""
    found: dict[Pairs, None] = {}
    for group in groups:
        for levels in itertools.product(*(factors[name] for name in group)):
            found[tuple(zip(group, levels, strict=True))] = None
    return found


def groups_of(table: Table, strength: int) -> list[tuple[str, ...]]:
    """The table's triples and all pairs, or all groups of `strength` factors."""
    if strength == 2:
        return [*table.triples, *itertools.combinations(table.factors, 2)]
    return list(itertools.combinations(table.factors, strength))


class Completions:
    """Whole rows that contain a given one and that the rules allow."""

    def __init__(self, table: Table, rules: Sequence[Rule]):
        self._table, self._rules = table, rules
        self._absent = [rule for rule in rules if isinstance(rule, Absent)]
        self._may_lack = {name for rule in self._absent for name in rule.factors}
        # What decides whether others exist comes first.
        deciding = {name for rule in self._absent for name in rule.when}
        self._order = sorted(table.factors, key=lambda name: name not in deciding)
        # A level can only break the rules that know its factor.
        self._about = {
            name: [rule for rule in rules if name in _names(rule)] for name in table.factors
        }

    def of(self, row: Row, gain: Callable[[Row, str, Level], int]) -> Iterator[Row]:
        """Each factor's levels are tried from the greatest gain down; `row` itself is allowed."""
        return self._from(row, [name for name in self._order if name not in row], gain)

    def forbids(self, row: Row) -> bool:
        return forbidden(self._rules, row)

    def first(self, row: Row, gain=lambda *_: 0) -> Row | None:
        return next(self.of(row, gain), None)

    def _from(self, row: Row, open_: list[str], gain) -> Iterator[Row]:
        if not open_:
            yield row
            return
        name, *others = open_
        levels = [*self._table.factors[name], *[None] * (name in self._may_lack)]
        allowed = []
        for number, level in enumerate(levels):
            new = row | {name: level}
            if forbidden(self._about[name], new):
                continue
            if level is None and not _is_absent(self._absent, new, name):
                continue
            rare = (name, level) in self._table.rare
            allowed.append((rare, -gain(row, name, level), number, new))
        for *_, new in sorted(allowed, key=lambda one: one[:3]):
            yield from self._from(new, others, gain)


def _names(rule: Rule) -> set[str]:
    """The factors that a rule looks at."""
    return {*getattr(rule, "when", ()), *getattr(rule, "factors", ())}


def _is_absent(absent: Sequence[Absent], row: Row, name: str) -> bool:
    return any(
        name in rule.factors and all(row.get(key) in levels for key, levels in rule.when.items())
        for rule in absent
    )


class _Missing:
    """What is not covered yet, in order: tuples of levels by the numbers of the levels. A symmetric
    table of pairs and one of triples say what a level would add to a row in one sum.
    """

    def __init__(self, table: Table, groups: Sequence[tuple[str, ...]]):
        levels = [(name, level) for name in table.factors for level in table.factors[name]]
        absent = [(name, None) for name in table.factors]
        self._number = {one: number for number, one in enumerate(dict.fromkeys(levels + absent))}
        self._names = list(table.factors)
        places = {name: place for place, name in enumerate(self._names)}
        self._groups = {
            size: np.array([[places[name] for name in one] for one in groups if len(one) == size])
            for size in {len(group) for group in groups}
        }
        self._tables = {size: np.zeros((len(self._number),) * size, bool) for size in self._groups}
        self._seeds: dict[tuple[int, ...], Pairs] = {}

    def __bool__(self) -> bool:
        return bool(self._seeds)

    def add(self, seed: Pairs) -> None:
        numbers = tuple(self._number[one] for one in seed)
        self._seeds[numbers] = seed
        self._mark(numbers, True)

    def __contains__(self, seed: Pairs) -> bool:
        return tuple(self._number[one] for one in seed) in self._seeds

    def seeds(self) -> list[Pairs]:
        return list(self._seeds.values())

    def gain(self, row: Row, name: str, level: Level) -> int:
        """How many more the row covers once it has the level."""
        here, own = [self._number[one] for one in row.items()], self._number[name, level]
        found = 0
        if 2 in self._tables:
            found += int(np.count_nonzero(self._tables[2][own][here]))
        if 3 in self._tables:
            found += int(np.count_nonzero(self._tables[3][own][here][:, here])) // 2
        return found

    def covered(self, rows: Iterable[Row]) -> set[tuple[int, ...]]:
        found: set[tuple[int, ...]] = set()
        for row in rows:
            numbers = np.array([self._number[name, row[name]] for name in self._names])
            for size, groups in self._groups.items():
                own = numbers[groups]
                found.update(map(tuple, own[self._tables[size][tuple(own.T)]].tolist()))
        return found

    def remove(self, found: Iterable[tuple[int, ...]]) -> None:
        for numbers in found:
            del self._seeds[numbers]
            self._mark(numbers, False)

    def _mark(self, numbers: tuple[int, ...], value: bool) -> None:
        for order in itertools.permutations(numbers):
            self._tables[len(numbers)][order] = value


def covering_array(table: Table, strength: int = 2) -> Array:
    """Greedy and deterministic: of several rows, each around a tuple that is not yet covered, the
    one that covers most is taken, until nothing is left.
    """
    groups = groups_of(table, strength)
    completions = Completions(table, table.rules)
    feasible, refusals = _feasible(table, groups, completions)
    missing = _Missing(table, groups)
    for seed in feasible:
        missing.add(seed)
    rows: list[Row] = []
    while missing:
        seeds = missing.seeds()
        tried = seeds[:: -(-len(seeds) // _CANDIDATES)]
        found = [next(completions.of(dict(seed), missing.gain)) for seed in tried]
        covered = [missing.covered(table.together(row)) for row in found]
        best = max(range(len(found)), key=lambda number: len(covered[number]))
        rows.append(found[best])
        missing.remove(covered[best])
    return Array(rows, refusals)


def without_repeats(table: Table, array: Array, strength: int = 2) -> Array:
    """Of each row, the dearest first, the cheapest form that covers what no other row does."""
    groups = groups_of(table, strength)
    wanted = set(required(table.factors, groups))

    def covered(row):
        every = (levels for one in table.together(row) for levels in tuples_of(one, groups))
        return wanted.intersection(every)

    def cheapest(row, alone):
        """Of the forms that cost less, if there are any."""
        others = [one for one in table.cheaper(row) if table.cost(one) < table.cost(row)]
        allowed = [one for one in others if not forbidden(table.rules, one)]
        return min((one for one in allowed if alone <= covered(one)), key=table.cost, default=None)

    rows = sorted(array.rows, key=table.cost, reverse=True)
    times = collections.Counter(levels for row in rows for levels in covered(row))
    kept = []
    for row in rows:
        times.subtract(covered(row))
        alone = {levels for levels in covered(row) if not times[levels]}
        if not alone:
            continue
        while form := cheapest(row, alone):
            row = form
        kept.append(row)
        times.update(covered(row))
    return array._replace(rows=kept)


def _feasible(
    table: Table, groups: list[tuple[str, ...]], completions: Completions
) -> tuple[list[Pairs], list[tuple[Row, Refused]]]:
    """The tuples that some row may have, and rows for what is refused, each of which tests as many
    of the other tuples as it can.
    """
    found, known, untested = [], set(), _Missing(table, groups)
    for seed in required(table.factors, groups):
        row = None
        if seed not in known and not completions.forbids(dict(seed)):
            row = completions.first(dict(seed))
        if row is not None:
            known.update(tuples_of(row, groups))
        if seed in known:
            found.append(seed)
        else:
            untested.add(seed)
    refusals = []
    without = [
        (rule, Completions(table, [other for other in table.rules if other is not rule]))
        for rule in table.rules
        if isinstance(rule, Refused)
    ]
    for seed in untested.seeds():
        refusal = None
        if seed in untested:
            refusal = _refused_row(table.factors, dict(seed), without, untested.gain)
        if refusal is not None:
            refusals.append(refusal)
            untested.remove(untested.covered([refusal[0]]))
    return found, refusals


def _levels(row: Row, group: tuple[str, ...]) -> Pairs:
    return tuple((name, row[name]) for name in group)


def tuples_of(row: Row, groups: Iterable[tuple[str, ...]]) -> Iterator[Pairs]:
    for group in groups:
        yield _levels(row, group)


def _refused_row(factors: Factors, seed: Row, without, gain) -> tuple[Row, Refused] | None:
    """A row with these levels that one refusal alone forbids, if a refusal is the reason."""
    for rule, completions in without:
        # A rule may know levels that this table does not have.
        free = {
            name: [level for level in levels if level in factors[name]]
            for name, levels in rule.when.items()
            if name not in seed
        }
        if not all(seed[name] in levels for name, levels in rule.when.items() if name in seed):
            continue
        for levels in itertools.product(*free.values()):
            start = seed | dict(zip(free, levels, strict=True))
            row = None if completions.forbids(start) else completions.first(start, gain)
            if row is not None:
                return row, rule
    return None
