"""The paper's mixture and Ising sweeps as expectations."""

import jax
import jax.numpy as jnp
from oracles import (
    MEANS,
)

import diffmh


def mixture(estimator, num_samples, num_chains=40_000):
    means = jnp.asarray(MEANS, jnp.float32)
    kernel = diffmh.MetropolisHastings(
        lambda h, j: -0.5 * ((h - means[j]) / 4.0) ** 2, diffmh.OtherState(3)
    )
    return diffmh.expectation(
        lambda h, j: jax.nn.one_hot(j, 3),
        kernel,
        init=0,
        num_samples=num_samples,
        num_chains=num_chains,
        estimator=estimator,
    )


def ising(size, num_sweeps=5, num_chains=20_000, estimator=None, burn_in=0):
    def energy(spins):
        return -jnp.sum(spins * (jnp.roll(spins, 1, 0) + jnp.roll(spins, 1, 1))).astype(jnp.float32)

    sites = [(i, j) for i in range(size) for j in range(size)]
    density = lambda temperature, spins: -energy(spins) / temperature
    sweep = diffmh.Cycle(
        *(diffmh.MetropolisHastings(density, diffmh.SpinFlip(site)) for site in sites)
    )
    return diffmh.expectation(
        lambda temperature, spins: jnp.stack([energy(spins), energy(spins) ** 2]),
        sweep,
        init=jnp.ones((size, size), jnp.int32),
        num_samples=num_sweeps,
        burn_in=burn_in,
        num_chains=num_chains,
        estimator=estimator,
    )
