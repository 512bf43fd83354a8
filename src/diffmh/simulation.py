"""What to run, and what comes of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh
from jaxtyping import Array, Float, Key, PyTree

from . import _trees
from .counts import Silent, Watch
from .estimators import Backward, Births, Estimator, Forward, ValueOnly
from .intervals import Stretches
from .kernel import Kernel
from .method import Method
from .parameters import Parameters
from .values import Value


class Simulation(eqx.Module):
    """What to run: a kernel from a start, and what to observe of it by which estimator."""

    kernel: Kernel
    init: PyTree | Callable[[Key[Array, ""]], PyTree]
    f: Callable[..., PyTree]
    estimator: Estimator
    num_samples: int = eqx.field(static=True)
    burn_in: int = eqx.field(static=True)
    num_chains: int = eqx.field(static=True)
    lag: int = eqx.field(static=True, default=0)
    f_depends_on_theta: bool = eqx.field(static=True, default=True)
    mesh: Mesh | None = eqx.field(static=True, default=None)
    keys: Key[Array, "C 2"] | None = None

    def share(self, keys: Key[Array, "C 2"]) -> Simulation:
        """The chains of these keys only, where this is traced."""
        return dataclasses.replace(self, keys=keys, num_chains=keys.shape[0], mesh=None)

    def plain(self) -> Simulation:
        """The same chains, with no derivative."""
        return dataclasses.replace(self, estimator=ValueOnly())

    def reading(self, how: Backward | Forward) -> Simulation:
        """The same chains, their births read in this way."""
        assert isinstance(self.estimator, Births)
        count = self.estimator.alternatives
        return dataclasses.replace(
            self, estimator=Births(count, how, explicit=self.f_depends_on_theta)
        )

    @property
    def num_steps(self) -> int:
        return self.burn_in + self.num_samples

    def starts(self, key: Key[Array, ""]) -> PyTree:
        """The start state of each chain, chains last."""
        if callable(self.init):
            keys = self.chain_keys(key)[:, 0]
            return jax.vmap(lambda key: _trees.strong(self.init(key)), out_axes=-1)(keys)
        last = lambda leaf: jnp.broadcast_to(leaf[..., None], (*leaf.shape, self.num_chains))
        return jax.tree.map(last, _trees.strong(self.init))

    def chain_keys(self, key: Key[Array, ""]) -> Key[Array, "C 2"]:
        """For each chain a key for its start and one for its steps. Asked for again in every
        block, which is no reuse: the steps' are folded with the block's number.
        """
        if self.keys is not None:
            return jax.random.clone(self.keys)
        keys = jax.random.split(jax.random.clone(key), self.num_chains)
        return jax.vmap(jax.random.split)(keys)

    def observable(self, parameters: Parameters, x: PyTree | Value, past: Value | None) -> Value:
        """`f(θ, x)`, or `f(θ, x_earlier, x)`, flattened to shape (F,); with its derivative at fixed
        decisions if a derivative is wanted and f has one.
        """
        places = (x,) if past is None else (_oldest(past), x)
        moves = any(isinstance(place, Value) and place.tangent is not None for place in places)
        if not (self.f_depends_on_theta or moves):
            parameters = parameters.value_only()
        return parameters.evaluate(lambda *operands: flatten(self.f(*operands)), *places)


def nothing(theta, x, *args) -> float:
    """Paths and draws need no f."""
    return 0.0


def _oldest(past: Value) -> Value:
    primal = jax.tree.map(lambda leaf: leaf[-1], past.primal)
    return Value(primal, jax.tree.map(lambda leaf: leaf[:, -1], past.tangent))


def flatten(value: PyTree) -> Float[Array, "F"]:
    """f's value as one vector of floats."""
    flat = ravel_pytree(value)[0]
    return flat if jnp.issubdtype(flat.dtype, jnp.floating) else flat.astype(float)


class Observed(eqx.Module):
    """What is averaged over the samples: f, what the estimator asks for, and what is watched."""

    value: Float[Array, "F *C"]
    estimator: PyTree
    watched: PyTree


class Outcome(eqx.Module):
    """The averages over each chain's samples, and what was watched on the way: counts,
    the largest `|log g|` where the chain ended, and for a report what its stretches and halves
    say and by which method.
    """

    observed: Observed
    watch: Watch | Silent
    log_density: Float[Array, "C"] | None
    estimator: str = eqx.field(static=True)
    stretches: Stretches | None = None
    halves: Stretches | None = None
    method: Method | None = None
    gathered: PyTree = None


def joined(outcomes: list[Outcome]) -> Outcome:
    """Of several runs of the same simulation with different keys, as if all were chains of one."""
    if len(outcomes) == 1:
        return outcomes[0]
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=-1), *outcomes)
