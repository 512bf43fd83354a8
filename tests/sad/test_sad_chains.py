"""Algorithm 1 in plain JAX: the same exact answers, the same variance and the same value as the
core's chains.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import (
    OTHER,
    derivative,
    ising_moments,
    mixture_log_density,
    mixture_occupancy,
    transition_matrix,
)
from sad_runs import QUICK, derivatives
from unbiasedness import assert_unbiased

import diffmh
from diffmh import sad
from diffmh.models import gaussian, mixture

RUNS = 20_000


def chain(log_density, proposal, f, start, num_samples, burn_in=0):
    def program(theta, key):
        def step(x, key):
            key_propose, key_accept = jax.random.split(key)
            x_new = sad.propose(key_propose, proposal, None, x)
            log_ratio = log_density(theta, x_new) - log_density(theta, x)
            accept = sad.bernoulli(key_accept, jnp.exp(jnp.minimum(0.0, log_ratio)))
            x = jnp.where(accept, x_new, x)
            return x, f(theta, x)

        key_start, key_steps = jax.random.split(key)
        _, values = jax.lax.scan(
            step, start(key_start), jax.random.split(key_steps, burn_in + num_samples)
        )
        return values[burn_in:].mean(axis=0)

    return program


def energy(spins):
    return -jnp.sum(spins * (jnp.roll(spins, 1, 0) + jnp.roll(spins, 1, 1))).astype(jnp.float32)


def moments(temperature, spins):
    return jnp.stack([energy(spins), energy(spins) ** 2])


def ising_program(temperature, key):
    sites = jnp.array([(i, j) for i in range(3) for j in range(3)])

    def sweep(spins, key):
        def step(spins, inputs):
            site, key = inputs
            key_propose, key_accept = jax.random.split(key)
            proposed = spins.at[site[0], site[1]].set(
                jax.random.rademacher(key_propose, (), spins.dtype)
            )
            log_ratio = (energy(spins) - energy(proposed)) / temperature
            accept = sad.bernoulli(key_accept, jnp.exp(jnp.minimum(0.0, log_ratio)))
            return jnp.where(accept, proposed, spins), None

        spins, _ = jax.lax.scan(step, spins, (sites, jax.random.split(key, 9)))
        return spins, moments(temperature, spins)

    _, values = jax.lax.scan(sweep, jnp.ones((3, 3), jnp.int32), jax.random.split(key, 5))
    return values.mean(axis=0)


def powers(theta, x):
    return jnp.stack([x, x**2])


def normal_start(key):
    """Drawn at θ = 0.5 whatever θ: after 60 steps its own dependence on θ would be gone."""
    return 0.5 + jax.random.normal(key)


WALK = diffmh.GaussianWalk(2.38)
PROGRAMS = {
    "mixture": (
        chain(
            mixture.log_density,
            diffmh.OtherState(3),
            mixture.indicator,
            lambda key: jnp.array(0),
            20,
        ),
        0.4,
    ),
    "normal": (chain(gaussian.log_density, WALK, powers, normal_start, 30, burn_in=60), 0.5),
    "ising": (ising_program, 2.0),
}


@functools.cache
def found(name, alternatives=1):
    """Value and derivative of every run."""
    program, theta = PROGRAMS[name]
    expected = sad.expectation(program, alternatives=alternatives)
    both = lambda key: jax.jvp(lambda theta: expected(theta, key), (theta,), (1.0,))
    return [
        np.asarray(part)
        for part in jax.jit(jax.vmap(both), compiler_options=QUICK)(
            jax.random.split(jax.random.key(1), RUNS)
        )
    ]


@functools.cache
def core(name):
    """The core's derivative of every chain, by one alternative as in `found`."""
    expectation = functools.partial(
        diffmh.expectation,
        num_chains=RUNS,
        estimator=diffmh.StochasticDerivative(alternatives=1),
    )
    if name == "mixture":
        mean = expectation(mixture.indicator, mixture.sampler(), init=0, num_samples=20)
    elif name == "normal":
        mean = expectation(
            powers, gaussian.sampler(), init=normal_start, num_samples=30, burn_in=60
        )
    else:
        sites = [(i, j) for i in range(3) for j in range(3)]
        density = lambda temperature, spins: -energy(spins) / temperature
        sweep = diffmh.Cycle(
            *(diffmh.MetropolisHastings(density, diffmh.SpinFlip(site)) for site in sites)
        )
        mean = expectation(moments, sweep, init=jnp.ones((3, 3), jnp.int32), num_samples=5)
    return np.asarray(jax.jacfwd(mean.per_chain)(PROGRAMS[name][1], jax.random.key(2)))


