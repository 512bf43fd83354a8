"""The performance goals of the samplers, as ratios within one run: the cost of a gradient relative
to the value, for a parameter of the target and for one of the sampler, and constant memory.

    python benchmarks/samplers.py
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from timing import best_times, row

import diffmh

# What the tables measure: one alternative.
ONE = diffmh.StochasticDerivative(alternatives=1)

KEY, CHAINS, SAMPLES = jax.random.key(0), 4096, 400


def of_target(theta, x):
    return -0.5 * (x - theta) ** 2


def of_nothing(theta, x):
    return -0.5 * x**2


SAMPLERS = {
    "walk, mean": (diffmh.MetropolisHastings(of_target, diffmh.GaussianWalk(2.38)), 4),
    "walk, step": (
        diffmh.MetropolisHastings(of_nothing, lambda theta: diffmh.GaussianWalk(jnp.exp(theta))),
        4,
    ),
    "Langevin, mean": (diffmh.Langevin(of_target, 1.2), 5),
    "Langevin, step": (diffmh.Langevin(of_nothing, lambda theta: jnp.exp(theta)), 5),
    "Hamiltonian, mean": (diffmh.Hamiltonian(of_target, 0.5, 4), 5),
    "Hamiltonian, step": (diffmh.Hamiltonian(of_nothing, lambda theta: 0.5 * jnp.exp(theta), 4), 5),
}


def mean_square(kernel, num_samples):
    return diffmh.expectation(
        lambda theta, x: x**2,
        kernel,
        init=0.0,
        num_samples=num_samples,
        num_chains=CHAINS,
        estimator=ONE,
    )


def temporary_bytes(kernel, num_samples):
    gradient = jax.jit(jax.grad(mean_square(kernel, num_samples)))
    return gradient.lower(0.5, KEY).compile().memory_analysis().temp_size_in_bytes


def main() -> None:
    print(f"N(θ, 1) or N(0, 1), {CHAINS} chains")
    for name, (kernel, most) in SAMPLERS.items():
        mean = mean_square(kernel, SAMPLES)
        programs = {"value": jax.jit(mean), "gradient": jax.jit(jax.value_and_grad(mean))}
        best = best_times({name: lambda f=f: f(0.5, KEY) for name, f in programs.items()})
        steps = CHAINS * SAMPLES
        each = ", ".join(f"{part} {1e9 * best[part] / steps:.0f}" for part in programs)
        print(f"  {name}: ns per step and chain: {each}")
        ratio = best["gradient"] / best["value"]
        print(row(f"{name}: gradient / value", f"{ratio:.2f}", f"≤ {most}", ratio <= most))
        growth = temporary_bytes(kernel, 100 * SAMPLES) / temporary_bytes(kernel, SAMPLES)
        flat = 0.9 <= growth <= 1.1
        print(row(f"{name}: memory, 100 × the samples", f"{growth:.3f}", "0.9–1.1", flat))


if __name__ == "__main__":
    main()
