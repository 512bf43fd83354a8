"""The journal of a long run: what it has found and where it goes on from, in memory and on disk.

A run is made of parts (the expectations of a composition; `sample` and `optimise` have one). A part
is a state, which is taken on in stretches of blocks, and the results that came of it. Between two
stretches that is all there is, so a checkpoint can be saved there and the run go on from it with
the same digits.
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
    """The results so far, the state from which the next one comes, and how many blocks led to it
    from `begin`.
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
        """Go on from what was saved; `form` is a result's."""
        self.results = [restored(row, form) for row in zip(*record.results, strict=True)]
        self.done = record.done
        if record.state:
            arrays, rest = eqx.partition(self.begin, _is_array)
            self.state = eqx.combine(restored(record.state, arrays), rest)

    def record(self, hosts: Hosts) -> Record:
        rows = zip(*map(jax.tree.leaves, self.results), strict=True)
        # The state at the beginning follows from the problem, and is not saved.
        # By identity: a state that only looks like the beginning was reached, and is saved.
        state = None if self.state is self.begin else hosts.gathered(self.state)
        leaves = map(as_numpy, jax.tree.leaves(eqx.filter(state, _is_array)))
        return Record(self.problem, [np.stack(leaf) for leaf in rows], list(leaves), self.done)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray)


class Journal:
    """The parts of a run, in the order in which they were begun. With a store, they are taken up
    from its newest checkpoint, and saved when one is due.
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
        """Begin the next part, or go on with it as it was saved. Raises `ValueError` if what was
        saved is of another problem.
        """
        part, number = Part(begin), len(self.parts)
        if self.store is not None:
            part.problem = problem()
            # A run that was killed before this part began has saved nothing of it.
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
        """True if it is time for a checkpoint: by the first host's clock, since all of them come to
        `save`, which gathers their arrays.
        """
        return self.store is not None and bool(self.hosts.agree(self.store.due))

    def save(self) -> None:
        """Save all parts, with those of the newest checkpoint that have not been reached yet."""
        if self.store is not None:
            # A run that was interrupted before it reached these again must not lose them.
            later = self._found[len(self.parts) :]
            self.store.save([*(part.record(self.hosts) for part in self.parts), *later])
            self._saved = [part.place for part in self.parts]

    def finish(self) -> None:
        """Save what is new since the last checkpoint, if anything is."""
        if self._saved != [part.place for part in self.parts]:
            self.save()
