"""evidence: gradient and Hessian of a log normaliser; Newton's steps on it."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import diffmh

KEY = jax.random.key(0)
# Empirical Bayes: y_i ~ N(x_i, 1), x_i ~ N(0, τ²), θ = log τ.
Y = jnp.array([1.2, -2.3, 0.4, 3.1, -0.7, 2.2, -1.9, 0.3])
PATH = (0.0, 0.595625, 0.392226, 0.392236)
GRADIENT, HESSIAN, MISSING = 2.3825, -4.0, 16.765


def log_joint(log_tau, x):
    return jnp.sum(-0.5 * (x / jnp.exp(log_tau)) ** 2 - log_tau - 0.5 * (Y - x) ** 2)


def log_evidence(log_tau):
    variance = 1 + jnp.exp(2 * log_tau)
    return -0.5 * jnp.sum(jnp.log(variance) + Y**2 / variance)


def posterior_draws(log_tau, key, shape=(4, 4_000)):
    shrunk = 1 / (1 + jnp.exp(-2 * log_tau))
    return shrunk * Y + jnp.sqrt(shrunk) * jax.random.normal(key, (*shape, 8))


def test_the_closed_form_has_the_numbers_of_the_path():
    """Newton's path of §17, by the closed form itself."""
    with jax.enable_x64(True):
        theta = jnp.float64(0.0)
        for wanted in PATH:
            assert float(theta) == pytest.approx(wanted, abs=1e-6)
            theta = theta - jax.grad(log_evidence)(theta) / jax.hessian(log_evidence)(theta)


def test_draws_give_gradient_hessian_and_missing_information():
    found = diffmh.evidence(log_joint, posterior_draws(0.0, KEY)).run(0.0)
    assert abs(found.gradient - GRADIENT) < 5 * found.gradient_error
    assert abs(found.hessian - HESSIAN) < 5 * found.hessian_error
    assert abs(found.score_covariance - MISSING) < 5 * found.score_covariance_error
    # The missing information is not the observed one: taking one for the other is seen.
    assert abs(-found.score_covariance - found.hessian) > 20 * found.hessian_error
    gradient, hessian = found.interval(0.9999)
    assert gradient[0] < GRADIENT < gradient[1] and hessian[0] < HESSIAN < hessian[1]
    assert "Cov(s)" in str(found) and "EvidenceReport" in repr(found)


def test_a_newton_step_by_draws_near_where_they_were_made():
    """Draws at 0.3 as a function of θ: gradient and Hessian at 0.4."""
    e = diffmh.evidence(log_joint, posterior_draws(0.3, KEY), at=0.3)
    found = e(0.4)
    report = e.run(0.4)
    wanted = jax.grad(log_evidence)(0.4), jax.hessian(log_evidence)(0.4)
    assert abs(report.gradient - wanted[0]) < 5 * report.gradient_error
    assert abs(report.hessian - wanted[1]) < 5 * report.hessian_error
    np.testing.assert_allclose(found.gradient, report.gradient, atol=0.05)
    np.testing.assert_allclose(found.hessian, report.hessian, atol=0.2)


@pytest.fixture(scope="module")
def of_chains():
    """A prior with a mean too, θ = {log τ, m}."""

    def log_density(theta, x):
        scaled = (x - theta["m"]) / jnp.exp(theta["log_tau"])
        return jnp.sum(-0.5 * scaled**2 - theta["log_tau"] - 0.5 * (Y - x) ** 2)

    kernel = diffmh.MetropolisHastings(log_density, diffmh.GaussianWalk(0.8))
    return diffmh.evidence(
        log_density, kernel, init=Y / 2, num_samples=1_000, burn_in=100, num_chains=64
    )


def of_two(theta):
    variance = 1 + jnp.exp(2 * theta["log_tau"])
    return -0.5 * jnp.sum(jnp.log(variance) + (Y - theta["m"]) ** 2 / variance)


def z_scores(found, error, wanted):
    z = jax.tree.map(lambda a, e, b: (a - b) / e, found, error, wanted)
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(z)])


def test_chains_give_what_draws_do(of_chains):
    theta = {"log_tau": jnp.float32(0.0), "m": jnp.float32(0.5)}
    report = of_chains.run(theta, KEY)
    gradient, hessian = jax.grad(of_two)(theta), jax.hessian(of_two)(theta)
    assert jax.tree.structure(report.hessian) == jax.tree.structure(hessian)
    assert np.all(np.abs(z_scores(report.gradient, report.gradient_error, gradient)) < 5)
    assert np.all(np.abs(z_scores(report.hessian, report.hessian_error, hessian)) < 5)
    found = of_chains(theta, KEY)
    for a, b in zip(jax.tree.leaves(found.hessian), jax.tree.leaves(report.hessian), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-2)


