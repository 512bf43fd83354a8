"""Stein's control variates: the functions have the mean zero, the answers stay right, the variance
falls; and what would bias them is refused or seen.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import diffmh
from diffmh.estimators import stein
from diffmh.estimators.stein import Moments, Monomials
from diffmh.tools.draw_controls import monomials_for

UNCONSTRAINED = {"control": "stein", "unconstrained": True}
STEIN = diffmh.Covariance(**UNCONSTRAINED)


def log_normal(theta, x):
    return -0.5 * (x - theta) ** 2


def identity(theta, x):
    return x


# A skew density in two dimensions, and a grid that holds all but 1e-12 of it.
def log_skew(theta, x):
    a, b = x[..., 0], x[..., 1]
    return -0.5 * a**2 - 0.1 * a**4 - 0.5 * (b - jnp.sin(a) * theta) ** 2 - jnp.logaddexp(0.0, b)


AXIS = np.linspace(-8, 8, 321)
GRID = np.stack(np.meshgrid(AXIS, AXIS, indexing="ij"), -1).reshape(-1, 2)


@pytest.fixture(scope="module")
def on_grid():
    """The grid's probabilities and `∇ log g` there, in double precision."""
    with jax.enable_x64(True):
        log_g = np.asarray(log_skew(0.7, jnp.asarray(GRID)))
        slope = jax.vmap(jax.grad(lambda x: log_skew(0.7, x)))(jnp.asarray(GRID))
        weight = np.exp(log_g - log_g.max())
        return weight / weight.sum(), np.asarray(slope)


def test_every_function_has_the_mean_zero(on_grid):
    """All 9 monomials up to degree 3 in two dimensions, by quadrature."""
    weight, slope = on_grid
    monomials = Monomials.of(2, 100)
    assert len(monomials) == 9 and monomials.sizes == (2, 4, 5, 9)
    at = (GRID - [0.3, -1.0]) / [0.8, 1.3]
    u = monomials.evaluate(at.T, (slope * [0.8, 1.3]).T)
    size = np.sqrt((u**2) @ weight)
    np.testing.assert_allclose((u @ weight) / size, 0, atol=1e-9)


def test_functions_against_autodiff():
    """`Δφ + ∇φ · ∇ log g` by JAX's own derivatives."""
    monomials = Monomials.of(3, 100)
    x, slope = np.array([0.3, -1.2, 0.7]), np.array([1.1, 0.4, -0.6])
    with jax.enable_x64(True):
        for number, factors in enumerate(monomials.indices):
            phi = lambda x, factors=factors: math.prod(x[i] for i in factors if i < 3)
            point = jnp.asarray(x)
            exact = jnp.trace(jax.hessian(phi)(point)) + jax.grad(phi)(point) @ slope
            np.testing.assert_allclose(monomials.evaluate(x, slope)[number], exact, rtol=1e-12)


def test_a_constrained_coordinate_passed_as_unconstrained_is_seen():
    """The deliberate mistake: on a half-normal, φ = x has `E[U] = −√(2/π)`, and the answer is wrong
    by many standard errors. A density that says where it ends is refused.
    """
    x = np.abs(np.random.default_rng(0).normal(size=100_000))
    u = Monomials.of(1, 1).evaluate(x[None], -x[None])
    np.testing.assert_allclose(u.mean(), -0.797885, atol=5 * 0.603 / 100_000**0.5)
    draws = jnp.asarray(x[:20_000].reshape(4, -1), jnp.float32)
    # x ~ half-normal of scale θ: dE[x]/dθ = √(2/π).
    scaled = lambda theta, x: -0.5 * (x / theta) ** 2
    plain = diffmh.from_draws(identity, scaled, draws).run(1.0)
    wrong = diffmh.from_draws(identity, scaled, draws, **UNCONSTRAINED).run(1.0)
    assert abs(plain.gradient - 0.797885) < 5 * plain.gradient_error
    assert abs(wrong.gradient - 0.797885) > 20 * wrong.gradient_error
    with_end = lambda theta, x: jnp.where(x > 0, scaled(theta, x), -jnp.inf)
    with pytest.raises(diffmh.NotDifferentiable, match="continuous in x"):
        diffmh.from_draws(identity, with_end, draws, **UNCONSTRAINED).run(1.0)
    on_log = lambda theta, z: scaled(theta, jnp.exp(z)) + z
    right = diffmh.from_draws(lambda theta, z: jnp.exp(z), on_log, jnp.log(draws), **UNCONSTRAINED)
    right = right.run(1.0)
    assert abs(right.gradient - 0.797885) < 5 * right.gradient_error
    assert right.gradient_error < 0.5 * plain.gradient_error


