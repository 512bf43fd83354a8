"""The journal of a long run: its results so far and the state to continue from, in memory and on
disk.

A run consists of parts (the expectations of a composition; `sample` and `optimise` have one). A
part has a state, which is advanced by several blocks at a time, and the results so far. Between
two advances that is all, so a checkpoint saved there lets the run continue with the same digits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import PyTree

from .checkpoint import Record, Store, restored
from .devices import Hosts, as_numpy


class Part:
    """The results so far, the state for the next one, and the number of blocks that led to it from
    `begin`.
    """

    def __init__(self, begin: PyTree):
        self.begin = self.state = begin
        self.results: list[PyTree] = []
        self.done = 0
        self.problem: dict[str, str] = {}

    @property
    def place(self) -> tuple[int, int]:
        return len(self.results), self.done

    def restore(self, record: Record, form: PyTree) -> None:
        """Continue from a saved record; `form` is the structure of a result."""
        self.results = [restored(row, form) for row in zip(*record.results, strict=True)]
        self.done = record.done
        if record.state:
            arrays, rest = eqx.partition(self.begin, _is_array)
            self.state = eqx.combine(restored(record.state, arrays), rest)

    def record(self, hosts: Hosts) -> Record:
        rows = zip(*map(jax.tree.leaves, self.results), strict=True)
        # The initial state follows from the problem and is not saved. Compared by identity: a state
        # that only equals the initial one was reached, and is saved.
        state = None if self.state is self.begin else hosts.gathered(self.state)
        leaves = map(as_numpy, jax.tree.leaves(eqx.filter(state, _is_array)))
        return Record(self.problem, [np.stack(leaf) for leaf in rows], list(leaves), self.done)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray)


class Journal:
    """The parts of a run, in the order in which they were begun. With a store, they are restored
    from its newest checkpoint, and saved when a checkpoint is due.
    """

    def __init__(self, store: Store | None = None, hosts: Hosts | None = None):
        self.store, self.hosts = store, hosts or Hosts()
        self.parts: list[Part] = []
        self._found = [] if store is None else store.load()
        self.is_new = not self._found
        self._saved: list[tuple[int, int]] = []

    def part(
        self, begin: PyTree, form: Callable[[], PyTree], problem: Callable[[], dict[str, str]]
    ) -> Part:
        """Begin the next part, or continue it from its saved record. Raises `ValueError` if the
        record is of another problem.
        """
        part, number = Part(begin), len(self.parts)
        if self.store is not None:
            part.problem = problem()
            # A run that was killed before this part began has saved no record of it.
            if number < len(self._found):
                where = f" of expectation {number + 1}" if number else ""
                found = self._found[number]
                self.store.refuse_another(part.problem, found.problem, where)
                part.restore(found, form())
        self.parts.append(part)
        self._saved.append(part.place)
        return part

    def refuse_unless_writable(self) -> None:
        if self.store is not None:
            self.store.refuse_unless_writable()

    @property
    def due(self) -> bool:
        """True if a checkpoint is due. The first host's clock decides, since all hosts take part in
        `save`, which gathers their arrays.
        """
        return self.store is not None and bool(self.hosts.agree(self.store.due))

    def save(self) -> None:
        """Save all parts, including those of the newest checkpoint that are not yet reached."""
        if self.store is not None:
            # If a run is interrupted before it reaches these again, they must not be lost.
            later = self._found[len(self.parts) :]
            self.store.save([*(part.record(self.hosts) for part in self.parts), *later])
            self._saved = [part.place for part in self.parts]

    def finish(self) -> None:
        """Save if anything is new since the last checkpoint."""
        if self._saved != [part.place for part in self.parts]:
            self.save()
