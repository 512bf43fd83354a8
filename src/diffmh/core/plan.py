"""The plan: all that is known of a simulation before it runs.

It is made once for each form of the arguments and kept: what was asked for, the form of one chain's
state, the length of a block, and how chains are grouped. Nothing in it depends on a value.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Key, PyTree

from ..base import trees, validate
from ..fast import plain_jax
from .adapted import Continued
from .estimator import Estimator
from .parameters import Parameters
from .simulation import Simulation, flatten
from .values import Value

# A block holds at most this many random words per chain, and at most this many steps.
_BLOCK_WORDS, BLOCK_STEPS = 4096, 128

# A block after the steps that were asked for has at most this many.
_FURTHER_STEPS = 32

# Small states: chains run in groups of about this many bytes of state, which stay in the
# processor's cache, with a least and a largest number of chains.
_GROUP_BYTES, _MOST_GROUP_BYTES = 4096, 16384
_LEAST_GROUP, _LARGEST_GROUP = 64, 512

# Medium states, from so many bytes on, of some tens of chains run in groups of 8: XLA vectorises an
# innermost loop over 8 chains or over 64 and more, but not one over 16 or 32.
_MEDIUM_BYTES, _FEW_CHAINS = 2048, 8

# Large states, from so many bytes on, run chain by chain: their own axes are long enough.
_LARGE_BYTES = 16384


# The number with which the key of a chain's start is folded for its second start: no counter of
# the user's own draws in `init` reaches it.
_SECOND = 0x7365636F


class Plan(eqx.Module):
    """A simulation with what its arguments' forms say. `keys` are those of a share of the chains,
    where devices or groups run them in turn.
    """

    simulation: Simulation
    leaves: tuple[jax.ShapeDtypeStruct, ...] = eqx.field(static=True)
    structure: Any = eqx.field(static=True)
    block_steps: int = eqx.field(static=True)
    num_chains: int = eqx.field(static=True)
    f_depends_on_theta: bool = eqx.field(static=True, default=True)
    keys: Key[Array, "C 2"] | None = None

    @staticmethod
    def of(
        simulation: Simulation,
        theta: PyTree,
        key: Key[Array, ""],
        args: tuple[Any, ...],
        f_depends_on_theta: bool = True,
    ) -> Plan:
        """The plan of a simulation, from the form of its start. `theta` may be a form."""
        # Forms only: nothing of the user's is run here.
        x = jax.eval_shape(lambda key: start_of_one(simulation, key), key)
        leaves, structure = jax.tree.flatten(x)
        forms = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)
        steps = _block_steps(simulation, theta, x, key, args)
        return Plan(simulation, forms, structure, steps, simulation.num_chains, f_depends_on_theta)

    @property
    def estimator(self) -> Estimator:
        return self.simulation.estimator

    @property
    def state(self) -> PyTree:
        """The form of one chain's state."""
        return jax.tree.unflatten(self.structure, self.leaves)

    @property
    def most_steps(self) -> int:
        """The most steps that a chain takes: as many as were asked for, unless the recorder stops
        by itself.
        """
        return self.estimator.most_steps(self.simulation.num_steps)

    @property
    def asked_blocks(self) -> int:
        """The blocks that have the steps that were asked for."""
        return -(-self.simulation.num_steps // self.block_steps)

    @property
    def further_steps(self) -> int:
        """The length of the blocks after these: short, since a run that stops by itself seldom has
        many of them.
        """
        return min(self.block_steps, _FURTHER_STEPS)

    @property
    def num_blocks(self) -> int:
        further = max(0, self.most_steps - self.asked_blocks * self.block_steps)
        return self.asked_blocks + -(-further // self.further_steps)

    @property
    def num_groups(self) -> int:
        """The number of groups that chains run in, one after the other, on a processor with caches
        and vector units: by the bytes of one chain's state and the number of chains alone, so that
        the path does not depend on the estimator.
        """
        if jax.default_backend() != "cpu" or plain_jax.value:
            return 1
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in self.leaves)
        if size >= _LARGE_BYTES:
            return self.num_chains
        if size >= _MEDIUM_BYTES and _FEW_CHAINS < self.num_chains < _LEAST_GROUP:
            groups, rest = divmod(self.num_chains, _FEW_CHAINS)
            return 1 if rest else groups
        if _LEAST_GROUP * size > _MOST_GROUP_BYTES:
            return 1
        most = min(max(_LEAST_GROUP, _GROUP_BYTES // max(1, size)), _LARGEST_GROUP)
        # Groups of equal size: one compiled program runs them all.
        for chains in range(min(most, self.num_chains), _LEAST_GROUP - 1, -1):
            if self.num_chains % chains == 0:
                return self.num_chains // chains
        return 1

    def by(self, estimator: Estimator) -> Plan:
        """The plan for the same chains with another estimator."""
        return dataclasses.replace(self, simulation=self.simulation.by(estimator))

    def alone(self) -> Plan:
        """The plan for the same chains on one device."""
        return dataclasses.replace(self, simulation=dataclasses.replace(self.simulation, mesh=None))

    def share(self, keys: Key[Array, "C 2"]) -> Plan:
        """The plan for the chains of these keys only."""
        return dataclasses.replace(self.alone(), keys=keys, num_chains=keys.shape[0])

    def chain_keys(self, key: Key[Array, ""]) -> Key[Array, "C 2"]:
        """For each chain a key for its start and one for its steps. Every block asks for them
        again, which is not a reuse: the steps' key is folded with the block's number.
        """
        if self.keys is not None:
            return jax.random.clone(self.keys)
        # By `split`, whose i-th key does not depend on the count: the first chains of a larger run
        # are the chains of a smaller one.
        keys = jax.random.split(jax.random.clone(key), self.num_chains)
        return jax.vmap(jax.random.split)(keys)

    def starts(self, key: Key[Array, ""], second: bool = False) -> PyTree:
        """The start state of each chain, chains last; or a second one of the same law, from a key
        of its own.
        """
        keys, init = self.chain_keys(key)[:, 0], self.simulation.init
        if second:
            keys = jax.vmap(lambda key: jax.random.fold_in(key, _SECOND))(keys)
        if isinstance(init, Continued):
            start = jax.vmap(init.of_chain, out_axes=-1)
            return start(self._numbers(key), keys)
        if callable(init):
            start = jax.vmap(lambda key: start_of_one(self.simulation, key), out_axes=-1)
            return start(keys)

        def everywhere(leaf):
            return jnp.broadcast_to(leaf[..., None], (*leaf.shape, self.num_chains))

        return jax.tree.map(everywhere, trees.strong(self.simulation.init))

    def _numbers(self, key: Key[Array, ""]) -> Int[Array, "C"]:
        """The number of each chain among all of them: a share knows its chains by their keys."""
        if self.keys is None:
            return jnp.arange(self.num_chains)
        whole = dataclasses.replace(self, keys=None, num_chains=self.simulation.num_chains)
        own, every = (jax.random.key_data(plan.chain_keys(key)[:, 0]) for plan in (self, whole))
        return jnp.argmax(jnp.all(own[:, None] == every, axis=-1), axis=1)

    def observable(self, parameters: Parameters, x: PyTree | Value, past: Value | None) -> Value:
        """`f(θ, x)`, or `f(θ, x_earlier, x)`, flattened to shape (F,); with its derivative at fixed
        decisions if a derivative is wanted and f has one.
        """
        places = (x,) if past is None else (_oldest(past), x)
        moves = any(isinstance(place, Value) and place.tangent is not None for place in places)
        if not (self.f_depends_on_theta or moves):
            parameters = parameters.value_only()
        return parameters.evaluate(lambda *operands: flatten(self.simulation.f(*operands)), *places)


def start_of_one(simulation: Simulation, key: Key[Array, ""]) -> PyTree:
    """The start of the chain whose start has this key."""
    init = simulation.init
    if not callable(init):
        return trees.strong(init)
    return trees.strong(validate.state(init(key), "what `init(key)` returns"))


def _block_steps(simulation: Simulation, theta, x: PyTree, key: Key[Array, ""], args) -> int:
    """The number of steps whose randomness is drawn at once. It depends on one chain's primal
    alone, so that the path does not depend on the estimator.
    """
    if simulation.kernel.draws_within_steps:
        return 1

    def noise(key):
        def of_one_step(update, key):
            return update.prepared(theta, x, args).noise(key, x, 1)

        return simulation.kernel.distribute(of_one_step, key)

    words = sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(noise, key)))
    most = min(BLOCK_STEPS, _BLOCK_WORDS // max(1, words), simulation.num_steps)
    return max(1, most)


def _oldest(past: Value) -> Value:
    primal = jax.tree.map(lambda leaf: leaf[-1], past.primal)
    return Value(primal, jax.tree.map(lambda leaf: leaf[:, -1], past.tangent))
