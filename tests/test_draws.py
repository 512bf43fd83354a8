"""from_draws: the covariance identity on draws that others made."""

from __future__ import annotations

import collections

import eight_schools
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import diffmh

# x ~ N(θ, 2), y = 1.3 ~ N(x, 1): the posterior is N(m, v) with m linear in θ.
PRIOR, Y, THETA = 2.0, 1.3, 0.4
VARIANCE = 1 / (1 / PRIOR + 1)
MEAN, SLOPE = VARIANCE * (THETA / PRIOR + Y), VARIANCE / PRIOR


def log_density(theta, x):
    return -0.5 * (x - theta) ** 2 / PRIOR - 0.5 * (x - Y) ** 2


def both(theta, x):
    """Means m and m² + v + θ m, the latter with a derivative of its own."""
    return {"x": x, "square": x**2 + theta * x}


EXACT = {"x": SLOPE, "square": 2 * MEAN * SLOPE + MEAN + THETA * SLOPE}


def autoregressive(seeds: int, rho: float, chains=4, draws=1_000):
    """Draws of the posterior with autocorrelation time (1 + ρ)/(1 − ρ)."""
    keys = jax.random.split(jax.random.key(0), 2)
    first = jax.random.normal(keys[0], (seeds, chains))
    noise = jax.random.normal(keys[1], (draws, seeds, chains))
    step = lambda x, e: (rho * x + jnp.sqrt(1 - rho**2) * e,) * 2
    _, path = jax.lax.scan(step, first, noise)
    return MEAN + jnp.sqrt(VARIANCE) * jnp.moveaxis(path, 0, -1)


@pytest.mark.parametrize("rho", [0.0, 0.8])
def test_exact_derivatives_and_errors_that_know_of_autocorrelation(rho):
    """z-scores of 60 runs: their mean is 0 and their spread 1, within 5 standard errors. An error
    that took the draws for independent would be 3 times too small at ρ = 0.8.
    """
    reports = [
        diffmh.from_draws(both, log_density, draws).run(THETA) for draws in autoregressive(60, rho)
    ]
    for name, exact in EXACT.items():
        z = np.array([(r.gradient[name] - exact) / r.gradient_error[name] for r in reports])
        assert abs(z.mean()) < 5 * 1.2 / 60**0.5 and 0.7 < z.std() < 1.5
    z = np.array([(r.value["x"] - MEAN) / r.value_error["x"] for r in reports])
    assert abs(z.mean()) < 5 * 1.2 / 60**0.5 and 0.7 < z.std() < 1.5
    times = 1_000 * 4 * (1 - rho) / (1 + rho)
    effective = np.mean([r.effective_samples["x"] for r in reports])
    assert 0.7 < effective / times < 1.5


def test_without_the_batches_the_errors_would_be_too_small(monkeypatch):
    monkeypatch.setattr("diffmh.tools.draw_averages.autocorrelation_time", lambda series: 0.1)
    monkeypatch.setattr("diffmh.tools.draw_averages._MOST_BATCHES", 2_000)
    reports = [
        diffmh.from_draws(both, log_density, draws).run(THETA) for draws in autoregressive(30, 0.8)
    ]
    z = np.array([(r.value["x"] - MEAN) / r.value_error["x"] for r in reports])
    assert z.std() > 1.5


def test_one_form_is_as_good_as_another():
    """A bare array, a dict, ArviZ's tree and a state that is made of them; one chain too."""
    draws = autoregressive(1, 0.5)[0]
    bare = diffmh.from_draws(both, log_density, draws).run(THETA)
    named = lambda given, **how: diffmh.from_draws(both, log_density, given, **how).run(THETA)
    import arviz_base

    tree = arviz_base.from_dict({"posterior": {"level": np.asarray(draws)}})
    of_dict = lambda x: x["level"]
    dataset = tree.posterior.to_dataset()
    # ArviZ before 1.0: a mapping of groups, which are attributes as well.
    old = collections.UserDict(posterior=dataset)
    old.posterior = dataset  # pyright: ignore[reportAttributeAccessIssue]
    for given in (tree, dataset, old, {"level": draws}):
        report = named(given, state=of_dict)
        assert report.gradient == bare.gradient and report.gradient_error == bare.gradient_error
    joined = named(draws.reshape(1, -1))
    np.testing.assert_allclose(joined.gradient["x"], bare.gradient["x"], rtol=1e-2)


