"""MetropolisHastings: Algorithm 1's step."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from .. import _trees, _validate, couplings, proposals
from .._validate import Checked
from ..couplings import Coupling
from ..decisions import Acceptance, Categorical, Decision, accept_probability, of_possible
from ..kernel import DensityOdds, State, Step, Update
from ..parameters import Parameters
from ..proposals import Proposal
from ..values import Value, without_tangents

# So many values of a proposal are all looked at for an exact mean.
_FEW_VALUES = 16


class Noise(eqx.Module):
    """The randomness of one step: that of the proposal, and the uniform that decides."""

    proposal: PyTree
    uniform: Float[Array, "..."]


class ProposalOf(eqx.Module):
    """A proposal that depends on θ."""

    @property
    @abstractmethod
    def has_own_parameters(self) -> bool:
        """Whether by more than the density does."""

    @abstractmethod
    def at(self, theta: PyTree, args: tuple[Any, ...]) -> Proposal:
        """The proposal at given parameters and data."""


class OfTheta(ProposalOf):
    """`theta -> Proposal`, as a user writes it."""

    function: Callable[[PyTree], Proposal]

    @property
    def has_own_parameters(self):
        return True

    def at(self, theta, args):
        made = self.function(theta)
        where = "MetropolisHastings(log_density, proposal)"
        return _validate.instance(made, Proposal, where, "proposal(theta)")


class Chosen(Step):
    """A step whose proposal was a choice of probabilities that depend on θ: where each other
    choice would have led, choices leading.
    """

    others: State | None = None


class MetropolisHastings(Update):
    """Metropolis–Hastings: propose `x' ~ q(· | x)`, accept it with probability `α = min(1,
    g(x')q(x|x') / (g(x)q(x'|x)))`.

    **Arguments**

    - `log_density(theta, x, *args)`: `log g_θ(x)`, a real scalar, unnormalised; `-inf` outside the
      support.
    - `proposal`: a `Proposal`; or a function `theta -> Proposal`, whose parameters are then
      differentiated too: `lambda theta: GaussianWalk(theta["step"])`.
    - `coupling`: how an alternative proposes beside the primal; `None` takes the best for the
      proposal.

    The state `x` is any pytree of boolean, integer or float arrays. Evaluates the density once per
    proposal.

    A proposal that depends on θ moves floats as a smooth function of its noise, `x' = h_θ(x, ε)`:
    the state then has a derivative of its own, beside the alternatives. Among finitely many values
    (a `FiniteProposal`, such as `TransitionMatrix`) its choice is a decision, whose flips need the
    density at each value.

    Refused: a coupling that makes no sense for the proposal; a proposal that depends on θ and moves
    integers or booleans, but is not a `FiniteProposal`.

    >>> import diffmh
    >>> density = lambda theta, x: -0.5 * (x - theta) ** 2
    >>> normal = diffmh.MetropolisHastings(density, diffmh.GaussianWalk(2.38))
    >>> normal.coupling
    MaximalReflection()
    """

    density: Callable[..., Float[Array, ""]]
    proposal: Proposal | ProposalOf
    coupling: Coupling | None
    cached: bool = eqx.field(static=True)

    def __init__(
        self,
        log_density: Checked[Callable[..., Float[Array, ""]]],
        proposal: Checked[Proposal | ProposalOf | Callable[[PyTree], Proposal]],
        coupling: Checked[Coupling] | None = None,
        *,
        cached: bool = True,
    ):
        where = "MetropolisHastings(log_density, proposal, coupling)"
        self.density = _validate.function(
            log_density, where, "log_density", "log_density(theta, x, *args) -> scalar"
        )
        self.cached = cached
        if coupling is not None:
            _validate.instance(coupling, Coupling, where, "coupling")
        if isinstance(proposal, ProposalOf):
            self.proposal, self.coupling = proposal, coupling
            return
        if callable(proposal) and not isinstance(proposal, type):
            self.proposal, self.coupling = OfTheta(proposal), coupling
            return
        fixed: Proposal = _validate.instance(proposal, Proposal, where, "proposal")
        self.proposal, self.coupling = fixed, _suitable(coupling, fixed)

    def log_density(self, theta, x, *args):
        return self.density(theta, x, *args)

    def proposal_at(self, theta: PyTree, *args: Any) -> Proposal:
        """The proposal at given parameters and data."""
        proposal = self.proposal
        return proposal.at(theta, args) if isinstance(proposal, ProposalOf) else proposal

    def bound(self, theta: PyTree, *args: Any) -> MetropolisHastings:
        """The kernel with its proposal as it is at given parameters and data."""
        return MetropolisHastings(
            self.density, self.proposal_at(theta, *args), self.coupling, cached=self.cached
        )

    def start(self, parameters: Parameters, x: PyTree) -> State:
        return State(x, parameters.evaluate(self.density, x) if self.cached else None)

    def noise(self, key, x, num_steps):
        """What depends on θ cannot be drawn ahead: a proposal that does has a key for each step."""
        key_propose, key_accept = jax.random.split(key)
        uniform = jax.random.uniform(key_accept, (num_steps,))
        if isinstance(self.proposal, ProposalOf):
            return Noise(jax.random.split(key_propose, num_steps), uniform)
        return Noise(proposals.proposal_noise(self.proposal, key_propose, x, num_steps), uniform)

    def coupling_noise(self, key, x, num_steps):
        if isinstance(self.proposal, ProposalOf):
            return jax.random.split(key, num_steps)
        assert self.coupling is not None
        return couplings.coupling_noise(self.coupling, self.proposal, key, x, num_steps)

    def step(self, parameters: Parameters, state: State, noise: Noise) -> Step:
        x_new, choices = self._propose(parameters, state, noise)
        x_new, proposal_score = self._forget(parameters, state, x_new)
        proposed, log_ratio = self._log_ratio(parameters, state, x_new)
        acceptance = Acceptance.draw(noise.uniform, log_ratio, proposal_score)
        after = _trees.select(acceptance.accepted, proposed, state)
        if not choices:
            return Step(state, after, (acceptance,), proposed)
        others = self._others(parameters, state, noise) if parameters.differentiate else None
        return Chosen(state, after, (*choices, acceptance), proposed, others)

    def coupled_step(self, parameters, step, alternative, noise, coupling_noise):
        y_new = self._coupled(parameters, step, alternative, noise, coupling_noise)
        return self._accepted(parameters, alternative, y_new, noise)

    def _coupled(self, parameters, step, alternative, noise, coupling_noise) -> PyTree:
        """What is proposed to an alternative."""
        assert step.proposed is not None
        x, x_new, y = step.before.x, step.proposed.x, alternative.x
        proposal, coupling, primal_noise = self.proposal, self.coupling, noise.proposal
        if isinstance(proposal, ProposalOf):
            proposal = proposal.at(parameters.theta, parameters.args)
            coupling = _suitable(coupling, proposal)
            primal_noise = proposals.draw_one(proposal, noise.proposal, x)
            coupling_noise = couplings.draw_one(coupling, proposal, coupling_noise, x)
        assert coupling is not None
        return couplings.couple(coupling, proposal, x, x_new, y, primal_noise, coupling_noise)

    def surprise(
        self, parameters, step, alternative, alternative_after, noise, coupling_noise, function
    ):
        """Over proposal and decision, if the proposal is one of few values; else over the accept
        decision, given what is proposed: `(b − α) (g(x_new) − g(x))`.
        """
        assert step.proposed is not None
        plain = parameters.value_only()
        if isinstance(self.proposal, Proposal) and proposals.is_finite(self.proposal):
            exact = lambda before, after: self._whole_surprise(plain, before, after, function)
            if proposals.log_probabilities(self.proposal, step.before.x).size <= _FEW_VALUES:
                return exact(alternative, alternative_after) - exact(step.before, step.after)
        y_new = self._coupled(plain, step, alternative, noise, coupling_noise)
        _, log_ratio = self._log_ratio(plain, alternative, Value(y_new))

        def one(x, x_new, acceptance):
            chance = acceptance.accepted - acceptance.probability
            return of_possible(chance, function(x_new) - function(x))

        of_primal = one(step.before.x, step.proposed.x, step.decisions[-1])
        return one(alternative.x, y_new, Acceptance.draw(noise.uniform, log_ratio)) - of_primal

    def _whole_surprise(self, plain: Parameters, before: State, after: State, function):
        """`g(x') − E[g(x') | x]`, with `E[g(x') − g(x) | x] = Σ_j q(j|x) α_j (g(j) − g(x))`."""
        assert isinstance(self.proposal, Proposal)
        proposal, x = self.proposal, before.x
        probability = jnp.exp(proposals.log_probabilities(proposal, x))

        def change(value):
            x_new = proposals.choose(proposal, x, value)
            _, log_ratio = self._log_ratio(plain, before, Value(x_new))
            chance = accept_probability(log_ratio.primal)
            return of_possible(chance, function(x_new) - function(x))

        changes = jax.vmap(change)(jnp.arange(probability.size))
        expected = jnp.sum(of_possible(probability[:, None], changes), axis=0)
        return function(after.x) - function(x) - expected

    def flipped(self, step, noise, decision, candidate):
        assert step.proposed is not None
        if isinstance(step, Chosen) and decision == 0:
            assert step.others is not None
            return jax.tree.map(
                lambda leaf: _trees.entry(leaf, candidate).astype(leaf.dtype), step.others
            )
        other = _trees.select(step.decisions[-1].outcome, step.before, step.proposed)
        return without_tangents(State(other.x, other.cache))

    def refuse_start(self, x):
        if isinstance(self.proposal, Proposal):
            self.proposal.refuse_start(x)

    @property
    def target(self) -> Any:
        return self.density

    @property
    def flip_odds(self):
        return DensityOdds(self.density) if isinstance(self.proposal, Proposal) else None

    @property
    def remembers(self) -> Any:
        return self.density if self.cached else None

    @property
    def moves_with_theta(self) -> bool:
        return isinstance(self.proposal, ProposalOf)

    @property
    def has_own_parameters(self) -> bool:
        return isinstance(self.proposal, ProposalOf) and self.proposal.has_own_parameters

    def forgetful(self):
        return MetropolisHastings(self.density, self.proposal, self.coupling, cached=False)

    def _propose(
        self, parameters: Parameters, state: State, noise: Noise
    ) -> tuple[Value, tuple[Decision, ...]]:
        """`x'`, and the choice that was made where its probabilities depend on θ."""
        proposal = self.proposal

        def propose(proposal, x, noise):
            x_new = proposals.move(proposal, x, noise)
            _validate.same_form(x_new, x, f"what `{type(proposal).__name__}` proposes")
            return x_new

        if isinstance(proposal, Proposal):
            follow = lambda x: propose(proposal, x, noise.proposal)
            return parameters.follow(follow, state.value), ()
        at, key = proposal.at, noise.proposal
        here = at(parameters.theta, parameters.args)
        if proposals.is_finite(here):
            chosen = proposals.draw_one(here, key, state.x)
            x_new = parameters.follow(lambda x: propose(here, x, chosen), state.value)
            logits = lambda theta, x, *args: proposals.log_probabilities(at(theta, args), x)
            drawn = proposals.chosen(here, x_new.primal)
            return x_new, (Categorical(drawn, parameters.evaluate(logits, state.value)),)
        _check_floats(here, state.x)

        def smoothly(theta, x, *args):
            proposal = at(theta, args)
            return propose(proposal, x, proposals.draw_one(proposal, key, x))

        return parameters.evaluate(smoothly, state.value), ()

    def _forget(
        self, parameters: Parameters, state: State, x_new: Value
    ) -> tuple[Value, Float[Array, "P"] | None]:
        """`x'` with less of the state's tangent, and the score of what was taken off."""
        if not parameters.differentiate or state.tangent is None:
            return x_new, None
        proposal = self.proposal_at(parameters.theta, *parameters.args)
        x, there = parameters.apart((state.x, x_new.primal))
        one = lambda tangent, new: proposals.forget(proposal, x, there, tangent, new)
        found = jax.vmap(one)(state.tangent, x_new.tangent)
        if found is None:
            return x_new, None
        return Value(x_new.primal, found.tangent), found.score

    def _others(self, parameters: Parameters, state: State, noise: Noise) -> State:
        """Where each choice would have led with the same uniform, choices leading."""
        plain = parameters.value_only()
        proposal = self.proposal_at(plain.theta, *plain.args)
        here = without_tangents(State(state.x, state.cache))

        def led(value):
            return self._accepted(plain, here, proposals.choose(proposal, state.x, value), noise)

        return jax.vmap(led)(jnp.arange(proposals.log_probabilities(proposal, state.x).size))

    def _accepted(self, parameters: Parameters, state: State, x_new: PyTree, noise: Noise) -> State:
        """The state after a proposal of `x_new`, without derivatives."""
        proposed, log_ratio = self._log_ratio(parameters, state, Value(x_new))
        accepted = Acceptance.draw(noise.uniform, log_ratio).accepted
        return _trees.select(accepted, proposed, state)

    def _log_ratio(self, parameters: Parameters, state: State, x_new: Value) -> tuple[State, Value]:
        """The proposed state, and `log r = log g(x') − log g(x) + log q(x|x') − log q(x'|x)`."""
        here = state.cache
        if not self.cached:
            here = parameters.evaluate(self.density, state.value)
        there = parameters.evaluate(self.density, x_new)
        log_ratio = there - here
        if not self.proposal_at(parameters.theta, *parameters.args).symmetric:
            log_ratio = log_ratio + self._log_proposal_ratio(parameters, state.value, x_new)
        return State(x_new.primal, there if self.cached else None, x_new.tangent), log_ratio

    def _log_proposal_ratio(self, parameters: Parameters, x: Value, x_new: Value) -> Value:
        """`log q(x|x') − log q(x'|x)`."""
        fixed = isinstance(self.proposal, Proposal) and x.tangent is None

        def difference(theta, x, x_new, *args):
            proposal = self.proposal_at(theta, *args)
            return _log_prob(proposal, x_new, x) - _log_prob(proposal, x, x_new)

        if fixed and parameters.differentiate:
            ratio = difference(parameters.theta, x.primal, x_new.primal, *parameters.args)
            return Value(ratio, jnp.zeros((), ratio.dtype))
        return parameters.evaluate(difference, x, x_new)


