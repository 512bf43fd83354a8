"""Chains in groups: the same numbers as without, and the exact ones, by every estimator."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import OTHER, derivative, finite_chain_mean, transition_matrix
from unbiasedness import LEAST_RUNS, assert_unbiased

import diffmh
from diffmh.core import plan
from diffmh.core.plan import Plan
from diffmh.reports.report import report
from diffmh.runs.devices import over_groups

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
    return lambda: monkeypatch.setattr(plan, "_MOST_GROUP_BYTES", 0)


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
    assert Plan.of(mean.simulation, jnp.asarray(0.5), KEY, ()).num_groups == groups


def problem(num_parameters):
    """Features of three states, and θ; float32, so that the oracle has the very same chain."""
    rng = np.random.default_rng(num_parameters)
    table = rng.normal(size=(3, num_parameters)) / np.sqrt(num_parameters)
    return table.astype(np.float32), rng.normal(size=num_parameters).astype(np.float32)


def equilibrium(log_density):
    weight = np.exp(log_density)
    return weight / weight.sum()


def finite_mean(num_parameters, estimator, num_chains, num_samples):
    """Occupancies of three states, from the equilibrium."""
    table, theta = problem(num_parameters)
    start = jnp.asarray(equilibrium(table @ theta))
    kernel = diffmh.MetropolisHastings(
        lambda theta, j: (jnp.asarray(table) @ theta)[j], diffmh.OtherState(3)
    )
    return diffmh.expectation(
        lambda theta, j: jax.nn.one_hot(j, 3),
        kernel,
        init=lambda key: jax.random.choice(key, 3, p=start),
        num_samples=num_samples,
        num_chains=num_chains,
        estimator=estimator,
    )


def exact_slope(num_parameters, estimator, num_samples):
    """(P, F), of the equilibrium or of the finite chain, whose start does not move with θ."""
    table, theta = (array.astype(float) for array in problem(num_parameters))
    start = equilibrium(table @ theta).astype(complex)

    def occupancy(theta):
        if isinstance(estimator, diffmh.Covariance):
            return equilibrium(table @ theta)
        matrix = transition_matrix(table @ theta, OTHER)
        return finite_chain_mean(matrix, start, np.eye(3), num_samples, 0)

    return derivative(occupancy, theta)[1].T


@pytest.mark.parametrize(
    ("estimator", "num_parameters", "num_samples", "num_chains"),
    [
        pytest.param(diffmh.StochasticDerivative(), 17, 1, 2048, marks=pytest.mark.thorough),
        pytest.param(
            diffmh.StochasticDerivative(births=True), 1, 1, 600, marks=pytest.mark.thorough
        ),
        (diffmh.StochasticDerivative(), 80, 30, 2048),  # by births as well
        (diffmh.Score(baseline="other chains"), 80, 1, 600),
        pytest.param(diffmh.Score(), 1, 30, 2048, marks=pytest.mark.thorough),
        (diffmh.Covariance(), 17, 30, 2048),
    ],
    ids=str,
)
def test_reports_by_groups(estimator, num_parameters, num_samples, num_chains):
    """`.run` of chains in one group, and in two or four."""
    theta = jnp.asarray(problem(num_parameters)[1])
    few, many = (
        finite_mean(num_parameters, estimator, count, num_samples).run_chains(theta, KEY)
        for count in (16, num_chains)
    )
    np.testing.assert_array_equal(many.value[..., :16], few.value)
    averages, wanted = (
        jax.tree.leaves(chains.outcomes[0].observed.estimator) for chains in (many, few)
    )
    for leaf, own in zip(averages, wanted, strict=True):
        np.testing.assert_allclose(leaf[..., :16], own, rtol=1e-5, atol=1e-6)
    slopes = np.moveaxis(np.asarray(many.jacobian), -1, 0)
    if num_chains > LEAST_RUNS:
        assert_unbiased(slopes, exact_slope(num_parameters, estimator, num_samples))
    for made, chains in ((report(few), few), (report(many), many)):
        gradient = np.asarray(made.gradient).T
        np.testing.assert_allclose(gradient, chains.jacobian.mean(axis=-1), atol=1e-6)


def test_arrays_without_an_axis_of_chains_are_refused():
    """Where another axis happens to have as many entries as there are chains, too."""
    keys = jax.random.split(KEY, 4)
    each = lambda keys, carry: jax.vmap(jax.random.uniform, out_axes=-1)(keys) + carry
    carry = jnp.arange(8.0).reshape(2, 4)
    np.testing.assert_array_equal(
        over_groups(each, 2, keys, carry), jax.vmap(jax.random.uniform)(keys) + carry
    )
    for wrong in (jnp.zeros((4, 3)), jnp.zeros(())):
        with pytest.raises(ValueError, match="chains must be its last axis, got the shape"):
            over_groups(lambda keys, carry, wrong=wrong: wrong, 1, keys, None)
        with pytest.raises(ValueError, match="chains must be its last axis, got the shape"):
            over_groups(lambda keys, carry: keys, 2, keys, wrong)
