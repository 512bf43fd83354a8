"""Nothing silently wrong: each case of the outside audit of the core is right, refused by name, or
warned of.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import derivative, mixture_occupancy
from programs import derivatives
from unbiasedness import assert_unbiased, is_caught

import diffmh
from diffmh.core import alternatives
from diffmh.models import ising

KEY = jax.random.key(0)
MEANS = jnp.array([-2.5, 2.0, 5.0])


def walk(log_density, scale=1.5):
    return diffmh.MetropolisHastings(log_density, diffmh.GaussianWalk(scale))


def mean_of(kernel, init=0.0, f=lambda theta, x, *args: x, **options):
    settings = dict(num_samples=50, num_chains=4) | options
    return diffmh.expectation(f, kernel, init=init, **settings)


# 1. Ties.


def tied_mixture(estimator, num_chains=20_000):
    density = lambda h, j: -0.5 * ((h - MEANS[j]) / 4.0) ** 2
    kernel = diffmh.MetropolisHastings(density, diffmh.OtherState(3))
    return diffmh.expectation(
        lambda h, j: jax.nn.one_hot(j, 3),
        kernel,
        init=0,
        num_samples=20,
        num_chains=num_chains,
        estimator=estimator,
    )


def test_one_sided_weights_at_an_exact_tie():
    """At h = 3.5 two components tie."""
    found = derivatives(tied_mixture(diffmh.StochasticDerivative("one-sided")), 3.5, KEY)
    exact = derivative(mixture_occupancy(20, 0), np.array([3.5]))[1][:, 0]
    assert_unbiased(found, exact)
    assert abs(exact[1]) > 1e-3


def test_one_sided_weights_that_lose_the_tie_are_caught(monkeypatch):
    def as_printed(self, weights):
        up, down = -self.log_accept_gradient, -self.log_reject_gradient
        return jnp.where(self.accepted, jnp.maximum(0.0, up), jnp.maximum(0.0, down))

    monkeypatch.setattr(diffmh.extend.Acceptance, "flip_weight", as_printed)
    found = derivatives(tied_mixture(diffmh.StochasticDerivative("one-sided")), 3.5, KEY)
    assert is_caught(found, derivative(mixture_occupancy(20, 0), np.array([3.5]))[1][:, 0])


def test_score_says_that_it_cannot_see_ties():
    expectation = tied_mixture(diffmh.Score(), 50)
    assert np.isnan(jax.jacfwd(expectation)(3.5, KEY)).all()
    report = expectation.run(3.5, KEY)
    assert any("exact ties" in warning for warning in report.warnings)
    assert np.isfinite(jax.jacfwd(expectation)(3.4, KEY)).all()


# 2. θ in a bound of the support, or in the place of a jump.

MOVING = {
    "a bound": (lambda t, x: jnp.where((x > 0) & (x < 2 * t), -t * x, -jnp.inf), 1.0),
    "a place": (lambda t, x: jnp.where(x > t[0], t[1], 0.0) - x**2 / 2, jnp.array([0.3, 0.5])),
    "a step": (lambda t, x: 1.0 * (x > t) - x**2, 0.3),
    "a distribution's support": (
        lambda t, x: jax.scipy.stats.uniform.logpdf(x, t, 2.0) + t * x,
        0.3,
    ),
}


@pytest.mark.parametrize("name", MOVING)
def test_a_jump_that_moves_with_theta_is_refused_with_its_line(name):
    density, theta = MOVING[name]
    with pytest.raises(diffmh.NotDifferentiable, match=r"test_audit\.py:\d+"):
        mean_of(walk(density), init=0.5)(theta, KEY)
    with pytest.raises(diffmh.NotDifferentiable, match=r"test_audit\.py:\d+"):
        diffmh.trace(walk(density), theta, KEY, init=0.5, num_steps=5)


@pytest.mark.parametrize(
    "density",
    [
        lambda t, x: -jnp.sum(jax.nn.relu(t * x)) - x**2,
        lambda t, x: -jnp.sum(jax.nn.leaky_relu(t * x)) - x**2,
        lambda t, x: -jnp.where(t * x > 1, t * x - 1, 0.0) - x**2,
        lambda t, x: jnp.where(x > 0, -t * x, -jnp.inf),
        lambda t, x: -jnp.abs(x - t) - jnp.maximum(x, t),
        lambda t, x: -jnp.where(jnp.abs(x - t) < 1.0, 0.5 * (x - t) ** 2, jnp.abs(x - t) - 0.5),
    ],
)
def test_continuous_densities_and_fixed_bounds_pass_without_a_word(density):
    report = mean_of(walk(density), init=0.5).run(0.7, KEY)
    assert not any("jump" in warning for warning in report.warnings)


def triangles(z):
    """A triangle wave: continuous, but the analysis does not see through rounding."""
    return jnp.abs(z - jnp.round(z))


def test_what_the_analysis_cannot_tell_is_warned_of_and_can_be_vouched_for():
    mean = mean_of(walk(lambda t, x: -(x**2) - triangles(x - t)))
    for doubtful in (mean, diffmh.compose(lambda t, m: m, mean)):
        warnings = doubtful.run(0.7, KEY).warnings
        assert any("may jump" in w and "test_audit.py" in w for w in warnings)
    vouched = mean_of(walk(lambda t, x: -(x**2) - diffmh.continuous(triangles)(x - t))).run(
        0.7, KEY
    )
    assert not any("jump" in warning for warning in vouched.warnings)


def test_integers_step_as_they_like():
    density = lambda t, j: jnp.where(j > 1, t, 0.0)
    mean_of(diffmh.MetropolisHastings(density, diffmh.OtherState(3)), init=0)(0.5, KEY)


def test_what_a_jump_would_lose_is_seen_without_the_refusal(monkeypatch):
    """The refusal is there for a reason: the exact derivative by the place is 0.038, not 0."""
    monkeypatch.setattr(diffmh.core.admission, "moving_jumps", lambda *_: [])
    density, theta = MOVING["a place"]
    found = mean_of(walk(density), num_samples=200, num_chains=64).run(theta, KEY)
    assert found.gradient[0] == 0
    assert any("exactly 0 ± 0" in warning for warning in found.warnings)


# 3. Covariance.


def test_covariance_refuses_different_densities():
    first, second = (walk(lambda t, x, k=k: -k * (x - t) ** 2) for k in (0.5, 0.7))
    with pytest.raises(ValueError, match="different ones"):
        mean_of(diffmh.Cycle(first, second), estimator=diffmh.Covariance())(0.5, KEY)


def test_covariance_takes_kernels_of_one_density():
    density = lambda t, x: -0.5 * (x - t) ** 2
    cycle = diffmh.Cycle(walk(density, 0.5), diffmh.Repeat(walk(density, 2.0), 2))
    jax.grad(mean_of(cycle, estimator=diffmh.Covariance()))(0.5, KEY)
    energy = diffmh.expectation(
        ising.energy, ising.sampler(), init=ising.cold(4), num_samples=5,
        estimator=diffmh.Covariance(),
    )  # fmt: skip
    jax.grad(energy)(3.0, KEY)


# 4. Silent zeros of what is not differentiated.

NORMAL = walk(lambda theta, x: -0.5 * (x - theta) ** 2)


def test_gradients_through_trace_and_run_chains_are_refused():
    through_trace = lambda t: diffmh.trace(NORMAL, t, KEY, init=0.0, num_steps=5).primal.sum()
    with pytest.raises(diffmh.NotDifferentiable, match="trace"):
        jax.grad(through_trace)(0.5)
    with pytest.raises(diffmh.NotDifferentiable, match="call the expectation itself"):
        jax.grad(lambda t: mean_of(NORMAL).run_chains(t, KEY).value.sum())(0.5)


# 5. Scales.


@pytest.mark.parametrize("size", [1e20, 1.0, 1e-19])
def test_two_parameters_of_any_size(size):
    """`log g = −(x − θ_0/s)²/2 + x θ_1/s`: the derivatives are those at s = 1, over s."""

    def gradient(scale):
        density = lambda t, x: -0.5 * (x - t[0] / scale) ** 2 + x * t[1] / scale
        theta = jnp.array([0.5, 0.2]) * scale
        return np.asarray(jax.grad(mean_of(walk(density), num_chains=16))(theta, KEY)) * scale

    np.testing.assert_allclose(gradient(size), gradient(1.0), rtol=1e-3)


def starved(num_chains=4_000):
    """Two parameters, one with 10⁴ times the other's derivative: errors of each alone, of both."""

    def spread(weights):
        density = lambda t, x: jnp.sum(-0.5 * (x - jnp.asarray(weights) * t) ** 2)
        kernel = walk(density, 1.7)
        options = {"num_samples": 40, "num_chains": num_chains}
        one = diffmh.StochasticDerivative(alternatives=1)
        mean = mean_of(kernel, init=jnp.zeros(2), f=lambda t, x: x, estimator=one, **options)
        jacobian = derivatives(mean, jnp.zeros(2), KEY)
        return np.std(np.asarray(jacobian)[:, 0, 0])

    return spread([1.0, 1e4]) / spread([1.0, 1.0])


