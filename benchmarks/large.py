"""Cost, variance and variance × time of every way to differentiate a chain: `make bench`.

    python benchmarks/large.py [--quick] [--small-loops] [PART ...]

With `--small-loops` XLA compiles larger loops as one piece than by default. Writes
`docs/benchmarks.json` and the table of `docs/benchmarks.md`. One core; all methods of a problem are
interleaved in one run, and the minimum CPU time counts.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import itertools
import json
import os
import pathlib
import platform
import subprocess
import sys
import tempfile
import time

# One core for everything, set before JAX starts its threads.
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})

# The switch of docs/speed.md, which XLA reads when JAX is imported.
if "--small-loops" in sys.argv:
    os.environ["XLA_FLAGS"] = (
        "--xla_backend_extra_options=xla_cpu_small_while_loop_byte_threshold=65536"
    )

import blackjax
import jax
import jax.numpy as jnp
import numpy as np
from timing import best_times

import diffmh
from diffmh.models import gaussian, ising, mixture

# What the tables measure: one alternative.
ONE = diffmh.StochasticDerivative(alternatives=1)

SWITCHED = ", small loops in one piece" if "--small-loops" in sys.argv else ""
KEY = jax.random.key(0)
DOCS = pathlib.Path(__file__).parent.parent / "docs"


class Problem:
    """Methods for one problem, timed together; `steps` counts the steps of all chains."""

    def __init__(self, name: str, steps: int, repeats: int):
        self.name, self.steps, self.repeats = name, steps, repeats
        self.memory: int | None = None
        self.methods: dict[str, tuple] = {}

    def add(self, method: str, run, variance: float | None = None) -> None:
        self.methods[method] = run, variance

    def rows(self) -> list[dict]:
        runs = {method: run for method, (run, _) in self.methods.items()}
        best = best_times(runs, self.repeats, time.process_time)
        rows = []
        for method, (_, variance) in self.methods.items():
            row = {"problem": self.name, "method": method, "ns": 1e9 * best[method] / self.steps}
            if variance is not None:
                row["variance"] = variance
                row["variance × time"] = variance * best[method]
            rows.append(row)
        return rows


def shared(source: str, name: str, types: list, flags: tuple[str, ...] = ()):
    """A function in `limit/SOURCE.c`."""
    path = pathlib.Path(__file__).parent / "limit" / f"{source}.c"
    with tempfile.TemporaryDirectory() as directory:
        library = pathlib.Path(directory) / f"{name}.so"
        command = ["cc", "-O3", "-march=native", *flags, "-shared", "-fPIC", "-o", library, path]
        subprocess.run([*command, "-lm"], check=True)
        function = getattr(ctypes.CDLL(str(library)), name)
    function.argtypes = [*types, ctypes.c_uint64, ctypes.POINTER(ctypes.c_double)]
    averages = (ctypes.c_double * 2)()
    return lambda *given: (function(*given, 1, averages), tuple(averages))[1]


def both(mean, theta, *args):
    """The compiled value, and the compiled value and gradient."""
    value, gradient = jax.jit(mean), jax.jit(jax.value_and_grad(mean))
    return lambda: value(theta, KEY, *args), lambda: gradient(theta, KEY, *args)


def variance_of(mean, theta) -> float:
    """The variance of one chain's derivative, averaged over its entries."""
    found = np.asarray(jax.jit(jax.jacfwd(mean.per_chain))(theta, KEY), float)
    return float(found.var(axis=0, ddof=1).mean())


def normal(quick: bool):
    """N(θ,1), 1 to 4096 chains, compared with BlackJAX and with C written for SIMD over chains."""
    for chains, samples in ((1, 20_000), (16, 10_000), (64, 5000), (4096, 500)):
        name = f"N(θ,1), {chains} chains{SWITCHED}"
        problem = Problem(name, chains * samples, 5 if quick else 15)
        mean = diffmh.expectation(
            lambda theta, x: x,
            gaussian.sampler(),
            init=0.0,
            num_samples=samples,
            num_chains=chains,
            estimator=ONE,
        )
        value, gradient = both(mean, 0.5)
        problem.add("value", value)
        problem.add("gradient", gradient)
        if chains == 4096 and not SWITCHED:
            problem.add("BlackJAX, value", lambda: blackjax_mean(chains, samples))
            types = [ctypes.c_int, ctypes.c_int, ctypes.c_float, ctypes.c_float]
            loop = shared("normal", "normal", types, ("-ffast-math",))
            problem.add("C for SIMD, gradient", lambda: loop(chains, samples, 0.5, 2.38))
        yield problem


