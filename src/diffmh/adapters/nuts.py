"""Draws of a posterior: NUTS on its continuous sites, in turn with moves of its discrete ones, or
with these summed out.

One compiled program runs a block of iterations of all chains, in the warm-up and after it: the
stage of each iteration is data. So lengths can change, the bar can move between two blocks, and a
second call compiles nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Key, PyTree

from ..base import trees
from ..base.batches import in_batches
from ..runs.progress import Bar
from .group_marks import STATES, made_with
from .label_moves import LabelMove, Sites
from .laplace import LaplaceMixture, laplace_mixture
from .summed_out import SummedOut
from .warm_up import FROZEN, IDLE, Learnt, WarmUp, schedule

if TYPE_CHECKING:
    from xarray import DataTree

# Iterations that are run between two looks at the clock.
_BLOCK = 100
# A trajectory has at most 2¹⁰ steps; as in Stan, NumPyro and PyMC.
_DOUBLINGS = 10
# A start is looked for so many times; as in Stan.
_TRIES = 100
# In more dimensions hardly any jump would be accepted; modes are looked for from this many starts.
_MOST_JUMPING, _LOOKED_FROM = 32, 4
# Of so many draws at once the constrained sites are computed.
_AT_ONCE = 256


class Target(eqx.Module):
    """A posterior's density, the names of its continuous sites, the discrete sites that are summed
    out of what NUTS follows, the moves of the others, and a proposal of jumps.
    """

    log_density: Callable[[Sites, Sites], Array]
    continuous: tuple[str, ...] = eqx.field(static=True)
    moves: tuple[LabelMove, ...]
    summed_out: SummedOut | None = None
    jumps: LaplaceMixture | None = None

    def split(self, x: Sites) -> tuple[Sites, Sites]:
        """The continuous sites and the discrete ones."""
        free = {name: x[name] for name in self.continuous}
        return free, {name: x[name] for name in x if name not in free}

    def along(self, theta: Sites, labels: Sites) -> Callable[[Sites], Array]:
        """The log density that NUTS follows, of the continuous sites."""
        summed_out = self.summed_out
        if summed_out is None:
            return lambda free: self.log_density(theta, {**free, **labels})
        return lambda free: summed_out.along(free, labels, lambda x: self.log_density(theta, x))

    def gradient(self, theta: Sites, x: Sites) -> tuple[Array, Sites]:
        """The log density that NUTS follows, and its gradient."""
        free, labels = self.split(x)
        return jax.value_and_grad(self.along(theta, labels))(free)


class ChainPlace(eqx.Module):
    """A chain's position, with the log density that NUTS follows and its gradient there."""

    x: Sites
    log_density: Float[Array, "*C"]
    gradient: Sites


class SamplingProgress(eqx.Module):
    """All chains, chains leading, and what the warm-up has learnt."""

    places: ChainPlace
    learnt: Learnt


def draw(
    target: Target,
    constrain: Callable[[Sites, Sites], Sites],
    init: Callable[[Key[Array, ""]], Sites],
    theta: Sites,
    key: Key[Array, ""],
    *,
    num_warmup: int,
    num_samples: int,
    num_chains: int,
    target_acceptance: float,
    progress: bool,
) -> DataTree:
    """The draws, as `Posterior.sample` returns them."""
    key_start, key_run = jax.random.split(key)
    places = _starts(target, init, theta, key_start, num_chains)
    target = _with_jumps(target, theta, places.x)
    free = target.split(trees.take(places.x, 0))[0]
    dimension, warm_up = max(1, trees.size(free)), WarmUp(target_acceptance)
    now = SamplingProgress(places, warm_up.start(dimension, dimension**-0.25))
    stages, ends = schedule(num_warmup)
    rows: list[Any] = []
    with Bar("sample", num_warmup + num_samples, progress) as bar:
        for block in _blocks(stages, ends):
            now, _ = _advance(target, warm_up, theta, key_run, now, *block.iterations)
            bar.reached(block.last)
        now = SamplingProgress(now.places, warm_up.freeze(now.learnt))
        # Nothing is learnt from here on: draws are of one fixed kernel, which leaves the posterior
        # invariant.
        frozen = np.full(num_samples, FROZEN)
        for block in _blocks(frozen, np.zeros(num_samples, bool), num_warmup):
            now, made = _advance(target, warm_up, theta, key_run, now, *block.iterations)
            rows.append(trees.take(jax.tree.map(np.asarray, made), slice(block.count)))
            bar.reached(block.last)
    draws, stats = jax.tree.map(_chains_first, *rows)
    return _data_tree(_constrained(constrain, theta, draws), draws, stats, theta)


def _chains_first(*blocks: np.ndarray) -> np.ndarray:
    return np.swapaxes(np.concatenate(blocks), 0, 1)


class _Block(eqx.Module):
    """`count` iterations up to number `last`, exclusive: the numbers of these and of idle ones,
    their stages, and whether a window ends with them.
    """

    last: int
    count: int
    iterations: tuple[Array, Array, Array]


