"""A proposal that is tuned by the chain's own gradient: its scale, its shape, and what it gains on
a target of two moons.

python examples/tune_proposal.py                        # writes tune_proposal.png
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpyro.diagnostics import effective_sample_size

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
    """Gaussian steps by a Cholesky factor, given by its three entries."""
    return diffmh.GaussianWalk(jnp.array([[factor[0], 0.0], [factor[1], factor[2]]]))


def moon(key):
    """One of the two, at random."""
    side = jax.random.rademacher(key, (), float)
    return jnp.array([1.4, -1.4]) * side


def tuned(density, start, key, **options):
    sampler = diffmh.MetropolisHastings(density, walk)
    optimizer = optax.adam(optax.exponential_decay(0.05, 300, 0.1))
    return diffmh.tune(sampler, start, key, num_iterations=300, optimizer=optimizer, **options)


def chains(density, factor, key, num_chains=32, num_samples=20_000):
    """Plain Metropolis–Hastings, to be judged by its effective sample size."""

    def step(x, key):
        key_propose, key_accept = jax.random.split(key)
        x_new = walk(factor).sample(key_propose, x)
        log_ratio = density(factor, x_new) - density(factor, x)
        x = jnp.where(jnp.log(jax.random.uniform(key_accept)) < log_ratio, x_new, x)
        return x, x

    def chain(key):
        key_start, key_steps = jax.random.split(key)
        return jax.lax.scan(step, moon(key_start), jax.random.split(key_steps, num_samples))[1]

    return np.asarray(jax.jit(jax.vmap(chain))(jax.random.split(key, num_chains)))


def empirical(samples):
    """The factor that theory recommends for a Gaussian: 2.38/√d times the samples' covariance."""
    factor = np.linalg.cholesky(2.38**2 / 2 * np.cov(samples.reshape(-1, 2).T))
    return jnp.asarray(factor[np.tril_indices(2)], jnp.float32)


def figure(samples, factors):
    """The target's draws with one contour of each proposal around one of them."""
    figure, (ax,) = style.panels(4.2, height=4.0)
    points = samples.reshape(-1, 2)[::200]
    ax.scatter(*points.T, s=3, color=style.FAINT)
    angles = np.linspace(0, 2 * np.pi, 200)
    circle = np.stack([np.cos(angles), np.sin(angles)])
    colours = (style.GREY, style.AMBER, style.RED)
    for (name, factor), colour in zip(factors.items(), colours, strict=True):
        contour = np.asarray(walk(factor).scale) @ circle + np.array([[1.4], [-1.4]])
        ax.plot(*contour, color=colour, label=name)
    style.name(ax, "Two moons, and one standard deviation of the proposal", "x₁", "x₂")
    style.key(ax, loc="upper left")
    return figure


def main():
    key = jax.random.key(0)
    scale = diffmh.MetropolisHastings(normal, lambda scale: diffmh.GaussianWalk(scale))
    options = dict(num_samples=2_000, burn_in=20, num_iterations=400)
    path = diffmh.tune(scale, 1.5, key, init=0.0, **options)
    print(f"N(0, 1): scale {float(path.average):.4f} (exact 2.4264), from 1.5 in 400 steps")

    path = tuned(correlated, jnp.array([1.0, 0.0, 1.0]), key, init=jnp.zeros(2), num_samples=1_000)
    print(f"N(0, C): Cholesky factor {np.round(path.average, 3)} (theory: 1.683, 0.841, 1.457)")

    start = jnp.array([1.0, 0.0, 1.0])
    path = tuned(two_moons, start, key, init=moon, num_samples=1_000)
    samples = chains(two_moons, start, jax.random.key(1))
    factors = {"start": start, "2.38/√d": empirical(samples), "tuned": path.average}
    for name, factor in factors.items():
        found = effective_sample_size(chains(two_moons, factor, jax.random.key(2)))
        print(f"two moons, {name}: factor {np.round(factor, 3)}, effective samples {found}")
    figure(samples, factors).savefig("tune_proposal.png", dpi=150)


if __name__ == "__main__":
    main()
