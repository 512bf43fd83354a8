"""Stein's control variates: variance and time with and without, against exact answers.

Independent draws for `from_draws`; chains of a walk for `Covariance`. `OPENBLAS_NUM_THREADS=1`
keeps small factorisations from waiting for a busy machine.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from problems import log_logistic, logistic, logistic_answer
from timing import best_times, row

import diffmh
from diffmh.reports.report import report as report_of
from diffmh.tools.draw_averages import AtDraws, evaluate, run_of_draws
from diffmh.tools.draw_controls import Coordinates

STEIN = {"control": "stein", "unconstrained": True}


def logistic_draws(rng: np.random.Generator, count: int) -> np.ndarray:
    """Independent draws of the coefficients, by rejection from a normal with wide tails."""
    centre, scale = np.array([0.31, 1.17, -0.83]), np.array([0.42, 0.5, 0.46])
    parts, total, top = [], 0, None
    while total < count:
        x = centre + scale * rng.standard_t(6, size=(20_000, 3))
        log_q = -3.5 * np.sum(np.log1p(((x - centre) / scale) ** 2 / 6), axis=-1)
        log_ratio = log_logistic(1.0, x, np) - log_q
        top = np.max(log_ratio) + 0.3 if top is None else top
        assert log_ratio.max() < top, "the envelope does not hold"
        parts.append(x[np.log(rng.random(len(x))) < log_ratio - top])
        total += len(parts[-1])
    return np.concatenate(parts)[:count]


EFFECTS = np.array([28.0, 8, -3, 7, -1, 1, 18, 12])
ERRORS = np.array([15.0, 10, 16, 11, 9, 11, 10, 18])
# d(Eμ, Eτ)/d(log a, log b), from shared/ESTIMATOR.md.
SCHOOLS = np.array([[3.811719, -0.156127], [-0.175672, 1.601350]])


def log_schools(theta, x):
    """Not centred, x = (μ, log τ, η), `μ ~ N(0, a²)`, `τ ~ C⁺(0, b)`, θ = (log a, log b)."""
    mean, tau, standard = x[0], jnp.exp(x[1]), x[2:]
    prior = -0.5 * (mean / jnp.exp(theta[0])) ** 2 - theta[0]
    prior += -jnp.log1p((tau / jnp.exp(theta[1])) ** 2) - theta[1] + x[1]
    likelihood = -0.5 * jnp.sum(((EFFECTS - mean - tau * standard) / ERRORS) ** 2)
    return prior - 0.5 * jnp.sum(standard**2) + likelihood


class Schools:
    """Independent draws: (μ, log τ) from a fine grid with the effects integrated out, then η."""

    def __init__(self):
        self.mean = np.linspace(-30, 40, 1401)[:, None]
        self.log_tau = np.linspace(-12, 6, 1801)[None]
        tau = np.exp(self.log_tau)
        log_g = -0.5 * (self.mean / 5) ** 2 - np.log1p((tau / 5) ** 2) + self.log_tau
        for effect, error in zip(EFFECTS, ERRORS, strict=True):
            variance = error**2 + tau**2
            log_g = log_g - 0.5 * np.log(variance) - 0.5 * (effect - self.mean) ** 2 / variance
        self.shape, total = log_g.shape, np.cumsum(np.exp(log_g - log_g.max()).ravel())
        self.total = total / total[-1]

    def __call__(self, rng: np.random.Generator, count: int) -> np.ndarray:
        row, column = np.unravel_index(np.searchsorted(self.total, rng.random(count)), self.shape)
        mean = self.mean[row, 0] + rng.uniform(-0.025, 0.025, count)
        log_tau = self.log_tau[0, column] + rng.uniform(-0.005, 0.005, count)
        tau = np.exp(log_tau)[:, None]
        precision = 1 + tau**2 / ERRORS**2
        centre = tau * (EFFECTS - mean[:, None]) / ERRORS**2 / precision
        eta = centre + rng.normal(size=(count, 8)) / np.sqrt(precision)
        return np.column_stack([mean, log_tau, eta])


def skew(theta, x):
    """A heavy and skew density that no polynomial suits, f bounded: where little can be gained."""
    return -2.5 * jnp.log1p((x[0] / theta) ** 2 / 4) - 0.5 * (x[1] - jnp.abs(x[0])) ** 2


def skew_draws(rng: np.random.Generator, count: int) -> np.ndarray:
    first = rng.standard_t(4, count)
    return np.column_stack([first, np.abs(first) + rng.normal(size=count)])


def ratio(
    name: str, draw: Callable, f: Callable, density: Callable, theta, bar: float, seeds: int, exact
) -> None:
    """Variance without over variance with, of each derivative, for 4 × 1,000 draws."""
    rng, plain, controlled, inside = np.random.default_rng(3), [], [], []
    x = jnp.asarray(draw(rng, seeds * 4_000).reshape(seeds * 4, 1_000, -1), jnp.float32)
    form = jax.eval_shape(lambda x: f(theta, x), x[0, 0])
    # What `from_draws` evaluates, of all seeds at once.
    found = [np.asarray(part, float) for part in evaluate(f, density, theta, x, (), False, True)]
    for seed in range(seeds):
        value, score, slope, *place = (part[4 * seed : 4 * seed + 4] for part in found)
        at = Coordinates(*(part.reshape(4_000, -1) for part in place))
        both = AtDraws(value, score, slope)
        plain.append(np.ravel(report_of(run_of_draws(both, theta, form)).gradient))
        report = report_of(run_of_draws(both.controlled(at, None), theta, form))
        controlled.append(np.ravel(report.gradient))
        ends = np.asarray(report.interval(0.95)[1]).reshape(-1, 2)
        if exact is not None:
            inside.append((ends[:, 0] <= np.ravel(exact)) & (np.ravel(exact) <= ends[:, 1]))
    gains = np.var(plain, axis=0) / np.var(controlled, axis=0)
    figures = ", ".join(f"{gain:.1f}" for gain in gains)
    print(row(f"{name}: variance ratio, {seeds} seeds", figures, f"≥ {bar:g}", min(gains) >= bar))
    if exact is not None:
        error = np.mean(controlled, axis=0) - np.ravel(exact)
        z = error / (np.std(controlled, axis=0) / seeds**0.5)
        print(row("  bias, in standard errors", ", ".join(f"{one:.1f}" for one in z), "< 4",
                  bool(np.all(np.abs(z) < 4))))  # fmt: skip
        held = np.mean(inside)
        print(
            row("  95 % intervals hold", f"{held:.1%}", "92–98 %", 0.92 <= held <= 0.98), flush=True
        )
    x = x[:4]
    both = {
        "plain": lambda: diffmh.from_draws(f, density, x).run(theta).gradient,
        "stein": lambda: diffmh.from_draws(f, density, x, **STEIN).run(theta).gradient,
    }
    times = best_times(both, 3, time.process_time)
    factor = times["stein"] / times["plain"]
    print(row("  time, compiled", f"{factor:.1f}×", "≤ 2", factor <= 2), flush=True)


def chains(seeds: int) -> None:
    """Along a walk on the logistic regression."""
    problem = logistic()
    found, programs = {}, {}
    estimators = {"plain": diffmh.Covariance(), "stein": diffmh.Covariance(**STEIN)}
    keys = jax.random.split(jax.random.key(5), seeds)
    for name, estimator in estimators.items():
        slope = jax.jit(jax.jacobian(problem.expectation(estimator)))
        found[name] = np.array([slope(problem.theta, key) for key in keys])
        programs[name] = lambda slope=slope: slope(problem.theta, keys[0])
    error = {
        name: np.mean((each - logistic_answer()[1]) ** 2, axis=0) for name, each in found.items()
    }
    gains = error["plain"] / error["stein"]
    figures = ", ".join(f"{gain:.0f}" for gain in gains)
    what = f"`Covariance`, logistic walk: variance ratio, {seeds} seeds"
    print(row(what, figures, "≥ 100", min(gains) >= 100))
    times = best_times(programs, 3, time.process_time)
    factor = times["stein"] / times["plain"]
    print(row("  time, compiled", f"{factor:.1f}×", "≤ 2", factor <= 2), flush=True)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seeds", type=int, default=200)
    options.add_argument("--only", default="", help="part of a problem's name")
    chosen = options.parse_args()
    identity, one = lambda theta, x: x, jnp.ones(())
    moments = lambda theta, x: jnp.stack([x[0], jnp.exp(x[1])])
    at = jnp.log(jnp.array([5.0, 5.0]))
    normal = lambda rng, count: 0.5 + rng.normal(size=count)
    cases = {
        "logistic": (logistic_draws, identity, log_logistic, one, 100, logistic_answer()[1]),
        "eight schools": (Schools(), moments, log_schools, at, 2.5, SCHOOLS),
        "bounded": (skew_draws, lambda theta, x: jnp.tanh(x), skew, one, 0.9, None),
        "N(θ,1)": (
            normal,
            lambda t, x: x[0],
            lambda t, x: -0.5 * (x[0] - t) ** 2,
            0.5 * one,
            1e6,
            None,
        ),
    }
    for name, (draw, f, density, theta, bar, exact) in cases.items():
        if chosen.only in name:
            ratio(name, draw, f, density, theta, bar, chosen.seeds, exact)
    if chosen.only in "chains":
        chains(min(chosen.seeds, 60))


if __name__ == "__main__":
    main()