def _blocks(stages: np.ndarray, ends: np.ndarray, offset: int = 0) -> Iterator[_Block]:
    for first in range(0, stages.size, _BLOCK):
        count = min(_BLOCK, stages.size - first)
        here, idle = slice(first, first + count), _BLOCK - count
        numbers = jnp.arange(offset + first, offset + first + _BLOCK)
        stage = np.append(stages[here], np.full(idle, IDLE)).astype(np.int32)
        ended = np.append(ends[here], np.zeros(idle, bool))
        iterations = (numbers, jnp.asarray(stage), jnp.asarray(ended))
        yield _Block(offset + first + count, count, iterations)


@eqx.filter_jit
def _advance(
    target: Target, warm_up: WarmUp, theta, key, now: SamplingProgress, numbers, stages, ends
):
    """The progress after a block of iterations, and the draw and the statistics of each."""

    # By `jit`, so that it is traced once, for its form and its value.
    @jax.jit
    def iterate(now: SamplingProgress, number, stage, ends):
        # The key of an iteration depends on its number alone: how iterations are cut into blocks
        # changes no draw.
        num_chains = now.places.log_density.shape[0]
        keys = jax.random.split(jax.random.fold_in(key, number), num_chains)
        step = lambda key, place: _step(target, theta, key, place, now.learnt)
        places, stats = jax.vmap(step)(keys, now.places)
        free = target.split(places.x)[0]
        learnt = now.learnt
        if free:
            # A rate that is not a number counts as 0: the step size shrinks.
            rate = jnp.mean(jnp.nan_to_num(stats["acceptance_rate"]))
            learnt = warm_up.update(learnt, stage, ends, free, rate)
        return SamplingProgress(places, learnt), (places.x, stats)

    def body(now: SamplingProgress, given):
        number, stage, ends = given
        form = jax.eval_shape(iterate, now, number, stage, ends)[1]
        idle = lambda: (now, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), form))
        # Idle iterations only fill the last block up: they change nothing, and their rows are cut
        # off.
        return jax.lax.cond(stage == IDLE, idle, lambda: iterate(now, number, stage, ends))

    return jax.lax.scan(body, now, (numbers, stages, ends))


def _step(
    target: Target, theta, key, place: ChainPlace, learnt: Learnt
) -> tuple[ChainPlace, PyTree]:
    """One iteration of one chain: a NUTS step and a jump of the continuous sites, then the discrete
    sites given those.
    """
    key_nuts, key_labels, key_jump = jax.random.split(key, 3)
    stats: dict[str, Array] = {}
    if target.continuous:
        place, stats = _nuts_step(target, theta, key_nuts, place, learnt)
    if target.jumps is not None:
        place = _jump(target, target.jumps, theta, key_jump, place)
    if target.moves or target.summed_out is not None:
        place = _labels_step(target, theta, key_labels, place)
    lp = place.log_density if target.summed_out is None else target.log_density(theta, place.x)
    return place, {**stats, "lp": lp}


def _jump(target: Target, jumps: LaplaceMixture, theta, key, place: ChainPlace) -> ChainPlace:
    """A Metropolis–Hastings step of the continuous sites, proposed from anywhere alike."""
    key_propose, key_accept = jax.random.split(key)
    free, labels = target.split(place.x)
    flat, unravel = ravel_pytree(free)
    new = jumps.sample(key_propose).astype(flat.dtype)
    there = {**place.x, **unravel(new)}
    proposed = ChainPlace(there, *jax.value_and_grad(target.along(theta, labels))(unravel(new)))
    log_ratio = proposed.log_density - place.log_density
    log_ratio += jumps.log_prob(flat) - jumps.log_prob(new)
    # NaN compares as false: what has no density is never accepted.
    accept = jnp.log(jax.random.uniform(key_accept)) < log_ratio
    return trees.select(accept, proposed, place)


def _labels_step(target: Target, theta, key, place: ChainPlace) -> ChainPlace:
    density = lambda x: target.log_density(theta, x)
    x = place.x
    if target.summed_out is not None:
        # First of all, for NUTS has moved with these sites summed out.
        x = target.summed_out.draw(jax.random.fold_in(key, len(target.moves)), x, density)
    for number, move in enumerate(target.moves):
        x = move(jax.random.fold_in(key, number), x, density)
    if not target.moves:
        # What NUTS follows does not depend on the sites that are summed out.
        return ChainPlace(x, place.log_density, place.gradient)
    return ChainPlace(x, *target.gradient(theta, x))


