"""Pilot: with many replicates, a few of them find out which estimator pays for its time."""

from __future__ import annotations

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .._sharding import Hosts
from .combination import LEAST_REPLICATES
from .estimators import (
    Alternatives,
    Combined,
    Estimator,
    Fitted,
    Found,
    Runs,
    Score,
    disagreement,
)

# With so many replicates and more there is a pilot, of one in `_PILOT`.
_MANY, _PILOT = 512, 256
# Where JAX goes backward, replicates are put into this many groups or a few more.
_GROUPS = 128


def find(estimator: Estimator, runs: Runs, grouped: bool = False) -> Found:
    """Each replicate's value and derivative, or each group's; after a pilot, if there are many."""
    count = runs.keys.shape[0]
    group = _group_size(count) if grouped and runs.reverse else 1
    runs = runs.of(runs.keys, group)
    if not isinstance(estimator, Combined) or count < _MANY:
        return _find(estimator, runs)
    size = -(-max(LEAST_REPLICATES, count // _PILOT) // group) * group
    first, later = _apart(runs.keys, size)
    pilot = Hosts(runs.mesh).gathered(_find(estimator, runs.of(first)))
    chosen = what_pays(estimator, runs.reverse, pilot)
    rest = _find(chosen, runs.of(later, group))
    trusted = pilot.others["alternatives"] if disagreement(pilot) else pilot.jacobian
    value, jacobian = _joined((pilot.value, trusted), (rest.value, rest.jacobian), group)
    return Found(value, jacobian, pilot.others, group)


@functools.partial(jax.jit, static_argnums=1)
def _apart(keys: Any, size: int) -> tuple[Any, Any]:
    return keys[:size], keys[size:]


@eqx.filter_jit
def _find(estimator: Estimator, runs: Runs) -> Found:
    return estimator.find(runs)


def _group_size(count: int) -> int:
    """The largest divisor that leaves enough groups."""
    sizes = range(1, count // _GROUPS + 1)
    return max((size for size in sizes if count % size == 0), default=1)


def what_pays(estimator: Combined, reverse: bool, pilot: Found) -> Estimator:
    """The estimator of least variance times cost, by the pilot's variances. Costs are in units of
    the score's, as measured on the programs of `benchmarks/sad_programs.py`.
    """
    slots = estimator.num_alternatives
    if disagreement(pilot):
        return Alternatives(slots)
    lanes = (4.0 if reverse else 2.5) + 1.5 * slots
    cost = {"score": 1.0, "score with a fitted baseline": 1.8 if reverse else 1.05}
    cost |= {"alternatives": lanes, "combined": lanes + (2.5 if reverse else 1.5)}
    found = {**pilot.others, "combined": pilot.jacobian}
    variance = {name: np.asarray(jacobian).var(axis=-1) for name, jacobian in found.items()}
    excess = _over_least(variance)
    best = min(excess, key=lambda name: excess[name] * cost[name])
    estimators = {"combined": estimator, "alternatives": Alternatives(slots), "score": Score()}
    return estimators.get(best, Fitted())


def _over_least(variance: dict[str, Any]) -> dict[str, float]:
    """Each parameter and result in units of the best that is known of it, and the middle one.
    What has no variance beats whatever has some, but for rounding.
    """
    least = functools.reduce(np.minimum, variance.values())
    most = functools.reduce(np.maximum, variance.values())
    none = least <= 1e-9 * most

    def over(variance: Any) -> float:
        some = np.where(variance <= 1e-9 * most, 1.0, np.inf)
        return float(np.median(np.where(none, some, variance / np.where(none, 1.0, least))))

    return {name: over(entries) for name, entries in variance.items()}


@functools.partial(jax.jit, static_argnums=2)
def _joined(pilot: Any, rest: Any, group: int) -> Any:
    """A pilot, put into groups as they are, and the replicates after it."""
    in_groups = lambda array: array.reshape(*array.shape[:-1], -1, group).mean(axis=-1)
    join = lambda a, b: jnp.concatenate([in_groups(a), b], axis=-1)
    return jax.tree.map(join, pilot, rest)
