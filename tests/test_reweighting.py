"""from_draws(at=...): draws as a function of theta."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import diffmh
from diffmh.tools import reweighting, weighted_sums
from diffmh.tools.reweighting import Reweighted
from diffmh.tools.tails import effective_size, pareto_k

# x ~ N(θ, 2), y = 1.3 ~ N(x, 1): the posterior is N(m(θ), v).
PRIOR, Y, AT = 2.0, 1.3, 0.4
VARIANCE = 1 / (1 / PRIOR + 1)


def log_density(theta, x):
    return -0.5 * (x - theta) ** 2 / PRIOR - 0.5 * (x - Y) ** 2


def mean(theta):
    return VARIANCE * (theta / PRIOR + Y)


def both(theta, x):
    """The second has a derivative of its own."""
    return {"x": x, "square": x**2 + theta**2 * x}


def exact(theta):
    m = mean(theta)
    return {"x": m, "square": m**2 + VARIANCE + theta**2 * m}


def normal_scores(count: int) -> jax.Array:
    """The quantiles of the posterior at `AT` in the middle of `count` equal shares: averages over
    them are quadrature.
    """
    from scipy.special import ndtri

    z = ndtri((np.arange(count) + 0.5) / count)
    return jnp.asarray(mean(AT) + VARIANCE**0.5 * z, jnp.float32).reshape(4, -1)


@pytest.fixture(scope="module")
def quantiles():
    return diffmh.from_draws(both, log_density, normal_scores(8_000), at=AT)


def draws(seed: int = 0, shape=(4, 1_000)):
    return mean(AT) + VARIANCE**0.5 * jax.random.normal(jax.random.key(seed), shape)


def close(found, wanted, tolerance):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, atol=tolerance)


def test_value_and_derivatives_of_three_orders_against_the_closed_form(quantiles):
    for theta in (AT, AT + 0.3):
        close(quantiles(theta), exact(theta), 1e-3)
        close(jax.jacobian(quantiles)(theta), jax.jacobian(exact)(theta), 3e-3)
        close(jax.hessian(quantiles)(theta), jax.hessian(exact)(theta), 1e-2)
    third = jax.jacfwd(jax.jacfwd(jax.jacrev(quantiles)))(AT)
    close(third, jax.jacfwd(jax.hessian(exact))(AT), 3e-2)


def test_a_grid_by_vmap_against_the_closed_form(quantiles):
    grid = jnp.linspace(-0.6, 1.4, 11)
    close(jax.vmap(quantiles)(grid), jax.vmap(exact)(grid), 3e-3)
    close(
        jax.jit(jax.vmap(jax.jacobian(quantiles)))(grid),
        jax.vmap(jax.jacobian(exact))(grid),
        1e-2,
    )


def test_at_theta0_derivatives_are_the_cumulant_identities():
    """Of the draws themselves, not of their distribution: the same numbers up to rounding."""
    x = np.asarray(draws(), float).ravel()
    e = diffmh.from_draws(lambda theta, x: x**2, log_density, draws(), at=AT)
    f, s = x**2 - np.mean(x**2), (x - AT) / PRIOR - np.mean((x - AT) / PRIOR)
    np.testing.assert_allclose(jax.grad(e)(AT), np.mean(f * s), rtol=1e-4)
    # ∂s is constant, so that the third cumulant is all of it.
    np.testing.assert_allclose(jax.hessian(e)(AT), np.mean(f * s * s), rtol=1e-3)
    # Without the mean corrections of κ₃ the number is another: this test can fail.
    raw = np.mean((x**2) * ((x - AT) / PRIOR) ** 2)
    assert abs(raw - np.mean(f * s * s)) > 0.1


@pytest.mark.parametrize("at_once", [4, 100, 1_000, 4_004, 10**6])
def test_blocks_do_not_matter(at_once):
    """Lengths that divide, that don't, one draw of each chain at a time, and all at once."""
    given = Reweighted(both, log_density, jnp.float32(AT), draws(shape=(4, 1_001)), ())
    theta = jnp.float32(0.7)

    def of(count):
        one = lambda theta: given.mean(theta, count)
        return jnp.stack([one(theta), jax.jacrev(one)(theta), jax.jacfwd(jax.jacrev(one))(theta)])

    np.testing.assert_allclose(jax.jit(of, static_argnums=0)(at_once), of(10**7), rtol=2e-4)


