"""Trials of updates, of one's own above all: a step against the density that it leaves invariant, a
coupled step against the primal's, the odds of flips against those of the decisions, and the
derivative of a short run against differences with common random numbers.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PyTree

from .._expectation import Expectation
from ..base import trees
from ..core import alternatives
from ..core.alternatives import Transition
from ..core.chain import Stepper
from ..core.estimator import ValueOnly
from ..core.kernel import Kernel, Update, checked_noise, checked_state
from ..core.parameters import Parameters
from ..core.plan import Plan
from ..core.simulation import Simulation
from ..estimators import StochasticDerivative, matched_odds, odds_of
from ..fast import rounding
from . import trials
from .trials import Trial, Verdict

# At most this many updates of a kernel are tried, the first and the last among them.
_UPDATES = 4
_DRAWS = 2**17
# Numbers in the draws of one trial, which bound the memory for large states.
_NUMBERS = 2**22
# States that are enumerated.
_MOST_STATES = 400
_MOST_DIMENSIONS = 16
# The short run that is differentiated, and its chains.
_STEPS = 3
_CHAINS = 2**15
# What differences of the features, which are at most 1, have lost.
_ROUNDING = 1e-5
# By how much differences change the log ratios of a step.
_CHANGE = 0.15


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

    @property
    def num_draws(self) -> int:
        return max(2_000, min(_DRAWS, _NUMBERS // trees.size(trees.take(self.states, 0))))


def try_updates(
    simulation: Simulation, updates: list[Update], theta: PyTree, key: Array, args: tuple[Any, ...]
) -> list[Verdict | Trial]:
    """The trials of these updates of a simulation's kernel, and of its derivative."""
    key_visit, key_run, *keys = jax.random.split(key, 2 + len(updates))
    paths = _visited(simulation.by(ValueOnly()), theta, jax.random.split(key_visit, 32), args)
    setting = Setting(simulation, theta, args, paths)
    chosen = np.unique(np.linspace(0, len(updates) - 1, _UPDATES).round().astype(int))
    found: list[Verdict | Trial] = []
    for number in chosen:
        found += _try_update(setting, updates[number], keys[number])
    return [*found, _derivative(setting, updates, key_run)]


@eqx.filter_jit
def _visited(simulation: Simulation, theta, keys, args) -> PyTree:
    def path(key):
        stepper = Stepper(Plan.of(simulation, theta, key, args), theta, args)
        parameters = stepper.parameters(key)

        def body(chain, noise):
            chain, _ = stepper.step(parameters, chain, noise, None, lambda *_: None)
            return chain, chain.state.x

        noise = stepper.noise(jax.random.clone(key), 64)
        return jax.lax.scan(body, stepper.first(jax.random.clone(key)), noise)[1]

    return jax.vmap(path)(keys)


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
        noise = _one(ready.noise, key_noise, x, f"{name}.noise")
        coupling_noise = _one(ready.coupling_noise, key_coupling, x, f"{name}.coupling_noise")
        step = update.step(parameters, kernel.start(parameters, x), noise)

        def coupled(y):
            state = kernel.start(parameters, y)
            moved = update.coupled_step(parameters, step, state, noise, coupling_noise)
            return checked_state(moved, step.after, f"{name}.coupled_step").x

        return _Stepped(step.after.x, coupled(y), trees.equal(coupled(x), step.after.x))

    count = jax.tree.leaves(xs)[0].shape[0]
    batch = max(1, min(count, 2**18 // trees.size(trees.take(xs, 0))))
    return jax.lax.map(one, (jax.random.split(key, count), xs, ys), batch_size=batch)


def _one(draw, key, x: PyTree, name: str) -> PyTree:
    """The noise of one step."""
    form = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), x)
    return trees.take(checked_noise(draw(key, form, 1), 1, name), 0)