@functools.partial(jax.jit, static_argnums=(0, 1))
def blackjax_mean(num_chains, num_samples):
    """Random-walk Metropolis in a vmapped scan that keeps only the sum."""
    step = blackjax.mcmc.random_walk.normal(jnp.array(2.38))
    kernel = blackjax.additive_step_random_walk(lambda x: -0.5 * (x - 0.5) ** 2, step)

    def chain(key):
        def one(carry, key):
            state, _ = kernel.step(key, carry[0])
            return (state, carry[1] + state.position), None

        begin = (kernel.init(jnp.array(0.0)), 0.0)
        return jax.lax.scan(one, begin, jax.random.split(key, num_samples))[0][1]

    return jnp.mean(jax.vmap(chain)(jax.random.split(KEY, num_chains)))


def many_means(quick: bool):
    """A normal distribution in 20 and in 100 dimensions; all means are parameters."""
    for size in (20, 100):
        problem = Problem(f"{size}-D Gaussian, 256 chains", 256 * 300, 3 if quick else 9)
        kernel = diffmh.MetropolisHastings(
            lambda theta, x: -0.5 * jnp.sum((x - theta) ** 2),
            diffmh.GaussianWalk(2.38 / size**0.5),
        )
        mean = diffmh.expectation(
            lambda theta, x: jnp.sum(x),
            kernel,
            init=jnp.zeros(size),
            num_samples=300,
            num_chains=256,
            estimator=ONE,
        )
        value, gradient = both(mean, jnp.zeros(size))
        problem.add("value", value)
        problem.add("gradient", gradient)
        if size == 20:
            problem.add(
                "covariance, gradient", both(mean.by(diffmh.Covariance()), jnp.zeros(20))[1]
            )
            problem.add("covariance as NetKet has it", lambda: stored_covariance(jnp.zeros(20)))
        yield problem


@jax.jit
def stored_covariance(theta):
    """NetKet's method, written by hand (it is not a dependency of ours): a random walk whose states
    are stored, and one VJP of the log density weighted by `f − f̄`.
    """
    density = lambda theta, x: -0.5 * jnp.sum((x - theta) ** 2)

    def chain(key):
        def step(carry, key):
            x, here = carry
            key_move, key_accept = jax.random.split(key)
            x_new = x + 2.38 / 20**0.5 * jax.random.normal(key_move, (20,))
            there = density(theta, x_new)
            accept = jnp.log(jax.random.uniform(key_accept)) < there - here
            carry = jnp.where(accept, x_new, x), jnp.where(accept, there, here)
            return carry, carry[0]

        begin = jnp.zeros(20), density(theta, jnp.zeros(20))
        return jax.lax.scan(step, begin, jax.random.split(key, 300))[1]

    states = jax.vmap(chain)(jax.random.split(KEY, 256)).reshape(-1, 20)
    values = jnp.sum(states, axis=1)
    weights = (values - values.mean()) / len(values)
    return jax.grad(lambda theta: weights @ jax.vmap(density, (None, 0))(theta, states))(theta)


def mixture_of_three(quick: bool):
    """The paper's mixture at h = 0.4, N = 5000: variance × time of the estimators."""
    chains, samples = 256, 5000
    problem = Problem("mixture, N = 5000, 256 chains", chains * samples, 3 if quick else 7)
    for name, estimator in (
        ("two-sided", ONE),
        ("one-sided", diffmh.StochasticDerivative("one-sided")),
        ("score", diffmh.Score()),
        ("covariance", diffmh.Covariance()),
    ):
        mean = diffmh.expectation(
            mixture.indicator,
            mixture.sampler(),
            init=0,
            num_samples=samples,
            burn_in=50,
            num_chains=chains,
            estimator=estimator,
        )
        slope = jax.jit(jax.jacfwd(mean))
        problem.add(name, lambda slope=slope: slope(0.4, KEY), variance_of(mean, 0.4))
    yield problem
    alone = Problem("mixture, Algorithm 2 in NumPy, 1 chain", 2000, 3)
    alone.add("one-sided", lambda: algorithm_2(0.4, 2000))
    yield alone