def test_memory_of_a_gradient_is_that_of_a_block():
    """Backward, one block is evaluated at a time: temporary memory does not grow with the draws."""

    def density(theta, x):
        return -0.5 * jnp.sum(jnp.tanh(x - theta) ** 2)

    def temporary(count):
        x = jnp.zeros((4, count, 8))
        given = Reweighted(lambda theta, x: x[0], density, jnp.float32(0.0), x, ())
        slope = jax.jit(jax.hessian(lambda theta: given.mean(theta)[0]))
        return slope.lower(jnp.float32(0.1)).compile().memory_analysis().temp_size_in_bytes

    small, large = temporary(2_000), temporary(20_000)
    assert large < small + 200_000, (small, large)


def test_large_common_parts_of_f_and_of_the_score_do_not_cost_digits():
    """f + 10⁴ and a log density with 10⁴ θ in it: terms that no derivative sees."""
    x = draws()
    plain = diffmh.from_draws(lambda theta, x: x**2, log_density, x, at=AT)
    large = diffmh.from_draws(
        lambda theta, x: x**2 + 1e4,
        lambda theta, x: log_density(theta, x) + 1e2 * theta**2,
        x,
        at=AT,
    )
    np.testing.assert_allclose(jax.grad(large)(AT), jax.grad(plain)(AT), rtol=2e-2)
    np.testing.assert_allclose(jax.hessian(large)(AT), jax.hessian(plain)(AT), rtol=5e-2)


def test_nan_where_the_draws_do_not_reach(quantiles):
    """Value and derivatives: a zero derivative would pass for an optimum."""
    far = AT + 12.0
    assert np.isnan(quantiles(far)["x"])
    assert np.isnan(jax.jacobian(quantiles)(far)["x"])
    assert np.isnan(jax.hessian(quantiles)(far)["x"])
    inside = jax.vmap(quantiles)(jnp.array([AT, far]))["x"]
    assert np.isfinite(inside[0]) and np.isnan(inside[1])


def test_the_rule_is_five_per_cent_of_the_draws():
    x = draws()
    e = diffmh.from_draws(lambda theta, x: x, log_density, x, at=AT)
    for theta in (AT + 3.0, AT + 4.0, AT + 4.5, AT + 5.0):
        weights = np.asarray(log_density(theta, x) - log_density(AT, x), float)
        enough = effective_size(weights) >= 0.05 * x.size
        assert np.isfinite(e(theta)) == enough


def test_run_reports_the_tail_and_refuses_a_heavy_one():
    e = diffmh.from_draws(both, log_density, draws(), at=AT)
    report = e.run(AT + 0.5)
    weights = np.asarray(log_density(AT + 0.5, draws()) - log_density(AT, draws()), float)
    assert report.effective_draws == pytest.approx(effective_size(weights), rel=1e-4)
    assert report.pareto_k == pytest.approx(pareto_k(weights), abs=1e-3)
    assert "Pareto k̂" in str(report)
    with pytest.raises(ValueError, match=r"too far .* Pareto k̂ is .* sample anew"):
        e.run(AT + 6.0)


@pytest.mark.parametrize("index", [0.2, 0.5, 0.9])
def test_k_hat_is_that_of_the_weights_largest(index):
    """Weights `u^(−k)`, u uniform, have the tail index k; their inverses have none."""
    u = np.random.default_rng(0).uniform(size=40_000)
    assert pareto_k(-index * np.log(u)) == pytest.approx(index, abs=0.1)
    assert pareto_k(index * np.log(u)) < 0


