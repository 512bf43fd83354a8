"""Sweeps over the lattice: half-sweeps of the checkerboard, and the paper's sweep, site by site in
random order.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from ...base import validate
from ...base.validate import Checked
from ...core.block_update import BlockUpdate
from ...core.decisions import Acceptance
from ...core.kernel import Kernel, State
from ...core.odds import DensityOdds
from ...core.parameters import Parameters
from ...kernels import Cycle
from .lattice import Spins, energy, neighbours, parameter


def proposed(mine: Int[Array, "..."], words: UInt32[Array, "..."], flip: bool) -> Array:
    """The spin proposed to each site: its flip, or ±1 by the lowest random bit."""
    # A choice of two constants: converting uint32 to small integers is slow.
    up, down = jnp.ones((), mine.dtype), -jnp.ones((), mine.dtype)
    return -mine if flip else jnp.where((words & 1) != 0, up, down)


def decide(
    parameters: Parameters, mine: Array, around: Array, words: UInt32[Array, "..."], flip: bool
) -> Acceptance:
    """The decision of each site; its uniform is in the high 24 of its random bits."""
    # Signed integers convert to floats faster.
    uniform = (words >> 8).astype(jnp.int32).astype(jnp.float32) * jnp.float32(2**-24)

    def log_ratio(theta, bonds, change, *args):
        theta = parameter(theta)
        gain = _times(theta.interaction, bonds) + _times(theta.field, change)
        return gain / theta.temperature

    change = proposed(mine, words, flip) - mine
    # In int8, a whole row at once: the change of a spin, 0 or ±2, times the sum of four neighbours
    # is at most 8.
    bonds = (change * around).astype(jnp.float32)
    return Acceptance.draw(
        uniform, parameters.evaluate(log_ratio, bonds, change.astype(jnp.float32))
    )


def _times(factor: Any, numbers: Array) -> Array | float:
    """The product; nothing is computed if the factor is a Python 0 or 1."""
    if isinstance(factor, float) and factor in (0.0, 1.0):
        return numbers if factor else 0.0
    return factor * numbers


def log_density(theta: Any, x: Any, *args: Any) -> Float[Array, ""]:
    """`−H/T`."""
    return -energy(theta, x) / parameter(theta).temperature


class IsingUpdate(BlockUpdate):
    """Sites of a lattice of which no two are neighbours. The 32 random bits of a site hold its
    proposal and its accept uniform.

    With `flip=False` each site is proposed ±1 with probability ½ (the paper's heat bath), and the
    alternative gets the same proposals and uniforms: a monotone coupling. With `flip=True` each
    site is proposed to flip (the paper's "uncoupled"): chains rarely meet.
    """

    flip: bool = eqx.field(static=True, default=False, kw_only=True)

    @abstractmethod
    def sites(self, x: Any) -> Array:
        """The spins of the sites."""

    @abstractmethod
    def with_block(self, x: Any, block: Array) -> Any:
        """The lattice with the spins at the sites replaced."""

    @abstractmethod
    def around(self, x: Any) -> Array:
        """The sum of the four neighbours of each site."""

    def log_density(self, theta, x, *args):
        return log_density(theta, x)

    @property
    def density_identity(self):
        return log_density

    @property
    def flip_odds(self):
        return DensityOdds(log_density)

    def decide(self, parameters, state, noise):
        return decide(parameters, self.sites(state.x), self.around(state.x), noise, self.flip)

    def result(self, x, noise, outcome):
        spins = self.sites(x)
        return self.with_block(x, jnp.where(outcome, proposed(spins, noise, self.flip), spins))

    def leads_nowhere(self, step, noise):
        # A site that is proposed the spin it has gains nothing whatever θ is: its weight is 0.
        return None

    def block(self, x):
        return self.sites(x).astype(float)

    def expected_block(self, parameters, x, noise):
        """The average over the proposals as well: a flip is proposed with probability 1 or ½."""
        spins, around = self.sites(x), self.around(x)
        # The mean is spin · (1 − 2 P(flip)), where P(flip) is `change` times 1 or ½.
        change = decide(parameters.value_only(), spins, around, noise, flip=True).probability
        return spins * (1 - change * (2.0 if self.flip else 1.0))


class HalfSweep(IsingUpdate):
    """All sites of one colour at once."""

    colour: int = eqx.field(static=True)

    def noise(self, key, x, num_steps) -> UInt32[Array, "steps L half"]:
        return jax.random.bits(key, (num_steps, *x.black.shape), jnp.uint32)

    def sites(self, x: Spins) -> Array:
        return x.colour(self.colour)

    def with_block(self, x: Spins, block) -> Spins:
        return x.with_colour(self.colour, block)

    def around(self, x: Spins) -> Array:
        return neighbours(x, self.colour)


class SiteUpdate(IsingUpdate):
    """One site of an (L, L) lattice."""

    site: Int[Array, "2"]

    def noise(self, key, x, num_steps) -> UInt32[Array, "steps"]:
        return jax.random.bits(key, (num_steps,), jnp.uint32)

    def sites(self, x):
        return self._at(x, 0, 0)

    def with_block(self, x, block):
        rows, columns = (jnp.arange(x.shape[0]) == place for place in self.site)
        return jnp.where(rows[:, None] & columns[None], block, x)

    def around(self, x):
        return self._at(x, 1, 0) + self._at(x, -1, 0) + self._at(x, 0, 1) + self._at(x, 0, -1)

    def _at(self, x: Int[Array, "L L"], down: int, right: int) -> Int[Array, ""]:
        row, column = (self.site + jnp.array([down, right])) % x.shape[0]
        return x[row, column]


class SequentialSweep(Kernel):
    """The paper's sweep: every site of the lattice in turn, with a new random order of rows and
    columns for each sweep.
    """

    size: int = eqx.field(static=True)
    flip: bool = eqx.field(static=True, default=False)

    def updates(self):
        return (SiteUpdate(jnp.zeros(2, int), flip=self.flip),)

    def start(self, parameters, x):
        return State(x)

    def distribute(self, make, key):
        # Each site of the sweep has its own noise, and each sweep its own order.
        key_order, key_sites = jax.random.split(key)
        site_keys = jax.random.split(key_sites, self.size**2)
        update = self.updates()[0]
        noise = jax.vmap(lambda key: make(update, key), out_axes=1)(site_keys)
        num_sweeps = jax.tree.leaves(noise)[0].shape[0]
        keys = jax.random.split(key_order, 2 * num_sweeps)
        orders = jax.vmap(lambda key: jax.random.permutation(key, self.size))(keys)
        return orders.reshape(num_sweeps, 2, self.size), noise

    def fold(self, advance, carry, noise):
        (rows, columns), site_noise = noise
        # Every site once: a random order of the rows and a random order of the columns.
        sites = jnp.stack(jnp.meshgrid(rows, columns, indexing="ij"), axis=-1).reshape(-1, 2)

        def visit(carry, now):
            site, one = now
            return advance(SiteUpdate(site, flip=self.flip), carry, one), None

        return jax.lax.scan(visit, carry, (sites, site_noise))[0]

    def without_cache(self):
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
    flip = validate.flag(flip, "ising.sampler(flip=...)")
    return Cycle(HalfSweep(0, flip=flip), HalfSweep(1, flip=flip))


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
    flip = validate.flag(flip, "ising.sequential(flip=...)")
    return SequentialSweep(validate.count(size, "sequential(size=...)"), flip)
