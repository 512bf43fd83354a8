"""A recorder keeps something of a run while the time loop goes through it.

The loop knows nothing of what is kept: averages and their diagnostics (`core.averages`), births
(`estimators.birth_recorder`), draws (`tools.sample`) and paths (`tools.trace`) are recorders.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

import equinox as eqx
from jaxtyping import Array, Bool, Int, PyTree

from .alternatives import Events
from .chain import Chain, Stepper
from .estimator import Estimator
from .kernel import Step
from .parameters import Parameters

if TYPE_CHECKING:
    from .loop import Loop, Progress


class Recorder(eqx.Module):
    """A choice of what to keep of a run. Chains are the last axis of every array in a record, so
    that groups and devices can share them out; `after_update` and `after_step` see one chain.

    The loop calls `start` once; for each block `open_block`, then for each step of it
    `after_update` (for each update of the kernel), `after_step` and `add`, then `close_block`; and
    `result` at the end.
    """

    # Whether it ends a run by itself, by `finished`; if not, the loop has as many steps as were
    # asked for.
    stops: ClassVar[bool] = False

    def stages(self, estimator: Estimator) -> tuple[Estimator, ...]:
        """The estimator in the forms that it goes through, if the recorder `stops`: each has the
        same memory, and takes over once all chains have finished the stage before.
        """
        return (estimator,)

    def finished(self, chains: Chain, stage: Estimator | None = None) -> Bool[Array, ""]:
        """True if these chains have all finished a stage or, without one, the run: then nothing
        that they may still do changes the result.
        """
        raise NotImplementedError("a recorder that `stops` knows when it is `finished`")

    def needs_own_noise(self, chains: Chain) -> Bool[Array, ""] | bool:
        """False if the estimator's noise changes nothing from here on; for one that `stops`."""
        return True

    @abstractmethod
    def start(self, loop: Loop, parameters: Parameters, chains: Chain) -> PyTree:
        """The record before the first block."""

    @abstractmethod
    def open_block(self, loop: Loop, progress: Progress) -> Any:
        """The record of one block, still empty; `own` of it is what each chain carries from step
        to step, or `None`.
        """

    def after_update(self, own: PyTree, step: Step, events: Events | None) -> PyTree:
        """Return what a chain carries after an update."""
        return own

    @abstractmethod
    def after_step(
        self,
        stepper: Stepper,
        parameters: Parameters,
        chain: Chain,
        own: PyTree,
        time: Int[Array, ""],
    ) -> tuple[Chain, PyTree, PyTree]:
        """After step number `time` (from 0): the chain, what it carries, and what was seen."""

    @abstractmethod
    def add(
        self, block: Any, own: PyTree, seen: PyTree, time: Int[Array, ""], row: Int[Array, ""]
    ) -> Any:
        """The block's record with a step added: what all chains carry and what was seen of them in
        step number `time`, which is the block's number `row`.
        """

    @abstractmethod
    def close_block(
        self, loop: Loop, progress: Progress, chains: Chain, block: Any, index: Int[Array, ""]
    ) -> tuple[Chain, PyTree]:
        """The chains after a block, and the record with the block's added to it."""

    @abstractmethod
    def result(self, loop: Loop, progress: Progress) -> Any:
        """The result of the run."""
