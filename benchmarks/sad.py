"""What `sad` costs beside the core on the same chains, what its default has beside REINFORCE at
equal time, how it goes with parameters, and how long it compiles: `make bench`. With names of
sections as arguments, only those.
"""

from __future__ import annotations

import platform
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from sad_programs import PROGRAMS, policy, policy_by_hand, policy_parameters
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


def beside_core():
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
    return rows


def processor_seconds(function, repeats=5):
    """The least of some runs, in CPU time: steadier than the clock on a busy machine."""
    seconds = []
    for _ in range(repeats):
        began = time.process_time()
        jax.block_until_ready(function())
        seconds.append(time.process_time() - began)
    return min(seconds)


def beside_reinforce(num_replicates=16_384):
    """Variance, added up over the parameters, times time of the default over that of the score with
    the others' mean as baseline.
    """
    rows = []
    for name, (program, theta) in PROGRAMS.items():
        found, seconds = {}, {}
        for which, estimator in {"score": sad.Score(), "default": None}.items():
            expected = sad.expectation(program, estimator=estimator, num_replicates=num_replicates)
            found[which] = expected.run_chains(theta, KEY).jacobian
            seconds[which] = processor_seconds(lambda e=expected: e.run_chains(theta, KEY).jacobian)
        variance = {which: np.asarray(j).var(axis=-1).ravel() for which, j in found.items()}
        ratio = variance["default"].sum() / variance["score"].sum()
        deviation = {which: np.sqrt(v.sum()) for which, v in variance.items()}
        at_equal_time = ratio * seconds["default"] / seconds["score"]
        print(
            f"  {name}: deviation {deviation['default']:.3g}, score {deviation['score']:.3g};"
            f" variance {ratio:.2f} times, time {seconds['default'] / seconds['score']:.2f} times"
        )
        bar = 0.3 if name == "random walk" else 1.0
        figure = f"{at_equal_time:.2f}"
        rows.append(
            row(f"{name}: variance at equal time", figure, f"≤ {bar}", at_equal_time <= bar)
        )
    return rows


def many_parameters(num_replicates=64):
    theta = policy_parameters()
    expected = sad.expectation(policy, estimator=sad.Score(), num_replicates=num_replicates)
    mean = lambda theta, key: jnp.mean(expected.per_chain(theta, key))
    keys = lambda key: jax.random.split(key, num_replicates)
    programs = {
        "value": jax.jit(mean),
        "sad": jax.jit(jax.value_and_grad(mean)),
        "by hand": jax.jit(lambda theta, key: jax.value_and_grad(policy_by_hand)(theta, keys(key))),
    }
    best = best_times({name: lambda f=f: f(theta, KEY) for name, f in programs.items()}, repeats=5)
    over_value, over_hand = best["sad"] / best["value"], best["sad"] / best["by hand"]
    size = sum(leaf.size for leaf in jax.tree.leaves(theta))
    return [
        row(f"{size:,} parameters: gradient / value", f"{over_value:.2f}", "≤ 6", over_value <= 6),
        row(f"{size:,} parameters: sad / by hand", f"{over_hand:.2f}", "≤ 1.5", over_hand <= 1.5),
    ]


def compile_times():
    def unrolled(theta, key):
        total = 0
        for key_draw in jax.random.split(key, 200):
            p = jax.nn.sigmoid(theta - 0.1 * total)
            total = total + sad.bernoulli(key_draw, p)
        return 1.0 * total

    def categories(theta, key):
        return jnp.arange(1000.0)[sad.categorical(key, theta * jnp.arange(1000) / 1000)]

    def nested(theta, key, depth=6):
        if not depth:
            return theta
        key_draw, key_rest = jax.random.split(key)
        return jax.lax.cond(
            sad.bernoulli(key_draw, theta),
            lambda: nested(theta, jax.random.fold_in(key_rest, 0), depth - 1) + 1.0,
            lambda: nested(theta, jax.random.fold_in(key_rest, 1), depth - 1) * 0.5,
        )

    rows = []
    cases = {"200 unrolled draws": (unrolled, 20), "1000 categories": (categories, 5)}
    cases["cond of depth 6"] = (nested, 10)
    for name, (program, most) in cases.items():
        began = time.process_time()
        jax.jit(jax.grad(sad.expectation(program))).lower(0.3, KEY).compile()
        seconds = time.process_time() - began
        rows.append(
            row(f"{name}: compile, CPU seconds", f"{seconds:.1f}", f"< {most}", seconds < most)
        )
    return rows


SECTIONS = {
    "core": beside_core,
    "reinforce": beside_reinforce,
    "parameters": many_parameters,
    "compile": compile_times,
}


def main():
    print(
        f"jax {jax.__version__}, {platform.machine()}, {jax.device_count()}"
        f" {jax.devices()[0].platform} device"
    )
    rows = [line for name in sys.argv[1:] or SECTIONS for line in SECTIONS[name]()]
    print("\n".join(["", *rows]))


if __name__ == "__main__":
    main()
