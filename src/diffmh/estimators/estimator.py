"""Estimator: what is carried beside the primal, and how it becomes a derivative."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import ClassVar

import equinox as eqx
from jaxtyping import Array, Float, Key, PyTree

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


class Estimator(eqx.Module):
    """One way to estimate `dm/dθ` beside the chain. All methods but `derivative` are for one chain.

    Subclass it to write your own: `docs/extending.md`.
    """

    # Whether the primal's steps need derivatives.
    differentiates_steps: ClassVar[bool]

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
