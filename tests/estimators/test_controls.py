"""Control variates: unbiased, worth having, and where there is nothing to control."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from unbiasedness import assert_unbiased, is_caught

import diffmh
from diffmh.core.execute import run
from diffmh.core.plan import Plan
from diffmh.core.values import Sum
from diffmh.estimators import controls
from diffmh.estimators.controls import ControlledAverages, controlled
from diffmh.models import gaussian, ising, mixture
from diffmh.models.ising.sampler import HalfSweep

KEY = jax.random.key(7)
ONE = diffmh.StochasticDerivative(alternatives=1)
CONTROLLED = diffmh.StochasticDerivative(control="f")


def runs(expectation, theta, count=2_000):
    """The gradients of independent runs, of few chains each."""
    gradient = jax.jit(jax.vmap(jax.jacobian(expectation), (None, 0)))
    return np.asarray(gradient(theta, jax.random.split(KEY, count)))


def test_control_variates_are_unbiased_on_the_mixture():
    short = diffmh.expectation(
        mixture.indicator,
        mixture.sampler(),
        init=0,
        num_samples=5,
        num_chains=6,
        estimator=CONTROLLED,
    )
    assert_unbiased(runs(short, 0.4), np.array([-0.088729, 0.019568, 0.069162]), "mixture")


def test_control_variates_are_unbiased_on_the_lattice():
    """Site by site, 3×3 at T = 3, five sweeps: exactly 4.048486."""
    start = jnp.ones((3, 3), jnp.int8)
    mean = diffmh.expectation(
        ising.energy,
        ising.sequential(3),
        init=start,
        num_samples=5,
        num_chains=6,
        estimator=CONTROLLED,
    )
    assert_unbiased(runs(mean, 3.0, 4_000), np.array(4.048486), "lattice")


class MeanForgotten(HalfSweep):
    """A deliberate mistake: the block is expected to stay as it is."""

    def expected_block(self, parameters, x, noise):
        return self.block(x)


def sums_of_a_block(half_sweep):
    """The two sums of the control variates on a checkerboard, run by run."""
    kernel = diffmh.Cycle(half_sweep(0), half_sweep(1))
    made = diffmh.expectation(
        ising.energy,
        kernel,
        init=ising.cold(4),
        num_samples=10,
        num_chains=4_000,
        estimator=CONTROLLED,
    )
    means = made.run_chains(2.5, KEY).outcomes[0].observed.estimator
    assert isinstance(means, ControlledAverages)
    return np.stack([np.ravel(means.pruned.total), np.ravel(means.moved.total)], axis=-1)


def test_sums_of_a_block_have_mean_zero():
    right = sums_of_a_block(HalfSweep)
    assert np.all(right.std(axis=0) > 0)
    assert_unbiased(right, np.zeros(2), "sums")
    assert is_caught(sums_of_a_block(MeanForgotten), np.zeros(2))


def test_control_variates_gain_on_the_lattice():
    """Standard deviations at T = 6 with and without, over 400 chains: 0.53 where measured."""
    chains = lambda estimator: diffmh.expectation(
        ising.energy,
        ising.sampler(),
        init=ising.cold(8),
        num_samples=100,
        burn_in=20,
        num_chains=400,
        estimator=estimator,
    ).run_chains(6.0, KEY)
    plain, controlled = (chains(e) for e in (ONE, CONTROLLED))
    np.testing.assert_array_equal(plain.value, controlled.value)
    assert np.std(controlled.jacobian) < 0.7 * np.std(plain.jacobian)


def test_coefficients_come_from_the_other_chains():
    """A chain's own sums do not change its coefficients."""
    rng = np.random.default_rng(0)
    derivative, pruned, moved = jnp.asarray(rng.normal(size=(3, 1, 1, 9)))
    exactly = lambda total: Sum(total, jnp.zeros_like(total))
    means = ControlledAverages(derivative, exactly(pruned), exactly(moved))
    doubled = exactly(pruned.at[..., 3].mul(2.0))
    moved = ControlledAverages(means.derivative, doubled, means.moved)
    before, after = (controls.controlled(m)[0, 0, 3] for m in (means, moved))
    taken_off = float(means.derivative[0, 0, 3] - before)
    without = exactly(pruned.at[..., 3].set(0.0))
    of_b = ControlledAverages(means.derivative, without, means.moved)
    by_b = float(means.derivative[0, 0, 3] - controls.controlled(of_b)[0, 0, 3])
    np.testing.assert_allclose(
        float(means.derivative[0, 0, 3] - after), by_b + 2 * (taken_off - by_b), rtol=1e-4
    )


def test_control_refuses_what_it_cannot_use():
    with pytest.raises(ValueError, match="'covariance' or a function"):
        diffmh.StochasticDerivative(control="g")  # pyright: ignore
    product = diffmh.expectation(
        lambda theta, a, b: a * b,
        gaussian.sampler(),
        init=0.0,
        num_samples=5,
        lag=1,
        estimator=CONTROLLED,
    )
    with pytest.raises(ValueError, match="lag=1"):
        product(0.5, KEY)


