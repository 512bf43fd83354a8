"""A Boltzmann machine of 16 spins learns the moments of another one, through its sampler.

The loss is the squared distance of the machine's means and pair correlations from the data's. Its
gradient is that of the chain. For comparison, the exact loss over all 65,536 configurations is
printed as well.

python examples/boltzmann.py
"""

import jax
import jax.numpy as jnp
import optax

import diffmh
from diffmh.models import boltzmann

SPINS, ITERATIONS = 16, 300


def distance(moments, data):
    squares = jax.tree.map(lambda a, b: jnp.sum((a - b) ** 2), moments, data)
    return sum(jax.tree.leaves(squares))


def main():
    data = boltzmann.Full.random(jax.random.key(0), SPINS).exact_moments()
    theta = boltzmann.Full.zeros(SPINS)
    moments = diffmh.expectation(
        boltzmann.Full.moments,
        theta.sampler(),
        init=lambda key: jax.random.rademacher(key, (SPINS,), jnp.int8),
        num_samples=30,
        burn_in=20,
        num_chains=32,
        estimator=diffmh.StochasticDerivative(alternatives=4),
    )
    loss = diffmh.compose(lambda theta, found: distance(found, data), moments)
    exact = lambda theta: float(distance(theta.exact_moments(), data))
    print(f"exact loss at the start {exact(theta):.3f}")
    optimizer = optax.adam(optax.exponential_decay(0.05, ITERATIONS, 0.1))
    path = diffmh.optimise(
        loss, theta, jax.random.key(1), optimizer=optimizer, num_iterations=ITERATIONS
    )
    for iteration in range(49, ITERATIONS, 50):
        here = jax.tree.map(lambda leaf, i=iteration: leaf[i], path.theta)
        found = float(path.value[iteration])
        print(f"{iteration + 1:4d}  estimated {found:.3f}  exact {exact(here):.3f}")
    print(
        f"exact loss of the last iterate {exact(path.last):.3f}, of the average of the second"
        f" half {exact(path.average):.3f}"
    )


if __name__ == "__main__":
    main()
