"""`Posterior.sample`: NUTS and label moves, against closed forms and enumeration."""

import dataclasses
import math

import arviz_stats
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from blackjax.adaptation.window_adaptation import build_schedule
from unbiasedness import assert_unbiased, is_caught

import diffmh
from diffmh.adapters import nuts
from diffmh.adapters.label_moves import SiteGibbs, SiteProposal, label_move
from diffmh.adapters.warm_up import WarmUp, schedule
from diffmh.base.batches import in_batches

KEY = jax.random.key(0)
LENGTH = {"num_warmup": 300, "num_samples": 500}


def z_scores(draws: np.ndarray, exact: float) -> float:
    """Of the mean over chains and draws, with ArviZ' error."""
    draws = np.asarray(draws, float)
    error = float(arviz_stats.mcse(draws, chain_axis=0, draw_axis=1))
    return float((draws.mean() - exact) / error)


def regression(features, target, scale):
    beta = numpyro.sample("beta", dist.Normal(0.0, scale).expand([3]).to_event(1))
    numpyro.deterministic("total", jnp.sum(beta))
    numpyro.sample("y", dist.Normal(features @ beta, 0.5), obs=target)


RANDOM = np.random.default_rng(0)
FEATURES = RANDOM.normal(size=(20, 3)) * np.array([1.0, 0.1, 10.0])
TARGET = FEATURES @ np.array([0.5, -1.0, 0.1]) + 0.5 * RANDOM.normal(size=20)


def conjugate(target=TARGET) -> diffmh.Posterior:
    data = (jnp.asarray(FEATURES), jnp.asarray(target))
    return diffmh.from_numpyro(regression, *data, theta={"scale": 2.0})


def exact_posterior(scale: float, target=TARGET) -> tuple[np.ndarray, np.ndarray]:
    """Mean and covariance of the coefficients."""
    covariance = np.linalg.inv(FEATURES.T @ FEATURES / 0.25 + np.eye(3) / scale**2)
    return covariance @ FEATURES.T @ target / 0.25, covariance


@pytest.fixture(scope="module")
def gaussian_draws():
    return conjugate().sample(KEY, num_warmup=500, num_samples=1_000)


def test_a_gaussian_posterior(gaussian_draws):
    """Means, variances and covariances of three scales that differ a hundredfold."""
    mean, covariance = exact_posterior(2.0)
    beta = np.asarray(gaussian_draws.posterior["beta"], float)
    centred = beta - mean
    for i in range(3):
        assert abs(z_scores(beta[..., i], mean[i])) < 5
        for j in range(i + 1):
            assert abs(z_scores(centred[..., i] * centred[..., j], covariance[i, j])) < 5
    assert abs(z_scores(1.3 * centred[..., 0] ** 2, covariance[0, 0])) > 5


