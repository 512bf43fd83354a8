"""Discrete sites with few joint values, summed out for NUTS: against enumeration, closed forms and
quadrature.
"""

import dataclasses
import itertools
import math

import arviz_stats
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy.special import gammaln, log_softmax, logsumexp, softmax
from scipy.stats import norm
from unbiasedness import assert_unbiased, is_caught

import diffmh
from diffmh.adapters import nuts
from diffmh.adapters.laplace import LaplaceMixture, laplace_mixture
from diffmh.adapters.summed_out import MOST_VALUES, SummedOut, with_few_values
from diffmh.adapters.warm_up import WarmUp

KEY = jax.random.key(0)
LENGTH = {"num_warmup": 300, "num_samples": 1_000}


def z_score(draws, exact: float) -> float:
    """Of the mean over chains and draws, with ArviZ' error."""
    draws = np.asarray(draws, float)
    error = float(arviz_stats.mcse(draws, chain_axis=0, draw_axis=1))
    return float((draws.mean() - exact) / max(error, 1e-12))


# A density of (a, z, flags): impossible where z < 4, and NaN where both flags are 1.
TWO = SummedOut(("z", "flags"), (range(2, 6), range(2)))


def partly_impossible(x):
    weight = jnp.maximum(x["z"] - 3.0, 0.0) * x["a"] ** 2
    both = jnp.where(jnp.sum(x["flags"]) == 2, jnp.nan, 0.3 * x["flags"][0])
    return jnp.log(weight) - x["z"] * x["a"] + both * x["a"]


def possible_terms(a: float) -> dict[tuple[int, int, int], tuple[float, float]]:
    """The log density and its derivative along a for each possible (z, flags)."""
    terms = {}
    for z, first, second in itertools.product((4, 5), (0, 1), (0, 1)):
        if first + second < 2:
            log_density = math.log((z - 3) * a**2) - z * a + 0.3 * first * a
            terms[z, first, second] = log_density, 2 / a - z + 0.3 * first
    return terms


STATE = {"z": jnp.array(2), "flags": jnp.array([1, 1])}


@pytest.mark.parametrize("a", [0.7, -1.3, 40.0])
def test_the_sum_and_its_gradient(a):
    """A value of probability 0, which has a gradient of NaN, has no part in it."""

    def naive(a):
        joint = TWO.joint_values(STATE)
        return jax.nn.logsumexp(jax.vmap(lambda v: partly_impossible({"a": a, **v}))(joint))

    assert np.isnan(jax.grad(naive)(a))
    logs, slopes = np.array(list(possible_terms(a).values())).T
    along = lambda free: TWO.along(free, STATE, partly_impossible)
    value, gradient = jax.jit(jax.value_and_grad(along))({"a": jnp.asarray(a)})
    np.testing.assert_allclose(value, logsumexp(logs), rtol=1e-5)
    np.testing.assert_allclose(gradient["a"], softmax(logs) @ slopes, rtol=1e-4)


def test_one_possible_value_and_none():
    """All but one are impossible: the density of that one. None is possible: −∞, never NaN."""

    def only(which, x):
        return jnp.log((x["z"] == which) * jnp.exp(-0.5 * x["a"] ** 2))

    summed = SummedOut(("z",), (range(3),))
    for which, expected in ((1, (-2.0, -2.0)), (7, (-math.inf, 0.0))):
        along = lambda a, which=which: summed.along(
            {"a": a}, {"z": jnp.array(0)}, lambda x: only(which, x)
        )
        found = jax.value_and_grad(along)(jnp.asarray(2.0))
        np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("mistaken", [False, True])
def test_labels_are_drawn_together(mistaken):
    """Two sites from their joint conditional, the first from 2 to 5; and, a deliberate mistake,
    from that at another a.
    """
    a, x = 0.7, {"a": jnp.asarray(0.8 if mistaken else 0.7), **STATE}
    draw = jax.jit(jax.vmap(lambda key: TWO.draw(key, x, partly_impossible)))
    found = draw(jax.random.split(KEY, 100_000))
    terms = possible_terms(a)
    drawn = np.column_stack([found["z"], found["flags"]])
    indicators = (drawn[:, None] == np.array(list(terms))).all(axis=-1).astype(float)
    probability = softmax([log_density for log_density, _ in terms.values()])
    assert is_caught(indicators, probability) == mistaken
    assert indicators.sum() == len(indicators)


