"""Proposals that depend on θ: choices among finitely many values against transition matrices,
continuous ones against quadrature, and mistakes that must be caught.
"""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from finite_chains import f, log_density, random_problem
from oracles import derivative, finite_chain_mean
from programs import derivatives, each
from quadrature import log_normal, phi, proposed_by_density, slope
from unbiasedness import assert_unbiased, is_caught

import diffmh

# In the chain of seed 598 a derivative of 6e-7 rests on a path of probability 1e-7, which 4,000
# runs never take: their spread says nothing there.
PROBLEMS = [random_problem(seed) for seed in range(500, 601) if seed != 598]
STEPS = 5


def proposal(theta, matrix, features):
    """`q_ij ∝ matrix_ij exp(features_i·θ features_j·θ / 2)`: zeros stay zeros."""
    slope = features @ theta
    weights = matrix * jnp.exp(0.5 * slope[:, None] * slope[None])
    return weights / jnp.sum(weights, axis=1, keepdims=True)


def exact(problem):
    def mean(theta):
        slope = problem.features @ theta
        weights = problem.proposal * np.exp(0.5 * slope[:, None] * slope[None])
        q = weights / weights.sum(axis=1, keepdims=True)
        g = problem.base + slope
        possible = problem.proposal > 0
        log_q = np.where(possible, np.log(np.where(possible, q, 1.0)), -np.inf)
        with np.errstate(invalid="ignore"):
            log_ratio = g[None] - g[:, None] + log_q.T - log_q
        real = np.where(possible & possible.T, log_ratio.real, -np.inf)
        share = np.where(real < 0, 1.0, np.where(real == 0, 0.5, 0.0))
        slope = np.where(possible & possible.T, log_ratio.imag, 0.0)
        moves = q * np.exp(np.minimum(real, 0.0)) * (1 + 1j * share * slope)
        np.fill_diagonal(moves, 0.0)
        matrix = moves + np.diag(1 - moves.sum(axis=1))
        observed = problem.values + problem.slopes * theta[0]
        return finite_chain_mean(matrix, 0, observed, STEPS, 0)

    return derivative(mean, problem.theta)[1]


def estimates(problems, coupling=None, estimator=None, density=log_density):
    def one(problem, key):
        choose = lambda theta: diffmh.TransitionMatrix(
            proposal(theta, problem.proposal, problem.features)
        )
        expectation = diffmh.expectation(
            f,
            diffmh.MetropolisHastings(density, choose, coupling),
            init=0,
            num_samples=STEPS,
            num_chains=4_000,
            estimator=estimator,
        )
        return jax.jacfwd(expectation.per_chain)(problem.theta, key, *problem[2:])

    return each(one, problems, 6)


@pytest.mark.parametrize(
    ("coupling", "estimator"),
    [
        (None, None),
        (diffmh.CommonRandomNumbers(), diffmh.StochasticDerivative(alternatives=2)),
        pytest.param(None, diffmh.Score("other chains"), marks=pytest.mark.thorough),
    ],
    ids=["maximal", "inversion, K = 2", "score"],
)
def test_choices(coupling, estimator):
    found = estimates(PROBLEMS, coupling, estimator)
    for index, problem in enumerate(PROBLEMS):
        assert_unbiased(found[index], exact(problem), f"chain {index}")


def test_choices_without_their_flips_are_caught(monkeypatch):
    """The choice as if its probabilities were fixed; the accept step knows better."""
    right = diffmh.extend.Categorical.flip_weight
    wrong = lambda self, weights: 0.0 * right(self, weights)
    monkeypatch.setattr(diffmh.extend.Categorical, "flip_weight", wrong)
    few = PROBLEMS[:10]
    found = estimates(few, density=lambda *operands: log_density(*operands))
    assert any(is_caught(found[i], exact(problem)) for i, problem in enumerate(few))


class Normal(eqx.Module):
    scale: jax.Array

    def sample(self, key):
        return self.scale * jax.random.normal(key)

    def log_prob(self, x):
        return jax.scipy.stats.norm.logpdf(x, 0.0, self.scale)


class Skewed(diffmh.extend.Proposal):
    """A user's own: `x' = x + s(z + ½ tanh x)`."""

    scale: jax.Array
    symmetric: bool = False

    def sample(self, key, x):
        return x + self.scale * (jax.random.normal(key) + 0.5 * jnp.tanh(x))

    def log_prob(self, x, x_new):
        mean = x + 0.5 * self.scale * jnp.tanh(x)
        return jax.scipy.stats.norm.logpdf(x_new, mean, self.scale)


