"""optimise(reuse=...): draws that serve several steps."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import diffmh
from diffmh.models import mixture
from diffmh.tools.reuse import Reused

KEY = jax.random.key(0)


def entropy(estimator=None, **options):
    options = {"num_samples": 1_000, "burn_in": 30, "num_chains": 16} | options
    p = diffmh.expectation(
        mixture.indicator, mixture.sampler(), init=0, estimator=estimator, **options
    )
    return p, diffmh.compose(lambda h, p: mixture.entropy(p), p)


def exact_entropy(h):
    return mixture.entropy(mixture.posterior(h))


@pytest.fixture(scope="module")
def objective():
    return entropy(diffmh.Covariance())


@pytest.fixture(scope="module")
def path(objective):
    return diffmh.optimise(objective[1], 8.0, KEY, **STEPS, reuse=0.5)


STEPS = {"optimizer": optax.adam(0.1), "num_iterations": 130, "maximise": True}


def test_the_paper_s_ascent_with_a_third_of_the_steps(path):
    """Within two errors of the exact peak, the error of the end being that of the gradient over the
    curvature there.
    """
    peak = 1.0
    for _ in range(20):
        peak = peak - jax.grad(exact_entropy)(peak) / jax.hessian(exact_entropy)(peak)
    error = path.gradient_error[-1] / abs(jax.hessian(exact_entropy)(peak))
    assert abs(path.last - peak) < 2 * error
    assert 1 < path.sampled.sum() <= 130 // 3
    assert path.sampled[0]


def test_values_on_the_way_have_errors_that_hold(path):
    """Where the draws are reweighted as where they are new."""
    z = (path.value - jax.vmap(exact_entropy)(path.theta)) / path.value_error
    assert np.all(np.abs(z) < 5)
    slope = jax.vmap(jax.grad(exact_entropy))(path.theta)
    assert np.all(np.abs((path.gradient - slope) / path.gradient_error) < 5)


def test_at_theta0_it_is_the_covariance(objective):
    """Equal weights: the same values, chain by chain, and the same derivative as `Covariance()`."""
    p, _ = objective
    tree = diffmh.sample(
        mixture.sampler(), 2.0, KEY, init=0, num_samples=1_000, burn_in=30, num_chains=16
    )
    x = jnp.asarray(np.asarray(tree.posterior["x"]))
    reused = Reused(p.simulation, jnp.float32(2.0), x)
    np.testing.assert_allclose(
        reused.per_chain(jnp.float32(2.0), KEY), p.per_chain(2.0, KEY), atol=1e-4
    )
    np.testing.assert_allclose(
        jax.jacobian(lambda h: reused(h, KEY))(jnp.float32(2.0)),
        jax.jacobian(p)(2.0, KEY),
        atol=1e-4,
    )


def test_a_resumed_ascent_makes_its_draws_again(objective, tmp_path):
    steps = STEPS | {"num_iterations": 12}
    whole = diffmh.optimise(objective[1], 6.0, KEY, **steps, reuse=0.5)
    part = steps | {"num_iterations": 7}
    diffmh.optimise(objective[1], 6.0, KEY, **part, reuse=0.5, checkpoint=tmp_path)
    resumed = diffmh.optimise(objective[1], 6.0, KEY, **steps, reuse=0.5, checkpoint=tmp_path)
    np.testing.assert_array_equal(whole.theta, resumed.theta)
    np.testing.assert_array_equal(whole.sampled, resumed.sampled)
    with pytest.raises(ValueError, match="reuse"):
        diffmh.optimise(objective[1], 6.0, KEY, **steps, reuse=0.4, checkpoint=tmp_path)


@pytest.mark.parametrize(
    ("line", "kind", "words"),
    [
        (lambda: run(entropy()[1], reuse=0.5), ValueError, "estimator=diffmh.Covariance"),
        (lambda: run(lambda h, key: h**2, reuse=0.5), TypeError, "reuse"),
        (lambda: run(entropy(diffmh.Covariance())[1], reuse=1.5), ValueError, "reuse"),
        (lambda: run(of_one_chain(), reuse=0.5), ValueError, "reuse.*`num_chains` of at least 2"),
    ],
)
def test_refusals(line, kind, words):
    with pytest.raises(kind, match=words):
        line()


def normal(theta, x):
    return -0.5 * (x - theta) ** 2


def below(theta, x):
    return jnp.where(x < theta, 0.0, -jnp.inf) - 0.5 * x**2


WALK = diffmh.GaussianWalk(1.0)


def heated(stage):
    beta = jnp.array([0.3, 1.0])[stage]
    return diffmh.MetropolisHastings(lambda theta, x: beta * normal(theta, x), WALK)


@pytest.mark.parametrize(
    ("kernel", "f", "kind", "words"),
    [
        (diffmh.Schedule(heated, 2, 1), None, ValueError, r"`Covariance\(\)` needs one density"),
        (
            diffmh.MetropolisHastings(normal, lambda theta: diffmh.GaussianWalk(theta)),
            None,
            ValueError,
            "parameters of the proposal",
        ),
        (
            diffmh.MetropolisHastings(below, WALK),
            None,
            diffmh.NotDifferentiable,
            "`log_density` jumps",
        ),
        (
            diffmh.MetropolisHastings(normal, WALK),
            lambda theta, x: jnp.where(x < theta, 1.0, 0.0),
            diffmh.NotDifferentiable,
            "`f` jumps",
        ),
    ],
    ids=["annealing", "proposal", "density", "f"],
)
def test_what_has_no_covariance_is_refused_with_draws_too(kernel, f, kind, words):
    """Draws are reweighted without the estimator, so they must ask what it would have refused."""
    options = {"init": 0.0, "num_samples": 10, "estimator": diffmh.Covariance()}
    objective = diffmh.expectation(f or (lambda theta, x: x), kernel, **options)
    with pytest.raises(kind, match=words):
        run(objective, reuse=0.5)


def of_one_chain():
    options = {"init": 0, "num_samples": 10, "num_chains": 1, "estimator": diffmh.Covariance()}
    return diffmh.expectation(lambda h, j: 1.0 * j, mixture.sampler(), **options)


def run(objective, **options):
    return diffmh.optimise(objective, 2.0, KEY, **STEPS | {"num_iterations": 1}, **options)
