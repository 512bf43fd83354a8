"""Trials of derivatives: that of a short run against differences with common random numbers, and
the odds of flips against those of the decisions.
"""

from __future__ import annotations

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, PyTree

from .._expectation import Expectation
from ..base import trees
from ..core import alternatives
from ..core.alternatives import Transition
from ..core.kernel import Kernel, Update
from ..core.parameters import Parameters
from ..core.simulation import Simulation
from ..estimators import StochasticDerivative, matched_odds
from ..fast import rounding
from . import trials
from .trial_setting import MOST_UPDATES, NUMBERS, Features, Setting, one_noise
from .trials import Trial, Verdict

# The short run that is differentiated, and its chains.
_STEPS = 3
_CHAINS = 2**15
# What differences of the features, which are at most 1, have lost.
_ROUNDING = 1e-5
# By how much differences change the log ratios of a step.
_CHANGE = 0.15


class _Observed(eqx.Module):
    """The features of a state, as f."""

    features: Features

    def __call__(self, theta, x, *args):
        leaves = [jnp.ravel(leaf).astype(float) for leaf in jax.tree.leaves(x)]
        return self.features(jnp.concatenate(leaves))


class _AnyOf(eqx.Module):
    """A start at one of these states."""

    states: PyTree

    def __call__(self, key):
        count = jax.tree.leaves(self.states)[0].shape[0]
        return trees.take(self.states, jax.random.randint(key, (), 0, count))


def try_derivative(setting: Setting, updates: list[Update], key: Array) -> Trial:
    """Compare derivatives of the features' means with finite differences of fourth order that use
    the same random numbers: for each chain of a short run, along a few directions of θ.
    """
    given = (_short_run(setting), setting.theta, key, setting.args)
    flat, _ = ravel_pytree(setting.theta)
    p_values: list[float] = []
    for direction in jnp.asarray(trials.directions(flat.size, 3), flat.dtype):
        width = _width(setting, updates, direction)
        # One key for all: with common random numbers most of the noise cancels in the differences.
        ends = [_value(*given, step * width * direction) for step in (1, -1, 2, -2)]
        ahead, behind, far_ahead, far_behind = (np.asarray(end, float) for end in ends)
        # f'(0) w + O(w⁵): the error of fourth order is far below the noise for log ratios that
        # change by `_CHANGE`.
        difference = (8 * (ahead - behind) - (far_ahead - far_behind)) / 12
        if np.all(np.isfinite(difference)):
            terms = width * np.asarray(_slope(*given, direction), float) - difference
            # What is only rounding must not count as evidence: chains whose decisions did not
            # change differ by the last digits alone.
            terms[np.abs(terms) < _ROUNDING] = 0.0
            p_values += [trials.mean_zero(column) for column in terms.T]
    meaning = (
        "the estimate disagrees with finite differences of runs with common random numbers. Check"
        " that the decisions of a step are independent given the state before, that `flipped`"
        " leads where a flipped decision would, and that `evaluate` gets everything that a"
        " probability depends on."
    )
    return Trial("derivative of a short run", tuple(p_values), meaning)


@eqx.filter_jit
def _value(simulation: Simulation, theta, key, args, change: Array) -> Array:
    """The value of each chain, at changed parameters."""
    flat, unravel = ravel_pytree(theta)
    return Expectation(simulation).per_chain(unravel(flat + change), key, *args)


@eqx.filter_jit
def _slope(simulation: Simulation, theta, key, args, direction: Array) -> Array:
    def value(change):
        return _value(simulation, theta, key, args, change)

    return jax.jvp(value, (jnp.zeros_like(direction),), (direction,))[1]


