"""AcceptReject: a step that proposes and then accepts or rejects, Algorithm 1's."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from .. import proposals
from ..base import trees, validate
from ..core.decisions import Acceptance, of_possible
from ..core.kernel import OfDensity, State, Step, Update
from ..core.parameters import Parameters
from ..core.values import Sum, Value
from ..proposals import Proposal


class ProposalNoise(eqx.Module):
    """The randomness of one step: the proposal's (a momentum), and the uniform that decides."""

    proposal: PyTree
    uniform: Float[Array, "..."]


class AcceptReject(OfDensity, Update):
    """A step that proposes `x'` and accepts it with probability `min(1, r)`,
    `log r = log g(x') − log g(x) + log q(x|x') − log q(x'|x)`.

    How `x'` is drawn, and what of it depends on θ, is left to `FixedProposal` and
    `ProposalOfTheta`. If it is `cached`, a state's cache is `log g(x)`.
    """

    theta_enters_by_evaluate: ClassVar[bool] = True
    proposal: Any
    coupling: Any
    cached: bool = eqx.field(static=True, default=True)

    @abstractmethod
    def proposal_at(self, theta: PyTree, *args: Any) -> Proposal:
        """The proposal at given parameters and data."""

    @abstractmethod
    def propose_beside(self, parameters, step, alternative, noise, coupling_noise) -> PyTree:
        """`y'`, the proposal of an alternative beside a step of the primal."""

    @property
    def keeps_apart(self):
        return self.coupling is not None and self.coupling.keeps_apart(self.proposed_by)

    @property
    def proposed_by(self) -> type[Proposal]:
        """The kind of its proposals, as far as it is known without θ."""
        return Proposal

    @property
    def cached_function(self):
        return self.density if self.cached else None

    def without_cache(self):
        return dataclasses.replace(self, cached=False)

    def conditions(self, theta, *args):
        return self.proposal_at(theta, *args).conditions()

    def start(self, parameters: Parameters, x: PyTree) -> State:
        return State(x, parameters.evaluate(self.density, x) if self.cached else None)

    def decide(
        self,
        parameters: Parameters,
        state: State,
        x_new: Value,
        uniform: Array,
        score: Float[Array, "P"] | None = None,
    ) -> Step:
        """The step that proposes `x_new`; `score` is `∂ log q(x_new | x)` where the state has no
        tangent to carry what of it depends on θ.
        """
        if score is None:
            x_new, score = self._forget(parameters, state, x_new)
        proposed, log_ratio = self.log_ratio(parameters, state, x_new)
        acceptance = Acceptance.draw(uniform, log_ratio, score)
        # Selected, not computed: a chain that stays is where it was bit for bit.
        after = trees.select(acceptance.accepted, proposed, state)
        return Step(state, after, (acceptance,), proposed)

    def coupled_step(self, parameters, step, alternative, noise, coupling_noise):
        y_new = self.propose_beside(parameters, step, alternative, noise, coupling_noise)
        return self.accepted(parameters, alternative, y_new, noise.uniform)

    def coupled_transition(self, parameters, step, alternative, noise, coupling_noise):
        y_new = self.propose_beside(parameters, step, alternative, noise, coupling_noise)
        return self.decide(parameters, alternative, Value(y_new), noise.uniform)

    def accepted(self, parameters: Parameters, state: State, x_new: PyTree, uniform) -> State:
        """The state after a proposal of `x_new`, without derivatives."""
        proposed, log_ratio = self.log_ratio(parameters, state, Value(x_new))
        accepted = Acceptance.draw(uniform, log_ratio).accepted
        return trees.select(accepted, proposed, state)

    def log_ratio(self, parameters: Parameters, state: State, x_new: Value) -> tuple[State, Value]:
        """The proposed state, and `log r`."""
        here = state.cache
        if not self.cached:
            here = parameters.evaluate(self.density, state.value)
        there = parameters.evaluate(self.density, x_new)
        # log r = log g(x') − log g(x) + log q(x | x') − log q(x' | x), of which a symmetric
        # proposal has no second half.
        log_ratio = there - here

        def log_proposal_ratio(theta, x, x_new, *args):
            proposal = self.proposal_at(theta, *args)
            return log_prob(proposal, x_new, x) - log_prob(proposal, x, x_new)

        if not self.proposal_at(parameters.theta, *parameters.args).symmetric:
            log_ratio += parameters.evaluate(log_proposal_ratio, state.value, x_new)
        return State(x_new.primal, there if self.cached else None, x_new.tangent), log_ratio

    def _forget(
        self, parameters: Parameters, state: State, x_new: Value
    ) -> tuple[Value, Float[Array, "P"] | None]:
        """`x'` with less of the state's tangent, and the score of what was taken off."""
        if not parameters.differentiate or state.tangent is None:
            return x_new, None
        proposal = self.proposal_at(parameters.theta, *parameters.args)
        x, there = parameters.barriers.for_derivatives((state.x, x_new.primal))

        def one(tangent, tangent_new):
            return proposals.forget(proposal, x, there, tangent, tangent_new)

        left = jax.vmap(one)(state.tangent, x_new.tangent)
        if left is None:
            return x_new, None
        return Value(x_new.primal, left.tangent), left.score

    def flipped(self, step, noise, decision, candidate):
        assert step.proposed is not None
        # The accept is the last decision of a step: the flip of an accept stays, that of a reject
        # moves.
        other = trees.select(step.decisions[-1].outcome, step.before, step.proposed)
        return other.without_tangents()

    def leads_nowhere(self, step, noise):
        # A proposal of the present state has `log r = 0` whatever θ is: its weight is 0 by itself.
        return None

    def martingale_increment(
        self, parameters, step, alternative, alternative_after, noise, coupling_noise, function
    ):
        """Over the accept decision, given what is proposed: `(b − α) (g(x_new) − g(x))`."""
        assert step.proposed is not None
        plain = parameters.value_only()
        y_new = self.propose_beside(plain, step, alternative, noise, coupling_noise)
        _, log_ratio = self.log_ratio(plain, alternative, Value(y_new))

        def one(x, x_new, acceptance):
            # E[b | x, x'] = α: the increment has mean zero given what is proposed.
            chance = acceptance.accepted - acceptance.probability
            change = function(x_new) - function(x)
            # What rounding leaves of 1 − α is a fraction of 1.
            return Sum(of_possible(chance, change), jnp.where(chance != 0, jnp.abs(change), 0.0))

        of_primal = one(step.before.x, step.proposed.x, step.decisions[-1])
        own = one(alternative.x, y_new, Acceptance.draw(noise.uniform, log_ratio))
        return own.minus(of_primal)


def log_prob(proposal: Proposal, x: PyTree, x_new: PyTree) -> Float[Array, ""]:
    log_q = proposal.log_prob(x, x_new)
    if jnp.shape(log_q) != ():
        raise TypeError(
            f"`{type(proposal).__name__}.log_prob` must return a scalar, got shape"
            f" {jnp.shape(log_q)}: add the terms up with `jnp.sum`."
        )
    validate.real_dtype(
        jnp.result_type(log_q), f"what `{type(proposal).__name__}.log_prob` returns"
    )
    return log_q