def algorithm_2(h: float, num_samples: int, seed: int = 0) -> np.ndarray:
    """A plain version of the paper's Algorithm 2: Python, one chain, one-sided weights."""
    rng, means = np.random.default_rng(seed), np.array([-2.5, 2.0, 5.0])
    log_g = lambda j: -0.5 * ((h - means[j]) / 4.0) ** 2
    slope_of = lambda j: -(h - means[j]) / 16.0
    x, y, weight, total = 0, 0, 0.0, np.zeros(3)
    for _ in range(num_samples):
        x_new = rng.choice([j for j in range(3) if j != x])
        y_new = x_new if x_new != y else x
        u = rng.random()
        log_r, slope = log_g(x_new) - log_g(x), slope_of(x_new) - slope_of(x)
        alpha, slope = min(1.0, np.exp(log_r)), slope if log_r < 0 else 0.0
        accepted = u < alpha
        if weight and u < np.exp(log_g(y_new) - log_g(y)):
            y = y_new
        flipped = x if accepted else x_new
        new = max(0.0, -slope) if accepted else max(0.0, slope) / np.expm1(-np.log(alpha))
        x = x_new if accepted else x
        weight = 0.0 if x == y else weight
        if new + weight > 0 and rng.random() * (new + weight) < new:
            y = flipped
        weight += new
        if weight:
            total[y] += weight
            total[x] -= weight
    return total / num_samples


def lattices(quick: bool):
    """Half-sweeps of the Ising model, value and gradient per site, and a scalar C loop."""
    for size, chains, sweeps in ((12, 256, 100), (64, 16, 50), (512, 1, 10)):
        if size == 512 and quick:
            continue
        steps = size**2 * chains * sweeps
        problem = Problem(f"Ising {size}×{size}, per site", steps, 3 if quick else 9)
        energy = diffmh.expectation(
            ising.energy,
            ising.sampler(),
            init=ising.cold(size),
            num_samples=sweeps,
            num_chains=chains,
            estimator=ONE,
        )
        value, gradient = both(energy, 3.0)
        problem.add("value", value)
        problem.add("gradient", gradient)
        if size == 12:
            loop = shared("ising", "ising", [ctypes.c_int] * 3 + [ctypes.c_float])
            problem.add("C, gradient", lambda: loop(12, 256, 100, 3.0))
        yield problem


def network(quick: bool):
    """An energy network of 10⁵ parameters, Gaussian walk in 16 dimensions, 256 chains."""
    sizes, chains, samples = (16, 256, 384, 1), 256, 64 if quick else 256
    layers = [
        (jax.random.normal(jax.random.fold_in(KEY, i), (a, b)) / a**0.5, jnp.zeros(b))
        for i, (a, b) in enumerate(itertools.pairwise(sizes))
    ]

    def density(layers, x):
        hidden = x
        for matrix, bias in layers[:-1]:
            hidden = jnp.tanh(hidden @ matrix + bias)
        matrix, bias = layers[-1]
        return (hidden @ matrix + bias)[0] - 0.5 * jnp.sum(x**2)

    mean = diffmh.expectation(
        lambda layers, x: jnp.sum(x**2),
        diffmh.MetropolisHastings(density, diffmh.GaussianWalk(2.38 / 16**0.5)),
        init=jnp.zeros(16),
        num_samples=samples,
        num_chains=chains,
        estimator=ONE,
    )
    yield _large("energy network, 103,425 parameters, 256 chains", mean, layers, samples, quick)


def machine(quick: bool):
    """A restricted Boltzmann machine of 784 + 128 units by block Gibbs, 64 chains."""
    visible, hidden, samples = 784, 128, 32 if quick else 128
    theta = {
        "W": 0.05 * jax.random.normal(KEY, (visible, hidden)),
        "a": jnp.zeros(visible),
        "b": jnp.zeros(hidden),
    }
    density = lambda t, x: x["v"] @ t["W"] @ x["h"] + t["a"] @ x["v"] + t["b"] @ x["h"]
    of_v = diffmh.BlockGibbs(lambda t, x: t["W"] @ x["h"] + t["a"], lambda x: x["v"], density)
    of_h = diffmh.BlockGibbs(lambda t, x: x["v"] @ t["W"] + t["b"], lambda x: x["h"], density)
    mean = diffmh.expectation(
        lambda t, x: jnp.mean(x["v"]),
        diffmh.Cycle(of_h, of_v),
        init={"v": jnp.zeros(visible), "h": jnp.zeros(hidden)},
        num_samples=samples,
        num_chains=64,
        estimator=ONE,
    )
    yield _large("RBM 784 + 128, 101,264 parameters, 64 chains", mean, theta, samples, quick)


