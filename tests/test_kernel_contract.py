"""The contract with a kernel's author: any number of decisions, states with tangents, functions of
earlier states, and rounding that is the loop's business.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import derivative, transition_matrix
from programs import derivatives
from unbiasedness import assert_unbiased, is_caught

import diffmh
from diffmh.core import alternatives, values
from diffmh.fast import rounding

STATES = 5
THETA = jnp.array([0.7, -0.4])


def log_density(theta, x):
    return theta[0] * jnp.cos(1.0 * x) + theta[1] * 0.3 * x


def metropolis():
    """Traced anew wherever it is called for, so that what was patched is what runs."""
    fresh = lambda theta, x: log_density(theta, x)
    return diffmh.MetropolisHastings(fresh, diffmh.OtherState(STATES))


class Shift(diffmh.extend.Update):
    """One up with probability 0.3, on a ring: a step without decisions."""

    def log_density(self, theta, x):
        return 0.0 * theta[0]

    def noise(self, key, x, num_steps):
        return jax.random.bernoulli(key, 0.3, (num_steps,))

    def step(self, parameters, state, noise):
        return diffmh.extend.Step(state, diffmh.extend.State(self._moved(state.x, noise)))

    def coupled_step(self, parameters, step, alternative, noise, coupling_noise):
        return diffmh.extend.State(self._moved(alternative.x, noise))

    def flipped(self, step, noise, decision, candidate):
        raise AssertionError("there is nothing to flip")

    def _moved(self, x, noise):
        return jnp.where(noise, (x + 1) % STATES, x)


def shifted_oracle(lag, num_samples=4, start=2):
    """`E[x_earlier x]` and `E[x² + x_earlier]` of Metropolis–Hastings and `Shift` in turn."""
    states = np.arange(STATES)
    shift = 0.7 * np.eye(STATES) + 0.3 * np.roll(np.eye(STATES), 1, axis=1)
    proposal = (1 - np.eye(STATES)) / (STATES - 1)

    def mean(theta):
        density = theta[0] * np.cos(states) + theta[1] * 0.3 * states
        matrix = transition_matrix(density, proposal) @ shift
        total = np.zeros(2, complex)
        for t in range(1, num_samples + 1):
            earlier = max(t - lag, 0)
            row = np.eye(STATES)[start] @ np.linalg.matrix_power(matrix, earlier)
            joint = row[:, None] * np.linalg.matrix_power(matrix, t - earlier)
            product, square = states[:, None] * states, states**2 + states[:, None]
            total += np.array([np.sum(joint * product), np.sum(joint * square)])
        return total / num_samples

    return derivative(mean, np.array(THETA))[1]


def shifted(lag, slots=2):
    pair = lambda theta, earlier, x: jnp.stack([1.0 * earlier * x, 1.0 * x**2 + earlier])
    alone = lambda theta, x: pair(theta, x, x)
    expectation = diffmh.expectation(
        pair if lag else alone,
        diffmh.Cycle(metropolis(), Shift()),
        init=2,
        num_samples=4,
        num_chains=40_000,
        lag=lag,
        estimator=diffmh.StochasticDerivative(alternatives=slots),
    )
    return derivatives(expectation, THETA, jax.random.key(5))


@pytest.mark.parametrize("lag", [0, 1, pytest.param(2, marks=pytest.mark.thorough)])
def test_steps_without_decisions_and_functions_of_earlier_states(lag):
    assert_unbiased(shifted(lag), shifted_oracle(lag))


def test_a_step_without_decisions_that_prunes_is_caught(monkeypatch):
    right = alternatives.advance

    def wrong(slots, at, weights):
        after, events = right(slots, at, weights)
        if at.step.decisions:
            return after, events
        kept = (at.own_noise.prune < 0.5)[..., None, None]
        return eqx.tree_at(lambda s: s.weight, after, jnp.where(kept, after.weight, 0.0)), events

    monkeypatch.setattr(alternatives, "advance", wrong)
    assert is_caught(shifted(0), shifted_oracle(0))


def test_recoupled_when_only_the_newest_state_agrees_is_caught(monkeypatch):
    def wrong(slots, at):
        same = lambda x: jnp.all(x == at.step.after.x)
        recoupled = values.each_slot(same, slots.state.x)
        return eqx.tree_at(lambda s: s.weight, slots, values.drop(slots.weight, recoupled))

    monkeypatch.setattr(alternatives, "drop_recoupled", wrong)
    assert is_caught(shifted(1), shifted_oracle(1))


class Stretched(diffmh.extend.Update):
    """A walk whose step is `exp(θ₀) z` towards `N(θ₁, 1)`: its moves depend on θ."""

    moves_with_theta = True

    def log_density(self, theta, x):
        return -0.5 * (x - theta[1]) ** 2

    def noise(self, key, x, num_steps):
        key_step, key_accept = jax.random.split(key)
        uniform = jax.random.uniform(key_accept, (num_steps,))
        return jax.random.normal(key_step, (num_steps,)), uniform

    def step(self, parameters, state, noise):
        z, uniform = noise
        new = parameters.evaluate(lambda theta, x: x + jnp.exp(theta[0]) * z, state.value)
        ratio = lambda theta, x, new: self.log_density(theta, new) - self.log_density(theta, x)
        acceptance = diffmh.extend.Acceptance.draw(
            uniform, parameters.evaluate(ratio, state.value, new)
        )
        proposed = diffmh.extend.State(new.primal, None, new.tangent)
        after = jax.tree.map(lambda a, b: jnp.where(acceptance.accepted, a, b), proposed, state)
        return diffmh.extend.Step(state, after, (acceptance,), proposed)

    def coupled_step(self, parameters, step, alternative, noise, coupling_noise):
        return self.step(parameters, alternative, noise).after

    def flipped(self, step, noise, decision, candidate):
        accepted = step.decisions[0].outcome
        return diffmh.extend.State(jnp.where(accepted, step.before.x, step.proposed.x))


def stretched_moments(theta, num_steps=2):
    """`E[x_t]` and `E[x_t²]` averaged over two steps from 0, by quadrature on a grid."""
    grid = np.linspace(-9.0, 9.0, 1501)
    width = grid[1] - grid[0]
    scale = np.exp(theta[0])
    log_g = -0.5 * (grid - theta[1]) ** 2
    q = np.exp(-0.5 * ((grid[None] - grid[:, None]) / scale) ** 2) / (scale * np.sqrt(2 * np.pi))
    move = width * q * np.exp(np.minimum(0.0, log_g[None] - log_g[:, None]))
    row = np.zeros(grid.size)
    row[grid.size // 2] = 1.0
    total = np.zeros(2)
    for _ in range(num_steps):
        row = row @ move + row * (1 - move.sum(axis=1))
        total += np.array([row @ grid, row @ grid**2])
    return total / num_steps


@pytest.mark.parametrize("slots", [pytest.param(1, marks=pytest.mark.thorough), 2])
def test_states_with_tangents(slots):
    theta, step = np.array([0.3, 0.5]), 1e-4
    exact = np.stack(
        [
            (stretched_moments(theta + step * e) - stretched_moments(theta - step * e)) / (2 * step)
            for e in np.eye(2)
        ],
        axis=1,
    )
    expectation = diffmh.expectation(
        lambda theta, x: jnp.stack([x, x**2]),
        Stretched(),
        init=0.0,
        num_samples=2,
        num_chains=100_000,
        estimator=diffmh.StochasticDerivative(alternatives=slots),
    )
    found = derivatives(expectation, jnp.asarray(theta, jnp.float32), jax.random.key(7))
    assert_unbiased(found, exact)


class Naive(diffmh.extend.BlockUpdate):
    """Products and sums as they come to mind: nothing here knows of rounding."""

    def log_density(self, theta, x):
        return -0.3 * jnp.sum(x * x * theta) + 0.7 * jnp.sum(jnp.exp(-x * x) * theta * 0.9)

    def noise(self, key, x, num_steps):
        key_step, key_accept = jax.random.split(key)
        step = jax.random.normal(key_step, (num_steps, *x.shape))
        return step, jax.random.uniform(key_accept, (num_steps,))

    def decide(self, parameters, state, noise):
        new = self._new(state.x, noise)
        ratio = lambda theta, new, x: self.log_density(theta, new) - self.log_density(theta, x)
        return diffmh.extend.Acceptance.draw(noise[1], parameters.evaluate(ratio, new, state.x))

    def result(self, x, noise, outcome):
        return jnp.where(outcome, self._new(x, noise), x)

    def _new(self, x, noise):
        return 0.93 * x + 0.37 * (noise[0] * 1.3 + 0.1 * x * x * 0.01)


def naive_paths_differ() -> bool:
    """True if the primal of some gradient's program differs in a bit from that of the value."""
    theta, key = 0.83, jax.random.key(3)
    differs = False
    for slots, num_chains in ((1, 16), (1, 64), (3, 16)):
        expectation = diffmh.expectation(
            lambda theta, x: 0.1 * x * x + 0.7 * x * theta,
            Naive(),
            init=jnp.zeros(2),
            num_samples=600,
            num_chains=num_chains,
            estimator=diffmh.StochasticDerivative(alternatives=slots),
        )
        plain = expectation.per_chain(theta, key)
        beside, _ = jax.jvp(lambda theta: expectation.per_chain(theta, key), (theta,), (1.0,))
        differs = differs or not np.array_equal(plain, beside)
    return differs


