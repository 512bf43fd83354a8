"""Langevin and Hamiltonian kernels, the accept step included: step sizes against quadrature,
targets against closed forms; and the gradient that ignores the accept step, which is biased.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import derivatives
from quadrature import leapfrog, log_normal, phi, proposed_by_density, slope
from unbiasedness import assert_unbiased, z_scores

import diffmh


def standard(theta, x):
    return -0.5 * x**2


LEAPS = 2
KERNELS = {
    "Langevin": (
        lambda density: diffmh.Langevin(density, lambda h: h),
        proposed_by_density(lambda h, x, new: log_normal(new, (1 - h**2 / 2) * x, h)),
        1.4,
    ),
    "Hamiltonian": (
        lambda density: diffmh.Hamiltonian(density, lambda h: h, LEAPS),
        leapfrog(LEAPS),
        1.2,
    ),
}


def lagged(kernel, num_samples=3):
    return diffmh.expectation(
        lambda theta, x, x_new: jnp.stack(phi(x, x_new)),
        kernel,
        init=jax.random.normal,
        num_samples=num_samples,
        num_chains=40_000,
        lag=1,
    )


@pytest.mark.optimised
@pytest.mark.parametrize("name", KERNELS)
def test_step_sizes(name):
    make, mean, theta = KERNELS[name]
    expectation, key = lagged(make(standard)), jax.random.key(20)
    found = derivatives(expectation, theta, key)
    assert_unbiased(found, slope(mean, theta), name)
    values = jax.jvp(lambda t: expectation.per_chain(t, key), (theta,), (1.0,))[0]
    np.testing.assert_array_equal(expectation.per_chain(theta, key), values)


@pytest.mark.parametrize("name", KERNELS)
def test_the_trajectory_alone_is_biased(name, monkeypatch):
    """The usual derivative today: through the moves, with every accept and reject held fixed."""
    make, mean, theta = KERNELS[name]
    ignore = lambda self, weights: 0.0 * self.log_accept_gradient
    monkeypatch.setattr(diffmh.extend.Acceptance, "flip_weight", ignore)
    kernel = make(lambda theta, x: standard(theta, x))
    found = derivatives(lagged(kernel), theta, jax.random.key(21))
    assert np.abs(z_scores(found, slope(mean, theta))).max() > 10


def shifted(theta, x):
    return -0.5 * (x - theta) ** 2


NORMAL = {
    "Langevin": diffmh.Langevin(shifted, 1.2),
    "Hamiltonian": diffmh.Mixture(
        diffmh.Hamiltonian(shifted, 0.7, 3),
        diffmh.MetropolisHastings(shifted, diffmh.GaussianWalk(2.0)),
    ),
}


def normal_slopes(name, num_samples, num_chains, burn_in=40):
    """Of `E[x] = θ` and `E[x²] = θ² + 1` at θ = ½, from a stationary start."""
    expectation = diffmh.expectation(
        lambda theta, x: jnp.stack([x, x**2]),
        NORMAL[name],
        init=lambda key: 0.5 + jax.random.normal(key),
        num_samples=num_samples,
        burn_in=burn_in,
        num_chains=num_chains,
    )
    return derivatives(expectation, 0.5, jax.random.key(25))


@pytest.mark.parametrize("name", NORMAL)
def test_a_normal(name):
    assert_unbiased(normal_slopes(name, 10, 4_000), np.array([1.0, 1.0]), name)


@pytest.mark.thorough
@pytest.mark.parametrize("name", NORMAL)
def test_the_variance_stays_finite(name):
    """Over 10⁴ steps it falls as over 10³: in proportion to their number."""
    short, long = (np.var(normal_slopes(name, n, 2_000), axis=0) * n for n in (1_000, 10_000))
    assert np.all(long <= 2 * short)


# Five dimensions, correlated: N(mean, scale² C).
COVARIANCE = 0.6 ** np.abs(np.subtract.outer(np.arange(5), np.arange(5)))
ROOT = np.linalg.cholesky(COVARIANCE)
PRECISION = jnp.asarray(np.linalg.inv(COVARIANCE), jnp.float32)


def gaussian(theta, x):
    apart = (x - theta["mean"]) / theta["scale"]
    return -0.5 * apart @ PRECISION @ apart - 5 * jnp.log(theta["scale"])


FIVE = {
    "Langevin": diffmh.Langevin(gaussian, jnp.asarray(1.2 * ROOT, jnp.float32)),
    "Hamiltonian": diffmh.Mixture(
        diffmh.Hamiltonian(gaussian, 0.35, 4),
        diffmh.MetropolisHastings(gaussian, diffmh.GaussianWalk(ROOT.astype(np.float32))),
    ),
}


@pytest.mark.parametrize("name", FIVE)
def test_a_correlated_gaussian(name):
    """`E[x] = mean` and `E[|x − mean|²] = 5 scale²`, by six parameters."""
    scale = 1.5
    expectation = diffmh.expectation(
        lambda theta, x: jnp.concatenate([x, jnp.sum(x**2)[None]]),
        FIVE[name],
        init=lambda key: scale * (jnp.asarray(ROOT, jnp.float32) @ jax.random.normal(key, 5)),
        num_samples=10,
        burn_in=60,
        num_chains=4_000,
        estimator=diffmh.StochasticDerivative(alternatives=2),
    )
    theta = {"mean": jnp.zeros(5), "scale": jnp.array(scale)}
    found = derivatives(expectation, theta, jax.random.key(22))
    assert_unbiased(found["mean"], np.eye(6, 5), name)
    assert_unbiased(found["scale"], np.append(np.zeros(5), 10 * scale), name)


class Logistic(diffmh.extend.Update):
    """A chaotic map, `x' = θ x (1 − x)`: a move that depends on θ, and no decision."""

    def log_density(self, theta, x):
        return 0.0 * theta

    @property
    def moves_with_theta(self):
        return True

    def noise(self, key, x, num_steps):
        return jnp.zeros(num_steps)

    def step(self, parameters, state, noise):
        after = parameters.evaluate(lambda theta, x: theta * x * (1 - x), state.value)
        return diffmh.extend.Step(state, diffmh.extend.State(after.primal, None, after.tangent))

    def coupled_step(self, parameters, step, alternative, noise, coupling_noise):
        return diffmh.extend.State(parameters.theta * alternative.x * (1 - alternative.x))

    def flipped(self, step, noise, decision, candidate):
        raise AssertionError("there is nothing to flip")


def test_an_exploding_derivative_is_a_warning():
    def warnings(theta):
        expectation = diffmh.expectation(
            lambda theta, x: x, Logistic(), init=0.3, num_samples=100, num_chains=2
        )
        return " ".join(expectation.run(theta, jax.random.key(24)).warnings)

    assert "the derivative of a state with respect to theta grew to" in warnings(3.9)
    assert "grew to" not in warnings(2.5)


def test_refusals():
    with pytest.raises(ValueError, match=r"must be positive, got -1\.0"):
        diffmh.Langevin(standard, -1.0)
    with pytest.raises(ValueError, match=r"must be positive, got 0\.0"):
        diffmh.Hamiltonian(standard, 0.0, 3)
    whole = diffmh.expectation(
        lambda theta, x: 1.0 * x, diffmh.Hamiltonian(standard, 0.1, 3), init=0, num_samples=2
    )
    with pytest.raises(TypeError, match=r"`Hamiltonian` moves floats, but state is int32"):
        whole(0.5, jax.random.key(0))
    blind = diffmh.expectation(
        lambda theta, x: x,
        diffmh.Langevin(standard, lambda theta: theta),
        init=0.0,
        num_samples=2,
        estimator=diffmh.Covariance(),
    )
    with pytest.raises(ValueError, match="cannot see parameters of the proposal"):
        blind(0.5, jax.random.key(0))


def test_covariance_applies_to_the_target():
    """A fixed step leaves one density invariant, whatever moves with θ."""
    density = lambda theta, x: -0.5 * (x - theta) ** 2
    expectation = diffmh.expectation(
        lambda theta, x: x,
        diffmh.Langevin(density, 1.2),
        init=lambda key: 0.5 + jax.random.normal(key),
        num_samples=20,
        num_chains=4_000,
        estimator=diffmh.Covariance(),
    )
    found = derivatives(expectation, 0.5, jax.random.key(23))
    assert_unbiased(found, np.array(1.0))


def test_a_step_for_each_leaf():
    """A number for a leaf is that number for each of its elements, also as a function of theta."""

    def density(theta, x):
        return -0.5 * jnp.sum((x["a"] - theta) ** 2) - 0.5 * (x["b"] + x["a"][0]) ** 2

    def slope(kernel):
        mean = diffmh.expectation(
            lambda theta, x: x["a"][1] * x["b"],
            kernel,
            init={"a": jnp.zeros(2), "b": 0.0},
            num_samples=10,
            num_chains=8,
        )
        return jax.value_and_grad(mean)(0.9, jax.random.key(12))

    flat = slope(diffmh.Langevin(density, lambda theta: theta * jnp.array([1.0, 1.0, 0.5])))
    by_leaf = slope(diffmh.Langevin(density, lambda theta: {"a": theta, "b": 0.5 * theta}))
    np.testing.assert_allclose(by_leaf, flat, rtol=1e-4)
    fixed = slope(diffmh.Langevin(density, jnp.array([0.9, 0.9, 0.45])))
    np.testing.assert_allclose(
        slope(diffmh.Langevin(density, {"a": 0.9, "b": 0.45})), fixed, rtol=1e-4
    )


def walk_of_theta(density):
    return diffmh.MetropolisHastings(density, lambda theta: diffmh.GaussianWalk(theta))


def langevin(density):
    return diffmh.Langevin(density, 0.8)


@pytest.mark.parametrize("make", [langevin, walk_of_theta])
def test_states_of_two_precisions(make):
    """Each leaf keeps its own, in the proposal of an alternative too."""

    def density(theta, x):
        return -0.5 * (x["a"] - theta) ** 2 - 0.5 * (x["b"] - x["a"]) ** 2

    with jax.enable_x64(True):
        start = {"a": np.float32(0.1), "b": np.float64(0.2)}
        mean = diffmh.expectation(
            lambda theta, x: x, make(density), init=start, num_samples=3, num_chains=2
        )
        slopes = jax.eval_shape(jax.jacfwd(mean), 0.5, jax.random.key(0))
    assert slopes["b"].dtype == jnp.float64
