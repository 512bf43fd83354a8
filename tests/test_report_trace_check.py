"""What people look at: the report of a run, the trace of a chain, and the check of their own
parts.
"""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import diffmh

KEY = jax.random.key(3)
MEANS = jnp.array([-2.5, 2.0, 5.0])


def log_mixture(h, j):
    return -0.5 * ((h - MEANS[j]) / 4.0) ** 2


def log_normal(theta, x):
    return -0.5 * (x - theta) ** 2


def identity(theta, x):
    return x


LABELS = diffmh.MetropolisHastings(log_mixture, diffmh.OtherState(3))
WALK = diffmh.MetropolisHastings(log_normal, diffmh.GaussianWalk(2.38))
OCCUPANCY = diffmh.expectation(
    lambda h, j: {"p": jax.nn.one_hot(j, 3)},
    LABELS,
    init=0,
    num_samples=200,
    burn_in=20,
    num_chains=8,
)
ENTROPY = diffmh.compose(lambda h, m: -jnp.sum(m["p"] * jnp.log(m["p"])), OCCUPANCY)
TREE = diffmh.expectation(
    lambda theta, x: (x, [theta["mean"] * x**2]),
    diffmh.MetropolisHastings(
        lambda theta, x: -0.5 * jnp.sum((x - theta["mean"]) ** 2 * theta["precision"]),
        diffmh.GaussianWalk(1.5),
    ),
    init=jnp.zeros(2),
    num_samples=200,
    num_chains=8,
)
RATIO = diffmh.compose(
    lambda theta, a, b: {"ratio": a[0] / (1 + jnp.sum(b[1][0]))},
    TREE,
    diffmh.expectation(
        TREE.simulation.f, TREE.simulation.kernel, init=jnp.ones(2), num_samples=200, num_chains=8
    ),
)
TREE_THETA = {"mean": jnp.array([0.5, -0.2]), "precision": jnp.float32(1.3)}


def close_trees(tree, expected, rtol=1e-5):
    assert jax.tree.structure(tree) == jax.tree.structure(expected)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-6), tree, expected
    )


@pytest.mark.parametrize(
    "function, theta",
    [(OCCUPANCY, 0.4), (ENTROPY, 0.4), (TREE, TREE_THETA), (RATIO, TREE_THETA)],
    ids=["mixture", "entropy", "tree", "composed tree"],
)
def test_report_is_of_the_same_run(function, theta):
    report = function.run(theta, KEY)
    close_trees(report.value, function(theta, KEY))
    close_trees(report.gradient, jax.jacobian(function)(theta, KEY))
    assert any(np.any(np.asarray(leaf) != 0) for leaf in jax.tree.leaves(report.gradient))

    # The standard error over the chains, of the value and of the derivative along each parameter.
    error = lambda chains: np.std(chains, axis=0, ddof=1) / np.sqrt(8)
    close_trees(report.value_error, jax.tree.map(error, function.per_chain(theta, KEY)))
    per_chain = jax.jacfwd(lambda theta: function.per_chain(theta, KEY))(theta)
    close_trees(report.gradient_error, jax.tree.map(error, per_chain), rtol=1e-4)
    for field in (report.value_error, report.gradient_error):
        assert all(np.all(np.asarray(leaf) > 0) for leaf in jax.tree.leaves(field))

    assert jax.tree.structure(report.effective_samples) == jax.tree.structure(report.value)
    numbers = (
        report.acceptance_rate,
        report.recoupling_time,
        report.alive_fraction,
        report.max_weight,
        report.effective_samples,
    )
    assert all(
        np.all(np.isfinite(leaf)) and np.all(np.asarray(leaf) > 0)
        for leaf in jax.tree.leaves(numbers)
    )
    assert 0 < report.acceptance_rate < 1 and 0 < report.alive_fraction <= 1
    assert report.nan_proposals == 0
    assert "±" in str(report) and all(warning in str(report) for warning in report.warnings)