def _nuts_step(
    target: Target, theta, key, place: ChainPlace, learnt: Learnt
) -> tuple[ChainPlace, PyTree]:
    from blackjax.mcmc import hmc, nuts

    free, labels = target.split(place.x)
    density = target.along(theta, labels)
    # BlackJAX annotates numbers and trees more narrowly than it takes them.
    before: Any = hmc.HMCState(free, place.log_density, place.gradient)  # pyright: ignore[reportArgumentType]
    kernel: Any = nuts.build_kernel()
    after, info = kernel(key, before, density, learnt.step_size, learnt.variances, _DOUBLINGS)
    stats = {
        "acceptance_rate": info.acceptance_rate,
        "diverging": info.is_divergent,
        "energy": info.energy,
        "n_steps": info.num_integration_steps,
        "step_size": learnt.step_size,
        "tree_depth": info.num_trajectory_expansions,
    }
    moved = {name: after.position.get(name, place.x[name]) for name in place.x}
    return ChainPlace(moved, after.logdensity, after.logdensity_grad), stats


def _with_jumps(target: Target, theta, starts: Sites) -> Target:
    """The target with jumps between the modes of its discrete sites, where these are all summed out
    and the continuous ones have few dimensions.
    """
    summed_out, dimension = target.summed_out, trees.size(target.split(trees.take(starts, 0))[0])
    if summed_out is None or target.moves or not 0 < dimension <= _MOST_JUMPING:
        return target
    return dataclasses.replace(target, jumps=_jumps(target, summed_out, theta, starts))


@eqx.filter_jit
def _jumps(target: Target, summed_out: SummedOut, theta, starts: Sites) -> LaplaceMixture:
    x = trees.take(starts, 0)
    _, unravel = ravel_pytree(target.split(x)[0])
    flat = jax.vmap(lambda x: ravel_pytree(target.split(x)[0])[0])(starts)
    density = lambda values, flat: target.log_density(theta, {**unravel(flat), **values})
    return laplace_mixture(density, summed_out.joint_values(x), flat[:_LOOKED_FROM])


def _starts(target: Target, init, theta: Sites, key, num_chains: int) -> ChainPlace:
    """A start for each chain at which the log density and its gradient are finite.

    The first try is the model's own start, with jitter if it is the same for every chain. A chain
    for which this fails tries random points near the model's start, as Stan does. Raises
    `ValueError` if a chain has no start after `_TRIES` tries.
    """
    keys = jax.random.split(key, num_chains)
    places, found = _tried(target, init, theta, keys, 0, 0.0)
    # A start that is the same for every chain says nothing of whether they agree in the end.
    if all(np.all(leaf == leaf[:1]) for leaf in map(np.asarray, jax.tree.leaves(places.x))):
        places, found = _tried(target, init, theta, keys, 0, 1.0)
    for number in range(1, _TRIES):
        if bool(jnp.all(found)):
            return places
        # At first within 2 of the model's own start, then ever closer to it.
        others, sound = _tried(target, init, theta, keys, number, 2.0 * 0.95 ** (number - 1))
        places, found = trees.select(found, places, others), found | sound
    chain = int(jnp.argmin(found))
    raise ValueError(
        f"`Posterior.sample(...)`: in {_TRIES} tries no start was found for chain {chain} with a"
        " finite log density and gradient; the last had the log density"
        f" {float(places.log_density[chain])}. Give the model a start of its own"
        " (`from_numpyro(init_strategy=...)`, PyMC's `initval`), or look at"
        " `posterior.log_density(theta, posterior.init(key))`."
    )


@eqx.filter_jit
def _starting(target: Target, init, theta, keys, number, width):
    def one(key) -> tuple[ChainPlace, Bool[Array, ""]]:
        key_start, key_jitter = jax.random.split(jax.random.fold_in(key, number))
        free, labels = target.split(trees.strong(init(key_start)))
        flat, unravel = ravel_pytree(free)
        jitter = width * jax.random.uniform(key_jitter, flat.shape, minval=-1.0, maxval=1.0)
        x = {**unravel(flat + jitter.astype(flat.dtype)), **labels}
        place = ChainPlace(x, *target.gradient(theta, x))
        numbers = ravel_pytree((place.log_density, place.gradient))[0]
        return place, jnp.all(jnp.isfinite(numbers))

    return jax.vmap(one)(keys)


def _tried(target: Target, init, theta, keys, number: int, width: float):
    """The starts of one try, within `width` of the model's own, and which of them are sound."""
    return _starting(target, init, theta, keys, jnp.asarray(number), jnp.asarray(width))


@eqx.filter_jit
def _constrained(constrain, theta, draws: Sites) -> Sites:
    """The sites as the model knows them, `(chain, draw, ...)`."""
    return in_batches(lambda x: constrain(theta, x), draws, _AT_ONCE, axes=2)


def _data_tree(sites: Sites, draws: Sites, stats: dict[str, np.ndarray], theta: Sites) -> DataTree:
    import arviz_base

    groups = {
        "posterior": {name: np.asarray(leaf) for name, leaf in sites.items()},
        "unconstrained_posterior": draws,
        "sample_stats": stats,
    }
    tree = arviz_base.from_dict(groups, check_conventions=False)
    for group in groups:
        tree[group].attrs.update(inference_library="diffmh", **made_with(theta))
    tree["unconstrained_posterior"].attrs.update(STATES)
    return tree
