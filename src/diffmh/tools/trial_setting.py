"""The setting of a trial: a simulation at given parameters, the states that it visits, and bounded
functions of states whose means are compared.
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from ..base import trees
from ..core.chain import Stepper
from ..core.kernel import Kernel
from ..core.plan import Plan
from ..core.simulation import Simulation
from ..core.update_checks import checked_noise
from . import trials

# At most this many updates of a kernel are tried, the first and the last among them.
MOST_UPDATES = 4
_DRAWS = 2**17
# Numbers in the draws of one trial, which bound the memory for large states.
NUMBERS = 2**22


class Setting(eqx.Module):
    """A simulation that is tried, at given parameters and data, and states that it visits, paths
    leading and then their steps.
    """

    simulation: Simulation
    theta: PyTree
    args: tuple[Any, ...]
    paths: PyTree

    @property
    def kernel(self) -> Kernel:
        return self.simulation.kernel

    @property
    def states(self) -> PyTree:
        """One after the other."""
        return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), self.paths)

    def from_rows(self, rows: np.ndarray) -> PyTree:
        """The states of flat rows: the inverse of `trials.flat`."""
        leaves, structure = jax.tree.flatten(self.states)
        ends = np.cumsum([leaf[0].size for leaf in leaves])[:-1]
        parts = zip(np.split(rows, ends, axis=1), leaves, strict=True)
        made = [part.reshape(-1, *leaf.shape[1:]).astype(leaf.dtype) for part, leaf in parts]
        return structure.unflatten([jnp.asarray(leaf) for leaf in made])

    @property
    def num_draws(self) -> int:
        return max(2_000, min(_DRAWS, NUMBERS // trees.size(trees.take(self.states, 0))))


@eqx.filter_jit
def visited(simulation: Simulation, theta, keys, args) -> PyTree:
    def path(key):
        stepper = Stepper(Plan.of(simulation, theta, key, args), theta, args)
        parameters = stepper.parameters(key)

        def body(chain, noise):
            chain, _ = stepper.step(parameters, chain, noise, None, lambda *_: None)
            return chain, chain.state.x

        noise = stepper.noise(jax.random.clone(key), 64)
        return jax.lax.scan(body, stepper.first(jax.random.clone(key)), noise)[1]

    return jax.vmap(path)(keys)


class Features(eqx.Module):
    """Bounded smooth functions of states as flat rows: of coordinates, odd and even, and random
    cosines, which see how they depend on each other.
    """

    centre: Float[Array, "d"]
    spread: Float[Array, "d"]

    @staticmethod
    def of(states: PyTree) -> Features:
        """In units of these states."""
        rows = trials.flat(states)
        # In units of the states' own spread: tanh and cosines of order 1 see the bulk.
        spread = np.std(rows, axis=0)
        return Features(
            jnp.asarray(np.mean(rows, axis=0)), jnp.asarray(np.where(spread > 0, spread, 1.0))
        )

    def __call__(self, rows: Array) -> Array:
        size = self.centre.size
        rng = np.random.default_rng(0)
        # Always the same directions: a trial must not depend on anything but its key.
        directions = rng.normal(size=(size, 4)) / np.sqrt(min(size, 4))
        scaled = (rows - self.centre) / self.spread
        waves = jnp.cos(scaled @ directions + rng.uniform(0, 2 * np.pi, size=4))
        few = scaled[..., :4]
        return jnp.concatenate([jnp.tanh(few), jnp.cos(few), waves], axis=-1)


def one_noise(draw, key, x: PyTree, name: str) -> PyTree:
    """The noise of one step."""
    form = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), x)
    return trees.take(checked_noise(draw(key, form, 1), 1, name), 0)