def test_report_counts_what_the_trace_shows():
    """The trace is the first of the chains."""
    expectation = diffmh.expectation(identity, WALK, init=0.0, num_samples=300, num_chains=2)
    trace = diffmh.trace(WALK, 0.5, KEY, init=0.0, num_steps=300)
    counts = expectation.run_chains(0.5, KEY).outcomes[0].counts
    assert counts.decisions[0] == 300 and counts.accepted[0] == trace.accepted.sum()
    assert counts.alive[0] == trace.alive.sum() and counts.recoupled[0] == trace.recoupled.sum()
    np.testing.assert_allclose(counts.max_weight[0], jnp.abs(trace.weight).max(), rtol=1e-6)

    report = expectation.run(0.5, KEY)
    np.testing.assert_allclose(report.acceptance_rate, counts.accepted.sum() / 600, rtol=1e-6)
    np.testing.assert_allclose(report.alive_fraction, counts.alive.sum() / 600, rtol=1e-6)
    np.testing.assert_allclose(
        report.recoupling_time, counts.alive.sum() / counts.recoupled.sum(), rtol=1e-6
    )
    np.testing.assert_allclose(report.max_weight, counts.max_weight.max(), rtol=1e-6)


def autocorrelation_time(path):
    """`1 + 2 Σ ρ_k`, summed up to the first lag beyond five times itself (Sokal 1997)."""
    centred = path - path.mean()
    spectrum = np.fft.rfft(centred, 2 * len(path))
    covariance = np.fft.irfft(np.abs(spectrum) ** 2)[: len(path)]
    times = 2 * np.cumsum(covariance / covariance[0]) - 1
    return times[np.argmax(np.arange(len(path)) >= 5 * times)], covariance[1] / covariance[0]


def test_effective_samples():
    path = np.asarray(diffmh.trace(WALK, 0.5, KEY, init=0.5, num_steps=100_000).primal, float)
    time, first = autocorrelation_time(path)
    np.testing.assert_allclose(first, 0.627984, atol=0.02)
    report = diffmh.expectation(identity, WALK, init=0.5, num_samples=5_000, num_chains=16).run(
        0.5, KEY
    )
    np.testing.assert_allclose(report.effective_samples, 16 * 5_000 / time, rtol=0.25)


def test_effective_samples_of_a_chain_that_hardly_moves():
    """Steps of 0.01 decorrelate after some 26,000: 16 chains of 5,000 are worth hardly more than
    their starts.
    """
    slow = diffmh.MetropolisHastings(log_normal, diffmh.GaussianWalk(0.01))
    draw = lambda key: 0.5 + jax.random.normal(key)
    report = diffmh.expectation(identity, slow, init=draw, num_samples=5_000, num_chains=16).run(
        0.5, KEY
    )
    assert report.effective_samples < 100


BOUNDED = lambda outside: diffmh.MetropolisHastings(
    lambda theta, x: jnp.where(x > 1, outside, log_normal(theta, x)), diffmh.GaussianWalk(2.38)
)


def test_nan_is_counted_reported_and_never_accepted():
    path = diffmh.trace(BOUNDED(jnp.nan), 0.5, KEY, init=0.0, num_steps=2_000).primal
    assert np.all(path <= 1) and path.max() > 0.9
    expectation = lambda outside: diffmh.expectation(
        identity, BOUNDED(outside), init=0.0, num_samples=500, num_chains=4
    )
    report, clean = expectation(jnp.nan).run(0.5, KEY), expectation(-jnp.inf).run(0.5, KEY)
    assert 100 < report.nan_proposals < 2_000 and clean.nan_proposals == 0
    assert f"{report.nan_proposals:,}" in str(report) and "-inf" in str(report)
    assert any("NaN" in warning for warning in report.warnings) and clean.warnings == ()
    np.testing.assert_array_equal(report.value, clean.value)
    np.testing.assert_allclose(report.gradient, clean.gradient, rtol=1e-5)
    assert np.isfinite(clean.gradient)


def test_nan_at_the_start_stays_nan_under_jit():
    """There it cannot be refused: the values are not known."""
    started_outside = diffmh.expectation(
        identity, BOUNDED(jnp.nan), init=2.0, num_samples=20, num_chains=4
    )
    value, gradient = jax.jit(jax.value_and_grad(started_outside))(0.5, KEY)
    assert np.isnan(value) and np.isnan(gradient)
    assert np.isnan(jax.jit(started_outside)(0.5, KEY))


def warnings_of(proposal, coupling=None, **options):
    kernel = diffmh.MetropolisHastings(log_normal, proposal, coupling)
    return (
        diffmh.expectation(identity, kernel, init=0.0, num_samples=1_000, num_chains=4, **options)
        .run(0.5, KEY)
        .warnings
    )


