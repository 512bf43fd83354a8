"""Trials of updates, of one's own above all: a step against the density that it leaves invariant, a
coupled step against the primal's, the odds of flips against those of the decisions, and the
derivative of a short run against differences with common random numbers.
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from ..base import trees
from ..core.estimator import ValueOnly
from ..core.kernel import Kernel, Update
from ..core.parameters import Parameters
from ..core.simulation import Simulation
from ..core.update_checks import checked_state
from ..estimators import odds_of
from ..fast import rounding
from . import trials
from .derivative_trials import try_derivative, try_odds
from .invariance_trials import try_invariance
from .trial_setting import MOST_UPDATES, Setting, one_noise, visited
from .trials import Trial, Verdict


def try_updates(
    simulation: Simulation, updates: list[Update], theta: PyTree, key: Array, args: tuple[Any, ...]
) -> list[Verdict | Trial]:
    """The trials of these updates of a simulation's kernel, and of its derivative."""
    key_visit, key_run, *keys = jax.random.split(key, 2 + len(updates))
    paths = visited(simulation.by(ValueOnly()), theta, jax.random.split(key_visit, 32), args)
    setting = Setting(simulation, theta, args, paths)
    chosen = np.unique(np.linspace(0, len(updates) - 1, MOST_UPDATES).round().astype(int))
    found: list[Verdict | Trial] = []
    for number in chosen:
        found += try_update(setting, updates[number], keys[number])
    return [*found, try_derivative(setting, updates, key_run)]


class _Stepped(eqx.Module):
    """Steps from x and coupled steps from y: where they led, and whether a coupled step from x
    itself led where the step did.
    """

    after: PyTree
    coupled: PyTree
    together: Array


@eqx.filter_jit
def _stepped(update: Update, kernel: Kernel, theta, args, key, xs, ys) -> _Stepped:
    name = update.name_in_messages

    def one(given):
        key, x, y = given
        key_noise, key_coupling, key_never = jax.random.split(key, 3)
        parameters = Parameters(theta, args, rounding.Barriers.draw(key_never), False)
        ready = update.prepared(theta, x, args)
        noise = one_noise(ready.noise, key_noise, x, f"{name}.noise")
        coupling_noise = one_noise(ready.coupling_noise, key_coupling, x, f"{name}.coupling_noise")
        step = update.step(parameters, kernel.start(parameters, x), noise)

        def coupled(y):
            state = kernel.start(parameters, y)
            moved = update.coupled_step(parameters, step, state, noise, coupling_noise)
            return checked_state(moved, step.after, f"{name}.coupled_step").x

        return _Stepped(step.after.x, coupled(y), trees.equal(coupled(x), step.after.x))

    count = jax.tree.leaves(xs)[0].shape[0]
    batch = max(1, min(count, 2**18 // trees.size(trees.take(xs, 0))))
    return jax.lax.map(one, (jax.random.split(key, count), xs, ys), batch_size=batch)


def try_update(setting: Setting, update: Update, key: Array) -> list[Verdict | Trial]:
    name = update.name_in_messages
    key_pairs, key_steps, key_direct, key_invariant, key_odds = jax.random.split(key, 5)
    count, states = setting.num_draws, setting.states
    num_states = jax.tree.leaves(states)[0].shape[0]

    def step(key, xs, ys) -> _Stepped:
        return _stepped(update, setting.kernel, setting.theta, setting.args, key, xs, ys)

    pairs = np.asarray(jax.random.randint(key_pairs, (4, 2), 0, num_states))
    # Few pairs of states with many draws each: the law of a coupled step is a function of the pair.
    which = np.repeat(pairs, -(-count // 4), axis=0)[:count]
    xs, ys = (trees.take(states, which[:, side]) for side in range(2))
    beside = step(key_steps, xs, ys)
    found: list[Verdict | Trial] = [_faithful(name, beside)]
    direct = step(key_direct, ys, ys).after
    found.append(_marginal(name, pairs, which, states, beside.coupled, direct))

    def only_step(key, xs):
        return step(key, xs, xs).after

    found.append(try_invariance(setting, update, key_invariant, only_step))
    if None not in odds_of(update):
        found.append(try_odds(setting, update, key_odds))
    return found


def _faithful(name: str, stepped: _Stepped) -> Verdict:
    kept = bool(jnp.all(stepped.together))
    apart = f"{1 - np.mean(np.asarray(stepped.together)):.2%} of {stepped.together.size} steps"
    right = "from y = x it leads where the step did"
    wrong = f"from y = x it does not lead to the same state as the step, bit for bit, in {apart}"
    return Verdict.of(f"{name}.coupled_step is faithful", kept, right, wrong)


def _marginal(name: str, pairs, which, states, coupled, direct) -> Trial:
    """Coupled steps of y against steps from y, pair by pair."""
    coupled, direct = trials.flat(coupled), trials.flat(direct)
    p_values: list[float] = []
    for pair in np.unique(pairs, axis=0):
        mine = np.all(which == pair, axis=1)
        atoms = [trials.flat(trees.take(states, pair[side : side + 1]))[0] for side in range(2)]
        p_values += trials.same_law(coupled[mine], direct[mine], atoms)
    meaning = "an alternative does not move as a chain does, so the gradient is biased"
    return Trial(f"{name}.coupled_step keeps its marginal", tuple(p_values), meaning)
