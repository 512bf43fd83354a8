"""Values of probability zero: never a candidate, and nothing of theirs in a value or a derivative.

The densities are written as people write them, with a logarithm of zero where a value is
impossible: its derivative there is 0 · ∞, and f is infinite there.
"""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import derivative, finite_chain_mean
from unbiasedness import assert_unbiased

import diffmh
from diffmh.core.decisions import Categorical, flow_potential
from diffmh.core.values import Value

KEY = jax.random.key(3)
LENGTH, STATES, RUNS, STEPS = 3, 3, 2048, 3
ALLOWED = np.array([[1, 1, 0], [0, 1, 1], [1, 0, 1]])
PATHS = np.array(list(itertools.product(range(STATES), repeat=LENGTH)))


thorough = functools.partial(pytest.param, marks=pytest.mark.thorough)


def table(shape, num_parameters):
    drawn = np.random.default_rng(num_parameters).normal(size=(*shape, num_parameters))
    return (drawn / np.sqrt(num_parameters)).astype(np.float32)


def at(num_parameters):
    return np.linspace(-1, 1.5, num_parameters).astype(np.float32)


def transitions(theta, features, numpy):
    """Of the hidden states of a Markov model, some of them forbidden."""
    weight = ALLOWED * numpy.exp(features @ theta)
    return weight / weight.sum(axis=1, keepdims=True)


def log_density(theta, z, features):
    return jnp.sum(jnp.log(transitions(theta, features, jnp)[z[:-1], z[1:]]))


def f(theta, z, features):
    """Infinite where z is impossible."""
    possible = jnp.all(jnp.asarray(ALLOWED)[z[:-1], z[1:]])
    return jax.nn.one_hot(z[1], STATES) + jnp.where(possible, 0.0, jnp.inf) + theta[0] * z[0]


def exact_paths(features):
    def mean(theta):
        step = transitions(theta, features, np)
        weight = np.prod(step[PATHS[:, :-1], PATHS[:, 1:]], axis=1)
        sweep = np.eye(len(PATHS), dtype=complex)
        for site in range(LENGTH):
            others = np.delete(PATHS, site, axis=1)
            same = np.all(others[:, None] == others[None], axis=2)
            total = same @ weight
            sweep = sweep @ (same * weight / np.where(total == 0, 1, total)[:, None])
        observed = np.eye(STATES)[PATHS[:, 1]] + theta[0] * PATHS[:, :1]
        return finite_chain_mean(sweep, 0, observed, STEPS, 0)

    return mean


@pytest.mark.parametrize(
    ("estimator", "num_parameters", "coupling"),
    [
        (diffmh.StochasticDerivative(control="f"), 17, diffmh.Maximal()),
        thorough(diffmh.StochasticDerivative(), 80, None),  # by births
        thorough(diffmh.StochasticDerivative(weights="one-sided"), 1, None),
        thorough(diffmh.Score(), 17, None),
    ],
    ids=str,
)
def test_gibbs_with_forbidden_transitions(estimator, num_parameters, coupling):
    features = table((STATES, STATES), num_parameters)
    site = lambda i: diffmh.Gibbs(log_density, lambda z: z[i], STATES, coupling)
    mean = diffmh.expectation(
        f,
        diffmh.Sweep(site, LENGTH),
        init=jnp.zeros(LENGTH, int),
        num_samples=STEPS,
        num_chains=RUNS,
        estimator=estimator,
    )
    theta = at(num_parameters)
    slopes = mean.run_chains(jnp.asarray(theta), KEY, jnp.asarray(features)).jacobian
    exact = derivative(exact_paths(features.astype(float)), theta.astype(float))[1]
    assert_unbiased(np.moveaxis(np.asarray(slopes), -1, 0), exact.T)


def odds_of_a(theta, b, features):
    """Of the first unit; the second is never on."""
    return features[0] @ theta + b * (features[1] @ theta)


def logits_of_a(theta, x, features):
    rate = jnp.array([1.0, 0.0]) * jnp.exp(odds_of_a(theta, x["b"][0], features))
    return jnp.log(rate)


def logits_of_b(theta, x, features):
    return (features[2] @ theta + x["a"][0] * (features[1] @ theta))[None]


def block_density(theta, x, features):
    b = x["b"][0]
    log_g = x["a"][0] * odds_of_a(theta, b, features) + b * (features[2] @ theta)
    return jnp.where(x["a"][1] > 0, -jnp.inf, log_g)


def exact_blocks(features):
    def mean(theta):
        sigmoid = lambda odds: 1 / (1 + np.exp(-odds))
        pairs = list(itertools.product((0, 1), repeat=2))
        step = np.zeros((4, 4), complex)
        for row, (_, b) in enumerate(pairs):
            p_a = sigmoid(odds_of_a(theta, b, features))
            for column, (a_new, b_new) in enumerate(pairs):
                p_b = sigmoid(features[2] @ theta + a_new * (features[1] @ theta))
                step[row, column] = (p_a if a_new else 1 - p_a) * (p_b if b_new else 1 - p_b)
        return finite_chain_mean(step, 0, np.array(pairs, float), STEPS, 0)

    return mean