def test_which_sites_are_summed_out():
    """The smallest first, at most so many values together; none that has too many by itself."""
    ranges = {"labels": range(2), "switch": range(40), "kind": range(1, 4), "flag": range(2)}
    sizes = {"labels": 100, "switch": 1, "kind": 1, "flag": 1}
    assert MOST_VALUES == 256
    assert with_few_values(ranges, sizes) == SummedOut(
        ("flag", "kind", "switch"), (range(2), range(1, 4), range(40))
    )
    sizes["flag"] = 2
    assert with_few_values(ranges, sizes).names == ("kind", "flag")
    assert with_few_values({"z": range(2)}, {"z": 8}) == SummedOut(("z",), (range(2),))
    assert with_few_values({"z": range(2)}, {"z": 9}) is None
    assert with_few_values({"z": range(10)}, {"z": 100_000}) is None
    assert with_few_values({}, {}) is None


# Six modes of x, by two discrete sites: 5 apart or more, with standard deviations of 0.2.
MEANS = np.array([(2 * side - 1) * 5.0 * level for side in (0, 1) for level in (1, 2, 3)])
SIDES, LEVELS = np.repeat([0, 1], 3), np.tile([1, 2, 3], 2)


def separate(y, spread):
    side = numpyro.sample("side", dist.Bernoulli(0.4))
    level = numpyro.sample("level", dist.DiscreteUniform(1, 3))
    x = numpyro.sample("x", dist.Normal((2 * side - 1) * 5.0 * level, spread))
    numpyro.sample("y", dist.Normal(x, 9.0), obs=y)


def separated() -> diffmh.Posterior:
    return diffmh.from_numpyro(separate, 2.0, theta={"spread": 0.2})


def exact_separate() -> tuple[np.ndarray, np.ndarray, float]:
    """The probability of each mode, the mean of x there, and its standard deviation."""
    prior = np.where(SIDES == 1, 0.4, 0.6)
    probability = prior * norm.pdf(2.0, MEANS, math.hypot(9.0, 0.2))
    precision = 1 / 81 + 1 / 0.04
    return probability / probability.sum(), (2.0 / 81 + MEANS / 0.04) / precision, precision**-0.5


def test_modes_that_gibbs_in_turn_never_leaves():
    """The new way has the probabilities of all modes; the old way, which `proposals` keeps, stays
    where each chain began.
    """
    probability, means, _ = exact_separate()
    draws = separated().sample(KEY, **LENGTH).posterior
    for side, level, p in zip(SIDES, LEVELS, probability, strict=True):
        assert abs(z_score((draws["side"] == side) & (draws["level"] == level), p)) < 5
    assert abs(z_score(draws["x"], probability @ means)) < 5
    assert abs(z_score(draws["x"], probability @ means + 1.0)) > 5
    assert abs(z_score(draws["side"], SIDES @ probability + 0.1)) > 5
    proposals = {"side": diffmh.OtherState(2), "level": diffmh.OtherState(4)}
    old = separated().sample(KEY, **LENGTH, proposals=proposals).posterior
    assert np.ptp(np.asarray(old["side"]), axis=1).max() == 0


def exact_draws(count: int) -> dict[str, jnp.ndarray]:
    probability, means, deviation = exact_separate()
    random = np.random.default_rng(1)
    mode = random.choice(6, size=count, p=probability)
    x = means[mode] + deviation * random.normal(size=count)
    return {"side": SIDES[mode], "level": LEVELS[mode], "x": x.astype(np.float32)}


def moments(x) -> np.ndarray:
    """The six modes by their labels and by x, and the distance of x from the labels' mean."""
    side, level, place = (np.asarray(x[name]) for name in ("side", "level", "x"))
    own = (2 * side - 1) * 5.0 * level
    by_label = own[:, None] == MEANS
    by_place = np.abs(place[:, None] - MEANS) < 2.5
    return np.column_stack([by_label, by_place, place - own, (place - own) ** 2]).astype(float)


def exact_moments() -> np.ndarray:
    probability, means, deviation = exact_separate()
    off = means - MEANS
    second = probability @ (off**2) + deviation**2
    return np.concatenate([probability, probability, [probability @ off, second]])


@pytest.fixture(scope="module")
def target() -> nuts.Target:
    posterior = separated()
    bare = posterior._target({})
    starts = jax.vmap(posterior.init)(jax.random.split(KEY, 4))
    return nuts._with_jumps(bare, posterior.theta, starts)