def test_groups(gaussian_draws):
    """The contract: groups, names and shapes."""
    sites, free = gaussian_draws.posterior, gaussian_draws["unconstrained_posterior"]
    assert sites["beta"].shape == free["beta"].shape == (4, 1_000, 3)
    assert sites["beta"].dims[:2] == ("chain", "draw")
    np.testing.assert_allclose(sites["total"], sites["beta"].sum(axis=-1), rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(sites["beta"], free["beta"])
    stats = gaussian_draws.sample_stats
    wanted = {"acceptance_rate", "diverging", "energy", "lp", "n_steps", "step_size", "tree_depth"}
    assert wanted == set(stats.data_vars)
    assert all(stats[name].shape == (4, 1_000) for name in wanted)
    assert np.asarray(stats["diverging"]).dtype == bool and not np.any(stats["diverging"])
    # Frozen after the warm-up, and near the rate that it aims at.
    assert np.ptp(np.asarray(stats["step_size"])) == 0
    assert 0.8 < float(stats["acceptance_rate"].mean()) < 0.98
    x = {"beta": jnp.asarray(np.asarray(free["beta"])[2, 7])}
    posterior = conjugate()
    lp = posterior.log_density(posterior.theta, x)
    np.testing.assert_allclose(float(stats["lp"][2, 7]), float(lp), rtol=1e-5)


def test_a_second_call_compiles_nothing(gaussian_draws):
    """Nor does another length, another theta, or other data of the same form."""
    compiled = []
    listen = lambda name, seconds, **_: "backend_compile" in name and compiled.append(name)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        lengths = {"num_warmup": 150, "num_samples": 1_000}
        other = conjugate(TARGET[::-1].copy())
        compiled.clear()
        again = other.sample(jax.random.key(1), **lengths, theta={"scale": 0.1})
        assert not compiled
        # It listens.
        jax.jit(lambda x: jnp.sin(x) ** 7)(jnp.arange(7.0))
        assert compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    mean, _ = exact_posterior(0.1, TARGET[::-1])
    beta = np.asarray(again.posterior["beta"])
    assert all(abs(z_scores(beta[..., i], mean[i])) < 5 for i in range(3))


MEANS = np.array([-2.0, 0.0, 3.0])
LOG_WEIGHTS = np.array([0.3, 0.0, 0.5])
DATUM = 0.7


def labelled(y, logit):
    label = numpyro.sample("label", dist.Categorical(logits=jnp.stack([logit, 0.0, 0.5])))
    mean = numpyro.sample("mean", dist.Normal(jnp.asarray(MEANS)[label], 1.0))
    numpyro.sample("y", dist.Normal(mean, 1.0), obs=y)


def exact_labels() -> np.ndarray:
    """P(label | y), the mean integrated out: y ~ N(m_label, 2)."""
    log_weight = LOG_WEIGHTS - (DATUM - MEANS) ** 2 / 4
    return np.exp(log_weight) / np.exp(log_weight).sum()


@pytest.fixture(scope="module")
def mixed() -> diffmh.Posterior:
    return diffmh.from_numpyro(labelled, DATUM, theta={"logit": 0.3})


def test_a_mixed_model(mixed):
    """Label and mean against enumeration."""
    draws = mixed.sample(KEY, num_warmup=500, num_samples=1_000)
    probability = exact_labels()
    label, mean = (np.asarray(draws.posterior[name]) for name in ("label", "mean"))
    for value in range(3):
        assert abs(z_scores(label == value, probability[value])) < 5
    given = (MEANS + DATUM) / 2
    assert abs(z_scores(mean, probability @ given)) < 5
    assert abs(z_scores(mean**2, probability @ (given**2 + 0.5))) < 5
    assert abs(z_scores(label == 1, probability[1] + 0.1)) > 5


def exact_draws(count: int) -> dict[str, jnp.ndarray]:
    """Of label and mean together."""
    random = np.random.default_rng(1)
    label = random.choice(3, size=count, p=exact_labels())
    mean = (MEANS[label] + DATUM) / 2 + math.sqrt(0.5) * random.normal(size=count)
    return {"label": jnp.asarray(label), "mean": jnp.asarray(mean, jnp.float32)}


def moments(x) -> np.ndarray:
    label, mean = np.asarray(x["label"]), np.asarray(x["mean"], float)
    one_hot = (label[:, None] == np.arange(3)).astype(float)
    return np.column_stack([one_hot, mean, mean**2, one_hot * mean[:, None]])


def exact_moments() -> np.ndarray:
    p, given = exact_labels(), (MEANS + DATUM) / 2
    return np.concatenate([p, [p @ given, p @ (given**2 + 0.5)], p * given])


@pytest.fixture(scope="module")
def one_step(mixed):
    """An iteration of the mixed sampler from states, with the log density and gradient that the
    chain has for them.
    """
    target = nuts.Target(mixed.log_density, ("mean",), (SiteGibbs("label", 0, 3),))
    learnt = WarmUp(0.8).start(1, 0.9)

    def one(key, x, believed):
        place = nuts.ChainPlace(x, *target.gradient(mixed.theta, believed))
        return nuts._step(target, mixed.theta, key, place, learnt)[0].x

    return jax.jit(jax.vmap(one))


def test_the_mixed_sampler_is_invariant(one_step):
    """One iteration from the exact posterior; and, a deliberate mistake, one that has the log
    density and gradient of the label before.
    """
    x, keys = exact_draws(10_000), jax.random.split(jax.random.key(3), 10_000)
    assert_unbiased(moments(one_step(keys, x, x)), exact_moments())
    stale = {**x, "label": (x["label"] + 1) % 3}
    assert is_caught(moments(one_step(keys, x, stale)), exact_moments())


@pytest.mark.parametrize("symmetric", [False, True], ids=["right", "mistaken"])
def test_label_moves_are_invariant(mixed, symmetric):
    """A proposal that is not symmetric, right and (mistaken) called symmetric."""
    matrix = jnp.array([[0.1, 0.8, 0.1], [0.2, 0.2, 0.6], [0.6, 0.3, 0.1]])
    proposal = diffmh.TransitionMatrix(matrix)
    object.__setattr__(proposal, "symmetric", symmetric)
    move = label_move("label", proposal)
    assert isinstance(move, SiteProposal)
    density = lambda x: mixed.log_density(mixed.theta, x)
    keys = jax.random.split(KEY, 20_000)
    found = jax.jit(jax.vmap(lambda key, x: move(key, x, density)))(keys, exact_draws(20_000))
    assert is_caught(moments(found), exact_moments()) == symmetric


def test_uniform_proposals_become_gibbs_draws():
    assert label_move("z", diffmh.OtherState(5)) == SiteGibbs("z", 0, 5)
    assert label_move("z", diffmh.OneLabel(4)) == SiteGibbs("z", 0, 4)
    assert isinstance(label_move("z", diffmh.OneLabel(4, site=1)), SiteProposal)


def test_a_sweep_over_labels_is_exact():
    """Three labels that pull each other: the conditional of each in turn, from exact draws."""
    coupling = jnp.array([0.5, -0.7])

    def density(x):
        z = x["z"]
        return 0.4 * jnp.sum(z) + coupling[0] * z[0] * z[1] + coupling[1] * z[1] * z[2]

    states = np.array([[a, b, c] for a in (2, 3) for b in (2, 3) for c in (2, 3)])
    weight = np.exp([float(density({"z": jnp.asarray(z)})) for z in states])
    probability = weight / weight.sum()
    chosen = np.random.default_rng(2).choice(8, size=20_000, p=probability)
    move = jax.jit(jax.vmap(lambda key, z: SiteGibbs("z", 2, 2)(key, {"z": z}, density)["z"]))
    moved = np.asarray(move(jax.random.split(KEY, 20_000), jnp.asarray(states[chosen])))
    found = (moved[:, None] == states).all(axis=-1).astype(float)
    assert_unbiased(found, probability)
    assert (moved != states[chosen]).any(axis=0).all()


def counted(y, rate):
    n = numpyro.sample("n", dist.Poisson(rate))
    numpyro.sample("y", dist.Normal(n, 2.0), obs=y)


def test_a_site_of_unknown_values():
    """The error says what to write, and it works when written; there is no continuous site."""
    posterior = diffmh.from_numpyro(counted, 6.0, theta={"rate": 3.0})
    with pytest.raises(ValueError, match=r"proposals=\{'n': diffmh.OtherState\(n\)\}"):
        posterior.sample(KEY, **LENGTH)
    with pytest.raises(ValueError, match=r"kernel\(proposals=\{'n': diffmh.OtherState\(n\)\}"):
        posterior.kernel()
    draws = posterior.sample(KEY, **LENGTH, proposals={"n": diffmh.OtherState(40)})
    n = np.arange(40)
    log_weight = n * math.log(3.0) - np.array([math.lgamma(k + 1) for k in n]) - (6 - n) ** 2 / 8
    weight = np.exp(log_weight - log_weight.max())
    exact = (weight * n).sum() / weight.sum()
    assert abs(z_scores(draws.posterior["n"], exact)) < 5
    assert list(draws.sample_stats.data_vars) == ["lp"]
    assert posterior.kernel(proposals={"n": diffmh.OtherState(40)})


def test_values_that_do_not_begin_at_zero():
    def model(y, scale):
        year = numpyro.sample("year", dist.DiscreteUniform(1851, 1860))
        flags = numpyro.sample("flags", dist.Bernoulli(0.5).expand([2]).to_event(1))
        numpyro.sample("y", dist.Normal(year + flags.sum(), scale), obs=y)

    posterior = diffmh.from_numpyro(model, 1858.0, theta={"scale": 2.0})
    assert posterior.ranges == {"year": range(1851, 1861)}
    assert posterior.num_values == {"flags": 2}
    with pytest.raises(ValueError, match="count from 0 in the model"):
        posterior.kernel()


def funnel(scale):
    v = numpyro.sample("v", dist.Normal(0.0, scale))
    numpyro.sample("x", dist.Normal(0.0, jnp.exp(v / 2)).expand([9]).to_event(1))


def test_divergences_are_reported():
    draws = diffmh.from_numpyro(funnel, theta={"scale": 3.0}).sample(KEY, **LENGTH)
    assert 0 < int(draws.sample_stats["diverging"].sum()) < 1_000


def fussy(y, scale):
    """Its density is NaN unless x > 1, a place that uniform starts rarely hit."""
    x = numpyro.sample("x", dist.Normal(2.0, scale))
    numpyro.factor("y", jnp.where(x > 1.0, -0.5 * (x - y) ** 2, jnp.nan))


def test_starts_are_looked_for():
    posterior = diffmh.from_numpyro(fussy, 3.0, theta={"scale": 0.2})
    target = posterior._target({})
    places = nuts._starts(target, posterior.init, posterior.theta, KEY, 8)
    assert np.all(np.asarray(places.x["x"]) > 1.0)
    assert np.all(np.isfinite(np.asarray(places.log_density)))


def test_a_start_that_is_the_same_for_all_is_spread_out():
    posterior = conjugate()
    same = dataclasses.replace(posterior, init=lambda key: {"beta": jnp.ones(3)})
    places = nuts._starts(same._target({}), same.init, same.theta, KEY, 4)
    starts = np.asarray(places.x["beta"])
    assert len(np.unique(starts[:, 0])) == 4 and np.abs(starts - 1.0).max() < 1.0


def test_no_start():
    posterior = dataclasses.replace(
        conjugate(), log_density=lambda theta, x: jnp.sum(x["beta"]) * jnp.nan
    )
    with pytest.raises(ValueError, match="in 100 tries no start was found for chain 0"):
        posterior.sample(KEY)


def many(scales, width):
    x = numpyro.sample("x", dist.Normal(0.0, width).expand([144]).to_event(1))
    numpyro.factor("y", -0.5 * jnp.sum((x / scales - 1.0) ** 2))


def test_144_dimensions_in_single_precision():
    """Scales from 0.01 to 10, from the model's own start."""
    scales = jnp.geomspace(0.01, 10.0, 144)
    assert scales.dtype == jnp.float32
    posterior = diffmh.from_numpyro(many, scales, theta={"width": 100.0})
    draws = posterior.sample(KEY, num_warmup=300, num_samples=100, target_acceptance=0.8)
    x = np.asarray(draws.posterior["x"], float) / np.asarray(scales, float)
    assert not np.any(draws.sample_stats["diverging"])
    found = x.reshape(-1, 144)
    # 400 draws, less correlated than independent ones would be: 5 of their standard errors.
    assert np.abs(found.mean(axis=0) - 1).max() < 0.25
    assert np.abs(found.std(axis=0) - 1).max() < 0.25


@pytest.mark.parametrize(("count", "at_once"), [(7, 3), (6, 3), (2, 5), (1, 1)])
def test_in_batches(count, at_once):
    """Each input once, and no more than that, whatever is left over."""
    given = {"a": jnp.arange(float(count)), "b": jnp.ones((count, 2))}
    found = in_batches(lambda x: x["a"] ** 2 + x["b"], given, at_once)
    np.testing.assert_array_equal(found, (jnp.arange(float(count)) ** 2)[:, None] + jnp.ones(2))


def test_the_schedule_is_stans():
    for length in (30, 150, 200, 777, 1_000):
        wanted = np.asarray(build_schedule(length), int)
        np.testing.assert_array_equal(np.column_stack(schedule(length)), wanted)
    assert not schedule(19)[0].any() and not schedule(19)[1].any()
    stages, ends = schedule(1_000)
    assert stages.size == 1_000 and list(np.flatnonzero(ends) + 1) == [100, 150, 250, 450, 950]
    assert not stages[:75].any() and not stages[950:].any() and stages[75:950].all()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"num_samples": 0}, "`Posterior.sample(num_samples=...)` must be at least 1, got 0"),
        ({"num_warmup": 1.5}, "`Posterior.sample(num_warmup=...)` must be an integer"),
        ({"num_chains": "a"}, "`Posterior.sample(num_chains=...)` must be an integer"),
        ({"progress": 3}, "`Posterior.sample(progress=...)` must be True or False"),
        ({"theta": {"other": 1.0}}, "names and shapes of the posterior's hyperparameters"),
        ({"theta": 1.0}, "dictionary of hyperparameters by name"),
        ({"proposals": {"other": diffmh.OtherState(2)}}, "`proposals` names ['other']"),
        ({"proposals": {"beta": 2}}, "proposals['beta']"),
        ({"target_acceptance": 1.5}, "`Posterior.sample(target_acceptance=...)` must be"),
        ({"key": 0}, "jax.random.key(seed)"),
    ],
)
def test_refusals(given, words):
    with pytest.raises((TypeError, ValueError)) as caught:
        conjugate().sample(**{"key": KEY, **LENGTH, **given})
    assert words in str(caught.value)


def test_it_is_not_traced():
    with pytest.raises(TypeError, match="outside of `jit`"):
        jax.jit(lambda key: conjugate().sample(key).posterior["beta"])(KEY)
