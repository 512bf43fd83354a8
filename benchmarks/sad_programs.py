"""The six programs of the audit, in plain JAX: typical simulations."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from diffmh import sad


def epidemic(theta, key):
    """SIR among 1000 people, 100 steps: the number ever infected, given contact and recovery."""
    size = 1000

    def step(state, key):
        susceptible, infected = state
        key_infect, key_recover = jax.random.split(key)
        p = 1 - jnp.exp(-theta[0] * infected / size)
        new = sad.binomial(key_infect, susceptible, p)
        recovered = sad.binomial(key_recover, infected, theta[1])
        return (susceptible - new, infected + new - recovered), None

    start = (jnp.array(size - 10), jnp.array(10))
    (susceptible, _), _ = jax.lax.scan(step, start, jax.random.split(key, 100))
    return 1.0 * (size - susceptible)


def gridworld(theta, key):
    """A walk of 20 steps on 4 × 4 cells with a table of 64 logits; reward 1 at the far corner."""

    def step(cell, key):
        action = sad.categorical(key, theta.reshape(16, 4)[cell])
        row, column = cell // 4, cell % 4
        row = jnp.clip(row + jnp.array([-1, 1, 0, 0])[action], 0, 3)
        column = jnp.clip(column + jnp.array([0, 0, -1, 1])[action], 0, 3)
        cell = row * 4 + column
        return cell, 1.0 * (cell == 15)

    return jax.lax.scan(step, 0, jax.random.split(key, 20))[1].sum()


VAE_DATA = jnp.array([[1.0, 0, 1, 1, 0, 0, 1, 0], [0, 1, 0, 0, 1, 1, 0, 1]])


def autoencoder(theta, key):
    """The negative bound of a discrete VAE: 4 binary latents, 8 pixels, 104 parameters."""
    encoder, decoder = theta[:36].reshape(4, 9), theta[36:72].reshape(4, 9)
    weights, bias = theta[72:104].reshape(8, 4), decoder[:, 8]
    logits = encoder[:, :8] @ VAE_DATA.T + encoder[:, 8:] + 0.1 * decoder[:, :8] @ VAE_DATA.T
    p = jax.nn.sigmoid(logits)
    latent = 1.0 * sad.bernoulli(key, p)
    pixels = weights @ latent + 0.1 * bias.sum()
    reconstruction = jnp.sum(jax.nn.softplus(pixels) - VAE_DATA.T * pixels)
    safe = jnp.clip(p, 1e-6, 1 - 1e-6)
    divergence = safe * jnp.log(2 * safe) + (1 - safe) * jnp.log(2 * (1 - safe))
    return reconstruction + divergence.sum()


def chances_of_life(theta, board):
    """The probability of each cell to live in the next generation."""
    shifts = [(i, j) for i in (-1, 0, 1) for j in (-1, 0, 1) if (i, j) != (0, 0)]
    around = sum(jnp.roll(board, shift, (0, 1)) for shift in shifts)
    survives = (board == 1) & ((around == 2) | (around == 3))
    is_born = (board == 0) & (around == 3)
    return jnp.where(survives, theta[0], jnp.where(is_born, theta[1], 0.02))


def life(theta, key):
    """A game of life on 8 × 8 cells, 10 steps, whose rules hold with probabilities."""
    start = (jax.random.uniform(jax.random.key(1), (8, 8)) < 0.4).astype(int)

    def step(board, key):
        return sad.bernoulli(key, chances_of_life(theta, board)).astype(int), None

    return 1.0 * jax.lax.scan(step, start, jax.random.split(key, 10))[0].sum()


def volatility(theta, key):
    """Counts whose rate depends on the last count: an integer GARCH of 50 steps, mean square."""

    def step(state, key):
        count, rate = state
        rate = theta[0] + theta[1] * count + theta[2] * rate
        count = sad.poisson(key, rate)
        return (count, rate), (1.0 * count) ** 2

    start = (jnp.array(1), jnp.array(1.0))
    return jax.lax.scan(step, start, jax.random.split(key, 50))[1].mean()


def walk(theta, key):
    """A mean-reverting random walk of 100 steps: its mean square."""

    def step(x, key):
        up = sad.bernoulli(key, jax.nn.sigmoid(theta[0] - theta[1] * x))
        x = x + jnp.where(up, 1, -1)
        return x, (1.0 * x) ** 2

    return jax.lax.scan(step, 0, jax.random.split(key, 100))[1].mean()


PROGRAMS = {
    "SIR, 100 steps": (epidemic, jnp.array([0.3, 0.1])),
    "gridworld, 64 parameters": (gridworld, 0.1 * jax.random.normal(jax.random.key(2), (64,))),
    "discrete VAE, 104 parameters": (
        autoencoder,
        0.3 * jax.random.normal(jax.random.key(3), (104,)),
    ),
    "game of life": (life, jnp.array([0.9, 0.8])),
    "igarch": (volatility, jnp.array([0.5, 0.4, 0.3])),
    "random walk": (walk, jnp.array([0.2, 0.1])),
}


def policy(theta, key):
    """A network of 10⁵ parameters that chooses 50 actions."""

    def step(state, key):
        hidden = jnp.tanh(theta["in"] @ state + theta["bias"])
        action = sad.categorical(key, theta["out"] @ hidden)
        state = 0.9 * jnp.roll(state, action) + 0.1
        return state, state[0]

    start = jnp.linspace(-1.0, 1.0, 90)
    return jax.lax.scan(step, start, jax.random.split(key, 50))[1].sum()


def policy_parameters():
    keys = jax.random.split(jax.random.key(0), 2)
    return {
        "in": 0.1 * jax.random.normal(keys[0], (1000, 90)),
        "bias": jnp.zeros(1000),
        "out": 0.03 * jax.random.normal(keys[1], (9, 1000)),
    }


def policy_by_hand(theta, keys):
    """The same program; its gradient is REINFORCE with the mean of the other runs as baseline,
    written by hand in JAX.
    """

    def one(key):
        def step(state, key):
            hidden = jnp.tanh(theta["in"] @ state + theta["bias"])
            logits = theta["out"] @ hidden
            action = jax.random.categorical(key, jax.lax.stop_gradient(logits))
            log_prob = jax.nn.log_softmax(logits)[action]
            state = 0.9 * jnp.roll(state, action) + 0.1
            return state, (state[0], log_prob)

        start = jnp.linspace(-1.0, 1.0, 90)
        rewards, log_probs = jax.lax.scan(step, start, jax.random.split(key, 50))[1]
        return rewards.sum(), log_probs.sum()

    value, log_prob = jax.vmap(one)(keys)
    still = jax.lax.stop_gradient(value)
    baseline = (still.sum() - still) / (still.size - 1)
    return jnp.mean(value + (still - baseline) * (log_prob - jax.lax.stop_gradient(log_prob)))
