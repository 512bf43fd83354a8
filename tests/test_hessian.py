"""Second derivatives at equilibrium: by chains, and from draws."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import ising_configurations, ising_energy
from unbiasedness import assert_unbiased, is_caught

import diffmh
from diffmh.estimators import covariance_hessian
from diffmh.models import ising, mixture

KEY = jax.random.key(0)
MIXTURE = np.array([0.0065333, -0.0125026, 0.0059693])
ISING = {3.0: -2.713884, 2.0: 4.946992}


@pytest.fixture(scope="module")
def occupancy():
    return diffmh.expectation(
        mixture.indicator,
        mixture.sampler(),
        init=0,
        num_samples=100,
        burn_in=30,
        num_chains=4_000,
        estimator=diffmh.Covariance(),
    )


@pytest.fixture(scope="module")
def contributions(occupancy):
    """Each chain's contribution to the second derivative at h = 0.4, and the averages that it
    comes from.
    """
    second = occupancy.simulation.estimator.second_order()
    observed = occupancy.by(second).run_chains(0.4, KEY).outcomes[0].observed
    return second, observed


def in_threes(observed, second, function):
    """`function` of groups of three chains: the fewest that there may be, where bias is largest."""
    groups = lambda leaf: jnp.moveaxis(leaf[..., :3_999].reshape(*leaf.shape[:-1], 3, -1), -1, 0)
    means, value = jax.tree.map(groups, (observed.estimator, observed.value))
    return np.asarray(jax.vmap(function)(means, value))


def test_unbiased_with_three_short_chains(contributions):
    """Groups of three chains of 100 steps: 1,333 of them, each with its own second derivative."""
    second, observed = contributions
    found = in_threes(observed, second, second.second_derivative)[:, 0, 0].mean(axis=-1)
    z = (found.mean(axis=0) - MIXTURE) / (found.std(axis=0, ddof=1) / len(found) ** 0.5)
    assert np.all(np.abs(z) < 5), z


@pytest.mark.parametrize("mistake", ["pairs", "triples", "no corrections"])
def test_mistakes_are_caught(contributions, mistake, monkeypatch):
    """Products of a chain's own means, and a third moment for a third cumulant."""
    second, observed = contributions
    if mistake == "pairs":
        monkeypatch.setattr(covariance_hessian, "in_pairs", lambda a, b: a * b)
    elif mistake == "triples":
        monkeypatch.setattr(covariance_hessian, "in_triples", lambda a, b, c: 0 * a * b * c)
        # About another centre than the mean, where the triple product matters.
        monkeypatch.setattr(
            covariance_hessian.CovarianceHessian, "_about_the_mean", lambda self, means: means
        )
    else:
        monkeypatch.setattr(covariance_hessian, "in_pairs", lambda a, b: 0 * a * b)
        monkeypatch.setattr(
            covariance_hessian.CovarianceHessian, "_about_the_mean", lambda self, means: means
        )
    found = in_threes(observed, second, second.second_derivative)[:, 0, 0].mean(axis=-1)
    z = (found.mean(axis=0) - MIXTURE) / (found.std(axis=0, ddof=1) / len(found) ** 0.5)
    assert np.any(np.abs(z) > 5), z


def test_each_chain_of_many(contributions):
    second, observed = contributions
    found = second.second_derivative(observed.estimator, observed.value)[0, 0].T
    assert_unbiased(found, MIXTURE, "κ₃ of the mixture")
    first = second.derivative(observed.estimator, observed.value)[0].T
    assert_unbiased(first, np.array([-0.079093, 0.022615, 0.056478]), "its covariance")
    assert is_caught(found, MIXTURE + 0.001)


