"""The report of a run: the same run, its errors, and its warnings."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_runs import (
    BOUNDED,
    KEY,
    OCCUPANCY,
    TREE,
    TREE_THETA,
    WALK,
    close_trees,
    identity,
    log_normal,
)

import diffmh

ENTROPY = diffmh.compose(lambda h, m: -jnp.sum(m["p"] * jnp.log(m["p"])), OCCUPANCY)
RATIO = diffmh.compose(
    lambda theta, a, b: {"ratio": a[0] / (1 + jnp.sum(b[1][0]))},
    TREE,
    diffmh.expectation(
        TREE.simulation.f, TREE.simulation.kernel, init=jnp.ones(2), num_samples=200, num_chains=8
    ),
)


@pytest.mark.optimised
@pytest.mark.parametrize(
    "function, theta",
    [(OCCUPANCY, 0.4), (ENTROPY, 0.4), (TREE, TREE_THETA), (RATIO, TREE_THETA)],
    ids=["mixture", "entropy", "tree", "composed tree"],
)
def test_report_is_of_the_same_run(function, theta):
    report = function.run(theta, KEY)
    close_trees(report.value, function(theta, KEY))
    close_trees(report.gradient, jax.jacobian(function)(theta, KEY))
    assert any(np.any(np.asarray(leaf) != 0) for leaf in jax.tree.leaves(report.gradient))

    # The standard error over the chains, of the value and of the derivative along each parameter.
    error = lambda chains: np.std(chains, axis=0, ddof=1) / np.sqrt(8)
    close_trees(report.value_error, jax.tree.map(error, function.per_chain(theta, KEY)))
    per_chain = jax.jacfwd(lambda theta: function.per_chain(theta, KEY))(theta)
    close_trees(report.gradient_error, jax.tree.map(error, per_chain), rtol=1e-4)
    for field in (report.value_error, report.gradient_error):
        assert all(np.all(np.asarray(leaf) > 0) for leaf in jax.tree.leaves(field))

    assert jax.tree.structure(report.effective_samples) == jax.tree.structure(report.value)
    numbers = (
        report.acceptance_rate,
        report.recoupling_time,
        report.alive_fraction,
        report.max_weight,
        report.effective_samples,
    )
    assert all(
        np.all(np.isfinite(leaf)) and np.all(np.asarray(leaf) > 0)
        for leaf in jax.tree.leaves(numbers)
    )
    assert 0 < report.acceptance_rate < 1 and 0 < report.alive_fraction <= 1
    assert report.nan_proposals == 0
    assert "±" in str(report) and all(warning in str(report) for warning in report.warnings)


def test_report_counts_what_the_trace_shows():
    """The trace is the first of the chains."""
    expectation = diffmh.expectation(
        identity,
        WALK,
        init=0.0,
        num_samples=300,
        num_chains=2,
        estimator=diffmh.StochasticDerivative(alternatives=1),
    )
    trace = diffmh.trace(WALK, 0.5, KEY, init=0.0, num_steps=300)
    counts = expectation.run_chains(0.5, KEY).outcomes[0].watch.per_chain
    assert counts.decisions[0] == 300 and counts.accepted[0] == trace.accepted.sum()
    assert counts.alive[0] == trace.alive.sum() and counts.recoupled[0] == trace.recoupled.sum()
    np.testing.assert_allclose(counts.max_weight[0], jnp.abs(trace.weight).max(), rtol=1e-6)

    report = expectation.run(0.5, KEY)
    np.testing.assert_allclose(report.acceptance_rate, counts.accepted.sum() / 600, rtol=1e-6)
    np.testing.assert_allclose(report.alive_fraction, counts.alive.sum() / 600, rtol=1e-6)
    np.testing.assert_allclose(
        report.recoupling_time, counts.alive.sum() / counts.recoupled.sum(), rtol=1e-6
    )
    np.testing.assert_allclose(report.max_weight, counts.max_weight.max(), rtol=1e-6)


def autocorrelation_time(path):
    """`1 + 2 Σ ρ_k`, summed up to the first lag beyond five times itself (Sokal 1997)."""
    centred = path - path.mean()
    spectrum = np.fft.rfft(centred, 2 * len(path))
    covariance = np.fft.irfft(np.abs(spectrum) ** 2)[: len(path)]
    times = 2 * np.cumsum(covariance / covariance[0]) - 1
    return times[np.argmax(np.arange(len(path)) >= 5 * times)], covariance[1] / covariance[0]


def test_effective_samples():
    path = np.asarray(diffmh.trace(WALK, 0.5, KEY, init=0.5, num_steps=100_000).primal, float)
    time, first = autocorrelation_time(path)
    np.testing.assert_allclose(first, 0.627984, atol=0.02)
    report = diffmh.expectation(identity, WALK, init=0.5, num_samples=5_000, num_chains=16).run(
        0.5, KEY
    )
    np.testing.assert_allclose(report.effective_samples, 16 * 5_000 / time, rtol=0.25)


def test_effective_samples_of_a_chain_that_hardly_moves():
    """Steps of 0.01 decorrelate after some 26,000: 16 chains of 5,000 are worth hardly more than
    their starts.
    """
    slow = diffmh.MetropolisHastings(log_normal, diffmh.GaussianWalk(0.01))
    draw = lambda key: 0.5 + jax.random.normal(key)
    report = diffmh.expectation(identity, slow, init=draw, num_samples=5_000, num_chains=16).run(
        0.5, KEY
    )
    assert report.effective_samples < 100


def test_nan_is_counted_reported_and_never_accepted():
    path = diffmh.trace(BOUNDED(jnp.nan), 0.5, KEY, init=0.0, num_steps=2_000).primal
    assert np.all(path <= 1) and path.max() > 0.9
    expectation = lambda outside: diffmh.expectation(
        identity, BOUNDED(outside), init=0.0, num_samples=500, num_chains=4
    )
    report, clean = expectation(jnp.nan).run(0.5, KEY), expectation(-jnp.inf).run(0.5, KEY)
    assert 100 < report.nan_proposals < 2_000 and clean.nan_proposals == 0
    assert f"{report.nan_proposals:,}" in str(report) and "-inf" in str(report)
    assert any("NaN" in warning for warning in report.warnings) and clean.warnings == ()
    np.testing.assert_array_equal(report.value, clean.value)
    np.testing.assert_allclose(report.gradient, clean.gradient, rtol=1e-5)
    assert np.isfinite(clean.gradient)


def test_a_value_that_is_not_a_number_is_explained():
    partly = lambda theta, x: jnp.where(x > 1, jnp.nan, x)
    normal = diffmh.models.gaussian.sampler()
    mean = diffmh.expectation(partly, normal, init=0.0, num_samples=50, num_chains=4)
    report = mean.run(0.5, jax.random.key(0))
    assert any("value is not finite in 4 of 4 chains: `f`" in w for w in report.warnings)


def test_nan_at_the_start_stays_nan_under_jit():
    """There it cannot be refused: the values are not known."""
    started_outside = diffmh.expectation(
        identity, BOUNDED(jnp.nan), init=2.0, num_samples=20, num_chains=4
    )
    value, gradient = jax.jit(jax.value_and_grad(started_outside))(0.5, KEY)
    assert np.isnan(value) and np.isnan(gradient)
    assert np.isnan(jax.jit(started_outside)(0.5, KEY))


def warnings_of(proposal, coupling=None, **options):
    kernel = diffmh.MetropolisHastings(log_normal, proposal, coupling)
    return (
        diffmh.expectation(identity, kernel, init=0.0, num_samples=1_000, num_chains=4, **options)
        .run(0.5, KEY)
        .warnings
    )


def test_warnings():
    assert warnings_of(diffmh.GaussianWalk(2.38)) == () and OCCUPANCY.run(0.4, KEY).warnings == ()
    assert any(
        "stuck" in warning and "smaller steps" in warning
        for warning in warnings_of(diffmh.GaussianWalk(1e4))
    )
    apart = warnings_of(diffmh.GaussianWalk(2.38), diffmh.CommonRandomNumbers())
    assert any(
        "hardly ever recouple" in warning and "MaximalReflection" in warning for warning in apart
    )


def test_warning_of_few_effective_samples():
    assert any(
        "fewer than 5 effective" in warning for warning in warnings_of(diffmh.GaussianWalk(1e-3))
    )


def test_report_of_an_estimator_without_alternatives():
    report = diffmh.expectation(
        identity, WALK, init=0.0, num_samples=200, num_chains=4, estimator=diffmh.Covariance()
    ).run(0.5, KEY)
    assert (
        np.isnan(report.recoupling_time)
        and np.isnan(report.alive_fraction)
        and np.isnan(report.max_weight)
    )
    assert (
        np.isfinite(report.gradient) and report.warnings == () and "alternative" not in str(report)
    )


def test_report_of_different_estimators_composed():
    """One has a use for what the other has none for; in either order."""
    expectation = lambda estimator: diffmh.expectation(
        identity, WALK, init=0.0, num_samples=50, num_chains=4, estimator=estimator
    )
    pair = [expectation(diffmh.StochasticDerivative()), expectation(diffmh.Covariance())]
    for expectations in (pair, pair[::-1]):
        assert np.isfinite(
            diffmh.compose(lambda theta, a, b: a * b, *expectations).run(0.5, KEY).alive_fraction
        )
