"""The periodic L×L lattice, `H = −θ Σ x_i x_j − h Σ x_i`, at temperature T with k_B = 1: states and
observables.

A state is a lattice of spins ±1 of shape (L, L) or, for even L, the same spins by the colours of
the checkerboard. All neighbours of a site have the other colour, so given it, the sites of one
colour are independent.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Int, Num

from ...base import validate
from ...base.validate import Checked


class Parameter(NamedTuple):
    """The parameters, to be differentiated. A kernel takes it as theta, or a temperature alone, for
    `interaction=1, field=0`.
    """

    temperature: Any
    interaction: Any = 1.0
    field: Any = 0.0


class Spins(eqx.Module):
    """A lattice of spins ±1 by colour. Row i of `black` holds the columns of the same parity as i,
    row i of `white` the others. The spins are floats if they are averages over several states.
    """

    black: Num[Array, "L half"]
    white: Num[Array, "L half"]

    def colour(self, number: int) -> Num[Array, "L half"]:
        return self.white if number else self.black

    def with_colour(self, number: int, spins: Num[Array, "L half"]) -> Spins:
        return Spins(self.black, spins) if number else Spins(spins, self.white)

    def lattice(self) -> Num[Array, "L L"]:
        """The spins by row and column."""
        # Row i of `black` has the columns of parity i: in even rows, black comes first.
        even = jnp.arange(self.black.shape[0])[:, None] % 2 == 0
        first = jnp.where(even, self.black, self.white)
        second = jnp.where(even, self.white, self.black)
        return jnp.stack([first, second], axis=-1).reshape(self.black.shape[0], -1)


State = Spins | Num[Array, "L L"]


def spins(lattice: Checked[Int[ArrayLike, "L L"]]) -> Spins:
    """A lattice of even L by colour."""
    lattice = validate.array_of(lattice, "`spins(lattice)`")
    size = lattice.shape[0] if lattice.ndim else 0
    if lattice.ndim != 2 or lattice.shape != (size, size) or size % 2 or size < 4:
        raise ValueError(
            "`spins(lattice)` needs a square lattice of even size at least 4, got shape"
            f" {lattice.shape}."
        )
    pairs = lattice.reshape(size, size // 2, 2)
    even = jnp.arange(size)[:, None] % 2 == 0
    return Spins(
        jnp.where(even, pairs[..., 0], pairs[..., 1]), jnp.where(even, pairs[..., 1], pairs[..., 0])
    )


def cold(size: Checked[int]) -> Spins:
    """All spins up."""
    return spins(jnp.ones((validate.count(size, "cold(size=...)"),) * 2, jnp.int8))


def neighbours(x: Spins, colour: int) -> Num[Array, "L half"]:
    """The sum of the four neighbours, all of the other colour, of each site of a colour."""
    other = x.colour(1 - colour)
    even = jnp.arange(other.shape[0])[:, None] % 2 == 0
    around = _with_border(other)
    # The neighbours of site k in its row are site k of the other colour, and k − 1 or k + 1,
    # depending on the parity of row and colour.
    before, after = around[1:-1, :-2], around[1:-1, 2:]
    beside = jnp.where(even, before, after) if colour == 0 else jnp.where(even, after, before)
    return around[:-2, 1:-1] + around[2:, 1:-1] + other + beside


def _with_border(spins: Num[Array, "L half"]) -> Num[Array, "L+2 half+2"]:
    """The spins with a periodic border, without its corners. Written into one array: otherwise four
    rolled copies would be computed again in each fused operation.
    """
    rows, columns = spins.shape
    # Corners stay 0: no site has a diagonal neighbour.
    padded = jnp.zeros((rows + 2, columns + 2), spins.dtype)
    parts = {
        (1, 1): spins,
        (0, 1): spins[-1:],
        (rows + 1, 1): spins[:1],
        (1, 0): spins[:, -1:],
        (1, columns + 1): spins[:, :1],
    }
    for place, part in parts.items():
        padded = jax.lax.dynamic_update_slice(padded, part, place)
    return padded


def bonds(x: State) -> Float[Array, ""]:
    """`Σ x_i x_j` over the 2L² bonds."""
    if isinstance(x, Spins):
        # Each bond has a black and a white end. Summed from the colour that holds averages, if one
        # does: its derivative is then the sum of neighbours, which a step needs anyway.
        colour = int(jnp.issubdtype(x.white.dtype, jnp.floating))
        products = x.colour(colour) * neighbours(x, colour)
    else:
        products = x * (jnp.roll(x, 1, axis=0) + jnp.roll(x, 1, axis=1))
    return _total(products).astype(float)


def magnetisation(x: State) -> Float[Array, ""]:
    """`Σ x_i`."""
    return sum(_total(part) for part in jax.tree.leaves(x)).astype(float)  # pyright: ignore


def _total(numbers: Array) -> Array:
    """The sum; exact unless spins are averages over several states. Integers up to 4 are added as
    floats while that is exact, otherwise as int32: floats are faster.
    """
    if not jnp.issubdtype(numbers.dtype, jnp.integer):
        return jnp.sum(numbers)
    whole = numbers.astype(jnp.int32)
    return jnp.sum(whole.astype(jnp.float32) if 4 * numbers.size <= 2**24 else whole)


def energy(theta: Parameter | Any, x: State) -> Float[Array, ""]:
    """`H = −θ Σ x_i x_j − h Σ x_i`."""
    theta = parameter(theta)
    return -theta.interaction * bonds(x) - theta.field * magnetisation(x)


def energy_moments(theta: Parameter | Any, x: State) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """`H` and `H²`: f for the heat capacity."""
    value = energy(theta, x)
    return value, value**2


def excitation_moments(
    theta: Parameter | Any, x: State
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """`H − H_0` and its square, relative to the ground state's `H_0 = −2θL²` without field: f for
    the heat capacity in float32.

    A variance does not depend on the origin. Relative to the ground state both moments are small if
    the variance is, so their difference keeps its digits at low temperature.
    """
    sites = sum(part.size for part in jax.tree.leaves(x))
    # The ground state's energy depends on θ, so it must be part of the derivative.
    value = energy(theta, x) + 2 * sites * parameter(theta).interaction
    return value, value**2


def heat_capacity(
    theta: Parameter | Any, moments: tuple[Float[Array, ""], Float[Array, ""]]
) -> Float[Array, ""]:
    """`C = (E[H²] − E[H]²)/T²`, for `diffmh.compose`."""
    return (moments[1] - moments[0] ** 2) / parameter(theta).temperature ** 2


def parameter(theta: Parameter | Any) -> Parameter:
    """theta as a `Parameter`, from a `Parameter` or a temperature."""
    return theta if isinstance(theta, Parameter) else Parameter(theta)
