"""Thousands of parameters are differentiated backward, as far as JAX goes there."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sad_runs import QUICK
from unbiasedness import assert_unbiased

import diffmh
from diffmh import sad
from diffmh.sad import samplers

KEY = jax.random.key(0)


def network(theta, key, inputs):
    """A policy of 217 parameters that acts three times."""

    def act(state, key):
        hidden = jnp.tanh(theta["w"] @ state + theta["b"])
        action = sad.categorical(key, theta["v"] @ hidden)
        state = jnp.roll(state, action) * 0.9 + 0.1 * inputs
        return state, state[0]

    _, rewards = jax.lax.scan(act, inputs, jax.random.split(key, 3))
    return rewards.sum() + 0.01 * jnp.sum(theta["w"] ** 2)


def network_mean(theta, inputs):
    def rest(state, steps):
        if not steps:
            return 0.0
        p = jax.nn.softmax(theta["v"] @ jnp.tanh(theta["w"] @ state + theta["b"]))
        after = [jnp.roll(state, action) * 0.9 + 0.1 * inputs for action in range(3)]
        return sum(p[a] * (after[a][0] + rest(after[a], steps - 1)) for a in range(3))

    return rest(inputs, 3) + 0.01 * jnp.sum(theta["w"] ** 2)


@pytest.mark.parametrize("estimator", [sad.Alternatives(1), sad.Score()], ids=str)
def test_many_parameters_backward(estimator):
    """Of a projection of the gradient on a random direction, and of some of its entries."""
    keys = jax.random.split(KEY, 4)
    theta = {
        "w": 0.5 * jax.random.normal(keys[0], (24, 7)),
        "b": 0.1 * jax.random.normal(keys[1], (24,)),
        "v": 0.5 * jax.random.normal(keys[2], (3, 24)),
    }
    inputs = jnp.array([2.0, -1.0, 0.5, 1.5, -0.5, 0.0, 1.0])
    expected = sad.expectation(network, estimator=estimator)
    gradient = jax.vmap(jax.grad(expected), (None, 0, None))
    flat = lambda tree: jax.flatten_util.ravel_pytree(tree)[0]
    exact = flat(jax.jit(jax.grad(network_mean))(theta, inputs))
    direction = jax.random.normal(keys[3], exact.shape)
    slopes = jax.jit(
        lambda keys: jax.vmap(flat)(gradient(theta, keys, inputs)), compiler_options=QUICK
    )(jax.random.split(KEY, 4_000))
    assert_unbiased(slopes @ direction, np.asarray(exact @ direction))
    assert_unbiased(slopes[:, ::20], np.asarray(exact[::20]))


def test_what_jax_differentiates_is_differentiated_backward():
    """`custom_vjp` functions, eigenvalues, singular values, complex numbers, before a draw."""

    @jax.custom_vjp
    def cube(x):
        return x**3

    cube.defvjp(lambda x: (x**3, x), lambda x, g: (3 * x**2 * g,))

    def smooth(theta):
        matrix = theta[:4].reshape(2, 2) + jnp.diag(jnp.array([3.0, 1.0]))
        spectrum = jnp.linalg.eigvalsh(matrix + matrix.T)
        singular = jnp.linalg.svd(matrix, compute_uv=False)
        return cube(theta[4]) + 0.1 * spectrum[0] + 0.1 * singular[1] + jnp.exp(1j * theta[5]).real

    def this(theta, key):
        p = jax.nn.sigmoid(smooth(theta) - 1)
        return 2.0 * sad.bernoulli(key, p) + smooth(theta)

    theta = jnp.linspace(0.1, 0.9, 20)
    exact = jax.jit(jax.grad(lambda t: 2 * jax.nn.sigmoid(smooth(t) - 1) + smooth(t)))(theta)
    slope = jax.jit(jax.grad(sad.expectation(this)))(theta, KEY)
    np.testing.assert_allclose(slope, exact, rtol=1e-4)


def test_a_while_loop_keeps_the_forward_mode_and_says_so():
    def this(theta, key):
        def step(state):
            n, key = state
            key, key_stop = jax.random.split(key)
            return n + 1 + 9 * sad.bernoulli(key_stop, theta[0]), key

        n, _ = jax.lax.while_loop(lambda state: state[0] < 3, step, (0, key))
        return 1.0 * n + theta.sum()

    with pytest.warns(UserWarning, match="while_loop"):
        slope = jax.jit(jax.grad(sad.expectation(this)))(jnp.full(17, 0.3), KEY)
    assert np.all(slope[1:] == 1.0)


def test_second_derivatives_are_refused_backward():
    expected = sad.expectation(lambda theta, key: jnp.sum(theta**2) * sad.bernoulli(key, 0.5))
    with pytest.raises(diffmh.NotDifferentiable, match="second derivative"):
        jax.grad(lambda theta: jnp.sum(jax.grad(expected)(theta, KEY)))(jnp.ones(20))


@pytest.mark.parametrize("estimator", [sad.Alternatives(1), sad.Combined(2)], ids=str)
def test_scores_are_free_of_the_scales_of_parameters_backward(estimator):
    """A parameter with 10⁴ times the weight takes nothing from another, whose derivative was 0.0 in
    each of 4,000 runs.
    """

    def program(theta, key):
        def step(total, key):
            key_a, key_b = jax.random.split(key)
            a = sad.bernoulli(key_a, jax.nn.sigmoid(theta[0]))
            b = sad.bernoulli(key_b, jax.nn.sigmoid(jnp.sum(theta[1:])))
            return total + a + b, None

        return (1.0 * jax.lax.scan(step, 0, jax.random.split(key, 10))[0]) ** 2

    def slopes(unit):
        units = jnp.ones(20).at[1:].set(unit)
        expected = sad.expectation(
            lambda theta, key: program(theta * units, key),
            estimator=estimator,
            num_replicates=2_000,
        )
        chains = jax.jit(jax.jacobian(expected.per_chain))(jnp.full(20, 0.05) / units, KEY)
        return np.asarray(chains) / units

    same, scaled = slopes(1.0), slopes(1e4)
    np.testing.assert_allclose(same.std(axis=0), scaled.std(axis=0), rtol=1e-2)

    def mean(theta):
        p = jax.nn.sigmoid(jnp.array([theta[0], jnp.sum(theta[1:])]))
        return (10 * p.sum()) ** 2 + 10 * jnp.sum(p * (1 - p))

    assert_unbiased(scaled[:, 0], float(jax.jit(jax.grad(mean))(jnp.full(20, 0.05))[0]))


def test_a_sampler_without_log_prob_goes_backward():
    """`Alternatives` differentiates programs that `Score` cannot."""
    coin = dataclasses.replace(samplers.BERNOULLI, log_prob=None)
    program = lambda theta, key: 2.0 * coin(key, jax.nn.sigmoid(jnp.sum(theta)))
    expected = sad.expectation(program, estimator=sad.Alternatives(1))
    slope = jax.jit(jax.grad(expected))(jnp.zeros(20), KEY)
    np.testing.assert_allclose(slope, 0.5, rtol=1e-6)


# What a step of `walk_with_memory` leaves.
LEFT = {
    "sum": lambda s: (s**2).sum(),
    "vector": lambda s: s,
    "cumsum": lambda s: s.cumsum()[1],
}


def walk_with_memory(w, key, left):
    """Two steps of a vector whose first entry decides."""

    def step(s, key):
        up = sad.bernoulli(key, jax.nn.sigmoid(w.sum() * s[0]))
        s = jnp.stack([s[0] + up, 0.5 * s[1] + s[0]])
        return s, left(s)

    return jax.lax.scan(step, jnp.array([1.0, 0.0]), jax.random.split(key, 2))[1].sum()


def walk_mean(w, left):
    total = 0.0
    for first, second in np.ndindex(2, 2):
        chance, s, result = 1.0, np.array([1.0, 0.0]), 0.0
        for up in (first, second):
            p = 1 / (1 + np.exp(-w * s[0]))
            chance = chance * (p if up else 1 - p)
            s = np.array([s[0] + up, 0.5 * s[1] + s[0]])
            result += left(s).sum()
        total += chance * result
    return total


def test_states_that_are_vectors_backward():
    """`jax.vmap` may leave the axis of replicates anywhere in a carried vector."""
    w, keys = jnp.full(17, 0.3 / 17), jax.random.split(KEY, 2_048)
    one = lambda key: [
        jax.value_and_grad(sad.expectation(walk_with_memory))(w, key, left=left)
        for left in map(jax.tree_util.Partial, LEFT.values())
    ]
    found = jax.jit(jax.vmap(one), compiler_options=QUICK)(keys)
    for (value, gradient), left in zip(found, LEFT.values(), strict=True):
        slope = walk_mean(0.3 + 1e-30j, left).imag / 1e-30
        assert_unbiased(value, walk_mean(0.3, left))
        assert_unbiased(gradient, np.full(17, slope))
    assert abs(walk_mean(0.3, LEFT["sum"]) - 13.582) < 1e-3
    program = lambda w, key: walk_with_memory(w, key, LEFT["sum"])
    report = sad.run(program, w, KEY, estimator=sad.Alternatives(), num_replicates=2_048)
    assert abs(report.value - 13.582) < 5 * report.value_error
    assert np.all(np.abs(report.gradient - 4.4388) < 5 * report.gradient_error)
