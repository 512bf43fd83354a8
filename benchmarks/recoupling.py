"""Recoupling time against dimension for every coupling of a Gaussian walk: a table and a figure.

One of two chains starts from a draw of the target, the other one accepted step away, as after a
flipped decision. The time is the number of steps that all pairs spent apart, divided by the number
of pairs that met. The targets are N(0, I) and an ellipse of scales 1 to 10. The walk is isotropic
with its best scale, 2.38 / √(Σ 1/σᵢ²). If few pairs meet within the given steps, the time is a
rough guess; if none do, it is a lower bound.

    python benchmarks/recoupling.py [--pairs 128] [--steps 10000] [--picture FILE]
"""

from __future__ import annotations

import argparse

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from timing import row

import diffmh
from diffmh import couplings
from diffmh.plots import style

DIMENSIONS = (1, 5, 20, 50, 100)


class Target(eqx.Module):
    """A centred Gaussian of diagonal covariance."""

    scales: jax.Array

    def log_density(self, x):
        return -0.5 * jnp.sum((x / self.scales) ** 2)

    def gradient(self, x):
        return -x / self.scales**2


def sphere(dimension: int) -> Target:
    return Target(jnp.ones(dimension))


def ellipse(dimension: int) -> Target:
    return Target(jnp.linspace(1.0, 10.0, dimension))


class Pair(eqx.Module):
    x: jax.Array
    y: jax.Array
    apart: jax.Array
    time: jax.Array


@eqx.filter_jit
def recoupling(target: Target, coupling, key, num_pairs: int, num_steps: int):
    """For each pair, the steps spent apart and True if the chains met."""
    scale = 2.38 / jnp.sqrt(jnp.sum(target.scales**-2.0))
    walk = diffmh.GaussianWalk(scale)

    def accept(uniform, x, x_new):
        return jnp.log(uniform) < target.log_density(x_new) - target.log_density(x)

    def birth(key):
        key_x, key_y = jax.random.split(key)
        x = target.scales * jax.random.normal(key_x, target.scales.shape)
        return Pair(x, walk.sample(key_y, x), jnp.array(True), jnp.zeros((), int))

    def step(key, pair: Pair) -> Pair:
        key_noise, key_couple, key_accept = jax.random.split(key, 3)
        noise = jax.tree.map(lambda leaf: leaf[0], walk.noise(key_noise, pair.x, 1))
        own = jax.tree.map(
            lambda leaf: leaf[0], couplings.coupling_noise(coupling, walk, key_couple, pair.x, 1)
        )
        x_new = walk.move(pair.x, noise)
        y_new = couplings.couple(coupling, walk, pair.x, x_new, pair.y, noise, own)
        uniform = jax.random.uniform(key_accept)
        x = jnp.where(accept(uniform, pair.x, x_new), x_new, pair.x)
        y = jnp.where(accept(uniform, pair.y, y_new), y_new, pair.y)
        return Pair(x, y, pair.apart & jnp.any(x != y), pair.time + pair.apart)

    def body(carry):
        index, pairs = carry
        keys = jax.random.split(jax.random.fold_in(key, index), num_pairs)
        return index + 1, jax.vmap(step)(keys, pairs)

    pairs = jax.vmap(birth)(jax.random.split(key, num_pairs))
    going = lambda carry: (carry[0] < num_steps) & jnp.any(carry[1].apart)
    _, pairs = jax.lax.while_loop(going, body, (1, pairs))
    return pairs.time, ~pairs.apart


def offered(target: Target):
    near = lambda far, distance: diffmh.TwoScale(far(target.gradient), distance=distance)
    return {
        "maximal reflection": diffmh.MaximalReflection(),
        "nearly maximal": diffmh.NearlyMaximal(),
        "two-scale, common numbers": diffmh.TwoScale(diffmh.CommonRandomNumbers()),
        "two-scale, gradient numbers": near(diffmh.GradientCommonRandomNumbers, 1.0),
        "two-scale, gradient reflection": near(diffmh.GradientReflection, 1.0),
        "the same, distance=2": near(diffmh.GradientReflection, 2.0),
    }


class Time(eqx.Module):
    """Steps apart per meeting, its error, and the fraction of pairs that met."""

    mean: float
    error: float
    met: float

    def __str__(self) -> str:
        if self.met == 0:
            return f"> {self.mean:.0f}"
        return f"{self.mean:.0f} ± {self.error:.0f}" + (
            f" ({self.met:.0%})" if self.met < 1 else ""
        )


def measured(target: Target, coupling, num_pairs: int, num_steps: int) -> Time:
    time, met = recoupling(target, coupling, jax.random.key(0), num_pairs, num_steps)
    meetings = int(np.sum(met))
    mean = float(np.sum(time)) / max(meetings, 1)
    return Time(mean, mean / max(meetings, 1) ** 0.5, meetings / num_pairs)


def figure(tables):
    """Time against dimension, a line for each coupling; hollow markers if fewer than half met."""
    drawn, axes = style.panels(*[4.2] * len(tables), height=3.9)
    colours = (style.INK, style.GREY, style.AMBER, style.GREEN, style.BLUE, style.RED)
    for ax, (name, table) in zip(axes, tables.items(), strict=True):
        for (label, times), colour in zip(table.items(), colours, strict=True):
            means = [time.mean for time in times]
            ax.loglog(DIMENSIONS, means, "-", color=colour, label=label, linewidth=1.2)
            for dimension, time in zip(DIMENSIONS, times, strict=True):
                inside = colour if time.met >= 0.5 else style.PAPER
                ax.plot(dimension, time.mean, "o", color=colour, markerfacecolor=inside, ms=4)
        ax.set_xticks(DIMENSIONS, [str(dimension) for dimension in DIMENSIONS])
        ax.minorticks_off()
        style.name(ax, name, "dimension", "steps to recouple")
    lines, labels = axes[0].get_legend_handles_labels()
    drawn.legend(lines, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=8.5)
    return drawn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=128)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--picture", default="recoupling_dimension.png")
    options = parser.parse_args()
    print(f"mean steps to recouple ± error (share of {options.pairs} pairs that met in")
    print(f"{options.steps} steps, where not all did); jax {jax.__version__}")
    tables = {}
    for name, make in (("N(0, I)", sphere), ("ellipse of scales 1 to 10", ellipse)):
        print(f"\n| {name} |" + "".join(f" d = {dimension} |" for dimension in DIMENSIONS))
        print("|---|" + "---|" * len(DIMENSIONS))
        tables[name] = {}
        for label in offered(make(1)):
            targets = [make(dimension) for dimension in DIMENSIONS]
            times = [
                measured(target, offered(target)[label], options.pairs, options.steps)
                for target in targets
            ]
            tables[name][label] = times
            print(f"| {label} |" + "".join(f" {time} |" for time in times), flush=True)
    at = tables["ellipse of scales 1 to 10"]
    fifty = {label: times[DIMENSIONS.index(50)].mean for label, times in at.items()}
    best = min(fifty, key=lambda label: fifty[label])
    gain = fifty["maximal reflection"] / fifty[best]
    print(row(f"\nellipse, d = 50: maximal reflection / {best}", f"{gain:.1f}", "≥ 2", gain >= 2))
    figure(tables).savefig(options.picture, dpi=150)


if __name__ == "__main__":
    main()
