"""Estimators: each unbiased against an exact derivative, or biased as it says; slots
filled by different flips; and what `sad.expectation` returns.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import derivative
from sad_runs import QUICK
from unbiasedness import assert_unbiased, is_caught

import diffmh
from diffmh import sad
from diffmh.sad import baseline, plan, score_pass, thinning
from diffmh.sad.derivative import Run
from diffmh.sad.estimators import Runs

KEY = jax.random.key(0)
RUNS = 4_096
THETA = jnp.array([0.4, 0.6])


def program(theta, key):
    """Draws of draws, a loop, a sum and a product."""
    keys = jax.random.split(key, 3)
    x = sad.bernoulli(keys[0], theta[0])
    y = sad.binomial(keys[1], 3, jnp.where(x, theta[1], 0.3))

    def step(z, key):
        z = sad.bernoulli(key, theta[0] * (1 + y + z) / 6)
        return z.astype(int), z * theta[1]

    z, terms = jax.lax.scan(step, 0, jax.random.split(keys[2], 2))
    return jnp.stack([terms.sum() + 1.0 * x * y, (1.0 + z) * y**2])


def mean(theta):
    total = 0.0
    for x in (0, 1):
        p = theta[1] if x else 0.3
        for y in range(4):
            chance = (theta[0] if x else 1 - theta[0]) * (
                math.comb(3, y) * p**y * (1 - p) ** (3 - y)
            )
            for first in (0, 1):
                for second in (0, 1):
                    q = [theta[0] * (1 + y + z) / 6 for z in (0, first)]
                    both = (q[0] if first else 1 - q[0]) * (q[1] if second else 1 - q[1])
                    value = np.stack(
                        [(first + second) * theta[1] + 1.0 * x * y, (1.0 + second) * y**2]
                    )
                    total = total + chance * both * value
    return total


EXACT = derivative(mean, THETA)[1].T


def found(estimator, reverse=False, this=program, theta=THETA, count=RUNS, seed=0):
    """Each replicate's value and derivative, parameters before results."""
    keys = jax.random.split(jax.random.key(seed), count)
    runs = lambda keys: Runs(Run(this, theta, KEY, (), {}), keys, reverse)
    find = jax.jit(lambda keys: estimator.find(runs(keys)), compiler_options=QUICK)
    return find(keys)


@functools.cache
def combined():
    return found(sad.Combined())


@pytest.mark.parametrize(
    ("estimator", "reverse"),
    [
        (sad.Alternatives(1), True),
        (sad.Alternatives(3), True),
        (sad.Score(), False),
        (sad.Score(), True),
    ],
    ids=lambda part: str(part),
)
def test_unbiased(estimator, reverse):
    jacobian = found(estimator, reverse).jacobian
    assert_unbiased(np.moveaxis(np.asarray(jacobian), -1, 0), EXACT)


def test_combined_is_unbiased():
    assert_unbiased(np.moveaxis(np.asarray(combined().jacobian), -1, 0), EXACT)


def test_combined_has_no_more_variance_than_either():
    """And its coefficients come from other replicates: fitted on the same ones it would be too
    sure of itself.
    """
    result = combined()
    variance = lambda jacobian: np.asarray(jacobian).var(axis=-1)
    others = [variance(other) for other in result.others.values()]
    assert np.all(variance(result.jacobian) < 1.05 * np.minimum.reduce(others))


def test_mistake_a_baseline_that_the_replicate_is_part_of(monkeypatch):
    """Few replicates, their own result in the baseline: biased by 1/C."""
    mean_of_all = lambda value, axes: jnp.mean(value, axis=axes, keepdims=True)
    few = jax.jit(
        jax.vmap(
            lambda key: (
                sad.Score()
                .find(Runs(Run(program, THETA, KEY, (), {}), jax.random.split(key, 3), False))
                .jacobian.mean(axis=-1)
            )
        ),
        compiler_options=QUICK,
    )
    keys = jax.random.split(KEY, 4_000)
    assert_unbiased(few(keys), EXACT)
    monkeypatch.setattr(baseline, "mean_of_others", mean_of_all)
    jax.clear_caches()
    assert is_caught(few(keys), EXACT)