@pytest.mark.optimised
def test_a_naive_kernel_is_bit_identical():
    assert not naive_paths_differ()


def unrounded_products(fixed=rounding.with_fixed_rounding) -> int:
    """Products on the way to the primal's path that something other than a rounding uses: what a
    compiler may contract, whether or not this one does.
    """
    state, noise = diffmh.extend.State(jnp.zeros(2)), (jnp.zeros(2), jnp.zeros(()))
    barriers = rounding.Barriers(jnp.zeros(2, bool))

    def step(x, noise, barriers):
        parameters = diffmh.extend.Parameters(jnp.array(0.83), (), barriers, True)

        def both(x, noise):
            return 2 * (Naive().step(parameters, diffmh.extend.State(x), noise).after.x,)

        return fixed(both, barriers.opaque_false[0])(x, noise)[0]

    jaxpr = jax.make_jaxpr(step)(state.x, noise, barriers).jaxpr
    products = {
        out for eqn in jaxpr.eqns if eqn.primitive.name in ("mul", "exp") for out in eqn.outvars
    }
    assert products
    users = [eqn for eqn in jaxpr.eqns if eqn.primitive.name != "bitcast_convert_type"]
    used = {atom for eqn in users for atom in eqn.invars if not hasattr(atom, "val")}
    return len(products & used)


