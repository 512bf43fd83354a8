"""MetropolisHastings: one name for two kernels, of a fixed proposal and of a proposal of θ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from .. import couplings, proposals
from ..base import trees, validate
from ..base.validate import Checked
from ..core.decisions import Categorical, accept_probability, of_possible
from ..core.kernel import Kernel, State, Step
from ..core.odds import DensityOdds
from ..core.parameters import Parameters
from ..core.values import Sum, Value
from ..couplings import Coupling
from ..proposals import FiniteProposal, Proposal
from .accept_reject import AcceptReject, ProposalNoise, log_prob

# A mean over a proposal's values is taken exactly where there are at most this many.
_FEW_VALUES = 16


class FixedProposal(AcceptReject):
    """Metropolis–Hastings with a proposal that does not depend on θ: its noise is drawn ahead of
    the loop, and only the accept decision has a derivative.
    """

    proposal: Proposal
    coupling: Coupling

    def proposal_at(self, theta, *args):
        return self.proposal

    @property
    def proposed_by(self):
        return type(self.proposal.part_proposal)

    def noise(self, key, x, num_steps):
        key_propose, key_accept = jax.random.split(key)
        uniform = jax.random.uniform(key_accept, (num_steps,))
        drawn = proposals.proposal_noise(self.proposal, key_propose, x, num_steps)
        return ProposalNoise(drawn, uniform)

    def coupling_noise(self, key, x, num_steps):
        return couplings.coupling_noise(self.coupling, self.proposal, key, x, num_steps)

    def step(self, parameters, state, noise):
        propose = lambda x: _proposed(self.proposal, x, noise.proposal)
        x_new = parameters.follow(propose, state.value)
        return self.decide(parameters, state, x_new, noise.uniform)

    def propose_beside(self, parameters, step, alternative, noise, coupling_noise):
        x, x_new, y = step.before.x, step.proposed.x, alternative.x
        return couplings.couple(
            self.coupling, self.proposal, x, x_new, y, noise.proposal, coupling_noise
        )

    def refuse_start(self, x):
        self.proposal.refuse_start(x)

    @property
    def flip_odds(self):
        return DensityOdds(self.density)

    def martingale_increment(
        self, parameters, step, alternative, alternative_after, noise, coupling_noise, function
    ):
        """Over proposal and decision, if the proposal is one of few values; else over the accept
        decision.
        """
        finite = isinstance(self.proposal.part_proposal, FiniteProposal)
        if not finite or _log_probabilities(self.proposal, step.before.x).size > _FEW_VALUES:
            return super().martingale_increment(
                parameters,
                step,
                alternative,
                alternative_after,
                noise,
                coupling_noise,
                function,
            )
        plain = parameters.value_only()
        of_primal = self._exact_increment(plain, step.before, step.after, function)
        own = self._exact_increment(plain, alternative, alternative_after, function)
        return own.minus(of_primal)

    def _exact_increment(self, plain: Parameters, before: State, after: State, function) -> Sum:
        """`g(x') − E[g(x') | x]`, with `E[g(x') − g(x) | x] = Σ_j q(j|x) α_j (g(j) − g(x))`."""
        x = before.x
        probability = jnp.exp(_log_probabilities(self.proposal, x))
        here, there = function(x), function(after.x)

        def change(value):
            x_new = _with_value(self.proposal, x, value)
            _, log_ratio = self.log_ratio(plain, before, Value(x_new))
            chance = accept_probability(log_ratio.primal)
            return of_possible(chance, function(x_new) - here)

        changes = jax.vmap(change)(jnp.arange(probability.size))
        # An impossible value has probability 0, and whatever g is there must not count.
        expected = of_possible(probability[:, None], changes)
        size = jnp.abs(there) + jnp.abs(here) + jnp.sum(jnp.abs(expected), axis=0)
        return Sum(there - here - jnp.sum(expected, axis=0), size)


class Chosen(Step):
    """A step whose proposal was a choice of probabilities that depend on θ: where each other
    choice would have led, choices leading.
    """

    others: State | None = None


class ProposalOfTheta(AcceptReject):
    """Metropolis–Hastings with a proposal that depends on θ, `proposal(theta, *args)`: states move
    with θ and carry tangents, or, among finitely many values, the choice is a decision too.

    Its noise depends on θ and cannot be drawn ahead of the loop: there is a key for each step.
    `through_density_alone` says that θ enters the proposal through the density alone.
    """

    proposal: Callable[..., Proposal]
    coupling: Coupling | None
    through_density_alone: bool = eqx.field(static=True, default=False)

    @property
    def moves_with_theta(self):
        return True

    @property
    def has_own_parameters(self):
        return not self.through_density_alone

    def proposal_at(self, theta, *args):
        return self.proposal(theta, *args)

    @property
    def proposed_by(self):
        return getattr(self.proposal, "kind", Proposal)

    def noise(self, key, x, num_steps):
        key_propose, key_accept = jax.random.split(key)
        uniform = jax.random.uniform(key_accept, (num_steps,))
        return ProposalNoise(jax.random.split(key_propose, num_steps), uniform)

    def coupling_noise(self, key, x, num_steps):
        return jax.random.split(key, num_steps)

    def step(self, parameters, state, noise):
        here, key = self.proposal(parameters.theta, *parameters.args), noise.proposal
        # Refused here too: estimators without alternatives never couple.
        couplings.suitable(self.coupling, here)
        if isinstance(here.part_proposal, FiniteProposal):
            return self._choose(parameters, state, noise, here)
        _check_floats(here, state.x)

        def propose(theta, x, *args):
            proposal = self.proposal(theta, *args)
            return _proposed(proposal, x, proposals.draw_one(proposal, key, x))

        if state.tangent is None and parameters.differentiate:
            x_new = parameters.value_only().evaluate(propose, state.value)
            return self._decide_by_score(parameters, state, x_new, noise.uniform)
        x_new = parameters.evaluate(propose, state.value)
        return self.decide(parameters, state, x_new, noise.uniform)

    def coupled_transition(self, parameters, step, alternative, noise, coupling_noise):
        y_new = Value(self.propose_beside(parameters, step, alternative, noise, coupling_noise))
        here = self.proposal(parameters.theta, *parameters.args)
        if isinstance(here.part_proposal, FiniteProposal):
            return self._chosen(parameters, alternative, y_new, noise, here)
        if not parameters.differentiate:
            return self.decide(parameters, alternative, y_new, noise.uniform)
        return self._decide_by_score(parameters, alternative, y_new, noise.uniform)

    def _decide_by_score(self, parameters: Parameters, state: State, x_new: Value, uniform) -> Step:
        """A step of a state without a tangent, the derivative of the proposal carried by its score
        `s = ∂ log q(x' | x)` at fixed x and x': given x, `E[s] = 0`, so `E[s g(after)]` is `E[s
        (g(x') − g(x))]` over the accepts, which is the flip of weight `−s` (`Acceptance`).
        """

        def log_q(theta, x, x_new, *args):
            return log_prob(self.proposal(theta, *args), x, x_new)

        score = parameters.evaluate(log_q, state.value, x_new).tangent
        return self.decide(parameters, state, x_new, uniform, score)

    def _choose(self, parameters, state, noise, here: Proposal) -> Step:
        """A step among finitely many values: which one is proposed is a decision of its own."""
        chosen = proposals.draw_one(here, noise.proposal, state.x)
        x_new = parameters.follow(lambda x: _proposed(here, x, chosen), state.value)
        return self._chosen(parameters, state, x_new, noise, here)

    def _chosen(self, parameters, state, x_new: Value, noise, here: Proposal) -> Step:
        """The step that has chosen `x_new`."""

        def logits(theta, x, *args):
            return _log_probabilities(self.proposal(theta, *args), x)

        log_probabilities = parameters.evaluate(logits, state.value)
        # A flip of the choice keeps the uniform that decides: `_others` says where it then leads.
        choice = Categorical(here.moved_part(x_new.primal), log_probabilities)
        step = self.decide(parameters, state, x_new, noise.uniform)
        others = self._others(parameters, state, noise, here) if parameters.differentiate else None
        return Chosen(state, step.after, (choice, *step.decisions), step.proposed, others)

    def _others(self, parameters, state, noise, here: Proposal) -> State:
        """The state that each choice would have led to with the same uniform, choices leading."""
        plain, start = parameters.value_only(), state.without_tangents()

        def led(value):
            return self.accepted(plain, start, _with_value(here, state.x, value), noise.uniform)

        return jax.vmap(led)(jnp.arange(_log_probabilities(here, state.x).size))

    def propose_beside(self, parameters, step, alternative, noise, coupling_noise):
        x, x_new, y = step.before.x, step.proposed.x, alternative.x
        proposal = self.proposal(parameters.theta, *parameters.args)
        coupling = couplings.suitable(self.coupling, proposal)
        # From the key of the step: the noise that drew the primal's x'.
        primal_noise = proposals.draw_one(proposal, noise.proposal, x)
        own_noise = couplings.draw_one(coupling, proposal, coupling_noise, x)
        return couplings.couple(coupling, proposal, x, x_new, y, primal_noise, own_noise)

    def flipped(self, step, noise, decision, candidate):
        if not isinstance(step, Chosen) or decision == 1:
            return super().flipped(step, noise, decision, candidate)
        pick = lambda leaf: trees.entry(leaf, candidate).astype(leaf.dtype)
        return jax.tree.map(pick, step.others)


class OneUpdate(Kernel):
    """A kernel that is one update under a name of its own."""

    update: Any

    def updates(self):
        return (self.update,)

    def start(self, parameters, x):
        return self.update.start(parameters, x)

    def distribute(self, make, key):
        return make(self.update, key)

    def fold(self, advance, carry, noise):
        return advance(self.update, carry, noise)

    def conditions(self, theta, *args):
        return self.update.conditions(theta, *args)

    def without_cache(self):
        return eqx.tree_at(lambda kernel: kernel.update, self, self.update.without_cache())


class MetropolisHastings(OneUpdate):
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
    integers or booleans, but is not a `FiniteProposal`; parameters of the proposal out of their
    range, at which the result is NaN under `jit`.

    >>> import diffmh
    >>> density = lambda theta, x: -0.5 * (x - theta) ** 2
    >>> normal = diffmh.MetropolisHastings(density, diffmh.GaussianWalk(2.38))
    >>> normal.coupling
    MaximalReflection()
    """

    update: FixedProposal | ProposalOfTheta

    def __init__(
        self,
        log_density: Checked[Callable[..., Float[Array, ""]]],
        proposal: Checked[Proposal | Callable[[PyTree], Proposal]],
        coupling: Checked[Coupling] | None = None,
    ):
        where = "MetropolisHastings(log_density, proposal, coupling)"
        log_density = validate.density(log_density, where)
        if coupling is not None:
            validate.instance(coupling, Coupling, where, "coupling")
        if callable(proposal) and not isinstance(proposal, type | Proposal):
            self.update = ProposalOfTheta(log_density, _OfTheta(proposal), coupling)
        else:
            fixed = validate.instance(proposal, Proposal, where, "proposal")
            self.update = FixedProposal(log_density, fixed, couplings.suitable(coupling, fixed))

    @property
    def density(self) -> Callable[..., Float[Array, ""]]:
        return self.update.density

    @property
    def proposal(self) -> Any:
        """The `Proposal`, or the function of theta that makes it."""
        return self.update.proposal

    @property
    def coupling(self) -> Coupling | None:
        """The coupling in use; `None` if the proposal, a function of theta, is to choose it."""
        return self.update.coupling


class _OfTheta(eqx.Module):
    """`theta -> Proposal`, as a user writes it, at any data."""

    function: Callable[[PyTree], Proposal]

    def __call__(self, theta, *args):
        made = self.function(theta)
        where = "MetropolisHastings(log_density, proposal)"
        return validate.instance(made, Proposal, where, "proposal(theta)")


def _proposed(proposal: Proposal, x: PyTree, noise: PyTree) -> PyTree:
    # Never `sample`: the noise is the tape that the alternative and the derivative play again.
    x_new = proposals.move(proposal, x, noise)
    validate.same_form(x_new, x, f"what `{type(proposal).__name__}` proposes")
    return x_new


def _log_probabilities(proposal: Proposal, x: PyTree) -> Float[Array, "n"]:
    """`log q(· | x)` over the values of a finite proposal."""
    assert isinstance(proposal.part_proposal, FiniteProposal)
    return proposal.part_proposal.log_probabilities(proposal.moved_part(x))


def _with_value(proposal: Proposal, x: PyTree, value: Array) -> PyTree:
    """The state with one of a finite proposal's values."""
    return proposal.with_moved_part(x, value.astype(proposal.moved_part(x).dtype))


def _check_floats(proposal: Proposal, x: PyTree) -> None:
    """A derivative through what is moved would silently be zero for integers."""
    for leaf in jax.tree.leaves(proposal.moved_part(x)):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            if isinstance(proposal, proposals.GaussianProposal):
                proposal.check_floats(x)
            raise TypeError(
                "`MetropolisHastings(log_density, lambda theta: proposal)`: a proposal that depends"
                f" on theta and moves {leaf.dtype} must be a `FiniteProposal`, whose probabilities"
                f" are differentiated, got `{type(proposal).__name__}`. If it does not depend on"
                " theta, pass the proposal itself."
            )