@pytest.mark.parametrize("count", [64, 2048])
def test_combined_is_exact_where_alternatives_are(count):
    """A draw by itself: its alternatives have no variance, and neither has the combination, with a
    pilot or without.
    """
    coin = lambda p, key: 0.7 * sad.bernoulli(key, p)
    report = sad.run(coin, 0.3, KEY, num_replicates=count)
    np.testing.assert_allclose(report.gradient, 0.7, rtol=1e-6)
    assert report.gradient_error < 1e-6


def rewards(theta, key):
    """A sum of terms, each after a draw; one of them behind a condition."""

    def step(total, key):
        up = sad.bernoulli(key, jax.nn.sigmoid(theta[0] + theta[1] * total))
        return total + up, 1.0 * (total + up) ** 2

    total, terms = jax.lax.scan(step, jnp.zeros((), int), jax.random.split(key, 6))
    extra = jax.lax.cond(total > 3, lambda: theta[0] * total, lambda: 1.0 * total)
    return jnp.stack([terms.sum() + extra, terms[-1]])


def rewards_mean(theta):
    mean, chances = jnp.zeros(2), {0: jnp.ones(())}
    for time in range(6):
        after = {}
        for total, chance in chances.items():
            p = jax.nn.sigmoid(theta[0] + theta[1] * total)
            for up, of in ((1, p), (0, 1 - p)):
                after[total + up] = after.get(total + up, 0.0) + chance * of
        chances = after
        squares = sum(chance * total**2 for total, chance in chances.items())
        mean = mean.at[0].add(squares)
        mean = mean.at[1].set(squares) if time == 5 else mean
    extra = sum(c * (theta[0] * n if n > 3 else 1.0 * n) for n, c in chances.items())
    return mean.at[0].add(extra)


def test_each_term_is_credited_with_the_draws_before_it(monkeypatch):
    """Unbiased, with less variance than the whole score for every term; half of the credit is
    caught.
    """
    theta = jnp.array([0.2, -0.3])
    exact = np.asarray(jax.jit(jax.jacobian(rewards_mean))(theta)).T
    by_terms = found(sad.Score(), this=rewards, theta=theta).jacobian
    assert_unbiased(np.moveaxis(np.asarray(by_terms), -1, 0), exact)
    whole = lambda analysis, program: dataclasses.replace(
        analysis, linear=set(program.outputs), accumulated=set()
    )
    with monkeypatch.context() as patch:
        patch.setattr(plan, "by_terms", whole)
        plan.forget_plans()
        at_once = found(sad.Score(), this=rewards, theta=theta).jacobian
    plan.forget_plans()
    assert_unbiased(np.moveaxis(np.asarray(at_once), -1, 0), exact)
    assert np.all(np.var(by_terms, axis=-1)[:, 0] < 0.8 * np.var(at_once, axis=-1)[:, 0])
    np.testing.assert_allclose(by_terms[:, 1], at_once[:, 1], rtol=1e-3, atol=1e-3)
    late = score_pass.Player.credited
    mistaken = lambda self, atom, held, log_prob: late(
        self, atom, held, jax.lax.stop_gradient(log_prob) + 0.5 * log_prob
    )
    monkeypatch.setattr(score_pass.Player, "credited", mistaken)
    wrong = found(sad.Score(), this=rewards, theta=theta).jacobian
    assert is_caught(np.moveaxis(np.asarray(wrong), -1, 0), exact)


def test_groups_of_replicates_have_the_same_mean():
    """Where JAX goes backward a report's derivatives are those of groups: the same in the mean as
    of each, with the same baselines.
    """
    keys = jax.random.split(KEY, 64)
    mean = lambda group: (
        sad.Score().find(Runs(Run(program, THETA, KEY, (), {}), keys, True, group)).jacobian
    )
    each, groups = (jax.jit(mean, static_argnums=0)(group) for group in (1, 8))
    assert each.shape[-1] == 64 and groups.shape[-1] == 8
    np.testing.assert_allclose(
        np.asarray(each).reshape(2, 2, 8, 8).mean(-1), groups, rtol=1e-3, atol=1e-3
    )
    wide = lambda theta, key: 1.0 * sad.bernoulli(key, jax.nn.sigmoid(theta)).sum()
    report = sad.run(wide, jnp.zeros(20), KEY, num_replicates=1024)
    assert "1,024 replicates in 128 groups" in str(report)
    assert np.all(np.abs(report.gradient - 0.25) < 5 * report.gradient_error + 1e-6)


