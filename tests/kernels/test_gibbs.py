"""Gibbs, BlockGibbs and Sweep against exact transition matrices, and mistakes that must be
caught.
"""

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import derivative, finite_chain_mean
from programs import derivatives, each
from small_tables import (
    COLUMN,
    COLUMNS,
    ROW,
    ROWS,
    conditional,
    estimates,
    exact,
    log_density,
    tables,
)
from unbiasedness import assert_unbiased, is_caught

import diffmh
from diffmh.core import decisions
from diffmh.core.kernel import State


def sweep(coupling=None, density=log_density):
    row = diffmh.Gibbs(density, lambda z: z[0], ROWS, coupling)
    return diffmh.Cycle(row, diffmh.Gibbs(density, lambda z: z[1], COLUMNS, coupling))


def sweep_matrix(log_density):
    return conditional(log_density, COLUMN) @ conditional(log_density, ROW)


@pytest.mark.parametrize(
    ("coupling", "alternatives", "births", "count"),
    [
        pytest.param(None, 1, None, 100, marks=pytest.mark.thorough),
        (diffmh.Maximal(), 2, None, 100),
        (None, 2, True, 8),
    ],
    ids=["same uniform", "maximal, K = 2", "births, K = 2"],
)
def test_gibbs(coupling, alternatives, births, count):
    problems = tables(0, count)
    estimator = diffmh.StochasticDerivative(alternatives=alternatives, births=births)
    found = estimates(problems, 1, sweep(coupling), estimator)
    for index, problem in enumerate(problems):
        assert_unbiased(found[index], exact(problem, sweep_matrix), f"table {index}")


@pytest.mark.thorough
def test_gibbs_by_score():
    problems = tables(0, 20)
    found = estimates(problems, 2, sweep(), diffmh.Score("other chains"))
    for index, problem in enumerate(problems):
        assert_unbiased(found[index], exact(problem, sweep_matrix), f"table {index}")


def fresh():
    """A density of its own, so that what is patched is traced anew."""
    return lambda *operands: log_density(*operands)


def worst_is_caught(kernel) -> bool:
    problems = tables(0, 10)
    found = estimates(problems, 3, kernel)
    truths = [exact(problem, sweep_matrix) for problem in problems]
    return any(is_caught(found[i], truth) for i, truth in enumerate(truths))


def test_an_alternative_that_copies_the_draw_is_caught(monkeypatch):
    def copies(self, parameters, step, alternative, noise, coupling_noise):
        return State(self.result(alternative.x, noise, step.decisions[0].outcome))

    monkeypatch.setattr(diffmh.Gibbs, "coupled_step", copies)
    assert worst_is_caught(sweep(density=fresh()))


def test_a_residual_that_is_not_one_is_caught(monkeypatch):
    def wrong(self, other, uniforms):
        p, q = (decision.probabilities[other.outcome] for decision in (self, other))
        drawn = decisions.index_from_uniform(self.probabilities, uniforms[1])
        return jnp.where(uniforms[0] * q < p, other.outcome, drawn)

    monkeypatch.setattr(diffmh.extend.Categorical, "nearest", wrong)
    assert worst_is_caught(sweep(diffmh.Maximal(), fresh()))


# Restricted Boltzmann machines of 3 + 2 units, all values of the layers enumerated.
VISIBLE, HIDDEN = 3, 2
UNITS = np.array(list(itertools.product([0, 1], repeat=VISIBLE + HIDDEN)))


def split(theta):
    couplings = theta[: VISIBLE * HIDDEN].reshape(VISIBLE, HIDDEN)
    return couplings, theta[VISIBLE * HIDDEN : -HIDDEN], theta[-HIDDEN:]


def machine_density(theta, x, weights):
    couplings, visible, hidden = split(theta)
    v, h = x["v"] * 1.0, x["h"] * 1.0
    return v @ couplings @ h + v @ visible + h @ hidden


def machine(values):
    """Both layers in turn. Units of values (a, b) have the log odds (b − a) times their input."""
    span = values[1] - values[0]
    visible = diffmh.BlockGibbs(
        lambda theta, x, *_: span * (split(theta)[0] @ x["h"] + split(theta)[1]),
        lambda x: x["v"],
        machine_density,
        values,
    )
    hidden = diffmh.BlockGibbs(
        lambda theta, x, *_: span * (x["v"] @ split(theta)[0] + split(theta)[2]),
        lambda x: x["h"],
        machine_density,
        values,
    )
    return diffmh.Cycle(hidden, visible)


