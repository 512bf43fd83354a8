"""Parameters of proposals and kernels out of their range: fixed values, functions of a known theta,
and functions of theta under `jit`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from unbiasedness import assert_unbiased

import diffmh
from diffmh.extend import (
    Condition,
    Proposal,
)

KEY = jax.random.key(0)
INF, NAN = jnp.inf, jnp.nan


def normal(theta, x):
    return -0.5 * jnp.sum(jnp.asarray(x) ** 2)


def labels(theta, x):
    return jnp.array([0.0, 0.5, 1.0])[x]


def walk(parameter, part=None):
    """Metropolis–Hastings by a walk whose scale is a number or a function of theta."""
    make = diffmh.GaussianWalk
    if part is not None:
        make = lambda scale: diffmh.On(part, diffmh.GaussianWalk(scale))
    return metropolis(make)(parameter)


def metropolis(make, density=normal):
    def kernel(parameter):
        if callable(parameter):
            return diffmh.MetropolisHastings(density, lambda theta: make(parameter(theta)))
        return diffmh.MetropolisHastings(density, make(parameter))

    return kernel


def crank_nicolson(pair):
    return diffmh.CrankNicolson(pair[0], scale=pair[1])


PLAIN = diffmh.MetropolisHastings(normal, diffmh.GaussianWalk(1.0))
FREE = [[1.0, 0.5], [0.3, 1.0]]
SCALES = (1.3, [-1.0, 0.0, INF, NAN])
VECTORS = ([1.0, 2.0], [[1.0, -1.0], [1.0, 0.0]])
MATRICES = ([[1.0, 0.0], [0.3, 1.0]], [FREE, [[1.0, 0.0], [0.3, -1.0]], [[NAN, 0.0], [0.3, 1.0]]])
RIGHT = [[0.0, 0.9, 0.1], [0.1, 0.0, 0.9], [0.9, 0.1, 0.0]]
TOO_MUCH = [[0.0, 1.8, 0.2], [0.1, 0.0, 0.9], [0.9, 0.1, 0.0]]
NEGATIVE = [[-0.1, 1.0, 0.1], [0.1, 0.0, 0.9], [0.9, 0.1, 0.0]]

# A kernel of a parameter, which is a value or a function of theta; a value in range, values that
# are not, and what the messages name.
TABLE = {
    "walk": (walk, 0.0, *SCALES, r"GaussianWalk\(scale="),
    "walk by a vector": (walk, jnp.zeros(2), *VECTORS, r"GaussianWalk\(scale="),
    "walk by a matrix": (walk, jnp.zeros(2), *MATRICES, r"GaussianWalk\(scale="),
    "walk of a part": (
        lambda p: walk(p, lambda x: x[0]),
        (0.0, 1.0),
        *SCALES,
        r"GaussianWalk\(scale=",
    ),
    "Crank-Nicolson": (
        metropolis(crank_nicolson),
        0.0,
        [0.5, 1.0],
        [[1.5, 1.0], [0.0, 1.0], [-0.5, 1.0], [0.5, -1.0]],
        r"CrankNicolson\((beta|scale)=",
    ),
    "TransitionMatrix": (
        metropolis(diffmh.TransitionMatrix, labels),
        0,
        RIGHT,
        [TOO_MUCH, NEGATIVE],
        r"TransitionMatrix\(probabilities=",
    ),
    "Langevin": (lambda p: diffmh.Langevin(normal, p), 0.0, *SCALES, r"Langevin\(step_size="),
    "Langevin by a matrix": (
        lambda p: diffmh.Langevin(normal, p),
        jnp.zeros(2),
        *MATRICES,
        r"Langevin\(step_size=",
    ),
    "Hamiltonian": (
        lambda p: diffmh.Hamiltonian(normal, p, 2),
        0.0,
        *SCALES,
        r"Hamiltonian\(step_size=",
    ),
    "Cycle": (lambda p: diffmh.Cycle(PLAIN, walk(p)), 0.0, *SCALES, r"GaussianWalk\(scale="),
    "Repeat": (lambda p: diffmh.Repeat(walk(p), 2), 0.0, *SCALES, r"GaussianWalk\(scale="),
    "Mixture": (lambda p: diffmh.Mixture(PLAIN, walk(p)), 0.0, *SCALES, r"GaussianWalk\(scale="),
    "Sweep": (
        lambda p: diffmh.Sweep(lambda i: walk(p, lambda x: x[i]), 2),
        jnp.zeros(2),
        *SCALES,
        r"GaussianWalk\(scale=",
    ),
    "Schedule": (
        lambda p: diffmh.Schedule(lambda i: walk(p), 2),
        0.0,
        *SCALES,
        r"GaussianWalk\(scale=",
    ),
    "Tempering": (
        lambda p: diffmh.Tempering(lambda b: walk(p), (1.0, 0.5)),
        jnp.zeros(2),
        *SCALES,
        r"GaussianWalk\(scale=",
    ),
}


def mean_of(kernel, init):
    f = lambda theta, x: jnp.sum(jnp.asarray(jax.tree.leaves(x)[0]) * 1.0)
    return diffmh.expectation(f, kernel, init=init, num_samples=3, num_chains=2)


@pytest.mark.parametrize("name", TABLE)
def test_out_of_range(name):
    make, init, valid, invalid, words = TABLE[name]
    of_theta = mean_of(make(lambda theta: theta), init)
    value_and_grad = jax.jit(jax.value_and_grad(of_theta))
    found = value_and_grad(jnp.asarray(valid), KEY)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(found))
    for value in map(jnp.asarray, invalid):
        with pytest.raises(ValueError, match=words):
            mean_of(make(value), init)(1.0, KEY)
        # A theta that is not finite is refused itself.
        with pytest.raises(ValueError, match=f"{words}|theta"):
            of_theta(value, KEY)
        found = value_and_grad(value, KEY)
        assert all(np.all(np.isnan(leaf)) for leaf in jax.tree.leaves(found)), value


def test_probabilities_of_a_mixture_under_jit():
    def mean(p):
        mixture = diffmh.Mixture(PLAIN, walk(lambda theta: theta), probabilities=(p, 1 - p))
        return mean_of(mixture, 0.0)(1.0, KEY)

    assert np.isfinite(jax.jit(mean)(0.5)) and np.isnan(jax.jit(mean)(1.5))
    with pytest.raises(ValueError, match=r"Mixture\(probabilities="):
        mean(1.5)


def test_one_site_of_a_sweep():
    """The scales are fixed, but each site's is traced."""

    def mean(scales):
        sweep = diffmh.Sweep(
            lambda i: diffmh.MetropolisHastings(
                lambda theta, x: -0.5 * jnp.sum((x - theta) ** 2),
                diffmh.On(lambda x: x[i], diffmh.GaussianWalk(scales[i])),
            ),
            3,
        )
        return mean_of(sweep, jnp.zeros(3))(1.0, KEY)

    with pytest.raises(ValueError, match=r"GaussianWalk\(scale=...\)` must be positive.*-2"):
        mean(jnp.array([1.0, 2.0, -2.0]))


