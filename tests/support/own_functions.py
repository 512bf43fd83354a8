"""The samplers of `own_kernels`, and two whose decisions depend on earlier outcomes, as functions
of draws, with the same transition matrices.
"""

from __future__ import annotations

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import own_kernels
from oracles import transition_matrix
from own_kernels import Case, cheap, full, slice_probabilities, table, tempered

import diffmh
from diffmh.extend import update

# Proposed by a maximal coupling, and by the same noise, as the classes do.
RING = diffmh.TransitionMatrix(own_kernels.ring_walk(5))


class RingStep(diffmh.extend.NoiseProposal):
    """A step of ±1 on a ring of n states."""

    num_states: int = eqx.field(static=True)
    symmetric: bool = True

    def noise(self, key, x, num_steps):
        return jax.random.rademacher(key, (num_steps,), int)

    def move(self, x, noise):
        return (x + noise) % self.num_states

    def log_prob(self, x, x_new):
        return -jnp.log(2.0)


STEP = RingStep(5)


@update(tempered)
def swap(draw, theta, x):
    log_ratio = tempered(theta, x[::-1]) - tempered(theta, x)
    return jnp.where(draw.accept(log_ratio), x[::-1], x)


def agreement(theta, x):
    return jnp.sum(theta * (x == jnp.roll(x, -1)))


@update(agreement)
def swendsen_wang(draw, theta, x):
    log_odds = jnp.where(x == jnp.roll(x, -1), jnp.log(jnp.expm1(theta)), -jnp.inf)
    bond, spin = draw.bernoulli(log_odds), draw.uniform(x.shape) < 0.5
    first = jnp.arange(x.size)
    for _ in range(x.size):
        first = jnp.where(bond, jnp.minimum(first, jnp.roll(first, -1)), first)
        ahead = jnp.roll(first, -1)
        first = jnp.roll(jnp.where(bond, jnp.minimum(first, ahead), ahead), 1)
    return spin[first].astype(x.dtype)


@update(full)
def delayed(draw, theta, x):
    y = draw.propose(STEP, x)
    first = cheap(theta, y) - cheap(theta, x)
    a = draw.accept(first)
    b = draw.accept(full(theta, y) - full(theta, x) - first)
    return jnp.where(a & b, y, x)


@update(full)
def multiple_try(draw, theta, x):
    tries = jnp.floor(4 * draw.uniform((3,))).astype(x.dtype)
    picked = draw.categorical(full(theta, tries[:2]))
    ahead = jnp.logaddexp(full(theta, tries[0]), full(theta, tries[1]))
    behind = jnp.logaddexp(full(theta, tries[2]), full(theta, x))
    return jnp.where(draw.accept(ahead - behind), tries[picked], x)


@update(full)
def slice_on_a_grid(draw, theta, x):
    return draw.categorical(jnp.log(slice_probabilities(theta[0], x))).astype(x.dtype)


@update(full)
def barker(draw, theta, x):
    y = draw.propose(RING, x)
    return jnp.where(draw.bernoulli(full(theta, y) - full(theta, x)), y, x)


@update(lambda theta, x: theta[0] * x[0] * x[1] + theta[1] * x[0] + theta[2] * x[1])
def in_turn(draw, theta, x):
    """As two independent decisions of a class it is biased: `own_kernels.InTurn`."""
    first = draw.bernoulli(theta[0] * x[1] + theta[1])
    second = draw.bernoulli(theta[0] * first + theta[2])
    return jnp.stack([first, second]).astype(x.dtype)


@update(full)
def leap(draw, theta, x):
    """Leaps or not, then moves on from there: what is proposed depends on a decision."""
    here = jnp.where(draw.bernoulli(theta[1][x]), x, (x + 2) % 5)
    y = draw.propose(RING, here)
    return jnp.where(draw.accept(full(theta, y) - full(theta, here)), y, here)


def leaping(kernel=leap) -> Case:
    def matrix(theta):
        walk = transition_matrix(theta[0], own_kernels.ring_walk(5))
        stays = (1 / (1 + np.exp(-theta[1])))[:, None]
        return stays * walk + (1 - stays) * np.roll(walk, -2, axis=0)

    return Case(kernel, table(2, 5, 4), np.arange(5), matrix)


def with_function(name: str) -> Case:
    """A case of `own_kernels` whose own update is a function."""
    case = own_kernels.SOUND[name]()
    made = FUNCTIONS[name]
    if name == "tempering":
        made = diffmh.Cycle(*case.kernel.kernels[:2], made)
    return dataclasses.replace(case, kernel=made)


FUNCTIONS = {
    "tempering": swap,
    "swendsen_wang": swendsen_wang,
    "delayed": delayed,
    "multiple_try": multiple_try,
    "slice": slice_on_a_grid,
    "barker": barker,
}
