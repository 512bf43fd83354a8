"""How often a user's density is traced, and how many programs with a chain in them a gradient
compiles. The bounds may only go down.
"""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp
import pytest

import diffmh

KEY = jax.random.key(0)
MOST_TRACES = 6


def counted(**options):
    """An expectation whose density counts how often its Python runs."""
    calls = []

    def log_density(theta, x):
        calls.append(1)
        return -0.5 * jnp.sum((x - theta) ** 2)

    kernel = diffmh.MetropolisHastings(log_density, diffmh.GaussianWalk(2.38))
    options = {"init": jnp.zeros(()), "num_samples": 20, "num_chains": 4} | options
    return diffmh.expectation(lambda theta, x: x, kernel, **options), calls


def test_a_gradient_traces_the_density_a_few_times():
    mean, calls = counted()
    jax.grad(mean)(0.5, KEY)
    assert 0 < len(calls) <= MOST_TRACES
    before = len(calls)
    jax.grad(mean)(0.7, KEY)
    mean(0.5, KEY)
    jax.jit(jax.grad(mean))(0.5, KEY)
    assert len(calls) == before


def test_another_form_is_traced_anew():
    """Otherwise the test above could not fail: what is kept is kept for one form alone."""
    mean, calls = counted()
    jax.grad(mean)(0.5, KEY)
    before = len(calls)
    with jax.enable_x64(True):
        jax.grad(mean)(jnp.asarray(0.5, jnp.float64), KEY)
    assert len(calls) > before


@pytest.mark.parametrize(("births", "most"), [(False, 1), (True, 2)])
def test_a_gradient_compiles_its_chain_once(births, most, caplog):
    estimator = diffmh.StochasticDerivative(births=births)
    mean, _ = counted(num_samples=21, estimator=estimator)
    theta = jnp.asarray(0.5)
    with jax.log_compiles(True), caplog.at_level(logging.DEBUG, logger="jax"):
        jax.grad(mean)(theta, KEY)
    compiled = [r.getMessage() for r in caplog.records if r.getMessage().startswith("Compiling")]
    # Whoever runs a chain is given a key.
    with_a_chain = [line for line in compiled if "key<" in line]
    assert 1 <= len(with_a_chain) <= most, compiled