CONTINUOUS = {
    "walk": (lambda s: diffmh.GaussianWalk(s), lambda s, x, new: log_normal(new, x, s), 1.3),
    "Crank-Nicolson": (
        lambda b: diffmh.CrankNicolson(b, 1.5, 0.4),
        lambda b, x, new: log_normal(new, 0.4 + np.sqrt(1 - b**2) * (x - 0.4), 1.5 * b),
        0.6,
    ),
    "independence": (
        lambda s: diffmh.Independence(Normal(s)),
        lambda s, x, new: log_normal(new, 0.0, s) + 0.0 * x,
        1.5,
    ),
    "a user's own": (
        Skewed,
        lambda s, x, new: log_normal(new, x + 0.5 * s * np.tanh(x), s),
        1.3,
    ),
}


def lagged(make, estimator=None, num_steps=3):
    kernel = diffmh.MetropolisHastings(lambda theta, x: -0.5 * x**2, lambda theta: make(theta))
    return diffmh.expectation(
        lambda theta, x, x_new: jnp.stack(phi(x, x_new)),
        kernel,
        init=jax.random.normal,
        num_samples=num_steps,
        num_chains=40_000,
        lag=1,
        estimator=estimator,
    )


@functools.cache
def continuous(name):
    make, log_q, theta = CONTINUOUS[name]
    found = derivatives(lagged(make), theta, jax.random.key(7))
    return np.asarray(found), slope(proposed_by_density(log_q), theta)


@pytest.mark.parametrize(
    "name",
    [
        "walk",
        "Crank-Nicolson",
        pytest.param("independence", marks=pytest.mark.thorough),
        "a user's own",
    ],
)
def test_continuous(name):
    found, truth = continuous(name)
    assert np.abs(truth).max() > 0.05
    assert_unbiased(found, truth, name)


def test_the_moves_alone_and_the_flips_alone_are_caught(monkeypatch):
    make, log_q, theta = CONTINUOUS["walk"]
    truth = slope(proposed_by_density(log_q), theta)
    without_flips = lambda self, weights: 0.0 * self.log_accept_gradient
    with monkeypatch.context() as patch:
        patch.setattr(diffmh.extend.Acceptance, "flip_weight", without_flips)
        moves = derivatives(lagged(make), theta, jax.random.key(8))
    assert is_caught(moves, truth)
    right = diffmh.extend.Parameters.evaluate

    def without_moves(self, function, *operands):
        """The tangent of a proposed state is dropped."""
        value = right(self, function, *operands)
        is_move = function.__name__ == "propose" and value.tangent is not None
        return diffmh.extend.Value(value.primal, 0.0 * value.tangent) if is_move else value

    monkeypatch.setattr(diffmh.extend.Parameters, "evaluate", without_moves)
    flips = derivatives(lagged(make), theta, jax.random.key(8))
    assert is_caught(flips, truth)


@pytest.mark.optimised
def test_the_primal_is_the_same_with_and_without_a_derivative():
    expectation = lagged(CONTINUOUS["Crank-Nicolson"][0])
    theta, key = 0.6, jax.random.key(9)
    values = jax.jvp(lambda t: expectation.per_chain(t, key), (theta,), (1.0,))[0]
    np.testing.assert_array_equal(expectation.per_chain(theta, key), values)