def _log_prob(proposal: Proposal, x: PyTree, x_new: PyTree) -> Float[Array, ""]:
    log_q = proposal.log_prob(x, x_new)
    if jnp.shape(log_q) != ():
        raise TypeError(
            f"`{type(proposal).__name__}.log_prob` must return a scalar, got shape"
            f" {jnp.shape(log_q)}: add the terms up with `jnp.sum`."
        )
    return log_q


def _suitable(coupling: Coupling | None, proposal: Proposal) -> Coupling:
    """The coupling, or the best for the proposal; refused if it makes no sense."""
    if coupling is None:
        return couplings.best_coupling(proposal)
    couplings.refuse_mismatch(coupling, proposal)
    return coupling


def _check_floats(proposal: Proposal, x: PyTree) -> None:
    """A derivative through what is moved would silently be zero for integers."""
    for leaf in jax.tree.leaves(proposals.moved_part(proposal, x)):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            if isinstance(proposal, proposals.GaussianProposal):
                proposal.refuse_whole(x)
            raise TypeError(
                "`MetropolisHastings(log_density, lambda theta: proposal)`: a proposal that depends"
                f" on theta and moves {leaf.dtype} must be a `FiniteProposal`, whose probabilities"
                f" are differentiated, got `{type(proposal).__name__}`. If it does not depend on"
                " theta, pass the proposal itself."
            )
