"""MetropolisHastings: Algorithm 1's step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array, Float, PyTree

from . import _trees, _validate, couplings, proposals
from .couplings import Coupling
from .kernel import AcceptReject, State, Step, accept
from .parameters import Dual, Parameters
from .proposals import Proposal


class Noise(eqx.Module):
    """The randomness of one step: that of the proposal, and the uniform that decides."""

    proposal: PyTree
    uniform: Float[Array, "..."]


class MetropolisHastings(AcceptReject):
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
        x_new = proposals.move(self.proposal, state.x, noise.proposal)
        _validate.same_form(x_new, state.x, f"what `{type(self.proposal).__name__}` proposes")
        x_new = parameters.settle(x_new)
        proposed, log_ratio = self._log_ratio(parameters, state, x_new)
        accepted = accept(noise.uniform, log_ratio.value)
        return Step(state, proposed, _trees.select(accepted, proposed, state), accepted, log_ratio)

    def coupled_step(self, parameters, step, alternative, noise, coupling_noise):
        x, x_new, y = step.before.x, step.proposed.x, alternative.x
        y_new = couplings.couple(
            self.coupling, self.proposal, x, x_new, y, noise.proposal, coupling_noise
        )
        proposed, log_ratio = self._log_ratio(parameters, alternative, y_new)
        return _trees.select(accept(noise.uniform, log_ratio.value), proposed, alternative)

    def flipped(self, step, index):
        return _trees.select(step.accepted, step.before, step.proposed)

    @property
    def remembers(self) -> Any:
        return self.density if self.cached else None

    def forgetful(self):
        return MetropolisHastings(self.density, self.proposal, self.coupling, cached=False)

    def _log_ratio(self, parameters: Parameters, state: State, x_new: PyTree) -> tuple[State, Dual]:
        """The proposed state, and `log r = log g(x') − log g(x) + log q(x|x') − log q(x'|x)`."""
        here = state.memory if self.cached else parameters.evaluate(self.density, state.x)
        there = parameters.evaluate(self.density, x_new)
        log_ratio = there - here
        if not self.proposal.symmetric:
            backward, forward = (
                self.proposal.log_prob(x_new, state.x),
                self.proposal.log_prob(state.x, x_new),
            )
            log_ratio = log_ratio.shifted(parameters.settle(backward - forward))
        return State(x_new, there if self.cached else None), log_ratio
