"""The performance goals of the core, as ratios within one run: `make bench`."""

from __future__ import annotations

import platform

import blackjax
import jax
import jax.numpy as jnp
import numpy as np
from timing import best_times, row

import diffmh

# What the tables measure: one alternative.
ONE = diffmh.StochasticDerivative(alternatives=1)

KEY = jax.random.key(0)


def log_normal(theta, x):
    return -0.5 * jnp.sum((x - theta) ** 2)


def normal_mean(num_chains, num_samples, estimator=None):
    kernel = diffmh.MetropolisHastings(log_normal, diffmh.GaussianWalk(2.38))
    return diffmh.expectation(
        lambda theta, x: x,
        kernel,
        init=0.0,
        num_samples=num_samples,
        num_chains=num_chains,
        estimator=estimator,
    )


def blackjax_mean(num_chains, num_samples):
    """BlackJAX's random-walk Metropolis in a vmapped scan that keeps only the sum."""

    def chain(theta, key):
        step = blackjax.mcmc.random_walk.normal(jnp.array(2.38))
        kernel = blackjax.additive_step_random_walk(lambda x: log_normal(theta, x), step)

        def one(carry, key):
            state, total = carry
            state, _ = kernel.step(key, state)
            return (state, total + state.position), None

        start = kernel.init(jnp.array(0.0))
        (_, total), _ = jax.lax.scan(one, (start, 0.0), jax.random.split(key, num_samples))
        return total / num_samples

    return lambda theta, key: jnp.mean(
        jax.vmap(chain, (None, 0))(theta, jax.random.split(key, num_chains))
    )


def speed():
    for num_chains, num_samples in ((1, 40_000), (16, 20_000), (4096, 1_000)):
        mean = normal_mean(num_chains, num_samples)
        programs = {
            "value": jax.jit(mean),
            "gradient": jax.jit(jax.value_and_grad(mean)),
            "blackjax": jax.jit(blackjax_mean(num_chains, num_samples)),
        }
        best = best_times({name: lambda f=f: f(0.5, KEY) for name, f in programs.items()})
        per_step = {
            name: 1e9 * seconds / (num_chains * num_samples) for name, seconds in best.items()
        }
        what = f"N(θ,1), {num_chains} chain{'s' * (num_chains > 1)}"
        detail = ", ".join(f"{name} {per_step[name]:.0f}" for name in programs)
        print(f"  {what}: ns per step and chain: {detail}")
        ratio = best["gradient"] / best["value"]
        bar = (
            (num_chains, "≤ 3", ratio <= 3) if num_chains != 16 else (num_chains, "(no bar)", True)
        )
        yield row(f"{what}: value and gradient / value", f"{ratio:.2f}", bar[1], bar[2])
        ratio = best["value"] / best["blackjax"]
        yield row(f"{what}: value / BlackJAX's value", f"{ratio:.3f}", "≤ 1", ratio <= 1)


def memory():
    def temporary_bytes(num_samples):
        gradient = jax.jit(jax.value_and_grad(normal_mean(64, num_samples)))
        return gradient.lower(0.5, KEY).compile().memory_analysis().temp_size_in_bytes

    short, long = temporary_bytes(4_000), temporary_bytes(400_000)
    print(f"  temporary memory: {short:,} bytes at 4,000 samples, {long:,} at 400,000")
    yield row(
        "temporary memory of the gradient, 400,000 samples / 4,000",
        f"{long / short:.3f}",
        "0.9 to 1.1",
        0.9 <= long / short <= 1.1,
    )


def many_parameters():
    kernel = diffmh.MetropolisHastings(log_normal, diffmh.GaussianWalk(2.38 / 20**0.5))
    for name, f in (("scalar f", lambda theta, x: jnp.sum(x)), ("all of x", lambda theta, x: x)):
        mean = diffmh.expectation(
            f, kernel, init=jnp.zeros(20), num_samples=500, num_chains=1024, estimator=ONE
        )
        gradient = jax.value_and_grad(mean) if name == "scalar f" else jax.jacfwd(mean)
        programs = {"value": jax.jit(mean), "gradient": jax.jit(gradient)}
        best = best_times(
            {key: lambda g=g: g(jnp.zeros(20), KEY) for key, g in programs.items()}, repeats=5
        )
        ratio = best["gradient"] / best["value"]
        bar = ("≤ 5", ratio <= 5) if name == "scalar f" else ("(no bar)", True)
        yield row(
            f"20-dimensional normal, 20 parameters, {name}: gradient / value", f"{ratio:.2f}", *bar
        )


def retracing():
    traces = []

    def log_density(theta, x, data):
        traces.append(1)
        return -0.5 * jnp.sum((data - theta - x) ** 2) - 0.5 * x**2

    kernel = diffmh.MetropolisHastings(log_density, diffmh.GaussianWalk(1.0))
    mean = diffmh.expectation(
        lambda theta, x, data: x, kernel, init=0.0, num_samples=100, estimator=ONE
    )
    gradient = jax.jit(jax.grad(mean))
    for program in (mean, jax.grad(mean), gradient):
        program(0.5, KEY, jnp.ones(10))
        before = len(traces)
        program(0.5, KEY, jnp.zeros(10))
        assert len(traces) == before, "new args of the same shape retraced"
    yield row("traces for new args of the same shape", "0", "0", True)


def accuracy():
    """Ten million steps in float32 against the same path summed in float64."""
    num_samples = 10_000_000
    kernel = diffmh.MetropolisHastings(log_normal, diffmh.GaussianWalk(2.38))
    mean = diffmh.expectation(
        lambda theta, x: (x + 10.0) ** 2,
        kernel,
        init=0.0,
        num_samples=num_samples,
        num_chains=1,
        estimator=ONE,
    )
    value = float(mean(0.5, KEY))
    path = diffmh.trace(kernel, 0.5, KEY, init=0.0, num_steps=num_samples)
    values = np.asarray((path.primal + np.float32(10.0)) ** 2)
    exact, plain = (
        values.astype(np.float64).mean(),
        float(np.cumsum(values, dtype=np.float32)[-1] / num_samples),
    )
    print(
        f"  10⁷ float32 terms: our sum is off by {abs(value / exact - 1):.1e}, a running sum by"
        f" {abs(plain / exact - 1):.1e}"
    )
    yield row(
        "sum over 10⁷ steps in float32, relative error",
        f"{abs(value / exact - 1):.1e}",
        "≤ 1e-5",
        abs(value / exact - 1) <= 1e-5,
    )
    weight = np.asarray(path.weight)[:, 0]
    terms = weight * (np.asarray((path.alternative[:, 0] + np.float32(10.0)) ** 2) - values)
    exact = np.where(np.asarray(path.alive)[:, 0], terms, 0.0).astype(np.float64).mean()
    gradient = float(jax.grad(mean)(0.5, KEY))
    error = abs(gradient / exact - 1)
    yield row(
        "derivative's sum over 10⁷ steps in float32, relative error",
        f"{error:.1e}",
        "≤ 1e-5",
        error <= 1e-5,
    )


def main():
    print(
        f"jax {jax.__version__}, {platform.machine()}, {jax.device_count()}"
        f" {jax.devices()[0].platform} device"
    )
    rows = [
        line for part in (speed, memory, many_parameters, retracing, accuracy) for line in part()
    ]
    print("\n".join(["", *rows]))


if __name__ == "__main__":
    main()
