"""Estimator: what is carried beside the primal, and how it becomes a derivative."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import ClassVar

import equinox as eqx
from jaxtyping import Array, Bool, Float, Key, PyTree

from ..alternatives import Events, Transition
from ..kernel import Kernel, State, Update
from ..parameters import Parameters
from ..values import Value


class Observation(eqx.Module):
    """A chain where it is now, as an estimator sees it.

    `observable(parameters, x, past)` is f flattened to shape (F,), and `value` is f here, with its
    derivative at fixed decisions, or without a tangent where it has none. `past` holds the
    earlier states that f looks at, if it does.
    """

    parameters: Parameters
    kernel: Kernel
    state: State
    past: Value | None
    observable: Callable[[Parameters, PyTree, Value | None], Value]
    value: Value

    @property
    def explicit(self) -> Float[Array, "P F"] | float:
        """`∂f(θ, x)/∂θ + ∂f/∂x · ẋ`, every decision held fixed."""
        return 0.0 if self.value.tangent is None else self.value.tangent


class Block(eqx.Module):
    """A block of steps of all chains at its end, as an estimator sees it, chains last.

    `kept` is what was kept of each step, steps first; `must_end` says that nothing of the block may
    be left for later.
    """

    parameters: Parameters
    kernel: Kernel
    observable: Callable[[Parameters, PyTree, Value | None], Value]
    memory: PyTree
    kept: PyTree
    must_end: Bool[Array, ""]


class Reading(eqx.Module):
    """What a block adds: to what is `gathered` over a run and to what is `observed` over the
    samples and over each half of the watched window, stacked, both with chains last; and to what
    is `pulled` back from all chains, like θ.
    """

    gathered: PyTree = None
    observed: PyTree = None
    pulled: PyTree = None


class Estimator(eqx.Module):
    """One way to estimate `dm/dθ` beside the chain. All methods but `derivative` are for one chain.

    Subclass it to write your own: `docs/extending.md`.
    """

    # Whether the primal's steps need derivatives.
    differentiates_steps: ClassVar[bool]
    # Whether f needs one, step by step.
    differentiates_f: ClassVar[bool] = True

    @abstractmethod
    def start(self, at: Observation) -> PyTree:
        """Its memory at the start of a chain."""

    @abstractmethod
    def advance(self, memory: PyTree, at: Transition) -> tuple[PyTree, Events | None]:
        """Its memory after an update of the primal, and what happened to alternatives."""

    @abstractmethod
    def observe(self, memory: PyTree, at: Observation) -> PyTree:
        """What to average over the chain."""

    @abstractmethod
    def derivative(self, means: PyTree, value: Float[Array, "F C"]) -> Float[Array, "P F C"]:
        """The derivative that each of C chains contributes, from the averages of `observe` and
        of f.
        """

    def own_noise(self, update: Update, key: Key[Array, ""], x: PyTree, num_steps: int) -> PyTree:
        """Its own randomness for `num_steps` of `update`; the primal's is drawn apart, so the
        primal never depends on it.
        """
        return None

    def begin(self, memory: PyTree) -> PyTree:
        """Its memory before each step of a chain."""
        return memory

    def look_back(self, memory: PyTree) -> PyTree:
        """Before each step of a chain whose f looks at earlier states: the present becomes past."""
        return memory

    def note(
        self, memory: PyTree, at: Observation, shares: Float[Array, "n"]
    ) -> tuple[PyTree, PyTree]:
        """After each step of a chain: its memory, and what to keep of the step until the end of
        its block. `shares` are 1 or 0: whether the step is counted as a sample, and, if a report
        is wanted, in which half of the watched window it lies.
        """
        return memory, None

    def read(self, block: Block) -> tuple[PyTree, Reading | None]:
        """At the end of a block, of all chains: the chains' memory, and what was read."""
        return block.memory, None

    def sized(self, kernel: Kernel, num_parameters: int, lag: int) -> Estimator:
        """The same estimator in the form that suits so many parameters."""
        return self

    def refuse(self, kernel: Kernel, num_parameters: int, lag: int) -> None:
        """Refuses what it cannot do."""


class ValueOnly(Estimator):
    """No derivative: plain Metropolis–Hastings."""

    differentiates_steps: ClassVar[bool] = False

    def start(self, at):
        return None

    def advance(self, memory, at):
        return None, None

    def observe(self, memory, at):
        return None

    def derivative(self, means, value):
        raise TypeError("`ValueOnly` has no derivative.")
