"""The cost of `sad` relative to the core on the same chains, the variance of its default relative
to REINFORCE at equal time, the scaling with parameters, and compile times: `make bench`. Arguments
select sections.
"""

from __future__ import annotations

import functools
import platform
import sys
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from sad_by_hand import BY_HAND
from sad_by_hand import gradient as gradient_by_hand
from sad_programs import PROGRAMS, policy, policy_by_hand, policy_parameters
from timing import best_times, row

import diffmh
from diffmh import sad
from diffmh.base.sums import mean_of_others
from diffmh.models import gaussian, mixture
from diffmh.sad.derivative import MOST_TANGENTS, Run, jacobian
from diffmh.sad.derivative import scored as scored_run
from diffmh.sad.estimators import Runs

# What the tables measure: one alternative.
ONE = diffmh.StochasticDerivative(alternatives=1)

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
    return diffmh.expectation(
        f, kernel, init=init, num_samples=NUM_SAMPLES, num_chains=NUM_CHAINS, estimator=ONE
    )


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
    """The minimum CPU time of several runs: more stable than wall time on a busy machine."""
    seconds = []
    for _ in range(repeats):
        began = time.process_time()
        jax.block_until_ready(function())
        seconds.append(time.process_time() - began)
    return min(seconds)


def beside_reinforce(num_replicates=16_384):
    """Variance, summed over the parameters, times time: that of the default over that of REINFORCE
    with the mean of the others as baseline, written by hand; and over that of the same estimator
    with `sad`'s own samplers, which are faster than `jax.random`'s.
    """
    rows = []
    for name, (program, theta) in PROGRAMS.items():
        keys = jax.random.split(KEY, num_replicates)
        by_hand = jax.jit(functools.partial(gradient_by_hand, BY_HAND[name]))
        plain = Runs(Run(program, theta, KEY, (), {}), keys, theta.size > MOST_TANGENTS)
        expected = sad.expectation(program, num_replicates=num_replicates)
        expected.grouped = True
        timed = {
            "by hand": lambda by_hand=by_hand, theta=theta, keys=keys: by_hand(theta, keys),
            "plain": lambda plain=plain: plain_score(plain),
            "default": lambda e=expected, theta=theta: e.run_chains(theta, KEY).jacobian,
        }
        found = {which: function() for which, function in timed.items()}
        seconds = {which: processor_seconds(function) for which, function in timed.items()}
        group = num_replicates // found["default"].shape[-1]
        variance = {
            "plain": np.asarray(found["plain"]).var(axis=-1).sum(),
            "default": np.asarray(found["default"]).var(axis=-1).sum() * group,
        }
        ratio = variance["default"] / variance["plain"]
        print(
            f"  {name}: deviation {variance['default'] ** 0.5:.3g}, REINFORCE"
            f" {variance['plain'] ** 0.5:.3g}; variance {ratio:.2f} times; milliseconds"
            + ", ".join(f" {1e3 * value:.1f} {which}" for which, value in seconds.items())
        )
        bar = 0.3 if name == "random walk" else 1.0
        for which, beside in {"by hand": "by hand", "plain": "sad's samplers"}.items():
            at_equal_time = ratio * seconds["default"] / seconds[which]
            figure = f"{at_equal_time:.2f}"
            label = f"{name}: variance at equal time, {beside}"
            rows.append(row(label, figure, f"≤ {bar}", at_equal_time <= bar))
    return rows


@eqx.filter_jit
def plain_score(runs):
    """REINFORCE with the mean of the others as baseline, for each replicate."""

    def one(run):
        def both(theta):
            scored = scored_run(run.at(theta), lambda value, anchor: jnp.zeros_like(value))
            return jnp.append(scored.value, scored.log_prob), scored.value

        return jacobian(both, run.theta, runs.reverse)

    value, slope = runs.each(one)
    return slope[:, :-1] + slope[:, -1:] * (value - mean_of_others(value))


def many_parameters(num_replicates=64):
    theta = policy_parameters()
    expected = sad.expectation(policy, estimator=sad.Score(), num_replicates=num_replicates)
    keys = lambda key: jax.random.split(key, num_replicates)
    programs = {
        "value": jax.jit(expected),
        "sad": jax.jit(jax.value_and_grad(expected)),
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
