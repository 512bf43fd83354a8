"""Time per step over alternatives K, parameters P and outputs F, with weights and with births:
`docs/figures/sizes.png`, and the number of parameters from which births are used.

    python benchmarks/sizes.py [--quick | --full]

The problem is a Boltzmann machine of n spins, with one site proposed at a time. Its n (n + 1) / 2
couplings and fields are the parameters; the outputs are as many products of spins.
"""

from __future__ import annotations

import argparse
import pathlib
import time

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
    """The expectation of the first outputs, and slightly scattered parameters."""
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
    """The value, and the gradient of a scalar function of all outputs."""
    mean, theta = machine(num_spins, num_outputs, births, alternatives)
    loss = lambda theta: jnp.sum(mean(theta, KEY) ** 2)
    value, gradient = jax.jit(lambda theta: mean(theta, KEY)), jax.jit(jax.value_and_grad(loss))
    return lambda: value(theta), lambda: gradient(theta)


def per_step(cases, repeats):
    """Microseconds of CPU time per step of 64 chains for each case: for the value, which does not
    depend on how it is differentiated, and for the gradient.
    """
    functions = {}
    for spins, outputs, births, count in cases:
        value, gradient = programs(spins, outputs, births, count)
        functions.setdefault(("value", spins, outputs), value)
        functions["gradient", spins, outputs, births, count] = gradient
    best = best_times(functions, repeats, time.process_time)
    return {name: 1e6 * seconds / STEPS for name, seconds in best.items()}


def table(times, cases):
    print("  n    P    F  K  by        value  gradient   ratio     (µs per step of 64 chains)")
    for spins, outputs, births, count in cases:
        value = times["value", spins, outputs]
        gradient = times["gradient", spins, outputs, births, count]
        by = {True: "births", False: "weights", None: "default"}[births]
        print(
            f"{spins:>3} {spins * (spins + 1) // 2:>4} {outputs:>4} {count:>2}  {by:<8}"
            f"{value:>8.1f} {gradient:>9.1f} {gradient / value:>7.1f}"
        )


def bars(times):
    of = lambda count: times["gradient", 16, 136, None, count]
    for count, bar in ((2, 2.0), (4, 3.0)):
        ratio = of(count) / of(1)
        what = f"136 parameters × 136 outputs: K = {count} / K = 1"
        yield row(what, f"{ratio:.2f}", f"≤ {bar:g}", ratio <= bar)


def plot(times, sizes, counts, panels):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    parameters = [n * (n + 1) // 2 for n in sizes]
    figure, axes = plt.subplots(
        1,
        len(panels),
        figsize=(5.2 * len(panels), 3.8),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    styles = {False: ("--", "weights"), True: ("-", "births")}
    for axis, title in zip(axes[0], panels, strict=True):
        pairs = [(n, panels[title](n)) for n in sizes]
        for births, (style, name) in styles.items():
            for number, count in enumerate(counts):
                ys = [times["gradient", n, f, births, count] for n, f in pairs]
                label = f"gradient by {name}, K = {count}"
                axis.plot(parameters, ys, style, marker="o", ms=3, color=f"C{number}", label=label)
        ys = [times["value", n, f] for n, f in pairs]
        axis.plot(parameters, ys, ":", color="0.4", label="value")
        axis.set(xscale="log", yscale="log", xlabel="parameters P", title=title)
        axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel("µs per step of 64 chains")
    axes[0, 0].legend(fontsize=8)
    figure.savefig(FIGURE, dpi=150)
    print(f"\n{FIGURE.relative_to(FIGURE.parents[2])}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="136 × 136 only")
    parser.add_argument("--full", action="store_true", help="528 parameters, and one output too")
    options = parser.parse_args()
    default = [(16, 136, None, count) for count in (1, 2, 4)]
    if options.quick:
        times = per_step(default, 5)
        table(times, default)
        print("\n".join(["", *bars(times)]))
        return
    sizes, counts = (4, 8, 16, 32) if options.full else (4, 8, 16), (1, 4)
    panels = {"as many outputs as parameters": lambda n: n * (n + 1) // 2}
    if options.full:
        panels = {"one output": lambda n: 1} | panels
    cases = [
        (n, outputs(n), births, count)
        for n in sizes
        for outputs in panels.values()
        for births in (False, True)
        for count in counts
    ]
    times = per_step([*cases, *(default if options.full else ())], 5)
    table(times, cases)
    plot(times, sizes, counts, panels)
    if options.full:
        print("\n".join(["", *bars(times)]))


if __name__ == "__main__":
    main()