class WrongWeights(LaplaceMixture):
    """A deliberate mistake: all modes count the same in the proposal's probability."""

    def log_prob(self, x):
        same = dataclasses.replace(self, log_weights=jnp.zeros_like(self.log_weights))
        return LaplaceMixture.log_prob(same, x)


class WrongLabels(SummedOut):
    """A deliberate mistake: labels drawn given x slightly moved."""

    def draw(self, key, x, log_density):
        return {**SummedOut.draw(self, key, {**x, "x": x["x"] + 9.0}, log_density), "x": x["x"]}


@pytest.mark.parametrize("mistake", ["none", "weights", "labels"])
def test_one_iteration_is_invariant(target, mistake):
    if mistake == "weights":
        wrong = WrongWeights(**vars(target.jumps))
        target = dataclasses.replace(target, jumps=wrong)
    if mistake == "labels":
        wrong = WrongLabels(target.summed_out.names, target.summed_out.ranges)
        target = dataclasses.replace(target, summed_out=wrong)
    theta, learnt = separated().theta, WarmUp(0.8).start(1, 0.2)

    def one(key, x):
        place = nuts.ChainPlace(x, *target.gradient(theta, x))
        place, stats = nuts._step(target, theta, key, place, learnt)
        return place.x, stats["lp"], target.log_density(theta, place.x)

    x, keys = exact_draws(20_000), jax.random.split(jax.random.key(3), 20_000)
    new, lp, density = jax.jit(jax.vmap(one))(keys, x)
    assert is_caught(moments(new), exact_moments()) == (mistake != "none")
    np.testing.assert_allclose(lp, density, rtol=1e-5)
    # Most chains have jumped.
    if mistake == "none":
        assert np.mean(np.abs(np.asarray(new["x"]) - x["x"]) > 2.5) > 0.5


def test_the_mixture_of_laplaces_approximations():
    """Two Gaussians, one value without a density: modes, precisions and weights, and a density that
    integrates to 1.
    """
    matrix = np.array([[4.0, 1.0], [1.0, 0.5]], np.float32)
    centres = np.array([[1.0, -2.0], [-30.0, 20.0]], np.float32)

    def log_density(k, x):
        off = x - jnp.asarray(centres)[jnp.minimum(k, 1)]
        return jnp.log(1.0 * (k < 2)) + 1.5 * k - 0.5 * off @ matrix @ off

    made = jax.jit(lambda starts: laplace_mixture(log_density, jnp.arange(3), starts))(
        jnp.zeros((2, 2))
    )
    np.testing.assert_allclose(made.modes[:2], centres, atol=1e-3)
    for k in range(2):
        found = made.axes[k] @ np.diag(made.precisions[k]) @ np.asarray(made.axes[k]).T
        np.testing.assert_allclose(found, matrix, rtol=2e-2, atol=2e-2)
    expected = log_softmax([0.0, 1.5])
    np.testing.assert_allclose(jax.nn.log_softmax(made.log_weights)[:2], expected, atol=2e-2)
    assert made.log_weights[2] == -np.inf and np.all(np.isfinite(made.precisions))
    # By its own samples about the second mode: E[u/q] = the volume, u being 1 in a box.
    samples = np.asarray(jax.vmap(made.sample)(jax.random.split(KEY, 200_000)))
    log_prob = np.asarray(jax.vmap(made.log_prob)(samples), float)
    inside = np.all(np.abs(samples - centres[1]) < 0.5, axis=1)
    assert_unbiased((inside * np.exp(-log_prob))[:, None], np.ones(1))
    assert is_caught((inside * np.exp(-log_prob + 0.2))[:, None], np.ones(1))


FIRST_YEAR = 1851
COUNTS = np.array([5, 4, 6, 7, 3, 5, 1, 0, 2, 1, 1, 8])


def change(counts, early_rate, late_rate):
    early = numpyro.sample("early", dist.Exponential(early_rate))
    late = numpyro.sample("late", dist.Exponential(late_rate))
    year = numpyro.sample("year", dist.DiscreteUniform(FIRST_YEAR, FIRST_YEAR + 11))
    rate = jnp.where(jnp.arange(12) < year - FIRST_YEAR, early, late)
    numpyro.sample("y", dist.Poisson(rate), obs=counts)