def test_an_adapted_kernel_goes_on_from_its_states():
    kernel = diffmh.MetropolisHastings(log_joint, diffmh.GaussianWalk(0.8))
    length = dict(num_samples=5, num_chains=4)
    adapted = diffmh.Adapted(kernel, jnp.stack([Y / 2] * 4))
    found = diffmh.evidence(log_joint, adapted, **length)(0.0, KEY)
    wanted = diffmh.evidence(log_joint, kernel, init=Y / 2, **length)(0.0, KEY)
    np.testing.assert_allclose(found.gradient, wanted.gradient, rtol=1e-5)
    np.testing.assert_allclose(found.hessian, wanted.hessian, rtol=1e-4)


def test_newton_reaches_the_optimum_and_reuses_draws(of_chains):
    theta = {"log_tau": jnp.float32(0.0), "m": jnp.float32(0.5)}
    steps = {"newton": True, "num_iterations": 6, "maximise": True}
    exact = theta
    for _ in range(8):
        gradient, hessian = jax.grad(of_two)(exact), jax.hessian(of_two)(exact)
        matrix = np.array([[hessian[a][b] for b in exact] for a in exact])
        step = np.linalg.solve(matrix, np.array([gradient[a] for a in exact]))
        exact = {name: exact[name] - change for name, change in zip(exact, step, strict=True)}
    curvature = np.diag(matrix)
    plain = diffmh.optimise(of_chains, theta, KEY, **steps)
    reused = diffmh.optimise(of_chains, theta, KEY, reuse=0.5, **steps)
    for path in (plain, reused):
        for number, name in enumerate(exact):
            error = abs(path.gradient_error[name][-1] / curvature[number])
            assert abs(path.last[name] - exact[name]) < 5 * error + 0.01
    assert np.all(plain.sampled) and reused.sampled.sum() <= 2
    assert np.all(np.isnan(plain.value))


def test_newton_needs_a_positive_definite_information(of_chains):
    """Downhill there is no optimum, and from far away the evidence is convex."""
    theta = {"log_tau": jnp.float32(0.0), "m": jnp.float32(0.5)}
    with pytest.raises(FloatingPointError, match="not positive definite"):
        diffmh.optimise(of_chains, theta, KEY, newton=True, num_iterations=2)


# Labels: a mixture of two normals with known means, whose weight is the prior's parameter.
DATA = jnp.array([-1.9, -1.2, 2.2, 1.1, -0.4, 2.8, 1.7])


def labelled(theta, x):
    odds = jax.nn.log_softmax(jnp.stack([jnp.zeros(()), theta]))
    return jnp.sum(odds[x] - 0.5 * (DATA - jnp.array([-1.5, 1.5])[x]) ** 2)


def log_evidence_of_labels(theta):
    odds = jax.nn.log_softmax(jnp.stack([jnp.zeros(()), theta]))
    each = odds - 0.5 * (DATA[:, None] - jnp.array([-1.5, 1.5])) ** 2
    return jnp.sum(jax.nn.logsumexp(each, axis=1))


def test_discrete_latents():
    """All 2⁷ labellings, each as often as its weight says, against the closed form."""
    every = np.array(list(itertools.product([0, 1], repeat=7)))
    log_g = jax.vmap(lambda x: labelled(0.3, x))(jnp.asarray(every))
    assert jax.nn.logsumexp(log_g) == pytest.approx(float(log_evidence_of_labels(0.3)), abs=1e-4)
    p = np.asarray(jax.nn.softmax(log_g), float)
    chosen = every[np.random.default_rng(0).choice(len(p), p=p / p.sum(), size=(4, 4_000))]
    found = diffmh.evidence(labelled, jnp.asarray(chosen)).run(0.3)
    wanted = jax.grad(log_evidence_of_labels)(0.3), jax.hessian(log_evidence_of_labels)(0.3)
    assert abs(found.gradient - wanted[0]) < 5 * found.gradient_error
    assert abs(found.hessian - wanted[1]) < 5 * found.hessian_error


# An energy model: three spins, θ their fields and one coupling.
SPINS = np.array(list(itertools.product([-1.0, 1.0], repeat=3)), np.float32)