def _fold_moments(u, y):
    """Of K folds of n draws: u (K, n, m), y (K, n, T)."""
    count = np.full(len(u), float(u.shape[1]))
    uu, uy = np.einsum("knm,knl->kml", u, u), np.einsum("knm,knt->kmt", u, y)
    return Moments(count, u.sum(axis=1), y.sum(axis=1), uu, uy, (y**2).sum(axis=1))


def test_coefficients_of_a_fold_do_not_depend_on_its_draws():
    rng = np.random.default_rng(0)
    u, y = rng.normal(size=(4, 50, 9)), rng.normal(size=(4, 50, 3))
    y = y + u[..., :3]
    before = stein.coefficients(_fold_moments(u, y), (2, 4, 5, 9))
    u[1], y[1] = rng.normal(size=(50, 9)), 100 * rng.normal(size=(50, 3))
    after = stein.coefficients(_fold_moments(u, y), (2, 4, 5, 9))
    np.testing.assert_allclose(after[1], before[1], rtol=1e-10)
    assert np.all(np.abs(after[0] - before[0]).max() > 1e-3)
    in_jax = stein.coefficients(jax.tree.map(jnp.asarray, _fold_moments(u, y)), (2, 4, 5, 9))
    np.testing.assert_allclose(in_jax, after, atol=2e-3)


def test_coefficients_from_the_same_fold_are_biased():
    """The deliberate mistake: y = u³ − 3u + u² is regressed on u and u² − 1 in 12 draws. With the
    other folds' coefficients the mean stays 1; with its own it moves by many standard errors.
    """
    rng = np.random.default_rng(1)
    own, others = [], []
    for _ in range(1_500):
        z = rng.normal(size=(4, 12))
        u = np.stack([z, z**2 - 1], axis=-1)
        y = (z**2 + 0.5 * z**4)[..., None]
        found = stein.coefficients(_fold_moments(u, y), (1, 2))
        others.append(np.mean(y[0, :, 0] - u[0] @ found[0, :, 0]))
        # Without an intercept, so that only what the fold says of itself enters.
        fitted = np.linalg.lstsq(np.c_[np.ones(12), u[0]], y[0, :, 0], rcond=None)[0]
        own.append(fitted[0])
    right = 1 + 0.5 * 3
    z_others, z_own = (
        (np.mean(each) - right) / (np.std(each) / 1_500**0.5) for each in (others, own)
    )
    assert abs(z_others) < 5 < abs(z_own)


def test_the_normal_mean_is_exact_from_any_draws():
    """d E[x]/dθ = 1 for N(θ, 1), to rounding, even from draws of another distribution."""
    good = 0.5 + jax.random.normal(jax.random.key(0), (4, 250))
    bad = 3 + jax.random.uniform(jax.random.key(1), (4, 250))
    for draws in (good, bad):
        report = diffmh.from_draws(identity, log_normal, draws, **UNCONSTRAINED).run(0.5)
        np.testing.assert_allclose(report.gradient, 1, atol=5e-6)
        np.testing.assert_allclose(report.value, 0.5, atol=5e-6)
        assert report.gradient_error < 1e-5