def _short_run(setting: Setting) -> Simulation:
    """From states that were visited."""
    states = setting.states
    size = trees.size(trees.take(states, 0))
    return dataclasses.replace(
        setting.simulation,
        init=_AnyOf(states),
        f=_Observed(Features.of(states)),
        estimator=StochasticDerivative(births=False),
        num_samples=_STEPS,
        num_chains=max(2_000, min(_CHAINS, NUMBERS // size)),
    )


def _width(setting: Setting, updates: list[Update], direction: Array) -> float:
    """The length along a direction of θ over which log ratios of a step change by `_CHANGE`."""
    sizes = [
        float(_typical_slope(update, setting.theta, setting.args, setting.paths, direction))
        for update in updates[:MOST_UPDATES]
    ]
    usable = [size for size in sizes if np.isfinite(size) and size > 0]
    if usable:
        return _CHANGE / max(usable)
    flat, _ = ravel_pytree(setting.theta)
    return 0.1 * max(float(jnp.max(jnp.abs(direction * flat))), 0.1)


@eqx.filter_jit
def _typical_slope(update: Update, theta, args, paths, direction) -> Array:
    """The change of the slope of `log g` along a direction of θ from one state of a path to the
    next.
    """
    flat, unravel = ravel_pytree(theta)

    def slope(x):
        def density(flat):
            return update.log_density(unravel(flat), x, *args)

        return jax.jvp(density, (flat,), (direction,))[1]

    change = jnp.diff(jax.vmap(jax.vmap(slope))(paths), axis=1)
    return jnp.sqrt(jnp.mean(change**2))


def try_odds(setting: Setting, update: Update, key: Array) -> Verdict:
    """The slopes of `flip_odds` against those of the decisions, for candidates of one step each."""
    promise = f"{update.name_in_messages}.flip_odds"
    given = (setting.kernel, setting.theta, setting.args, key, setting.states)
    try:
        found = _odds_slopes(update, *given)
    except ValueError as error:
        return Verdict(promise, False, str(error))
    if not found:
        return Verdict(promise, True, "not tried: nothing to compare with")
    claimed, own, counts = (np.asarray(each, float) for each in found)
    counts = (counts > 0) & np.isfinite(own)
    # Slopes that nearly cancel are compared with the largest, not with themselves.
    scale = np.max(np.abs(own), initial=0.0, where=counts)
    wrong = counts & ~(np.abs(claimed - own) <= 0.01 * np.abs(own) + 1e-3 * scale)
    if not wrong.any():
        return Verdict(promise, True, f"agrees with the decisions, {int(counts.sum())} flips tried")
    first = np.flatnonzero(wrong)[0]
    detail = (
        f"the odds of {wrong.sum()} of {counts.sum()} flips disagree with their decision: their"
        f" derivative along a direction of theta is {claimed[first]:.4g}, and {own[first]:.4g} is"
        " right. An update with several decisions returns a tuple of odds, one for each."
    )
    return Verdict(promise, False, detail)


@eqx.filter_jit
def _odds_slopes(update: Update, kernel: Kernel, theta, args, key, xs) -> tuple[Array, ...]:
    """Along a direction of θ, for one candidate of a step from each state: by `flip_odds`, by its
    decision, and whether it counts.
    """
    flat, unravel = ravel_pytree(theta)
    direction = jax.random.rademacher(jax.random.key(0), flat.shape, flat.dtype)

    def one(given):
        key, x = given
        key_noise, key_candidate, key_never = jax.random.split(key, 3)
        parameters = Parameters(theta, args, rounding.Barriers.draw(key_never), True)
        noise = one_noise(update.noise, key_noise, x, f"{update.name_in_messages}.noise")
        step = update.step(parameters, kernel.start(parameters, x), noise)
        at = Transition(parameters, update, step, noise, None)
        results = []
        for number, (decision, odds) in enumerate(matched_odds(update, step)):
            slopes = decision.odds_slope()
            if slopes is None:
                continue
            slopes = jnp.tensordot(direction.astype(slopes.dtype), slopes, axes=1).ravel()
            key_candidate, key_pick = jax.random.split(key_candidate)
            candidate = jax.random.randint(key_pick, (), 0, decision.num_candidates)
            other = alternatives.flipped_in(at, number, candidate).x

            def log_odds(flat, odds=odds, other=other):
                return odds(unravel(flat), step.after.x, other, *args)

            _, claimed = jax.jvp(log_odds, (flat,), (direction,))
            moved = ~trees.equal(other, step.after.x)
            counts = moved & (decision.flip_rate().ravel()[candidate] > 0)
            results.append((claimed, slopes[candidate], counts))
        return tuple(jnp.stack(each) for each in zip(*results, strict=True))

    count = jax.tree.leaves(xs)[0].shape[0]
    found = jax.vmap(one)((jax.random.split(key, count), xs))
    return tuple(each.ravel() for each in found)
