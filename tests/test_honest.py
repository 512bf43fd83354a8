"""Intervals that hold, findings that say what is wrong and what else to do, comparisons and
control variates.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import stdtrit
from unbiasedness import assert_unbiased, is_caught

import diffmh
from diffmh import controls, intervals
from diffmh.method import Method
from diffmh.models import gaussian, ising, mixture
from diffmh.models.ising.sampler import HalfSweep

KEY = jax.random.key(7)
identity = lambda theta, x: x


def normal_mean(coupling=None, scale=2.38, **options):
    options = {"init": 0.0, "num_samples": 1_000, "num_chains": 8} | options
    kernel = diffmh.MetropolisHastings(gaussian.log_density, diffmh.GaussianWalk(scale), coupling)
    return diffmh.expectation(identity, kernel, **options)


def held(samples, truth, level=0.95, stretches=None):
    """How often intervals of rows of samples hold the truth."""
    length = None if stretches is None else np.ones(len(stretches), int)
    shape = intervals.shape(samples, stretches, length)
    count = samples.shape[-1]
    error = samples.std(axis=-1, ddof=1) / np.sqrt(count)
    low, high = intervals.ends(samples.mean(axis=-1), error, shape, count, level)
    return np.mean((low <= truth) & (truth <= high))


def test_interval_of_chains_that_agree_with_a_normal_is_students():
    """Skewness 0 and kurtosis at most 3: nothing is bent or widened."""
    values = np.array([-1.5, -0.5, 0.5, 1.5, -1.0, 1.0])
    low, high = intervals.ends(np.array(2.0), np.array(0.1), intervals.shape(values), 6, 0.95)
    np.testing.assert_allclose([low, high], 2 + 0.1 * stdtrit(5, 0.975) * np.array([-1, 1]))


def test_interval_inverts_halls_cubic():
    shape = intervals.Shape(np.array(1.7), np.array(4.0))
    count, lean = 20, 1.7 / (3 * np.sqrt(20))
    reach = intervals.quantile(shape, count, 0.9)
    low, high = intervals.ends(np.array(0.0), np.array(1.0), shape, count, 0.9)
    cubic = lambda t: t + lean * t**2 + lean**2 * t**3 / 3 + 1.7 / (6 * np.sqrt(count))
    np.testing.assert_allclose([cubic(-low), cubic(-high)], [reach, -reach], rtol=1e-9)


def test_intervals_hold_where_students_do_not():
    """Sums of 16 heavy parts over 16 chains, 4,000 times: a 95 % interval by Student's t holds too
    seldom, which the test sees; standard error of a rate here 0.4 %.
    """
    parts = np.random.default_rng(1).lognormal(0.0, 2.0, (16, 4_000, 16))
    chains, truth = parts.mean(axis=0), np.exp(2.0)
    error = chains.std(axis=-1, ddof=1) / 4
    students = np.mean(np.abs(chains.mean(axis=-1) - truth) < stdtrit(15, 0.975) * error)
    ours = held(chains, truth, stretches=parts)
    assert students < 0.84 and ours > students + 0.07
    normal = np.random.default_rng(2).normal(size=(16, 4_000, 16))
    assert 0.94 < held(normal.mean(axis=0), 0.0, stretches=normal) < 0.965


def test_report_takes_its_intervals_from_stretches():
    report = normal_mean(burn_in=20).run(0.5, KEY)
    assert report.gradient_shape is not None and report.gradient_shape.kurtosis > 0
    value, gradient = report.interval(0.99)
    assert value[0] < report.value < value[1] and gradient[0] < 1.0 < gradient[1]


def test_warnings_name_what_is_in_use_and_something_else():
    apart = normal_mean(diffmh.CommonRandomNumbers()).run(0.5, KEY)
    (text,) = [warning for warning in apart.warnings if "hardly ever recouple" in warning]
    used, remedy = text.split(" Use ")
    assert "`CommonRandomNumbers()`" in used and "alternatives=1" in used
    assert "CommonRandomNumbers" not in remedy and "alternatives=1," not in remedy
    assert "`MaximalReflection()`" in remedy and "alternatives=4" in remedy
    assert "`Covariance()`" in remedy


def test_no_covariance_is_offered_where_it_does_not_apply():
    kernel = diffmh.MetropolisHastings(
        gaussian.log_density, lambda theta: diffmh.GaussianWalk(1 + 0 * theta)
    )
    method = Method.of(kernel, diffmh.StochasticDerivative(), 1, 0)
    assert not method.covariance_applies and "Covariance" not in method.remedies()


def log_schools(theta, x):
    """Eight schools, not centred, x = (μ, log τ, η): by the prior mean of μ."""
    effects = jnp.array([28.0, 8, -3, 7, -1, 1, 18, 12])
    errors = jnp.array([15.0, 10, 16, 11, 9, 11, 10, 18])
    scale = jnp.exp(x[1])
    prior = -0.5 * ((x[0] - theta) / 5) ** 2 - jnp.log1p((scale / 5) ** 2) + x[1]
    deviations = (effects - x[0] - scale * x[2:]) / errors
    return prior - 0.5 * jnp.sum(x[2:] ** 2) - 0.5 * jnp.sum(deviations**2)


def test_few_births_are_seen():
    walk = diffmh.MetropolisHastings(log_schools, diffmh.GaussianWalk(0.2))
    mean = diffmh.expectation(
        lambda theta, x: x[0], walk, init=jnp.zeros(10), num_samples=5_000, num_chains=32
    )
    text = " ".join(mean.run(0.0, KEY).warnings)
    assert "few births carry the gradient" in text and "`MaximalReflection()`" in text


def test_finite_chain_is_told_from_equilibrium():
    far = normal_mean(scale=0.3, init=6.0, num_samples=200, num_chains=32).run(0.5, KEY)
    (note,) = [note for note in far.notes if note.startswith("finite chain")]
    assert "over the first half" in note and "±" in note and note in str(far)
    assert not normal_mean(burn_in=50, num_chains=32).run(0.5, KEY).notes


def test_a_single_sample_after_burn_in_is_told_too():
    """As in contrastive divergence: the derivative still grows from step to step."""
    short = normal_mean(scale=0.3, num_samples=1, burn_in=19, num_chains=256).run(0.5, KEY)
    assert any("its derivative is" in note for note in short.notes)


@pytest.fixture(scope="module")
def comparison():
    occupancy = diffmh.expectation(
        mixture.indicator, mixture.sampler(), init=0, num_samples=300, burn_in=50, num_chains=32
    )
    return occupancy.run(0.4, KEY, compare=True).comparison


def test_comparison(comparison):
    estimators = [row.estimator for row in comparison.rows]
    counts = [e.alternatives for e in estimators if isinstance(e, diffmh.StochasticDerivative)]
    assert counts == [1, 4, 16] and comparison.row(comparison.recommended).cost == min(
        row.cost for row in comparison.rows if row.quantity == "finite chain"
    )
    for row in comparison.rows:
        np.testing.assert_array_equal(row.value, comparison.rows[0].value)
        assert abs(row.bias) < 4 and row.seconds > 0
    text = str(comparison)
    assert "Covariance()" in text and "equilibrium" in text and "variance × time" in text
    assert comparison.reason.startswith("StochasticDerivative")


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
    assert isinstance(means, controls.Averages)
    return np.stack([np.ravel(means.pruned), np.ravel(means.moved)], axis=-1)


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
    plain, controlled = (chains(e) for e in (diffmh.StochasticDerivative(), CONTROLLED))
    np.testing.assert_array_equal(plain.value, controlled.value)
    assert np.std(controlled.jacobian) < 0.7 * np.std(plain.jacobian)


def test_coefficients_come_from_the_other_chains():
    """What a chain has in its own sums does not change its coefficients."""
    rng = np.random.default_rng(0)
    draw = lambda: jnp.asarray(rng.normal(size=(1, 1, 9)))
    means = controls.Averages(draw(), draw(), draw())
    moved = controls.Averages(means.derivative, means.pruned.at[..., 3].mul(2.0), means.moved)
    before, after = (controls.controlled(m)[0, 0, 3] for m in (means, moved))
    taken_off = float(means.derivative[0, 0, 3] - before)
    of_b = controls.Averages(means.derivative, means.pruned.at[..., 3].set(0.0), means.moved)
    by_b = float(means.derivative[0, 0, 3] - controls.controlled(of_b)[0, 0, 3])
    np.testing.assert_allclose(
        float(means.derivative[0, 0, 3] - after), by_b + 2 * (taken_off - by_b), rtol=1e-4
    )


def test_control_refuses_what_it_cannot_use():
    with pytest.raises(ValueError, match="'f' or a function"):
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