def test_warnings():
    assert warnings_of(diffmh.GaussianWalk(2.38)) == () and OCCUPANCY.run(0.4, KEY).warnings == ()
    assert any(
        "stuck" in warning and "smaller steps" in warning
        for warning in warnings_of(diffmh.GaussianWalk(1e4))
    )
    apart = warnings_of(diffmh.GaussianWalk(2.38), diffmh.CommonRandomNumbers())
    assert any(
        "hardly ever recouple" in warning and "MaximalReflection" in warning for warning in apart
    )


def test_warning_of_few_effective_samples():
    assert any(
        "fewer than 5 effective" in warning for warning in warnings_of(diffmh.GaussianWalk(1e-3))
    )


def test_report_of_an_estimator_without_alternatives():
    report = diffmh.expectation(
        identity, WALK, init=0.0, num_samples=200, num_chains=4, estimator=diffmh.Covariance()
    ).run(0.5, KEY)
    assert (
        np.isnan(report.recoupling_time)
        and np.isnan(report.alive_fraction)
        and np.isnan(report.max_weight)
    )
    assert (
        np.isfinite(report.gradient) and report.warnings == () and "alternative" not in str(report)
    )


def test_report_of_different_estimators_composed():
    """What the one has no use for, the other has; in either order."""
    expectation = lambda estimator: diffmh.expectation(
        identity, WALK, init=0.0, num_samples=50, num_chains=4, estimator=estimator
    )
    pair = [expectation(diffmh.StochasticDerivative()), expectation(diffmh.Covariance())]
    for expectations in (pair, pair[::-1]):
        assert np.isfinite(
            diffmh.compose(lambda theta, a, b: a * b, *expectations).run(0.5, KEY).alive_fraction
        )


TRACED = {
    "mixture": (LABELS, 0.4, 0, lambda theta, x: jax.nn.one_hot(x, 3)),
    "normal": (WALK, 0.5, 0.0, identity),
    "tree": (TREE.simulation.kernel, TREE_THETA, jnp.zeros(2), identity),
    "repeated": (diffmh.Repeat(WALK, 3), 0.5, 0.0, identity),
}


@pytest.mark.parametrize("alternatives", [pytest.param(1, marks=pytest.mark.thorough), 3])
@pytest.mark.parametrize("case", TRACED)
def test_trace_carries_the_derivative(case, alternatives):
    """`(1/N) Σ_t Σ_k W_k (f(y_k) − f(x_t))`, recomputed from what was kept."""
    kernel, theta, init, f = TRACED[case]
    estimator, num_steps = diffmh.StochasticDerivative(alternatives=alternatives), 150
    trace = diffmh.trace(kernel, theta, KEY, init=init, num_steps=num_steps, estimator=estimator)
    state, value = jnp.asarray(init), jnp.asarray(f(theta, jnp.asarray(init)))
    assert trace.primal.shape == (num_steps, *state.shape) and trace.primal.dtype == state.dtype
    assert trace.alternative.shape == (num_steps, alternatives, *state.shape)
    assert (
        trace.alive.shape == trace.born.shape == trace.recoupled.shape == (num_steps, alternatives)
    )
    assert trace.accepted.shape == (num_steps,)
    np.testing.assert_array_equal(trace.init, init)
    jax.tree.map(
        lambda w, part: np.testing.assert_equal(
            w.shape, (num_steps, alternatives, *jnp.shape(part))
        ),
        trace.weight,
        theta,
    )

    at_primal = jax.vmap(lambda x: f(theta, x))(trace.primal)
    at_alternative = jax.vmap(jax.vmap(lambda y: f(theta, y)))(trace.alternative)
    change = np.asarray(
        jnp.where(
            trace.alive[(...,) + (None,) * value.ndim], at_alternative - at_primal[:, None], 0
        ),
        float,
    )
    derivative = jax.tree.map(
        lambda w: np.tensordot(change, np.asarray(w, float), ((0, 1), (0, 1))) / num_steps,
        trace.weight,
    )
    expectation = diffmh.expectation(
        f, kernel, init=init, num_samples=num_steps, num_chains=1, estimator=estimator
    )
    close_trees(jax.jacobian(expectation)(theta, KEY), derivative, rtol=1e-4)
    assert any(np.any(leaf != 0) for leaf in jax.tree.leaves(derivative))


