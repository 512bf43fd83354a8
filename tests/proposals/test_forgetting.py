"""Walks that forget their tangents: unbiased at any rate, and what it is there for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import derivatives
from quadrature import log_normal, proposed_by_density, slope
from scipy.stats import norm
from unbiasedness import assert_unbiased, is_caught

import diffmh
from diffmh.proposals import forgetting

SCALE = np.array([1.3, 0.4, 0.9])


def square_root(theta):
    return jnp.array([[theta[0], 0.0], [theta[1], theta[2]]])


def jumps(theta):
    """`E[(x' − x)(x' − x)ᵀ] = E[Lz(Lz)ᵀ 2Φ(−|Lz|/2)]` on N(0, I) in two dimensions."""
    grid = np.linspace(-8, 8, 801)
    z = np.stack(np.meshgrid(grid, grid, indexing="ij")).reshape(2, -1)
    step = np.array([[theta[0], 0.0], [theta[1], theta[2]]]) @ z
    accepted = 2 * norm.cdf(-0.5 * np.sqrt(np.sum(step**2, axis=0)))
    weight = (grid[1] - grid[0]) ** 2 * norm.pdf(z[0]) * norm.pdf(z[1]) * accepted
    return np.einsum("in,jn,n->ij", step, step, weight)


def exact_jumps():
    shifts = 1e-3 * np.eye(3)
    each = [(jumps(SCALE + shift) - jumps(SCALE - shift)) / 2e-3 for shift in shifts]
    return np.stack(each, axis=-1)


def found_jumps(estimator=None):
    """Four steps from a stationary start: the tangent is not zero after the first."""
    walk = diffmh.MetropolisHastings(
        lambda theta, x: -0.5 * jnp.sum(x**2), lambda theta: diffmh.GaussianWalk(square_root(theta))
    )
    expectation = diffmh.expectation(
        lambda theta, a, b: (b - a)[:, None] * (b - a),
        walk,
        init=lambda key: jax.random.normal(key, (2,)),
        num_samples=4,
        num_chains=40_000,
        lag=1,
        estimator=estimator,
    )
    return derivatives(expectation, jnp.asarray(SCALE, jnp.float32), jax.random.key(5))


@pytest.mark.parametrize("rate", [0.5, pytest.param(1.0, marks=pytest.mark.thorough)])
def test_a_matrix_of_scales(monkeypatch, rate):
    monkeypatch.setattr(forgetting, "RATE", rate)
    assert_unbiased(found_jumps(), exact_jumps())


def test_the_score(monkeypatch):
    monkeypatch.setattr(forgetting, "RATE", 0.5)
    assert_unbiased(found_jumps(diffmh.Score("other chains")), exact_jumps())


def test_forgetting_without_its_flips_is_caught(monkeypatch):
    monkeypatch.setattr(forgetting, "RATE", 0.5)
    right = diffmh.extend.Acceptance.draw
    without = lambda uniform, log_ratio, score=None: right(uniform, log_ratio)
    monkeypatch.setattr(diffmh.extend.Acceptance, "draw", staticmethod(without))
    assert is_caught(found_jumps(), exact_jumps())


def parts(theta):
    """Two walks on a pair of unlike leaves, with a step each."""
    density = lambda theta, x: -0.5 * x["a"][1] ** 2 - 0.5 * x["b"] ** 2
    on = lambda where, number: diffmh.MetropolisHastings(
        density, lambda theta: diffmh.On(where, diffmh.GaussianWalk(theta[number]))
    )
    start = lambda key: {
        "a": jnp.array([3.0, 1.0]) * jax.random.normal(key, (2,)),
        "b": jax.random.normal(jax.random.fold_in(key, 1)),
        "label": 2,
    }
    expectation = diffmh.expectation(
        lambda theta, x, y: jnp.stack([x["a"][1] * y["a"][1], x["b"] * jnp.abs(y["b"])]),
        diffmh.Cycle(on(lambda x: x["a"][1], 0), on(lambda x: x["b"], 1)),
        init=start,
        num_samples=4,
        num_chains=40_000,
        lag=1,
    )
    return derivatives(expectation, theta, jax.random.key(6))


def test_parts_of_a_state(monkeypatch):
    monkeypatch.setattr(forgetting, "RATE", 0.5)
    theta = np.array([1.3, 0.8])
    by_step = lambda s: slope(proposed_by_density(lambda s, x, new: log_normal(new, x, s)), s)
    truth = np.array([[by_step(theta[0])[0], 0.0], [0.0, by_step(theta[1])[2]]])
    assert_unbiased(parts(jnp.asarray(theta, jnp.float32)), truth)


def test_a_walk_forgets_where_it_started():
    """The deviation from `x_0 = 3` is that from 0, and was 1.9 times it."""
    walk = diffmh.MetropolisHastings(
        lambda theta, x: -0.5 * x**2, lambda theta: diffmh.GaussianWalk(theta)
    )

    def deviation(start):
        expectation = diffmh.expectation(
            lambda theta, a, b: a * b,
            walk,
            init=start,
            burn_in=200,
            num_samples=400,
            lag=1,
            num_chains=2_000,
        )
        return np.std(derivatives(expectation, 2.38, jax.random.key(7)))

    assert deviation(3.0) < 1.2 * deviation(0.0)
