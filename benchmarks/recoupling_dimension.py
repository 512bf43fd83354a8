"""Recoupling time against dimension for every coupling of a Gaussian walk: a table.

Two chains start one accepted step apart, where a flipped decision leaves them, from a draw of the
target; the time is the number of steps that all pairs spent apart over the number that met. The
targets are N(0, I) and an ellipse of scales 1 to 10; the walk is isotropic, of the scale that is
best for it, 2.38 / √(Σ 1/σᵢ²).

    python benchmarks/recoupling_dimension.py [--pairs 128] [--steps 20000]
"""

from __future__ import annotations

import argparse

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import diffmh
from diffmh import couplings

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
    """Steps spent apart, and whether they met, of each pair."""
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
    return {
        "maximal reflection": diffmh.MaximalReflection(),
        "nearly maximal": diffmh.NearlyMaximal(),
        "two-scale, common numbers": diffmh.TwoScale(diffmh.CommonRandomNumbers()),
        "two-scale, gradient numbers": diffmh.TwoScale(
            diffmh.GradientCommonRandomNumbers(target.gradient)
        ),
        "two-scale, gradient reflection": diffmh.TwoScale(
            diffmh.GradientReflection(target.gradient)
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=128)
    parser.add_argument("--steps", type=int, default=20_000)
    options = parser.parse_args()
    for name, make in (("N(0, I)", sphere), ("ellipse of scales 1 to 10", ellipse)):
        print(f"\n{name}: mean steps to recouple ± error, and the share of pairs that met")
        print(f"{'':32}" + "".join(f"{f'd = {dimension}':>20}" for dimension in DIMENSIONS))
        for label in offered(make(1)):
            cells = []
            for dimension in DIMENSIONS:
                target = make(dimension)
                time, met = recoupling(
                    target, offered(target)[label], jax.random.key(0), options.pairs, options.steps
                )
                meetings = int(np.sum(met))
                mean = float(np.sum(time)) / max(meetings, 1)
                error = mean / max(meetings, 1) ** 0.5
                cells.append(f"{mean:8.0f} ± {error:<5.0f}{meetings / options.pairs:4.0%}")
            print(f"{label:32}" + "".join(f"{cell:>20}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
