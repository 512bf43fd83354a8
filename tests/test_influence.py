"""influence: Cov(f, ℓ_n) against closed forms and against refitting."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import diffmh
from diffmh.tools.influence import _jackknife

# y_n ~ N(μ, 1), μ ~ N(0, 2²): the posterior is N(m, v), and Cov(μ, ℓ_n) = v (y_n − m).
Y = np.array([1.2, -2.3, 0.4, 3.1, -0.7, 2.2, -1.9, 0.3])
VARIANCE, MEAN = 0.121212, 0.278788
OF_FOURTH, JACKKNIFE = 0.341965, 0.365381


def model(y, scale):
    mean = numpyro.sample("mean", dist.Normal(0, scale))
    numpyro.sample("y", dist.Normal(mean, 1), obs=y)


def mean_and_square(theta, sites):
    return {"mean": sites["mean"], "square": sites["mean"] ** 2}


@pytest.fixture(scope="module")
def posterior():
    return diffmh.from_numpyro(model, jnp.asarray(Y, jnp.float32), theta={"scale": 2.0})


@pytest.fixture(scope="module")
def draws():
    exact = 1 / (8 + 0.25)
    noise = jax.random.normal(jax.random.key(0), (4, 2_000))
    return {"mean": exact * Y.sum() + exact**0.5 * noise}


@pytest.fixture(scope="module")
def table(posterior, draws):
    return diffmh.influence(posterior, mean_and_square, draws)


def test_closed_form(table):
    """The exact covariances of a normal mean, within 5 standard errors; for the square by Stein's
    lemma, `Cov(μ², ℓ_n) = 2 m v (y_n − m) − v²`.
    """
    exact = VARIANCE * (Y - MEAN)
    np.testing.assert_allclose(exact[3], OF_FOURTH, rtol=1e-5)
    for n in range(8):
        for row in table[f"y[{n}]"]:
            right = exact[n]
            if row.quantity == "square":
                right = 2 * MEAN * exact[n] - VARIANCE**2
            assert abs(row.influence - right) < 5 * row.error
            assert row.low < row.influence < row.high
            deviation = (row.high - row.low) / row.error
            assert 3.5 < deviation < 6, "95 % is four standard errors wide"


def test_variances_beside_each_other(table):
    of_mean, of_square = table.variances
    assert abs(of_mean.mean - MEAN) < 5 * (VARIANCE / 8_000) ** 0.5
    np.testing.assert_allclose(of_mean.posterior, VARIANCE, rtol=5 * (2 / 8_000) ** 0.5)
    assert abs(of_mean.jackknife - JACKKNIFE) < 5 * of_mean.jackknife_error
    assert of_mean.jackknife_error < 0.03 and of_square.quantity == "square"


def test_stein_makes_it_nearly_exact(posterior, draws):
    table = diffmh.influence(posterior, mean_and_square, draws, control="stein")
    (of_mean, _) = table["y[3]"]
    np.testing.assert_allclose(of_mean.influence, OF_FOURTH, rtol=2e-5)
    np.testing.assert_allclose(table.variances[0].jackknife, JACKKNIFE, rtol=1e-4)


def test_noise_is_not_squared_into_the_jackknife():
    """20 batches of pure noise about influences 0.1 n: the naive square is off by its variance."""
    rng = np.random.default_rng(0)
    exact = 0.1 * np.arange(8)
    naive, ours = [], []
    for _ in range(2_000):
        each = exact + rng.normal(size=(20, 8))
        mean = each.mean(axis=0)
        naive.append(np.sum((mean - mean.mean()) ** 2))
        ours.append(_jackknife(each)[0])
    right = np.sum((exact - exact.mean()) ** 2)
    error = np.std(ours) / 2_000**0.5
    assert abs(np.mean(ours) - right) < 5 * error
    assert np.mean(naive) - right > 20 * error, "the deliberate mistake is seen"
    stated = np.mean([_jackknife(exact + rng.normal(size=(20, 8)))[1]
                      for _ in range(400)])  # fmt: skip
    assert 0.7 < stated / np.std(ours) < 1.3


def test_refitting_with_another_weight():
    """A logistic regression with observation 0 weighted 1 ± h, by quadrature: the difference of
    the two answers over 2h is the influence.
    """
    design = np.array([-2.0, -1.0, -0.5, 0.3, 0.8, 1.5, 2.2])
    answers = np.array([1.0, 0, 0, 1, 0, 1, 1])
    grid = np.linspace(-12, 12, 4_001)

    def log_likelihoods(slope):
        odds = slope[:, None] * design
        return answers * odds - np.logaddexp(0.0, odds)

    def mean(weight):
        weights = np.array([weight, *[1.0] * 6])
        log_g = log_likelihoods(grid) @ weights - 0.5 * (grid / 1.5) ** 2
        density = np.exp(log_g - log_g.max())
        return np.sum(density * grid) / density.sum(), density / density.sum()

    def logistic(design, answers, scale):
        slope = numpyro.sample("slope", dist.Normal(0, scale))
        numpyro.sample("answer", dist.Bernoulli(logits=slope * design), obs=answers)

    refitted = (mean(1.01)[0] - mean(0.99)[0]) / 0.02
    at = np.random.default_rng(1).choice(grid, size=(4, 2_000), p=mean(1.0)[1])
    jittered = at + np.random.default_rng(2).uniform(-0.003, 0.003, at.shape)
    posterior = diffmh.from_numpyro(logistic, design, answers, theta={"scale": 1.5})
    slope = lambda theta, sites: sites["slope"]
    for control in (None, "stein"):
        table = diffmh.influence(posterior, slope, {"slope": jittered}, control=control)
        (row,) = table["answer[0]"]
        assert table[0] == row, "the point on the wrong side moves the slope most"
        assert abs(row.influence - refitted) < 5 * row.error
    assert row.error < 0.2 * abs(row.influence)


def test_it_is_a_table(table):
    assert len(table) == 16 == len(list(table)) and table[0].quantity == "mean"
    sizes = [abs(row.influence) for row in table["mean"]]
    assert sizes == sorted(sizes, reverse=True)
    assert "y[3]" in str(table) and "infinitesimal jackknife" in str(table)
    assert "<table>" in table._repr_html_()
    frame = table.to_dataframe()
    assert list(frame.columns) == [one.name for one in dataclasses.fields(table[0])]
    with pytest.raises(KeyError, match="no observation"):
        table["z"]
    figure = diffmh.plots.influence(table, most=3)
    assert len(figure.axes) == 2


def test_the_strongest_observations_are_printed(table):
    rows = tuple(
        dataclasses.replace(row, observation=f"{row.observation} {again}")
        for row in table.rows
        for again in range(100)
    )
    text = str(dataclasses.replace(table, rows=rows))
    assert text.count("y[") == 16 and text.count("… 792 weaker ones") == 2
    assert "weaker" not in str(table), "all of eight"


def test_weighted_draws(posterior):
    """Draws of N(m, 2v) with the weights that make them the posterior's."""
    z = jax.random.normal(jax.random.key(3), (4, 4_000))
    drawn = {"mean": MEAN + (2 * VARIANCE) ** 0.5 * z}
    found = diffmh.influence(posterior, mean_and_square, drawn, weights=jnp.exp(-0.5 * z**2))
    for row in found["mean"]:
        right = VARIANCE * (Y[int(row.observation[2:-1])] - MEAN)
        assert abs(row.influence - right) < 4 * row.error
    np.testing.assert_allclose(found.variances[0].posterior, VARIANCE, rtol=0.05)
    plain = diffmh.influence(posterior, mean_and_square, drawn)
    assert abs(plain["y[3]"][0].influence - OF_FOURTH) > 8 * plain["y[3]"][0].error