def test_smooth_is_right_where_the_program_is_linear_and_says_how_wrong_elsewhere():
    linear = lambda theta, key: 3.0 * sad.binomial(key, 5, theta[0]) + theta[1]
    report = sad.run(linear, THETA, KEY, estimator=sad.Smooth(), num_replicates=64)
    np.testing.assert_allclose(report.gradient, [15.0, 1.0], rtol=1e-5)
    square = lambda theta, key: (1.0 * sad.poisson(key, theta)) ** 2
    report = sad.run(square, jnp.array(2.0), KEY, estimator=sad.Smooth(), num_replicates=4_000)
    assert abs(report.gradient - 4.0) < 0.2  # 2λ, where it should be 1 + 2λ
    assert "biased" in report.notes[0] and "±" in report.notes[0]


def test_smooth_through_counts_loops_and_choices():
    """Whole numbers pass the derivative on through sums, products, selections and loops."""

    def linear(theta, key):
        keys = jax.random.split(key, 4)
        flags = sad.bernoulli(keys[0], theta * jnp.array([0.2, 0.5, 0.9]))
        chosen = jnp.where(sad.bernoulli(keys[1], theta), 5.0, 1.0)
        step = lambda n, key: (n + 2 * sad.bernoulli(key, theta), None)
        count, _ = jax.lax.scan(step, flags.sum(), jax.random.split(keys[2], 3))
        return count.astype(float) + chosen + jnp.where(~flags[0], 1.0, 0.0)

    smooth = sad.expectation(linear, estimator=sad.Smooth())
    slopes = jax.jit(jax.vmap(jax.grad(smooth), (None, 0)))(0.5, jax.random.split(KEY, 8))
    np.testing.assert_allclose(slopes, 1.6 + 6 + 4 - 0.2, rtol=1e-5)


def weighted(theta, key):
    return jnp.arange(1.0, 9.0) @ sad.bernoulli(key, jnp.full(8, theta))


def nonlinear(theta, key):
    return (jnp.arange(1.0, 9.0) @ sad.bernoulli(key, jnp.full(8, theta))) ** 2


def test_slots_are_filled_by_different_flips_of_one_call():
    """With as many slots as flips nothing is thinned, and a sum has no variance at all."""
    keys = jax.random.split(KEY, 256)
    slopes = lambda this, k: np.asarray(
        jax.jit(jax.vmap(jax.grad(sad.expectation(this, alternatives=k)), (None, 0)))(0.3, keys)
    )
    np.testing.assert_allclose(slopes(weighted, 8), 36.0, rtol=1e-5)
    one, four = slopes(nonlinear, 1).std(), slopes(nonlinear, 4).std()
    assert four < 0.75 * one


def test_inclusion_adds_up_and_thinning_is_unbiased():
    """Exactly, over a grid of uniforms: each is kept with its probability."""
    for scores in ([1.0, 2.0, 0.5, 4.0], [0.0, 3.0, 0.0, 0.1], [1.0, 1.0, 1.0, 1.0], [0.0] * 4):
        scores = jnp.array(scores)
        alive = int((scores > 0).sum())
        np.testing.assert_allclose(thinning.inclusion(scores, 2).sum(), min(alive, 2), rtol=1e-5)
        grid = (jnp.arange(20_000) + 0.5) / 20_000
        kept = jax.jit(jax.vmap(lambda u: thinning.thin(scores, 2, u)))(grid)
        lanes = jnp.arange(4) == kept.source[..., None]
        weight = jnp.sum(jnp.where(lanes, kept.factor[..., None], 0.0), axis=1).mean(axis=0)
        np.testing.assert_allclose(weight, scores > 0, atol=1e-2)
        index, factor = jax.jit(jax.vmap(lambda u: thinning.several(scores, 2, u)))(grid)
        weight = jnp.sum(jnp.where(jnp.arange(4) == index[..., None], factor[..., None], 0.0), 1)
        np.testing.assert_allclose(weight.mean(axis=0), scores > 0, atol=1e-2)