EXACT = {
    "normal": lambda: np.array([1.0, 1.0]),
    "mixture": lambda: derivative(mixture_occupancy(20, 0), 0.4)[1][:, 0],
    "ising": lambda: derivative(ising_moments(3, 5), 2.0)[1][:, 0],
}


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("alternatives", [1, 4])
def test_unbiased(name, alternatives):
    assert_unbiased(found(name, alternatives)[1], EXACT[name]())


@pytest.mark.parametrize("name", PROGRAMS)
def test_variance_within_a_tenth_of_the_core(name):
    ratio = found(name)[1].var(axis=0) / core(name).var(axis=0)
    assert np.all(ratio < 1.1), ratio


@pytest.mark.parametrize("name", PROGRAMS)
def test_value_is_the_program(name):
    program, theta = PROGRAMS[name]
    plain = jax.jit(jax.vmap(lambda key: program(theta, key)), compiler_options=QUICK)(
        jax.random.split(jax.random.key(1), RUNS)
    )
    same = np.isclose(found(name)[0], plain, rtol=1e-5, atol=1e-5).all(axis=1)
    # Rounding tips a decision between continuous values once in millions.
    assert np.all(same) if name != "normal" else same.mean() > 0.999


def mixture_step(h, j, key):
    """A step of the mixture's chain, in plain JAX."""
    key_propose, key_accept = jax.random.split(key)
    proposed = sad.propose(key_propose, diffmh.OtherState(3), None, j)
    log_ratio = mixture.log_density(h, proposed) - mixture.log_density(h, j)
    return jnp.where(sad.bernoulli(key_accept, jnp.exp(jnp.minimum(0.0, log_ratio))), proposed, j)


@pytest.mark.parametrize("alternatives", [pytest.param(1, marks=pytest.mark.thorough), 2])
def test_proposals_under_vmap_inside_a_program(alternatives):
    """Three chains in one program, whose decisions are pruned together; their product is not
    linear in any of them.
    """
    num_chains, num_steps = 3, 4

    def program(h, key):
        def chains(states, key):
            states = jax.vmap(lambda j, key: mixture_step(h, j, key))(
                states, jax.random.split(key, num_chains)
            )
            return states, None

        states, _ = jax.lax.scan(
            chains, jnp.zeros(num_chains, jnp.int32), jax.random.split(key, num_steps)
        )
        return jnp.stack([jnp.sum(states == 2) * 1.0, jnp.prod(states == 2) * 1.0])

    matrix = lambda h: np.linalg.matrix_power(
        transition_matrix(mixture_log_density(h), OTHER), num_steps
    )
    reached = lambda theta: matrix(theta[0])[0, 2]
    exact = derivative(
        lambda theta: np.array([num_chains * reached(theta), reached(theta) ** num_chains]),
        np.array([0.4]),
    )[1]
    assert_unbiased(derivatives(program, 0.4, 20_000, alternatives=alternatives), exact)


@pytest.mark.parametrize("alternatives", [pytest.param(1, marks=pytest.mark.thorough), 2])
def test_proposals_in_a_loop_that_the_primal_has_left(alternatives):
    """How long until the chain first visits component 3, and from where: alternatives stop
    earlier or later than the primal.
    """

    def program(h, key):
        def step(state):
            j, _, time, key = state
            key, key_step = jax.random.split(key)
            return mixture_step(h, j, key_step), j, time + 1.0, key

        _, before, time, _ = jax.lax.while_loop(
            lambda state: state[0] != 2, step, (jnp.asarray(0), jnp.asarray(0), 0.0, key)
        )
        return jnp.stack([time, before * 1.0])

    def exact(theta):
        matrix = transition_matrix(mixture_log_density(theta[0]), OTHER)
        visits = np.linalg.inv(np.eye(2) - matrix[:2, :2])[0]
        return np.array([visits.sum(), visits[1] * matrix[1, 2]])

    assert_unbiased(
        derivatives(program, 2.0, 40_000, alternatives=alternatives),
        derivative(exact, np.array([2.0]))[1],
    )
