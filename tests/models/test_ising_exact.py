"""Exact answers for Ising models against independent ones."""

import numpy as np
import pytest
from oracles import derivative, ising_configurations, ising_energy

from diffmh.models import ising


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
    with pytest.raises(ValueError, match="from 2 to 4"):
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


@pytest.mark.parametrize("temperature", [49.0, 51.0, 1e3, 1e6])
def test_hot_lattices_by_enumeration(temperature):
    """On both sides of where one formula gives way to the other. Enumeration has E with an absolute
    error of 10⁻¹⁶.
    """
    for size in (2, 3):
        found, wanted = ising.exact(size, temperature), ising.enumerated(size, temperature)
        np.testing.assert_allclose(
            found, wanted, rtol=2e-12, atol=0 if temperature < 1e4 else 1e-15
        )


def test_very_hot_lattices_have_free_bonds():
    """`log Z = N log 2 + N K² + O(K⁴)`: at L = 4 no loop is shorter than four."""
    for temperature in (1e6, 1e8, 1e12):
        found, bonds = ising.exact(4, temperature, 0.5), 2 * 4**2 * 0.25
        wanted = (-bonds / temperature, bonds / temperature**2, -2 * bonds / temperature**3)
        np.testing.assert_allclose(found, wanted, rtol=2e-11)


@pytest.mark.parametrize("interaction", [np.float32(1), np.float16(2), 1e-320, 1e300])
def test_the_peak_scales_with_the_interaction(interaction):
    np.testing.assert_allclose(ising.peak(4, interaction) / float(interaction), 2.43895, rtol=1e-3)
