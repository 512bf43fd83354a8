"""compose: nonlinear functions of expectations, where plugging one chain in fails."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import derivative, entropy, heat_capacity, ising_moments, mixture_occupancy
from paper_models import ising, mixture
from programs import optimised
from unbiasedness import assert_unbiased, z_scores

import diffmh


def replicates(composed, theta, num_runs, seed, jit=optimised):
    """The gradient of a composition in many independent runs."""
    keys = jax.random.split(jax.random.key(seed), num_runs)
    return np.asarray(jit(jax.vmap(jax.value_and_grad(composed), (None, 0)))(theta, keys))


def plug_in(phi, expectation):
    """Both factors of the chain rule from the same chain."""

    def single(theta, key):
        return phi(theta, jax.tree.map(lambda leaf: leaf[0], expectation.per_chain(theta, key)))

    return single


def mixture_entropy(_, p):
    return -jnp.sum(jax.scipy.special.xlogy(p, p))


@pytest.mark.parametrize(
    ("num_chains", "num_runs"), [(8, 6_000), pytest.param(32, 3_000, marks=pytest.mark.thorough)]
)
def test_entropy_of_the_mixture(num_chains, num_runs):
    exact = lambda theta: entropy(mixture_occupancy(50, 0)(theta))
    value, slope = derivative(exact, 0.4)
    found = replicates(
        diffmh.compose(mixture_entropy, mixture(None, 50, num_chains)), 0.4, num_runs, 21
    )
    assert_unbiased(found.T, np.array([value[0], slope[0, 0]]), "value and gradient")


def test_plugging_in_one_chain_fails_for_the_entropy():
    """ESTIMATOR §6: +53 % with one-sided weights at N = 50."""
    _, slope = derivative(lambda theta: entropy(mixture_occupancy(50, 0)(theta)), 0.4)
    single = mixture(diffmh.StochasticDerivative("one-sided"), 50, 1)
    _, gradients = replicates(plug_in(mixture_entropy, single), 0.4, 40_000, 22)
    finite = gradients[
        np.isfinite(gradients)
    ]  # a chain that never saw a component has no entropy derivative
    assert z_scores(finite, slope[0, 0]) > 20
    assert 0.3 < finite.mean() / slope[0, 0] - 1 < 0.8


def capacity(temperature, moments):
    return (moments[1] - moments[0] ** 2) / temperature**2


def exact_capacity():
    """3×3 at T = 3, 20 sweeps after 10: the case of ESTIMATOR §6."""
    moments = ising_moments(3, 20, 10)
    value, slope = derivative(
        lambda theta: np.atleast_1d(heat_capacity(moments(theta), theta[0])), 3.0
    )
    return value[0], slope[0, 0]


def test_heat_capacity_of_ising():
    """Quadratic in the moments: exactly unbiased, in value and in gradient."""
    value, slope = exact_capacity()
    assert abs(slope + 2.70) < 0.01
    found = replicates(diffmh.compose(capacity, ising(3, 20, 8, burn_in=10)), 3.0, 6_000, 23)
    assert_unbiased(found.T, np.array([value, slope]), "value and gradient")


def test_plugging_in_one_chain_fails_for_ising():
    """Less than a fifth of the exact derivative is left."""
    _, slope = exact_capacity()
    _, gradients = replicates(plug_in(capacity, ising(3, 20, 1, burn_in=10)), 3.0, 40_000, 24)
    assert abs(z_scores(gradients, slope)) > 20
    assert 0.2 * slope < gradients.mean()


def test_several_expectations():
    """A ratio of two expectations, with a parameter of φ's own."""
    first, second = mixture(None, 5, 16), mixture(None, 20, 16)
    ratio = diffmh.compose(lambda h, p, q: h * p[0] / q[1], first, second)

    def exact(theta):
        return np.atleast_1d(
            theta[0] * mixture_occupancy(5, 0)(theta)[0] / mixture_occupancy(20, 0)(theta)[1]
        )

    value, slope = derivative(exact, 0.4)
    found = replicates(ratio, 0.4, 5_000, 25, jax.jit)
    assert_unbiased(found.T, np.array([value[0], slope[0, 0]]))


def test_composition_is_differentiable_in_what_phi_closes_over():
    """φ is plain JAX: its own constants have ordinary derivatives."""
    p = mixture(None, 5, 16)
    scaled = lambda c: diffmh.compose(lambda h, m: c * m[0], p)(0.4, jax.random.key(0))
    np.testing.assert_allclose(jax.grad(scaled)(3.0), p(0.4, jax.random.key(0))[0], rtol=1e-5)


def test_composition_of_identity_is_the_expectation():
    p = mixture(None, 5, 16)
    same = diffmh.compose(lambda h, m: m, p)
    np.testing.assert_allclose(same(0.4, jax.random.key(0)), p(0.4, jax.random.key(0)), rtol=1e-5)
    a, b = same.run(0.4, jax.random.key(0)), p.run(0.4, jax.random.key(0))
    np.testing.assert_allclose(a.gradient, b.gradient, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(a.gradient_error, b.gradient_error, rtol=1e-3, atol=1e-5)


def test_errors_of_a_composition_are_right():
    """The reported standard errors against the spread over runs."""
    composed = diffmh.compose(mixture_entropy, mixture(None, 200, 64))
    reports = [composed.run(0.4, jax.random.key(seed)) for seed in range(40)]
    for value, error in (("value", "value_error"), ("gradient", "gradient_error")):
        spread = np.std([float(getattr(report, value)) for report in reports], ddof=1)
        assert 0.6 < np.mean([float(getattr(report, error)) for report in reports]) / spread < 1.6


def test_nested_composition():
    """A function of a composition: its pseudo-values take the place of chains."""
    p = mixture(None, 50, 32)
    nested = diffmh.compose(lambda h, e: jnp.exp(e), diffmh.compose(mixture_entropy, p))
    direct = diffmh.compose(lambda h, m: jnp.exp(mixture_entropy(h, m)), p)
    a, b = (jax.value_and_grad(e)(0.4, jax.random.key(1)) for e in (nested, direct))
    np.testing.assert_allclose(a, b, rtol=2e-2, atol=5e-3)


@pytest.mark.parametrize(
    ("phi", "words"),
    [(lambda t, m: m > 0, "must return floats, got bool"), (lambda t, m: "m", "numbers, got 'm'")],
)
def test_phi_returns_what_has_a_derivative(phi, words):
    mean = diffmh.expectation(
        lambda t, x: x, diffmh.models.gaussian.sampler(), init=0.0, num_samples=5, num_chains=2
    )
    with pytest.raises(TypeError, match=words):
        diffmh.compose(phi, mean)(0.5, jax.random.key(0))