@pytest.mark.parametrize("num_parameters", [thorough(1), thorough(17), 80])
def test_blocks_with_impossible_units(num_parameters):
    features = table((3,), num_parameters)
    theta, data = jnp.asarray(at(num_parameters)), jnp.asarray(features)
    block_a = diffmh.BlockGibbs(logits_of_a, lambda x: x["a"], block_density)
    block_b = diffmh.BlockGibbs(logits_of_b, lambda x: x["b"], block_density)
    mean = diffmh.expectation(
        lambda theta, x, features: jnp.stack([x["a"][0], x["b"][0] / (1 - x["a"][1])]),
        diffmh.Cycle(block_a, block_b),
        init={"a": jnp.zeros(2), "b": jnp.zeros(1)},
        num_samples=STEPS,
        num_chains=RUNS,
    )
    slopes = np.asarray(mean.run_chains(theta, KEY, data).jacobian)
    exact = derivative(exact_blocks(features.astype(float)), at(num_parameters).astype(float))[1]
    assert_unbiased(np.moveaxis(slopes, -1, 0), exact.T)
    if num_parameters == 80:
        backward = jax.jit(jax.jacrev(mean))(theta, KEY, data)
        np.testing.assert_allclose(backward.T, slopes.mean(axis=-1), atol=1e-5)


def test_births_by_a_density_without_a_derivative_are_no_number():
    """Backward, `log 0` of a unit that is off is 0 · ∞. Births read the density where a unit is
    impossible, as `BlockGibbs` says: NaN, and weights need no density.
    """

    def density(theta, x, features):
        rate = jnp.array([1.0, 0.0]) * jnp.exp(odds_of_a(theta, x["b"][0], features))
        return jnp.sum(jnp.where(x["a"] > 0, jnp.log(rate), 0.0)) + x["b"][0] * (
            features[2] @ theta
        )

    features = table((3,), 3)
    kernel = diffmh.Cycle(
        diffmh.BlockGibbs(logits_of_a, lambda x: x["a"], density),
        diffmh.BlockGibbs(logits_of_b, lambda x: x["b"], density),
    )

    def slopes(births):
        mean = diffmh.expectation(
            lambda theta, x, features: x["a"][0],
            kernel,
            init={"a": jnp.zeros(2), "b": jnp.zeros(1)},
            num_samples=STEPS,
            num_chains=RUNS,
            estimator=diffmh.StochasticDerivative(births=births),
        )
        return np.asarray(mean.run_chains(jnp.asarray(at(3)), KEY, jnp.asarray(features)).jacobian)

    assert np.all(np.isnan(slopes(True).mean(axis=-1)))
    exact = derivative(exact_blocks(features.astype(float)), at(3).astype(float))[1]
    assert_unbiased(np.moveaxis(slopes(False), -1, 0), exact[:1].T)


def test_flips_to_impossible_values_weigh_nothing():
    """And the others carry the whole derivative: `Σ_i p_i w_ij − p_j Σ_i w_ji = dp_j`."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=6)
    logits[[0, 3]] = -np.inf
    slope = rng.normal(size=(2, 6))
    slope[:, 0] = np.nan
    p = np.exp(logits) / np.exp(logits).sum()
    mean = np.where(p > 0, p * slope, 0).sum(axis=1, keepdims=True)
    dp = np.where(p > 0, p * (slope - mean), 0)
    law = Value(jnp.asarray(logits), jnp.asarray(slope))
    for weights in ("two-sided", "one-sided"):
        rows = [Categorical(jnp.asarray(i), law).flip_weight(weights) for i in range(6)]
        w = np.where((p > 0)[:, None, None], np.stack(rows), 0)
        assert not np.any(w[:, :, p == 0])
        inflow, outflow = np.einsum("i,ipj->pj", p, w), p * w.sum(axis=2).T
        np.testing.assert_allclose(inflow - outflow, dp, atol=1e-6)
    # Of least second moment among flips of the possible values: those without the others.
    some = p > 0
    among_all = flow_potential(jnp.asarray(p), jnp.asarray(dp))
    alone = flow_potential(jnp.asarray(p[some]), jnp.asarray(dp[:, some]))
    np.testing.assert_allclose(among_all[:, some], alone, rtol=1e-5)
    values = jnp.where(jnp.asarray(some), 2.0, jnp.nan)
    np.testing.assert_allclose(Categorical(jnp.asarray(1), law).mean(values), 2.0, rtol=1e-6)