def log_energy(theta, x, *data):
    x = x.astype(float)
    return theta[0] * x[0] + theta[1] * x[1] * x[2]


def observed(theta, data):
    return jnp.mean(jax.vmap(lambda x: log_energy(theta, x))(data))


def test_the_likelihood_of_an_energy_model_is_one_call():
    """Maximum likelihood by Newton's and by natural gradients: an exponential family, in which both
    are the same step.
    """
    theta = jnp.array([0.2, -0.1])
    data = jnp.asarray(SPINS[[0, 1, 3, 3, 7, 6, 7, 4]])

    def likelihood(theta):
        every = jax.vmap(lambda x: log_energy(theta, x))(jnp.asarray(SPINS))
        return observed(theta, data) - jax.nn.logsumexp(every)

    kernel = diffmh.MetropolisHastings(log_energy, diffmh.SpinFlip())
    e = diffmh.evidence(
        log_energy,
        kernel,
        init=jnp.ones(3, jnp.int32),
        num_samples=2_000,
        burn_in=50,
        num_chains=32,
        observed=observed,
    )
    report = e.run(theta, KEY, data)
    wanted = jax.grad(likelihood)(theta), jax.hessian(likelihood)(theta)
    assert np.all(np.abs(report.gradient - wanted[0]) < 5 * report.gradient_error)
    assert np.all(np.abs(report.hessian - wanted[1]) < 5 * report.hessian_error)
    gradient, hessian = report.interval(0.9999)
    assert np.all(gradient[:, 0] < wanted[0]) and np.all(wanted[0] < gradient[:, 1])
    assert np.all(hessian[..., 0] < hessian[..., 1])
    best = theta
    for _ in range(20):
        best = best - jnp.linalg.solve(jax.hessian(likelihood)(best), jax.grad(likelihood)(best))
    for newton in (True, "natural"):
        path = diffmh.optimise(
            e, theta, KEY, data, newton=newton, num_iterations=5, maximise=True, reuse=0.3
        )
        np.testing.assert_allclose(path.last, best, atol=0.05)


@pytest.mark.parametrize(
    ("line", "kind", "words"),
    [
        (lambda e: diffmh.evidence(log_joint, "draws"), FileNotFoundError, "nothing at"),
        (
            lambda e: diffmh.evidence(log_joint, posterior_draws(0.0, KEY), init=0),
            TypeError,
            "init",
        ),
        (lambda e: diffmh.evidence(log_joint, walk(), at=0.0), ValueError, "`at` is for draws"),
        (lambda e: diffmh.evidence(log_joint, walk()), TypeError, "num_samples"),
        (
            lambda e: diffmh.evidence(lambda t, x: log_joint(t, x), walk(), init=Y, num_samples=5),
            ValueError,
            "the function that the kernel was made with",
        ),
        (
            lambda e: diffmh.optimise(e, 0.0, KEY, newton="natural", num_iterations=1),
            ValueError,
            "missing.*newton=True",
        ),
        (lambda e: diffmh.optimise(e, 0.0, KEY, newton=2, num_iterations=1), ValueError, "newton"),
        (
            lambda e: diffmh.optimise(e, 0.0, KEY, newton=True, num_iterations=1),
            TypeError,
            "kernel",
        ),
        (
            lambda e: diffmh.optimise(lambda t, k: t**2, 0.0, KEY, newton=True, num_iterations=1),
            TypeError,
            "evidence",
        ),
        (
            lambda e: jax.grad(lambda t: e(t).gradient)(0.0),
            diffmh.NotDifferentiable,
            "cannot be differentiated further",
        ),
    ],
)
def test_refusals(line, kind, words):
    e = diffmh.evidence(log_joint, posterior_draws(0.0, KEY, (4, 100)))
    with pytest.raises(kind, match=words):
        line(e)


def walk():
    return diffmh.MetropolisHastings(log_joint, diffmh.GaussianWalk(0.6))


def test_a_line_search_has_no_values(of_chains):
    theta = {"log_tau": jnp.float32(0.0), "m": jnp.float32(0.5)}
    steps = {"optimizer": optax.lbfgs(), "num_iterations": 1, "maximise": True}
    with pytest.raises(TypeError, match="line search"):
        diffmh.optimise(of_chains, theta, KEY, **steps)


def test_a_score_that_jumps_is_refused():
    x = jax.random.normal(KEY, (4, 100))
    with pytest.raises(diffmh.NotDifferentiable, match="jump"):
        diffmh.evidence(lambda t, x: -jnp.abs(x - t), x).run(0.5)
