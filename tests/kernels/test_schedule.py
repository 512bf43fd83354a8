"""Schedules against exact transition matrices, annealed importance sampling against the ratio of
normalisers, and mistakes that must be caught.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import derivative
from programs import each, optimised
from staged import (
    BETAS,
    ISING_GRADIENT,
    ISING_START,
    ISING_VALUE,
    STEPS,
    annealed_energy,
    annealed_weights,
    pass_matrix,
)
from unbiasedness import assert_unbiased, is_caught

import diffmh
from diffmh.core.odds import IndexedOdds
from diffmh.kernels.schedule import Enter, Schedule


def energy(z):
    return -jnp.sum(z * (jnp.roll(z, 1, -1) + jnp.roll(z, 1, -2)))


def heated(stage):
    density = lambda betas, z: -betas[stage] * energy(z)
    return diffmh.MetropolisHastings(density, diffmh.SpinFlip())


def annealed(estimator=None, num_chains=4000):
    return diffmh.expectation(
        lambda betas, z: 1.0 * energy(z),
        diffmh.Schedule(heated, len(BETAS), STEPS),
        init=jnp.asarray(ISING_START),
        num_samples=1,
        num_chains=num_chains,
        estimator=estimator,
    )


def test_the_oracle_has_the_known_numbers():
    value, gradient = derivative(annealed_energy, BETAS)
    np.testing.assert_allclose(value, ISING_VALUE, atol=1e-6)
    np.testing.assert_allclose(gradient[0], ISING_GRADIENT, atol=1e-6)


ESTIMATORS = {
    "weights": diffmh.StochasticDerivative(),
    "four": diffmh.StochasticDerivative(alternatives=4),
    "births": diffmh.StochasticDerivative(births=True),
    "score": diffmh.Score("other chains"),
}


def slopes_of(estimator, seed=0):
    theta = jnp.asarray(np.float32(BETAS))
    mean = annealed(estimator)
    both = lambda theta, key: (mean.per_chain(theta, key),) * 2
    jacobian = optimised(jax.jacfwd(both, has_aux=True))
    return map(np.asarray, jacobian(theta, jax.random.key(seed)))


@pytest.mark.parametrize(
    "name", ["weights", pytest.param("four", marks=pytest.mark.thorough), "births", "score"]
)
def test_an_annealing_schedule(name):
    slopes, values = slopes_of(ESTIMATORS[name])
    assert_unbiased(values[:, None], np.array([ISING_VALUE]), "final energy")
    assert_unbiased(slopes, ISING_GRADIENT, "gradient with respect to the schedule")


def test_births_that_forget_their_stage_are_caught(monkeypatch):
    monkeypatch.setattr(IndexedOdds, "at", lambda odds, index: odds.family(0 * index))
    assert is_caught(next(slopes_of(ESTIMATORS["births"])), ISING_GRADIENT)


def test_a_cache_that_outlives_its_stage_is_caught(monkeypatch):
    monkeypatch.setattr(Schedule, "_enters", property(lambda schedule: False))
    assert is_caught(next(slopes_of(ESTIMATORS["weights"])), ISING_GRADIENT)


# Random schedules on few states: proposals and densities of each stage differ.
STATES, STAGES, PARAMETERS, REPEATS = 5, 4, 3, 2


class Problem(NamedTuple):
    """`log g_s = base[s, x] + features[s, x] · θ`; `values` is f."""

    theta: np.ndarray
    proposals: np.ndarray
    base: np.ndarray
    features: np.ndarray
    values: np.ndarray

    def log_densities(self, theta):
        return list(self.base + self.features @ theta)


def random_problem(seed: int) -> Problem:
    rng = np.random.default_rng(seed)
    kept = rng.random((STAGES, STATES, STATES)) < rng.choice([0.5, 1.0])
    kept[:, np.arange(STATES), (np.arange(STATES) + 1) % STATES] = True
    proposals = rng.dirichlet(np.ones(STATES), (STAGES, STATES)) * kept
    rows = (
        rng.normal(size=PARAMETERS),
        proposals / proposals.sum(axis=-1, keepdims=True),
        rng.normal(size=(STAGES, STATES)),
        0.7 * rng.normal(size=(STAGES, STATES, PARAMETERS)),
        rng.normal(size=STATES),
    )
    return Problem(*(np.asarray(row, np.float32).astype(float) for row in rows))


def look_up(table, x):
    return jax.nn.one_hot(x, STATES) @ table


def kernel_of(problem: Problem, log_weight: bool):
    def kernel_at(stage):
        def density(theta, x, base, features, values):
            return look_up(base[stage] + features[stage] @ theta, x)

        return diffmh.MetropolisHastings(density, diffmh.TransitionMatrix(problem.proposals[stage]))

    return diffmh.Schedule(kernel_at, STAGES, REPEATS, log_weight)


def test_random_schedules():
    def one(problem, key):
        mean = diffmh.expectation(
            lambda theta, x, base, features, values: look_up(values, x),
            kernel_of(problem, False),
            init=0,
            num_samples=2,
            num_chains=3000,
        )
        return jax.jacfwd(mean.per_chain)(problem.theta, key, *problem[2:])

    problems = [random_problem(seed) for seed in range(40)]
    for number, found in enumerate(each(one, problems, 5)):
        problem = problems[number]

        def mean(theta, problem=problem):
            whole = pass_matrix(problem.log_densities(theta), problem.proposals, REPEATS)
            return ((whole[0] + (whole @ whole)[0]) @ problem.values / 2)[None]

        assert_unbiased(found, derivative(mean, problem.theta)[1][0], f"schedule {number}")


def weights_of(problems, seed):
    """Derivatives of `w`, `log w` and `w f(x)` by independent runs, (problems, runs, 3, P)."""

    def one(problem, key):
        def seen(theta, state, base, features, values):
            weight = jnp.exp(state["log_weight"])
            return jnp.stack([weight, state["log_weight"], weight * look_up(values, state["x"])])

        def init(key):
            return {"x": jax.random.randint(key, (), 0, STATES), "log_weight": 0.0}

        mean = diffmh.expectation(
            seen, kernel_of(problem, True), init=init, num_samples=1, num_chains=4000
        )
        both = lambda theta: (mean.per_chain(theta, key, *problem[2:]),) * 2
        jacobian, value = jax.jacfwd(both, has_aux=True)(problem.theta)
        return jnp.concatenate([value[..., None], jacobian], axis=-1)

    return each(one, problems, seed)


def from_uniform(seed: int) -> Problem:
    """The first stage is uniform and does not depend on θ, so that starts may be drawn from it."""
    problem = random_problem(seed)
    base, features = 0.7 * problem.base, 0.7 * problem.features
    base[0], features[0] = 0.0, 0.0
    single = lambda array: np.asarray(array, np.float32).astype(float)
    return problem._replace(base=single(base), features=single(features))


@pytest.fixture(scope="module")
def weighed():
    problems = [from_uniform(seed) for seed in range(20)]
    return problems, weights_of(problems, 6)


def exact_weights(problem):
    begin = np.full(STATES, 1 / STATES)

    def mean(theta):
        densities = problem.log_densities(theta)
        return annealed_weights(densities, problem.proposals, REPEATS, begin, problem.values)

    value, jacobian = derivative(mean, problem.theta)
    return np.concatenate([value[:, None], jacobian], axis=-1)


def test_annealed_importance_sampling(weighed):
    """The log weight has its value and derivative, and the mean weight is the ratio of
    normalisers.
    """
    for number, (problem, found) in enumerate(zip(*weighed, strict=True)):
        exact = exact_weights(problem)

        def ratio(theta, problem=problem):
            last = np.exp(problem.log_densities(theta)[-1])
            return np.array([last.sum(), last @ problem.values]) / STATES

        value, jacobian = derivative(ratio, problem.theta)
        of_ratio = np.concatenate([value[:, None], jacobian], axis=-1)
        np.testing.assert_allclose(exact[[0, 2]], of_ratio, rtol=1e-9, atol=1e-9)
        assert_unbiased(found, exact, f"weights of schedule {number}")


def test_a_walk_beside_moves_that_depend_on_theta():
    """Its stages do not move with θ, but decide where the other kernel has moved the chain."""
    density = lambda theta, x: -0.5 * (x - theta) ** 2
    walk = lambda stage: diffmh.MetropolisHastings(density, diffmh.GaussianWalk(1.5))
    mean = diffmh.expectation(
        lambda theta, x: jnp.stack([x, x**2]),
        diffmh.Cycle(diffmh.Schedule(walk, 2, 2), diffmh.Langevin(density, 1.0)),
        init=0.3,
        num_samples=10,
        burn_in=20,
        num_chains=3000,
    )
    slopes = optimised(jax.jacfwd(mean.per_chain))(0.5, jax.random.key(2))
    assert_unbiased(np.asarray(slopes), np.array([1.0, 1.0]))


def test_a_weight_without_its_derivative_is_caught(monkeypatch):
    right = Enter.step

    def wrong(self, parameters, state, noise):
        step = right(self, parameters, state, noise)
        zeros = jax.tree.map(jnp.zeros_like, step.after.tangent)
        after = diffmh.extend.State(step.after.x, step.after.cache, zeros)
        return diffmh.extend.Step(step.before, after)

    monkeypatch.setattr(Enter, "step", wrong)
    problems = [from_uniform(0)]
    assert is_caught(weights_of(problems, 7)[0], exact_weights(problems[0]))


def test_the_program_does_not_grow_with_the_stages():
    def lines(num_stages):
        mean = diffmh.expectation(
            lambda betas, z: 1.0 * energy(z),
            diffmh.Schedule(heated, num_stages, 8),
            init=jnp.asarray(ISING_START),
            num_samples=1,
        )
        program = jax.make_jaxpr(jax.grad(mean))(jnp.zeros(num_stages) + 0.1, jax.random.key(0))
        return str(program).count("\n")

    assert lines(70) == lines(400)


def test_the_path_is_the_same_whatever_the_estimator():
    theta, key = jnp.asarray(np.float32(BETAS)), jax.random.key(3)
    plain = annealed(num_chains=64).per_chain(theta, key)
    for estimator in (ESTIMATORS["weights"], ESTIMATORS["births"]):
        mean = annealed(estimator, 64)
        again = jax.jit(jax.jvp, static_argnums=0)(
            lambda theta: mean.per_chain(theta, key), (theta,), (theta,)
        )[0]
        np.testing.assert_array_equal(plain, again)


def test_covariance_refuses_what_has_no_equilibrium():
    with pytest.raises(ValueError, match=r"`Covariance\(\)` needs one density.*`Schedule`"):
        annealed(diffmh.Covariance())(jnp.asarray(BETAS), jax.random.key(0))


def test_every_stage_is_examined():
    """A density that jumps at the last stage only."""

    def jumps(stage):
        def density(theta, x):
            return -((x - theta) ** 2) + jnp.where(stage == 2, 1.0 * (x < theta), 0.0)

        return diffmh.MetropolisHastings(density, diffmh.GaussianWalk(1.0))

    mean = diffmh.expectation(
        lambda theta, x: x, diffmh.Schedule(jumps, 3), init=0.0, num_samples=1, num_chains=2
    )
    with pytest.raises(diffmh.NotDifferentiable, match="log_density"):
        mean(0.5, jax.random.key(0))


def test_refusals():
    with pytest.raises(TypeError, match="kernel_at"):
        diffmh.Schedule(diffmh.SpinFlip(), 3, 1)
    with pytest.raises(TypeError, match=r"kernel_at\(0\)` must be a `diffmh.extend.Kernel`"):
        diffmh.Schedule(lambda stage: diffmh.SpinFlip(), 3)
    for wrong in (dict(num_stages=0), dict(num_stages=3, steps_per_stage=0)):
        with pytest.raises(ValueError, match=r"Schedule\((num_stages|steps_per_stage)=...\)"):
            diffmh.Schedule(heated, **wrong)

    def two(stage):
        return diffmh.Cycle(heated(stage), heated(stage))

    diffmh.Schedule(two, 3)
    with pytest.raises(ValueError, match=r"Schedule\(log_weight=True\).*one density"):
        diffmh.Schedule(two, 3, log_weight=True)
    weighed = diffmh.Schedule(heated, 5, 1, log_weight=True)
    for start, match in (
        (jnp.asarray(ISING_START), r"moves states `{\"x\""),
        ({"x": jnp.asarray(ISING_START), "log_weight": 0}, r"needs a float for `init"),
    ):
        mean = diffmh.expectation(
            lambda betas, state: 1.0, weighed, init=start, num_samples=1, num_chains=2
        )
        with pytest.raises(ValueError, match=match):
            mean(jnp.asarray(BETAS), jax.random.key(0))
    mean = diffmh.expectation(
        lambda betas, state: state["log_weight"],
        weighed,
        init={"x": jnp.asarray(ISING_START), "log_weight": 0.0},
        num_samples=1,
        estimator=diffmh.StochasticDerivative(births=True),
    )
    with pytest.raises(ValueError, match="births=False"):
        jax.grad(mean)(jnp.asarray(BETAS), jax.random.key(0))


def test_tools_take_a_schedule():
    theta = jnp.asarray(np.float32(BETAS))
    kernel = diffmh.Schedule(heated, len(BETAS), 2)
    start = jnp.asarray(ISING_START)
    path = diffmh.trace(kernel, theta, jax.random.key(0), init=start, num_steps=6)
    assert path.primal.shape == (6, 2, 2)
    draws = diffmh.sample(kernel, theta, jax.random.key(0), init=start, num_samples=5, num_chains=2)
    assert draws.posterior["x"].shape == (2, 5, 2, 2)


@pytest.mark.thorough
def test_check_takes_a_schedule():
    theta = jnp.asarray(np.float32(BETAS))
    kernel = diffmh.Schedule(heated, len(BETAS), 2)
    found = diffmh.check(kernel, theta, jax.random.key(0), init=jnp.asarray(ISING_START))
    assert found, str(found)
