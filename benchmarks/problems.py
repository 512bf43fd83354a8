"""Problems with known answers, for the measurements of `docs/honest.md`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import diffmh
from diffmh.models import gaussian, ising, mixture


@dataclasses.dataclass(frozen=True)
class Problem:
    """An expectation at its parameters, with the exact value (F,) and derivative (P, F) at
    equilibrium, if they are known.
    """

    name: str
    f: Callable
    kernel: Any
    theta: Any
    init: Any
    num_samples: int
    burn_in: int
    num_chains: int = 16
    lag: int = 0
    exact: Callable[[], tuple[np.ndarray, np.ndarray]] | None = None

    def expectation(self, estimator=None, groups: int = 1):
        """The expectation with the chains of `groups` independent runs."""
        return diffmh.expectation(
            self.f,
            self.kernel,
            init=self.init,
            num_samples=self.num_samples,
            burn_in=self.burn_in,
            num_chains=groups * self.num_chains,
            lag=self.lag,
            estimator=estimator,
        )


def three_components() -> Problem:
    h = 0.4

    def exact():
        with jax.enable_x64(True):
            slope = jax.jacobian(mixture.posterior)(np.float64(h))
            return np.asarray(mixture.posterior(np.float64(h))), np.asarray(slope)[None]

    return Problem(
        "mixture, occupancies", mixture.indicator, mixture.sampler(), h, 0, 5000, 50, exact=exact
    )


def normal() -> Problem:
    exact = lambda: (np.array([0.5]), np.array([[1.0]]))
    f = lambda theta, x: x
    return Problem("N(θ,1), mean", f, gaussian.sampler(), 0.5, 0.0, 2000, 50, exact=exact)


def lattice(temperature: float = 3.0, size: int = 12) -> Problem:
    def exact():
        answer = ising.exact(size, temperature)
        return np.array([answer.energy]), np.array([[answer.heat_capacity]])

    name = f"Ising {size}×{size}, T = {temperature:g}, E"
    start = ising.cold(size)
    return Problem(name, ising.energy, ising.sampler(), temperature, start, 1000, 100, exact=exact)


_DESIGN = np.c_[np.ones(60), np.random.default_rng(0).normal(size=(60, 2))]
_ODDS = 1 / (1 + np.exp(-_DESIGN @ [0.3, 1.0, -0.7]))
_ANSWERS = (np.random.default_rng(1).random(60) < _ODDS).astype(float)


def log_logistic(theta, b, xp=jnp):
    """60 observations, coefficients with prior N(0, θ²); without the constant `−3 log θ`."""
    odds = b @ xp.asarray(_DESIGN.T)
    return xp.sum(_ANSWERS * odds - xp.logaddexp(0.0, odds), -1) - 0.5 * xp.sum(
        (b / theta) ** 2, -1
    )


@functools.cache
def logistic_answer() -> tuple[np.ndarray, np.ndarray]:
    """By the trapezoidal rule on a grid of more than six standard deviations."""
    axes = [np.linspace(centre - 2.5, centre + 2.5, 70) for centre in (0.3, 1.2, -0.8)]
    b = np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, 3)
    log_g = log_logistic(1.0, b, np)
    weight = np.exp(log_g - log_g.max())
    weight /= weight.sum()
    mean, score = weight @ b, np.sum(b**2, -1)
    return mean, (weight @ (b * score[:, None]) - mean * (weight @ score))[None]


def logistic() -> Problem:
    kernel = diffmh.MetropolisHastings(log_logistic, diffmh.GaussianWalk(0.35))
    f, start = lambda theta, b: b, jnp.zeros(3)
    return Problem(
        "logistic regression, coefficients", f, kernel, 1.0, start, 4000, 200, exact=logistic_answer
    )


_EFFECTS = np.array([28.0, 8, -3, 7, -1, 1, 18, 12])
_ERRORS = np.array([15.0, 10, 16, 11, 9, 11, 10, 18])


def log_schools(theta, x):
    """Eight schools, non-centred: x = (μ, log τ, η), `μ ~ N(θ_0, 5²)`, `τ ~ C⁺(0, θ_1)`."""
    mean, log_scale, standard = x[0], x[1], x[2:]
    scale = jnp.exp(log_scale)
    prior = -0.5 * ((mean - theta[0]) / 5) ** 2 - jnp.log1p((scale / theta[1]) ** 2)
    effect = mean + scale * standard
    likelihood = -0.5 * jnp.sum(((_EFFECTS - effect) / _ERRORS) ** 2)
    return prior - jnp.log(theta[1]) + log_scale - 0.5 * jnp.sum(standard**2) + likelihood


@functools.cache
def schools_answer() -> tuple[np.ndarray, np.ndarray]:
    """The effects integrated out exactly; (μ, log τ) by the trapezoidal rule."""
    mean, log_scale = np.linspace(-30, 40, 1401)[:, None], np.linspace(-12, 6, 1801)[None]
    scale = np.exp(log_scale)
    log_g = -0.5 * (mean / 5) ** 2 - np.log1p((scale / 5) ** 2) + log_scale
    for effect, error in zip(_EFFECTS, _ERRORS, strict=True):
        variance = error**2 + scale**2
        log_g = log_g - 0.5 * np.log(variance) - 0.5 * (effect - mean) ** 2 / variance
    weight = np.exp(log_g - log_g.max())
    weight /= weight.sum()
    average = lambda function: float(np.sum(weight * function))
    values = (mean + 0 * scale, scale + 0 * mean)
    scores = (mean / 25 + 0 * scale, 2 * scale**2 / (125 + 5 * scale**2) + 0 * mean)
    covariance = lambda a, b: average(a * b) - average(a) * average(b)
    slope = np.array([[covariance(value, score) for value in values] for score in scores])
    return np.array([average(value) for value in values]), slope


def schools(num_samples: int = 20_000) -> Problem:
    kernel = diffmh.MetropolisHastings(log_schools, diffmh.GaussianWalk(0.2))
    start = jnp.zeros(10).at[:2].set(jnp.array([4.4, 1.1]))
    f = lambda theta, x: jnp.stack([x[0], jnp.exp(x[1])])
    theta = jnp.array([0.0, 5.0])
    name = "eight schools, walk 0.2"
    return Problem(name, f, kernel, theta, start, num_samples, 1000, 32, exact=schools_answer)


def short_mixture() -> Problem:
    """Five steps from the first component: far from equilibrium."""
    return Problem("mixture, five steps", mixture.indicator, mixture.sampler(), 0.4, 0, 5, 0)


def autocovariance() -> Problem:
    """With respect to the walk's step size, which does not affect the target."""
    density = lambda theta, x: -0.5 * x**2
    kernel = diffmh.MetropolisHastings(density, lambda theta: diffmh.GaussianWalk(theta))
    product = lambda theta, before, x: before * x
    return Problem("N(0,1), lag-1 by step size", product, kernel, 2.38, 0.0, 1000, 50, lag=1)


