"""Estimator: what is carried beside the primal, and how it becomes a derivative."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
from jaxtyping import Array, Float, Key, PyTree

from .alternatives import Events, Transition
from .kernel import Kernel, State, Update
from .parameters import Parameters
from .values import Value


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


class Problem(eqx.Module):
    """The problem that an estimator is asked to differentiate, by forms: `theta`, one chain's state
    `x`, and f as a function `(theta, x)` of one vector.
    """

    kernel: Kernel
    theta: PyTree
    x: PyTree
    args: tuple[Any, ...]
    f: Callable[[PyTree, PyTree], Float[Array, "F"]]
    f_depends_on_theta: bool
    lag: int

    @property
    def num_parameters(self) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(self.theta))


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
        """Return what to average over the chain."""

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

    def resolve(self, problem: Problem) -> Estimator:
        """The estimator in the form that suits a problem; refuses one that it cannot do."""
        return self

    def recorder(self, averages: Any) -> Any:
        """The recorder of a run (`core.recorder`): the averages, or something around them."""
        return averages

    def both_ways(self) -> tuple[Callable[..., Any], Callable[..., Any]] | None:
        """Programs of its own for the derivative, `pushed(plan, theta, key, args, direction)` and
        `pulled(plan, theta, key, args, cotangent)`; `None` where each chain's Jacobian is known.
        """
        return None

    def refuse(self, kernel: Kernel, num_parameters: int, lag: int) -> None:
        """Refuses what it cannot do."""


class ValueOnly(Estimator):
    """No derivative: plain Metropolis–Hastings."""

    differentiates_steps: ClassVar[bool] = False
    differentiates_f: ClassVar[bool] = False

    def start(self, at):
        return None

    def advance(self, memory, at):
        return None, None

    def observe(self, memory, at):
        return None

    def derivative(self, means, value):
        raise TypeError("`ValueOnly` has no derivative.")
