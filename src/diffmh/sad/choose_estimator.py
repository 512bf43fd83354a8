"""With many replicates, a few of them, the pilot, find out which estimator pays for its time.

The choice is kept with the program's plan: later runs of the same form (`plan`), with as many
replicates, take it from the first of them and do not wait for their own pilot. It never depends on
the numbers that it is applied to, those after the pilot, so that no bias comes of it. What depends
on where theta is, whether the score has an answer there, each run's own pilot still says.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ..jaxprs.program import Program, Scan, Variable
from ..runs.devices import Hosts
from .combination import LEAST_REPLICATES
from .derivative import NUM_PROBES
from .estimators import Alternatives, Combined, Estimator, Fitted, Found, Runs, Score, disagreement
from .plan import Plan

# With so many replicates and more there is a pilot, of one in `_PILOT`.
_MANY, _PILOT = 512, 256
# Where JAX goes backward, replicates are put into this many groups or a few more.
_GROUPS = 128
# By plan: what was chosen, by estimator, replicates and group.
_CHOSEN: weakref.WeakKeyDictionary[Plan, dict[Any, Estimator]] = weakref.WeakKeyDictionary()


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
    plan, alternatives = runs.run.plan, Alternatives(estimator.num_alternatives)
    # Hosts that share the replicates may have run different programs before: what one of them
    # remembers, another need not.
    kept = _CHOSEN.setdefault(plan, {}) if runs.mesh is None else {}
    form = (estimator, count, group)
    chosen = kept.get(form)
    rest = None if chosen is None else _find(chosen, runs.of(later, group))
    # Where a probability of exactly 0 or 1 moves, the score is biased: whatever contains it must
    # go, for the pilot's own replicates too.
    if disagreement(pilot):
        trusted, by = pilot.others["alternatives"], alternatives
    else:
        trusted, by = pilot.jacobian, chosen or what_pays(estimator, plan, runs.reverse, pilot)
        kept[form] = by
    if rest is None or by != chosen:
        rest = _find(by, runs.of(later, group))
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


def what_pays(estimator: Combined, plan: Plan, reverse: bool, pilot: Found) -> Estimator:
    """The estimator of least variance times work, by the pilot's variances."""
    slots = estimator.num_alternatives
    score, alternatives = work_of_score(plan, reverse), work_of_alternatives(plan, slots, reverse)
    tried: dict[str, tuple[Estimator, Any, int]] = {
        "score": (Score(), pilot.others["score"], score),
        "fitted": (Fitted(), pilot.others["score with a fitted baseline"], score),
        "alternatives": (Alternatives(slots), pilot.others["alternatives"], alternatives),
        "combined": (estimator, pilot.jacobian, score + alternatives),
    }
    excess = _over_least({name: np.asarray(of).var(axis=-1) for name, (_, of, _) in tried.items()})
    best = min(tried, key=lambda name: excess[name] * tried[name][2])
    return tried[best][0]


def work_of_score(plan: Plan, reverse: bool) -> int:
    """How many numbers a run has that are differentiated with their draws held fixed: the primal's,
    and a tangent for each parameter, or in reverse two more for each that has a derivative.
    """
    facts, tangents = plan.by_jax.analysis, 2 if reverse else plan.num_parameters
    return _work(plan.by_jax.program, lambda variable: 1 + tangents * (variable in facts.tangent))


def work_of_alternatives(plan: Plan, num_slots: int, reverse: bool) -> int:
    """The same of a run by alternatives: values that may differ in them have a lane for each slot
    and one for a newcomer, and those that are banked have tangents.
    """
    facts = plan.by_jax.analysis
    tangents = min(NUM_PROBES, plan.num_parameters) + 2 if reverse else plan.num_parameters

    def copies(variable: Variable) -> int:
        lanes = (num_slots + 1) * (variable in facts.branched)
        return 1 + tangents * facts.has_tangent(variable) + lanes

    return _work(plan.by_jax.program, copies)


def _work(program: Program, copies: Callable[[Variable], int]) -> int:
    total = 0
    for equation in program.equations:
        if equation.control is None:
            total += sum(math.prod(out.shape) * copies(out) for out in equation.outputs)
        # A `while_loop` counts as one round, for all estimators alike: only ratios matter.
        rounds = equation.control.length if isinstance(equation.control, Scan) else 1
        total += rounds * sum(_work(inner, copies) for inner in equation.inner)
    return total


def _over_least(variance: dict[str, Any]) -> dict[str, float]:
    """Each parameter and result in units of the best that is known of it, and the middle one.
    What has no variance beats whatever has some, but for rounding.
    """
    # Ratios, as parameters and results have units of their own.
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

    def join(pilot, rest):
        grouped = pilot.reshape(*pilot.shape[:-1], -1, group).mean(axis=-1)
        return jnp.concatenate([grouped, rest], axis=-1)

    return jax.tree.map(join, pilot, rest)