def test_run_sample_and_trace_refuse():
    kernel = diffmh.MetropolisHastings(normal, lambda theta: diffmh.CrankNicolson(theta))
    calls = (
        lambda: mean_of(kernel, 0.0).run(1.5, KEY),
        lambda: diffmh.sample(kernel, 1.5, KEY, init=0.0, num_samples=3, num_chains=2),
        lambda: diffmh.trace(kernel, 1.5, KEY, init=0.0, num_steps=3),
    )
    for call in calls:
        with pytest.raises(
            ValueError, match=r"CrankNicolson\(beta=...\)` must be in \(0, 1\].*1.5"
        ):
            call()


class Stretched(Proposal):
    """A user's own, with a range of its own."""

    scale: jax.Array
    symmetric: bool = True

    def sample(self, key, x):
        return x + self.scale * jax.random.normal(key)

    def log_prob(self, x, x_new):
        return jax.scipy.stats.norm.logpdf(x_new, x, self.scale)

    def conditions(self):
        return (Condition(self.scale > 0, self.scale, "`Stretched(scale=...)` must be > 0"),)


def test_a_proposal_of_ones_own():
    with pytest.raises(ValueError, match=r"Stretched\(scale=...\)` must be > 0, got -1.0"):
        Stretched(jnp.array(-1.0))
    mean = mean_of(diffmh.MetropolisHastings(normal, lambda theta: Stretched(theta)), 0.0)
    with pytest.raises(ValueError, match=r"Stretched\(scale=...\)` must be > 0, got -1.0"):
        mean(-1.0, KEY)
    assert np.isnan(jax.jit(mean)(-1.0, KEY))


def log_prob_by_inverse(scale, step):
    """The density of `L z`, for any matrix L."""
    z = jnp.linalg.inv(scale) @ step
    return -0.5 * z @ z - jnp.log(2 * jnp.pi) - jnp.linalg.slogdet(scale)[1]


def test_derivative_above_the_diagonal():
    """L is triangular, but its derivative need not be."""
    scale, step = jnp.array([[1.5, 0.0], [0.7, 0.8]]), jnp.array([0.4, -1.1])
    log_prob = lambda scale: diffmh.GaussianWalk(scale).log_prob(jnp.zeros(2), step)
    expected = jax.grad(log_prob_by_inverse)(scale, step)
    np.testing.assert_allclose(jax.jit(jax.grad(log_prob))(scale), expected, rtol=1e-5)
    np.testing.assert_allclose(jax.jit(jax.jacfwd(log_prob))(scale), expected, rtol=1e-5)


def test_derivative_off_the_simplex():
    """Rows that vary freely are normalised rows, in the choice and in the accept ratio."""
    log_prob = lambda matrix: diffmh.TransitionMatrix(matrix).log_prob(0, 1)
    matrix = jnp.array([[0.2, 0.8], [0.5, 0.5]])
    expected = jax.grad(lambda matrix: jnp.log(matrix[0, 1] / matrix[0].sum()))(matrix)
    np.testing.assert_allclose(jax.jit(jax.grad(log_prob))(matrix), expected, rtol=1e-5)


ROOT = jnp.array([[1.0, 0.0], [0.6, 0.8]])
TURN = jnp.array([[0.0, 1.0], [-1.0, 0.0]])


@pytest.mark.parametrize(
    "make",
    [
        lambda density: diffmh.Langevin(density, lambda theta: theta),
        lambda density: diffmh.MetropolisHastings(
            density, lambda theta: diffmh.CrankNicolson(0.7, theta)
        ),
    ],
    ids=["Langevin", "Crank-Nicolson"],
)
def test_turning_the_noise_changes_nothing(make):
    """`L exp(tA) z` with A antisymmetric has the law of `L z`, so the derivative along `L A`, above
    the diagonal and below, is 0.
    """
    precision = jnp.array([[1.0, 0.4], [0.4, 1.5]])
    mean = diffmh.expectation(
        lambda theta, x: x[0] ** 2 + 2 * jnp.sin(x[1]) * x[0],
        make(lambda theta, x: -0.5 * x @ precision @ x),
        init=jnp.array([1.0, -1.0]),
        num_samples=4,
        num_chains=20_000,
    )
    along = lambda theta: mean.per_chain(theta, jax.random.key(2))
    _, slope = jax.jvp(along, (ROOT,), (ROOT @ TURN,))
    assert_unbiased(slope, 0.0)