def exact_change() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The probability of each year, and the means of both rates given it, which are gamma."""
    before = np.concatenate([[0], np.cumsum(COUNTS)])[:12]
    years, total = np.arange(12), COUNTS.sum()
    parts = [(before + 1, 0.5 + years), (total - before + 1, 0.25 + 12 - years)]
    log_weight = sum(gammaln(shape) - shape * np.log(rate) for shape, rate in parts)
    return softmax(log_weight), *(shape / rate for shape, rate in parts)


def test_a_change_point():
    """Years that begin in 1851, against the closed form; a jump enters each mode many times, so
    that the draws are worth nearly as many independent ones.
    """
    posterior = diffmh.from_numpyro(
        change, jnp.asarray(COUNTS), theta={"early_rate": 0.5, "late_rate": 0.25}
    )
    draws = posterior.sample(KEY, num_warmup=300, num_samples=2_000).posterior
    probability, early, late = exact_change()
    year = np.asarray(draws["year"])
    assert year.min() >= FIRST_YEAR and year.max() < FIRST_YEAR + 12
    for index, p in enumerate(probability):
        assert abs(z_score(year == FIRST_YEAR + index, p)) < 5
    for name, given in (("early", early), ("late", late)):
        assert abs(z_score(draws[name], probability @ given)) < 5
        assert float(arviz_stats.ess(np.asarray(draws[name]), chain_axis=0, draw_axis=1)) > 4_000
    assert abs(z_score(draws["early"], probability @ early + 0.2)) > 5


def labels_and_kind(y, width):
    """Nine labels and a site of three values, one of which is impossible."""
    kind = numpyro.sample("kind", dist.Categorical(jnp.array([0.3, 0.0, 0.7])))
    x = numpyro.sample("x", dist.Normal(0.0, width))
    labels = numpyro.sample("labels", dist.Bernoulli(0.4).expand([9]).to_event(1))
    numpyro.sample("y", dist.Normal(x + labels * (1.0 + kind), 0.7).to_event(1), obs=y)


def test_labels_in_turn_with_a_site_that_is_summed_out():
    """512 values of the labels are too many: Gibbs in turn, `kind` summed out; by quadrature."""
    y = np.array([-0.3, 0.4, 2.9, 3.3, 0.1, 1.2, -0.8, 2.4, 0.6])
    posterior = diffmh.from_numpyro(labels_and_kind, jnp.asarray(y), theta={"width": 2.0})
    target = posterior._target({})
    assert target.summed_out.names == ("kind",) and [m.name for m in target.moves] == ["labels"]
    grid = np.linspace(-8.0, 8.0, 4_001)
    log_g = np.full((3, grid.size), -np.inf)
    for kind, prior in ((0, 0.3), (2, 0.7)):
        parts = [
            math.log(share) + norm.logpdf(y, grid[:, None] + shift, 0.7)
            for share, shift in ((0.6, 0.0), (0.4, 1.0 + kind))
        ]
        each = np.logaddexp(*parts).sum(axis=1)
        log_g[kind] = math.log(prior) + norm.logpdf(grid, 0.0, 2.0) + each
    weight = softmax(log_g)
    draws = posterior.sample(KEY, num_warmup=500, num_samples=4_000).posterior
    assert abs(z_score(draws["x"], weight.sum(axis=0) @ grid)) < 5
    assert abs(z_score(draws["kind"] == 2, weight[2].sum())) < 5
    assert not np.any(draws["kind"] == 1)
    assert abs(z_score(draws["kind"] == 2, weight[2].sum() + 0.15)) > 5


def test_discrete_sites_alone_are_independent_draws():
    def model(y, scale):
        n = numpyro.sample("n", dist.Binomial(20, 0.3))
        numpyro.sample("y", dist.Normal(n, scale), obs=y)

    draws = diffmh.from_numpyro(model, 9.0, theta={"scale": 2.0}).sample(KEY, **LENGTH)
    n = np.arange(21)
    log_weight = -gammaln(n + 1) - gammaln(21 - n) + n * math.log(3 / 7) - (9 - n) ** 2 / 8
    # Of at most 5, 6, ..., 10, so that none is rare.
    below = np.cumsum(softmax(log_weight))[5:11]
    found = np.asarray(draws.posterior["n"]).reshape(-1, 1) <= np.arange(5, 11)
    assert_unbiased(found.astype(float), below)
    assert is_caught(found.astype(float), below + 0.05)
    assert list(draws.sample_stats.data_vars) == ["lp"]


def test_proposals_keep_their_way():
    posterior = separated()
    target = posterior._target({"level": diffmh.OtherState(4)})
    assert target.summed_out.names == ("side",) and [m.name for m in target.moves] == ["level"]
    x = jax.vmap(posterior.init)(jax.random.split(KEY, 4))
    assert nuts._with_jumps(target, posterior.theta, x).jumps is None


def nested(y, noise):
    """The values of `part` end at `whole`, another latent site."""
    x = numpyro.sample("x", dist.Normal())
    whole = numpyro.sample("whole", dist.DiscreteUniform(0, 3))
    part = numpyro.sample("part", dist.DiscreteUniform(0, whole))
    numpyro.sample("y", dist.Normal(part + x, noise), obs=y)


def test_a_value_without_a_gradient_does_not_stop_the_jumps():
    """An impossible value whose gradient is NaN has weight 0, and no part in the proposal."""

    def log_density(k, x):
        # At k = 1 the slope of the root is infinite.
        root = jnp.sum(jnp.sqrt((k - 1.0) ** 2 * (1 + x**2)))
        return jnp.where(k == 1, -jnp.inf, root - 0.5 * jnp.sum((x - 4.0 * k) ** 2))

    assert np.isnan(jax.grad(log_density, argnums=1)(1, jnp.zeros(2))).all()
    made = laplace_mixture(log_density, jnp.arange(3), jnp.zeros((4, 2)))
    rest = laplace_mixture(log_density, jnp.array([0, 2]), jnp.zeros((4, 2)))
    assert made.log_weights[1] == -np.inf
    for place in (jnp.zeros(2), jnp.full(2, 7.0)):
        np.testing.assert_allclose(made.log_prob(place), rest.log_prob(place), rtol=1e-5)


@pytest.mark.parametrize("checks", [True, False])
def test_values_that_depend_on_another_site(checks):
    """They are not those of the one trace that `from_numpyro` sees: the site asks for a proposal.
    Outside of its support it has no density, even if NumPyro's own checks are switched off.
    """
    numpyro.enable_validation(checks)
    try:
        posterior = diffmh.from_numpyro(nested, 2.0, theta={"noise": 1.5})
        assert posterior.num_values == {"whole": 4}
        with pytest.raises(ValueError, match="site 'part' is discrete, and its values are not kno"):
            posterior.sample(KEY)
        with pytest.raises(ValueError, match="site 'part' is discrete, and its values are not kno"):
            posterior.kernel()
        draws = posterior.sample(KEY, **LENGTH, proposals={"part": diffmh.OtherState(4)}).posterior
    finally:
        numpyro.enable_validation(True)
    part, whole = np.meshgrid(np.arange(4), np.arange(4))
    joint = (part <= whole) / (whole + 1) * norm.pdf(2.0, part, math.hypot(1.0, 1.5))
    joint /= joint.sum()
    for value in range(4):
        assert abs(z_score(draws["part"] == value, joint[:, value].sum())) < 4
        assert abs(z_score(draws["whole"] == value, joint[value].sum())) < 4
    assert abs(z_score(draws["part"] == 0, joint[:, 0].sum() + 0.1)) > 4


def test_values_that_depend_on_theta():
    def counted(y, top):
        count = numpyro.sample("count", dist.DiscreteUniform(0, jnp.floor(top).astype(int)))
        numpyro.sample("y", dist.Normal(count, top), obs=y)

    posterior = diffmh.from_numpyro(counted, 2.0, theta={"top": 3.0})
    assert posterior.num_values == posterior.ranges == {}


def test_values_that_are_known():
    """Parameters of a distribution may depend on anything, as long as its support does not."""

    def model(y, p):
        kind = numpyro.sample("kind", dist.Categorical(jnp.array([0.2, 0.3, p])))
        flag = numpyro.sample("flag", dist.BernoulliLogits(p * kind))
        with numpyro.plate("two", 2):
            numpyro.sample("counts", dist.Binomial(jnp.array([3, 5]), p))
            numpyro.sample("dice", dist.DiscreteUniform(1, 6))
        numpyro.sample("row", dist.Categorical(logits=p * jnp.zeros((4, 3))).to_event(1))
        numpyro.sample("rates", dist.BetaBinomial(1.0, p, total_count=4).mask(True))
        numpyro.sample("grade", dist.OrderedLogistic(p, jnp.arange(3.0)))
        numpyro.sample("y", dist.Normal(flag + p, p), obs=y)

    posterior = diffmh.from_numpyro(model, 2.0, theta={"p": 0.5})
    counts = {"kind": 3, "flag": 2, "counts": 6, "row": 3, "rates": 5, "grade": 4}
    assert posterior.num_values == counts
    assert posterior.ranges == {"dice": range(1, 7)}
