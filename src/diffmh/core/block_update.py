"""BlockUpdate: an update that is known by its decisions and by where their outcomes lead."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from .decisions import Acceptance, Bernoulli, Decision
from .kernel import State, Step, Update
from .parameters import Parameters
from .update_checks import described
from .values import Sum


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

    def coupled_transition(self, parameters, step, alternative, noise, coupling_noise):
        return self.step(parameters, alternative, noise)

    def _decided(self, parameters: Parameters, state: State, noise: PyTree) -> Decision:
        decision = self.decide(parameters, state, noise)
        if not isinstance(decision, Decision):
            raise TypeError(
                f"`{type(self).__name__}.decide` must return one decision, such as"
                " `Acceptance.draw(uniforms, log_ratios)`, which may be a block of draws; got"
                f" {described(decision)}. For several decisions of different kinds derive from"
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
        # E over two outcomes: (1 − p) off + p on.
        return off + p * (on - off)

    def martingale_increment(
        self, parameters, step, alternative, alternative_after, noise, coupling_noise, function
    ):
        """g, linear in the block about the state before: exact if g is linear in it."""
        if self.block(step.before.x) is None:
            return None

        # Σ_d ∂_d g(x) (x'_d − E[x'_d | x]) has mean zero given x whatever g is, because the slopes
        # are taken at the state before.
        def one(before, after):
            block, expected = self.block(after), self.expected_block(parameters, before, noise)
            slopes = self._slopes(before, function)
            along = lambda change: jnp.sum((slopes * change[None]).reshape(len(slopes), -1), axis=1)
            size = jnp.abs(slopes) * (jnp.abs(block) + jnp.abs(expected))[None]
            return Sum(along(block - expected), jnp.sum(size.reshape(len(slopes), -1), axis=1))

        return one(alternative.x, alternative_after.x).minus(one(step.before.x, step.after.x))

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
