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
    earlier states that f looks at, if it does. At the start of a chain `second` is another start
    of the same law, for an estimator that `has_second_start`.
    """

    parameters: Parameters
    kernel: Kernel
    state: State
    past: Value | None
    observable: Callable[[Parameters, PyTree, Value | None], Value]
    value: Value
    second: State | None = None

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
    num_samples: int = 1
    burn_in: int = 0
    num_chains: int = 1

    @property
    def num_parameters(self) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(self.theta))


class Estimator(eqx.Module):
    """One way to estimate `dm/dθ` beside the chain.

    Most methods are for one chain. `derivative` and `SecondOrder.second_derivative` take the
    averages of all C chains, and `prepared` takes the states of all pilot chains, chains last.

    Subclass it to write your own: `docs/extending.md`.
    """

    # Whether the primal's steps need derivatives.
    differentiates_steps: ClassVar[bool]
    # Whether f needs one, step by step.
    differentiates_f: ClassVar[bool] = True
    # Whether states carry tangents where moves depend on θ.
    carries_tangents: ClassVar[bool] = True
    # Whether it needs a second start for each chain.
    has_second_start: ClassVar[bool] = False
    # Programs of its own for the derivative, `pushed(plan, theta, key, args, direction)` and
    # `pulled(plan, theta, key, args, cotangent)`; `None` where each chain's Jacobian is known.
    both_ways: ClassVar[tuple[Callable[..., Any], Callable[..., Any]] | None] = None

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

    @property
    def pilot_steps(self) -> int:
        """Steps at least of pilot chains that `prepared` needs; 0 for none."""
        return 0

    def prepared(
        self,
        kernel: Kernel,
        parameters: Parameters,
        states: PyTree,
        observable: Callable[[Parameters, PyTree, Value | None], Value],
    ) -> Estimator:
        """The estimator with what it takes from the states where the pilot chains ended, chains
        last: they are independent of the chains that are averaged, and the same for all of them.
        """
        return self

    def recorder(self, averages: Any) -> Any:
        """The recorder of a run (`core.recorder`): the averages, or something around them."""
        return averages

    def for_value(self) -> Estimator:
        """The estimator of the value alone, for a call that is not differentiated."""
        return ValueOnly()

    def most_steps(self, num_steps: int) -> int:
        """The most steps that a chain takes, of which the first `num_steps` were asked for: more
        only where its recorder stops by itself (`Recorder.stops`).
        """
        return num_steps

    def refuse_kernel(self, kernel: Kernel, num_steps: int) -> None:
        """Refuses a kernel, or a length, that it can have no answer for; called when an expectation
        is made.
        """

    def refuse(self, kernel: Kernel, num_parameters: int, lag: int) -> None:
        """Refuses what it cannot do."""

    def second_order(self) -> SecondOrder | None:
        """The estimator that also observes what second derivatives need; `None` where they are
        refused.
        """
        return None


class SecondOrder(Estimator):
    """An estimator of `d²m/dθ²` too, from the averages of one run."""

    @property
    @abstractmethod
    def first_order(self) -> Estimator:
        """The estimator of the first derivative, by which a report names it."""

    @abstractmethod
    def second_derivative(
        self, means: PyTree, value: Float[Array, "F C"]
    ) -> Float[Array, "Q P F C"]:
        """The second derivative that each of C chains contributes, from the averages of `observe`
        and of f: along Q directions (all P parameters, or one direction) of the derivative with
        respect to each parameter.
        """

    @abstractmethod
    def along(self, direction: Float[Array, "P"]) -> SecondOrder:
        """The same for one direction only: Q = 1."""


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
