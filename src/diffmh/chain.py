"""One chain of a simulation: where it is, its step, and what is observed of it.

The primal's randomness comes from keys of its own. It is the same whatever the estimator, the
coupling and the number of alternatives. How its values are rounded does not depend on them either:
see `_lowering.rounding`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Key, PyTree

from . import _trees
from ._lowering import rounding
from .alternatives import Events, Transition, remember
from .estimators import Estimator, Observation
from .kernel import State, Step, Update, checked_noise, checked_step, moves_with_theta
from .parameters import Parameters
from .simulation import Observed, Simulation
from .values import Value, without_tangents

# A state of more elements than this is kept whole between updates; a smaller one may be fused into
# whatever uses it.
_SMALL = 32


class Chain(eqx.Module):
    """One chain: the primal, the earlier states that f looks at, and what the estimator carries
    beside it.
    """

    state: State
    past: Value | None
    memory: PyTree


class Stepper(eqx.Module):
    """Takes one chain of a simulation at given parameters from its start, step by step."""

    simulation: Simulation
    theta: PyTree
    key: Key[Array, ""]
    args: tuple[Any, ...]
    differentiate: bool = eqx.field(static=True)

    @property
    def one(self) -> PyTree:
        """The form of one chain's state."""
        starts = jax.eval_shape(self.simulation.starts, self.key)
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[:-1], leaf.dtype), starts)

    def parameters(self, key: Key[Array, ""]) -> Parameters:
        differentiate = self.differentiate and self.simulation.estimator.differentiates_f
        return Parameters(self.theta, self.args, rounding.never(key, (2,)), differentiate)

    def start(self, parameters: Parameters, x: PyTree) -> tuple[Chain, Bool[Array, ""]]:
        """One chain at its start, and whether it may be run: its log densities are finite, and the
        kernel's parameters are in their ranges.
        """
        simulation = self.simulation
        kernel, lag, for_steps = simulation.kernel, simulation.lag, self._for_steps(parameters)
        tangent = None
        floats = eqx.filter(x, eqx.is_inexact_array)
        if for_steps.differentiate and moves_with_theta(kernel) and jax.tree.leaves(floats):
            tangent = jax.tree.map(
                lambda leaf: jnp.zeros((parameters.size, *leaf.shape), leaf.dtype), floats
            )
        start = kernel.start(for_steps, x)
        state = State(x, start.cache, tangent)
        past = None
        if lag:
            stack = lambda leaf: jnp.broadcast_to(leaf, (lag, *leaf.shape))
            past = Value(_trees.repeat(x, lag), jax.tree.map(jax.vmap(stack), tangent))
        at = self._observation(parameters, state, past)
        densities = [update.log_density(self.theta, x, *self.args) for update in kernel.updates()]
        conditions = kernel.conditions(self.theta, *self.args)
        in_range = [jnp.all(condition.holds) for condition in conditions]
        startable = jnp.all(jnp.stack([*map(jnp.isfinite, densities), *in_range]))
        return Chain(state, past, simulation.estimator.start(at)), startable

    def _for_steps(self, parameters: Parameters) -> Parameters:
        differentiates = self.simulation.estimator.differentiates_steps
        return parameters if differentiates else parameters.value_only()

    def noise(self, key: Key[Array, ""], num_steps: int) -> PyTree:
        """The randomness of one chain's steps: the primal's and the estimator's own."""
        one, estimator = self.one, self.simulation.estimator

        def both(update: Update, key):
            key_primal, key_own = jax.random.split(key)
            own = estimator.own_noise(update, key_own, one, num_steps)
            noise = update.noise(key_primal, one, num_steps)
            return checked_noise(noise, num_steps, f"{type(update).__name__}.noise"), own

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
        estimator = self.simulation.estimator
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
                self.simulation.observable,
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

        step = rounding.settled(primal_and_rest, parameters.never[0])(state, noise)[1]
        outcomes = lambda step: [decision.outcome for decision in step.decisions]
        if step.decisions and sum(outcome.size for outcome in outcomes(step)) > _SMALL:
            step = eqx.tree_at(outcomes, step, self._kept(parameters, outcomes(step)))
        return step

    def _kept(self, parameters: Parameters, tree: PyTree) -> PyTree:
        """Large states, those between the updates of a cycle, and several alternatives with many
        weights or sums are computed once; a compiler would compute them anew for each use, in a
        cycle for each use of each use.
        """
        size = sum(leaf.size for leaf in jax.tree.leaves(self.one))
        few = not isinstance(tree, Chain) or _few_numbers(tree.memory)
        if size <= _SMALL and few and len(self.simulation.kernel.updates()) == 1:
            return tree
        return rounding.whole(tree, parameters.never[0])

    def _observation(self, parameters: Parameters, state: State, past: Value | None) -> Observation:
        """f where the chain is, derivative included, apart from the value that is averaged."""
        simulation = self.simulation
        x, past = rounding.settle((state.value, past), parameters.never[1])
        value = simulation.observable(parameters, x, past)
        return Observation(parameters, simulation.kernel, state, past, simulation.observable, value)

    def observe(self, parameters: Parameters, chain: Chain, watch: PyTree) -> Observed:
        """What one chain adds to the averages where it is now."""
        simulation = self.simulation
        plain = parameters.value_only()
        f = lambda x, past: (simulation.observable(plain, x, past).primal, None)
        place = (chain.state.x, without_tangents(chain.past))
        value, _ = rounding.settled(f, parameters.never[0])(*place)
        at = self._observation(parameters, chain.state, chain.past)
        estimator = simulation.estimator.observe(chain.memory, at)
        watched = None if watch is None else watch.square(at.value.primal)
        return Observed(value, estimator, watched)

    def note(self, parameters: Parameters, chain: Chain, shares) -> tuple[Chain, PyTree]:
        """The chain after a step, and what its estimator keeps of it until the block's end."""
        if type(self.simulation.estimator).note is Estimator.note:
            return chain, None
        at = self._observation(parameters, chain.state, chain.past)
        memory, kept = self.simulation.estimator.note(chain.memory, at, shares)
        return Chain(chain.state, chain.past, memory), kept

    def first(self) -> Chain:
        """The chain at its start, by itself."""
        init = self.simulation.init
        x = _trees.strong(init(jax.random.clone(self.key)) if callable(init) else init)
        return self.start(self.parameters(self.key), x)[0]

    def single_step(
        self, chain: Chain, record: PyTree, note: Callable[..., PyTree]
    ) -> tuple[Chain, PyTree]:
        """One step of a chain by itself, with this key for all of its randomness."""
        # A clone: `never` draws from the key too, and says nothing of it.
        noise = jax.tree.map(lambda leaf: leaf[0], self.noise(jax.random.clone(self.key), 1))
        return self.step(self.parameters(self.key), chain, noise, record, note)

    def first_value(self) -> Float[Array, "F"]:
        """f after one step of one chain: the shortest program with all that a user wrote in it."""
        chain, _ = self.single_step(self.first(), None, lambda record, step, events: None)
        return self.observe(self.parameters(self.key), chain, None).value

    def largest_log_density(self, x: PyTree) -> Float[Array, ""]:
        updates = self.simulation.kernel.updates()
        densities = [update.log_density(self.theta, x, *self.args) for update in updates]
        return jnp.max(jnp.abs(jnp.stack(densities)))


def _few_numbers(memory: PyTree) -> bool:
    """Whether an estimator's memory is small, or has no more than one alternative: pruning decides
    for each of its numbers.
    """
    weight = getattr(memory, "weight", None)
    if weight is None or weight.shape[0] == 1:
        return True
    return sum(leaf.size for leaf in jax.tree.leaves(memory)) <= 2 * _SMALL


def _primal(step: Step) -> PyTree:
    """What decides the primal's path: everything but tangents."""
    plain = lambda state: None if state is None else State(state.x, state.cache)
    parts = (plain(step.before), plain(step.after), step.decisions, plain(step.proposed))
    return without_tangents(parts)
