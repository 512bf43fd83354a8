"""The lattice by colours."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffmh.models import ising


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


def test_moments_from_the_ground_state():
    """The heat capacity does not depend on the origin of the energy; at low temperature float32
    keeps it only from below.
    """
    x = ising.spins(jax.random.rademacher(jax.random.key(47), (6, 6), jnp.int8))
    first, second = ising.excitation_moments(3.0, x)
    assert first == ising.energy(3.0, x) + 72 and second == first**2
    assert jax.tree.leaves(ising.excitation_moments(3.0, ising.cold(6))) == [0.0, 0.0]


@pytest.mark.parametrize("shape", [(3, 3), (4, 6), (2, 2), (4,)])
def test_lattices_that_have_no_checkerboard_are_refused(shape):
    with pytest.raises(ValueError, match="even size at least 4"):
        ising.spins(jnp.ones(shape, jnp.int8))
