"""Exact averages at equilibrium: Kaufman's formula for any L, enumeration for small L."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ...base import validate
from ...base.validate import Checked
from .lattice import Parameter, parameter


def log_partition(size: int, coupling: Float[Array, ""]) -> Float[Array, ""]:
    """Kaufman's log Z of the periodic L×L lattice without field at `K = θ/T` (Phys. Rev. 76, 1232,
    1949).

        Z = ½ (2 sinh 2K)^{L²/2} [Π 2cosh(Lγ_{2r+1}/2) + Π 2sinh(Lγ_{2r+1}/2) + Π 2cosh(Lγ_{2r}/2) +
        Π 2sinh(Lγ_{2r}/2)]

    with `cosh γ_k = cosh 2K coth 2K − cos(πk/L)` and `γ_0 = 2K + log tanh K`, of either sign.
    Evaluate it in double precision.
    """
    index = jnp.arange(1, 2 * size)
    half = (
        0.5
        * size
        * jnp.arccosh(
            jnp.cosh(2 * coupling) / jnp.tanh(2 * coupling) - jnp.cos(jnp.pi * index / size)
        )
    )
    cosh, sinh = half + jnp.log1p(jnp.exp(-2 * half)), half + jnp.log1p(-jnp.exp(-2 * half))
    odd = index % 2 == 1
    over = lambda mask, terms: jnp.sum(jnp.where(mask, terms, 0.0))
    # All four products relative to the first: they are of size e^{L²} and would overflow.
    reference = over(odd, cosh)
    first = 0.5 * size * (2 * coupling + jnp.log(jnp.tanh(coupling)))

    def rest(terms, sign):
        return jnp.exp(over(~odd, terms) - reference + sign * first)

    bracket = (
        1
        + jnp.exp(over(odd, sinh) - reference)
        + rest(cosh, 1)
        + rest(cosh, -1)
        + rest(sinh, 1)
        - rest(sinh, -1)
    )
    return (
        0.5 * size**2 * jnp.log(2 * jnp.sinh(2 * coupling))
        + reference
        + jnp.log(bracket)
        - jnp.log(2.0)
    )


# Below this coupling `weak_slope` is used: in Kaufman's formula, terms of order 1/K cancel.
_WEAK = 0.02


def weak_slope(size: int, coupling: Float[Array, ""]) -> Float[Array, ""]:
    """`d log Z/dK` of the same lattice above the critical temperature, to full relative precision
    for arbitrarily small K.

        Z = 2^N cosh(K)^{2N} · ½ (A_{½½} + A_{½0} + A_{0½} − A_{00}),   N = L²,   v = tanh K
        log A = N log(1 + v²) + ½ Σ_{p,q} log(1 − u s),
        s = cos p + cos q,   u = 2v (1 − v²)/(1 + v²)²

    over momenta `2π(k + ½)/L` or `2πk/L`. Since `Σ s` is 0 for L > 1, the sum in the slope of log A
    is `Σ s/(1 − us) = u Σ s²/(1 − us)`, in which no large terms cancel.
    """
    v = jnp.tanh(coupling)
    turn = 2 * np.pi * np.arange(size) / size
    half, whole = np.cos(turn + np.pi / size), np.cos(turn)
    number = size**2

    def ratio(v):
        return 2 * v * (1 - v**2) / (1 + v**2) ** 2

    def sector(of_p, of_q):
        s = of_p[:, None] + of_q[None, :]
        u = ratio(v)
        total = u * jnp.sum(s**2 / (1 - u * s)) + (s.sum() if size == 1 else 0.0)
        slope = 2 * number * v / (1 + v**2) - 0.5 * jax.grad(ratio)(v) * total
        return jnp.exp(number * jnp.log1p(v**2) + 0.5 * jnp.sum(jnp.log1p(-u * s))), slope

    # The four sectors of boundary conditions, of which the fully periodic one counts negatively.
    sectors = [sector(half, half), sector(half, whole), sector(whole, half), sector(whole, whole)]
    signs = (1.0, 1.0, 1.0, -1.0)
    total = sum(sign * a for sign, (a, _) in zip(signs, sectors, strict=True))
    moved = sum(sign * a * slope for sign, (a, slope) in zip(signs, sectors, strict=True))
    return 2 * number * v + (1 - v**2) * moved / total


class Exact(NamedTuple):
    """Equilibrium averages: `E[H]`, `C = dE/dT`, `dC/dT`."""

    energy: float
    heat_capacity: float
    heat_capacity_slope: float


def exact(
    size: Checked[int], temperature: Checked[float], interaction: Checked[float] = 1.0
) -> Exact:
    """Exact averages at equilibrium without field, by Kaufman's formula in double precision.

    Raises an error unless temperature and interaction are positive, as the formula requires.

    >>> from diffmh.models import ising
    >>> round(ising.exact(12, 3.0).energy, 6)
    -118.114819
    """
    temperature = np.float64(validate.number(temperature, "exact(temperature=...)", above=0))
    interaction = np.float64(validate.number(interaction, "exact(interaction=...)", above=0))
    with jax.enable_x64(True):
        weak = bool(interaction < _WEAK * temperature)
        averages = _averages(validate.count(size, "exact(size=...)"), weak)
        return Exact(*map(float, averages(temperature, interaction)))


@functools.cache
def _averages(size: int, weak: bool):
    """`(T, θ) -> (E, C, dC/dT)`, compiled once for each size."""
    slope = weak_slope if weak else jax.grad(log_partition, argnums=1)

    def energy(t, interaction):
        return -interaction * slope(size, interaction / t)

    capacity = jax.grad(energy)
    return jax.jit(lambda *at: (energy(*at), capacity(*at), jax.grad(capacity)(*at)))


def enumerated(size: Checked[int], theta: Parameter | Any) -> Exact:
    """Exact averages of a lattice of size at most 4 over all its `2^(L²)` states, with any
    interaction and field.

    With κ_n the cumulants of H: `E = κ_1`, `C = κ_2/T²` and, at fixed interaction and field,
    `dC/dT = κ_3/T⁴ − 2κ_2/T³`.

    >>> from diffmh.models import ising
    >>> round(ising.enumerated(4, 3.0).energy, 6) == round(ising.exact(4, 3.0).energy, 6)
    True
    """
    if not 2 <= validate.count(size, "enumerated(size=...)") <= 4:
        raise ValueError(
            f"`enumerated(size=...)` sums over all states, so `size` must be from 2 to 4, got"
            f" {size}: use `exact` for larger lattices."
        )
    where = "enumerated(theta=...)"
    temperature, interaction, field = (
        validate.number(value, f"{where}`: `{name}")
        for name, value in parameter(theta)._asdict().items()
    )
    validate.number(temperature, f"{where}`: the temperature `T", above=0)
    codes = np.arange(2 ** (size * size), dtype=np.int64)
    x = 1 - 2 * ((codes[:, None] >> np.arange(size * size)) & 1).reshape(-1, size, size)
    bonds = np.sum(x * (np.roll(x, 1, axis=1) + np.roll(x, 1, axis=2)), axis=(1, 2))
    energy = -interaction * bonds - field * np.sum(x, axis=(1, 2))
    # Relative to the lowest energy, so that the largest weight is 1 and none overflows.
    weight = np.exp(-(energy - energy.min()) / temperature)
    weight /= weight.sum()
    mean = np.sum(weight * energy)
    second, third = (np.sum(weight * (energy - mean) ** n) for n in (2, 3))
    return Exact(
        float(mean),
        float(second / temperature**2),
        float(third / temperature**4 - 2 * second / temperature**3),
    )


def peak(size: Checked[int], interaction: Checked[float] = 1.0) -> float:
    """The temperature at which the heat capacity of the L×L lattice is largest, by bisection of
    `dC/dT` (Kaufman).

    >>> from diffmh.models import ising
    >>> round(ising.peak(12), 4)
    2.3327
    """
    size = validate.count(size, "peak(size=...)")
    interaction = validate.number(interaction, "peak(interaction=...)", above=0)
    # Temperatures in units of the interaction.
    low, high = 1.5, 4.0
    for _ in range(35):
        middle = 0.5 * (low + high)
        # C has a single peak.
        low, high = (middle, high) if exact(size, middle).heat_capacity_slope > 0 else (low, middle)
    return 0.5 * (low + high) * float(interaction)
