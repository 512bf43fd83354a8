"""Where a walk whose step is differentiated should start: the standard deviation of the derivative
of E[x_{t−1} x_t] by the step, on N(0, 1), for a chain of 10⁵ steps.

Chains of 4,000 steps stand for it: the variance falls as one over the length.
"""

import jax
import jax.numpy as jnp
import numpy as np

import diffmh

STEPS, CHAINS, LENGTH = 4_000, 4_096, 100_000


def deviation(start: float, alternatives: int) -> float:
    walk = diffmh.MetropolisHastings(
        lambda theta, x: -0.5 * x**2, lambda theta: diffmh.GaussianWalk(theta)
    )
    product = diffmh.expectation(
        lambda theta, before, x: before * x,
        walk,
        init=start,
        num_samples=STEPS,
        burn_in=100,
        num_chains=CHAINS,
        lag=1,
        estimator=diffmh.StochasticDerivative(alternatives=alternatives),
    )
    found = jax.jit(jax.jacfwd(product.per_chain))(jnp.float32(2.38), jax.random.key(0))
    return float(np.std(np.asarray(found, float))) * (STEPS / LENGTH) ** 0.5


if __name__ == "__main__":
    print("start   K = 1   K = 4")
    for start in (0.0, 1.0, 2.0):
        print(f"x_0 = {start:.0f} {deviation(start, 1):.4f}  {deviation(start, 4):.4f}")
