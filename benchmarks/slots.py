"""The price of K alternatives, of few chains and of lattices of every size, against the bars of
`docs/speed.md`:

    taskset -c 0 python benchmarks/slots.py [--small-loops] [PART ...]
    taskset -c 0 python benchmarks/slots.py (--default | --held-out) [--only NAME] [--up-to K]

Parts: normal, few, mixture, lattices, births, and first_gradient, which measures compile time and
memory over K. All programs of a part are interleaved in one process; times are the least of
several, of the processor. `--default` runs the ten problems of `docs/honest.md` instead, at 1, 16
and 512 chains: variance × time of the default over the least of K = 1 … 16; `--held-out` five
others, which took no part in the choice of the default. With them `--only NAME` runs a problem by
part of its name, and `--up-to 8` leaves out K = 16.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import math
import os
import sys
import time

if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})

import diffmh

if "--small-loops" in sys.argv:
    diffmh.configure(small_loops=True)

import jax
import jax.numpy as jnp
import numpy as np
from timing import best_times, row

from diffmh.models import gaussian, ising, mixture

KEY = jax.random.key(0)
COUNTS = (1, 2, 4, 8)
ALL_COUNTS = (*COUNTS, 16)
# The bars are for these numbers of chains; a single chain is measured beside them.
CHAINS = (16, 512)
REPEATS = 9


def total_of(f, kernel, start, num_chains, num_samples, count):
    """The sum of an expectation's entries as a function of θ, with K alternatives."""
    mean = diffmh.expectation(
        f,
        kernel,
        init=start,
        num_samples=num_samples,
        num_chains=num_chains,
        estimator=diffmh.StochasticDerivative(alternatives=count),
    )
    return lambda theta: sum(jnp.sum(leaf) for leaf in jax.tree.leaves(mean(theta, KEY)))


def programs(f, kernel, start, theta, num_chains, num_samples, counts=COUNTS):
    """The value, and the gradient with each K, by name."""
    found = {}
    for count in counts:
        total = total_of(f, kernel, start, num_chains, num_samples, count)
        gradient = jax.jit(jax.value_and_grad(total))
        found[count] = lambda gradient=gradient: gradient(theta)
        if count == 1:
            value = jax.jit(total)
            found["value"] = lambda value=value: value(theta)
    return found


def ratios(name: str, times: dict, bars: dict[int, float], to_value: float | None):
    """The times of one problem, K against K = 1 and K = 1 against the value, with their bars."""
    for count in COUNTS[1:]:
        if count in times:
            yield against(f"{name}: K = {count} / K = 1", times[count] / times[1], bars.get(count))
    yield against(f"{name}: gradient at K = 1 / value", times[1] / times["value"], to_value)


def against(what: str, ratio: float, bar: float | None) -> str:
    if bar is None:
        return f"{what:<66}{ratio:>14.2f}"
    return row(what, f"{ratio:.2f}", f"≤ {bar:g}", ratio <= bar)


def normal():
    given = (lambda theta, x: x, gaussian.sampler(), 0.0, 0.5)
    times = best_times(programs(*given, 4096, 200), REPEATS, time.process_time)
    yield from ratios("N(θ,1), 4096 chains", times, {2: 1.35, 4: 1.9, 8: 3.2}, 2.3)


def few():
    given = (lambda theta, x: x, gaussian.sampler(), 0.0, 0.5)
    times = best_times(programs(*given, 16, 4000, (1, 4, 8)), REPEATS, time.process_time)
    to_value = 3.0 if "--small-loops" in sys.argv else 4.0
    yield from ratios("N(θ,1), 16 chains", times, {4: 1.1, 8: 1.25}, to_value)


def mixtures():
    given = (mixture.indicator, mixture.sampler(), 0, 0.4)
    times = best_times(programs(*given, 16, 4000, (1, 4)), REPEATS, time.process_time)
    yield from ratios("mixture, 16 chains", times, {4: 1.5}, None)


def lattices():
    """Per site, all sizes interleaved; K on the smallest."""
    sizes = {(12, 256): 40, (64, 16): 10, (512, 2): 2}
    functions = {}
    for (size, chains), steps in sizes.items():
        counts = COUNTS if size == 12 else (1,)
        given = (ising.energy, ising.sampler(), ising.cold(size), 3.0)
        for name, run in programs(*given, chains, steps, counts).items():
            functions[size, name] = run
    times = best_times(functions, REPEATS, time.process_time)
    of_small = {name: times[12, name] for name in (*COUNTS, "value")}
    yield from ratios("Ising 12×12, 256 chains", of_small, {2: 1.6, 4: 2.5, 8: 4.0}, None)
    per_site = {
        (size, name): 1e9 * seconds / (steps * chains * size**2)
        for (size, chains), steps in sizes.items()
        for (other, name), seconds in times.items()
        if other == size
    }
    for size, chains in list(sizes)[1:]:
        what = f"Ising {size}×{size}, {chains} chains"
        ratio = per_site[size, 1] / per_site[12, 1]
        ns = f"{per_site[size, 1]:.1f} ns, {ratio:.2f}"
        yield row(f"{what}: gradient per site / 12×12", ns, "≤ 1.5", ratio <= 1.5)
        ratio = per_site[size, 1] / per_site[size, "value"]
        yield row(f"{what}: gradient / value", f"{ratio:.2f}", "≤ 3", ratio <= 3)


