"""`check` of kernels of one's own: each promise of an update, and a mistake against each."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import own_kernels
import pytest
from own_kernels import Barker, Delayed, barker, delayed, full, in_turn, slice_by_level, tempering

import diffmh
from diffmh.core.estimator import ValueOnly
from diffmh.core.simulation import Simulation, nothing
from diffmh.estimators import StochasticDerivative
from diffmh.tools import trials, update_trials
from diffmh.tools.invariance_trials import moves_floats
from diffmh.tools.trial_setting import Setting, visited

KEY = jax.random.key(0)


def broken(findings) -> list[str]:
    return [finding.promise for finding in findings.broken]


@pytest.mark.parametrize("name", ["barker", "swendsen_wang"])
def test_sound_kernels_pass(name):
    case = own_kernels.SOUND[name]()
    findings = diffmh.check(case.kernel, case.at, KEY, init=case.init)
    assert findings and "not tried" not in str(findings), str(findings)


WRONG = {
    "a swap with another ratio": (
        lambda: tempering(factor=3.0, shift=1.0),
        ["Swap leaves its density invariant", "derivative of a short run"],
    ),
    "dependent decisions": (in_turn, ["derivative of a short run"]),
    "a slice without decisions": (slice_by_level, ["density or proposal"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_mistakes_are_named(name):
    make, promises = WRONG[name]
    case = make()
    findings = diffmh.check(case.kernel, case.at, KEY, init=case.init)
    assert broken(findings) == promises, str(findings)


class Steeper(Barker):
    """Its probabilities are right and their derivatives a tenth too large."""

    def decide(self, parameters, state, noise):
        decision = super().decide(parameters, state, noise)
        if decision.log_odds.tangent is None:
            return decision
        return eqx.tree_at(lambda d: d.log_odds.tangent, decision, replace_fn=lambda t: 1.1 * t)


class Apart(Delayed):
    """Its alternatives don't stay with the primal."""

    def coupled_step(self, parameters, step, alternative, noise, coupling_noise):
        step_, uniform = noise
        return self.step(parameters, alternative, (-step_, uniform)).after


class Lazy(Delayed):
    """Its alternatives stay where they are in one of ten."""

    def coupling_noise(self, key, x, num_steps):
        return jax.random.bernoulli(key, 0.1, (num_steps,))

    def coupled_step(self, parameters, step, alternative, noise, coupling_noise):
        moved = self.step(parameters, alternative, noise).after
        stays = coupling_noise & (alternative.x != step.before.x)
        return diffmh.extend.State(jnp.where(stays, alternative.x, moved.x))


class Walk(diffmh.extend.BlockUpdate):
    """A walk on N(θ, 1), whose log ratio is right if `factor` is 1."""

    factor: float = eqx.field(static=True, default=1.0)

    def log_density(self, theta, x):
        return -0.5 * jnp.sum((x - theta) ** 2)

    def noise(self, key, x, num_steps):
        key_step, key_accept = jax.random.split(key)
        step = jax.random.normal(key_step, (num_steps, *x.shape))
        return step, jax.random.uniform(key_accept, (num_steps,))

    def decide(self, parameters, state, noise):
        def log_ratio(theta, x):
            new = self.log_density(theta, x + noise[0])
            return self.factor * (new - self.log_density(theta, x))

        return diffmh.extend.Acceptance.draw(noise[1], parameters.evaluate(log_ratio, state.x))

    def result(self, x, noise, outcome):
        return jnp.where(outcome, x + noise[0], x)


def tried(kernel, theta, init):
    """The trials of one update without that of its derivative, judged."""
    simulation = Simulation(kernel, init, nothing, StochasticDerivative(), 1, 0, 1)
    key_visit, key_try = jax.random.split(KEY)
    keys = jax.random.split(key_visit, 32)
    paths = visited(simulation.by(ValueOnly()), theta, keys, ())
    setting = Setting(simulation, theta, (), paths)
    found = update_trials.try_update(setting, kernel, key_try)
    num_tests = sum(len(each.p_values) for each in found if isinstance(each, trials.Trial))
    judged = [each.judged(num_tests) if isinstance(each, trials.Trial) else each for each in found]
    return [finding.promise for finding in judged if not finding.kept], judged


FULL_ODDS = diffmh.extend.DensityOdds(full)
MISTAKES = {
    "odds that don't say which": (Delayed(FULL_ODDS), ["Delayed.flip_odds"]),
    "odds of the other decision": (Delayed(Delayed().odds[::-1]), ["Delayed.flip_odds"]),
    "unfaithful": (Apart(), ["Apart.coupled_step is faithful"]),
    "wrong marginal": (Lazy(), ["Lazy.coupled_step keeps its marginal"]),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_each_promise_of_an_update(name):
    kernel, promises = MISTAKES[name]
    case = delayed()
    found, judged = tried(kernel, case.at, case.init)
    assert found == promises, judged


@pytest.mark.parametrize("factor", [1.0, 0.8])
def test_invariance_of_floats(factor):
    found, judged = tried(Walk(factor), jnp.array(0.5), jnp.zeros(2))
    assert found == ([] if factor == 1.0 else ["Walk leaves its density invariant"]), judged
    assert not any("not tried" in finding.detail for finding in judged)


def test_floats_of_a_few_values_are_not_a_density_on_the_line():
    rng = np.random.default_rng(0)
    before = rng.normal(size=(500, 2))
    drawn = np.stack([before[:, 0], rng.integers(0, 2, 500)], axis=1)
    assert moves_floats(before, before + rng.normal(size=(500, 2)))
    assert not moves_floats(before, drawn)


def test_a_derivative_that_is_off_by_a_tenth():
    case = barker()
    findings = diffmh.check(Steeper(5), case.at, KEY, init=case.init)
    assert "derivative of a short run" in broken(findings), str(findings)


def test_mean_zero_is_honest():
    """Of terms of mean 0, heavy-tailed ones among them, p-values below 0.01 are at most 12 of 500
    (expected 5); a few that carry all say nothing.
    """
    rng = np.random.default_rng(0)
    draw = lambda: rng.normal(size=20_000) * np.exp(0.5 * rng.normal(size=20_000))
    assert sum(trials.mean_zero(draw()) < 0.01 for _ in range(500)) <= 12
    assert trials.mean_zero(np.append(np.full(20_000, 1e-3), 1.0)) == 1.0
    assert trials.mean_zero(draw() + 0.2) < 1e-4
    assert trials.mean_zero(np.append(draw(), np.nan)) == 0.0