def test_a_parameter_does_not_starve_another():
    """The first parameter's deviation whatever the units of the second."""

    def two(theta, key):
        keys = jax.random.split(key, 2)

        def step(total, key):
            key_a, key_b = jax.random.split(key)
            a = sad.bernoulli(key_a, theta[0])
            b = sad.bernoulli(key_b, jax.nn.sigmoid(theta[1]))
            return total + a + b, None

        total, _ = jax.lax.scan(step, 0, jax.random.split(keys[0], 10))
        return (1.0 * total) ** 2

    deviations = []
    for unit in (1.0, 1e4):
        scaled = lambda theta, key, unit=unit: two(theta * jnp.array([1.0, unit]), key)
        gradient = jax.jit(
            jax.vmap(jax.grad(sad.expectation(scaled)), (None, 0)), compiler_options=QUICK
        )
        slopes = gradient(jnp.array([0.4, 0.2 / unit]), jax.random.split(KEY, 2_000))
        deviations.append(np.asarray(slopes)[:, 0].std())
    np.testing.assert_allclose(deviations[0], deviations[1], rtol=1e-3)


def test_one_sided_poisson_has_no_variance_on_a_sum():
    one_sided = lambda rate, key: 1.0 * sad.poisson(key, rate, flips="one-sided")
    slopes = jax.jit(jax.vmap(jax.grad(sad.expectation(one_sided)), (None, 0)))(
        2.5, jax.random.split(KEY, 64)
    )
    np.testing.assert_allclose(slopes, 1.0, rtol=1e-6)


@pytest.mark.parametrize("name", ["poisson", "geometric"])
def test_one_sided_flips(name):
    theta, exact = {"poisson": (1.5, 4.0), "geometric": (0.6, (0.6 - 4) / 0.6**3)}[name]
    sampler = getattr(sad, name)
    square = lambda theta, key: (1.0 * sampler(key, theta, flips="one-sided")) ** 2
    gradient = jax.jit(jax.vmap(jax.grad(sad.expectation(square)), (None, 0)))
    assert_unbiased(gradient(theta, jax.random.split(KEY, 20_000)), np.array(exact))
    with pytest.raises(ValueError, match="one-sided"):
        sampler(KEY, 0.5, flips="up")


def test_the_same_kind_of_object_as_the_core():
    """`.run`, `per_chain`, `compose`; keyword arguments."""
    moments = lambda p, key: jnp.stack([1.0 * sad.binomial(key, 4, p)]) ** jnp.array([1.0, 2.0])
    expected = sad.expectation(moments, num_replicates=2_000)
    assert isinstance(expected, type(diffmh.compose(lambda p, m: m, expected)).__mro__[1])
    assert expected.per_chain(0.3, KEY).shape == (2_000, 2)
    variance = diffmh.compose(lambda p, m: m[1] - m[0] ** 2, expected)
    report = variance.run(0.3, KEY)
    assert abs(report.value - 0.84) < 5 * report.value_error
    assert abs(report.gradient - 1.6) < 5 * report.gradient_error
    value, slope = jax.jit(jax.value_and_grad(variance))(0.3, KEY)
    np.testing.assert_allclose(value, report.value, rtol=1e-4)
    assert abs(slope - 1.6) < 5 * report.gradient_error
    scaled = sad.expectation(lambda p, key, *, scale: scale * sad.bernoulli(key, p))
    assert jax.grad(scaled)(0.3, KEY, scale=3.0) == 3.0


@pytest.mark.parametrize(
    ("estimator", "num_parameters"), [(None, 1), (None, 17), (sad.Alternatives(), 1)]
)
def test_a_call_is_the_mean_of_the_replicates(estimator, num_parameters):
    """Of one run, which has the key itself, if their number is left out."""

    def coins(theta, key):
        key_first, key_second = jax.random.split(key)
        first = sad.bernoulli(key_first, jax.nn.sigmoid(jnp.sum(theta)))
        return first * (1.0 + sad.bernoulli(key_second, jnp.where(first, 0.3, 0.6)))

    theta = jnp.full(num_parameters, 0.2 / num_parameters)
    one = sad.expectation(coins, estimator=estimator)
    assert one(theta, KEY) == coins(theta, KEY)
    mean = sad.expectation(coins, estimator=estimator, num_replicates=4_000)
    each, slopes = jax.vjp(lambda theta: mean.per_chain(theta, KEY), theta)
    value, slope = jax.jit(jax.value_and_grad(mean))(theta, KEY)
    np.testing.assert_allclose(value, each.mean(), rtol=1e-5)
    np.testing.assert_allclose(slope, slopes(jnp.full(4_000, 1 / 4_000))[0], rtol=1e-3)
    p = 1 / (1 + np.exp(-0.2))
    assert abs(value - 1.3 * p) < 5 * each.std() / np.sqrt(4_000)
    assert np.all(np.abs(slope - 1.3 * p * (1 - p)) < 0.1)


