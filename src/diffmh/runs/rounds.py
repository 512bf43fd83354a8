"""The rounds of a run: the same chains with new keys, to reduce the error.

All parts of a run (the expectations of a composition) have the same number of rounds, and each
round gives one result of a part. The result does not depend on how the round was divided into
stretches, nor on where it was interrupted.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Key, PyTree

from .checkpoint import Store
from .devices import Hosts
from .journal import Journal, Part
from .progress import Bar

# The shortest duration, in seconds, of a stretch with a progress bar or checkpoints: the overhead
# between two stretches is much less.
_STRETCH = 0.25


class Round(eqx.Module):
    """Blocks of steps: `advance(first, last, state)` runs some of them and returns the state and
    the result up to there. `begin` is the initial state, `form()` the structure of the result,
    `problem()` the digests of everything that determines it.
    """

    num_blocks: int
    begin: PyTree
    form: Callable[[], PyTree]
    advance: Callable[[int, int, PyTree], tuple[PyTree, PyTree]]
    problem: Callable[[], dict[str, str]]


class Course:
    """Runs the rounds of all parts of a run and stores their results."""

    def __init__(
        self, bar: Bar | None = None, store: Store | None = None, hosts: Hosts | None = None
    ):
        self.hosts = hosts or Hosts()
        self._journal, self._bar = Journal(store, self.hosts), bar
        self._watched = store is not None or (bar is not None and bar.shown)
        self._num_rounds, self._next_part, self._blocks_done = 1, 0, 0

    def again(self, num_rounds: int) -> None:
        """Start at the first part again, with this many rounds of each. Known rounds are not run
        again.
        """
        self._num_rounds, self._next_part = num_rounds, 0

    def follow(self, round_of: Callable[[int], Round]) -> list[PyTree]:
        """The results of the rounds of the next part."""
        # Parts are identified by the order in which they are requested, which is always the same in
        # a composition.
        number, self._next_part = self._next_part, self._next_part + 1
        if number == len(self._journal.parts):
            first = round_of(0)
            self._journal.part(first.begin, first.form, first.problem)
        part = self._journal.parts[number]
        while len(part.results) < self._num_rounds:
            self._run(round_of(len(part.results)), part)
        return part.results[: self._num_rounds]

    def finish(self) -> None:
        """Save what is new."""
        self._journal.finish()

    def _run(self, one: Round, part: Part) -> None:
        """Advance a part to the end of its current round."""
        self._journal.refuse_unless_writable()
        # All hosts use the same stretches: the first host's bar and clock decide.
        watched = self.hosts.agree(self._watched)
        count, result = (1 if watched else one.num_blocks), None
        while part.done < one.num_blocks:
            last, began = min(part.done + count, one.num_blocks), time.monotonic()
            # The state depends on the problem and the number of blocks, not on how they were
            # divided. So `part.done` is all that a checkpoint needs.
            state, result = one.advance(part.done, last, part.state)
            if watched:
                jax.block_until_ready(result)
                # A stretch that was compiled does not show how long the next will take.
                if time.monotonic() - began < _STRETCH:
                    count = min(4 * count, one.num_blocks)
                count = self.hosts.agree(count)
            self._tell(one, last - part.done)
            part.state, part.done = state, last
            if last < one.num_blocks and self._journal.due:
                self._journal.save()
        # A checkpoint always has either the result or the state before it.
        part.results.append(self.hosts.gathered(result))
        part.state, part.done = part.begin, 0

    def _tell(self, one: Round, blocks: int) -> None:
        self._blocks_done += blocks
        if self._bar is not None:
            self._bar.total = max(self._bar.total, one.num_blocks * self._num_rounds)
            self._bar.reached(self._blocks_done)


def round_key(key: Key[Array, ""], number: int) -> Key[Array, ""]:
    """The key of a round. The first round uses the run's own key, so that it equals a run without
    rounds. The others fold in 2³² − 1 first, which is the number of no chain.
    """
    if number == 0:
        return key
    return jax.random.fold_in(jax.random.fold_in(key, jnp.uint32(2**32 - 1)), number)
