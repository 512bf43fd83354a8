"""The six programs of `sad_programs.py` with REINFORCE written by hand in JAX: each returns its
result and the log probability of its draws, up to terms without the parameters.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from sad_programs import VAE_DATA, chances_of_life


def bernoulli(key, p):
    """A draw and its log probability; the draw itself is held fixed."""
    drawn = jax.random.bernoulli(key, jax.lax.stop_gradient(p))
    return drawn, jnp.sum(jnp.log(jnp.where(drawn, p, 1 - p)))


def epidemic(theta, key):
    size = 1000

    def binomial(key, n, p):
        n = n.astype(float)
        drawn = jax.random.binomial(key, n, jax.lax.stop_gradient(p))
        return drawn, drawn * jnp.log(p) + (n - drawn) * jnp.log1p(-p)

    def step(state, key):
        susceptible, infected = state
        key_infect, key_recover = jax.random.split(key)
        # If nobody is infected, p is 0 and stays 0.
        p = 1 - jnp.exp(-theta[0] * infected / size)
        p = jnp.where(infected > 0, p, 0.5)
        new, log_new = binomial(key_infect, jnp.where(infected > 0, susceptible, 0.0), p)
        recovered, log_recovered = binomial(key_recover, infected, theta[1])
        state = (susceptible - new, infected + new - recovered)
        return state, log_new + log_recovered

    start = (jnp.array(size - 10.0), jnp.array(10.0))
    (susceptible, _), log_probs = jax.lax.scan(step, start, jax.random.split(key, 100))
    return size - susceptible, log_probs.sum()


def gridworld(theta, key):
    def step(cell, key):
        logits = theta.reshape(16, 4)[cell]
        action = jax.random.categorical(key, jax.lax.stop_gradient(logits))
        row = jnp.clip(cell // 4 + jnp.array([-1, 1, 0, 0])[action], 0, 3)
        column = jnp.clip(cell % 4 + jnp.array([0, 0, -1, 1])[action], 0, 3)
        cell = row * 4 + column
        return cell, (1.0 * (cell == 15), jax.nn.log_softmax(logits)[action])

    rewards, log_probs = jax.lax.scan(step, 0, jax.random.split(key, 20))[1]
    return rewards.sum(), log_probs.sum()


def autoencoder(theta, key):
    encoder, decoder = theta[:36].reshape(4, 9), theta[36:72].reshape(4, 9)
    weights, bias = theta[72:104].reshape(8, 4), decoder[:, 8]
    logits = encoder[:, :8] @ VAE_DATA.T + encoder[:, 8:] + 0.1 * decoder[:, :8] @ VAE_DATA.T
    p = jax.nn.sigmoid(logits)
    latent, log_prob = bernoulli(key, p)
    pixels = weights @ (1.0 * latent) + 0.1 * bias.sum()
    reconstruction = jnp.sum(jax.nn.softplus(pixels) - VAE_DATA.T * pixels)
    safe = jnp.clip(p, 1e-6, 1 - 1e-6)
    divergence = safe * jnp.log(2 * safe) + (1 - safe) * jnp.log(2 * (1 - safe))
    return reconstruction + divergence.sum(), log_prob


def life(theta, key):
    start = (jax.random.uniform(jax.random.key(1), (8, 8)) < 0.4).astype(int)

    def step(board, key):
        drawn, log_prob = bernoulli(key, chances_of_life(theta, board))
        return drawn.astype(int), log_prob

    board, log_probs = jax.lax.scan(step, start, jax.random.split(key, 10))
    return 1.0 * board.sum(), log_probs.sum()


def volatility(theta, key):
    def step(state, key):
        count, rate = state
        rate = theta[0] + theta[1] * count + theta[2] * rate
        count = 1.0 * jax.random.poisson(key, jax.lax.stop_gradient(rate))
        return (count, rate), (count**2, count * jnp.log(rate) - rate)

    start = (jnp.array(1.0), jnp.array(1.0))
    squares, log_probs = jax.lax.scan(step, start, jax.random.split(key, 50))[1]
    return squares.mean(), log_probs.sum()


def walk(theta, key):
    def step(x, key):
        up, log_prob = bernoulli(key, jax.nn.sigmoid(theta[0] - theta[1] * x))
        x = x + jnp.where(up, 1, -1)
        return x, ((1.0 * x) ** 2, log_prob)

    squares, log_probs = jax.lax.scan(step, 0, jax.random.split(key, 100))[1]
    return squares.mean(), log_probs.sum()


BY_HAND = {
    "SIR, 100 steps": epidemic,
    "gridworld, 64 parameters": gridworld,
    "discrete VAE, 104 parameters": autoencoder,
    "game of life": life,
    "igarch": volatility,
    "random walk": walk,
}


def gradient(program, theta, keys):
    """REINFORCE with the mean of the other runs as baseline."""

    def surrogate(theta):
        value, log_prob = jax.vmap(program, (None, 0))(theta, keys)
        still = jax.lax.stop_gradient(value)
        baseline = (still.sum() - still) / (still.size - 1)
        return jnp.mean(value + (still - baseline) * (log_prob - jax.lax.stop_gradient(log_prob)))

    return jax.grad(surrogate)(theta)