@pytest.mark.parametrize("case", ["mixture", "normal", "tree"])
@pytest.mark.parametrize("alternatives", [pytest.param(1, marks=pytest.mark.thorough), 3])
def test_trace_tells_a_consistent_story(case, alternatives):
    kernel, theta, init, _ = TRACED[case]
    estimator = diffmh.StochasticDerivative(alternatives=alternatives)
    trace = jax.tree.map(
        np.asarray, diffmh.trace(kernel, theta, KEY, init=init, num_steps=150, estimator=estimator)
    )
    before = np.concatenate([np.zeros((1, alternatives), bool), trace.alive[:-1]])
    np.testing.assert_array_equal(trace.alive, trace.born | (before & ~trace.recoupled))
    assert not np.any(trace.recoupled & ~before), "only the living recouple"
    assert np.all(trace.born.sum(axis=1) <= 1), "one candidate a step"
    assert trace.born.any() and trace.recoupled.any() and not trace.alive.all()

    weighs = (
        sum(
            (weight.reshape(*trace.alive.shape, -1) != 0).any(axis=-1)
            for weight in jax.tree.leaves(trace.weight)
        )
        > 0
    )
    np.testing.assert_array_equal(weighs, trace.alive)
    differs = (
        (trace.alternative != trace.primal[:, None]).reshape(*trace.alive.shape, -1).any(axis=-1)
    )
    assert np.all(differs[trace.alive]), "an alternative that is where the primal is has recoupled"
    path = np.concatenate([np.asarray(init)[None], trace.primal])
    moved = (path[1:] != path[:-1]).reshape(150, -1).any(axis=-1)
    np.testing.assert_array_equal(trace.accepted, moved)


def test_trace_is_compiled_once():
    traced = []

    def log_density(theta, x):
        traced.append(x)
        return log_normal(theta, x)

    kernel = diffmh.MetropolisHastings(log_density, diffmh.GaussianWalk(1.0))
    diffmh.trace(kernel, 0.5, KEY, init=0.0, num_steps=10)
    before = len(traced)
    assert before > 0
    diffmh.trace(kernel, 0.7, jax.random.key(8), init=1.0, num_steps=10)
    assert len(traced) == before


class Standard(eqx.Module):
    def sample(self, key):
        return 1.5 * jax.random.normal(key)

    def log_prob(self, x):
        return jax.scipy.stats.norm.logpdf(x, 0, 1.5)


log_vector = lambda theta, x: -0.5 * jnp.sum((x - theta) ** 2)
log_spins = lambda theta, x: theta * jnp.sum(x[1:] * x[:-1])
log_mixed = lambda theta, x: -theta * x["label"] - 0.5 * (x["mean"] - x["label"]) ** 2
RING = jnp.array([[0.0, 0.9, 0.1], [0.1, 0.0, 0.9], [0.9, 0.1, 0.0]])
SOUND = {
    "GaussianWalk": (WALK, 0.0),
    "GaussianWalk of a matrix": (
        diffmh.MetropolisHastings(
            log_vector, diffmh.GaussianWalk(jnp.array([[1.0, 0.0], [0.5, 2.0]]))
        ),
        jnp.zeros(2),
    ),
    "CrankNicolson": (
        diffmh.MetropolisHastings(log_vector, diffmh.CrankNicolson(0.5, 1.5)),
        jnp.zeros(2),
    ),
    "OtherState": (LABELS, 0),
    "TransitionMatrix": (
        diffmh.MetropolisHastings(lambda theta, x: -theta * x, diffmh.TransitionMatrix(RING)),
        0,
    ),
    "SpinFlip": (diffmh.MetropolisHastings(log_spins, diffmh.SpinFlip()), jnp.ones(4, int)),
    "SpinFlip of a site": (
        diffmh.MetropolisHastings(log_spins, diffmh.SpinFlip(site=1)),
        jnp.ones(4, int),
    ),
    "Independence": (diffmh.MetropolisHastings(log_normal, diffmh.Independence(Standard())), 0.0),
    "On, Cycle": (
        diffmh.Cycle(
            diffmh.MetropolisHastings(
                log_mixed, diffmh.On(lambda x: x["label"], diffmh.OtherState(3))
            ),
            diffmh.MetropolisHastings(
                log_mixed, diffmh.On(lambda x: x["mean"], diffmh.GaussianWalk(1.0))
            ),
        ),
        {"label": 0, "mean": 0.0},
    ),
}


