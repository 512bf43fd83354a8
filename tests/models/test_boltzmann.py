"""Boltzmann machines: their exact answers against brute force, their samplers against those."""

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import derivative
from unbiasedness import assert_unbiased

import diffmh
from diffmh.models import boltzmann


def brute_force(configurations, log_density, moments):
    """Averages of the moments by the density itself, one configuration at a time."""
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *configurations)
    log_weights = np.asarray(jax.vmap(log_density)(stacked), float)
    p = np.exp(log_weights - log_weights.max())
    average = lambda leaf: np.tensordot(p / p.sum(), np.asarray(leaf, float), axes=1)
    log_sum = np.log(p.sum()) + log_weights.max()
    return jax.tree.map(average, jax.vmap(moments)(stacked)), log_sum


def assert_close(found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=3e-6)


def test_full_exact():
    theta = boltzmann.Full.random(jax.random.key(0), 5)
    spins = [jnp.array(s) for s in itertools.product([-1, 1], repeat=5)]
    moments, log_sum = brute_force(spins, theta.log_density, theta.moments)
    assert_close(theta.exact_moments(), moments)
    np.testing.assert_allclose(theta.log_partition(), log_sum, rtol=1e-6)


@pytest.mark.parametrize(("visible", "hidden"), [(4, 2), (2, 4)])
def test_restricted_exact(visible, hidden):
    theta = boltzmann.Restricted.random(jax.random.key(1), visible, hidden, 1.0)
    theta = eqx.tree_at(lambda t: t.visible, theta, jnp.linspace(-1.0, 0.5, visible))
    units = [
        type(theta.start())(jnp.array(bits[:visible]) * 1.0, jnp.array(bits[visible:]) * 1.0)
        for bits in itertools.product([0, 1], repeat=visible + hidden)
    ]
    moments, log_sum = brute_force(units, theta.log_density, theta.moments)
    assert_close(theta.exact_moments(), moments)
    np.testing.assert_allclose(theta.log_partition(), log_sum, rtol=1e-6)
    every = np.array(list(itertools.product([0, 1], repeat=visible)))
    np.testing.assert_allclose(np.exp(theta.log_likelihood(every)).sum(), 1.0, rtol=1e-6)
    one = -theta.free_energy(jnp.ones(visible)) - log_sum
    np.testing.assert_allclose(theta.log_likelihood(np.ones(visible)), one, rtol=1e-5)


def test_too_many_units():
    with pytest.raises(ValueError, match="at most 20 units, got 21"):
        boltzmann.Full.zeros(21).log_partition()


def test_full_sampler():
    """E[s] and E[s_i s_j] after a burn-in, and their derivative by one field: the susceptibility
    `E[s_0 s_j] − E[s_0] E[s_j]`.
    """
    theta = boltzmann.Full.random(jax.random.key(2), 4, 0.5)
    exact = theta.exact_moments()
    expectation = diffmh.expectation(
        boltzmann.Full.moments,
        theta.sampler(),
        init=theta.start(),
        num_samples=5,
        burn_in=20,
        num_chains=8_000,
    )

    def of_field(field, key):
        return expectation.per_chain(eqx.tree_at(lambda t: t.fields, theta, field), key)

    key = jax.random.key(3)
    values, slopes = of_field(theta.fields, key), jax.jacfwd(of_field)(theta.fields, key)
    assert_unbiased(values.fields, np.asarray(exact.fields))
    assert_unbiased(values.couplings, np.asarray(exact.couplings))
    means, pairs = np.asarray(exact.fields, float), np.ones((4, 4))
    pairs[np.triu_indices(4, 1)] = pairs.T[np.triu_indices(4, 1)] = exact.couplings
    assert_unbiased(slopes.fields, pairs - np.outer(means, means))


def test_a_machine_of_many_parameters_has_a_gradient():
    """78 parameters: births would be followed, but each site's odds are its own."""
    theta = boltzmann.Full.random(jax.random.key(4), 12)
    means = diffmh.expectation(
        lambda theta, s: jnp.mean(1.0 * s),
        theta.sampler(),
        init=theta.start(),
        num_samples=3,
        num_chains=4,
    )
    slopes = jax.grad(means)(theta, jax.random.key(5))
    assert np.all(np.isfinite(slopes.fields)) and np.any(slopes.couplings != 0)


def test_restricted_sampler():
    """Derivatives of E[v] by all parameters at once, against complex steps of the exact sum."""
    theta = boltzmann.Restricted.random(jax.random.key(4), 3, 2, 1.0)
    flat, unravel = jax.flatten_util.ravel_pytree(theta)
    units = np.array(list(itertools.product([0, 1], repeat=5)))
    v, h = units[:, :3], units[:, 3:]
    features = np.concatenate([v, h, np.einsum("si,sj->sij", v, h).reshape(-1, 6)], axis=1)

    def exact(parameters):
        weights = np.exp(features @ parameters)
        return (weights @ v) / weights.sum()

    expectation = diffmh.expectation(
        lambda theta, x: x.visible,
        theta.sampler(),
        init=theta.noise,
        num_samples=5,
        burn_in=20,
        num_chains=8_000,
        estimator=diffmh.StochasticDerivative(alternatives=2),
    )
    slope = jax.jacfwd(lambda flat: expectation.per_chain(unravel(flat), jax.random.key(5)))(flat)
    assert_unbiased(slope, derivative(exact, np.asarray(flat, float))[1])