def potts() -> Problem:
    """Ten sites of three colours in a row, swept by Gibbs draws."""
    density = lambda theta, z: theta * jnp.sum(z[1:] == z[:-1])
    kernel = diffmh.Sweep(lambda i: diffmh.Gibbs(density, lambda z: z[i], 3), 10)
    agreeing = lambda theta, z: jnp.mean(z[1:] == z[:-1])
    return Problem("Potts row, Gibbs sweeps", agreeing, kernel, 0.7, jnp.zeros(10, int), 200, 20)


def held_out() -> list[Problem]:
    """Five problems that took no part in the choice of the default number of alternatives."""
    short = dict(num_samples=400, burn_in=50)
    energy = lambda theta, s: jnp.sum(theta * jnp.triu(jnp.outer(s, s))).astype(float)
    spins = diffmh.MetropolisHastings(
        lambda theta, s: energy(theta.reshape(3, 3), s), diffmh.SpinFlip()
    )
    couplings = 0.3 * jnp.ones(9)
    steep = lambda theta, x: -theta * jnp.sum(jnp.logaddexp(x, -x)) - 0.5 * (x[0] - x[1]) ** 2
    wide = lambda theta, x: -0.5 * jnp.sum(x**2) / theta**2
    observed = jnp.asarray(np.random.default_rng(2).normal(size=10), jnp.float32)

    def clusters(theta, x):
        centres = jnp.array([x["mean"], -x["mean"]])[x["labels"]]
        return -0.5 * jnp.sum((observed - centres) ** 2) - 0.5 * (x["mean"] / theta) ** 2

    def chain_of_labels(theta, z):
        agree = jnp.sum(z[1:] == z[:-1])
        return theta * agree - 0.5 * jnp.sum((observed - z) ** 2)

    labels = diffmh.Sweep(
        lambda i: diffmh.Gibbs(chain_of_labels, lambda z: z[i], num_values=3), len(observed)
    )
    both = diffmh.Cycle(
        diffmh.MetropolisHastings(clusters, diffmh.On(lambda x: x["labels"], diffmh.OneLabel(2))),
        diffmh.MetropolisHastings(
            clusters, diffmh.On(lambda x: x["mean"], diffmh.GaussianWalk(0.8))
        ),
    )
    walk = diffmh.MetropolisHastings(wide, diffmh.GaussianWalk(0.5))
    start = {"labels": jnp.zeros(10, int), "mean": jnp.array(0.5)}
    of_spins = lambda theta, s: jnp.outer(s, s)[jnp.triu_indices(3, 1)].astype(float)
    return [
        Problem("three spins", of_spins, spins, couplings, jnp.ones(3, int), **short),
        Problem(
            "two tails, Langevin", lambda t, x: x**2, diffmh.Langevin(steep, 0.8), 1.0,
            jnp.zeros(2), **short,
        ),
        Problem("20-D normal", lambda t, x: jnp.mean(x**2), walk, 1.0, jnp.zeros(20), **short),
        Problem(
            "hidden Markov chain, Gibbs", lambda t, z: jnp.mean(z.astype(float)), labels, 0.7,
            jnp.zeros(10, int), **short,
        ),
        Problem("labels and a mean", lambda t, x: x["mean"] ** 2, both, 1.5, start, **short),
    ]  # fmt: skip