def test_our_own_draws_give_what_the_covariance_gives():
    walk = diffmh.MetropolisHastings(log_density, diffmh.GaussianWalk(2.0))
    length = {"init": 1.0, "num_samples": 2_000, "burn_in": 50, "num_chains": 8}
    key = jax.random.key(1)
    tree = diffmh.sample(walk, THETA, key, **length)
    report = diffmh.from_draws(both, log_density, tree, state=lambda x: x["x"]).run(THETA)
    own = diffmh.expectation(both, walk, **length, estimator=diffmh.Covariance())
    own = own.run_chains(THETA, key)
    # Chain by chain the same draws, however the sums are rounded.
    value, slope = own.unflatten(own.value), own.jacobian.mean(axis=-1)
    np.testing.assert_allclose(tree.posterior.x.mean("draw"), value["x"], rtol=1e-4)
    # Only the correction for the means' own covariance differs.
    ours = [float(report.gradient[name]) for name in sorted(EXACT)]
    np.testing.assert_allclose(ours, slope[0], rtol=1e-2)


@pytest.mark.thorough
def test_numpyros_nuts_on_eight_schools_against_our_own_chains():
    import numpyro

    nuts = numpyro.infer.NUTS(eight_schools.model, target_accept_prob=0.9)
    mcmc = numpyro.infer.MCMC(
        nuts, num_warmup=500, num_samples=1_000, num_chains=4, chain_method="vectorized",
        progress_bar=False,
    )  # fmt: skip
    mcmc.run(jax.random.key(0))
    f = lambda theta, x: (x["mu"], x["tau"])
    theirs = diffmh.from_draws(f, eight_schools.log_prior, mcmc.get_samples(group_by_chain=True))
    theirs = theirs.run(eight_schools.THETA)

    scale = {"mu": 3.0, "log_tau": 0.8, "eta": jnp.full(8, 0.45)}
    walk = diffmh.MetropolisHastings(eight_schools.log_density, diffmh.GaussianWalk(scale))
    mean = diffmh.expectation(
        lambda theta, x: (x["mu"], jnp.exp(x["log_tau"])), walk, init=eight_schools.START,
        num_samples=20_000, burn_in=2_000, num_chains=32, estimator=diffmh.Covariance(),
    )  # fmt: skip
    ours = mean.run(eight_schools.THETA, jax.random.key(1))
    pairs = [
        ((theirs.value, theirs.value_error), (ours.value, ours.value_error)),
        ((theirs.gradient, theirs.gradient_error), (ours.gradient, ours.gradient_error)),
    ]
    for one, other in pairs:
        (a, da), (b, db) = (tuple(map(flat, pair)) for pair in (one, other))
        z = (a - b) / np.hypot(da, db)
        assert np.all(np.abs(z) < 4) and np.all(da < np.abs(a).max())


def flat(tree):
    return np.array([float(leaf) for leaf in jax.tree.leaves(tree)])


def test_chains_that_disagree_are_seen():
    draws = autoregressive(1, 0.0)[0] + jnp.arange(4.0)[:, None]
    report = diffmh.from_draws(both, log_density, draws).run(THETA)
    assert any("disagree" in warning for warning in report.warnings)
    assert report.value_error["x"] > 0.3, "the chains are the batches then"
    healthy = diffmh.from_draws(both, log_density, autoregressive(1, 0.5)[0]).run(THETA)
    assert healthy.warnings == () and "autocorrelation time" in str(healthy)


@pytest.mark.parametrize(
    ("draws", "error", "message"),
    [
        ({"a": jnp.zeros((4, 100)), "b": jnp.zeros((4, 99))}, ValueError, "chain, draw"),
        (jnp.zeros(100), ValueError, "group_by_chain"),
        (jnp.full((4, 100), jnp.nan), ValueError, "not finite"),
        (jnp.zeros((2, 5)), ValueError, "at least 16 draws"),
        ({}, TypeError, "no arrays"),
        ("draws.nc", FileNotFoundError, "nothing at 'draws.nc'"),
    ],
)
def test_refusals(draws, error, message):
    with pytest.raises(error, match=message):
        diffmh.from_draws(both, log_density, draws)


def test_a_density_that_is_no_scalar_is_refused():
    made = diffmh.from_draws(both, lambda t, x: jnp.stack([x, x]), autoregressive(1, 0.0)[0])
    with pytest.raises(TypeError, match="must return a scalar"):
        made.run(THETA)