def test_a_large_parameter_does_not_starve_a_small_one():
    assert starved() < 1.2


def test_unscaled_scores_are_caught(monkeypatch):
    monkeypatch.setattr(
        alternatives.Alternatives,
        "score",
        property(lambda self: alternatives.values.norm(self.weight.T)),
    )
    right = alternatives.values.pick
    monkeypatch.setattr(
        alternatives.values, "pick", lambda c, u, old, scale=None: right(c, u, old, None)
    )
    assert starved() > 1.2


def test_the_error_of_a_small_value_is_not_zero():
    report = mean_of(NORMAL, f=lambda theta, x: 1e-30 * x).run(0.5, KEY)
    assert report.value_error > 0 and report.gradient_error > 0


# 7. Admission.


class Times:
    """Two of these look alike."""

    def __init__(self, uses_theta):
        self.uses_theta = uses_theta

    def __repr__(self):
        return "Times()"

    def __call__(self, theta, x):
        return theta**2 * x if self.uses_theta else x


def test_objects_that_look_alike_are_not_the_same():
    kernel = walk(lambda theta, x, g: -0.5 * (x - 2.0) ** 2 + 0.01 * theta * x)
    mean = mean_of(kernel, f=lambda theta, x, g: g(theta, x), num_samples=400)
    mean.run(1.5, KEY, Times(False))
    assert mean.run(1.5, KEY, Times(True)).gradient > 3