def machine_estimates(problems, seed, values, estimator):
    start = values[0]
    expectation = diffmh.expectation(
        lambda theta, x, weights: weights @ jnp.concatenate([x["v"] * 1.0, x["h"] * 1.0]),
        machine(values),
        init={"v": jnp.full(VISIBLE, start, jnp.int8), "h": jnp.full(HIDDEN, start * 1.0)},
        num_samples=3,
        num_chains=4_000,
        estimator=estimator,
    )
    slope = jax.jacfwd(expectation.per_chain)
    return each(lambda problem, key: slope(problem[0], key, problem[1]), problems, seed)


def machine_exact(theta, weights, values, num_samples):
    low, high = values
    units = np.where(UNITS, high, low)
    v, h = units[:, :VISIBLE], units[:, VISIBLE:]

    def mean(theta):
        couplings, visible, hidden = split(theta)
        log_density = np.einsum("si,ij,sj->s", v, couplings, h) + v @ visible + h @ hidden
        number = lambda bits: bits @ (1 << np.arange(bits.shape[1]))
        of_v, of_h = number(UNITS[:, :VISIBLE]), number(UNITS[:, VISIBLE:])
        step = conditional(log_density, of_v) @ conditional(log_density, of_h)
        return finite_chain_mean(step, 0, units @ weights.T, num_samples, 0)

    return derivative(mean, theta)[1]


def machine_problems(seed, count):
    rng = np.random.default_rng(seed)
    single = lambda array: np.asarray(array, np.float32).astype(float)
    size = VISIBLE * HIDDEN + VISIBLE + HIDDEN
    thetas = single(rng.normal(size=(count, size)))
    weights = single(rng.normal(size=(count, 2, VISIBLE + HIDDEN)))
    return list(zip(thetas, weights, strict=True))


def machine_runs(values, seed, count, alternatives=1, births=None):
    problems = machine_problems(seed, count)
    truths = [machine_exact(*problem, values, 3) for problem in problems]
    estimator = diffmh.StochasticDerivative(alternatives=alternatives, births=births)
    return machine_estimates(problems, seed, values, estimator), truths


@pytest.mark.parametrize(
    ("values", "alternatives", "births", "count"),
    [
        ((0, 1), 1, None, 100),
        pytest.param((-1, 1), 4, None, 100, marks=pytest.mark.thorough),
        ((-1, 1), 2, True, 10),
    ],
)
def test_block_gibbs(values, alternatives, births, count):
    """Layers of different dtypes, all flips of a layer in one pruning."""
    found, truths = machine_runs(values, 4, count, alternatives, births)
    for index, truth in enumerate(truths):
        assert_unbiased(found[index], truth, f"machine {index}")


def test_a_flip_that_forgets_the_other_draws_is_caught(monkeypatch):
    """The flipped unit alone, in the state before: the rest of the block is not redrawn."""

    def wrong(self, step, noise, decision, candidate):
        decided = step.decisions[decision]
        one = jnp.arange(decided.outcome.size) == candidate
        whole = self.result(step.before.x, noise, decided.flipped_outcome(candidate))
        block = jnp.where(one, self.where(whole), self.where(step.before.x))
        return State(eqx.tree_at(self.where, step.before.x, block))

    monkeypatch.setattr(diffmh.BlockGibbs, "flipped", wrong)
    found, truths = machine_runs((0, 1), 4, 10)
    assert any(is_caught(found[index], truth) for index, truth in enumerate(truths))


