"""Couplings of Gaussian steps that look at the gradient: exact marginals whatever the directions,
the component that is shared, and chains that meet sooner.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import derivatives
from scipy import stats
from unbiasedness import assert_unbiased

import diffmh

SCALES = jnp.array([1.0, 3.0, 10.0])
LOWER = jnp.array([[1.0, 0.0, 0.0], [0.5, 0.8, 0.0], [-0.3, 0.2, 1.5]])
gradient = lambda x: -x / SCALES**2
nothing = lambda x: jnp.zeros_like(x)
undefined = lambda x: jnp.full_like(x, jnp.nan)

COUPLINGS = {
    "numbers": diffmh.GradientCommonRandomNumbers(gradient),
    "reflection": diffmh.GradientReflection(gradient),
    "no direction": diffmh.GradientReflection(nothing),
    "undefined direction": diffmh.GradientCommonRandomNumbers(undefined),
    "two-scale, far": diffmh.TwoScale(diffmh.GradientReflection(gradient), distance=0.01),
    "two-scale, near": diffmh.TwoScale(diffmh.CommonRandomNumbers(), distance=100),
}
WALKS = {
    "number": diffmh.GaussianWalk(0.7),
    "matrix": diffmh.GaussianWalk(LOWER),
    "Crank-Nicolson": diffmh.CrankNicolson(0.6, LOWER, 0.3),
}
X, Y = jnp.array([0.5, -2.0, 4.0]), jnp.array([1.0, 0.3, -7.0])


def drawn(coupling, walk, key, count, y=Y):
    """`x'` and `y'` of many draws. The states are repeated outside of `jit`: of one state broadcast
    within, and of more than 2¹⁵ numbers, XLA's CPU compiler makes wrong code (jaxlib 0.10.2).
    """
    return _drawn(
        coupling, walk, jax.random.split(key, count), *(jnp.tile(s, (count, 1)) for s in (X, y))
    )


@eqx.filter_jit
def _drawn(coupling, walk, keys, x, y):
    def one(key, x, y):
        key_sample, key_couple = jax.random.split(key)
        x_new = walk.sample(key_sample, x)
        return x_new, coupling.propose(key_couple, walk, x, x_new, y)

    return jax.vmap(one)(keys, x, y)


def whitened(walk, start, new):
    return np.asarray(jax.vmap(lambda z: walk.whiten(z - walk.mean(start)))(new), float)


def least_p_value(z):
    """Of z being standard normal: each coordinate, each product, and the squared length."""
    count, size = z.shape
    p_values = [stats.kstest(z[:, i], "norm").pvalue for i in range(size)]
    p_values.append(stats.kstest(np.sum(z**2, axis=1), stats.chi2(size).cdf).pvalue)
    products = np.sqrt(count) * (z.T @ z / count - np.eye(size))[np.triu_indices(size, 1)]
    return min([*p_values, *(2 * stats.norm.sf(np.abs(products)))])


@pytest.mark.parametrize("walk", WALKS)
@pytest.mark.parametrize("name", COUPLINGS)
def test_the_marginal(name, walk):
    """y' = m(y) + L z, z standard normal, jointly: one false alarm in 10⁴ of the whole table."""
    _, y_new = drawn(COUPLINGS[name], WALKS[walk], jax.random.key(1), 10_000)
    assert least_p_value(whitened(WALKS[walk], Y, y_new)) > 1e-6


class Forgetful(diffmh.extend.NoiseCoupling):
    """Shares the component along the gradient, and keeps the primal's rest as it is: the component
    along the other gradient is lost.
    """

    def noise(self, key, proposal, x, num_steps):
        return None

    def couple(self, proposal, x, x_new, y, primal_noise, noise):
        z = proposal.whiten(x_new - proposal.mean(x))
        n_x, n_y = (gradient(s) / jnp.linalg.norm(gradient(s)) for s in (x, y))
        z_y = z - (n_x @ z) * n_x + (n_x @ z) * n_y
        return proposal.mean(y) + proposal.colour(z_y)


def test_the_marginal_can_fail():
    _, y_new = drawn(Forgetful(), WALKS["number"], jax.random.key(1), 10_000)
    assert least_p_value(whitened(WALKS["number"], Y, y_new)) < 1e-6


@pytest.mark.parametrize("name", ["numbers", "reflection"])
def test_the_component_along_the_gradient_is_shared(name):
    walk = WALKS["matrix"]
    x_new, y_new = drawn(COUPLINGS[name], walk, jax.random.key(2), 50)
    along = []
    for state, new in ((X, x_new), (Y, y_new)):
        direction = np.asarray(LOWER.T @ gradient(state))
        along.append(whitened(walk, state, new) @ direction / np.linalg.norm(direction))
    np.testing.assert_allclose(along[0], along[1], atol=1e-5)


@pytest.mark.parametrize("name", COUPLINGS)
def test_chains_that_met_stay_together(name):
    x_new, y_new = drawn(COUPLINGS[name], WALKS["matrix"], jax.random.key(3), 200, y=X)
    np.testing.assert_array_equal(x_new, y_new)


def test_two_scale_takes_the_right_one():
    walk, near, far = diffmh.GaussianWalk(0.5), diffmh.MaximalReflection(), COUPLINGS["numbers"]
    both = diffmh.TwoScale(far, distance=1.0)
    for gap, met in ((0.1, True), (2.0, False)):
        x_new, y_new = drawn(both, walk, jax.random.key(4), 400, y=X + gap / 3**0.5)
        together = np.mean(np.all(np.asarray(x_new == y_new), axis=1))
        assert (together > 0.8) == met and (together == 0) == (not met)
    assert both.near == near


def test_the_gradient_is_unbiased_with_directions_of_another_theta():
    """Every parameter's mean moves with theta: d/dθ E[x_i] = 1 from a stationary start."""
    log = lambda theta, x: -0.5 * jnp.sum(((x - theta) / SCALES) ** 2)
    coupling = diffmh.TwoScale(diffmh.GradientReflection(jax.grad(lambda x: log(3.0, x))))
    kernel = diffmh.MetropolisHastings(log, diffmh.GaussianWalk(1.5), coupling)
    # The covariance of the start's derivative is not followed: burn in, then average.
    mean = diffmh.expectation(
        lambda theta, x: x[0],
        kernel,
        init=jnp.zeros(3),
        num_samples=10,
        burn_in=80,
        num_chains=4_000,
    )
    assert_unbiased(np.asarray(derivatives(mean, 0.0, jax.random.key(6))), 1.0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: diffmh.GradientCommonRandomNumbers(gradient),
        lambda: diffmh.GradientReflection(gradient),
        lambda: diffmh.TwoScale(diffmh.CommonRandomNumbers()),
    ],
)
def test_only_gaussian_steps(make):
    with pytest.raises(ValueError, match=r"Gaussian steps, which `SpinFlip` does not.*Common"):
        diffmh.MetropolisHastings(lambda theta, x: theta, diffmh.SpinFlip(), make())


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: diffmh.TwoScale(gradient), TypeError, "`far` must be"),
        (
            lambda: diffmh.TwoScale(COUPLINGS["numbers"], distance=-1),
            ValueError,
            "positive and finite, got -1",
        ),
        (lambda: diffmh.GradientReflection(3), TypeError, "`gradient` must be a function"),
    ],
)
def test_refusals(call, error, words):
    with pytest.raises(error, match=words):
        call()