# 9. Saturation.


def test_a_log_density_too_large_for_its_digits_is_warned_of():
    large = walk(lambda theta, x: -0.5 * (x - theta) ** 2 - 5e7)
    assert any("last digit" in warning for warning in mean_of(large).run(0.5, KEY).warnings)
    assert not any("last digit" in warning for warning in mean_of(NORMAL).run(0.5, KEY).warnings)


# 10, 11. Shapes and starts.


class WithoutItsSum(diffmh.extend.Proposal):
    symmetric: bool = False

    def sample(self, key, x):
        return x + jax.random.normal(key, x.shape)

    def log_prob(self, x, x_new):
        return -0.5 * (x_new - x) ** 2


def test_a_log_prob_without_its_sum_is_refused():
    kernel = diffmh.MetropolisHastings(lambda t, x: -jnp.sum((x - t) ** 2), WithoutItsSum())
    with pytest.raises(TypeError, match=r"log_prob` must return a scalar, got shape \(3,\)"):
        mean_of(kernel, init=jnp.zeros(3))(0.5, KEY)


def test_starts_outside_the_support_are_refused():
    inside = lambda t, x: -0.5 * (x - t) ** 2
    beyond = lambda t, x: jnp.where(x > 1, -t * x, -jnp.inf)
    with pytest.raises(ValueError, match="of kernel 1 is -inf"):
        mean_of(diffmh.Cycle(walk(inside), walk(beyond)))(0.5, KEY)
    with pytest.raises(ValueError, match="is -inf at the start"):
        diffmh.trace(walk(beyond), 0.5, KEY, init=0.0, num_steps=5)
    with pytest.raises(ValueError, match="is nan at the start"):
        diffmh.trace(walk(lambda t, x: jnp.log(x) * t), 0.5, KEY, init=-1.0, num_steps=5)


