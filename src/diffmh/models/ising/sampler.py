"""Sweeps over the lattice: the checkerboard's half-sweeps, and the paper's, site by site in
random order.
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from ... import _validate
from ..._validate import Checked
from ...decisions import Acceptance
from ...kernel import BlockUpdate, Kernel, State
from ...kernels import Cycle
from ...parameters import Parameters
from .lattice import Spins, energy, neighbours, parameter


def proposed(mine: Int[Array, "..."], words: UInt32[Array, "..."], flip: bool) -> Array:
    """What is proposed to each site: its flip, or ±1 by the lowest bit of a random word."""
    # A choice of two constants: conversion of words to small integers is slow.
    up, down = jnp.ones((), mine.dtype), -jnp.ones((), mine.dtype)
    return -mine if flip else jnp.where((words & 1) != 0, up, down)


def decide(
    parameters: Parameters, mine: Array, around: Array, words: UInt32[Array, "..."], flip: bool
) -> Acceptance:
    """Whether each site takes what is proposed to it: the uniform is in the high 24 bits."""
    # Conversion of signed integers is the fast one.
    uniform = (words >> 8).astype(jnp.int32).astype(jnp.float32) * jnp.float32(2**-24)

    def log_ratio(theta, bonds, change, *args):
        theta = parameter(theta)
        gain = _times(theta.interaction, bonds) + _times(theta.field, change)
        return gain / theta.temperature

    change = proposed(mine, words, flip) - mine
    # In small integers as far as it goes: all of a row at once.
    bonds = (change * around).astype(jnp.float32)
    return Acceptance.draw(
        uniform, parameters.evaluate(log_ratio, bonds, change.astype(jnp.float32))
    )


def _times(factor: Any, numbers: Array) -> Array | float:
    """Their product, of which nothing is computed if the factor is a plain 0 or 1."""
    if isinstance(factor, float) and factor in (0.0, 1.0):
        return numbers if factor else 0.0
    return factor * numbers


def log_density(theta: Any, x: Any) -> Float[Array, ""]:
    """`−H/T`."""
    return -energy(theta, x) / parameter(theta).temperature


def flip_odds(theta: Any, x: Any, y: Any, *args: Any) -> Float[Array, ""]:
    """`(H(x) − H(y))/T`."""
    return log_density(theta, y) - log_density(theta, x)


class IsingUpdate(BlockUpdate):
    """Sites of a lattice, whichever they are: the density that they leave invariant."""

    def log_density(self, theta, x, *args):
        return log_density(theta, x)

    @property
    def target(self):
        return log_density

    @property
    def flip_odds(self):
        return flip_odds


class HalfSweep(IsingUpdate):
    """All sites of one colour at once. One random word per site holds its proposal and its accept
    uniform.

    With `flip=False` each site is proposed ±1 with probability ½ (the paper's heat bath), and the
    alternative gets the same proposals and uniforms: a monotone coupling. With `flip=True` each
    site is proposed to flip, the paper's "uncoupled": chains rarely meet.
    """

    colour: int = eqx.field(static=True)
    flip: bool = eqx.field(static=True, default=False)

    def noise(self, key, x, num_steps) -> UInt32[Array, "steps L half"]:
        return jax.random.bits(key, (num_steps, *x.black.shape), jnp.uint32)

    def decide(self, parameters, state: State, noise):
        around = neighbours(state.x, self.colour)
        return decide(parameters, state.x.colour(self.colour), around, noise, self.flip)

    def result(self, x: Spins, noise, outcome: Bool[Array, "L half"]) -> Spins:
        mine = x.colour(self.colour)
        return x.with_colour(
            self.colour, jnp.where(outcome, proposed(mine, noise, self.flip), mine)
        )

    def block(self, x: Spins) -> Float[Array, "L half"]:
        return x.colour(self.colour).astype(float)

    def with_block(self, x: Spins, block: Float[Array, "L half"]) -> Spins:
        return x.with_colour(self.colour, block)

    def expected_block(self, parameters, x: Spins, noise) -> Float[Array, "L half"]:
        """Over the proposals as well: a flip is proposed with probability 1, or ½."""
        mine = x.colour(self.colour)
        change = decide(
            parameters.value_only(), mine, neighbours(x, self.colour), noise, flip=True
        ).probability
        return mine * (1 - change * (2.0 if self.flip else 1.0))


class SiteUpdate(IsingUpdate):
    """One site of an (L, L) lattice, with the proposals of `HalfSweep`."""

    site: Int[Array, "2"]
    flip: bool = eqx.field(static=True, default=False)

    def noise(self, key, x, num_steps) -> UInt32[Array, "steps"]:
        return jax.random.bits(key, (num_steps,), jnp.uint32)

    def decide(self, parameters, state: State, noise):
        x = state.x
        around = self._at(x, 1, 0) + self._at(x, -1, 0) + self._at(x, 0, 1) + self._at(x, 0, -1)
        return decide(parameters, self._at(x, 0, 0), around, noise, self.flip)

    def result(self, x: Int[Array, "L L"], noise, outcome: Bool[Array, ""]) -> Int[Array, "L L"]:
        mine = self._at(x, 0, 0)
        spin = jnp.where(outcome, proposed(mine, noise, self.flip), mine)
        rows, columns = (jnp.arange(x.shape[0]) == place for place in self.site)
        return jnp.where(rows[:, None] & columns[None], spin, x)

    def block(self, x: Int[Array, "L L"]) -> Float[Array, ""]:
        return self._at(x, 0, 0).astype(float)

    def with_block(self, x: Int[Array, "L L"], block: Float[Array, ""]) -> Float[Array, "L L"]:
        rows, columns = (jnp.arange(x.shape[0]) == place for place in self.site)
        return jnp.where(rows[:, None] & columns[None], block, x)

    def expected_block(self, parameters, x: Int[Array, "L L"], noise) -> Float[Array, ""]:
        mine = self._at(x, 0, 0)
        around = self._at(x, 1, 0) + self._at(x, -1, 0) + self._at(x, 0, 1) + self._at(x, 0, -1)
        change = decide(parameters.value_only(), mine, around, noise, flip=True).probability
        return mine * (1 - change * (2.0 if self.flip else 1.0))

    def _at(self, x: Int[Array, "L L"], down: int, right: int) -> Int[Array, ""]:
        row, column = (self.site + jnp.array([down, right])) % x.shape[0]
        return x[row, column]


class SequentialSweep(Kernel):
    """The paper's sweep: every site of the lattice in turn, rows and columns in an order drawn
    anew for each sweep.
    """

    size: int = eqx.field(static=True)
    flip: bool = eqx.field(static=True, default=False)

    def updates(self):
        return (SiteUpdate(jnp.zeros(2, int), self.flip),)

    def start(self, parameters, x):
        return State(x)

    def distribute(self, make, key):
        key_order, key_sites = jax.random.split(key)
        site_keys = jax.random.split(key_sites, self.size**2)
        update = self.updates()[0]
        noise = jax.vmap(lambda key: make(update, key), out_axes=1)(site_keys)
        num_sweeps = jax.tree.leaves(noise)[0].shape[0]
        permute = lambda key: jax.random.permutation(key, self.size)
        orders = jax.vmap(permute)(jax.random.split(key_order, 2 * num_sweeps))
        return orders.reshape(num_sweeps, 2, self.size), noise

    def fold(self, advance, carry, noise):
        (rows, columns), site_noise = noise
        sites = jnp.stack(jnp.meshgrid(rows, columns, indexing="ij"), axis=-1).reshape(-1, 2)

        def visit(carry, now):
            site, one = now
            return advance(SiteUpdate(site, self.flip), carry, one), None

        return jax.lax.scan(visit, carry, (sites, site_noise))[0]

    def forgetful(self):
        return self


def sampler(flip: Checked[bool] = False) -> Cycle:
    """A sweep: the black sites, then the white ones.

    >>> import jax, diffmh
    >>> from diffmh.models import ising
    >>> moments = diffmh.expectation(
    ...     ising.energy_moments, ising.sampler(), init=ising.cold(4), num_samples=200, burn_in=20
    ... )
    >>> capacity = diffmh.compose(ising.heat_capacity, moments)
    >>> value, slope = jax.value_and_grad(capacity)(3.0, jax.random.key(0))
    """
    flip = _validate.flag(flip, "ising.sampler(flip=...)")
    return Cycle(HalfSweep(0, flip), HalfSweep(1, flip))


def sequential(size: Checked[int], flip: Checked[bool] = False) -> SequentialSweep:
    """The paper's sweep over a lattice of any size, whose state is an (L, L) array: slower than
    `sampler`, for comparison.

    >>> import jax, jax.numpy as jnp, diffmh
    >>> from diffmh.models import ising
    >>> start = jnp.ones((3, 3), jnp.int8)
    >>> mean = diffmh.expectation(
    ...     ising.energy, ising.sequential(3), init=start, num_samples=10, num_chains=100
    ... )
    >>> value, slope = jax.value_and_grad(mean)(3.0, jax.random.key(0))
    """
    flip = _validate.flag(flip, "ising.sequential(flip=...)")
    return SequentialSweep(_validate.count(size, "sequential(size=...)"), flip)
