"""Sweeps over the lattice: the checkerboard's half-sweeps, and the paper's, site by site in
random order.
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, UInt32

from ... import _trees, _validate
from ...kernel import AcceptReject, Cycle, Kernel, State, Step, accept
from ...parameters import Dual, Parameters
from .lattice import Spins, energy, neighbours, parameter


def decide(
    parameters: Parameters, mine: Array, around: Array, words: UInt32[Array, "..."], flip: bool
):
    """What is proposed to each site, whether it is accepted, and `log r`: one random word per
    site holds spin and uniform.
    """
    # The uniform from the high 24 bits, the proposed spin from the lowest. Conversion of signed
    # integers is the fast one.
    uniform = (words >> 8).astype(jnp.int32).astype(jnp.float32) * jnp.float32(2**-24)
    drawn = (2 * (words & 1).astype(jnp.int32) - 1).astype(mine.dtype)
    proposed = -mine if flip else drawn

    def log_ratio(theta, change, around):
        theta = parameter(theta)
        return change * (theta.interaction * around + theta.field) / theta.temperature

    ratio = parameters.evaluate(
        log_ratio, (proposed - mine).astype(jnp.float32), around.astype(jnp.float32)
    )
    return proposed, parameters.whole(accept(uniform, ratio.value)), ratio


class HalfSweep(AcceptReject):
    """All sites of one colour at once. One random word per site holds its proposal and its accept
    uniform.

    With `flip=False` each site is proposed ±1 with probability ½ (the paper's heat bath), and the
    alternative gets the same proposals and uniforms: a monotone coupling. With `flip=True` each
    site is proposed to flip, the paper's "uncoupled": chains rarely meet.
    """

    colour: int = eqx.field(static=True)
    flip: bool = eqx.field(static=True, default=False)

    def log_density(self, theta, x):
        return -energy(theta, x) / parameter(theta).temperature

    def start(self, parameters, x):
        return State(x, None)

    def noise(self, key, x, num_steps) -> UInt32[Array, "steps L half"]:
        return jax.random.bits(key, (num_steps, *x.black.shape), jnp.uint32)

    def coupling_noise(self, key, x, num_steps):
        return None

    def step(self, parameters: Parameters, state: State, noise) -> Step:
        proposed, accepted, log_ratio = self._decide(parameters, state.x, noise)
        before = state.x.colour(self.colour)
        after = state.x.with_colour(self.colour, jnp.where(accepted, proposed, before))
        return Step(
            state,
            State(state.x.with_colour(self.colour, proposed), None),
            State(after, None),
            accepted,
            log_ratio,
        )

    def coupled_step(self, parameters, step, alternative, noise, coupling_noise):
        y = alternative.x
        proposed, accepted, _ = self._decide(parameters, y, noise)
        return State(
            y.with_colour(self.colour, jnp.where(accepted, proposed, y.colour(self.colour))), None
        )

    def flipped(self, step, index):
        before, proposed = step.before.x.colour(self.colour), step.proposed.x.colour(self.colour)
        after = step.after.x.colour(self.colour)
        here = jnp.arange(after.size).reshape(after.shape) == index
        other = jnp.where(step.accepted, before, proposed)
        return State(step.after.x.with_colour(self.colour, jnp.where(here, other, after)), None)

    @property
    def remembers(self):
        return None

    def forgetful(self):
        return self

    def _decide(
        self, parameters: Parameters, x: Spins, words
    ) -> tuple[Array, Bool[Array, "L half"], Dual]:
        x = parameters.whole(x)
        return decide(
            parameters, x.colour(self.colour), neighbours(x, self.colour), words, self.flip
        )


class SiteUpdate(AcceptReject):
    """One site of an (L, L) lattice, with the proposals of `HalfSweep`."""

    site: Int[Array, "2"]
    flip: bool = eqx.field(static=True, default=False)

    def log_density(self, theta, x):
        return -energy(theta, x) / parameter(theta).temperature

    def start(self, parameters, x):
        return State(x, None)

    def noise(self, key, x, num_steps) -> UInt32[Array, "steps"]:
        return jax.random.bits(key, (num_steps,), jnp.uint32)

    def coupling_noise(self, key, x, num_steps):
        return None

    def step(self, parameters: Parameters, state: State, noise) -> Step:
        proposed, accepted, log_ratio = self._decide(parameters, state.x, noise)
        proposed = State(self._with(state.x, proposed), None)
        return Step(state, proposed, _trees.select(accepted, proposed, state), accepted, log_ratio)

    def coupled_step(self, parameters, step, alternative, noise, coupling_noise):
        proposed, accepted, _ = self._decide(parameters, alternative.x, noise)
        return State(
            self._with(alternative.x, jnp.where(accepted, proposed, self._at(alternative.x, 0, 0))),
            None,
        )

    def flipped(self, step, index):
        return _trees.select(step.accepted, step.before, step.proposed)

    @property
    def remembers(self):
        return None

    def forgetful(self):
        return self

    def _at(self, x: Int[Array, "L L"], down: int, right: int) -> Int[Array, ""]:
        row, column = (self.site + jnp.array([down, right])) % x.shape[0]
        return x[row, column]

    def _with(self, x: Int[Array, "L L"], spin: Int[Array, ""]) -> Int[Array, "L L"]:
        rows, columns = (jnp.arange(x.shape[0]) == place for place in self.site)
        return jnp.where(rows[:, None] & columns, spin, x)

    def _decide(self, parameters: Parameters, x: Int[Array, "L L"], word: UInt32[Array, ""]):
        around = self._at(x, 1, 0) + self._at(x, -1, 0) + self._at(x, 0, 1) + self._at(x, 0, -1)
        return decide(parameters, self._at(x, 0, 0), around, word, self.flip)


class SequentialSweep(Kernel):
    """The paper's sweep: every site of the lattice in turn, rows and columns in an order drawn
    anew for each sweep.
    """

    size: int = eqx.field(static=True)
    flip: bool = eqx.field(static=True, default=False)

    def steps(self):
        return (SiteUpdate(jnp.zeros(2, int), self.flip),)

    def start(self, parameters, x):
        return State(x, None)

    def draw(self, draw, key):
        key_order, key_sites = jax.random.split(key)
        site_keys = jax.random.split(key_sites, self.size**2)
        updates = jax.vmap(lambda key: draw(self.steps()[0], key), out_axes=1)(site_keys)
        num_sweeps = jax.tree.leaves(updates)[0].shape[0]
        permute = lambda key: jax.random.permutation(key, self.size)
        orders = jax.vmap(permute)(jax.random.split(key_order, 2 * num_sweeps)).reshape(
            num_sweeps, 2, self.size
        )
        return orders, updates

    def fold(self, advance, carry, noise):
        (rows, columns), updates = noise
        sites = jnp.stack(jnp.meshgrid(rows, columns, indexing="ij"), axis=-1).reshape(-1, 2)
        body = lambda carry, now: (advance(SiteUpdate(now[0], self.flip), carry, now[1]), None)
        return jax.lax.scan(body, carry, (sites, updates))[0]

    def forgetful(self):
        return self


def sampler(flip: bool = False) -> Cycle:
    """A sweep: the black sites, then the white ones.

    >>> import jax, diffmh
    >>> from diffmh.models import ising
    >>> moments = diffmh.expectation(ising.energy_moments, ising.sampler(), init=ising.cold(4), num_samples=200, burn_in=20)
    >>> capacity = diffmh.compose(ising.heat_capacity, moments)
    >>> value, slope = jax.value_and_grad(capacity)(3.0, jax.random.key(0))
    """
    return Cycle(HalfSweep(0, flip), HalfSweep(1, flip))


def sequential(size: int, flip: bool = False) -> SequentialSweep:
    """The paper's sweep over a lattice of any size, whose state is an (L, L) array: slower than
    `sampler`, for comparison.

    >>> import jax, jax.numpy as jnp, diffmh
    >>> from diffmh.models import ising
    >>> start = jnp.ones((3, 3), jnp.int8)
    >>> mean = diffmh.expectation(ising.energy, ising.sequential(3), init=start, num_samples=10, num_chains=100)
    >>> value, slope = jax.value_and_grad(mean)(3.0, jax.random.key(0))
    """
    return SequentialSweep(_validate.count(size, "sequential(size=...)"), flip)
