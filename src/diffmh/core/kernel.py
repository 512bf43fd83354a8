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
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, PyTree

from ..base import trees, validate
from ..base.validate import Checked
from .decisions import Acceptance, Bernoulli, Decision
from .parameters import Parameters
from .values import Value

Carry = TypeVar("Carry")
Odds: TypeAlias = Callable[..., float | Float[Array, ""]]


class State(eqx.Module):
    """Where a chain is, `x`; what its kernel has computed there, so as not to compute it twice;
    and the tangent of `x`, for kernels whose moves depend on θ.

    A tangent has the P parameters leading at each float of `x`, and `None` elsewhere.
    """

    x: PyTree
    cache: PyTree = None
    tangent: PyTree = None

    @property
    def value(self) -> Value:
        """`x` with its tangent, for `Parameters.evaluate`."""
        return Value(self.x, self.tangent)


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
    ) -> Float[Array, "F"] | None:
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

    @property
    def flip_odds(self) -> Odds | tuple[Odds, ...] | None:
        """`odds(theta, x, y, *args)`: the log odds of the outcome that leads to `y`, where a
        flipped decision has led, against that which led to `x`, where the step led, up to what
        does not depend on θ. For an accept of a proposal without parameters and for Gibbs draws it
        is `log g(y) − log g(x)` (`DensityOdds`). An update that makes several decisions returns a
        tuple, the odds of each. `None` if they are not known: then births are not followed by
        their states, and many parameters cost more.

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
        """The object that its density is known by: updates with the same object, by `is`, leave
        the same density invariant. Return the function if it is a field of yours. An update that
        holds something else, such as a temperature, is known by itself unless it says otherwise.
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


class BlockUpdate(Update):
    """An update that is known by its decisions: `decide` makes them and `result` is where they
    lead. Alternatives decide with the same noise.

    Subclass it for a block of sites, a Gibbs draw, or any step whose best coupling is common
    random numbers.
    """

    @abstractmethod
    def decide(self, parameters: Parameters, state: State, noise: PyTree) -> Decision:
        """The decisions of a step from `state`, such as `Acceptance.draw(uniform, log_ratio)`."""

    @abstractmethod
    def result(self, x: PyTree, noise: PyTree, outcome: Array) -> PyTree:
        """The state that an outcome of the decisions leads to from `x`."""

    def step(self, parameters, state, noise):
        decision = self._decided(parameters, state, noise)
        move = lambda x: self.result(x, noise, decision.outcome)
        after = parameters.follow(move, state.value)
        return Step(state, State(after.primal, None, after.tangent), (decision,))

    def coupled_step(self, parameters, step, alternative, noise, coupling_noise):
        decision = self._decided(parameters, alternative, noise)
        return State(self.result(alternative.x, noise, decision.outcome))

    def _decided(self, parameters: Parameters, state: State, noise: PyTree) -> Decision:
        decision = self.decide(parameters, state, noise)
        if not isinstance(decision, Decision):
            raise TypeError(
                f"`{type(self).__name__}.decide` must return one decision, such as"
                " `Acceptance.draw(uniforms, log_ratios)`, which may be a block of draws; got"
                f" {_described(decision)}. For several decisions of different kinds derive from"
                " `Update`."
            )
        return decision

    def flipped(self, step, noise, decision, candidate):
        outcome = step.decisions[decision].flipped_outcome(candidate)
        return State(self.result(step.before.x, noise, outcome))

    def block(self, x: PyTree) -> Any:
        """The entries of `x` that its decisions set, one each and in their order, as floats; `None`
        if they are not so. Only control variates ask.
        """
        return None

    def with_block(self, x: PyTree, block: Float[Array, "*D"]) -> PyTree:
        """`x` with other entries there, which may be averages over several states."""
        raise NotImplementedError("a kernel whose `block` is known must know `with_block`")

    def expected_block(self, parameters: Parameters, x: PyTree, noise: PyTree) -> Array:
        """Its mean after a step from x, over the decisions or more of the randomness."""
        decision = self.decide(parameters.value_only(), State(x), noise)
        assert isinstance(decision, Acceptance | Bernoulli), "its entries have two values"
        p = decision.probability
        off, on = (self.block(self.result(x, noise, outcome)) for outcome in (p < 0, p >= 0))
        return off + p * (on - off)

    def martingale_increment(
        self, parameters, step, alternative, alternative_after, noise, coupling_noise, function
    ):
        """g, linear in the block about the state before: exact if g is linear in it."""
        if self.block(step.before.x) is None:
            return None

        def one(before, after):
            change = self.block(after) - self.expected_block(parameters, before, noise)
            slopes = self._slopes(before, function)
            return jnp.sum((slopes * change[None]).reshape(slopes.shape[0], -1), axis=1)

        return one(alternative.x, alternative_after.x) - one(step.before.x, step.after.x)

    def flip_changes(self, step, noise, function):
        """By the same derivatives of g."""
        here = self.block(step.after.x)
        if here is None:
            return None
        other = self.block(self.result(step.before.x, noise, ~step.decisions[0].outcome))
        slopes = self._slopes(step.before.x, function)
        return (slopes * (other - here)[None]).reshape(slopes.shape[0], -1)

    def _slopes(self, x: PyTree, function: Callable[[PyTree], Array]) -> Float[Array, "F *D"]:
        """The derivatives of g along the block."""
        along = lambda block: function(self.with_block(x, block))
        value, pullback = jax.vjp(along, self.block(x))
        if value.size == 1:
            return pullback(jnp.ones_like(value))[0][None]
        return jax.vmap(lambda row: pullback(row)[0])(jnp.eye(value.size, dtype=value.dtype))