@pytest.mark.parametrize("births", [None, True])
def test_sweep_over_sites(births):
    """A ring of three-coloured sites, the site being traced: `Sweep` against the matrices."""
    sites, colours = 4, 3
    states = np.array(list(itertools.product(range(colours), repeat=sites)))
    same = (states == np.roll(states, 1, axis=1)).sum(axis=1)
    field = (states * np.arange(1, sites + 1)).sum(axis=1) / 8
    observed = np.stack([same, states[:, 0], states[:, 2] * states[:, 3]], axis=1).astype(float)

    def mean(theta):
        step = np.eye(len(states), dtype=complex)
        for site in range(sites):
            rest = np.delete(states, site, axis=1) @ colours ** np.arange(sites - 1)
            step = step @ conditional(theta[0] * same + theta[1] * field, rest)
        return finite_chain_mean(step, 0, observed, 3, 0)

    def potts(theta, z):
        agree = jnp.sum(z == jnp.roll(z, 1))
        return theta[0] * agree + theta[1] * jnp.sum(z * jnp.arange(1, sites + 1)) / 8

    def f(theta, z):
        return jnp.stack([jnp.sum(z == jnp.roll(z, 1)), z[0], z[2] * z[3]]) * 1.0

    sweep = diffmh.Sweep(lambda i: diffmh.Gibbs(potts, lambda z: z[i], colours), sites)
    expectation = diffmh.expectation(
        f,
        sweep,
        init=jnp.zeros(sites, jnp.int8),
        num_samples=3,
        num_chains=40_000,
        estimator=diffmh.StochasticDerivative(births=births),
    )
    theta = np.array([0.5, -0.25])
    found = derivatives(expectation, jnp.asarray(theta), jax.random.key(5))
    assert_unbiased(found, derivative(mean, theta)[1])


def test_a_block_of_all_the_elements():
    """A slice of the whole array is the array itself, and no node for `equinox.tree_at`."""
    density = lambda theta, z: theta * jnp.sum(z)

    def slope(where):
        block = diffmh.BlockGibbs(lambda theta, z: theta * jnp.ones(2), where, density)
        mean = diffmh.expectation(
            lambda theta, z: jnp.sum(z), block, init=jnp.zeros(2), num_samples=5, num_chains=4
        )
        return jax.grad(mean)(0.5, jax.random.key(0))

    assert slope(lambda z: z[:2]) == slope(lambda z: z)


def test_refusals():
    density = lambda theta, z: theta * jnp.sum(z)
    f = lambda theta, z: 1.0 * jnp.sum(z)

    def value(kernel, init):
        return diffmh.expectation(f, kernel, init=init, num_samples=2)(0.5, jax.random.key(0))

    with pytest.raises(TypeError, match="must pick one integer of the state"):
        value(diffmh.Gibbs(density, lambda z: z[:2], 2), jnp.zeros(3, int))
    with pytest.raises(TypeError, match="must pick one integer of the state"):
        value(diffmh.Gibbs(density, lambda z: z[0], 2), jnp.zeros(3))
    with pytest.raises(ValueError, match="at least 2, got 1"):
        diffmh.Gibbs(density, lambda z: z[0], 1)
    with pytest.raises(TypeError, match=r"`CommonRandomNumbers\(\)` or `Maximal\(\)`"):
        diffmh.Gibbs(density, lambda z: z[0], 2, diffmh.Independent())
    with pytest.raises(ValueError, match=r"block's shape \(2,\), got \(3,\)"):
        value(diffmh.BlockGibbs(lambda t, z: t * z, lambda z: z[:2], density), jnp.zeros(3))
    with pytest.raises(ValueError, match="two different numbers"):
        diffmh.BlockGibbs(lambda t, z: t * z, lambda z: z, density, values=(1, 1))


def test_reports_and_traces_without_acceptance():
    """Nothing is accepted or rejected: no rate, no warning of a stuck chain, no division by 0."""
    potts = lambda theta, z: theta * jnp.sum(z[1:] == z[:-1])
    kernel = diffmh.Gibbs(potts, lambda z: z[1], 3)
    start = jnp.zeros(3, int)
    agree = lambda theta, z: 1.0 * (z[0] == z[1])
    expectation = diffmh.expectation(agree, kernel, init=start, num_samples=200)
    report = expectation.run(0.5, jax.random.key(6))
    assert np.isnan(report.acceptance_rate) and "accepted" not in str(report)
    assert not report.warnings
    exact_slope = 2 * np.exp(1.0) * 2 / (np.exp(1.0) + 2) ** 2
    assert abs(report.gradient - exact_slope) < 5 * report.gradient_error
    path = diffmh.trace(kernel, 0.5, jax.random.key(7), init=start, num_steps=20)
    assert path.primal.shape == (20, 3) and np.all(np.isnan(path.accepted))
