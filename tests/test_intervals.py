"""The intervals of a report, and what its warnings and notes advise."""

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import stdtrit

import diffmh
from diffmh.models import gaussian
from diffmh.reports import intervals
from diffmh.reports.method import Method

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
    assert "`CommonRandomNumbers()`" in used and "alternatives=4" in used
    assert "CommonRandomNumbers" not in remedy and "alternatives=4," not in remedy
    assert "`MaximalReflection()`" in remedy and "alternatives=16" in remedy
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
        lambda theta, x: x[0],
        walk,
        init=jnp.zeros(10),
        num_samples=5_000,
        num_chains=32,
        estimator=diffmh.StochasticDerivative(alternatives=1),
    )
    text = " ".join(mean.run(0.0, KEY).warnings)
    assert "few alternatives carry the gradient" in text and "`MaximalReflection()`" in text


def test_finite_chain_is_told_from_equilibrium():
    far = normal_mean(scale=0.3, init=6.0, num_samples=200, num_chains=32).run(0.5, KEY)
    (note,) = [note for note in far.notes if note.startswith("finite chain")]
    assert "over the first half" in note and "±" in note and note in str(far)
    assert not normal_mean(burn_in=50, num_chains=32).run(0.5, KEY).notes


def test_a_single_sample_after_burn_in_is_told_too():
    """As in contrastive divergence: the derivative still grows from step to step."""
    short = normal_mean(scale=0.3, num_samples=1, burn_in=19, num_chains=256).run(0.5, KEY)
    assert any("its derivative is" in note for note in short.notes)