def test_a_heavy_tail_is_refused_by_k_hat_alone():
    """An eighth of the draws effective, and k̂ above 0.7: no variance to take an error from."""
    x = jnp.asarray(np.random.default_rng(2).uniform(size=(4, 500)), jnp.float32)
    # The weight is u^(−0.8 θ).
    density = lambda theta, x: -0.8 * theta * jnp.log(x)
    e = diffmh.from_draws(lambda theta, x: x, density, x, at=0.0)
    assert effective_size(np.asarray(density(1.0, x), float)) > 0.05 * x.size
    assert np.isfinite(e(1.0))
    with pytest.raises(ValueError, match="Pareto"):
        e.run(1.0)
    assert 0 < e.run(0.5).pareto_k < 0.7


def test_errors_cover_away_from_theta0():
    """z-scores of 60 runs at θ₀ + 0.8 with autocorrelated draws: mean 0 and spread 1 within five
    standard errors. Draws without weights, or weights without normalising, are far off.
    """
    from test_draws import autoregressive

    theta = 0.4 + 0.8
    z, biased = [], []
    for x in autoregressive(60, 0.6):
        report = diffmh.from_draws(both, log_density, x, at=AT).run(theta)
        wanted, slope = exact(theta), jax.jacobian(exact)(theta)
        z.append(
            [
                (report.value[name] - wanted[name]) / report.value_error[name]
                for name in ("x", "square")
            ]
            + [
                (report.gradient[name] - slope[name]) / report.gradient_error[name]
                for name in ("x", "square")
            ]
        )
        weight = np.exp(log_density(theta, x) - log_density(AT, x))
        biased.append((np.mean(weight * x) - wanted["x"]) / report.value_error["x"])
    z = np.array(z)
    assert np.all(np.abs(z.mean(axis=0)) < 5 * 1.2 / 60**0.5), z.mean(axis=0)
    assert np.all((z.std(axis=0) > 0.7) & (z.std(axis=0) < 1.5)), z.std(axis=0)
    # Weights without `/ Σ w`: the deliberate mistake is seen.
    assert abs(np.mean(biased)) > 5 * 1.2 / 60**0.5


def test_a_curve_and_its_picture():
    theta0 = {"level": jnp.float32(AT), "other": jnp.float32(1.0)}
    density = lambda theta, x: log_density(theta["level"], x) + 0.0 * theta["other"]
    e = diffmh.from_draws(lambda theta, x: x, density, draws(), at=theta0)
    grid = np.linspace(AT - 1.0, AT + 7.0, 9)
    found = e.curve(grid, name="level")
    assert found.trusted[0] and not found.trusted[-1]
    assert np.isnan(found.value[-1]) and found.pareto_k[-1] > 0.7
    wanted = mean(grid[found.trusted])
    assert np.all(found.low[found.trusted] < wanted + 0.02)
    assert np.all(found.high[found.trusted] > wanted - 0.02)
    thetas = {"level": jnp.asarray(grid), "other": jnp.ones(9)}
    again = e.curve(thetas)
    np.testing.assert_allclose(again.value, found.value)
    for other in (AT, grid[:, None]):
        with pytest.raises(ValueError, match=r"`curve\(thetas\)` with `name` .* got shape"):
            e.curve(other, name="level")
    figure = diffmh.plots.curve(e, grid, name="level")
    assert len(figure.axes) == 2 and diffmh.plots.curve(found) is not None


