"""`Adapted`: a warm-up that is continued, on parts of a state, in cycles and in many dimensions."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import diffmh
from diffmh.adapters.other_density import with_density
from diffmh.tools.adapt import _replaced

KEY = jax.random.key(0)


def flat(theta, z):
    return theta * 0.0 * z.astype(float)


def standing(num_states: int) -> diffmh.Adapted:
    """A kernel that never moves, and as many states: the draws are the starts."""
    stays = diffmh.MetropolisHastings(flat, diffmh.TransitionMatrix(jnp.eye(num_states)))
    return diffmh.Adapted(stays, jnp.arange(num_states)[::-1])


def starts(adapted: diffmh.Adapted, num_chains: int, **options) -> np.ndarray:
    draws = diffmh.sample(adapted, 0.5, KEY, num_samples=1, num_chains=num_chains, **options)
    return np.asarray(draws.posterior["x"])[:, 0]


def test_chains_start_from_the_states():
    np.testing.assert_array_equal(starts(standing(5), 5), [4, 3, 2, 1, 0])
    np.testing.assert_array_equal(starts(standing(5), 3), [4, 3, 2])
    np.testing.assert_array_equal(starts(standing(5), 2, init=1), [1, 1])


def test_more_chains_than_states():
    """Each state once, the others at random; chains that run in groups know their numbers."""
    found = starts(standing(3), 2_000)
    np.testing.assert_array_equal(found[:3], [2, 1, 0])
    counts = np.bincount(found[3:], minlength=3)
    # Of 1997 draws with probability 1/3 each: a standard deviation of 21.
    assert np.abs(counts - 1997 / 3).max() < 5 * 21


def log_density(theta, x):
    return -0.5 * jnp.sum(((x["a"] - theta) / jnp.array([1.0, 20.0])) ** 2) - 0.5 * x["b"] ** 2


START = {"a": jnp.zeros(2), "b": jnp.zeros(())}
WALK = diffmh.MetropolisHastings(log_density, diffmh.GaussianWalk(1.0))


@pytest.fixture(scope="module")
def adapted():
    return diffmh.adapt(WALK, 0.5, KEY, init=START)


def test_a_run_goes_on_from_the_states(adapted):
    """Bit for bit as from a function that returns them, in value, gradient and draws."""
    mean = lambda theta, x: x["a"]
    length = {"num_samples": 5, "num_chains": 16}
    made = diffmh.expectation(mean, adapted, **length)
    one = diffmh.expectation(
        mean, adapted.kernel, **length, init=jax.tree.map(lambda leaf: leaf[3], adapted.states)
    )
    np.testing.assert_array_equal(made.per_chain(0.5, KEY)[3], one.per_chain(0.5, KEY)[3])
    slopes = (jax.jacobian(each.per_chain)(0.5, KEY)[3] for each in (made, one))
    np.testing.assert_array_equal(*slopes)
    draws = diffmh.sample(adapted, 0.5, KEY, **length)
    averaged = np.asarray(draws.posterior["a"]).mean(axis=1)
    np.testing.assert_allclose(averaged, made.per_chain(0.5, KEY), rtol=1e-5, atol=1e-5)
    path = diffmh.trace(adapted, 0.5, KEY, num_steps=5)
    assert path.primal["a"].shape == (5, 2)


def test_init_is_asked_for():
    f = lambda theta, x: x["a"]
    with pytest.raises(TypeError, match=r"only what `diffmh\.adapt` returns has states"):
        diffmh.expectation(f, WALK, num_samples=5)
    with pytest.raises(TypeError, match="needs `init`"):
        diffmh.sample(WALK, 0.5, KEY, num_samples=5)


def test_scales_leaf_by_leaf():
    by_leaf = diffmh.GaussianWalk({"a": 1.0, "b": 1.0})
    made = diffmh.adapt(diffmh.MetropolisHastings(log_density, by_leaf), 0.5, KEY, init=START)
    scale = made.kernel.proposal.scale
    assert scale["a"].shape == (2,) and scale["b"].shape == ()
    np.testing.assert_allclose(scale["a"][1] / scale["a"][0], 20.0, rtol=0.3)
    np.testing.assert_allclose(scale["b"] / scale["a"][0], 1.0, rtol=0.3)


def test_a_cycle_of_parts():
    """Each walk has its own step: in one dimension 2.4 times the standard deviation."""
    part = lambda where: diffmh.MetropolisHastings(
        log_density, diffmh.On(where, diffmh.GaussianWalk(1.0))
    )
    cycle = diffmh.Cycle(
        diffmh.Repeat(part(lambda x: x["a"][0]), 2),
        diffmh.Mixture(part(lambda x: x["a"][1]), part(lambda x: x["b"]), probabilities=(0.7, 0.3)),
    )
    made = diffmh.adapt(cycle, 0.5, KEY, init=START).kernel
    repeated, mixture = made.kernels
    assert isinstance(made, diffmh.Cycle) and repeated.num_steps == 2
    np.testing.assert_allclose(mixture.probabilities, [0.7, 0.3])
    scales = [each.proposal.proposal.scale for each in (repeated.kernel, *mixture.kernels)]
    np.testing.assert_allclose(np.ravel(scales), [2.4, 48.0, 2.4], rtol=0.25)


def test_stuck_chains_start_again():
    states, moving = jnp.arange(6.0), jnp.array([True, False, True, True, False, True])
    found = np.asarray(_replaced(KEY, states, moving))
    np.testing.assert_array_equal(found[[0, 2, 3, 5]], [0, 2, 3, 5])
    assert set(found[[1, 4]]) <= {0, 2, 3, 5}
    # Where all are stuck nothing is known.
    np.testing.assert_array_equal(_replaced(KEY, states, jnp.zeros(6, bool)), states)


MEANS = jnp.array([-2.0, 0.0, 3.0])


def exact(logit):
    """P(label | y): y ~ N(m_label, 0.01 + 9)."""
    return jax.nn.softmax(jnp.stack([logit, 0.0, 0.5]) - (0.7 - MEANS) ** 2 / (2 * 9.01))


@pytest.fixture(scope="module")
def mixed():
    def model(y, logit):
        label = numpyro.sample("label", dist.Categorical(logits=jnp.stack([logit, 0.0, 0.5])))
        offset = numpyro.sample("offset", dist.Normal(0.0, 0.1))
        numpyro.sample("y", dist.Normal(MEANS[label] + offset, 3.0), obs=y)

    return diffmh.from_numpyro(model, 0.7, theta={"logit": 0.3})


@pytest.fixture(scope="module")
def adapted_mixed(mixed):
    return diffmh.adapt(mixed.kernel(), mixed.theta, KEY, init=mixed.init)


def test_the_continuous_part_of_a_mixed_model(mixed, adapted_mixed):
    walk, labels = adapted_mixed.kernel.kernels
    # The offset's posterior has almost its prior's deviation, 0.1.
    np.testing.assert_allclose(walk.proposal.proposal.scale, [0.24], rtol=0.25)
    assert isinstance(labels.proposal.proposal, diffmh.OtherState)
    share = mixed.expectation(
        lambda theta, sites: 1.0 * (sites["label"] == jnp.arange(3)),
        adapted_mixed,
        num_samples=1_000,
        num_chains=64,
        estimator=diffmh.Covariance(),
    )
    report = share.run(mixed.theta, jax.random.key(1))
    assert np.abs((report.value - exact(0.3)) / report.value_error).max() < 5
    slopes = jax.jacobian(exact)(0.3)
    assert np.abs((report.gradient["logit"] - slopes) / report.gradient_error["logit"]).max() < 5


@pytest.mark.parametrize("kind", ["kernel", "Adapted", "function"])
def test_kernels_of_sensitivity(mixed, adapted_mixed, kind):
    """A kernel of the posterior, an `Adapted`, and a function that makes one."""
    given = {
        "kernel": mixed.kernel(0.24),
        "Adapted": adapted_mixed,
        "function": lambda density: with_density(mixed.kernel(0.24), mixed.log_density, density),
    }[kind]
    table = diffmh.sensitivity(
        mixed,
        lambda theta, sites: 1.0 * (sites["label"] == jnp.arange(3)),
        jax.random.key(2),
        kernel=given,
        num_samples=1_000,
        burn_in=100,
        num_chains=64,
    )
    slopes = jax.jacobian(exact)(0.3)
    rows = {row.quantity: row for row in table.rows if row.hyperparameter == "logit"}
    for value in range(3):
        row = rows[f"f[{value}]"]
        error = (row.high - row.low) / 3.92
        assert abs(row.derivative - float(slopes[value])) < 5 * error


def test_another_density():
    old, new = (lambda theta, x: -theta * x**2), (lambda theta, x: -theta["a"] * x**2)
    walk = diffmh.MetropolisHastings(old, diffmh.GaussianWalk(1.0))
    langevin = diffmh.Langevin(old, 0.1)
    sweep = diffmh.Sweep(lambda site: diffmh.Repeat(walk, 2), 3)
    both = with_density(diffmh.Cycle(walk, langevin, sweep), old, new)
    for update in both.updates():
        assert update.log_density({"a": 2.0}, 3.0) == -18.0


def test_another_density_of_a_model(mixed):
    """A method of a module that has been copied, as through `jit`, is another object."""
    copied = jax.tree.map(lambda leaf: leaf, mixed.kernel())
    assert copied.updates()[0].density is not mixed.log_density
    new = lambda theta, x: mixed.log_density(theta["model"], x)
    made = with_density(copied, mixed.log_density, new)
    x = mixed.init(KEY)
    for update in made.updates():
        found = update.log_density({"model": mixed.theta}, x)
        np.testing.assert_allclose(found, mixed.log_density(mixed.theta, x), rtol=1e-6)


@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        (
            diffmh.MetropolisHastings(log_density, diffmh.GaussianWalk(1.0)),
            "another log density than the posterior's",
        ),
        (
            lambda posterior: diffmh.MetropolisHastings(
                posterior.log_density, lambda theta: diffmh.GaussianWalk(theta["logit"])
            ),
            "depends on theta not only through its log density",
        ),
        (
            lambda posterior: diffmh.extend.update(posterior.log_density)(
                lambda draw, theta, x: jax.tree.map(lambda leaf: -leaf, x)
            ),
            "depends on theta not only through its log density",
        ),
        (3.0, "`kernel` must be a function"),
        (lambda posterior: lambda density: 3.0, "`kernel(log_density)` must be"),
    ],
)
def test_refused_kernels(mixed, kernel, words):
    if not isinstance(kernel, diffmh.MetropolisHastings | float):
        kernel = kernel(mixed)
    with pytest.raises((TypeError, ValueError)) as caught:
        diffmh.sensitivity(
            mixed, lambda theta, sites: sites["offset"], KEY, kernel=kernel, num_samples=5
        )
    assert words in str(caught.value)


def test_nothing_to_adapt():
    labels = diffmh.Gibbs(flat, lambda z: z, 3)
    with pytest.raises(TypeError, match="or of a `Cycle` with one of them"):
        diffmh.adapt(diffmh.Cycle(labels, labels), 0.5, KEY, init=0)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["walk", "Langevin", "Hamiltonian"])
def test_144_dimensions(kind):
    """From a start far out; afterwards the log density is where it belongs, 72 below its mode."""
    scales = jnp.geomspace(0.1, 10.0, 144)
    density = lambda theta, x: -0.5 * jnp.sum(((x - theta) / scales) ** 2)
    kernel = {
        "walk": lambda: diffmh.MetropolisHastings(density, diffmh.GaussianWalk(1.0)),
        "Langevin": lambda: diffmh.Langevin(density, 1.0),
        "Hamiltonian": lambda: diffmh.Hamiltonian(density, 1.0, 8),
    }[kind]()
    init = lambda key: jax.random.uniform(key, (144,), minval=-2.0, maxval=2.0)
    made = diffmh.adapt(kernel, 0.5, KEY, init=init)
    reached = jax.vmap(lambda x: density(0.5, x))(made.states)
    # Its standard deviation is 8.5, that of the mean of 16 chains 2.1.
    assert abs(float(jnp.mean(reached)) + 72) < 5 * 2.1
