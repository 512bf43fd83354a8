"""One chain of a simulation: where it is, its step, and what is observed of it.

The primal's randomness comes from keys of its own. It is the same whatever the estimator, the
coupling and the number of alternatives. How its values are rounded does not depend on them either:
see `fast.rounding`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Key, PyTree

from ..base import trees
from ..fast import rounding
from .alternatives import Events, Transition, remember
from .estimator import Observation
from .kernel import State, Step, Update, moves_with_theta
from .parameters import Parameters
from .plan import Plan, start_of_one
from .simulation import Observed, Simulation
from .update_checks import checked_noise, checked_step
from .values import Value, without_tangents

# A state of more elements than this is kept whole between updates; a smaller one may be fused into
# whatever uses it.
_SMALL = 32


class StepNoise(NamedTuple):
    """The randomness of an update's steps: the primal's, and the estimator's own."""

    primal: PyTree
    own: PyTree


class Chain(eqx.Module):
    """One chain: the primal, the earlier states that f looks at, and what the estimator carries
    beside it.
    """

    state: State
    past: Value | None
    memory: PyTree


class Stepper(eqx.Module):
    """Takes one chain of a plan at given parameters from its start, step by step."""

    plan: Plan
    theta: PyTree
    args: tuple[Any, ...]

    @property
    def simulation(self) -> Simulation:
        return self.plan.simulation

    def parameters(self, key: Key[Array, ""]) -> Parameters:
        differentiates = self.plan.estimator.differentiates_f
        return Parameters(self.theta, self.args, rounding.Barriers.draw(key), differentiates)

    def start(
        self, parameters: Parameters, x: PyTree, second: PyTree = None
    ) -> tuple[Chain, Bool[Array, ""]]:
        """One chain at its start, and whether it may be run: its log densities are finite, and the
        kernel's parameters are in their ranges. `second` is the estimator's second start, if it has
        one.
        """
        kernel, lag = self.simulation.kernel, self.simulation.lag
        for_steps = self._for_steps(parameters)
        moves = moves_with_theta(kernel) and self.plan.estimator.carries_tangents
        tangent = parameters.zero_tangent(x) if for_steps.differentiate and moves else None
        start = kernel.start(for_steps, x)
        state = State(x, start.cache, tangent)
        past = None
        if lag:
            stack = lambda leaf: jnp.broadcast_to(leaf, (lag, *leaf.shape))
            past = Value(trees.repeat(x, lag), jax.tree.map(jax.vmap(stack), tangent))
        at = self.observation(parameters, state, past)
        if second is not None:
            at = dataclasses.replace(at, second=kernel.start(for_steps, second))
        # Every update's own: a start that one of them calls impossible is never left, or never
        # entered, by that update, and its chain estimates nothing.
        densities = [
            update.log_density(self.theta, place, *self.args)
            for place in (x, second)
            if place is not None
            for update in kernel.updates()
        ]
        conditions = kernel.conditions(self.theta, *self.args)
        in_range = [jnp.all(condition.holds) for condition in conditions]
        startable = jnp.all(jnp.stack([*map(jnp.isfinite, densities), *in_range]))
        return Chain(state, past, self.plan.estimator.start(at)), startable

    def _for_steps(self, parameters: Parameters) -> Parameters:
        differentiates = self.plan.estimator.differentiates_steps
        return parameters if differentiates else parameters.value_only()

    def noise(
        self, key: Key[Array, ""], num_steps: int, primal: bool = True, own: bool = True
    ) -> PyTree:
        """The randomness of one chain's steps: the primal's and the estimator's own, or one of
        them.
        """
        one, estimator = self.plan.state, self.plan.estimator

        def both(update: Update, key):
            key_primal, key_own = jax.random.split(key)
            update = update.prepared(self.theta, one, self.args)
            found = StepNoise(None, None)
            if own:
                found = found._replace(own=estimator.own_noise(update, key_own, one, num_steps))
            if primal:
                noise = update.noise(key_primal, one, num_steps)
                name = f"{update.name_in_messages}.noise"
                found = found._replace(primal=checked_noise(noise, num_steps, name))
            return found

        return self.simulation.kernel.distribute(both, key)

    def step(
        self,
        parameters: Parameters,
        chain: Chain,
        noise: PyTree,
        record: PyTree,
        note: Callable[[PyTree, Step, Events | None], PyTree],
    ) -> tuple[Chain, PyTree]:
        """One step of one chain, through every update of the kernel; `note` adds each to
        `record`.
        """
        estimator = self.plan.estimator
        chain = Chain(chain.state, chain.past, estimator.begin(chain.memory))
        if self.simulation.lag:
            assert chain.past is not None
            past = remember(chain.past, chain.state.value)
            chain = Chain(chain.state, past, estimator.look_back(chain.memory))

        def advance(update: Update, carry, noise):
            (chain, record), (primal_noise, own_noise) = carry, noise
            step = self._primal_step(parameters, update, chain.state, primal_noise)
            at = Transition(
                parameters,
                update,
                step,
                primal_noise,
                own_noise,
                chain.past,
                self.plan.observable,
                self.simulation.kernel,
            )
            memory, events = estimator.advance(chain.memory, at)
            chain = self._kept(parameters, Chain(step.after, chain.past, memory))
            return chain, note(record, step, events)

        return self.simulation.kernel.fold(advance, (chain, record), noise)

    def _primal_step(self, parameters, update: Update, state: State, noise: PyTree) -> Step:
        """The update's step, its values rounded alike in every program."""
        for_steps = self._for_steps(parameters)

        def primal_and_rest(state, noise):
            step = checked_step(update, update.step(for_steps, state, noise), state)
            return _primal(step), step

        step = rounding.with_fixed_rounding(primal_and_rest, parameters.barriers.opaque_false[0])(
            state, noise
        )[1]
        outcomes = lambda step: [decision.outcome for decision in step.decisions]
        if step.decisions and sum(outcome.size for outcome in outcomes(step)) > _SMALL:
            step = eqx.tree_at(outcomes, step, self._kept(parameters, outcomes(step)))
        return step

    def _kept(self, parameters: Parameters, tree: PyTree) -> PyTree:
        """Large states, those between the updates of a cycle, and several alternatives with many
        weights or sums are computed once; a compiler would compute them anew for each use, in a
        cycle for each use of each use.
        """
        # Depends on the primal's form and the estimator's memory; barriers change no number, so the
        # path stays the same whatever is chosen here.
        size = sum(leaf.size for leaf in self.plan.leaves)
        few = not isinstance(tree, Chain) or _few_numbers(tree.memory)
        if size <= _SMALL and few and len(self.simulation.kernel.updates()) == 1:
            return tree
        return parameters.barriers.materialise(tree)

    def observation(self, parameters: Parameters, state: State, past: Value | None) -> Observation:
        """f where the chain is, derivative included, apart from the value that is averaged."""
        plan = self.plan
        # The second `opaque_false`: what is computed for the derivative shares no instruction with
        # the value that is averaged.
        x, past = rounding.round_here((state.value, past), parameters.barriers.opaque_false[1])
        value = plan.observable(parameters, x, past)
        return Observation(parameters, plan.simulation.kernel, state, past, plan.observable, value)

    def observe(self, parameters: Parameters, chain: Chain, at: Observation) -> Observed:
        """The contribution of one chain to the averages where it is now."""
        value = self.value(parameters, chain)
        return Observed(value, self.plan.estimator.observe(chain.memory, at), None)

    def value(self, parameters: Parameters, chain: Chain) -> Float[Array, "F"]:
        """f where the chain is, rounded alike in every program."""
        plain = parameters.value_only()

        def f(x, past):
            return self.plan.observable(plain, x, past).primal, None

        place = (chain.state.x, without_tangents(chain.past))
        return rounding.with_fixed_rounding(f, parameters.barriers.opaque_false[0])(*place)[0]

    def first(self, key: Key[Array, ""]) -> Chain:
        """A chain at its start, by itself."""
        start = start_of_one(self.simulation, jax.random.clone(key))
        return self.start(self.parameters(key), start)[0]

    def single_step(
        self, key: Key[Array, ""], chain: Chain, record: PyTree, note: Callable[..., PyTree]
    ) -> tuple[Chain, PyTree]:
        """One step of a chain by itself, with this key for all of its randomness."""
        # A clone: `never` draws from the key too, and says nothing of it.
        noise = jax.tree.map(lambda leaf: leaf[0], self.noise(jax.random.clone(key), 1))
        return self.step(self.parameters(key), chain, noise, record, note)

    def first_value(self, key: Key[Array, ""]) -> Float[Array, "F"]:
        """f after one step of one chain: the shortest program with all that a user wrote in it."""
        chain, _ = self.single_step(key, self.first(key), None, lambda record, step, events: None)
        parameters = self.parameters(key)
        at = self.observation(parameters, chain.state, chain.past)
        return self.observe(parameters, chain, at).value

    def largest_log_density(self, x: PyTree) -> Float[Array, ""]:
        updates = self.simulation.kernel.updates()
        densities = [update.log_density(self.theta, x, *self.args) for update in updates]
        return jnp.max(jnp.abs(jnp.stack(densities)))


def _few_numbers(memory: PyTree) -> bool:
    """True if an estimator's memory is small, or has no more than one alternative: pruning decides
    for each of its numbers.
    """
    weight = getattr(memory, "weight", None)
    if weight is None or weight.shape[0] == 1:
        return True
    return sum(leaf.size for leaf in jax.tree.leaves(memory)) <= _SMALL


def _primal(step: Step) -> PyTree:
    """The part that decides the primal's path: everything but tangents."""
    plain = lambda state: None if state is None else State(state.x, state.cache)
    parts = (plain(step.before), plain(step.after), step.decisions, plain(step.proposed))
    return without_tangents(parts)
