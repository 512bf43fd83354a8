"""StochasticAD.jl's tutorials as programs of our own: distributions × functions, particle
filters, a variational fit; each against its exact derivative.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.special import gammaln
from oracles import derivative
from sad_runs import QUICK
from scipy.special import comb, factorial
from unbiasedness import assert_unbiased, is_caught

from diffmh import sad

THETA = 0.4
COUNTS = np.arange(60)
# Each distribution at a parameter, and its probabilities of 0, 1, …, in complex numbers.
DISTRIBUTIONS = {
    "bernoulli": (
        lambda key, p: sad.bernoulli(key, p).astype(int),
        lambda p: np.array([1 - p, p]),
    ),
    "binomial": (
        lambda key, p: sad.binomial(key, 5, p),
        lambda p: np.array([comb(5, k) * p**k * (1 - p) ** (5 - k) for k in range(6)]),
    ),
    "poisson": (
        lambda key, p: sad.poisson(key, 3 * p),
        lambda p: np.exp(-3 * p) * (3 * p) ** COUNTS / factorial(COUNTS),
    ),
    "geometric": (
        lambda key, p: sad.geometric(key, p),
        lambda p: np.concatenate([[0], p * (1 - p) ** COUNTS]),
    ),
    "categorical": (
        lambda key, p: sad.categorical(key, jnp.stack([p, 0.5 - p, p**2])),
        lambda p: np.exp([p, 0.5 - p, p**2]) / np.sum(np.exp([p, 0.5 - p, p**2])),
    ),
    "uniform up to a draw": (
        lambda key, p: sad.uniform_int(
            jax.random.fold_in(key, 1), 0, 1 + sad.bernoulli(jax.random.fold_in(key, 2), p)
        ),
        lambda p: np.array([1 - p / 2, p / 2]),
    ),
}
VALUES = np.array([0.5, -1.25, 2.0, 0.875, 1.0])
# Of the draw and the parameter; for `jax.numpy` and for NumPy alike.
FUNCTIONS = {
    "itself": lambda np, k, p: 1.0 * k,
    "its square": lambda np, k, p: (1.0 * k) ** 2,
    "times the parameter": lambda np, k, p: k * p**2,
    "exponential": lambda np, k, p: np.exp(-0.3 * k) + p,
    "an entry": lambda np, k, p: np.asarray(VALUES)[k % 5],
    "a choice": lambda np, k, p: np.where(k > 1, p, 1.0 * k),
    "a count of counts": lambda np, k, p: 1.0 * ((k // 2) * (k % 3)),
}


def table(p, key):
    """All functions of one draw of each distribution."""
    keys = jax.random.split(key, len(DISTRIBUTIONS))
    drawn = [draw(key, p) for key, (draw, _) in zip(keys, DISTRIBUTIONS.values(), strict=True)]
    return jnp.stack(
        [jnp.stack([of(jnp, k, p).astype(float) for of in FUNCTIONS.values()]) for k in drawn]
    )


def exact_table(theta):
    (p,) = theta
    rows = []
    for _, probabilities in DISTRIBUTIONS.values():
        chances = probabilities(p)
        k = np.arange(len(chances))
        rows += [np.sum(chances * of(np, k, p)) for of in FUNCTIONS.values()]
    return np.array(rows)


def test_distributions_times_functions():
    """K = 3: draws do not compete for one slot. A function in the place of another is caught."""
    found = jax.jit(
        jax.vmap(jax.jacfwd(sad.expectation(table, alternatives=3)), (None, 0)),
        compiler_options=QUICK,
    )(THETA, jax.random.split(jax.random.key(0), 20_000))
    found = np.asarray(found).reshape(20_000, -1)
    exact = derivative(exact_table, np.array([THETA]))[1][:, 0]
    assert_unbiased(found, exact, str([*DISTRIBUTIONS]))
    assert is_caught(found[:, 1:], exact[:-1])


OBSERVED = jnp.array([0.7, 1.9, -0.4])


def log_normal(x, mean):
    return -0.5 * (x - mean) ** 2 - 0.5 * jnp.log(2 * jnp.pi)


def ancestors_one_by_one(key, log_weight):
    """Each particle draws its own ancestor."""
    return sad.categorical(key, jnp.broadcast_to(log_weight, (log_weight.size,) * 2))


def ancestors_by_count(key, log_weight):
    """How many offspring each has; the same distribution, in a time that does not grow with the
    square of their number.
    """
    count = sad.multinomial(key, log_weight.size, jax.nn.softmax(log_weight))
    return jnp.searchsorted(jnp.cumsum(count), jnp.arange(log_weight.size), side="right")


def particle_filter(ancestors, size):
    """The likelihood of `x' = θ x + ε`, observed with noise: a mean of products of weights, which
    is unbiased for every number of particles.
    """

    def program(theta, key):
        keys = jax.random.split(key, 2 * OBSERVED.size)
        x, likelihood = jax.random.normal(keys[0], (size,)), 1.0
        for time, y in enumerate(OBSERVED):
            log_weight = log_normal(y, x)
            likelihood = likelihood * jnp.mean(jnp.exp(log_weight))
            if time + 1 < OBSERVED.size:
                x = x[ancestors(keys[2 * time + 1], log_weight)]
                x = theta * x + jax.random.normal(keys[2 * time + 2], (size,))
        return likelihood

    return program


def likelihood(theta):
    """Kalman's, by the covariance of all observations."""
    count = OBSERVED.size
    variance = [jnp.ones(())]
    for _ in range(count - 1):
        variance.append(theta**2 * variance[-1] + 1)
    covariance = jnp.stack(
        [
            jnp.stack([theta ** abs(i - j) * variance[min(i, j)] for j in range(count)])
            for i in range(count)
        ]
    ) + jnp.eye(count)
    return jnp.exp(
        -0.5 * OBSERVED @ jnp.linalg.solve(covariance, OBSERVED)
        - 0.5 * jnp.linalg.slogdet(2 * jnp.pi * covariance)[1]
    )


