"""How often the 95 % intervals of `from_draws` hold: few chains, long memory, heavy tails.

The draws are those of a posterior with closed forms, x ~ N(θ, 2) and y = 1.3 ~ N(x, 1), by an
autoregressive chain of given memory; f is x, and x² + θ x, whose terms are skew.
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
import numpy as np
from timing import row

from diffmh.reports.report import report
from diffmh.tools.draw_averages import AtDraws, run_of_draws

PRIOR, Y, THETA = 2.0, 1.3, 0.4
VARIANCE = 1 / (1 / PRIOR + 1)
MEAN, SLOPE = VARIANCE * (THETA / PRIOR + Y), VARIANCE / PRIOR

# Chains, draws in each, autocorrelation of successive draws.
CASES = ((1, 400, 0.9), (2, 500, 0.95), (4, 1_000, 0.8), (4, 250, 0.0))


def autoregressive(rng: np.random.Generator, chains: int, draws: int, rho: float) -> np.ndarray:
    noise = rng.normal(size=(draws, chains))
    path = np.empty_like(noise)
    path[0] = noise[0]
    for t in range(1, draws):
        path[t] = rho * path[t - 1] + (1 - rho**2) ** 0.5 * noise[t]
    return MEAN + VARIANCE**0.5 * path.T


def reported(x: np.ndarray):
    """The report of `from_draws`, from what it evaluates at each draw."""
    value = np.stack([x, x**2 + THETA * x], axis=-1)
    score = ((x - THETA) / PRIOR)[..., None]
    slope = np.stack([np.zeros_like(x), x], axis=-1)[..., None, :]
    form = jax.ShapeDtypeStruct((2,), float)
    return report(run_of_draws(AtDraws(value, score, slope), jnp.float32(THETA), form))


def measure(chains: int, draws: int, rho: float, seeds: int) -> np.ndarray:
    """For each seed, if the intervals of two values and two derivatives hold."""
    truths = np.array([[MEAN, MEAN**2 + VARIANCE + THETA * MEAN],
                       [SLOPE, 2 * MEAN * SLOPE + MEAN + THETA * SLOPE]])  # fmt: skip
    rng = np.random.default_rng(7)
    held = []
    for _ in range(seeds):
        found = reported(autoregressive(rng, chains, draws, rho)).interval(0.95)
        ends = np.stack([np.asarray(part, float).reshape(2, 2) for part in found])
        held.append((ends[..., 0] <= truths) & (truths <= ends[..., 1]))
    return np.array(held).reshape(seeds, -1)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seeds", type=int, default=400)
    seeds = options.parse_args().seeds
    every = []
    for chains, draws, rho in CASES:
        held = measure(chains, draws, rho, seeds)
        every.append(held)
        for name, rate in zip(
            ("E[x]", "E[x² + θx]", "dE[x]", "dE[x² + θx]"), held.mean(0), strict=True
        ):
            what = f"{chains} × {draws}, ρ = {rho:g}: {name}"
            print(row(what, f"{rate:.1%}", "90–99 %", bool(0.90 <= rate <= 0.99)), flush=True)
    pooled = float(np.mean(every))
    print(row("pooled", f"{pooled:.1%}", "93–97 %", 0.93 <= pooled <= 0.97))


if __name__ == "__main__":
    main()