def test_the_report_says_what_each_would_have_had():
    report = sad.run(program, THETA, KEY, num_replicates=256)
    assert isinstance(report, diffmh.Report)
    assert "alternatives alone" in str(report) and "score alone" in str(report)
    assert "256 replicates" in str(report)


def test_a_draw_that_cannot_go_the_other_way_has_no_score():
    """At p = 0 the score knows nothing of the derivative; the report says that they disagree."""
    for count in (64, 1024):
        report = sad.run(lambda p, key: 1.0 * sad.bernoulli(key, p), 0.0, KEY, num_replicates=count)
        assert report.gradient == 1.0 and "score" in report.warnings[0]


@pytest.mark.parametrize("count", [64, 1024])
@pytest.mark.parametrize("weight", [20.0, 200.0])
def test_a_draw_without_a_score_does_not_bias_the_combination(count, weight):
    """Here the score has the smaller variance, so the combination would be almost the score, which
    misses what the first draw contributes. That is less than the pilot's errors if the weight is
    20.
    """

    def program(p, key):
        key_rare, key_many = jax.random.split(key)
        steps = 2.0 * sad.bernoulli(key_many, jnp.full(50, p)) - 1
        return weight * sad.bernoulli(key_rare, p - 0.5) + jnp.sin(jnp.sum(steps))

    # E sin Σ s = Im (p e^i + (1 − p) e^−i)^50.
    exact = weight + 100 * np.sin(1) * np.cos(1) ** 49
    report = sad.run(program, 0.5, KEY, num_replicates=count)
    assert report.warnings and abs(report.gradient - exact) < 5 * report.gradient_error
    mean = sad.expectation(program, num_replicates=count)
    slope = jax.grad(lambda p: jnp.mean(mean.per_chain(p, KEY)))(0.5)
    assert abs(slope - exact) < 5 * report.gradient_error


@pytest.mark.parametrize(
    ("draw", "edges"),
    [
        (sad.bernoulli, (0.0, 1.0)),
        (lambda key, p: sad.binomial(key, 3, p), (0.0, 1.0)),
        (sad.poisson, (0.0,)),
        (sad.geometric, (1.0,)),
        (lambda key, p: sad.negative_binomial(key, 2, p), (1.0,)),
        (lambda key, p: sad.categorical(key, probs=jnp.stack([1 - p, p])), (0.0, 1.0)),
    ],
)
@pytest.mark.parametrize("reverse", [False, True])
def test_every_distribution_knows_where_it_has_no_score(draw, edges, reverse):
    """At the edge of the range and not within, and only if the probability moves."""

    def program(theta, key, edge, moves):
        return (
            1.0
            * jax.lax.scan(
                lambda total, key: (total + draw(key, edge + moves * theta.mean()), None),
                0,
                jax.random.split(key, 2),
            )[0]
        )

    @jax.jit
    def scoreless(edge, moves):
        theta = jnp.zeros(plan.MOST_TANGENTS + 1 if reverse else 1)
        runs = Runs(Run(program, theta, KEY, (edge, moves), {}), jax.random.split(KEY, 2), reverse)
        return sad.Alternatives().find(runs).scoreless

    for edge in edges:
        inside = 1.0 if edge == 0 else -1.0
        assert scoreless(edge, inside)
        assert not scoreless(edge, 0.0)
        assert not scoreless(edge + inside / 2, inside)


def test_wrong_estimators_are_refused():
    with pytest.raises(TypeError, match=r"sad\.Score"):
        sad.expectation(program, estimator=diffmh.Score())
    with pytest.raises(ValueError, match="num_alternatives"):
        sad.Alternatives(0)
    coin = sad.Sampler(lambda u, p: u < p, lambda b, p, dp: [(~b, dp[0])], (0,))
    with pytest.raises(diffmh.NotDifferentiable, match="log_prob"):
        sad.run(lambda p, key: 1.0 * coin(key, p), 0.3, KEY, estimator=sad.Score())
    with pytest.raises(diffmh.NotDifferentiable, match="mean"):
        sad.run(lambda p, key: 1.0 * coin(key, p), 0.3, KEY, estimator=sad.Smooth())
