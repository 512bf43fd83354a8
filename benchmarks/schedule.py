"""Gradient with respect to a whole schedule against the value: CPU time, and memory beside the
arguments, by the number of stages.

    python benchmarks/schedule.py
"""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import numpy as np
from timing import best_times

import diffmh

KEY = jax.random.key(0)
SIDE = 10


def wells(stage):
    def log_density(theta, x):
        return -theta[stage] * (x**2 - 1.0) ** 2

    return diffmh.MetropolisHastings(log_density, diffmh.GaussianWalk(0.5))


def glass(stage):
    """A spin glass: couplings ±1 to the right and downward, periodic."""
    right, down = np.random.default_rng(4).choice([-1.0, 1.0], (2, SIDE, SIDE))

    def log_density(theta, z):
        bonds = right * z * jnp.roll(z, -1, 1) + down * z * jnp.roll(z, -1, 0)
        return theta[stage] * jnp.sum(bonds)

    return diffmh.MetropolisHastings(log_density, diffmh.SpinFlip())


def measured(name, kernel_at, stages, steps, start, f, num_chains, births=None) -> None:
    mean = diffmh.expectation(
        f,
        diffmh.Schedule(kernel_at, stages, steps),
        init=start,
        num_samples=1,
        num_chains=num_chains,
        estimator=diffmh.StochasticDerivative(births=births),
    )
    theta = jnp.linspace(0.2, 2.0, stages)
    value = jax.jit(mean).lower(theta, KEY).compile()
    gradient = jax.jit(jax.grad(mean)).lower(theta, KEY).compile()
    programs = {"value": lambda: value(theta, KEY), "gradient": lambda: gradient(theta, KEY)}
    best = best_times(programs, 5, time.process_time)
    memory = gradient.memory_analysis().temp_size_in_bytes / 1e6
    print(
        f"{name:44s} {stages:4d} × {steps:3d} {num_chains:5d} chains: gradient / value"
        f" {best['gradient'] / best['value']:5.2f}, {memory:.1f} MB",
        flush=True,
    )


def main() -> None:
    square = lambda theta, x: x**2
    for stages, births in ((10, None), (100, None), (1000, None), (100, False)):
        name = "Gaussian walk in a double well" + ("" if births is None else f", births={births}")
        measured(name, wells, stages, 20, 1.0, square, 1024, births)
    spins = jnp.ones((SIDE, SIDE), jnp.int8)
    measured(
        "10×10 spin glass, single flips",
        glass,
        100,
        100,
        spins,
        lambda theta, z: jnp.sum(1.0 * z * jnp.roll(z, -1, 1)),
        64,
    )


if __name__ == "__main__":
    main()
