"""The smallest mistakes that `diffmh.check` finds: how often it finds each of several sizes.

The tests on draws are those of `check`, on the draws of one pair of states (check uses four, which
only adds power), at the level of a complete check. Draws are made by NumPy. Custom updates are
tested as by `check`, on five labels in a ring, with a fifth of the runs.

    python benchmarks/check_power.py [--runs 100]
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

import diffmh
from diffmh.core.estimator import ValueOnly
from diffmh.core.simulation import Simulation, nothing
from diffmh.estimators import StochasticDerivative
from diffmh.tools import trials
from diffmh.tools.derivative_trials import try_derivative
from diffmh.tools.trial_setting import Setting, visited
from diffmh.tools.update_trials import try_update

DRAWS, FALSE_ALARM, NUM_TESTS = 20_000, 5e-4, 120


def found(p_values: list[float]) -> bool:
    return min(p_values) * NUM_TESTS <= FALSE_ALARM


def against_normal(draws: np.ndarray, log_q, rng: np.random.Generator) -> bool:
    """A claimed density against draws, by way of a fitted normal density."""
    half = len(draws) // 2
    reference = trials.Reference(draws[:half])
    known = reference.sample(rng, len(draws) - half)
    at_draws = reference.log_density(draws[half:]) - log_q(draws[half:])
    return found(trials.bridge(at_draws, reference.log_density(known) - log_q(known)))


def drift(rng, size):
    """`sample` drifts by this much of a step, and `log_prob` does not say so."""
    normal = lambda x: stats.norm.logpdf(x).sum(axis=1)
    return against_normal(rng.normal(size=(DRAWS, 1)) + size, normal, rng)


def scale(rng, size):
    """`sample` takes steps that are longer by this share than `log_prob` says."""
    normal = lambda x: stats.norm.logpdf(x).sum(axis=1)
    return against_normal((1 + size) * rng.normal(size=(DRAWS, 1)), normal, rng)


def jacobian(rng, size):
    """This share of a multiplicative walk's Jacobian is forgotten, in two dimensions."""

    def log_q(x):
        with np.errstate(invalid="ignore", divide="ignore"):
            terms = stats.norm.logpdf(np.log(x)) - (1 - size) * np.log(x)
        return np.where(np.any(x <= 0, axis=1), -np.inf, terms.sum(axis=1))

    return against_normal(np.exp(rng.normal(size=(DRAWS, 2))), log_q, rng)


def label(rng, size):
    """A label of claimed probability ½ is drawn this much more often."""
    draws = (rng.random((DRAWS, 1)) < 0.5 + size).astype(float)
    return found(trials.outcomes(draws, np.full(DRAWS, np.log(0.5))))


def against_direct(rng, coupled: np.ndarray) -> bool:
    direct = rng.normal(size=coupled.shape)
    atoms = [np.zeros(coupled.shape[1])]
    return found(trials.same_law(coupled, direct, atoms))


def coupling_drift(rng, size):
    """The coupling moves the alternative by this much of a step too far."""
    return against_direct(rng, rng.normal(size=(DRAWS, 1)) + size)


def coupling_scale(rng, size):
    """The alternative's steps are shorter by this share."""
    return against_direct(rng, (1 - size) * rng.normal(size=(DRAWS, 1)))


def coupling_stays(rng, size):
    """The alternative stays where it is with this probability."""
    stays = rng.random((DRAWS, 1)) < size
    return against_direct(rng, np.where(stays, 0.0, rng.normal(size=(DRAWS, 1))))


def coupling_joint(rng, size):
    """Coordinates of the alternative's step that should be independent have this correlation."""
    step = rng.normal(size=(DRAWS, 2))
    step[:, 1] = size * step[:, 0] + np.sqrt(1 - size**2) * step[:, 1]
    return against_direct(rng, step)


LABELS, THETA = 5, jnp.array([0.3, -0.5, 0.8, 0.0, -0.2])


