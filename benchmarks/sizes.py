"""Time per step over alternatives K, parameters P and outputs F, by weights and by births:
`docs/figures/sizes.png` and the number of parameters from which births are followed.

    python benchmarks/sizes.py [--quick]

The problem is a Boltzmann machine of n spins, one site proposed at a time: its n (n + 1) / 2
couplings and fields are the parameters, and as many products of spins the outputs.
"""

from __future__ import annotations

import argparse
import pathlib

import jax
import jax.numpy as jnp
from timing import best_times, row

import diffmh

KEY = jax.random.key(0)
CHAINS, STEPS = 64, 256
FIGURE = pathlib.Path(__file__).parent.parent / "docs" / "figures" / "sizes.png"


def statistics(s):
    """All products of two different spins, and the spins."""
    rows, columns = jnp.triu_indices(s.size, 1)
    return jnp.concatenate([s[rows] * s[columns], s])


def machine(num_spins, num_outputs, births, alternatives):
    """The expectation of the first outputs, and parameters that scatter a little."""
    density = lambda theta, s: theta @ statistics(s.astype(float))
    mean = diffmh.expectation(
        lambda theta, s: statistics(s.astype(float))[:num_outputs],
        diffmh.MetropolisHastings(density, diffmh.SpinFlip()),
        init=jnp.ones(num_spins, int),
        num_samples=STEPS,
        num_chains=CHAINS,
        estimator=diffmh.StochasticDerivative(alternatives=alternatives, births=births),
    )
    size = num_spins * (num_spins + 1) // 2
    return mean, 0.2 * jax.random.normal(KEY, (size,)) / num_spins**0.5


def programs(num_spins, num_outputs, births, alternatives):
    """The value, and the gradient of a scalar of all outputs."""
    mean, theta = machine(num_spins, num_outputs, births, alternatives)
    loss = lambda theta: jnp.sum(mean(theta, KEY) ** 2)
    value, gradient = jax.jit(lambda theta: mean(theta, KEY)), jax.jit(jax.value_and_grad(loss))
    return lambda: value(theta), lambda: gradient(theta)


def per_step(cases, repeats):
    """Microseconds per step of 64 chains for each case: its value's, and its gradient's."""
    functions = {}
    for case in cases:
        functions["value", case], functions["gradient", case] = programs(*case)
    best = best_times(functions, repeats)
    return {name: 1e6 * seconds / STEPS for name, seconds in best.items()}


def table(times, cases):
    print("  n    P    F  K  by        value  gradient   ratio     (µs per step of 64 chains)")
    for spins, outputs, births, count in cases:
        case = (spins, outputs, births, count)
        value, gradient = times["value", case], times["gradient", case]
        by = "births" if births else "weights"
        print(
            f"{spins:>3} {spins * (spins + 1) // 2:>4} {outputs:>4} {count:>2}  {by:<8}"
            f"{value:>8.1f} {gradient:>9.1f} {gradient / value:>7.1f}"
        )


def bars(times):
    of = lambda count: times["gradient", (16, 136, None, count)]
    for count, bar in ((2, 2.0), (4, 3.0)):
        ratio = of(count) / of(1)
        what = f"136 parameters × 136 outputs: K = {count} / K = 1"
        yield row(what, f"{ratio:.2f}", f"≤ {bar:g}", ratio <= bar)


def plot(times, sizes, counts):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(11, 3.4), sharey=True, layout="constrained")
    styles = {False: ("--", "weights"), True: ("-", "births")}
    for axis, all_outputs in zip(axes, (False, True), strict=False):
        for births, (style, name) in styles.items():
            for number, count in enumerate(counts):
                parameters = [n * (n + 1) // 2 for n in sizes]
                outputs = [p if all_outputs else 1 for p in parameters]
                cases = [(n, f, births, count) for n, f in zip(sizes, outputs, strict=True)]
                if all(("gradient", case) in times for case in cases):
                    ys = [times["gradient", case] for case in cases]
                    label = f"{name}, K = {count}"
                    axis.plot(parameters, ys, style, marker="o", ms=3, color=f"C{number}", label=label)
        value = [times["value", (n, 1, True, 1)] for n in sizes]
        axis.plot([n * (n + 1) // 2 for n in sizes], value, ":", color="0.4", label="value")
        axis.set(xscale="log", yscale="log", xlabel="parameters P")
        axis.set_title("one output" if not all_outputs else "as many outputs as parameters")
    largest = max(sizes)
    parameters = largest * (largest + 1) // 2
    for births, (style, name) in styles.items():
        for outputs, colour in ((1, "C4"), (parameters, "C5")):
            cases = [(largest, outputs, births, count) for count in counts]
            if all(("gradient", case) in times for case in cases):
                ys = [times["gradient", case] for case in cases]
                axes[2].plot(
                    counts, ys, style, marker="o", ms=3, color=colour, label=f"{name}, F = {outputs}"
                )
    axes[2].set(xscale="log", xlabel="alternatives K", title=f"{parameters} parameters")
    axes[0].set_ylabel("µs per step of 64 chains")
    for axis in axes:
        axis.legend(fontsize=7)
        axis.grid(alpha=0.3)
    FIGURE.parent.mkdir(exist_ok=True)
    figure.savefig(FIGURE, dpi=150)
    print(f"\n{FIGURE}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    default = [(16, 136, None, count) for count in (1, 2, 4)]
    if quick:
        times = per_step(default, 5)
        table(times, default)
        print("\n".join(["", *bars(times)]))
        return
    sizes, counts = (3, 8, 16, 32), (1, 2, 4)
    cases = [
        (n, outputs, births, count)
        for n in sizes
        for outputs in (1, n * (n + 1) // 2)
        for births in (False, True)
        for count in counts
    ]
    times = per_step([*default, *cases], 5)
    table(times, cases)
    plot(times, sizes, counts)
    print("\n".join(["", *bars(times)]))


if __name__ == "__main__":
    main()
