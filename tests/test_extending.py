"""The texts of docs/extending.md, run as they stand, against exact answers."""

import dataclasses
import itertools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import own_kernels
import pytest
from oracles import derivative, finite_chain_mean, transition_matrix
from unbiasedness import assert_unbiased, is_caught

import diffmh

PAGE = (pathlib.Path(__file__).parent.parent / "docs" / "extending.md").read_text()
BLOCKS = re.findall(r"```\{code-cell\} python\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.fixture(scope="module")
def names() -> dict:
    found: dict = {"__name__": "extending"}
    for block in BLOCKS[:-1]:
        exec(compile(block, "docs/extending.md", "exec"), found)
    return found


def test_each_text_is_short():
    assert len(BLOCKS) == 9
    assert max(len(block.splitlines()) for block in BLOCKS) <= 40


def test_check_passes_them(names, capsys):
    exec(compile(BLOCKS[-1], "docs/extending.md", "exec"), names)
    assert "BROKEN" not in capsys.readouterr().out


def derivatives(kernel, f, theta, init, num_samples, key=0, num_chains=40_000, estimator=None):
    expectation = diffmh.expectation(
        f,
        kernel,
        init=init,
        num_samples=num_samples,
        num_chains=num_chains,
        estimator=estimator,
    )
    return np.asarray(jax.jit(jax.jacfwd(expectation.per_chain))(theta, jax.random.key(key)))


def test_functions_of_draws(names):
    """Parallel tempering against its matrix."""
    case = dataclasses.replace(own_kernels.tempering(), kernel=names["tempered"])
    assert_unbiased(case.derivatives(3), case.exact(3))


def test_proposal(names):
    """E[x] of a gamma distribution is its shape, from a stationary start."""
    found = diffmh.expectation(
        lambda shape, x: x,
        names["gamma"],
        init=1.0,
        burn_in=60,
        num_samples=40,
        num_chains=4_000,
    )
    assert_unbiased(jax.jit(jax.jacfwd(found.per_chain))(2.0, jax.random.key(1)), np.array(1.0))


def ring_walk(n):
    return (np.roll(np.eye(n), 1, axis=1) + np.roll(np.eye(n), -1, axis=1)) / 2


def test_coupling(names):
    tilt = np.array([0.0, 0.4, -0.3, 0.9, 0.1, 0.5])
    kernel = diffmh.MetropolisHastings(
        lambda theta, x: theta * jnp.asarray(tilt, jnp.float32)[x],
        diffmh.TransitionMatrix(jnp.asarray(ring_walk(6), jnp.float32)),
        names["NearOrMirrored"](6),
    )
    found = derivatives(kernel, lambda theta, x: jax.nn.one_hot(x, 6), 0.7, 0, 5)

    def mean(theta):
        matrix = transition_matrix(theta[0] * tilt, ring_walk(6))
        return finite_chain_mean(matrix, 0, np.eye(6), 5, 0)

    assert_unbiased(found, derivative(mean, np.array([0.7]))[1][:, 0])


def ring_oracle(num_samples, sites=6):
    spins = np.array(list(itertools.product([1, -1], repeat=sites)))
    pairs, field = np.sum(spins * np.roll(spins, 1, axis=1), axis=1), spins.sum(axis=1)
    observed = np.stack([field / sites, pairs, spins[:, 0] * spins[:, 2]], axis=1).astype(float)

    def mean(theta):
        log_density = theta[0] * pairs + theta[1] * field
        step = np.eye(2**sites, dtype=complex)
        for site in (*range(0, sites, 2), *range(1, sites, 2)):
            flipped = np.arange(2**sites) ^ (1 << (sites - 1 - site))
            ratio = log_density[flipped] - log_density
            share = np.where(ratio.real < 0, 1.0, np.where(ratio.real == 0, 0.5, 0.0))
            move = 0.5 * np.exp(np.minimum(ratio.real, 0.0)) * (1 + 1j * share * ratio.imag)
            step = step * (1 - move) + (step * move)[:, flipped]
        return finite_chain_mean(step, 0, observed, num_samples, 0)

    return mean


def ring_observed(theta, x):
    return jnp.stack([jnp.mean(x * 1.0), jnp.sum(x * jnp.roll(x, 1)) * 1.0, x[0] * x[2] * 1.0])


RING_THETA = jnp.array([0.3, 0.15])


@pytest.mark.parametrize("alternatives", [pytest.param(1, marks=pytest.mark.thorough), 3])
def test_block_kernel(names, alternatives):
    estimator = diffmh.StochasticDerivative(alternatives=alternatives)
    found = derivatives(
        names["ring"], ring_observed, RING_THETA, jnp.ones(6, int), 4, 32, estimator=estimator
    )
    assert_unbiased(found, derivative(ring_oracle(4), np.array(RING_THETA))[1])


def potts_oracle(num_samples, sites=3, values=3):
    labels = np.array(list(itertools.product(range(values), repeat=sites)))
    same, total = np.sum(labels == np.roll(labels, 1, axis=1), axis=1), labels.sum(axis=1)
    observed = np.stack([labels[:, 0], same, labels[:, 0] * labels[:, 2]], axis=1).astype(float)

    def mean(theta):
        density = np.exp(theta[0] * same + theta[1] * total)
        step = np.eye(len(labels), dtype=complex)
        for site in range(sites):
            others = np.delete(labels, site, axis=1)
            alike = np.all(others[:, None] == others[None], axis=-1)
            draw = np.where(alike, density[None, :], 0.0)
            step = step @ (draw / draw.sum(axis=1, keepdims=True))
        return finite_chain_mean(step, 0, observed, num_samples, 0)

    return mean


def potts_observed(theta, x):
    return jnp.stack([x[0] * 1.0, jnp.sum(x == jnp.roll(x, 1)) * 1.0, x[0] * x[2] * 1.0])


POTTS_THETA = jnp.array([0.6, -0.3])


@pytest.mark.parametrize(
    "estimator",
    [
        pytest.param(diffmh.StochasticDerivative(), marks=pytest.mark.thorough),
        diffmh.StochasticDerivative(alternatives=3),
        diffmh.Score(baseline="other chains"),
    ],
    ids=["one", "three", "score"],
)
def test_gibbs_kernel(names, estimator):
    found = derivatives(
        names["potts"],
        potts_observed,
        POTTS_THETA,
        jnp.zeros(3, int),
        3,
        33,
        estimator=estimator,
    )
    assert_unbiased(found, derivative(potts_oracle(3), np.array(POTTS_THETA))[1])


def test_estimator(names):
    exact = derivative(ring_oracle(4), np.array(RING_THETA))[1]
    arguments = (names["ring"], ring_observed, RING_THETA, jnp.ones(6, int), 4, 34)
    whole = derivatives(*arguments, estimator=names["RecentScore"](1.0))
    assert_unbiased(whole, exact)
    np.testing.assert_allclose(
        whole, derivatives(*arguments, estimator=diffmh.Score()), rtol=1e-3, atol=1e-4
    )
    assert is_caught(derivatives(*arguments, estimator=names["RecentScore"](0.5)), exact)