def test_draws_in_any_form(posterior):
    """States of our own chains, which are log σ and not σ; and a name that is missing."""

    def spread(y, scale):
        noise = numpyro.sample("noise", dist.LogNormal(0.0, scale))
        numpyro.sample("y", dist.Normal(0.0, noise), obs=y)

    made = diffmh.from_numpyro(spread, jnp.asarray(Y), theta={"scale": 1.0})
    chains = {"init": made.init, "num_samples": 200, "num_chains": 4, "burn_in": 50}
    tree = diffmh.sample(made.kernel(), made.theta, jax.random.key(1), **chains)
    noise = {"noise": np.exp(tree.posterior["noise"].values)}
    f = lambda theta, sites: sites["noise"]
    one, other = (diffmh.influence(made, f, draws) for draws in (tree, noise))
    pairs = zip(one.rows, other.rows, strict=True)
    assert all(abs(a.influence - b.influence) < 1e-4 for a, b in pairs)
    with pytest.raises(ValueError, match=r"`influence\(draws=...\)` does not fit the posterior"):
        diffmh.influence(posterior, mean_and_square, {"mu": jnp.ones((4, 50))})


def test_one_observation_has_no_jackknife(draws):
    one = diffmh.from_numpyro(model, jnp.float32(0.3), theta={"scale": 2.0})
    found = diffmh.influence(one, mean_and_square, draws)
    assert np.isnan(found.variances[0].jackknife)
    assert "no infinitesimal jackknife of a single observation" in str(found)


def test_refusals(posterior, draws):
    with pytest.raises(TypeError, match="`posterior`"):
        diffmh.influence(model, mean_and_square, draws)  # pyright: ignore
    blind = dataclasses.replace(posterior, log_likelihoods=None)
    with pytest.raises(ValueError, match="log_likelihoods"):
        diffmh.influence(blind, mean_and_square, draws)

    def nothing_seen(scale):
        numpyro.sample("mean", dist.Normal(0, scale))

    with pytest.raises(ValueError, match="no observed site"):
        unseen = diffmh.from_numpyro(nothing_seen, theta={"scale": 2.0})
        diffmh.influence(unseen, mean_and_square, draws)


def test_the_parts_add_up(posterior):
    x = {"mean": jnp.float32(0.7)}
    each = posterior.log_likelihoods(posterior.theta, x)
    total = posterior.log_likelihood(posterior.theta, x)
    assert each["y"].shape == (8,)
    np.testing.assert_allclose(each["y"].sum(), total, rtol=1e-6)
