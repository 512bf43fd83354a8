"""Trials of invariance: a step from draws of the density has the density again."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ..core.kernel import Update
from . import trials
from .trial_setting import Features, Setting
from .trials import Trial

# States that are enumerated.
_MOST_STATES = 400
_MOST_DIMENSIONS = 16


def try_invariance(setting: Setting, update: Update, key: Array, step) -> Trial:
    """A step from draws of the density has the density again: exactly where the states can be
    enumerated; where they are floats, from a normal distribution and by importance weights.
    """
    name = update.name_in_messages

    def log_density(states):
        found = trials.log_densities(update.log_density, setting.theta, setting.args, states)
        return np.asarray(found, float)

    p_values = _finite_invariance(setting, key, step, log_density)
    leaves = jax.tree.leaves(setting.states)
    if not p_values and all(jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in leaves):
        p_values = _float_invariance(setting, key, step, log_density)
    meaning = "a step changes the distribution that is proportional to `log_density`"
    return Trial(f"{name} leaves its density invariant", tuple(p_values), meaning)


def _finite_invariance(setting: Setting, key: Array, step, log_density) -> list[float]:
    """None where there are too many states."""
    key_close, key_step, key_draw = jax.random.split(key, 3)
    rows, count = np.unique(trials.flat(setting.states), axis=0), setting.num_draws
    # What the update reaches from the states that were visited, until there is nothing new.
    # The set of states must be closed under the update, or mass would leak out of the enumeration
    # and a right update be called wrong.
    for key_round in jax.random.split(key_close, 4):
        if len(rows) > _MOST_STATES:
            return []
        reached = trials.flat(step(key_round, setting.from_rows(_repeated(rows, count))))
        known, rows = len(rows), np.unique(np.concatenate([rows, reached]), axis=0)
        if len(rows) == known:
            break
    else:
        return []
    log_g = log_density(setting.from_rows(_repeated(rows, count)))[: len(rows)]
    probability = np.exp(log_g - np.max(log_g))
    probability /= probability.sum()
    rng = np.random.default_rng(np.asarray(jax.random.key_data(key_draw)))
    drawn = rng.choice(len(rows), size=count, p=probability)
    after = trials.flat(step(key_step, setting.from_rows(rows[drawn])))
    everywhere, which = np.unique(np.concatenate([rows, after]), axis=0, return_inverse=True)
    if len(everywhere) > len(rows):
        return []
    which = which.ravel()[len(rows) :]
    # Inflow less outflow of each state has mean 0 iff the distribution is invariant; paired step by
    # step, which has less variance than two histograms.
    into = [(which == state) * 1.0 - (drawn == state) for state in range(len(rows))]
    seen = np.asarray(Features.of(setting.states)(jnp.asarray(rows)), float)
    terms = [*into, *(seen[which] - seen[drawn]).T]
    return [trials.mean_zero(each) for each in terms]


def _repeated(rows: np.ndarray, count: int) -> np.ndarray:
    """As many rows, over and over."""
    return np.resize(rows, (count, rows.shape[1]))


def _float_invariance(setting: Setting, key: Array, step, log_density) -> list[float]:
    """`Σ w (h(x') − h(x))` has the mean 0 for every h, with x from a normal distribution μ that is
    wider than where the chains went, and `w = g(x)/μ(x)`.
    """
    key_step, key_draw = jax.random.split(key)
    reference = trials.Reference(trials.flat(setting.states))
    if not reference.usable or len(reference.middle) > _MOST_DIMENSIONS:
        return []
    # Tails heavier than the target's keep the importance weights bounded where it matters.
    reference.spread *= 1.5
    rng = np.random.default_rng(np.asarray(jax.random.key_data(key_draw)))
    states = setting.from_rows(reference.sample(rng, setting.num_draws))
    before, log_g = trials.flat(states), log_density(states)
    log_weight = np.where(np.isfinite(log_g), log_g - reference.log_density(before), -np.inf)
    weight = np.exp(log_weight - np.max(log_weight))
    after = trials.flat(step(key_step, states))
    if not moves_floats(before, after):
        return []
    seen = Features.of(setting.states)
    change = np.asarray(seen(jnp.asarray(after)) - seen(jnp.asarray(before)), float)
    terms = np.where(weight[:, None] > 0, weight[:, None] * change, 0.0)
    return [trials.mean_zero(column) for column in terms.T]


def moves_floats(before: np.ndarray, after: np.ndarray) -> bool:
    """True if steps lead to ever new numbers: an update that sets floats to a few values is not
    one of a density on the real line.
    """
    for old, new in zip(before.T, after.T, strict=True):
        moved = new[new != old]
        if len(moved) and len(np.unique(moved)) < 0.5 * len(moved):
            return False
    return True