def test_products_are_rounded_without_the_kernel_knowing():
    assert unrounded_products() == 0


def test_a_naive_kernel_without_rounding_is_caught():
    assert unrounded_products(lambda function, opaque_false: function) > 0


def weights_after_a_nan(steps=4):
    """A density whose derivative, not its value, is NaN in one state."""

    @jax.custom_jvp
    def spoiled(theta, x):
        return log_density(theta, x)

    @spoiled.defjvp
    def _(primals, tangents):
        value, slope = jax.jvp(log_density, primals, tangents)
        return value, slope * jnp.where(primals[1] == 3, jnp.nan, 1.0)

    kernel = diffmh.MetropolisHastings(
        lambda theta, x: spoiled(theta, 1.0 * x), diffmh.OtherState(5)
    )
    mean = diffmh.expectation(
        lambda theta, x: 1.0 * x, kernel, init=2, num_samples=steps, num_chains=200
    )
    return np.asarray(derivatives(mean, THETA, jax.random.key(0)))


def test_a_derivative_that_is_not_a_number_is_seen():
    assert np.isnan(weights_after_a_nan()).any(axis=1).mean() > 0.3


def test_a_nan_weight_dropped_as_dead_is_caught(monkeypatch):
    weighted = values.weighted

    def of_the_living(weight, alive, difference):
        return weighted(jnp.where(alive[:, None], weight, 0.0), alive, difference)

    monkeypatch.setattr(values, "is_alive", lambda score: score > 0)
    monkeypatch.setattr(values, "weighted", of_the_living)
    assert not np.isnan(weights_after_a_nan()).any(axis=1).mean() > 0.3
