"""Kernel: what can be sampled and differentiated.

A kernel moves a state by updates. An `Update` is one step with the decisions that it makes: one, a
block of them, or none; `Cycle`, `Repeat` and their like put updates in order. Estimators see a
kernel only through this interface.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, TypeAlias, TypeVar

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from ..base import trees, validate
from .decisions import Decision
from .parameters import Parameters
from .values import Sum, Value, without_tangents

Carry = TypeVar("Carry")
Odds: TypeAlias = Callable[..., float | Float[Array, ""]]


class State(eqx.Module):
    """A chain's place `x`; values that its kernel has computed there and will use again;
    and the tangent of `x`, for kernels whose moves depend on θ.

    For each floating leaf of `x` the tangent has an array with a leading axis of P parameters; for
    any other leaf it has `None`.
    """

    x: PyTree
    cache: PyTree = None
    tangent: PyTree = None

    @property
    def value(self) -> Value:
        """`x` with its tangent, for `Parameters.evaluate`."""
        return Value(self.x, self.tangent)

    def without_tangents(self) -> State:
        """The place and what is known there, values only: an alternative has no more."""
        return without_tangents(State(self.x, self.cache))


class Step(eqx.Module):
    """A step of an update: the states before and after, the decisions that it made, and whatever
    else its `coupled_step` and `flipped` need.
    """

    before: State
    after: State
    decisions: tuple[Decision, ...] = ()
    proposed: State | None = None


class Kernel(eqx.Module):
    """Updates in some order: a sampler that can be differentiated.

    To write your own, subclass `Update` or `BlockUpdate`; to put updates in order, use `Cycle`
    and `Repeat`.
    """

    @abstractmethod
    def updates(self) -> tuple[Update, ...]:
        """The different updates that it is made of."""

    def densities(self) -> dict[Any, Callable[..., Float[Array, "..."]]]:
        """The different log densities of its updates, `(theta, x, *args) -> values`, by what stands
        for them; of a sweep, those of all sites at once.
        """
        return {id(update.density_identity): update.log_density for update in self.updates()}

    @abstractmethod
    def start(self, parameters: Parameters, x: PyTree) -> State:
        """The state of a chain that starts at `x`."""

    @abstractmethod
    def distribute(
        self, make: Callable[[Update, Key[Array, ""]], PyTree], key: Key[Array, ""]
    ) -> PyTree:
        """`make(update, key)` for each of its updates with a key of its own: randomness for some
        number of steps ahead.
        """

    @abstractmethod
    def fold(
        self, advance: Callable[[Update, Carry, PyTree], Carry], carry: Carry, noise: PyTree
    ) -> Carry:
        """`carry = advance(update, carry, noise)` for each of its updates in turn, `noise` being
        one step's worth of `distribute`.
        """

    @property
    def draws_within_steps(self) -> bool:
        """True if a step is long and draws its randomness on the way: its noise is keys, and that
        of one step at a time is asked for.
        """
        return False

    @abstractmethod
    def without_cache(self) -> Kernel:
        """The same kernel, whose states have no cache."""

    def conditions(self, theta: PyTree, *args: Any) -> tuple[validate.Condition, ...]:
        """The ranges of its own parameters, such as a step size, and of those of its parts:
        `Proposal.conditions`. Where one does not hold, a run raises, or returns NaN under `jit`.
        """
        return ()


class Update(Kernel):
    """One step and its decisions: subclass this to differentiate a sampler of your own.

    The decisions of a step must be independent given the state before (one decision, a block of
    them, or none). All methods are for one chain and pure: whatever is random comes in as noise.
    What depends on θ is evaluated by `parameters.evaluate(function, *operands)`.
    `docs/extending.md` writes one out.
    """

    # Declared by kernels of our own, whose steps θ enters through `evaluate` alone; whoever leaves
    # it out has each step's trace searched for other paths (`core.dependence`).
    theta_enters_by_evaluate: ClassVar[bool] = False

    @abstractmethod
    def log_density(self, theta: PyTree, x: PyTree, *args: Any) -> Float[Array, ""]:
        """`log g_θ(x)`, unnormalised: the density that the update leaves invariant."""

    def prepared(self, theta: PyTree, x: PyTree, args: tuple[Any, ...]) -> Update:
        """The update, ready to draw its randomness for parameters, states and data of these forms:
        `noise` and `coupling_noise` are asked of it.
        """
        return self

    @property
    def name_in_messages(self) -> str:
        """The name that messages call it by."""
        return type(self).__name__

    @abstractmethod
    def noise(self, key: Key[Array, ""], x: PyTree, num_steps: int) -> PyTree:
        """All randomness of `num_steps` steps of the primal, leading axis `num_steps`; only the
        shapes of `x` count.
        """

    @abstractmethod
    def step(self, parameters: Parameters, state: State, noise: PyTree) -> Step:
        """A step of the primal."""

    @abstractmethod
    def coupled_step(
        self,
        parameters: Parameters,
        step: Step,
        alternative: State,
        noise: PyTree,
        coupling_noise: PyTree,
    ) -> State:
        """The step of an alternative: by itself distributed as `step`, and equal to the primal's
        once they have met.
        """

    def coupled_transition(
        self,
        parameters: Parameters,
        step: Step,
        alternative: State,
        noise: PyTree,
        coupling_noise: PyTree,
    ) -> Step:
        """`coupled_step` as a whole `Step`, with its decisions and their derivatives: `.after` is
        what `coupled_step` returns, and `flipped` applies to it with the same `noise`.

        Only a second chain that has alternatives of its own needs it (`Stationary`). If you
        override `coupled_step`, override this too; otherwise it counts as unknown
        (`knows_coupled_transition`).
        """
        raise NotImplementedError(
            f"`{type(self).__name__}` has no `coupled_transition`: define it, or use"
            " `Stationary(alternatives=0)`."
        )

    @property
    def keeps_apart(self) -> bool:
        """True if coupled chains that are at different places certainly stay so in this update,
        but for rounding.
        """
        return False

    @abstractmethod
    def flipped(self, step: Step, noise: PyTree, decision: int, candidate: Int[Array, ""]) -> State:
        """The state that the step would have led to with one draw flipped: in its decision
        `step.decisions[decision]`, whose outcome then is `.flipped_outcome(candidate)`. Values
        only: an alternative has no tangent.
        """

    def martingale_increment(
        self,
        parameters: Parameters,
        step: Step,
        alternative: State,
        alternative_after: State,
        noise: PyTree,
        coupling_noise: PyTree,
        function: Callable[[PyTree], Float[Array, "F"]],
    ) -> Sum | None:
        """`(g(y') − E g(y')) − (g(x') − E g(x'))` for a step of the primal and of an alternative,
        `E` over whatever part of the step's randomness its mean is known for; in place of g any
        function near it may be used whose mean is known. It must have mean zero given `x` and `y`.
        `None` if no mean is known: then control variates have less to work with.
        """
        return None

    def flip_changes(
        self, step: Step, noise: PyTree, function: Callable[[PyTree], Float[Array, "F"]]
    ) -> Float[Array, "F candidates"] | None:
        """`g(y_i) − g(x')` for each candidate of the step, or something near it that is cheaper.
        `None` to have them computed one by one.
        """
        return None

    def leads_nowhere(
        self, step: Step, noise: PyTree
    ) -> Bool[Array, "*candidates"] | Bool[Array, ""] | None:
        """True for each candidate of the step whose flip leads to the same state as the step
        itself, with the shape of its decision's weights (all of them flat, one decision after the
        other, if there are several). Such a flip contributes nothing, and should not take a slot
        from one that does. `None` if this is not known, which only increases the variance.

        The default handles a step with a single candidate; the update of a block may override it.
        """
        if sum(decision.num_candidates for decision in step.decisions) != 1:
            return None
        other = self.flipped(step, noise, 0, jnp.zeros((), int))
        return trees.equal(other.x, step.after.x)

    @property
    def flip_odds(self) -> Odds | tuple[Odds, ...] | None:
        """`odds(theta, x, y, *args)`: the log odds of the outcome that leads to `y`, the state
        after a flipped decision, against the outcome that led to `x`, the state after the step, up
        to terms that do not depend on θ. For an accept of a proposal without parameters and for
        Gibbs draws it is `log g(y) − log g(x)` (`DensityOdds`). An update that makes several
        decisions returns a tuple, the odds of each. `None` if they are not known: then births are
        not followed by their states, and many parameters cost more.

        The draws of a block are one decision: two of them whose flips lead to the same `y` by
        different odds need decisions of their own.

        Two updates with the same odds must return the same object, or modules of the same parts.
        """
        return None

    def refuse_start(self, x: PyTree) -> None:
        """Refuses a start state, whose values are known, that it cannot move."""

    def coupling_noise(self, key: Key[Array, ""], x: PyTree, num_steps: int) -> PyTree:
        """The randomness that `coupled_step` needs beyond the primal's."""
        return None

    @property
    def density_identity(self) -> Any:
        """The object that identifies its density: updates with the same object (by `is`) leave the
        same density invariant. If the log density is a function that your update has as a field,
        return that function. By default an update with fields (such as a temperature) identifies
        its density by itself, so that it shares it with no other update.
        """
        return self if dataclasses.fields(self) else type(self).log_density

    @property
    def cached_function(self) -> Any:
        """The function whose value its states have as `cache`, or `None`. Updates of a cycle with
        the same function, by `is`, share the cache; where they differ, none has one.
        """
        return None

    @property
    def moves_with_theta(self) -> bool:
        """True if where it moves to, not only what it decides, depends on θ: then states carry
        tangents.
        """
        return False

    @property
    def has_own_parameters(self) -> bool:
        """True if θ may hold parameters of its moves (a step size), which its stationary
        distribution does not depend on.
        """
        return False

    def start(self, parameters: Parameters, x: PyTree) -> State:
        return State(x)

    def without_cache(self) -> Kernel:
        return self

    def updates(self) -> tuple[Update, ...]:
        return (self,)

    def distribute(self, make, key):
        return make(self, key)

    def fold(self, advance, carry, noise):
        return advance(self, carry, noise)


class OfDensity(eqx.Module):
    """An update whose log density is a field, by which it is known too."""

    density: Callable[..., Float[Array, ""]]

    def log_density(self, theta: PyTree, x: PyTree, *args: Any) -> Float[Array, ""]:
        return self.density(theta, x, *args)

    @property
    def density_identity(self) -> Any:
        return self.density


def moves_with_theta(kernel: Kernel) -> bool:
    """True if states carry tangents."""
    return any(update.moves_with_theta for update in kernel.updates())


def knows_coupled_transition(update: Update) -> bool:
    """True if the update's `coupled_transition` belongs to its `coupled_step`: it is defined by the
    same class, or by one derived from it.
    """
    mro = type(update).__mro__

    def defined_at(name: str) -> int:
        return next(place for place, each in enumerate(mro) if name in vars(each))

    # A class that overrides `coupled_step` alone stands before the one that defined
    # `coupled_transition`, which then belongs to another coupling.
    place = defined_at("coupled_transition")
    return mro[place] is not Update and place <= defined_at("coupled_step")