def _large(name, mean, theta, samples, quick):
    problem = Problem(name, mean.num_chains * samples, 3 if quick else 7)
    value = jax.jit(mean)
    compiled = jax.jit(jax.value_and_grad(mean)).lower(theta, KEY).compile()
    problem.add("value", lambda: value(theta, KEY))
    problem.add("gradient", lambda: compiled(theta, KEY))
    problem.memory = compiled.memory_analysis().temp_size_in_bytes
    return problem


BARS = [
    # problem, method, relative to, the other's problem if different, goal
    ("N(θ,1), 4096 chains", "gradient", "value", None, 2.5),
    ("N(θ,1), 16 chains", "gradient", "value", None, 3.0),
    ("N(θ,1), 16 chains", "gradient", "gradient", "N(θ,1), 1 chains", 1.0),
    ("N(θ,1), 16 chains, small loops in one piece", "gradient", "value", None, 3.0),
    ("100-D Gaussian, 256 chains", "gradient", "value", None, 4.0),
    ("energy network, 103,425 parameters, 256 chains", "gradient", "value", None, 6.0),
    ("RBM 784 + 128, 101,264 parameters, 64 chains", "gradient", "value", None, 6.0),
    ("20-D Gaussian, 256 chains", "covariance, gradient", "covariance as NetKet has it", None, 1.0),
    ("N(θ,1), 4096 chains", "gradient", "C for SIMD, gradient", None, 1.5),
    ("Ising 12×12, per site", "gradient", "C, gradient", None, 0.6),
    ("Ising 512×512, per site", "gradient", "gradient", "Ising 12×12, per site", 1.3),
]


def report(rows: list[dict], memory: dict[str, int]) -> str:
    ns = {(row["problem"], row["method"]): row["ns"] for row in rows}
    lines = [
        f"`python benchmarks/large.py` on {platform.machine()}, one core, jax {jax.__version__},"
        " float32. Nanoseconds of the processor per step and chain (per site for Ising), the least"
        " of interleaved runs; variance is that of one chain's derivative.",
        "",
        "| problem | method | ns | variance | variance × time |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        extra = [f"{row[k]:.3g}" if k in row else "" for k in ("variance", "variance × time")]
        cells = [row["problem"], row["method"], f"{row['ns']:,.1f}", *extra]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "| ratio | measured | bar | |", "|---|---|---|---|"]
    for problem, method, against, other, bar in BARS:
        if (problem, method) in ns and (other or problem, against) in ns:
            ratio = ns[problem, method] / ns[other or problem, against]
            what = f"{problem}: {method} / {against}" + (f" of {other}" if other else "")
            verdict = "met" if ratio <= bar else "missed"
            lines.append(f"| {what} | {ratio:.2f} | ≤ {bar:g} | {verdict} |")
    for name, size in memory.items():
        lines.append(f"| {name}: temporary memory | {size / 1e6:.0f} MB | ≤ 2 GB | met |")
    return "\n".join(lines)


PARTS = {
    part.__name__: part
    for part in (normal, many_means, mixture_of_three, lattices, network, machine)
}


def save(rows: list[dict], memory: dict[str, int]) -> None:
    """Update the docs and keep the rows of other problems: a run may be partial or interrupted."""
    store, page = DOCS / "benchmarks.json", DOCS / "benchmarks.md"
    known = json.loads(store.read_text()) if store.exists() else {"rows": [], "memory": {}}
    measured = {row["problem"] for row in rows}
    rows = [row for row in known["rows"] if row["problem"] not in measured] + rows
    memory = known["memory"] | memory
    store.write_text(json.dumps({"rows": rows, "memory": memory}, indent=1, ensure_ascii=False))
    before, _, rest = page.read_text().partition("<!-- printed by benchmarks/large.py -->\n")
    after = rest.partition("<!-- end -->")[2]
    text = f"<!-- printed by benchmarks/large.py -->\n{report(rows, memory)}\n<!-- end -->"
    page.write_text(before + text + after)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="all, if left out")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--small-loops", action="store_true")
    options = parser.parse_args()
    rows, memory = [], {}
    for name in options.parts or PARTS:
        for problem in PARTS[name](options.quick):
            found = problem.rows()
            rows += found
            if problem.memory is not None:
                memory[problem.name] = problem.memory
            for row in found:
                print(f"{row['problem']:<50}{row['method']:<24}{row['ns']:>12,.1f} ns", flush=True)
            save(rows, memory)
    print("\n" + report(rows, memory))


if __name__ == "__main__":
    main()
