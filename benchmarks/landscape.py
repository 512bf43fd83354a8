"""One picture of where a problem lies: the time of value and gradient over the number of chains, of
alternatives and of parameters, and over the size of the state, with the anchors that have them (a C
loop, C written for SIMD, BlackJAX, NetKet's method): `docs/figures/landscape.png`.

    python benchmarks/landscape.py [--quick]

K is 1 except where it varies. All programs of a panel are interleaved in one process on one core;
times are the least of several, of the processor.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
from large import DOCS, blackjax_mean, both, shared, stored_covariance
from matplotlib.ticker import LogLocator, NullLocator
from timing import best_times

import diffmh
from diffmh.models import gaussian, ising
from diffmh.plots import style

ONE = diffmh.StochasticDerivative(alternatives=1)
FIGURE = DOCS / "figures" / "landscape.png"
CHAINS = (1, 4, 16, 64, 256, 1024, 4096, 16_384, 65_536)
ALTERNATIVES = (1, 2, 4, 8, 16)
PARAMETERS = (1, 4, 16, 64, 256)
LATTICES = {4: 1024, 12: 256, 32: 32, 64: 16, 256: 2, 512: 2}
TICKS = {
    "chains": CHAINS[::2],
    "alternatives K": ALTERNATIVES,
    "parameters": PARAMETERS,
    "sites along an edge": (4, 12, 32, 64, 256),
}

Timed = dict[tuple[str, int], float]


def times_of(programs: dict[tuple[str, int], tuple[Callable, int]], repeats: int) -> Timed:
    """Nanoseconds per step, of programs with their numbers of steps."""
    runs = {name: run for name, (run, _) in programs.items()}
    best = best_times(runs, repeats, time.process_time)
    return {name: 1e9 * best[name] / steps for name, (_, steps) in programs.items()}


def normal_mean(num_chains: int, num_samples: int, alternatives: int = 1):
    return diffmh.expectation(
        lambda theta, x: x,
        gaussian.sampler(),
        init=0.0,
        num_samples=num_samples,
        num_chains=num_chains,
        estimator=diffmh.StochasticDerivative(alternatives=alternatives),
    )


def over_chains(quick: bool) -> Timed:
    """N(θ,1), per step and chain, beside BlackJAX's random walk and C."""
    programs = {}
    for chains in CHAINS[::2] if quick else CHAINS:
        samples = max(50, min(10_000, 2_000_000 // chains))
        steps = chains * samples
        value, gradient = both(normal_mean(chains, samples), 0.5)
        programs["value", chains] = value, steps
        programs["gradient", chains] = gradient, steps
        programs["BlackJAX, value", chains] = (
            lambda chains=chains, samples=samples: blackjax_mean(chains, samples),
            steps,
        )
    types = [ctypes.c_int, ctypes.c_int, ctypes.c_float, ctypes.c_float]
    loop = shared("normal", "normal", types, ("-ffast-math",))
    programs["C for SIMD, gradient", 4096] = lambda: loop(4096, 500, 0.5, 2.38), 4096 * 500
    return times_of(programs, 3 if quick else 7)


def over_alternatives(quick: bool) -> Timed:
    """The gradient of N(θ, 1), per step and chain."""
    programs = {}
    for chains, samples in ((16, 4000), (4096, 100)):
        for count in ALTERNATIVES:
            run = both(normal_mean(chains, samples, count), 0.5)[1]
            programs[f"{chains} chains", count] = run, chains * samples
    return times_of(programs, 3 if quick else 7)


def over_parameters(quick: bool) -> Timed:
    """The mean of a normal in d dimensions, with respect to its d means: per step and chain."""
    programs, chains, samples = {}, 256, 300
    for size in PARAMETERS[:3] if quick else PARAMETERS:
        density = lambda theta, x: -0.5 * jnp.sum((x - theta) ** 2)
        mean = diffmh.expectation(
            lambda theta, x: jnp.sum(x),
            diffmh.MetropolisHastings(density, diffmh.GaussianWalk(2.38 / size**0.5)),
            init=jnp.zeros(size),
            num_samples=samples,
            num_chains=chains,
            estimator=ONE,
        )
        value, gradient = both(mean, jnp.zeros(size))
        programs["value", size] = value, chains * samples
        programs["gradient", size] = gradient, chains * samples
    covariance = jax.jit(stored_covariance)
    programs["NetKet's method", 20] = lambda: covariance(jnp.zeros(20)), chains * samples
    return times_of(programs, 3 if quick else 7)


def over_sites(quick: bool) -> Timed:
    """The Ising model's half-sweeps, per site of all chains."""
    programs = {}
    for size, chains in list(LATTICES.items())[: 3 if quick else None]:
        sweeps = max(2, 2_000_000 // (chains * size**2))
        mean = diffmh.expectation(
            ising.energy, ising.sampler(), init=ising.cold(size), num_samples=sweeps,
            num_chains=chains, estimator=ONE,
        )  # fmt: skip
        value, gradient = both(mean, 3.0)
        steps = size**2 * chains * sweeps
        programs["value", size] = value, steps
        programs["gradient", size] = gradient, steps
    loop = shared("ising", "ising", [ctypes.c_int] * 3 + [ctypes.c_float])
    programs["C loop, gradient", 12] = lambda: loop(12, 256, 40, 3.0), 144 * 256 * 40
    return times_of(programs, 3 if quick else 7)


PANELS = {
    "chains": ("N(θ, 1): ns per step and chain", over_chains),
    "alternatives K": ("Gradient of N(θ, 1): ns per step and chain", over_alternatives),
    "parameters": ("Normal in d dimensions, 256 chains: ns per step and chain", over_parameters),
    "sites along an edge": ("Ising model: ns per site", over_sites),
}
# Where the best place that matplotlib finds touches a line.
KEYS = {"sites along an edge": {"loc": "upper right", "bbox_to_anchor": (1.0, 0.87)}}
COLOURS = {
    "value": style.INK,
    "gradient": style.RED,
    "16 chains": style.RED,
    "4096 chains": style.INK,
    "BlackJAX, value": style.BLUE,
    "NetKet's method": style.BLUE,
    "C for SIMD, gradient": style.GREEN,
    "C loop, gradient": style.GREEN,
}


def draw(found: dict[str, Timed]) -> None:
    figure = style.empty(9.6, 7.2)
    for place, (name, times) in enumerate(found.items()):
        axis = figure.add_subplot(2, 2, place + 1)
        style.plain([axis])
        axis.set(xscale="log", yscale="log")
        measured = sorted({size for _, size in times})
        for method in dict.fromkeys(method for method, _ in times):
            sizes = [size for other, size in times if other == method]
            ys = [times[method, size] for size in sizes]
            colour = COLOURS[method]
            if len(sizes) == 1:
                # An anchor at one size: a line across, marked where it was measured.
                axis.plot(measured, ys * len(measured), color=colour, lw=0.8, ls=":")
            axis.plot(sizes, ys, ".-", color=colour, label=method)
        axis.set_xticks(TICKS[name], [f"{size:,}" for size in TICKS[name]])
        axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.yaxis.set_major_formatter(lambda ns, _: f"{ns:,g}")
        axis.xaxis.set_minor_locator(NullLocator())
        axis.yaxis.set_minor_locator(NullLocator())
        axis.margins(y=0.12)
        style.name(axis, PANELS[name][0], name)
        style.key(axis, **KEYS.get(name, {}))
    figure.savefig(FIGURE, dpi=150)
    print(FIGURE.relative_to(DOCS.parent))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer sizes; draws nothing")
    quick = parser.parse_args().quick
    found = {}
    for name, (title, panel) in PANELS.items():
        found[name] = panel(quick)
        print(f"\n{title}, over the number of {name}")
        for (method, size), ns in found[name].items():
            print(f"  {method:<24}{size:>7}{ns:>10.2f}", flush=True)
    if not quick:
        draw(found)


if __name__ == "__main__":
    main()