def test_unbiased_for_few_draws(on_grid):
    """200 answers from 400 draws each of a skew density: the mean is the exact derivative, the
    variance well below the plain one's, and the errors are as large as they say.
    """
    weight, _ = on_grid
    score = (GRID[:, 1] - np.sin(GRID[:, 0]) * 0.7) * np.sin(GRID[:, 0])
    f = GRID[:, 0] * GRID[:, 1]
    exact = np.sum(weight * f * score) - np.sum(weight * f) * np.sum(weight * score)
    rng = np.random.default_rng(2)
    draws = GRID[rng.choice(len(GRID), size=(200, 4, 100), p=weight)]
    draws = jnp.asarray(draws + rng.uniform(-0.025, 0.025, draws.shape), jnp.float32)
    product = lambda theta, x: x[0] * x[1]
    plain = [diffmh.from_draws(product, log_skew, some).run(0.7) for some in draws]
    found = [diffmh.from_draws(product, log_skew, some, **UNCONSTRAINED).run(0.7) for some in draws]
    errors = np.array([float(one.gradient) - exact for one in found])
    plain_errors = np.array([float(one.gradient) - exact for one in plain])
    assert abs(errors.mean()) < 5 * errors.std() / len(errors) ** 0.5
    assert errors.var() < plain_errors.var() / 1.5
    stated = np.array([float(one.gradient_error) for one in found])
    assert 0.8 < np.sqrt(np.mean(stated**2)) / errors.std() < 1.3


def test_labels_stay_out_of_it():
    """A mixture with a label and a real coordinate: x given label k is N(θ m_k, 1)."""
    means, odds = jnp.array([-1.0, 2.0]), jnp.array([0.3, 0.7])

    def log_density(theta, state):
        k = state["k"]
        return jnp.log(odds[k]) - 0.5 * (state["x"] - theta * means[k]) ** 2

    keys = jax.random.split(jax.random.key(3))
    k = jax.random.bernoulli(keys[0], 0.7, (4, 1_000)).astype(int)
    x = 0.8 * means[k] + jax.random.normal(keys[1], (4, 1_000))
    f = lambda theta, state: state["x"]
    made = {"k": k, "x": x}
    plain = diffmh.from_draws(f, log_density, made).run(0.8)
    report = diffmh.from_draws(f, log_density, made, **UNCONSTRAINED).run(0.8)
    assert abs(report.gradient - 1.1) < 5 * report.gradient_error
    assert report.gradient_error < 0.9 * plain.gradient_error
    with pytest.raises(ValueError, match="integers only"):
        label = lambda theta, k: theta * odds[k]
        diffmh.from_draws(lambda theta, k: 1.0 * k, label, k, **UNCONSTRAINED).run(0.8)


def test_functions_are_at_most_a_tenth_of_the_draws():
    sizes = [len(monomials_for(count, 10, None)) for count in (3_000, 2_800, 600, 150, 90)]
    assert sizes == [285, 65, 20, 10, 0]
    assert len(monomials_for(1_000_000, 3, None)) == 9, "by memory"
    draws = jnp.zeros((4, 25)).at[0].set(jnp.arange(25.0))
    with pytest.raises(ValueError, match=r"degree=3.*draws allow"):
        monomials_for(100, 3, 3)
    with pytest.raises(ValueError, match="unconstrained=True"):
        diffmh.from_draws(identity, log_normal, draws, control="stein")
    with pytest.raises(ValueError, match="0 to 3"):
        diffmh.from_draws(identity, log_normal, draws, degree=4, **UNCONSTRAINED)
    with pytest.raises(ValueError, match="control"):
        diffmh.from_draws(identity, log_normal, draws, degree=2)


@pytest.fixture(scope="module")
def chains():
    """Along chains of a walk on the skew density, with and without."""
    walk = diffmh.MetropolisHastings(log_skew, diffmh.GaussianWalk(1.2))
    length = {"init": jnp.array([0.0, -0.5]), "num_samples": 600, "burn_in": 50, "num_chains": 16}
    product = lambda theta, x: jnp.stack([x[0] * x[1], x[1]])

    def made(estimator):
        return diffmh.expectation(product, walk, estimator=estimator, **length)

    return made(diffmh.Covariance()), made(STEIN)


