"""Tune a proposal with the chain's own gradient: its scale, its shape, and the gain on a target
with two moons.

python examples/tune_proposal.py                        # writes tune_proposal.png
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from arviz_stats.base import array_stats

import diffmh
from diffmh.plots import style


def normal(scale, x):
    return -0.5 * x**2


def correlated(factor, x):
    """N(0, C) with C = [[1, ½], [½, 1]]."""
    return -(2 / 3) * (x[0] ** 2 - x[0] * x[1] + x[1] ** 2)


def two_moons(factor, x):
    radius = jnp.sqrt(jnp.sum(x**2) + 1e-12)
    across = 0.5 * x[0] - 0.5 * x[1]
    sides = -0.5 * jnp.stack([(across + 2) / 0.6, (across - 2) / 0.6]) ** 2
    return -3.125 * (radius - 2) ** 2 + jax.nn.logsumexp(sides)


def walk(factor):
    """Gaussian steps with a Cholesky factor, given by its three entries."""
    return diffmh.GaussianWalk(jnp.array([[factor[0], 0.0], [factor[1], factor[2]]]))


class Leaps(diffmh.extend.Proposal):
    """A leap to one side or the other plus a Gaussian step: `x' = x ± leap + L z`. No Gaussian walk
    suits both moons. This is an example of your own proposal with parameters to tune.
    """

    leap: jax.Array
    steps: diffmh.GaussianWalk
    symmetric: bool = True

    def sample(self, key, x):
        key_side, key_step = jax.random.split(key)
        side = jax.random.rademacher(key_side, (), float)
        return x + side * self.leap + self.steps.colour(jax.random.normal(key_step, (2,)))

    def log_prob(self, x, x_new):
        sides = [self.steps.log_prob(x + side * self.leap, x_new) for side in (-1.0, 1.0)]
        return jax.nn.logsumexp(jnp.stack(sides)) - jnp.log(2.0)


def leaps(theta):
    return Leaps(theta["leap"], walk(theta["factor"]))


def moon(key):
    """A point on one of the two moons, at random."""
    side = jax.random.rademacher(key, (), float)
    return jnp.array([1.4, -1.4]) * side


def tuned(density, propose, start, key, num_iterations=300, **options):
    sampler = diffmh.MetropolisHastings(density, propose)
    optimizer = optax.adam(optax.exponential_decay(0.05, num_iterations, 0.1))
    options |= dict(num_iterations=num_iterations, optimizer=optimizer)
    return diffmh.tune(sampler, start, key, **options)


def chains(density, proposal, key, num_chains=32, num_samples=20_000):
    """Plain Metropolis with a symmetric proposal, to measure its effective sample size."""

    def step(x, key):
        key_propose, key_accept = jax.random.split(key)
        x_new = proposal.sample(key_propose, x)
        log_ratio = density(None, x_new) - density(None, x)
        x = jnp.where(jnp.log(jax.random.uniform(key_accept)) < log_ratio, x_new, x)
        return x, x

    def chain(key):
        key_start, key_steps = jax.random.split(key)
        return jax.lax.scan(step, moon(key_start), jax.random.split(key_steps, num_samples))[1]

    return np.asarray(jax.jit(jax.vmap(chain))(jax.random.split(key, num_chains)))


def bulk(proposal):
    """ArviZ's bulk effective sample size of each coordinate."""
    draws = chains(two_moons, proposal, jax.random.key(2))
    return np.asarray(array_stats.ess(draws, chain_axis=0, draw_axis=1, method="bulk"))


def empirical(samples):
    """The factor that theory recommends for a Gaussian: 2.38/√d times the samples' covariance."""
    factor = np.linalg.cholesky(2.38**2 / 2 * np.cov(samples.reshape(-1, 2).T))
    return jnp.asarray(factor[np.tril_indices(2)], jnp.float32)


def figure(samples, proposals):
    """The target's draws with contours of each proposal's density from a point on one moon."""
    figure, axes = style.panels(*[3.2] * len(proposals), height=3.2)
    points, grid = samples.reshape(-1, 2)[::200], np.linspace(-5, 5, 121)
    places = jnp.stack(jnp.meshgrid(grid, grid), axis=-1)
    for ax, (name, proposal) in zip(axes, proposals.items(), strict=True):
        ax.scatter(*points.T, s=2, color=style.FAINT)
        density = jnp.vectorize(
            lambda x, proposal=proposal: proposal.log_prob(jnp.array([1.4, -1.4]), x),
            signature="(d)->()",
        )(places)
        levels = float(density.max()) - np.array([2.0, 0.5])
        ax.contour(grid, grid, density, levels, colors=style.RED, linewidths=1)
        ax.plot(1.4, -1.4, ".", color=style.INK)
        style.name(ax, name, "x₁", "x₂")
    return figure


def main():
    key = jax.random.key(0)
    scale = diffmh.MetropolisHastings(normal, lambda scale: diffmh.GaussianWalk(scale))
    options = dict(num_samples=2_000, burn_in=20, num_iterations=400)
    path = diffmh.tune(scale, 1.5, key, init=0.0, **options)
    print(f"N(0, 1): scale {float(path.average):.4f} (exact 2.4264), from 1.5 in 400 steps")

    start = jnp.array([1.0, 0.0, 1.0])
    path = tuned(correlated, walk, start, key, init=jnp.zeros(2), num_samples=1_000)
    print(f"N(0, C): Cholesky factor {np.round(path.average, 3)} (theory: 1.683, 0.841, 1.457)")

    samples = chains(two_moons, walk(start), jax.random.key(1))
    theta = {"leap": jnp.array([2.0, -2.0]), "factor": 0.7 * start}
    # At lag 1 the best leap would go back and forth without progress.
    path = tuned(two_moons, leaps, theta, key, init=moon, num_samples=500, lag=10)
    plain = diffmh.MetropolisHastings(two_moons, walk(start))
    adapted = diffmh.adapt(plain, start, key, init=moon)
    proposals = {
        "before": leaps(theta),
        "2.38/√d times the covariance": walk(empirical(samples)),
        "adapt": adapted.kernel.proposal,
        "tuned": leaps(path.average),
    }
    found = {name: bulk(proposal) for name, proposal in proposals.items()}
    for name, size in found.items():
        print(f"two moons, {name}: bulk effective samples of 640,000: {np.round(size)}")
    rivals = [size for name, size in found.items() if name not in ("before", "tuned")]
    print(
        f"tuned / the better of its rivals: {np.round(found['tuned'] / np.max(rivals, axis=0), 2)}"
    )
    print(f"leap {np.round(path.average['leap'], 2)}, factor {np.round(path.average['factor'], 2)}")
    figure(samples, proposals).savefig("tune_proposal.png", dpi=150)


if __name__ == "__main__":
    main()
