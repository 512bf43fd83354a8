"""Estimators compared on one problem."""

import jax
import numpy as np
import pytest

import diffmh
from diffmh.models import gaussian, mixture

KEY = jax.random.key(7)
identity = lambda theta, x: x


@pytest.fixture(scope="module")
def comparison():
    occupancy = diffmh.expectation(
        mixture.indicator, mixture.sampler(), init=0, num_samples=300, burn_in=50, num_chains=32
    )
    return occupancy.run(0.4, KEY, compare=True).comparison


def test_comparison(comparison):
    estimators = [row.estimator for row in comparison.rows]
    counts = [e.alternatives for e in estimators if isinstance(e, diffmh.StochasticDerivative)]
    assert counts == [4, 1, 16, 1] and estimators[3].control == "covariance"
    assert comparison.row(comparison.recommended).cost == min(
        row.cost for row in comparison.rows if row.quantity == "finite chain"
    )
    for row in comparison.rows:
        np.testing.assert_array_equal(row.value, comparison.rows[0].value)
        assert abs(row.bias) < 4 and row.seconds > 0
    text = str(comparison)
    assert "Covariance()" in text and "equilibrium" in text and "variance × time" in text
    assert comparison.reason.startswith("StochasticDerivative")


def test_stationary_is_not_sent_to_an_estimator_that_supposes_equilibrium():
    """From a start that the chains have not forgotten, with errors in which the bias drowns."""
    mean = diffmh.expectation(
        identity,
        gaussian.sampler(),
        init=2.0,
        num_samples=5,
        num_chains=16,
        estimator=diffmh.Stationary(),
    )
    found = diffmh.compare(mean, 0.5, KEY)
    covariance = found.row(diffmh.Covariance())
    assert abs(covariance.bias) < 4 and covariance.cost < found.rows[0].cost
    assert isinstance(found.recommended, diffmh.Stationary)
    assert "right only where the chains have reached equilibrium" in found.reason


def test_comparison_is_drawn(comparison):
    figure = diffmh.plots.compare(comparison, entry=2)
    assert len(figure.axes[0].get_yticklabels()) == len(comparison.rows)
    with pytest.raises(ValueError, match="from 0 to 2"):
        diffmh.plots.compare(comparison, entry=3)


def test_comparison_refuses_one_chain_and_programs():
    one = diffmh.expectation(identity, gaussian.sampler(), init=0.0, num_samples=5, num_chains=1)
    with pytest.raises(ValueError, match="at least 2"):
        diffmh.compare(one, 0.5, KEY)
    program = diffmh.sad.expectation(lambda p, key: diffmh.sad.bernoulli(key, p))
    with pytest.raises(TypeError, match="takes what"):
        diffmh.compare(program, 0.5, KEY)