def test_along_chains(chains, on_grid):
    """Both derivatives against quadrature, with less variance than the plain covariance."""
    weight, _ = on_grid
    score = (GRID[:, 1] - np.sin(GRID[:, 0]) * 0.7) * np.sin(GRID[:, 0])
    f = np.stack([GRID[:, 0] * GRID[:, 1], GRID[:, 1]])
    exact = (f * score) @ weight - (f @ weight) * (score @ weight)
    plain, controlled = (one.run(0.7, jax.random.key(1)) for one in chains)
    assert np.all(np.abs(controlled.gradient - exact) < 5 * controlled.gradient_error)
    assert np.all(controlled.gradient_error < 0.8 * plain.gradient_error)
    np.testing.assert_array_equal(plain.value, controlled.value, "the primal is the same")


def test_gradient_and_run_agree(chains):
    _, controlled = chains
    key = jax.random.key(2)
    run, slope = controlled.run(0.7, key), jax.jacobian(controlled)(0.7, key)
    np.testing.assert_allclose(slope, run.gradient, rtol=1e-4)


@pytest.mark.thorough
def test_memory_does_not_grow_with_the_samples():
    walk = diffmh.MetropolisHastings(log_normal, diffmh.GaussianWalk(2.4))

    def carried(num_samples):
        options = {"init": 0.0, "num_samples": num_samples, "num_chains": 4}
        mean = diffmh.expectation(identity, walk, estimator=STEIN, **options)
        program = jax.jit(jax.grad(mean)).lower(0.5, jax.random.key(0)).compile()
        found = program.memory_analysis()
        assert found is not None
        return found.temp_size_in_bytes

    assert carried(100_000) < 1.2 * carried(10_000)


def test_refusals_along_chains():
    walk = diffmh.GaussianWalk(1.0)
    options = {"init": 0.5, "num_samples": 200, "num_chains": 4}

    def mean(density, estimator=STEIN, **more):
        kernel = diffmh.MetropolisHastings(density, walk)
        return diffmh.expectation(identity, kernel, estimator=estimator, **{**options, **more})

    with pytest.raises(ValueError, match="unconstrained=True"):
        mean(log_normal, diffmh.Covariance(control="stein"))(0.5, jax.random.key(0))
    with_end = lambda theta, x: jnp.where(x > 0, log_normal(theta, x), -jnp.inf)
    with pytest.raises(diffmh.NotDifferentiable, match="continuous in x"):
        mean(with_end)(0.5, jax.random.key(0))
    with pytest.raises(ValueError, match="control"):
        diffmh.Covariance(control="f")  # pyright: ignore
    # A mixture's label alone.
    from diffmh.models import mixture

    labels = diffmh.expectation(
        mixture.indicator, mixture.sampler(), init=0, num_samples=200, estimator=STEIN
    )
    with pytest.raises(ValueError, match="integers only"):
        labels(0.4, jax.random.key(0))


def test_a_posterior_declares_its_coordinates():
    import numpyro
    import numpyro.distributions as dist

    def model(y, scale):
        mean = numpyro.sample("mean", dist.Normal(0, scale))
        numpyro.sample("y", dist.Normal(mean, 1), obs=y)

    posterior = diffmh.from_numpyro(model, jnp.array([1.0, 2.0]), theta={"scale": 1.0})
    estimator = diffmh.Covariance(control="stein")
    mean = posterior.expectation(
        lambda theta, sites: sites["mean"], num_samples=300, burn_in=20, estimator=estimator
    )
    slope = jax.grad(mean)(posterior.theta, jax.random.key(0))["scale"]
    np.testing.assert_allclose(slope, 2 / 3, atol=1e-4)
