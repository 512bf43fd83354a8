"""A simulation, and its outcome."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from .estimator import Estimator
from .kernel import Kernel
from .watch import Stretches, Watch


class Simulation(eqx.Module):
    """A simulation: a kernel from a start, and what to observe of it with which estimator."""

    kernel: Kernel
    init: PyTree | Callable[[Key[Array, ""]], PyTree]
    f: Callable[..., PyTree]
    estimator: Estimator
    num_samples: int = eqx.field(static=True)
    burn_in: int = eqx.field(static=True)
    num_chains: int = eqx.field(static=True)
    lag: int = eqx.field(static=True, default=0)
    mesh: Mesh | None = eqx.field(static=True, default=None)

    def by(self, estimator: Estimator) -> Simulation:
        """The same chains with another estimator."""
        return dataclasses.replace(self, estimator=estimator)

    @property
    def num_steps(self) -> int:
        return self.burn_in + self.num_samples


def nothing(theta, x, *args) -> float:
    """Paths and draws need no f."""
    return 0.0


def flatten(value: PyTree) -> Float[Array, "F"]:
    """f's value as one vector of floats."""
    flat = ravel_pytree(value)[0]
    return flat if jnp.issubdtype(flat.dtype, jnp.floating) else flat.astype(float)


class Observed(eqx.Module):
    """The quantities that are averaged over the samples: f, what the estimator asks for, and what
    is watched.
    """

    value: Float[Array, "F *C"]
    estimator: PyTree
    watched: PyTree


class Meetings(eqx.Module):
    """When the chains of each pair met (−1: they have not), how many steps the pair was run for,
    whether they have met, and whether nothing of the pair is still under way.
    """

    time: Int[Array, "C"]
    steps: Int[Array, "C"]
    met: Bool[Array, "C"]
    finished: Bool[Array, "C"]
    lag: int = eqx.field(static=True)
    max_steps: int = eqx.field(static=True)


class Outcome(eqx.Module):
    """The averages over each chain's samples, and what was watched on the way: counts,
    the largest `|log g|` where the chain ended, and for a report what its stretches and halves
    say and by which method.
    """

    observed: Observed
    watch: Watch | None
    log_density: Float[Array, "C"] | None
    estimator: str = eqx.field(static=True)
    stretches: Stretches | None = None
    halves: Stretches | None = None
    # How it was estimated (`reports.method`), for the report.
    method: Any = None
    gathered: PyTree = None
    # Of pairs of chains that are run until they meet.
    meetings: Meetings | None = None


def joined(outcomes: list[Outcome]) -> Outcome:
    """The result of several runs of the same simulation with different keys, as if all were chains
    of one.
    """
    if len(outcomes) == 1:
        return outcomes[0]
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=-1), *outcomes)
