"""MetropolisHastings: Algorithm 1's step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from .. import _trees, _validate, couplings, proposals
from ..couplings import Coupling
from ..decisions import Acceptance
from ..kernel import State, Step, Update
from ..parameters import Parameters
from ..proposals import Proposal
from ..values import Value


class Noise(eqx.Module):
    """The randomness of one step: that of the proposal, and the uniform that decides."""

    proposal: PyTree
    uniform: Float[Array, "..."]


class MetropolisHastings(Update):
    """Metropolis–Hastings: propose `x' ~ q(· | x)`, accept it with probability `α = min(1,
    g(x')q(x|x') / (g(x)q(x'|x)))`.

    **Arguments**

    - `log_density(theta, x, *args)`: `log g_θ(x)`, a real scalar, unnormalised; `-inf` outside the
      support.
    - `proposal`: a `Proposal`.
    - `coupling`: how an alternative proposes beside the primal; `None` takes the best for the
      proposal.

    The state `x` is any pytree of boolean, integer or float arrays. Evaluates the density once per
    proposal.

    Refused: a coupling that makes no sense for the proposal.

    >>> import diffmh
    >>> normal = diffmh.MetropolisHastings(lambda theta, x: -0.5 * (x - theta) ** 2, diffmh.GaussianWalk(2.38))
    >>> normal.coupling
    MaximalReflection()
    """

    density: Callable[..., Float[Array, ""]]
    proposal: Proposal
    coupling: Coupling
    cached: bool = eqx.field(static=True)

    def __init__(
        self,
        log_density: Callable[..., Float[Array, ""]],
        proposal: Proposal,
        coupling: Coupling | None = None,
        *,
        cached: bool = True,
    ):
        where = "MetropolisHastings(log_density, proposal, coupling)"
        self.density = _validate.function(
            log_density, where, "log_density", "log_density(theta, x, *args) -> scalar"
        )
        self.proposal = _validate.instance(proposal, Proposal, where, "proposal")
        chosen = couplings.best_coupling(proposal) if coupling is None else coupling
        self.coupling = _validate.instance(chosen, Coupling, where, "coupling")
        couplings.refuse_mismatch(self.coupling, proposal)
        self.cached = cached

    def log_density(self, theta, x, *args):
        return self.density(theta, x, *args)

    def start(self, parameters: Parameters, x: PyTree) -> State:
        return State(x, parameters.evaluate(self.density, x) if self.cached else None)

    def noise(self, key, x, num_steps):
        key_propose, key_accept = jax.random.split(key)
        uniform = jax.random.uniform(key_accept, (num_steps,))
        return Noise(proposals.proposal_noise(self.proposal, key_propose, x, num_steps), uniform)

    def coupling_noise(self, key, x, num_steps):
        return couplings.coupling_noise(self.coupling, self.proposal, key, x, num_steps)

    def step(self, parameters: Parameters, state: State, noise: Noise) -> Step:
        def propose(x):
            x_new = proposals.move(self.proposal, x, noise.proposal)
            _validate.same_form(x_new, x, f"what `{type(self.proposal).__name__}` proposes")
            return x_new

        x_new = parameters.follow(propose, state.value)
        proposed, log_ratio = self._log_ratio(parameters, state, x_new)
        acceptance = Acceptance.draw(noise.uniform, log_ratio)
        after = _trees.select(acceptance.accepted, proposed, state)
        return Step(state, after, (acceptance,), proposed)

    def coupled_step(self, parameters, step, alternative, noise, coupling_noise):
        assert step.proposed is not None
        x, x_new, y = step.before.x, step.proposed.x, alternative.x
        y_new = couplings.couple(
            self.coupling, self.proposal, x, x_new, y, noise.proposal, coupling_noise
        )
        proposed, log_ratio = self._log_ratio(parameters, alternative, Value(y_new))
        accepted = Acceptance.draw(noise.uniform, log_ratio).accepted
        return _trees.select(accepted, proposed, alternative)

    def flipped(self, step, noise, decision, candidate):
        assert step.proposed is not None
        other = _trees.select(step.decisions[0].outcome, step.before, step.proposed)
        return State(other.x, other.memory)

    def refuse_start(self, x):
        self.proposal.refuse_start(x)

    @property
    def target(self) -> Any:
        return self.density

    @property
    def remembers(self) -> Any:
        return self.density if self.cached else None

    def forgetful(self):
        return MetropolisHastings(self.density, self.proposal, self.coupling, cached=False)

    def _log_ratio(self, parameters: Parameters, state: State, x_new: Value) -> tuple[State, Value]:
        """The proposed state, and `log r = log g(x') − log g(x) + log q(x|x') − log q(x'|x)`."""
        here = state.memory
        if not self.cached:
            here = parameters.evaluate(self.density, state.value)
        there = parameters.evaluate(self.density, x_new)
        log_ratio = there - here
        if not self.proposal.symmetric:
            log_ratio = log_ratio + self._log_proposal_ratio(parameters, state.value, x_new)
        return State(x_new.primal, there if self.cached else None, x_new.tangent), log_ratio

    def _log_proposal_ratio(self, parameters: Parameters, x: Value, x_new: Value) -> Value:
        """`log q(x|x') − log q(x'|x)`."""

        def log_prob(x, x_new):
            log_q = self.proposal.log_prob(x, x_new)
            if jnp.shape(log_q) != ():
                raise TypeError(
                    f"`{type(self.proposal).__name__}.log_prob` must return a scalar, got shape"
                    f" {jnp.shape(log_q)}: add the terms up with `jnp.sum`."
                )
            return log_q

        if x.tangent is None and parameters.differentiate:
            ratio = log_prob(x_new.primal, x.primal) - log_prob(x.primal, x_new.primal)
            return Value(ratio, jnp.zeros((), ratio.dtype))
        difference = lambda theta, x, x_new, *args: log_prob(x_new, x) - log_prob(x, x_new)
        return parameters.evaluate(difference, x, x_new)