def births():
    """A Boltzmann machine of 136 parameters and as many outputs."""
    from sizes import programs as machine

    functions = {}
    for count in COUNTS:
        value, functions[count] = machine(16, 136, True, count)
        functions.setdefault("value", value)
    times = best_times(functions, REPEATS, time.process_time)
    yield from ratios("births, 136 parameters", times, {2: 2.0, 4: 3.0}, None)


def first_gradient():
    """The cost of a first gradient before it runs: compile time and temporary memory over K."""
    problems = {
        "N(θ,1), 16 chains": (lambda t, x: x, gaussian.sampler(), 0.0, 16, 4000),
        "mixture, 16 chains": (mixture.indicator, mixture.sampler(), 0, 16, 4000),
        "Ising 12×12, 256 chains": (ising.energy, ising.sampler(), ising.cold(12), 256, 40),
    }
    for name, given in problems.items():
        start, num_chains = jax.tree.map(jnp.asarray, given[2]), given[3]
        chosen = diffmh.StochasticDerivative().with_alternatives(1, num_chains, start).alternatives
        seconds, memory = dict.fromkeys(ALL_COUNTS, math.inf), {}
        for _, count in itertools.product(range(3), ALL_COUNTS):
            gradient = jax.jit(jax.value_and_grad(total_of(*given, count)))
            began = time.process_time()
            compiled = gradient.lower(0.5).compile()
            seconds[count] = min(seconds[count], time.process_time() - began)
            memory[count] = compiled.memory_analysis().temp_size_in_bytes
        for count in ALL_COUNTS:
            print(f"{name}: K = {count}: {seconds[count]:.2f} s, {memory[count] / 1e3:.0f} kB")
        ratio = seconds[chosen] / seconds[1]
        what = f"{name}: compile time of the default / K = 1"
        yield row(what, f"{ratio:.2f}", "≤ 1.2", ratio <= 1.2)


PARTS = {
    "normal": normal,
    "few": few,
    "mixture": mixtures,
    "lattices": lattices,
    "births": births,
    "first_gradient": first_gradient,
}


def default(held_out: bool, only: str, most: int):
    """Variance × time of each K on the ten problems, or five others, relative to the least."""
    from compare import problems as ten
    from problems import held_out as five

    problems = [(problem, False) for problem in five()] if held_out else ten()
    counts = [count for count in ALL_COUNTS if count <= most]
    excess = []
    for problem, composed in problems:
        if only not in problem.name:
            continue
        costs = costs_of(problem, composed, counts)
        for num_chains, of in costs.items():
            chosen = default_count(dataclasses.replace(problem, num_chains=num_chains))
            least = min(of.values())
            if num_chains in CHAINS:
                excess.append((of[chosen] / least, of[1] / least))
            line = ", ".join(f"K = {count}: {cost / least:.2f}" for count, cost in of.items())
            print(f"{problem.name}, {num_chains} chains: {line}; default {chosen}", flush=True)
    now, before = np.array(excess).T
    mean = lambda ratios: math.exp(np.mean(np.log(ratios)))
    yield row("default / least, geometric mean", f"{mean(now):.2f}", "≤ 1.15", mean(now) <= 1.15)
    yield row("default / least, worst", f"{now.max():.2f}", "≤ 1.6", now.max() <= 1.6)
    yield f"K = 1 everywhere: geometric mean {mean(before):.2f}, worst {before.max():.2f}"


def costs_of(problem, composed: bool, counts: list[int]) -> dict[int, dict[int, float]]:
    """For 1, 16 and 512 chains variance × time of each K, the geometric mean over entries. The
    variances are those of 512 chains, which are independent, for all.
    """
    runs = {}
    # `compose` needs two chains.
    sizes = CHAINS if composed else (1, *CHAINS)
    for num_chains, count in itertools.product(sizes, counts):
        estimator = diffmh.StochasticDerivative(alternatives=count)
        made = _made(dataclasses.replace(problem, num_chains=num_chains), estimator, composed)
        slope = jax.jit(jax.jacfwd(made.per_chain))
        runs[num_chains, count] = functools.partial(slope, problem.theta, KEY)
    times = best_times(runs, 5, time.process_time)
    variances = {}
    for count in counts:
        each = jax.tree.leaves(runs[512, count]())
        flat = np.concatenate([np.asarray(leaf, float).reshape(512, -1) for leaf in each], axis=1)
        spread = flat.var(axis=0, ddof=1)
        variances[count] = math.exp(np.mean(np.log(spread[spread > 0])))
    return {
        num_chains: {count: variances[count] * times[num_chains, count] for count in counts}
        for num_chains in sizes
    }


def default_count(problem) -> int:
    """The K that `alternatives=None` resolves to."""
    theta = jax.tree.map(jnp.asarray, problem.theta)
    return problem.expectation().applicable(theta, KEY)[0].alternatives


def _made(problem, estimator, composed):
    made = problem.expectation(estimator)
    return diffmh.compose(lambda h, p: mixture.entropy(p), made) if composed else made


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--small-loops", action="store_true", help="the switch of docs/speed.md")
    options.add_argument("--default", action="store_true", help="the ten problems")
    options.add_argument("--held-out", action="store_true", help="five other problems")
    options.add_argument("--only", default="", metavar="NAME", help="part of a problem's name")
    options.add_argument("--up-to", type=int, default=16, metavar="K", help="the largest K")
    options.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    given = options.parse_args()
    parts = [PARTS[name] for name in given.parts or PARTS]
    if given.default or given.held_out:
        parts = [lambda: default(given.held_out, given.only, given.up_to)]
    for part in parts:
        for line in part():
            print(line, flush=True)


if __name__ == "__main__":
    main()