def test_part_of_a_mixed_state():
    """A label chosen by θ beside a real number that θ moves: a cycle, against quadrature on
    neither: each part's own stationary law, and the label's jump rate.
    """
    labels = jnp.array([0.2, 0.3, 0.5])

    def density(theta, s):
        return jnp.log(labels)[s["label"]] - 0.5 * (s["x"] - s["label"]) ** 2

    def choice(theta):
        odds = jnp.exp(theta[0] * jnp.array([[0.0, 1.0, -1.0], [0.5, 0.0, 1.0], [1.0, 0.0, 0.0]]))
        return diffmh.TransitionMatrix(odds / jnp.sum(odds, axis=1, keepdims=True))

    label = diffmh.MetropolisHastings(
        density, lambda theta: diffmh.On(lambda s: s["label"], choice(theta))
    )
    walk = diffmh.MetropolisHastings(
        density, lambda theta: diffmh.On(lambda s: s["x"], diffmh.GaussianWalk(theta[1]))
    )

    def start(key):
        key_label, key_x = jax.random.split(key)
        label = jax.random.categorical(key_label, jnp.log(labels))
        return {"label": label, "x": label + jax.random.normal(key_x)}

    expectation = diffmh.expectation(
        lambda theta, a, b: jnp.stack(
            [b["label"] * 1.0, b["x"], b["x"] ** 2, (a["label"] != b["label"]) * 1.0]
        ),
        diffmh.Cycle(walk, label),
        init=start,
        num_samples=3,
        num_chains=40_000,
        lag=1,
    )
    theta = jnp.array([0.4, 1.2])
    found = np.asarray(derivatives(expectation, theta, jax.random.key(10)))

    def jumps(first):
        """`Σ_{i≠j} ∫ min(π(i, x) q_ij, π(j, x) q_ji) dx`."""
        odds = np.exp(first * np.array([[0, 1, -1], [0.5, 0, 1], [1, 0, 0]]))
        q = odds / odds.sum(axis=1, keepdims=True)
        x = np.linspace(-8, 10, 20_001)
        joint = np.array([0.2, 0.3, 0.5])[:, None] * np.exp(log_normal(x, np.arange(3)[:, None], 1))
        flow = q[:, :, None] * joint[:, None, :]
        moved = np.minimum(flow, flow.transpose(1, 0, 2)).sum(axis=-1) * (x[1] - x[0])
        return moved.sum() - np.trace(moved)

    exact_jumps = (jumps(0.401) - jumps(0.399)) / 0.002
    truth = np.zeros((4, 2))
    truth[3, 0] = exact_jumps
    assert abs(exact_jumps) > 0.01
    assert_unbiased(found, truth)


def test_refusals():
    density = lambda theta, x: -0.5 * (x - theta) ** 2
    f = lambda theta, x: 1.0 * x

    def undeclared(theta):
        kernel = diffmh.MetropolisHastings(density, diffmh.GaussianWalk(theta))
        return diffmh.expectation(f, kernel, init=0.0, num_samples=2)(theta, jax.random.key(0))

    with pytest.raises(diffmh.NotDifferentiable, match="lambda theta: GaussianWalk"):
        jax.grad(undeclared)(0.5)
    kernel = diffmh.MetropolisHastings(density, lambda theta: theta)
    with pytest.raises(
        TypeError, match=r"`proposal\(theta\)` must be a `diffmh\.extend\.Proposal`"
    ):
        diffmh.expectation(f, kernel, init=0.0, num_samples=2)(0.5, jax.random.key(0))
    field = lambda theta, x: theta * jnp.sum(x)
    kernel = diffmh.MetropolisHastings(field, lambda theta: diffmh.SpinFlip())
    with pytest.raises(TypeError, match="moves int32 must be a `FiniteProposal`"):
        spins = lambda theta, x: 1.0 * x[0]
        diffmh.expectation(spins, kernel, init=jnp.ones(2, jnp.int32), num_samples=2)(
            0.5, jax.random.key(0)
        )
    kernel = diffmh.MetropolisHastings(
        density, lambda theta: diffmh.OtherState(2), diffmh.MaximalReflection()
    )
    with pytest.raises(ValueError, match="needs Gaussian steps"):
        expectation = diffmh.expectation(f, kernel, init=0, num_samples=2)
        jax.grad(expectation)(0.5, jax.random.key(0))


def test_jumps_are_refused_where_states_move():
    """A pathwise derivative does not see a jump: a bound of the support, an indicator."""

    def grad(density, f):
        walk = lambda theta: diffmh.GaussianWalk(theta)
        kernel = diffmh.MetropolisHastings(density, walk)
        expectation = diffmh.expectation(f, kernel, init=0.5, num_samples=2)
        return jax.grad(expectation)(0.5, jax.random.key(0))

    normal, one_sided = (lambda s, x: -0.5 * x**2), (lambda s, x: jnp.where(x > 0, -x, -jnp.inf))
    with pytest.raises(diffmh.NotDifferentiable, match="`log_density` jumps in x"):
        grad(one_sided, lambda s, x: x)
    with pytest.raises(diffmh.NotDifferentiable, match="`f` jumps in x"):
        grad(normal, lambda s, x: 1.0 * (x > 0))
    assert np.isfinite(grad(normal, lambda s, x: jnp.where(x > 0, x, 0.0)))
