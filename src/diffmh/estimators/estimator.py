"""Estimator: what is carried beside the primal, and how it becomes a derivative."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import ClassVar

import equinox as eqx
from jaxtyping import Array, Float, Key, PyTree

from ..alternatives import Events
from ..kernel import AcceptReject, Kernel, State, Step
from ..parameters import Dual, Parameters

# The observed function at one parameter setting: `x -> f(θ, x)` flattened to shape (F,), with ∂f/∂θ
# if f depends on θ.
Observable = Callable[[Parameters, PyTree], Dual]


class Estimator(eqx.Module):
    """One way to estimate `dm/dθ` beside the chain. All methods but `derivative` are for one
    chain.
    """

    # Whether the primal's steps need `∂ log r / ∂θ`.
    differentiates_steps: ClassVar[bool]

    @abstractmethod
    def draw(self, step: AcceptReject, key: Key[Array, ""], x: PyTree, num_steps: int) -> PyTree:
        """Its own randomness for `num_steps` of `step`; the primal's is drawn apart, so the
        primal never depends on it.
        """

    @abstractmethod
    def start(self, parameters: Parameters, kernel: Kernel, state: State) -> PyTree:
        """Its memory at the start of a chain."""

    @abstractmethod
    def advance(
        self,
        parameters: Parameters,
        kernel: AcceptReject,
        step: Step,
        memory: PyTree,
        noise: PyTree,
        own_noise: PyTree,
    ) -> tuple[PyTree, Events | None]:
        """Its memory after a step of the primal, and what happened."""

    @abstractmethod
    def observe(
        self,
        parameters: Parameters,
        kernel: Kernel,
        observable: Observable,
        value: Dual,
        state: State,
        memory: PyTree,
    ) -> PyTree:
        """What to average over the chain."""

    @abstractmethod
    def derivative(self, means: PyTree, value: Float[Array, "F C"]) -> Float[Array, "P F C"]:
        """The derivative that each of C chains contributes, from the averages of `observe` and
        of f.
        """

    def refuse(self, num_parameters: int) -> None:
        """Refuses what it cannot do."""


class ValueOnly(Estimator):
    """No derivative: plain Metropolis–Hastings."""

    differentiates_steps: ClassVar[bool] = False

    def draw(self, step, key, x, num_steps):
        return None

    def start(self, parameters, kernel, state):
        return None

    def advance(self, parameters, kernel, step, memory, noise, own_noise):
        return None, None

    def observe(self, parameters, kernel, observable, value, state, memory):
        return None

    def derivative(self, means, value):
        raise TypeError("`ValueOnly` has no derivative.")


def explicit(value: Dual) -> Float[Array, "P F"] | float:
    """`∂f(θ, x)/∂θ` at fixed x: zero where f does not depend on θ."""
    return 0.0 if value.gradient is None else value.gradient
