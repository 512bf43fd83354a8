"""Chains in groups: the same numbers as without."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import diffmh
from diffmh import loop

KEY = jax.random.key(5)


def mean_of(density, start, num_chains=16, proposal=None, **options):
    kernel = diffmh.MetropolisHastings(density, proposal or diffmh.GaussianWalk(2.0))
    options = {"num_samples": 30, "num_chains": num_chains} | options
    return diffmh.expectation(lambda theta, x: jnp.sum(x), kernel, init=start, **options)


def normal(theta, x):
    return -0.5 * jnp.sum((x - theta) ** 2)


def chains_of(mean, theta):
    value, slope = jax.jit(lambda t: jax.jvp(lambda t: mean.per_chain(t, KEY), (t,), (1.0,)))(theta)
    return np.asarray(value), np.asarray(slope)


@pytest.fixture
def without_groups(monkeypatch):
    return lambda: monkeypatch.setattr(loop, "_MOST_GROUP_BYTES", 0)


@pytest.mark.optimised
def test_groups_of_chains_take_the_same_paths(without_groups):
    chains = lambda: chains_of(mean_of(normal, 0.0, num_chains=640), 0.4)
    value, slope = chains()
    without_groups()
    plain_value, plain_slope = chains()
    np.testing.assert_array_equal(value, plain_value)
    np.testing.assert_allclose(slope, plain_slope, rtol=1e-4, atol=1e-5)


@pytest.mark.optimised
def test_a_report_and_draws_by_groups(without_groups):
    key = jax.random.key(7)
    start = lambda key: jax.random.normal(key)
    kernel = diffmh.MetropolisHastings(normal, diffmh.GaussianWalk(2.0))

    def both():
        report = mean_of(normal, start, num_chains=1024, num_samples=200, burn_in=3).run(0.4, key)
        draws = diffmh.sample(kernel, 0.4, key, init=start, num_samples=4, num_chains=1024)
        return report, draws.posterior

    (report, draws), _ = both(), without_groups()
    plain_report, plain_draws = both()
    for name in ("value", "value_error", "gradient", "gradient_error", "effective_samples"):
        found, expected = getattr(report, name), getattr(plain_report, name)
        np.testing.assert_allclose(found, expected, rtol=1e-4, err_msg=name)
    assert report.acceptance_rate == pytest.approx(plain_report.acceptance_rate)
    for name in plain_draws:
        np.testing.assert_array_equal(draws[name], plain_draws[name])


@pytest.mark.parametrize(
    ("num_chains", "start", "groups"),
    [(16, 0.0, 1), (256, 0.0, 1), (4096, 0.0, 8), (640, 0.0, 2), (257, 0.0, 1),
     (1024, jnp.zeros(4), 4), (1024, jnp.zeros(20), 16), (1024, jnp.zeros(65), 1)],
)  # fmt: skip
def test_how_many_groups(num_chains, start, groups):
    mean = mean_of(normal, start, num_chains=num_chains)
    assert loop.Loop(mean.simulation, 0.5, KEY, (), True).num_groups == groups
