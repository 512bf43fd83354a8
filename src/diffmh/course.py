"""course: a long run as it is followed, in stretches: with a bar, and with checkpoints to go on
from.

A run is made of parts (the expectations of a composition), and each part of rounds (the same chains
anew, with keys of their own, for a smaller error). A round's result does not depend on how it was
cut into stretches, nor on where it was interrupted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key, PyTree

from ._sharding import Hosts
from .bar import Bar
from .checkpoint import Store, restored

# A stretch is about so many seconds long: what is done between two of them is nothing to that.
_STRETCH = 0.25


class Round(eqx.Module):
    """Blocks of steps to be taken: `advance(first, last, progress)` takes some, and gives how far
    it has come with the result up to there; `begin` is the progress at the start, `form()` the
    result's form. `problem()` says what it is that is run.
    """

    num_blocks: int
    begin: PyTree
    form: Callable[[], PyTree]
    advance: Callable[[int, int, PyTree], tuple[PyTree, PyTree]]
    problem: Callable[[], dict[str, str]]


class _Place(eqx.Module):
    """In the middle of a round."""

    part: int
    number: int
    block: int
    leaves: list[np.ndarray]


class Course:
    """Follows the rounds of all parts of a run, and remembers their results."""

    def __init__(
        self, bar: Bar | None = None, store: Store | None = None, hosts: Hosts | None = None
    ):
        self.num_rounds, self.hosts = 1, hosts or Hosts()
        self._bar, self._store = bar, store
        self._results: dict[int, list[PyTree]] = {}
        self._read: dict[int, list[list[np.ndarray]]] = {}
        self._problems: dict[str, str] = {}
        self._place: _Place | None = None
        self._part, self._blocks_done = 0, 0
        self._saved_problems: dict[str, str] | None = None
        if store is not None:
            self._load(store)

    def again(self, num_rounds: int) -> None:
        """From the first part on, with so many rounds of each; those that are known are not run
        again.
        """
        self.num_rounds, self._part = num_rounds, 0

    def follow(self, round_of: Callable[[int], Round]) -> list[PyTree]:
        """The results of the rounds of the next part."""
        part, self._part = self._part, self._part + 1
        first = round_of(0)
        if self._store is not None and f"part {part}" not in self._problems:
            self._check(part, first.problem())
        known = self._results.setdefault(part, [])
        if part in self._read:
            form = first.form()
            known += [restored(leaves, form) for leaves in self._read.pop(part)]
        for number in range(len(known), self.num_rounds):
            known.append(self._run(round_of(number) if number else first, part, number))
        return known[: self.num_rounds]

    def finish(self) -> None:
        """All is done: what is known is kept, if some of it is new."""
        if self._store is not None and self._blocks_done:
            self._save(None)

    def _run(self, one: Round, part: int, number: int) -> PyTree:
        if self._store is not None:
            self._store.refuse_unless_writable()
        progress, done, result = one.begin, 0, None
        place = self._place
        if place is not None and (place.part, place.number) == (part, number):
            progress, done = restored(place.leaves, one.begin), place.block
        watched = self._store is not None or (self._bar is not None and self._bar.shown)
        # Who waits for a clock of its own loses the others: the first host's counts.
        watched = self.hosts.agree(watched)
        count = 1 if watched else one.num_blocks
        while done < one.num_blocks:
            last = min(done + count, one.num_blocks)
            began = time.monotonic()
            progress, result = one.advance(done, last, progress)
            if watched:
                jax.block_until_ready(result)
                # A stretch that had to be compiled tells nothing of how long the next will be.
                count = min(4 * count, one.num_blocks) if _short(began) else count
                count = self.hosts.agree(count)
            self._tell(one, last - done)
            done = last
            if self._store is not None and done < one.num_blocks:
                self._keep(self._store, part, number, done, progress)
        return self.hosts.gathered(result)

    def _keep(self, store: Store, part: int, number: int, done: int, progress: PyTree) -> None:
        """A checkpoint in the middle of a round, if it is time for one."""
        if self.hosts.agree(store.due):
            leaves = map(np.asarray, jax.tree.leaves(self.hosts.gathered(progress)))
            self._save(_Place(part, number, done, list(leaves)))

    def _tell(self, one: Round, blocks: int) -> None:
        self._blocks_done += blocks
        if self._bar is not None:
            self._bar.total = max(self._bar.total, one.num_blocks * self.num_rounds)
            self._bar.reached(self._blocks_done)

    def _save(self, place: _Place | None) -> None:
        assert self._store is not None
        known = {
            part: [jax.tree.leaves(one) for one in rounds] for part, rounds in self._results.items()
        }
        groups: dict[str, list[Any]] = {
            f"results {part}": [np.stack(leaves) for leaves in zip(*rounds, strict=True)]
            for part, rounds in (known | self._read).items()
            if rounds
        }
        if place is not None:
            groups["place"] = [np.array([place.part, place.number, place.block])]
            groups["progress"] = place.leaves
        self._store.save(self._problems, groups)

    def _load(self, store: Store) -> None:
        found = store.load()
        if found is None:
            return
        self._saved_problems, groups = found
        for name, leaves in groups.items():
            if name.startswith("results "):
                rounds = [list(leaf) for leaf in leaves]
                self._read[int(name.split()[1])] = [list(one) for one in zip(*rounds, strict=True)]
        if "place" in groups:
            part, number, block = map(int, groups["place"][0])
            self._place = _Place(part, number, block, groups["progress"])

    def _check(self, part: int, problem: dict[str, str]) -> None:
        """Refuses to go on with a run of another problem."""
        where = f" of expectation {part + 1}" if part else ""
        named = {f"{name}{where}": digest for name, digest in problem.items()}
        if self._saved_problems is not None:
            assert self._store is not None
            of_part = lambda name: " of expectation " in name
            saved = {
                name: digest
                for name, digest in self._saved_problems.items()
                if (name.endswith(where) if part else not of_part(name))
                and not name.startswith("part ")
            }
            # Of a run that was killed before this part began, nothing is known of it.
            if saved or part == 0:
                self._store.refuse_another(named, saved)
        self._problems |= named | {f"part {part}": "known"}


def _short(began: float) -> bool:
    return time.monotonic() - began < _STRETCH


def round_key(key: Key[Array, ""], number: int) -> Key[Array, ""]:
    """The key of a round: of the first the run's own, so that it is the run without rounds. No
    chain has the number 2³² − 1.
    """
    if number == 0:
        return key
    return jax.random.fold_in(jax.random.fold_in(key, jnp.uint32(2**32 - 1)), number)