def _try_update(setting: Setting, update: Update, key: Array) -> list[Verdict | Trial]:
    name = update.name_in_messages
    key_pairs, key_steps, key_direct, key_invariant, key_odds = jax.random.split(key, 5)
    count, states = setting.num_draws, setting.states
    num_states = jax.tree.leaves(states)[0].shape[0]

    def step(key, xs, ys) -> _Stepped:
        return _stepped(update, setting.kernel, setting.theta, setting.args, key, xs, ys)

    pairs = np.asarray(jax.random.randint(key_pairs, (4, 2), 0, num_states))
    which = np.repeat(pairs, -(-count // 4), axis=0)[:count]
    xs, ys = (trees.take(states, which[:, side]) for side in range(2))
    beside = step(key_steps, xs, ys)
    found: list[Verdict | Trial] = [_faithful(name, beside)]
    direct = step(key_direct, ys, ys).after
    found.append(_marginal(name, pairs, which, states, beside.coupled, direct))
    found.append(
        _invariant(setting, update, key_invariant, lambda key, xs: step(key, xs, xs).after)
    )
    if None not in odds_of(update):
        found.append(_odds(setting, update, key_odds))
    return found


def _faithful(name: str, stepped: _Stepped) -> Verdict:
    kept = bool(jnp.all(stepped.together))
    apart = f"{1 - np.mean(np.asarray(stepped.together)):.2%} of {stepped.together.size} steps"
    right = "from y = x it leads where the step did"
    wrong = f"from y = x it does not lead where the step did, bit for bit: in {apart}"
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


def _invariant(setting: Setting, update: Update, key: Array, step) -> Trial:
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
    for key_round in jax.random.split(key_close, 4):
        if len(rows) > _MOST_STATES:
            return []
        reached = trials.flat(step(key_round, _states(_repeated(rows, count), setting)))
        known, rows = len(rows), np.unique(np.concatenate([rows, reached]), axis=0)
        if len(rows) == known:
            break
    else:
        return []
    log_g = log_density(_states(_repeated(rows, count), setting))[: len(rows)]
    probability = np.exp(log_g - np.max(log_g))
    probability /= probability.sum()
    rng = np.random.default_rng(np.asarray(jax.random.key_data(key_draw)))
    drawn = rng.choice(len(rows), size=count, p=probability)
    after = trials.flat(step(key_step, _states(rows[drawn], setting)))
    everywhere, which = np.unique(np.concatenate([rows, after]), axis=0, return_inverse=True)
    if len(everywhere) > len(rows):
        return []
    which = which.ravel()[len(rows) :]
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
    reference.spread *= 1.5
    rng = np.random.default_rng(np.asarray(jax.random.key_data(key_draw)))
    states = _states(reference.sample(rng, setting.num_draws), setting)
    before, log_g = trials.flat(states), log_density(states)
    log_weight = np.where(np.isfinite(log_g), log_g - reference.log_density(before), -np.inf)
    weight = np.exp(log_weight - np.max(log_weight))
    after = trials.flat(step(key_step, states))
    if not _moves_floats(before, after):
        return []
    seen = Features.of(setting.states)
    change = np.asarray(seen(jnp.asarray(after)) - seen(jnp.asarray(before)), float)
    terms = np.where(weight[:, None] > 0, weight[:, None] * change, 0.0)
    return [trials.mean_zero(column) for column in terms.T]


def _moves_floats(before: np.ndarray, after: np.ndarray) -> bool:
    """True if steps lead to ever new numbers: an update that sets floats to a few values is not
    one of a density on the real line.
    """
    for old, new in zip(before.T, after.T, strict=True):
        moved = new[new != old]
        if len(moved) and len(np.unique(moved)) < 0.5 * len(moved):
            return False
    return True


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
        spread = np.std(rows, axis=0)
        return Features(
            jnp.asarray(np.mean(rows, axis=0)), jnp.asarray(np.where(spread > 0, spread, 1.0))
        )

    def __call__(self, rows: Array) -> Array:
        size = self.centre.size
        rng = np.random.default_rng(0)
        directions = rng.normal(size=(size, 4)) / np.sqrt(min(size, 4))
        scaled = (rows - self.centre) / self.spread
        waves = jnp.cos(scaled @ directions + rng.uniform(0, 2 * np.pi, size=4))
        few = scaled[..., :4]
        return jnp.concatenate([jnp.tanh(few), jnp.cos(few), waves], axis=-1)


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


def _derivative(setting: Setting, updates: list[Update], key: Array) -> Trial:
    """The estimated derivative of the features' means over a short run, chain by chain, against
    differences of fourth order with the same random numbers, along a few directions of θ.
    """
    given = (_short_run(setting), setting.theta, key, setting.args)
    flat, _ = ravel_pytree(setting.theta)
    p_values: list[float] = []
    for direction in jnp.asarray(trials.directions(flat.size, 3), flat.dtype):
        width = _width(setting, updates, direction)
        ends = [_value(*given, step * width * direction) for step in (1, -1, 2, -2)]
        ahead, behind, far_ahead, far_behind = (np.asarray(end, float) for end in ends)
        difference = (8 * (ahead - behind) - (far_ahead - far_behind)) / 12
        if np.all(np.isfinite(difference)):
            terms = width * np.asarray(_slope(*given, direction), float) - difference
            terms[np.abs(terms) < _ROUNDING] = 0.0
            p_values += [trials.mean_zero(column) for column in terms.T]
    meaning = (
        "the estimate is not what differences of runs with common random numbers say. Are the"
        " decisions of a step independent given the state before, does `flipped` lead where a"
        " flipped decision would, and does `evaluate` see all of what a probability depends on?"
    )
    return Trial("derivative of a short run", tuple(p_values), meaning)


@eqx.filter_jit
def _value(simulation: Simulation, theta, key, args, change: Array) -> Array:
    """The value of each chain, at changed parameters."""
    flat, unravel = ravel_pytree(theta)
    return Expectation(simulation).per_chain(unravel(flat + change), key, *args)


@eqx.filter_jit
def _slope(simulation: Simulation, theta, key, args, direction: Array) -> Array:
    value = lambda change: _value(simulation, theta, key, args, change)
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
        num_chains=max(2_000, min(_CHAINS, _NUMBERS // size)),
    )


def _width(setting: Setting, updates: list[Update], direction: Array) -> float:
    """How far to go along a direction of θ, so that log ratios of a step change by `_CHANGE`."""
    sizes = [
        float(_typical_slope(update, setting.theta, setting.args, setting.paths, direction))
        for update in updates[:_UPDATES]
    ]
    usable = [size for size in sizes if np.isfinite(size) and size > 0]
    if usable:
        return _CHANGE / max(usable)
    flat, _ = ravel_pytree(setting.theta)
    return 0.1 * max(float(jnp.max(jnp.abs(direction * flat))), 0.1)


@eqx.filter_jit
def _typical_slope(update: Update, theta, args, paths, direction) -> Array:
    """How much the slope of `log g` along a direction of θ changes from one state of a path to the
    next.
    """
    flat, unravel = ravel_pytree(theta)

    def slope(x):
        density = lambda flat: update.log_density(unravel(flat), x, *args)
        return jax.jvp(density, (flat,), (direction,))[1]

    change = jnp.diff(jax.vmap(jax.vmap(slope))(paths), axis=1)
    return jnp.sqrt(jnp.mean(change**2))


def _odds(setting: Setting, update: Update, key: Array) -> Verdict:
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
    scale = np.max(np.abs(own), initial=0.0, where=counts)
    wrong = counts & ~(np.abs(claimed - own) <= 0.01 * np.abs(own) + 1e-3 * scale)
    if not wrong.any():
        return Verdict(promise, True, f"agrees with the decisions, {int(counts.sum())} flips tried")
    first = np.flatnonzero(wrong)[0]
    detail = (
        f"{wrong.sum()} of {counts.sum()} flips have other odds than their decision says: along a"
        f" direction of theta {claimed[first]:.4g} where {own[first]:.4g} is right. An update with"
        " several decisions returns a tuple of odds, one for each."
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
        noise = _one(update.noise, key_noise, x, f"{update.name_in_messages}.noise")
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


def _states(rows: np.ndarray, setting: Setting) -> PyTree:
    """The states of flat rows."""
    leaves, structure = jax.tree.flatten(setting.states)
    ends = np.cumsum([leaf[0].size for leaf in leaves])[:-1]
    parts = zip(np.split(rows, ends, axis=1), leaves, strict=True)
    made = [part.reshape(-1, *leaf.shape[1:]).astype(leaf.dtype) for part, leaf in parts]
    return structure.unflatten([jnp.asarray(leaf) for leaf in made])
