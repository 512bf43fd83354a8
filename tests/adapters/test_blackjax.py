"""Our kernels in BlackJAX's loop."""

import blackjax
import jax
import jax.numpy as jnp
import numpy as np

import diffmh

density = lambda theta, x: -0.5 * (x - theta) ** 2


def test_a_cycle_in_blackjaxs_loop():
    walk = diffmh.MetropolisHastings(density, diffmh.GaussianWalk(2.38))
    algorithm = diffmh.as_blackjax(diffmh.Cycle(walk, diffmh.Langevin(density, 1.0)), 0.7)

    def chain(key):
        taken = lambda state, info: (state.position, info.acceptance_rate)
        _, (path, rate) = blackjax.util.run_inference_algorithm(
            key, algorithm, num_steps=2_000, initial_position=0.0, transform=taken
        )
        return jnp.mean(path[100:]), jnp.mean(rate)

    means, rates = jax.jit(jax.vmap(chain))(jax.random.split(jax.random.key(0), 64))
    assert abs(means.mean() - 0.7) < 5 * means.std(ddof=1) / 8
    assert 0.4 < rates.mean() < 0.9


def test_a_kernel_without_acceptance():
    labels = diffmh.Gibbs(lambda theta, z: theta * z, lambda z: z, 3)
    algorithm = diffmh.as_blackjax(labels, 0.5)
    state, info = algorithm.step(jax.random.PRNGKey(0), algorithm.init(jnp.array(0)))
    assert np.isnan(info.acceptance_rate) and 0 <= int(state.position) < 3
