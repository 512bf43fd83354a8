"""The paper's models: their samplers against enumeration, their exact answers against
independent ones.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import derivative, ising_configurations, ising_energy
from statistics_ import assert_unbiased

import diffmh
from diffmh.models import gaussian, ising, mixture


@pytest.mark.parametrize(
    ("temperature", "energy", "capacity", "slope"),
    [
        (2.0, -251.344942, 104.4713989, 271.8893425),
        (2.269, -211.1344576, 194.7835496, 223.4042691),
        (3.0, -118.1148194, 60.19281864, -80.36194592),
        (6.0, -50.30882421, 9.186056774, -3.485785628),
    ],
)
def test_kaufman_against_the_table(temperature, energy, capacity, slope):
    """ESTIMATOR §10, L = 12."""
    np.testing.assert_allclose(ising.exact(12, temperature), [energy, capacity, slope], rtol=1e-8)


@pytest.mark.parametrize("temperature", [0.7, 2.3, 5.0])
def test_kaufman_against_enumeration(temperature):
    energies = ising_energy(ising_configurations(4)).astype(float)

    def averages(theta):
        weights = np.exp(-(energies + 32) / theta[0])
        mean, square = (np.sum(weights * f) / np.sum(weights) for f in (energies, energies**2))
        return np.array([mean, (square - mean**2) / theta[0] ** 2])

    value, slope = derivative(averages, temperature)
    np.testing.assert_allclose(
        ising.exact(4, temperature), [value[0], value[1], slope[1, 0]], rtol=1e-9
    )
    np.testing.assert_allclose(slope[0, 0], value[1], rtol=1e-9)


@pytest.mark.parametrize(
    ("size", "theta"), [(2, (1.5, 0.7, 0.3)), (3, (3.0, 1.2, -0.4)), (4, (2.5, 1.0, 0.0))]
)
def test_enumeration(size, theta):
    """Against complex-step derivatives of log Z; without field and at L = 4 against Kaufman."""
    spins = ising_configurations(size)
    bonds, field = -ising_energy(spins).astype(float), spins.sum(axis=(1, 2)).astype(float)

    def averages(t):
        energies = -theta[1] * bonds - theta[2] * field
        weights = np.exp(-(energies - energies.min()) / t[0])
        mean, square = (np.sum(weights * f) / np.sum(weights) for f in (energies, energies**2))
        return np.array([mean, (square - mean**2) / t[0] ** 2])

    value, slope = derivative(averages, theta[0])
    found = ising.enumerated(size, ising.Parameter(*theta))
    np.testing.assert_allclose(found, [value[0], value[1], slope[1, 0]], rtol=1e-9)
    if size == 4:
        np.testing.assert_allclose(found, ising.exact(4, theta[0]), rtol=1e-9)


@pytest.mark.parametrize("size", [1, 5])
def test_enumeration_of_large_lattices_is_refused(size):
    with pytest.raises(ValueError, match="sizes from 2 to 4"):
        ising.enumerated(size, 2.0)


def test_peak_of_the_heat_capacity():
    """ESTIMATOR §10: T = 2.332705 with C = 202.163 at L = 12; it scales with the interaction."""
    peak = ising.peak(12)
    assert abs(peak - 2.332705) < 1e-6 and abs(ising.exact(12, peak).heat_capacity - 202.163) < 1e-3
    assert abs(ising.peak(12, 0.5) - peak / 2) < 1e-8


@pytest.mark.parametrize("temperature", [0.1, 2.2, 2.269185314213022, 2.3, 50.0])
def test_kaufman_is_stable_at_256(temperature):
    """Per site within finite-size effects of a lattice half as large, away from the critical
    point; finite everywhere.
    """
    large, half = ising.exact(256, temperature), ising.exact(128, temperature)
    assert np.all(np.isfinite(large))
    np.testing.assert_allclose(large.energy / 256**2, half.energy / 128**2, rtol=3e-3)


def test_spins_by_colour():
    lattice = np.asarray(jax.random.rademacher(jax.random.key(0), (6, 6), jnp.int8))
    x = ising.spins(lattice)
    np.testing.assert_array_equal(x.lattice(), lattice)
    neighbours = sum(np.roll(lattice, shift, axis) for shift in (1, -1) for axis in (0, 1))
    zeros = jnp.zeros_like(x.black)
    back = [ising.Spins(ising.neighbours(x, 0), zeros), ising.Spins(zeros, ising.neighbours(x, 1))]
    np.testing.assert_array_equal(sum(part.lattice() for part in back), neighbours)
    assert ising.bonds(x) == np.sum(lattice * (np.roll(lattice, 1, 0) + np.roll(lattice, 1, 1)))
    assert ising.magnetisation(x) == lattice.sum()


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


@pytest.mark.parametrize(("flip", "alternatives"), [(False, 1), (False, 4), (True, 1)])
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
    found = jnp.stack(list(jax.jacfwd(expectation.per_chain)(theta, jax.random.key(41))), axis=-1)
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
    found = jnp.stack(list(jax.jacfwd(expectation.per_chain)(theta, jax.random.key(46))), axis=-1)
    assert_unbiased(found, derivative(sequential_oracle(3, 3, flip), np.array(theta))[1])


def test_moments_from_the_ground_state():
    """The heat capacity does not depend on the origin of the energy; at low temperature float32
    keeps it only from below.
    """
    x = ising.spins(jax.random.rademacher(jax.random.key(47), (6, 6), jnp.int8))
    first, second = ising.excitation_moments(3.0, x)
    assert first == ising.energy(3.0, x) + 72 and second == first**2
    assert jax.tree.leaves(ising.excitation_moments(3.0, ising.cold(6))) == [0.0, 0.0]


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
    value, slope = jax.jvp(lambda t: mean.per_chain(t, key), (4.0,), (1.0,))
    assert_unbiased(np.stack([value, slope], axis=1), np.array([exact.energy, exact.heat_capacity]))


def test_mixture_and_gaussian():
    p = diffmh.expectation(
        mixture.indicator, mixture.sampler(), init=0, num_samples=200, burn_in=50, num_chains=4_000
    )
    value, slope = jax.jvp(lambda h: p.per_chain(h, jax.random.key(44)), (0.4,), (1.0,))
    exact_value, exact_slope = jax.jvp(mixture.posterior, (0.4,), (1.0,))
    assert_unbiased(np.stack([value, slope], 1), np.stack([exact_value, exact_slope]))
    np.testing.assert_allclose(
        jax.value_and_grad(lambda h: mixture.entropy(mixture.posterior(h)))(0.4),
        [1.071713, 0.018368],
        atol=1e-5,
    )
    x = diffmh.expectation(
        lambda theta, x: x,
        gaussian.sampler(),
        init=0.0,
        num_samples=100,
        burn_in=60,
        num_chains=4_000,
    )
    value, slope = jax.jvp(lambda t: x.per_chain(t, jax.random.key(45)), (0.5,), (1.0,))
    assert_unbiased(np.stack([value, slope], 1), np.array([gaussian.mean(0.5), 1.0]))


@pytest.mark.parametrize("shape", [(3, 3), (4, 6), (2, 2), (4,)])
def test_lattices_that_have_no_checkerboard_are_refused(shape):
    with pytest.raises(ValueError, match="even size at least 4"):
        ising.spins(jnp.ones(shape, jnp.int8))
