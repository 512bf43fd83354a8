"""The Ising model on the periodic L×L square lattice, `H = −θ Σ x_i x_j − h Σ x_i`, at temperature T with k_B = 1.

A lattice of even L is kept as its two colours of the checkerboard. The sites of one colour have all their neighbours in the other,
so they decide independently given it: a half-sweep decides them all at once.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from .. import _validate
from ..kernel import AcceptReject, Cycle, State, Step, accept
from ..parameters import Parameters


class Parameter(NamedTuple):
    """What may be differentiated. A kernel takes it as theta, or a bare temperature for `interaction=1, field=0`."""

    temperature: Any
    interaction: Any = 1.0
    field: Any = 0.0


class Spins(eqx.Module):
    """A lattice of spins ±1 by colour. Row i of `black` holds the columns of the parity of i, row i of `white` the others."""

    black: Int[Array, "L half"]
    white: Int[Array, "L half"]

    def colour(self, number: int) -> Int[Array, "L half"]:
        return self.white if number else self.black

    def with_colour(self, number: int, spins: Int[Array, "L half"]) -> Spins:
        return Spins(self.black, spins) if number else Spins(spins, self.white)

    def lattice(self) -> Int[Array, "L L"]:
        """The spins by row and column."""
        even = jnp.arange(self.black.shape[0])[:, None] % 2 == 0
        first, second = jnp.where(even, self.black, self.white), jnp.where(even, self.white, self.black)
        return jnp.stack([first, second], axis=-1).reshape(self.black.shape[0], -1)


def spins(lattice: Int[Array, "L L"]) -> Spins:
    """A lattice of even L by colour."""
    lattice = jnp.asarray(lattice)
    size = lattice.shape[0]
    if lattice.ndim != 2 or lattice.shape != (size, size) or size % 2 or size < 4:
        raise ValueError(f"`spins(lattice)` takes a square lattice of even size at least 4, got shape {lattice.shape}.")
    pairs = lattice.reshape(size, size // 2, 2)
    even = jnp.arange(size)[:, None] % 2 == 0
    return Spins(jnp.where(even, pairs[..., 0], pairs[..., 1]), jnp.where(even, pairs[..., 1], pairs[..., 0]))


def cold(size: int) -> Spins:
    """All spins up."""
    return spins(jnp.ones((_validate.count(size, "cold(size=...)"),) * 2, jnp.int8))


def neighbours(x: Spins, colour: int) -> Int[Array, "L half"]:
    """The sum of the four neighbours of each site of a colour, all of the other colour."""
    other = x.colour(1 - colour)
    even = jnp.arange(other.shape[0])[:, None] % 2 == 0
    # Beside site k of its row stand the other colour's site k, and k − 1 or k + 1 by the parity of row and colour.
    before, after = jnp.roll(other, 1, axis=1), jnp.roll(other, -1, axis=1)
    beside = jnp.where(even, before, after) if colour == 0 else jnp.where(even, after, before)
    return jnp.roll(other, 1, axis=0) + jnp.roll(other, -1, axis=0) + other + beside


def bonds(x: Spins) -> Float[Array, ""]:
    """`Σ x_i x_j` over the 2L² bonds: each has one black end."""
    return jnp.sum((x.black * neighbours(x, 0)).astype(jnp.int32)).astype(float)


def magnetisation(x: Spins) -> Float[Array, ""]:
    """`Σ x_i`."""
    return (jnp.sum(x.black, dtype=jnp.int32) + jnp.sum(x.white, dtype=jnp.int32)).astype(float)


def energy(theta: Parameter | Any, x: Spins) -> Float[Array, ""]:
    """`H = −θ Σ x_i x_j − h Σ x_i`."""
    theta = _parameter(theta)
    return -theta.interaction * bonds(x) - theta.field * magnetisation(x)


def energy_moments(theta: Parameter | Any, x: Spins) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """`H` and `H²`: f for the heat capacity."""
    value = energy(theta, x)
    return value, value**2


def heat_capacity(theta: Parameter | Any, moments: tuple[Float[Array, ""], Float[Array, ""]]) -> Float[Array, ""]:
    """`C = (E[H²] − E[H]²)/T²`, for `diffmh.compose`."""
    return (moments[1] - moments[0] ** 2) / _parameter(theta).temperature ** 2


class HalfSweep(AcceptReject):
    """All sites of one colour at once. One random word per site holds its proposal and its accept uniform.

    With `flip=False` each site is proposed ±1 with probability ½ (the paper's heat bath), and the alternative gets the same
    proposals and uniforms: a monotone coupling. With `flip=True` each site is proposed to flip, the paper's "uncoupled": chains
    rarely meet.
    """

    colour: int = eqx.field(static=True)
    flip: bool = eqx.field(static=True, default=False)

    def log_density(self, theta, x):
        return -energy(theta, x) / _parameter(theta).temperature

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
        return Step(state, State(state.x.with_colour(self.colour, proposed), None), State(after, None), accepted, log_ratio)

    def coupled_step(self, parameters, step, alternative, noise, coupling_noise):
        y = alternative.x
        proposed, accepted, _ = self._decide(parameters, y, noise)
        return State(y.with_colour(self.colour, jnp.where(accepted, proposed, y.colour(self.colour))), None)

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

    def _decide(self, parameters: Parameters, x: Spins, words) -> tuple[Array, Bool[Array, "L half"], Any]:
        x = parameters.whole(x)
        mine, around = x.colour(self.colour), neighbours(x, self.colour)
        # The uniform from the high 24 bits, the proposed spin from the lowest.
        uniform = (words >> 8).astype(jnp.int32).astype(jnp.float32) * jnp.float32(2**-24)
        drawn = (2 * (words & 1).astype(jnp.int32) - 1).astype(mine.dtype)
        proposed = -mine if self.flip else drawn
        change = (proposed - mine).astype(jnp.float32)

        def log_ratio(theta, change, around):
            theta = _parameter(theta)
            return change * (theta.interaction * around + theta.field) / theta.temperature

        ratio = parameters.evaluate(log_ratio, change, around.astype(jnp.float32))
        return proposed, parameters.whole(accept(uniform, ratio.value)), ratio


def sampler(flip: bool = False) -> Cycle:
    """A sweep: the black sites, then the white ones.

    >>> import jax, diffmh
    >>> from diffmh.models import ising
    >>> moments = diffmh.expectation(ising.energy_moments, ising.sampler(), init=ising.cold(4), num_samples=200, burn_in=20)
    >>> capacity = diffmh.compose(ising.heat_capacity, moments)
    >>> value, slope = jax.value_and_grad(capacity)(3.0, jax.random.key(0))
    """
    return Cycle(HalfSweep(0, flip), HalfSweep(1, flip))


def log_partition(size: int, coupling: Float[Array, ""]) -> Float[Array, ""]:
    """Kaufman's log Z of the periodic L×L lattice without field at `K = θ/T` (Phys. Rev. 76, 1232, 1949).

        Z = ½ (2 sinh 2K)^{L²/2} [Π 2cosh(Lγ_{2r+1}/2) + Π 2sinh(Lγ_{2r+1}/2) + Π 2cosh(Lγ_{2r}/2) + Π 2sinh(Lγ_{2r}/2)]

    with `cosh γ_k = cosh 2K coth 2K − cos(πk/L)` and `γ_0 = 2K + log tanh K`, of either sign. Evaluate it in double precision.
    """
    index = jnp.arange(1, 2 * size)
    half = 0.5 * size * jnp.arccosh(jnp.cosh(2 * coupling) / jnp.tanh(2 * coupling) - jnp.cos(jnp.pi * index / size))
    cosh, sinh = half + jnp.log1p(jnp.exp(-2 * half)), half + jnp.log1p(-jnp.exp(-2 * half))
    odd = index % 2 == 1
    over = lambda mask, terms: jnp.sum(jnp.where(mask, terms, 0.0))
    reference = over(odd, cosh)
    first = 0.5 * size * (2 * coupling + jnp.log(jnp.tanh(coupling)))
    rest = lambda terms, sign: jnp.exp(over(~odd, terms) - reference + sign * first)
    bracket = 1 + jnp.exp(over(odd, sinh) - reference) + rest(cosh, 1) + rest(cosh, -1) + rest(sinh, 1) - rest(sinh, -1)
    return 0.5 * size**2 * jnp.log(2 * jnp.sinh(2 * coupling)) + reference + jnp.log(bracket) - jnp.log(2.0)


class Exact(NamedTuple):
    """Equilibrium averages: `E[H]`, `C = dE/dT`, `dC/dT`."""

    energy: float
    heat_capacity: float
    heat_capacity_slope: float


def exact(size: int, temperature: float, interaction: float = 1.0) -> Exact:
    """Exact averages at equilibrium without field, by Kaufman's formula in double precision.

    >>> from diffmh.models import ising
    >>> round(ising.exact(12, 3.0).energy, 6)
    -118.114819
    """
    with jax.enable_x64(True):
        averages = _averages(_validate.count(size, "exact(size=...)"))
        return Exact(*map(float, averages(np.float64(temperature), np.float64(interaction))))


@functools.cache
def _averages(size: int):
    """`(T, θ) -> (E, C, dC/dT)`, compiled once for each size."""

    def energy(t, interaction):
        return t**2 * jax.grad(lambda t: log_partition(size, interaction / t))(t)

    capacity = jax.grad(energy)
    return jax.jit(lambda *at: (energy(*at), capacity(*at), jax.grad(capacity)(*at)))


def _parameter(theta: Parameter | Any) -> Parameter:
    return theta if isinstance(theta, Parameter) else Parameter(theta)