class OfDensity(eqx.Module):
    """An update whose log density is a field, by which it is known too."""

    density: Callable[..., Float[Array, ""]]

    def log_density(self, theta: PyTree, x: PyTree, *args: Any) -> Float[Array, ""]:
        return self.density(theta, x, *args)

    @property
    def density_identity(self) -> Any:
        return self.density


class DensityOdds(eqx.Module):
    """`log g_θ(y) − log g_θ(x)`, the log odds of a flip for whatever leaves g invariant decision by
    decision.

    >>> import diffmh
    >>> odds = diffmh.extend.DensityOdds(lambda theta, x: theta * x)
    >>> odds(2.0, 1.0, 4.0)
    6.0
    """

    density: Checked[Callable[..., float | Float[Array, ""]]]

    def __check_init__(self):
        signature = "density(theta, x, *args) -> scalar"
        validate.function(self.density, "DensityOdds(density)", "density", signature)

    def __call__(self, theta: PyTree, x: PyTree, y: PyTree, *args: Any) -> float | Float[Array, ""]:
        return self.density(theta, y, *args) - self.density(theta, x, *args)


def checked_step(update: Update, made: Any, before: State) -> Step:
    """`made`, which an update's `step` returned, if it is a step from `before`."""
    name = update.name_in_messages
    if not isinstance(made, Step):
        raise TypeError(f"`{name}.step` must return a `Step`, got {_described(made)}.")
    if not isinstance(made.decisions, tuple) or not all(
        isinstance(decision, Decision) for decision in made.decisions
    ):
        raise TypeError(
            f"`{name}.step` must return a `Step` whose `decisions` are a tuple of decisions, such"
            f" as `(Acceptance.draw(uniform, log_ratio),)`, got {_described(made.decisions)}."
        )
    checked_state(made.after, before, f"{name}.step")
    return made


def checked_state(state: Any, like: State, function: str) -> State:
    """`state`, which a method of an update returned, if it is one of the chain's form."""
    if not isinstance(state, State):
        raise TypeError(f"`{function}` must return a `State`, got {_described(state)}.")
    validate.same_form(state.x, like.x, f"the state that `{function}` leads to")
    return state


def checked_noise(noise: PyTree, num_steps: int, function: str) -> PyTree:
    """Randomness with the steps as the leading axis of each array."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(noise):
        if jnp.shape(leaf)[:1] != (num_steps,):
            raise TypeError(
                f"`{function}(key, x, num_steps)` must return arrays whose leading axis is"
                f" `num_steps`, here {num_steps}, got shape {jnp.shape(leaf)}"
                f"{' at ' + jax.tree_util.keystr(path) if path else ''}: draw the noise of all"
                " steps at once, such as `jax.random.uniform(key, (num_steps,))`."
            )
    return noise


def _described(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple ({', '.join(_described(part) for part in value)})"
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"an array of {value.dtype}{list(value.shape)}"
    return f"a `{type(value).__name__}`"


def moves_with_theta(kernel: Kernel) -> bool:
    """True if states carry tangents."""
    return any(update.moves_with_theta for update in kernel.updates())


def met(state: State, other: State) -> Any:
    """True if two chains are at the same place, bit for bit."""
    return trees.equal(state.x, other.x)
