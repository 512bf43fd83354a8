"""How many chain steps `optimise(reuse=...)` saves on the paper's two ascents, and where they end.

python benchmarks/reuse.py [mixture | ising]
"""

from __future__ import annotations

import sys
import time

import jax
import jax.numpy as jnp
import optax

import diffmh
from diffmh.models import ising, mixture
from diffmh.reproduce.lattice import SIZE, START, moments

SHARES = (0.5, None)


def peak_of_entropy() -> float:
    """Exact, by Newton's method on the enumerated entropy."""
    with jax.enable_x64(True):
        entropy = lambda h: mixture.entropy(mixture.posterior(h))
        slope, h = jax.grad(entropy), jnp.asarray(1.0)
        for _ in range(20):
            h = h - slope(h) / jax.grad(slope)(h)
        return float(h)


def climb(name: str, objective, start: float, exact: float, curvature: float, **steps) -> None:
    for share in SHARES:
        begin = time.perf_counter()
        path = diffmh.optimise(
            objective, start, jax.random.key(0), maximise=True, reuse=share, **steps
        )
        seconds = time.perf_counter() - begin
        runs = int(path.sampled.sum())
        # At the end the gradient is zero up to its error, which is this far in theta.
        error = float(path.gradient_error[-1]) / abs(curvature)
        print(
            f"{name}: reuse={share}: {runs} of {len(path.sampled)} iterations sampled; ends at"
            f" {float(path.last):.4f}, average {float(path.average):.4f}, exact {exact:.4f}, error"
            f" of the end {error:.4f} (z = {(float(path.last) - exact) / error:.2f});"
            f" {seconds:.0f} s",
            flush=True,
        )


def of_mixture() -> None:
    p = diffmh.expectation(
        mixture.indicator,
        mixture.sampler(),
        init=0,
        num_samples=5_000,
        burn_in=50,
        estimator=diffmh.Covariance(),
    )
    entropy = diffmh.compose(lambda h, p: mixture.entropy(p), p)
    exact = peak_of_entropy()
    curvature = jax.grad(jax.grad(lambda h: mixture.entropy(mixture.posterior(h))))(exact)
    adam = optax.adam(0.1)
    climb("mixture", entropy, 8.0, exact, float(curvature), optimizer=adam, num_iterations=150)


def of_ising() -> None:
    mean = moments(400, 300, 64, estimator=diffmh.Covariance())
    capacity = diffmh.compose(ising.heat_capacity, mean)
    exact = ising.peak(SIZE)
    step = 1e-3
    slopes = [ising.exact(SIZE, exact + s).heat_capacity_slope for s in (-step, step)]
    curvature = float(slopes[1] - slopes[0]) / (2 * step)
    # The schedule of the reproduced Fig. 6 (`reproduce.lattice.climb`).
    rate = optax.piecewise_interpolate_schedule("cosine", 0.2, {48: 1.0, 240: 0.02})
    steps = {"optimizer": optax.adam(rate, b2=0.9), "num_iterations": 240}
    climb("ising", capacity, START, exact, curvature, **steps)


if __name__ == "__main__":
    for name in sys.argv[1:] or ["mixture", "ising"]:
        {"mixture": of_mixture, "ising": of_ising}[name]()