@pytest.mark.parametrize(
    ("proposal", "init", "words"),
    [
        (diffmh.SpinFlip(site=7), jnp.ones(3, int), "site"),
        (diffmh.SpinFlip(), jnp.array([1, 0, 1]), "±1"),
        (diffmh.SpinFlip(), jnp.ones(3, jnp.uint8), "uint8"),
        (diffmh.OtherState(3), 7, "7"),
        (diffmh.OtherState(3), -1, "-1"),
    ],
)
def test_starts_that_a_proposal_cannot_move_are_refused(proposal, init, words):
    kernel = diffmh.MetropolisHastings(lambda t, x: 1.0 * t * jnp.sum(x), proposal)
    with pytest.raises((TypeError, ValueError), match=words):
        mean_of(kernel, init=init, f=lambda t, x: 1.0 * jnp.sum(x))(0.5, KEY)


def test_what_has_nothing_in_it_is_refused():
    with pytest.raises(ValueError, match="is empty"):
        mean_of(NORMAL, init=jnp.zeros(0))(0.5, KEY)
    with pytest.raises(ValueError, match="nothing in it"):
        mean_of(NORMAL, f=lambda theta, x: jnp.zeros(0) * x)(0.5, KEY)


# 13. One rule for a gradient that cannot be right.


def test_a_part_that_never_moves_is_warned_of():
    density = lambda t, x: -0.5 * (x["a"] - t) ** 2 - x["b"] ** 2 * t
    move = diffmh.On(lambda x: x["a"], diffmh.GaussianWalk(1.0))
    kernel = diffmh.MetropolisHastings(density, move)
    report = mean_of(kernel, init={"a": 0.0, "b": 0.5}, f=lambda t, x: x["b"] + x["a"]).run(
        0.5, KEY
    )
    assert any("part 1 of the state never moved" in warning for warning in report.warnings)


def test_a_gradient_without_births_is_warned_of():
    """Far above the bound every proposal is accepted, and no decision depends on theta."""
    density = lambda t, x: t * (x - x)
    kernel = walk(lambda t, x: density(t, x) * 1.0)
    report = mean_of(kernel, f=lambda t, x: t * x).run(0.5, KEY)
    assert any("no alternative was ever born" in warning for warning in report.warnings)


def test_good_couplings_are_not_called_bad_in_short_runs():
    report = mean_of(NORMAL, num_samples=20, num_chains=16).run(0.5, KEY)
    assert not any("recouple" in warning for warning in report.warnings)


# 15. Errors.


def test_effective_samples_of_few_short_chains():
    """Nearly independent samples: no more than there are, over runs of four chains."""
    proposal = diffmh.Independence(Standard())
    kernel = diffmh.MetropolisHastings(lambda t, x: -0.5 * x**2 + t * x, proposal)
    mean = mean_of(kernel, num_samples=40, num_chains=4)
    found = [float(mean.run(0.0, jax.random.key(seed)).effective_samples) for seed in range(60)]
    assert 0.2 < np.exp(np.mean(np.log(found))) / 160 < 1.2
    assert np.mean(found) / 160 < 1.5


class Standard:
    def sample(self, key):
        return jax.random.normal(key)

    def log_prob(self, x):
        return jax.scipy.stats.norm.logpdf(x)


def test_intervals_of_four_chains_cover():
    """Student's quantile with 3 degrees of freedom: 95 % over 300 runs, within 4 errors of it."""
    chains = mean_of(NORMAL, num_samples=60, num_chains=1200, burn_in=30)
    values = np.asarray(chains.per_chain(0.5, KEY)).reshape(300, 4)
    mean, error = values.mean(axis=1), values.std(axis=1, ddof=1) / 2
    report = mean_of(NORMAL).run(0.5, KEY)
    low, high = report.interval(0.95)[0]
    quantile = float((high - low) / 2 / report.value_error)
    covered = np.mean(np.abs(mean - values.mean()) < quantile * error)
    assert abs(covered - 0.95) < 4 * np.sqrt(0.05 * 0.95 / 300)