@pytest.mark.parametrize(
    "estimator",
    [
        diffmh.Stationary(),
        pytest.param(diffmh.Stationary(2, alternatives=0), marks=pytest.mark.thorough),
    ],
)
def test_pairs_have_it_from_any_start(estimator):
    """Five samples from the first component on, where chains by `Covariance()` are biased."""
    mean = diffmh.expectation(
        mixture.indicator,
        mixture.sampler(),
        init=0,
        num_samples=5,
        num_chains=8_192,
        estimator=estimator,
    )
    report = diffmh.hessian(mean).run(0.4, KEY)
    assert np.all(np.abs((report.hessian - MIXTURE) / report.hessian_error) < 5), report
    assert report.report.meeting_time.num_unmet == 0
    whole = jax.hessian(mean)(0.4, KEY)
    np.testing.assert_allclose(report.hessian, whole, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(report.gradient, jax.jacobian(mean)(0.4, KEY), rtol=1e-3, atol=1e-5)
    product = diffmh.hessian(mean).product(0.4, KEY, direction=2.0)
    np.testing.assert_allclose(product, 2 * whole, rtol=1e-3, atol=1e-6)
    if estimator.alternatives is None:
        biased = mean.by(diffmh.Covariance())
        report = diffmh.hessian(biased).run(0.4, KEY)
        assert np.any(np.abs((report.hessian - MIXTURE) / report.hessian_error) > 5)


def test_pairs_have_it_where_f_depends_on_theta_too(of_two):
    """Far from equilibrium, with two parameters."""
    s = of_two.simulation
    mean = diffmh.expectation(
        s.f,
        s.kernel,
        init=3.0,
        num_samples=30,
        burn_in=5,
        num_chains=4_096,
        estimator=diffmh.Stationary(alternatives=0),
    )
    report, wanted = diffmh.hessian(mean).run(THETA, KEY), jax.hessian(exact)(THETA)
    z = jax.tree.map(
        lambda found, error, exact: (found - exact) / error,
        report.hessian,
        report.hessian_error,
        wanted,
    )
    assert all(np.all(np.abs(leaf) < 5) for leaf in jax.tree.leaves(z)), z


def test_jax_hessian_and_report_agree(occupancy):
    h = diffmh.hessian(occupancy)
    by_jax = jax.hessian(occupancy)(0.4, KEY)
    report = h.run(0.4, KEY)
    np.testing.assert_allclose(h(0.4, KEY), by_jax, rtol=1e-5)
    np.testing.assert_allclose(report.hessian, by_jax, rtol=1e-4)
    z = (report.hessian - MIXTURE) / report.hessian_error
    assert np.all(np.abs(z) < 5)
    np.testing.assert_allclose(report.gradient, jax.jacobian(occupancy)(0.4, KEY), rtol=1e-3)
    low, high = np.moveaxis(np.asarray(report.interval(0.9999)), -1, 0)
    assert np.all(low < MIXTURE) and np.all(high > MIXTURE)
    assert "hessian" in str(report) and "HessianReport" in repr(report)
    np.testing.assert_allclose(h.product(0.4, KEY, direction=2.0), 2 * by_jax, rtol=1e-4)
    with pytest.raises(diffmh.NotDifferentiable, match="third"):
        jax.grad(lambda t: h(t, KEY)[0])(0.4)
    with pytest.raises(diffmh.NotDifferentiable, match="third"):
        jax.jacfwd(jax.hessian(occupancy))(0.4, KEY)


# x ~ N(m, e^{2l}): two parameters, of which f has both.
def log_normal(theta, x):
    return -0.5 * ((x - theta["m"]) / jnp.exp(theta["l"])) ** 2


def quantities(theta, x):
    return {"a": x**2 * theta["m"], "b": jnp.stack([x**3, jnp.exp(theta["l"]) * x])}


def exact(theta):
    m, v = theta["m"], jnp.exp(2 * theta["l"])
    return {"a": (m**2 + v) * m, "b": jnp.stack([m**3 + 3 * m * v, jnp.exp(theta["l"]) * m])}


THETA = {"m": jnp.float32(0.5), "l": jnp.float32(0.1)}


@pytest.fixture(scope="module")
def of_two():
    kernel = diffmh.MetropolisHastings(log_normal, diffmh.GaussianWalk(2.5))
    return diffmh.expectation(
        quantities,
        kernel,
        init=lambda key: 0.5 + jax.random.normal(key),
        num_samples=200,
        burn_in=30,
        num_chains=2_048,
        estimator=diffmh.Covariance(),
    )


def test_two_parameters_that_f_depends_on_too(of_two):
    report = diffmh.hessian(of_two).run(THETA, KEY)
    wanted = jax.hessian(exact)(THETA)
    z = jax.tree.map(
        lambda found, error, exact: (found - exact) / error,
        report.hessian,
        report.hessian_error,
        wanted,
    )
    assert jax.tree.structure(report.hessian) == jax.tree.structure(wanted)
    assert all(np.all(np.abs(leaf) < 5) for leaf in jax.tree.leaves(z)), z
    # Symmetric, and of the form of `jax.hessian`.
    np.testing.assert_allclose(
        report.hessian["b"]["m"]["l"], report.hessian["b"]["l"]["m"], rtol=1e-3, atol=1e-3
    )
    direction = {"m": jnp.float32(1.0), "l": jnp.float32(-2.0)}
    product = diffmh.hessian(of_two).product(THETA, KEY, direction=direction)
    whole = report.hessian
    for name in ("a", "b"):
        for row in ("m", "l"):
            expected = whole[name][row]["m"] - 2 * whole[name][row]["l"]
            np.testing.assert_allclose(product[name][row], expected, rtol=2e-2, atol=2e-2)


def test_memory_does_not_grow_with_the_samples():
    def temporary(num_samples):
        e = diffmh.expectation(
            mixture.indicator,
            mixture.sampler(),
            init=0,
            num_samples=num_samples,
            num_chains=4,
            estimator=diffmh.Covariance(),
        )
        compiled = jax.jit(jax.hessian(e)).lower(jnp.float32(0.4), KEY).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(100_000) <= temporary(1_000) + 4_096


@pytest.mark.parametrize("temperature", [3.0, 2.0])
def test_ising_by_enumeration(temperature):
    """3×3: every configuration as often as its weight says is all draws there are, so that the
    formula is exact; and d²E/dT² of 20,000 of them, sampled.
    """
    spins = ising_configurations(3)
    energy = np.array([ising_energy(each) for each in spins], float)
    weight = np.exp(-(energy - energy.min()) / temperature)
    probability = weight / weight.sum()
    log_density = lambda t, x: -x / t
    chosen = np.random.default_rng(0).choice(energy, p=probability, size=(4, 5_000))
    e = diffmh.from_draws(lambda t, x: x, log_density, jnp.asarray(chosen, jnp.float32))
    report = diffmh.hessian(e).run(temperature)
    z = (report.hessian - ISING[temperature]) / report.hessian_error
    assert abs(z) < 5, report
    # The cumulants themselves, over all 512 configurations.
    f, s = energy - probability @ energy, energy / temperature**2
    s = s - probability @ s
    curvature = -2 * energy / temperature**3
    second = probability @ (f * s * s) + probability @ (f * curvature)
    assert second == pytest.approx(ISING[temperature], abs=1e-5)


def test_ising_by_chains():
    mean = diffmh.expectation(
        ising.energy,
        ising.sequential(3),
        init=jnp.ones((3, 3), jnp.int8),
        num_samples=60,
        burn_in=30,
        num_chains=2_048,
        estimator=diffmh.Covariance(),
    )
    report = diffmh.hessian(mean).run(3.0, KEY)
    assert abs(report.hessian - ISING[3.0]) < 5 * report.hessian_error, report


@pytest.mark.thorough
def test_ising_of_144_sites():
    """Kaufman's d²E/dT² at T = 3, from the cold start on."""
    exact = ising.exact(12, 3.0).heat_capacity_slope
    assert exact == pytest.approx(-80.36194592)
    mean = diffmh.expectation(
        ising.energy,
        ising.sampler(),
        init=ising.cold(12),
        num_samples=400,
        burn_in=60,
        num_chains=512,
        estimator=diffmh.Covariance(),
    )
    report = diffmh.hessian(mean).run(3.0, KEY)
    assert report.hessian_error < 3
    assert abs(report.hessian - exact) < 5 * report.hessian_error, report


def test_errors_from_draws_cover():
    """z-scores of 100 runs with autocorrelated draws; an error that took them for independent would
    be twice too small.
    """
    from test_draws import MEAN, PRIOR, SLOPE, THETA, VARIANCE, autoregressive, log_density

    z = []
    for x in autoregressive(100, 0.6):
        report = diffmh.hessian(diffmh.from_draws(cubes, log_density, x)).run(THETA)
        # E x² = m² + v, E x³ = m³ + 3 m v, m linear in θ.
        wanted = np.array([2 * SLOPE**2, 6 * MEAN * SLOPE**2])
        z.append((report.hessian - wanted) / report.hessian_error)
    z = np.array(z)
    assert np.all(np.abs(z.mean(axis=0)) < 5 * 1.2 / 10), z.mean(axis=0)
    assert np.all((z.std(axis=0) > 0.75) & (z.std(axis=0) < 1.4)), z.std(axis=0)
    assert PRIOR > 0 and VARIANCE > 0


def cubes(theta, x):
    return jnp.stack([x**2, x**3])


@pytest.mark.thorough
def test_intervals_of_chains_cover():
    """95 % intervals of 400 runs of 16 chains."""
    mean = diffmh.expectation(
        mixture.indicator,
        mixture.sampler(),
        init=0,
        num_samples=200,
        burn_in=30,
        num_chains=16,
        estimator=diffmh.Covariance(),
    )
    h = diffmh.hessian(mean)
    held = []
    for seed in range(400):
        low, high = np.moveaxis(np.asarray(h.run(0.4, jax.random.key(seed)).interval()), -1, 0)
        held.append((low < MIXTURE) & (high > MIXTURE))
    assert 0.92 < np.mean(held) < 0.975, np.mean(held)


@pytest.mark.parametrize(
    ("line", "kind", "words"),
    [
        (lambda: diffmh.hessian(3.0), TypeError, "takes what"),
        (lambda: diffmh.hessian(walk()), ValueError, "has no second derivative.*Covariance"),
        (
            lambda: diffmh.hessian(walk(estimator=diffmh.Covariance(), num_chains=2)),
            ValueError,
            "three different chains",
        ),
        (
            lambda: diffmh.hessian(of_steps()),
            ValueError,
            "has second derivatives where the covariance applies.*lag=1",
        ),
        (lambda: jax.hessian(of_steps())(0.5, KEY), diffmh.NotDifferentiable, "Stationary"),
        (
            lambda: jax.hessian(walk(estimator=diffmh.Covariance(), num_chains=2))(0.5, KEY),
            ValueError,
            "three different chains",
        ),
        (
            lambda: diffmh.hessian(walk(estimator=diffmh.Covariance())).product(
                0.5, KEY, direction=jnp.ones(2)
            ),
            TypeError,
            "form of theta",
        ),
        (lambda: jax.hessian(walk())(0.5, KEY), diffmh.NotDifferentiable, "diffmh.hessian"),
    ],
)
def test_refusals(line, kind, words):
    with pytest.raises(kind, match=words):
        line()


def walk(density=lambda t, x: -0.5 * (x - t) ** 2, **options):
    kernel = diffmh.MetropolisHastings(density, diffmh.GaussianWalk(2.0))
    options = {"init": 0.0, "num_samples": 10, "num_chains": 4} | options
    return diffmh.expectation(lambda t, x: x, kernel, **options)


def of_steps():
    kernel = diffmh.MetropolisHastings(lambda t, x: -0.5 * (x - t) ** 2, diffmh.GaussianWalk(2.0))
    return diffmh.expectation(
        lambda t, earlier, x: earlier * x,
        kernel,
        init=0.0,
        num_samples=5,
        lag=1,
        estimator=diffmh.Stationary(),
    )


def test_a_moving_kink_has_no_second_derivative():
    e = walk(lambda t, x: -jnp.abs(x - t), estimator=diffmh.Covariance())
    assert np.isfinite(jax.grad(e)(0.5, KEY))
    for line in (
        lambda: jax.hessian(e)(0.5, KEY),
        lambda: diffmh.hessian(e).run(0.5, KEY),
        lambda: diffmh.hessian(e).product(0.5, KEY, direction=1.0),
    ):
        with pytest.raises(diffmh.NotDifferentiable, match="order 2 would be wrong"):
            line()
    x = jax.random.normal(KEY, (4, 100))
    draws = diffmh.from_draws(lambda t, x: x, lambda t, x: -jnp.abs(x - t), x)
    with pytest.raises(diffmh.NotDifferentiable, match="order 2 would be wrong"):
        diffmh.hessian(draws).run(0.5)


def test_a_hessian_of_draws_needs_no_at():
    x = 0.5 + jax.random.normal(KEY, (4, 500))
    plain = diffmh.from_draws(cubes, lambda t, x: -0.5 * (x - t) ** 2, x)
    located = diffmh.from_draws(cubes, lambda t, x: -0.5 * (x - t) ** 2, x, at=0.5)
    np.testing.assert_allclose(
        diffmh.hessian(plain)(0.5), jax.hessian(located)(jnp.float32(0.5)), rtol=1e-4
    )
    np.testing.assert_allclose(
        diffmh.hessian(plain).product(0.5, direction=3.0),
        3 * diffmh.hessian(located)(0.5),
        rtol=1e-4,
    )
