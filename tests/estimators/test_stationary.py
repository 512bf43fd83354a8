"""The equilibrium's value and derivative from pairs of chains, from starts that are far from it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from finite_chains import f as finite_f
from finite_chains import log_density as finite_density
from finite_chains import random_problem
from oracles import derivative, mixture_log_density, mixture_occupancy, transition_matrix
from pairs import groups, parts
from programs import derivatives, each
from unbiasedness import assert_unbiased, is_caught

import diffmh
from diffmh.core.pair import PairSchedule
from diffmh.estimators import mixing, paired
from diffmh.estimators.pair_recorder import PairRecorder
from diffmh.extend import Bernoulli, BlockUpdate
from diffmh.models import gaussian, ising, mixture

KEY = jax.random.key(3)
OCCUPANCY = np.array([[-0.079093], [0.022615], [0.056478]])
PROBABILITY = np.array([0.348195, 0.418039, 0.233767])


def of_mixture(estimator, num_chains=16_384, num_samples=5, burn_in=0):
    # A fresh function, so that what was patched is what runs.
    indicator = lambda h, j: mixture.indicator(h, j)
    return diffmh.expectation(
        indicator,
        mixture.sampler(),
        init=0,
        num_samples=num_samples,
        burn_in=burn_in,
        num_chains=num_chains,
        estimator=estimator,
    )


@functools.cache
def mixture_parts(lag: int):
    # Many at lag 1: β of the same fold is a small mistake.
    num_chains = 65_536 if lag == 1 else 16_384
    return parts(of_mixture(diffmh.Stationary(lag), num_chains), 0.4, KEY)


def test_the_numbers_are_the_equilibriums():
    def of(h):
        weights = np.exp(mixture_log_density(h[0]))
        return weights / weights.sum()

    value, slope = derivative(of, np.array([0.4]))
    np.testing.assert_allclose(slope, OCCUPANCY, atol=1e-6)
    np.testing.assert_allclose(value, PROBABILITY, atol=1e-6)


@pytest.mark.parametrize("lag", [1, *(pytest.param(n, marks=pytest.mark.thorough) for n in (2, 5))])
def test_mixture_from_its_start(lag):
    found = mixture_parts(lag)
    assert_unbiased(found.value, PROBABILITY, "value")
    for what in ("decisions", "covariance", "mixed"):
        assert_unbiased(getattr(found, what), OCCUPANCY, what)
    finite, slope = derivative(mixture_occupancy(5, 0), np.array([0.4]))
    # The finite chain's numbers are told apart.
    assert is_caught(found.value, finite.real) and is_caught(found.mixed, slope)


class TwoStates(BlockUpdate):
    """From 0 to 1 with probability sigmoid(θ), from 1 to 0 with 0.3."""

    theta_enters_by_evaluate = True

    def log_density(self, theta, x, *args):
        return jnp.where(x == 1, jax.nn.log_sigmoid(theta) - jnp.log(0.3), 0.0)

    def noise(self, key, x, num_steps):
        return jax.random.uniform(key, (num_steps,))

    def decide(self, parameters, state, noise):
        odds = lambda theta, x: jnp.where(x == 1, jnp.log(0.7 / 0.3), theta)
        return Bernoulli.draw(noise, parameters.evaluate(odds, state.value))

    def result(self, x, noise, outcome):
        return outcome.astype(x.dtype)


def test_two_states():
    expectation = diffmh.expectation(
        lambda theta, x: 1.0 * x,
        TwoStates(),
        init=0,
        num_samples=2,
        num_chains=16_384,
        estimator=diffmh.Stationary(),
    )
    found = parts(expectation, 0.0, KEY)
    assert_unbiased(found.value, np.array([0.625]))
    for what in ("decisions", "covariance", "mixed"):
        assert_unbiased(getattr(found, what), np.array([[0.1171875]]), what)


def slopes_of_two_pairs(num_samples, runs=4096):
    expectation = diffmh.expectation(
        lambda theta, x: 1.0 * x,
        TwoStates(),
        init=0,
        num_samples=num_samples,
        burn_in=3,
        num_chains=2,
        estimator=diffmh.Stationary(),
    )
    keys = jax.random.split(KEY, runs)
    slopes = jax.jit(jax.vmap(jax.grad(expectation), (None, 0)))(0.0, keys)
    return np.asarray(slopes, float)[:, None]


@pytest.mark.parametrize("num_samples", [1, 2])
def test_births_of_the_last_sample(num_samples):
    """They come after it. With few pairs, all slots are often empty before that step."""
    assert_unbiased(slopes_of_two_pairs(num_samples), np.array([0.1171875]))


def test_births_of_the_last_sample_dropped(monkeypatch):
    def wrong(self, now):
        return now >= self.estimator.schedule.last

    monkeypatch.setattr(PairRecorder, "_no_births_left", wrong)
    assert is_caught(slopes_of_two_pairs(2), np.array([0.1171875]))


def of_normal(kernel, estimator, num_samples=20, burn_in=5, num_chains=8192, init=4.0):
    return diffmh.expectation(
        lambda theta, x: jnp.stack([x, x**2]),
        kernel,
        init=init,
        num_samples=num_samples,
        burn_in=burn_in,
        num_chains=num_chains,
        estimator=estimator,
    )


NORMAL = np.array([[1.0], [1.0]])


def test_normal_from_random_starts_far_away():
    """The second chain starts from a draw of its own: the two start together only by chance."""
    start = lambda key: 4.0 + jax.random.normal(key)
    expectation = of_normal(gaussian.sampler(), diffmh.Stationary(), init=start)
    found = parts(expectation, 0.5, KEY)
    assert_unbiased(found.value, np.array([0.5, 1.25]))
    for what in ("decisions", "covariance", "mixed"):
        assert_unbiased(getattr(found, what), NORMAL, what)
    # From one start, a chain that rejects its first proposal has met the other at once.
    assert np.mean(np.asarray(found.outcome.meetings.time) == 1) < 0.2


def test_langevin():
    """Moves that depend on θ: by the score of the proposal, without tangents."""
    kernel = diffmh.Langevin(gaussian.log_density, 1.2)
    found = parts(of_normal(kernel, diffmh.Stationary()), 0.5, KEY)
    assert_unbiased(found.value, np.array([0.5, 1.25]))
    for what in ("decisions", "covariance", "mixed"):
        assert_unbiased(getattr(found, what), NORMAL, what)


def test_hamiltonian_in_a_mixture_with_a_walk():
    kernel = diffmh.Mixture(diffmh.Hamiltonian(gaussian.log_density, 0.3, 5), gaussian.sampler())
    expectation = of_normal(kernel, diffmh.Stationary())
    assert_unbiased(derivatives(expectation, 0.5, KEY), NORMAL[:, 0])


@pytest.mark.thorough
@pytest.mark.parametrize("size", [4, 8])
def test_ising_from_the_cold_start(size):
    expectation = diffmh.expectation(
        ising.energy,
        ising.sampler(),
        init=ising.cold(size),
        num_samples=20,
        burn_in=5 if size == 4 else 30,
        num_chains=2048,
        estimator=diffmh.Stationary(alternatives=4),
    )
    exact, found = ising.exact(size, 3.0), parts(expectation, 3.0, KEY)
    assert_unbiased(found.value, np.array([exact.energy]))
    for what in ("decisions", "covariance", "mixed"):
        assert_unbiased(getattr(found, what), np.array([[exact.heat_capacity]]), what)


def mixes(problem) -> bool:
    """False for a chain that cannot leave some of its states, or hardly does."""
    own = np.diag(problem.proposal) < 1
    matrix = transition_matrix(problem.base + problem.features @ problem.theta, problem.proposal)
    return bool(np.linalg.matrix_power(matrix.real[np.ix_(own, own)], 20).min() > 1e-3)


def check_random_chains(seeds):
    """Random chains on finitely many states, each from the state that equilibrium visits least."""
    problems = [problem for problem in map(random_problem, seeds) if mixes(problem)]
    assert len(problems) > len(seeds) // 3
    exact, starts = [], []
    for problem in problems:

        def mean(theta, problem=problem):
            log_g = problem.base + problem.features @ theta
            possible = np.diag(problem.proposal) < 1
            weights = np.where(possible, np.exp(log_g), 0.0)
            pi = weights / weights.sum()
            return pi @ (problem.values + problem.slopes * theta[0])

        exact.append(derivative(mean, problem.theta)[1])
        log_g = problem.base + problem.features @ problem.theta
        starts.append(np.argmin(np.where(np.diag(problem.proposal) < 1, log_g, np.inf)))

    def one(given, key):
        problem, start = given
        kernel = diffmh.MetropolisHastings(
            finite_density, diffmh.TransitionMatrix(problem.proposal)
        )
        expectation = diffmh.expectation(
            finite_f,
            kernel,
            init=start.astype(int),
            num_samples=4,
            num_chains=2048,
            estimator=diffmh.Stationary(),
        )
        return jax.jacfwd(expectation.per_chain)(problem.theta, key, *problem[2:])

    pairs = [(problem, np.array(start)) for problem, start in zip(problems, starts, strict=True)]
    for number, (samples, wanted) in enumerate(zip(each(one, pairs, 5), exact, strict=True)):
        assert_unbiased(samples, wanted, f"random chain {number}")


def test_random_chains():
    check_random_chains(range(5))


@pytest.mark.thorough
def test_a_hundred_random_chains():
    check_random_chains(range(100))


def test_lag_function_of_a_step_size():
    """The autocovariance's derivative with respect to a walk's scale; a state's expectation does
    not depend on it.
    """
    walk = diffmh.MetropolisHastings(
        lambda theta, x: -0.5 * x**2, lambda theta: diffmh.GaussianWalk(theta)
    )
    expectation = diffmh.expectation(
        lambda theta, earlier, x: jnp.stack([earlier * x, x**2]),
        walk,
        init=2.0,
        num_samples=20,
        burn_in=5,
        num_chains=8192,
        lag=1,
        estimator=diffmh.Stationary(),
    )
    found = parts(expectation, 2.38, KEY)
    assert found.covariance is None
    assert_unbiased(found.value, np.array([0.627984, 1.0]))
    assert_unbiased(found.mixed, np.array([[-0.00374935], [0.0]]))


def test_value_alone_is_the_derivatives_value():
    """And both follow the primal that a plain chain follows."""
    expectation = of_mixture(diffmh.Stationary(), num_chains=256, num_samples=20, burn_in=12)
    found, given = parts(expectation, 0.4, KEY), jax.jit(expectation.per_chain)(0.4, KEY)
    np.testing.assert_array_equal(np.asarray(given), np.asarray(found.value, np.float32))
    plain = of_mixture(diffmh.Covariance(), num_chains=256, num_samples=20, burn_in=12)
    plain = np.asarray(jax.jit(plain.per_chain)(0.4, KEY))
    early = np.asarray(found.outcome.meetings.time) <= 13
    assert early.sum() > 100
    np.testing.assert_array_equal(np.asarray(given)[early], plain[early])


@pytest.mark.thorough
def test_few_chains_have_no_covariance():
    expectation = of_mixture(diffmh.Stationary(), num_chains=4)
    report = expectation.run(0.4, KEY)
    assert any("4 chains" in note for note in report.notes)


# Deliberate mistakes.
def wrong_parts(monkeypatch, lag=1):
    monkeypatch.setattr(mixing, "mixed", lambda means, value: means.derivative)
    return parts(of_mixture(diffmh.Stationary(lag)), 0.4, KEY)


def test_births_of_the_second_chain_dropped(monkeypatch):
    right = paired.alternatives.settle

    def wrong(moved, at, candidates):
        return right(moved, at, jnp.zeros_like(candidates))

    # The primal's births go through `follow`, which has the right one.
    follow = paired.alternatives.follow
    monkeypatch.setattr(paired, "alternatives", _With(paired.alternatives, settle=wrong))
    assert paired.alternatives.follow is follow
    found = wrong_parts(monkeypatch)
    assert_unbiased(found.value, PROBABILITY)
    assert is_caught(found.decisions, OCCUPANCY)


class _With:
    """A module with some of its functions replaced."""

    def __init__(self, module, **replaced):
        self._module, self._replaced = module, replaced

    def __getattr__(self, name):
        return self._replaced.get(name) or getattr(self._module, name)


def test_excess_off_by_one(monkeypatch):
    right = PairSchedule.excess

    def wrong(self, t, met):
        return jnp.where(met, 0, right(self, t + 1, met))

    monkeypatch.setattr(PairSchedule, "excess", wrong)
    found = wrong_parts(monkeypatch)
    assert is_caught(found.value, PROBABILITY)
    assert is_caught(found.decisions, OCCUPANCY)


def test_coefficient_of_the_same_fold(monkeypatch):
    means = mixture_parts(1).means
    assert_unbiased(groups(means, 8), OCCUPANCY, "eight pairs at a time")
    right = mixing.coefficient

    def wrong(own, difference, folds):
        # The folds the other way round: β of each from itself.
        return right(own, difference, folds)[..., ::-1]

    monkeypatch.setattr(mixing, "coefficient", wrong)
    assert is_caught(groups(means, 8), OCCUPANCY)


def test_covariance_within_a_pair(monkeypatch):
    """Of one pair, H(f s) − H(f) H(s): its second factor is not independent of the first."""
    means = mixture_parts(1).means
    within = np.asarray(means.product - means.score[:, None] * means.value[None], float)
    assert is_caught(np.moveaxis(within, (0, 1, 2), (2, 1, 0)), OCCUPANCY)


def test_pairs_that_have_not_met_are_not_averaged_away():
    expectation = of_mixture(diffmh.Stationary(max_steps=6, alternatives=0))
    value = np.asarray(jax.jit(expectation.per_chain)(0.4, KEY))
    lost = np.isnan(value).any(axis=1)
    assert 0 < lost.sum() < len(lost)
    # Without them the value is wrong.
    assert is_caught(value[~lost], PROBABILITY)
    assert np.isnan(expectation(0.4, KEY)).all()


def test_run_says_how_many_have_not_met():
    expectation = of_mixture(diffmh.Stationary(max_steps=6, alternatives=0), num_chains=64)
    report = expectation.run(0.4, KEY)
    assert np.isnan(report.value).all() and np.isnan(report.gradient).all()
    unmet = report.meeting_time.num_unmet
    assert unmet > 0
    assert any(f"{unmet} of 64 pairs" in text and "max_steps=6" in text for text in report.warnings)


@pytest.mark.thorough
def test_alternatives_under_way_are_not_cut_off():
    """Pairs that have met, but whose alternatives live on."""
    expectation = of_mixture(diffmh.Stationary(max_steps=5), num_chains=2048)
    found = parts(expectation, 0.4, KEY)
    meetings = found.outcome.meetings
    under_way = np.asarray(meetings.met & ~meetings.finished)
    assert under_way.any()
    assert np.isfinite(found.value[under_way]).all()
    assert np.isnan(found.decisions[under_way]).all()


def test_meeting_time():
    report = of_mixture(diffmh.Stationary(lag=2), num_chains=512).run(0.4, KEY)
    time = report.meeting_time
    assert time.num_unmet == 0 and time.times.min() >= 2
    assert time.mean <= time.quantile(0.99) <= time.steps.max()
    assert "met after" in str(report)
    # The bound holds for the exact distance after t steps.
    matrix = transition_matrix(mixture_log_density(0.4), (1 - np.eye(3)) / 2).real
    row = np.eye(3)[0]
    for t in range(8):
        exact = 0.5 * np.abs(row - PROBABILITY).sum()
        assert time.distance(t) > exact - 0.02
        row = row @ matrix
    assert time.distance(time.burn_in) < 0.01 <= time.distance(time.burn_in - 1)
    left, right = diffmh.plots.meeting(report).axes
    steps, apart = left.get_lines()[0].get_xydata().T
    np.testing.assert_allclose(apart, [np.mean(time.times > t) for t in steps])
    bound = right.get_lines()[0].get_xydata()[:, 1]
    np.testing.assert_allclose(bound, np.minimum(1, time.distance(steps.astype(int))))
    with pytest.raises(ValueError, match=r"Stationary\(\)"):
        diffmh.plots.meeting(dataclasses.replace(report, meeting_time=None))
    none_met = dataclasses.replace(time, times=np.full_like(time.times, -1))
    with pytest.raises(ValueError, match="raise `max_steps`"):
        diffmh.plots.meeting(dataclasses.replace(report, meeting_time=none_met))


# The finite chain, with the covariance as its control.
@pytest.mark.parametrize(
    ("num_samples", "burn_in"),
    [
        (5, 0),
        pytest.param(10, 3, marks=pytest.mark.thorough),
        pytest.param(20, 0, marks=pytest.mark.thorough),
        pytest.param(200, 0, marks=pytest.mark.thorough),
    ],
)
def test_control_by_covariance(num_samples, burn_in):
    estimator = diffmh.StochasticDerivative(control="covariance")
    expectation = of_mixture(estimator, 8192, num_samples, burn_in)
    found = parts(expectation, 0.4, KEY)
    value, exact = derivative(mixture_occupancy(num_samples, burn_in), np.array([0.4]))
    assert_unbiased(found.value, value.real)
    for what in ("decisions", "mixed"):
        assert_unbiased(getattr(found, what), exact, what)
    # The correction F − D, without which C − F is not of mean zero.
    correction = np.moveaxis(np.asarray(found.means.correction, float), (0, 1, 2), (2, 1, 0))
    assert_unbiased(correction, exact - OCCUPANCY, "correction")
    if num_samples == 5:
        assert is_caught(correction, np.zeros_like(exact))


# Refusals.
def test_refused():
    density = gaussian.log_density
    walk = lambda coupling: diffmh.MetropolisHastings(density, diffmh.GaussianWalk(1.0), coupling)
    hamiltonian = diffmh.Hamiltonian(density, 0.3, 5)
    apart = [
        hamiltonian,
        walk(diffmh.CommonRandomNumbers()),
        walk(diffmh.Independent()),
        walk(diffmh.TwoScale(diffmh.CommonRandomNumbers(), near=diffmh.Independent())),
        diffmh.Langevin(density, 1.0, diffmh.CommonRandomNumbers()),
    ]
    for kernel in apart:
        for estimator in (
            diffmh.Stationary(),
            diffmh.Stationary(alternatives=0),
            diffmh.StochasticDerivative(control="covariance"),
        ):
            with pytest.raises(ValueError, match=r"needs chains that meet.*Mixture"):
                of_normal(kernel, estimator)
    mixed = diffmh.Mixture(hamiltonian, walk(None))
    with pytest.raises(ValueError, match=r"Hamiltonian.*alternatives=0"):
        of_normal(mixed, diffmh.Stationary(alternatives=1))
    with pytest.raises(ValueError, match=r"max_steps=20.*25"):
        of_normal(walk(None), diffmh.Stationary(max_steps=20))
    scaled = diffmh.MetropolisHastings(density, lambda theta: diffmh.GaussianWalk(1.0 + theta**2))
    with pytest.raises(ValueError, match=r"covariance alone.*parameters of the proposal"):
        of_normal(scaled, diffmh.Stationary(alternatives=0))(0.5, KEY)
    with pytest.raises(ValueError, match=r"control='covariance'.*parameters of the proposal"):
        of_normal(scaled, diffmh.StochasticDerivative(control="covariance"))(0.5, KEY)
    with pytest.raises(ValueError, match="`num_chains` of at least 2"):
        of_normal(walk(None), diffmh.Stationary(alternatives=0), num_chains=1)(0.5, KEY)
    with pytest.raises(ValueError, match="two-sided"):
        diffmh.StochasticDerivative("one-sided", control="covariance")
    for wrong in (dict(lag=0), dict(alternatives=-1), dict(max_steps=0)):
        with pytest.raises(ValueError, match=r"`Stationary\("):
            diffmh.Stationary(**wrong)


COVERED = {
    "mixture": (lambda estimator: of_mixture(estimator, 32, 5), 0.4, OCCUPANCY[:, 0]),
    "mixture, covariance": (lambda _: of_mixture(diffmh.Stationary(alternatives=0), 32, 20),
                            0.4, OCCUPANCY[:, 0]),
    "normal": (lambda estimator: of_normal(gaussian.sampler(), estimator, num_chains=32),
               0.5, NORMAL[:, 0]),
    "langevin": (lambda estimator: of_normal(diffmh.Langevin(gaussian.log_density, 1.2), estimator,
                                             num_chains=32), 0.5, NORMAL[:, 0]),
}  # fmt: skip


@pytest.mark.thorough
def test_coverage():
    """Of 95 % intervals of the gradient, over 400 seeds and four problems."""
    held = []
    for make, theta, exact in COVERED.values():
        expectation = make(diffmh.Stationary())
        for seed in range(400):
            low_high = expectation.run(theta, jax.random.key(seed)).interval(0.95)[1]
            held.append((low_high[..., 0] < exact) & (exact < low_high[..., 1]))
    assert 0.93 < np.concatenate([np.ravel(each) for each in held]).mean() < 0.97