@pytest.mark.parametrize(
    ("ancestors", "size", "runs"),
    [
        pytest.param(ancestors_one_by_one, 20, 20_000, id="20"),
        pytest.param(ancestors_by_count, 20, 20_000, id="20, by count"),
        pytest.param(ancestors_by_count, 1000, 2_000, id="1000", marks=pytest.mark.thorough),
    ],
)
def test_particle_filter(ancestors, size, runs):
    """With the resampling held fixed, as many filters differentiate, it is wrong: caught."""
    program, theta = particle_filter(ancestors, size), 0.6
    of_path = lambda key, log_weight: ancestors(key, jax.lax.stop_gradient(log_weight))
    held = particle_filter(of_path, size)
    slopes = lambda program: jax.vmap(jax.grad(sad.expectation(program)), (None, 0))
    both = lambda theta, keys: (slopes(program)(theta, keys), slopes(held)(theta, keys))
    keys = jax.random.split(jax.random.key(1), runs)
    found, without = jax.jit(both, compiler_options=QUICK)(theta, keys)
    exact = np.asarray(jax.jit(jax.grad(likelihood))(theta))
    assert_unbiased(found, exact, f"{size} particles")
    assert is_caught(without, exact)


def log_target(k):
    """A mixture of two Poisson distributions."""
    log_poisson = lambda rate: k * jnp.log(rate) - rate - gammaln(k + 1.0)
    return jnp.logaddexp(jnp.log(0.7) + log_poisson(2.0), jnp.log(0.3) + log_poisson(5.0))


def divergence(theta, key):
    """`log q(k) − log p(k)` at a draw from `q = Poisson(e^θ)`."""
    rate = jnp.exp(theta)
    k = 1.0 * sad.poisson(key, rate)
    return k * theta - rate - gammaln(k + 1) - log_target(k)


def exact_divergence(theta):
    k = jnp.arange(60.0)
    log_q = k * theta - jnp.exp(theta) - gammaln(k + 1)
    return jnp.sum(jnp.exp(log_q) * (log_q - log_target(k)))


def test_variational_fit():
    """The gradient at the start, and where stochastic descent ends: at the exact optimum."""
    slopes = jax.vmap(jax.grad(sad.expectation(divergence)), (None, 0))

    def descend(theta, key):
        step = lambda theta, key: (
            (theta - 0.1 * slopes(theta, jax.random.split(key, 64)).mean(),) * 2
        )
        return jax.lax.scan(step, theta, jax.random.split(key, 300))[1][150:].mean()

    both = lambda theta, keys: (slopes(theta, keys), descend(theta, keys[0]))
    keys = jax.random.split(jax.random.key(2), 20_000)
    found, end = jax.jit(both, compiler_options=QUICK)(2.0, keys)
    assert_unbiased(found, np.asarray(jax.jit(jax.grad(exact_divergence))(2.0)))
    grid = jnp.linspace(0.0, 2.5, 2_501)
    best = grid[jnp.argmin(jax.vmap(exact_divergence)(grid))]
    assert abs(end - best) < 0.02 < abs(2.0 - best)
