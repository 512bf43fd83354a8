"""Sweeps of the Ising model against enumeration, and at equilibrium."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import derivative, ising_configurations, ising_energy
from programs import derivatives, optimised
from unbiasedness import assert_unbiased

import diffmh
from diffmh.models import ising


def checkerboard_oracle(num_sweeps, flip):
    """4×4 by enumeration: black sites, then white ones; each proposed ±1 with probability ½, or
    to flip.
    """
    spins = ising_configurations(4).astype(float)
    bonds, field = -ising_energy(spins), spins.sum(axis=(1, 2))
    sites = [
        4 * i + j for parity in (0, 1) for i in range(4) for j in range(4) if (i + j) % 2 == parity
    ]

    def mean(theta):
        temperature, interaction, h = theta
        log_density = (interaction * bonds + h * field) / temperature
        observed = np.stack([-interaction * bonds - h * field, field], axis=1)
        row = np.zeros(len(spins), complex)
        row[0] = 1.0
        total = np.zeros(2, complex)
        for _ in range(num_sweeps):
            for site in sites:
                flipped = np.arange(len(spins)) ^ (1 << (15 - site))
                ratio = log_density[flipped] - log_density
                share = np.where(ratio.real < 0, 1.0, np.where(ratio.real == 0, 0.5, 0.0))
                move = (
                    (1.0 if flip else 0.5)
                    * np.exp(np.minimum(ratio.real, 0.0))
                    * (1 + 1j * share * ratio.imag)
                )
                row = row * (1 - move) + (row * move)[flipped]
            total += row @ observed
        return total / num_sweeps

    return mean


@pytest.mark.optimised
@pytest.mark.parametrize(
    ("flip", "alternatives"),
    [pytest.param(False, 1, marks=pytest.mark.thorough), (False, 4), (True, 1)],
)
def test_checkerboard_sweeps(flip, alternatives):
    """Derivatives with respect to temperature, interaction and field, from a cold start, at
    burn-in 0.
    """
    theta = ising.Parameter(3.0, 0.9, 0.2)
    expectation = diffmh.expectation(
        lambda theta, x: jnp.stack([ising.energy(theta, x), ising.magnetisation(x)]),
        ising.sampler(flip),
        init=ising.cold(4),
        num_samples=3,
        num_chains=40_000,
        estimator=diffmh.StochasticDerivative(alternatives=alternatives),
    )
    found = jnp.stack(list(derivatives(expectation, theta, jax.random.key(41))), axis=-1)
    assert_unbiased(found, derivative(checkerboard_oracle(3, flip), np.array(theta))[1])


def sequential_oracle(size, num_sweeps, flip):
    """By enumeration: each sweep visits rows and columns in an order drawn anew, so its matrix
    is the mean over all orders.
    """
    spins = ising_configurations(size).astype(float)
    bonds, field = -ising_energy(spins), spins.sum(axis=(1, 2))
    orders = list(itertools.permutations(range(size)))

    def mean(theta):
        temperature, interaction, h = theta
        log_density = (interaction * bonds + h * field) / temperature
        observed = np.stack([-interaction * bonds - h * field, field], axis=1)

        def site(row, index):
            flipped = np.arange(len(spins)) ^ (1 << (size * size - 1 - index))
            ratio = log_density[flipped] - log_density
            share = np.where(ratio.real < 0, 1.0, np.where(ratio.real == 0, 0.5, 0.0))
            move = (
                (1.0 if flip else 0.5)
                * np.exp(np.minimum(ratio.real, 0.0))
                * (1 + 1j * share * ratio.imag)
            )
            return row * (1 - move) + (row * move)[..., flipped]

        row = np.zeros(len(spins), complex)
        row[0] = 1.0
        total = np.zeros(2, complex)
        for _ in range(num_sweeps):
            ends = []
            for rows, columns in itertools.product(orders, orders):
                end = row
                for i, j in itertools.product(rows, columns):
                    end = site(end, size * i + j)
                ends.append(end)
            row = np.mean(ends, axis=0)
            total += row @ observed
        return total / num_sweeps

    return mean


@pytest.mark.parametrize("flip", [False, True])
def test_sequential_sweeps(flip):
    """The paper's sweep, on 3×3: derivatives with respect to temperature, interaction and field,
    from a cold start.
    """
    theta = ising.Parameter(3.0, 0.9, 0.2)
    expectation = diffmh.expectation(
        lambda theta, x: jnp.stack([ising.energy(theta, x), ising.magnetisation(x)]),
        ising.sequential(3, flip),
        init=jnp.ones((3, 3), jnp.int8),
        num_samples=3,
        num_chains=40_000,
    )
    found = jnp.stack(list(derivatives(expectation, theta, jax.random.key(46))), axis=-1)
    assert_unbiased(found, derivative(sequential_oracle(3, 3, flip), np.array(theta))[1])


def test_heat_bath_keeps_the_order():
    """Monotone: an alternative born above the primal stays above it until they meet."""
    path = diffmh.trace(ising.sampler(), 3.0, jax.random.key(42), init=ising.cold(6), num_steps=300)
    primal, other = (
        jax.vmap(ising.Spins.lattice)(s)
        for s in (path.primal, jax.tree.map(lambda y: y[:, 0], path.alternative))
    )
    above, below = jnp.all(other >= primal, axis=(1, 2)), jnp.all(other <= primal, axis=(1, 2))
    alive = path.alive[:, 0]
    assert (
        bool(jnp.all(jnp.where(alive, above | below, True)))
        and bool(jnp.any(alive))
        and bool(jnp.any(path.recoupled))
    )


def test_ising_at_equilibrium():
    """E and dE/dT at T = 4 on 12×12 against Kaufman."""
    mean = diffmh.expectation(
        ising.energy,
        ising.sampler(),
        init=ising.cold(12),
        num_samples=100,
        burn_in=60,
        num_chains=2_000,
    )
    key, exact = jax.random.key(43), ising.exact(12, 4.0)
    both = optimised(lambda t: jax.jvp(lambda t: mean.per_chain(t, key), (t,), (1.0,)))
    value, slope = both(4.0)
    assert_unbiased(np.stack([value, slope], axis=1), np.array([exact.energy, exact.heat_capacity]))