class Own(diffmh.Proposal):
    """A proposal `x' = move(x, z)` with z standard normal, and what it claims its density to be."""

    move: object = None
    density: object = None
    symmetric: bool = False

    def sample(self, key, x):
        return self.move(x, jax.random.normal(key, x.shape))

    def log_prob(self, x, x_new):
        return self.density(x, x_new)


class Shrunk(diffmh.Coupling):
    def propose(self, key, proposal, x, x_new, y):
        return jnp.where(x == y, x_new, y + 0.5 * (x_new - x))


class Unfaithful(diffmh.Coupling):
    def propose(self, key, proposal, x, x_new, y):
        return proposal.sample(key, y)


def own(move, density, symmetric, log_density=log_normal):
    proposal = Own(move=move, density=density, symmetric=symmetric)
    return diffmh.MetropolisHastings(log_density, proposal, diffmh.CommonRandomNumbers())


def coupled(coupling):
    return diffmh.MetropolisHastings(log_normal, diffmh.GaussianWalk(1.0), coupling)


log_pdf = jax.scipy.stats.norm.logpdf
log_gamma = lambda theta, x: jnp.where(x > 0, theta * jnp.log(jnp.abs(x)) - x, -jnp.inf)
add = lambda x, z: x + z
drift = lambda x, z: x + 0.5 + z
multiply = lambda x, z: x * jnp.exp(z)
uniform = lambda x, z: x + jax.scipy.stats.norm.cdf(z) - 0.5
of_the_logarithm = lambda x, x_new: log_pdf(jnp.log(x_new), jnp.log(x))

SOUND_OWN = {
    "drift": (own(drift, lambda x, x_new: log_pdf(x_new, x + 0.5), False), 0.0),
    "uniform": (
        own(uniform, lambda x, x_new: jnp.where(jnp.abs(x_new - x) <= 0.5, 0.0, -jnp.inf), True),
        0.0,
    ),
    "multiply": (
        own(
            multiply, lambda x, x_new: of_the_logarithm(x, x_new) - jnp.log(x_new), False, log_gamma
        ),
        1.0,
    ),
}
BROKEN = {
    "not symmetric": (
        own(drift, lambda x, x_new: log_pdf(x_new, x + 0.5), True),
        0.0,
        "Own.symmetric",
    ),
    "density without the drift": (
        own(drift, lambda x, x_new: log_pdf(x_new, x), True),
        0.0,
        "Own.log_prob",
    ),
    "density of another scale": (
        own(add, lambda x, x_new: log_pdf(x_new, x, 1.5), True),
        0.0,
        "Own.log_prob",
    ),
    "density without the Jacobian": (
        own(multiply, of_the_logarithm, False, log_gamma),
        1.0,
        "Own.log_prob",
    ),
    "coupling with another marginal": (coupled(Shrunk()), 0.0, "Shrunk .* marginal"),
    "unfaithful coupling": (coupled(Unfaithful()), 0.0, "Unfaithful .* faithful"),
    "no theta": (
        diffmh.MetropolisHastings(lambda theta, x: -(x**2), diffmh.GaussianWalk(1.0)),
        0.0,
        "density",
    ),
    "another form": (
        own(lambda x, z: jnp.stack([x, z]), lambda x, x_new: jnp.zeros(()), True),
        0.0,
        "proposal",
    ),
    "start outside": (BOUNDED(-jnp.inf), 2.0, "density"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_check_names_what_is_wrong(name):
    kernel, init, promise = BROKEN[name]
    findings = diffmh.check(kernel, 0.5, KEY, init=init)
    assert not findings and "BROKEN" in str(findings), str(findings)
    assert [bool(re.search(promise, finding.promise)) for finding in findings.broken] == [True], (
        str(findings)
    )


ALIKE = (
    "GaussianWalk of a matrix",
    "CrankNicolson",
    "TransitionMatrix",
    "SpinFlip of a site",
    "uniform",
)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.thorough if name in ALIKE else ())
        for name in (*SOUND, *SOUND_OWN)
    ],
)
def test_check_passes_what_is_sound(name):
    kernel, init = {**SOUND, **SOUND_OWN}[name]
    findings = diffmh.check(kernel, 0.5, KEY, init=init)
    assert findings and not findings.broken, str(findings)
    assert len(findings.findings) >= 6 and "BROKEN" not in str(findings)
