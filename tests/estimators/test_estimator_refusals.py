"""Errors that estimators raise."""

import jax
import jax.numpy as jnp
from refusals import KEY, NORMAL, cases, expect, refused, walk

import diffmh

ONE_SIDED = diffmh.StochasticDerivative("one-sided")
OTHER_CHAINS = diffmh.Score(baseline="other chains")


@cases(
    weights=(
        lambda: diffmh.StochasticDerivative("foo"),
        ValueError,
        "weights … 'two-sided' or 'one-sided', got 'foo'",
    ),
    baseline=(
        lambda: diffmh.Score(baseline="foo"),
        ValueError,
        "baseline … 'other chains', got 'foo'",
    ),
    one_chain=(
        lambda: jax.grad(expect(num_chains=1, estimator=OTHER_CHAINS))(0.5, KEY),
        ValueError,
        "`num_chains` … 2, got 1",
    ),
    size=(
        lambda: jax.grad(expect(estimator=diffmh.Score(jnp.ones(3))))(0.5, KEY),
        ValueError,
        "baseline … has 3 numbers … 1",
    ),
    name=(
        lambda: expect(estimator="score"),
        TypeError,
        "`estimator` must be … Estimator`, got 'score'",
    ),
    class_=(
        lambda: expect(estimator=diffmh.Score),
        TypeError,
        "`estimator` must be … a class: call it",
    ),
    traced=(
        lambda: diffmh.trace(NORMAL, 0.5, KEY, init=0.0, num_steps=5, estimator=diffmh.Score()),
        TypeError,
        "`estimator` must be … StochasticDerivative`, got Score",
    ),
    one_sided=(
        lambda: expect(walk(lambda theta, x: theta.sum() * x), estimator=ONE_SIDED)(
            jnp.ones(2), KEY
        ),
        ValueError,
        "'one-sided' … one scalar parameter … 2 … 'two-sided'",
    ),
    one_sided_tree=(
        lambda: expect(walk(lambda theta, x: theta["a"] * x), estimator=ONE_SIDED)(
            {"a": 0.5, "b": 0.5}, KEY
        ),
        ValueError,
        "'one-sided' … one scalar parameter … 2 … 'two-sided'",
    ),
)
def test_estimators(call, error, words):
    refused(call, error, words)