def test_rounding_is_not_a_control_variate():
    """Between two states by independent proposals all flips are alike and pruning changes nothing:
    the first sum is zero, not its rounding, whose mean is not zero and which least squares would
    blow up.
    """
    slopes = jnp.array([[0.3, -0.7, 1.1], [0.9, 0.2, -0.4]])
    kernel = diffmh.MetropolisHastings(
        lambda theta, x: (slopes @ theta)[x], diffmh.TransitionMatrix([[0.4, 0.6], [0.4, 0.6]])
    )
    mean = diffmh.expectation(
        lambda theta, x: jnp.stack([1.3 * x, 0.1 - x]),
        kernel,
        init=0,
        num_samples=30,
        num_chains=64,
        estimator=diffmh.StochasticDerivative(control="f"),
    )
    theta = jnp.array([0.5, -0.2, 0.7])
    averages = jax.jit(
        lambda key: run(Plan.of(mean.simulation, theta, key, ()), theta, key, ()).observed.estimator
    )
    found = averages(jax.random.key(0))
    assert np.all(np.asarray(found.pruned.beyond_rounding()) == 0)
    assert np.any(np.asarray(found.moved.beyond_rounding()) != 0)
    assert np.any(np.asarray(found.derivative) != 0)


def means_of(derivative, pruned):
    one = lambda array: jnp.asarray(array)[None, None]
    nothing = jnp.zeros_like(one(pruned))
    sums = Sum(one(pruned), nothing), Sum(nothing, nothing)
    return ControlledAverages(one(derivative), *sums)


def test_what_is_left_of_gains_that_cancel_is_not_a_control_variate():
    """Of the others, one has gains of two steps that cancel but for their rounding. As a control
    variate it would multiply the one sum that is not zero, of the chain beside it, by 10⁷.
    """
    derivative = np.linspace(-1.0, 1.0, 8, dtype=np.float32)
    pruned, size = np.zeros((2, 8), np.float32)
    pruned[[1, 5]] = 3e-8, 0.01
    size[[1, 5]] = 0.02
    as_it_is = means_of(derivative, pruned)
    sum_ = Sum(as_it_is.pruned.total, jnp.asarray(size)[None, None])
    means = ControlledAverages(as_it_is.derivative, sum_, as_it_is.moved)
    np.testing.assert_allclose(controlled(means)[0, 0], derivative, atol=1e-6)
    assert np.max(np.abs(controlled(as_it_is))) > 1e4


def test_no_sum_of_a_chain_is_rounding_alone():
    """A chain on three states has sums of a few values, none of them tiny: what is left of gains
    of ±0.01 that cancel, 3·10⁻⁸ in one chain of 8,000, is zero.
    """
    density, slope = jnp.array([0.1, -0.4, 0.7]), jnp.array([0.5, -1.0, 0.25])
    f = jnp.array([0.3, 1.1, -0.9])
    proposal = diffmh.TransitionMatrix([[0.2, 0.3, 0.5], [0.4, 0.1, 0.5], [0.6, 0.3, 0.1]])
    kernel = diffmh.MetropolisHastings(lambda theta, x: (density + theta * slope)[x], proposal)
    made = diffmh.expectation(
        lambda theta, x: f[x], kernel, init=0, num_samples=5, num_chains=8_000, estimator=CONTROLLED
    )
    means = made.run_chains(0.7, KEY).outcomes[0].observed.estimator

    def least(sums):
        sizes = np.abs(np.ravel(sums))
        return np.min(sizes[sizes > 0]) / np.max(sizes)

    assert least(means.pruned.total) < 1e-5
    for sum_ in (means.pruned, means.moved):
        assert least(sum_.beyond_rounding()) > 1e-5


def test_a_sum_whose_rare_events_are_missing_is_not_taken_off():
    """A is +1 in 20 of 600 chains and would be −1000 in one of 30,000, which is not among them:
    taken off, it would take the derivative with it, to 0 ± 0.
    """
    pruned = np.where(np.arange(600) < 20, 1.0, 0.0)
    derivative = 3 * pruned
    found = np.asarray(controlled(means_of(derivative, pruned)))[0, 0]
    assert abs(found.mean() - derivative.mean()) < 0.5 * derivative.std() / np.sqrt(600)


def test_a_frequent_sum_of_one_sign_is_not_taken_off():
    pruned = np.linspace(0.5, 1.5, 600)
    found = np.asarray(controlled(means_of(pruned, pruned)))[0, 0]
    assert abs(found.mean() - pruned.mean()) < 0.1 * pruned.std() / np.sqrt(600)


@pytest.mark.parametrize("num_chains", [16, 600])
def test_a_sum_that_all_chains_bear_is_taken_off(num_chains):
    rng = np.random.default_rng(0)
    pruned, rest = rng.normal(size=(2, num_chains))
    found = np.asarray(controlled(means_of(2 * pruned + 0.1 * rest, pruned)))[0, 0]
    assert found.std() < 0.25 * (2 * pruned).std()


def test_the_coefficient_of_a_chain_is_the_others_alone():
    """However much it outweighs them: the rounding of a sum over all chains would be the others'
    mean.
    """
    rng = np.random.default_rng(1)
    pruned, derivative = rng.normal(size=(2, 32)).astype(np.float32)

    def coefficient(own):
        sums, slopes = pruned.copy(), derivative.copy()
        sums[5], slopes[5] = own, 0.0
        return float(-controlled(means_of(slopes, sums))[0, 0, 5] / own)

    np.testing.assert_allclose(coefficient(1e4), coefficient(1.0), rtol=1e-3)


def test_sums_of_float32_beside_weights_of_float64():
    """With x64 a state of float32 is observed in float32, and weights are of θ's float64."""
    with jax.enable_x64(True):
        density = lambda theta, x: -0.5 * jnp.sum((x - theta) ** 2)
        mean = diffmh.expectation(
            lambda theta, x: x,
            diffmh.MetropolisHastings(density, diffmh.GaussianWalk(1.0)),
            init=np.full(2, 0.1, np.float32),
            num_samples=4,
            num_chains=6,
            estimator=diffmh.StochasticDerivative(control="f"),
        )
        slope = jax.jacfwd(mean)(0.5, jax.random.key(0))
        assert slope.dtype == jnp.float32 and np.all(np.isfinite(slope))
