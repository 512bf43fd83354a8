"""Choose an estimator: with many replicates, a few of them (the pilot) are used to find the
estimator with the least variance times work.

The choice is stored with the program's plan: later runs of the same form (`plan`) and number of
replicates use it without waiting for their own pilot. The choice does not depend on the replicates
that it is applied to, those after the pilot, so it causes no bias. Whether the score exists at the
current theta is still decided by each run's own replicates.
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
from .estimators import Alternatives, Combined, Estimator, Fitted, Found, Runs, Score
from .plan import Plan

# From this many replicates on there is a pilot of one in `_PILOT`.
_MANY, _PILOT = 512, 256
# In the reverse mode, replicates are divided into this many groups or a few more.
_GROUPS = 128
# The choices of each plan, by estimator, number of replicates and group size.
_CHOSEN: weakref.WeakKeyDictionary[Plan, dict[Any, Estimator]] = weakref.WeakKeyDictionary()


def find(estimator: Estimator, runs: Runs, grouped: bool = False) -> Found:
    """The value and derivative of each replicate or group; with a pilot if there are many."""
    count = runs.keys.shape[0]
    group = _group_size(count) if grouped and runs.reverse else 1
    runs = runs.of(runs.keys, group)
    if not isinstance(estimator, Combined) or count < _MANY:
        return _find(estimator, runs)
    size = -(-max(LEAST_REPLICATES, count // _PILOT) // group) * group
    first, later = _apart(runs.keys, size)
    pilot = Hosts(runs.mesh).gathered(_find(estimator, runs.of(first)))
    plan, alternatives = runs.run.plan, Alternatives(estimator.num_alternatives)
    # Hosts that share the replicates may have run different programs before, so they must not
    # rely on stored choices: these may differ between hosts.
    kept = _CHOSEN.setdefault(plan, {}) if runs.mesh is None else {}
    form = (estimator, count, group)
    chosen = kept.get(form)
    rest = None if chosen is None else _find(chosen, runs.of(later, group))
    # If the score does not exist, estimators that contain it are excluded.
    if pilot.scoreless:
        by = alternatives
    else:
        by = chosen or what_pays(estimator, plan, runs.reverse, pilot)
        kept[form] = by
    if rest is None or by != chosen:
        rest = _find(by, runs.of(later, group))
    # More replicates may show what the pilot did not; then its own are corrected too.
    scoreless = pilot.scoreless | Hosts(runs.mesh).gathered(rest.scoreless)
    trusted = pilot.others["alternatives"] if scoreless else pilot.jacobian
    value, jacobian = _joined((pilot.value, trusted), (rest.value, rest.jacobian), group)
    return Found(value, jacobian, pilot.others, group, scoreless)


@functools.partial(jax.jit, static_argnums=1)
def _apart(keys: Any, size: int) -> tuple[Any, Any]:
    return keys[:size], keys[size:]


@eqx.filter_jit
def _find(estimator: Estimator, runs: Runs) -> Found:
    return estimator.find(runs)


def _group_size(count: int) -> int:
    """The largest divisor of `count` that leaves enough groups."""
    sizes = range(1, count // _GROUPS + 1)
    return max((size for size in sizes if count % size == 0), default=1)


def what_pays(estimator: Combined, plan: Plan, reverse: bool, pilot: Found) -> Estimator:
    """The estimator with the least variance times work, given the pilot's variances."""
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
    """The number of floats that a run of the score differentiates with its draws held fixed: the
    primal's and a tangent for each parameter, or in reverse two more for each with a derivative.
    """
    facts, tangents = plan.by_jax.analysis, 2 if reverse else plan.num_parameters
    return _work(plan.by_jax.program, lambda variable: 1 + tangents * (variable in facts.tangent))


def work_of_alternatives(plan: Plan, num_slots: int, reverse: bool) -> int:
    """The same for a run with alternatives. Values that may differ have a lane for each slot and
    one for a newcomer; banked values have tangents.
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
        # A `while_loop` counts as one iteration for all estimators: only ratios matter.
        rounds = equation.control.length if isinstance(equation.control, Scan) else 1
        total += rounds * sum(_work(inner, copies) for inner in equation.inner)
    return total


def _over_least(variance: dict[str, Any]) -> dict[str, float]:
    """The median over parameters and results of each estimator's variance over the smallest.
    A variance that is zero up to rounding counts as the smallest.
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
    """The pilot, divided into the same groups, and the replicates after it."""

    def join(pilot, rest):
        grouped = pilot.reshape(*pilot.shape[:-1], -1, group).mean(axis=-1)
        return jnp.concatenate([grouped, rest], axis=-1)

    return jax.tree.map(join, pilot, rest)
