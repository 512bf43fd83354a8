"""What `sad` costs beside the core on the same chains: `make bench`."""

from __future__ import annotations

import platform

import jax
import jax.numpy as jnp
from timing import best_times, row

import diffmh
from diffmh import sad
from diffmh.models import gaussian, mixture

KEY = jax.random.key(0)
NUM_CHAINS, NUM_SAMPLES = 1024, 1000


def chain(log_density, proposal, f, init):
    """Algorithm 1 in plain JAX."""

    def program(theta, key):
        def step(x, key):
            key_propose, key_accept = jax.random.split(key)
            x_new = sad.propose(key_propose, proposal, None, x)
            log_ratio = log_density(theta, x_new) - log_density(theta, x)
            accept = sad.bernoulli(key_accept, jnp.exp(jnp.minimum(0.0, log_ratio)))
            x = jnp.where(accept, x_new, x)
            return x, f(theta, x)

        _, values = jax.lax.scan(step, jnp.asarray(init), jax.random.split(key, NUM_SAMPLES))
        return values.mean(axis=0)

    return program


def core(log_density, proposal, f, init):
    kernel = diffmh.MetropolisHastings(log_density, proposal)
    return diffmh.expectation(f, kernel, init=init, num_samples=NUM_SAMPLES, num_chains=NUM_CHAINS)


def over_chains(program):
    expected = sad.expectation(program)
    return lambda theta, key: jnp.mean(
        jax.vmap(expected, (None, 0))(theta, jax.random.split(key, NUM_CHAINS)), axis=0
    )


CHAINS = {
    "mixture, maximal coupling": (
        (mixture.log_density, diffmh.OtherState(3), mixture.indicator, 0),
        0.4,
    ),
    "N(θ, 1), maximal reflection": (
        (gaussian.log_density, diffmh.GaussianWalk(2.38), lambda theta, x: x, 0.0),
        0.5,
    ),
}


def main():
    print(
        f"jax {jax.__version__}, {platform.machine()}, {jax.device_count()}"
        f" {jax.devices()[0].platform} device"
    )
    rows = []
    for name, (parts, theta) in CHAINS.items():
        programs = {
            "core": jax.jit(jax.jacfwd(core(*parts))),
            "sad": jax.jit(jax.jacfwd(over_chains(chain(*parts)))),
            "plain": jax.jit(over_chains(chain(*parts))),
        }
        best = best_times({key: lambda f=f: f(theta, KEY) for key, f in programs.items()})
        per_step = {
            key: 1e9 * seconds / (NUM_CHAINS * NUM_SAMPLES) for key, seconds in best.items()
        }
        print(
            f"  {name}: ns per step and chain: "
            + ", ".join(f"{key} {value:.0f}" for key, value in per_step.items())
        )
        ratio = best["sad"] / best["core"]
        rows.append(
            row(f"{name}, {NUM_CHAINS} chains: sad / core", f"{ratio:.2f}", "≤ 2", ratio <= 2)
        )
    print("\n".join(["", *rows]))


if __name__ == "__main__":
    main()