@pytest.mark.parametrize(
    ("line", "kind", "words"),
    [
        (lambda e: diffmh.from_draws(both, log_density, draws())(0.4), TypeError, "at=theta"),
        (lambda e: e(jnp.zeros(2)), TypeError, "form of `at`"),
        (lambda e: e.curve(0.5), ValueError, "leading axis"),
        (lambda e: e.curve(jnp.ones(3), name="level"), ValueError, "number's name"),
        (lambda e: e.curve(jnp.full(3, 0.4)), ValueError, "nothing varies"),
        (lambda e: diffmh.plots.curve(3.0), TypeError, "from_draws"),
        (lambda e: jax.grad(lambda t: e.run(t).value["x"])(0.4), diffmh.NotDifferentiable, "call"),
        (
            lambda e: diffmh.from_draws(
                both, lambda t, x: jnp.log(x - 9.0 + t), draws(), at=0.4
            ).run(0.5),
            ValueError,
            "not finite",
        ),
    ],
)
def test_refusals(quantiles, line, kind, words):
    with pytest.raises(kind, match=words):
        line(quantiles)


def test_derivatives_with_respect_to_data_are_refused():
    e = diffmh.from_draws(
        lambda theta, x, y: x, lambda theta, x, y: -((x - theta * y) ** 2), draws(), at=AT
    )
    assert np.isfinite(e(AT, 1.0))
    with pytest.raises(diffmh.NotDifferentiable, match="data"):
        jax.grad(e, argnums=1)(AT, 1.0)


def kinked(theta, x):
    return -jnp.abs(x - theta)


def bent(theta, x):
    return -(jax.nn.relu(x - theta) ** 2) - x**2


@pytest.mark.parametrize(("density", "orders"), [(kinked, 1), (bent, 2)])
def test_an_order_whose_moving_jumps_nobody_sees_is_refused(density, orders):
    """−|x − θ| has one derivative by reweighting, and the positive part squared has two."""
    e = diffmh.from_draws(lambda theta, x: x, density, draws(), at=AT)
    derivative = e
    for _ in range(orders):
        derivative = jax.grad(derivative)
        assert np.isfinite(derivative(AT))
    for once_more in (jax.grad, jax.jacfwd):
        with pytest.raises(diffmh.NotDifferentiable, match=f"order {orders + 1} would be wrong"):
            once_more(derivative)(AT)
    with pytest.raises(diffmh.NotDifferentiable, match="would be wrong"):
        jax.jit(jax.vmap(once_more(derivative)))(jnp.array([AT]))


def test_the_refused_second_derivative_would_have_been_wrong():
    """Laplace's distribution: E x = θ exactly, with second derivative 0, and the cumulants without
    the moving jump of s give another number."""
    from scipy.stats import laplace

    x = laplace.ppf((np.arange(4_000) + 0.5) / 4_000)
    f, s = x**2 - np.mean(x**2), np.sign(x)
    wrong = np.mean(f * s * s) - np.mean(f) * np.mean(s * s)
    assert abs(wrong - 2.0) > 1.0  # E x² = θ² + 2


def test_the_jackknife_needs_its_leave_one_out_sums():
    """Pseudo-values of sums about a common centre average to the ratio less its bias."""
    given = Reweighted(both, log_density, jnp.float32(AT), draws(shape=(8, 200)), ())
    sums, _ = weighted_sums.batch_sums(given, jnp.float32(0.6), 2, True, 1)
    exact = jax.tree.map(lambda leaf: np.asarray(leaf, float), sums)
    of_all = weighted_sums.Ratio.of(exact.all())
    direct = jax.hessian(lambda theta: given.mean(theta))(jnp.float32(0.6))
    np.testing.assert_allclose(of_all.second[0, 0, 0], direct, rtol=2e-3)
    pseudo = weighted_sums.pseudo_values(exact)
    assert np.all(np.abs(pseudo.value.mean(axis=0) - of_all.value[0]) < 0.02)
    without_cross = dataclasses.replace(exact, w_i=0 * exact.w_i)
    assert not np.allclose(
        weighted_sums.Ratio.of(without_cross.all()).second[0, 0, 0], direct, rtol=0.05
    )


def test_pareto_of_few_draws_is_unknown():
    assert pareto_k(np.arange(10.0)) == np.inf
    assert pareto_k(np.zeros(100)) == -np.inf
    assert reweighting.LEAST_SHARE == 0.05
