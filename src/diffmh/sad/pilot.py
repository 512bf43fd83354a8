"""Pilot: with many replicates, a few of them find out which estimator pays for its time."""

from __future__ import annotations

import functools

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

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
    runs = Runs(runs.run, runs.keys, runs.reverse, group)
    if not isinstance(estimator, Combined) or count < _MANY:
        return _find(estimator, runs)
    size = -(-max(LEAST_REPLICATES, count // _PILOT) // group) * group
    pilot = _find(estimator, Runs(runs.run, runs.keys[:size], runs.reverse))
    chosen = what_pays(estimator, runs.reverse, pilot)
    return _joined(pilot, _find(chosen, Runs(runs.run, runs.keys[size:], runs.reverse, group)))


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
    variance = {name: jnp.var(j, axis=-1) for name, j in pilot.others.items()}
    variance["combined"] = jnp.var(pilot.jacobian, axis=-1)
    excess = _over_least(variance)
    best = min(excess, key=lambda name: excess[name] * cost[name])
    estimators = {"combined": estimator, "alternatives": Alternatives(slots), "score": Score()}
    return estimators.get(best, Fitted())


def _over_least(variance: dict[str, Float[Array, "P F"]]) -> dict[str, float]:
    """Each parameter and result in units of the best that is known of it, and the middle one.
    What has no variance beats whatever has some, but for rounding.
    """
    least = functools.reduce(jnp.minimum, variance.values())
    most = functools.reduce(jnp.maximum, variance.values())
    none = least <= 1e-9 * most

    def over(variance: Float[Array, "P F"]) -> float:
        some = jnp.where(variance <= 1e-9 * most, 1.0, jnp.inf)
        return float(jnp.median(jnp.where(none, some, variance / jnp.where(none, 1.0, least))))

    return {name: over(entries) for name, entries in variance.items()}


def _joined(pilot: Found, rest: Found) -> Found:
    """A pilot, put into groups as they are, and the replicates after it."""
    trusted = pilot.others["alternatives"] if disagreement(pilot) else pilot.jacobian
    in_groups = lambda array: array.reshape(*array.shape[:-1], -1, rest.group).mean(axis=-1)
    join = lambda a, b: jnp.concatenate([in_groups(a), b], axis=-1)
    value, jacobian = join(pilot.value, rest.value), join(trusted, rest.jacobian)
    return Found(value, jacobian, pilot.others, rest.group)