class Ring(diffmh.extend.BlockUpdate):
    """Proposes one of two neighbours on a ring of labels; accepted by Barker's rule."""

    leaves: float | jax.Array
    steeper: float | jax.Array
    stays: float | jax.Array

    def log_density(self, theta, x):
        return theta[x]

    def noise(self, key, x, num_steps):
        key_step, key_accept = jax.random.split(key)
        step = jax.random.rademacher(key_step, (num_steps,), int)
        return step, jax.random.uniform(key_accept, (num_steps,))

    def coupling_noise(self, key, x, num_steps):
        return jax.random.uniform(key, (num_steps,))

    def decide(self, parameters, state, noise):
        def log_odds(theta, x):
            odds = theta[(x + noise[0]) % LABELS] - theta[x] + jnp.where(x == 0, self.leaves, 0.0)
            return odds + self.steeper * (odds - jax.lax.stop_gradient(odds))

        return diffmh.extend.Bernoulli.draw(noise[1], parameters.evaluate(log_odds, state.x))

    def result(self, x, noise, outcome):
        return jnp.where(outcome, (x + noise[0]) % LABELS, x)

    def coupled_step(self, parameters, step, alternative, noise, coupling_noise):
        moved = super().coupled_step(parameters, step, alternative, noise, coupling_noise).x
        stays = (coupling_noise < self.stays) & (alternative.x != step.before.x)
        return diffmh.extend.State(jnp.where(stays, alternative.x, moved))


def update_found(rng, derivative: bool = False, **mistake) -> bool:
    fields = {name: jnp.asarray(mistake.get(name, 0.0)) for name in ("leaves", "steeper", "stays")}
    ring, key = Ring(**fields), jax.random.key(int(rng.integers(2**31)))
    simulation = Simulation(ring, jnp.array(0), nothing, StochasticDerivative(), 1, 0, 1)
    key_visit, key_try = jax.random.split(key)
    keys = jax.random.split(key_visit, 32)
    paths = visited(simulation.by(ValueOnly()), THETA, keys, ())
    setting = Setting(simulation, THETA, (), paths)
    if derivative:
        return found(list(try_derivative(setting, [ring], key_try).p_values))
    tried = try_update(setting, ring, key_try)
    return found([p for trial in tried if isinstance(trial, trials.Trial) for p in trial.p_values])


def update_density(rng, size):
    """The log odds of leaving one of five labels are off by this much."""
    return update_found(rng, leaves=size)


def update_coupling(rng, size):
    """An alternative stays where it is with this probability."""
    return update_found(rng, stays=size)


def update_derivative(rng, size):
    """The derivatives of all log odds are too large by this share."""
    return update_found(rng, derivative=True, steeper=size)


UPDATES = {
    update_density: (0.0, 0.05, 0.1, 0.15),
    update_coupling: (0.0, 0.02, 0.05, 0.1),
    update_derivative: (0.0, 0.05, 0.08, 0.1),
}
MISTAKES = {
    drift: (0.0, 0.06, 0.08, 0.1),
    scale: (0.0, 0.04, 0.06, 0.08),
    jacobian: (0.0, 0.2, 0.3, 0.5),
    label: (0.0, 0.025, 0.03, 0.04),
    coupling_drift: (0.0, 0.06, 0.08, 0.1),
    coupling_scale: (0.0, 0.06, 0.08, 0.1),
    coupling_stays: (0.0, 0.001, 0.002, 0.005),
    coupling_joint: (0.0, 0.06, 0.08, 0.1),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=100)
    runs = parser.parse_args().runs
    for mistake, sizes in (MISTAKES | UPDATES).items():
        shares = []
        count = -(-runs // 5) if mistake in UPDATES else runs
        for size in sizes:
            hits = sum(mistake(np.random.default_rng(seed), size) for seed in range(count))
            shares.append(f"{size:g}: {hits / count:.2f}")
        print(f"{mistake.__doc__}\n    found, by size: {', '.join(shares)}", flush=True)


if __name__ == "__main__":
    main()
