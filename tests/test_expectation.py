"""An expectation is an ordinary JAX function: every transformation, their nestings, any tree."""

import functools
import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import diffmh

KEY = jax.random.key(1)
MEANS = jnp.array([-2.5, 2.0, 5.0])


def log_mixture(h, j):
    return -0.5 * ((h - MEANS[j]) / 4.0) ** 2


def occupancy(h, j, *args):
    return jax.nn.one_hot(j, 3)


def log_normal(theta, x):
    return -0.5 * ((x - theta["mean"]) * jnp.exp(-theta["log_scale"])) ** 2


def moments(theta, x):
    return {"first": x, "second": [theta["mean"] * x**2, x > 0]}


MIXTURE = diffmh.expectation(
    occupancy,
    diffmh.MetropolisHastings(log_mixture, diffmh.OtherState(3)),
    init=0,
    num_samples=20,
    num_chains=4,
)
NORMAL = diffmh.expectation(
    moments,
    diffmh.MetropolisHastings(log_normal, diffmh.GaussianWalk(2.38)),
    init=0.0,
    num_samples=20,
    num_chains=4,
)
CASES = [
    pytest.param(MIXTURE, jnp.float32(0.4), id="mixture"),
    pytest.param(NORMAL, {"mean": jnp.float32(0.5), "log_scale": jnp.float32(0.1)}, id="normal"),
]
close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)


def close_trees(tree, expected):
    assert jax.tree.structure(tree) == jax.tree.structure(expected)
    jax.tree.map(close, tree, expected)


def identical_trees(tree, expected):
    assert jax.tree.structure(tree) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, tree, expected)


def along(jacobian, value, direction):
    """A Jacobian, a tree like the value of trees like theta, applied to a direction."""
    dot = lambda block: sum(
        jax.tree.leaves(jax.tree.map(lambda part, d: part * d, block, direction))
    )
    return jax.tree.map(lambda _, block: dot(block), value, jacobian)


def total(expectation):
    """A scalar function whose gradient tells the outputs apart."""
    weigh = lambda tree: sum(
        (i + 1) * jnp.sum(leaf * (1 + jnp.arange(leaf.size)))
        for i, leaf in enumerate(jax.tree.leaves(tree))
    )
    return lambda theta, key: weigh(expectation(theta, key))


def several(theta):
    """Three parameter settings along a leading axis, and each of them."""
    stacked = jax.tree.map(lambda leaf: leaf + jnp.array([0.0, 0.3, -0.7]), theta)
    return stacked, [jax.tree.map(lambda leaf: leaf[i], stacked) for i in range(3)]


def stack(trees):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


@pytest.mark.parametrize("expectation, theta", CASES)
def test_first_derivatives_agree(expectation, theta):
    value = expectation(theta, KEY)
    jacobian = jax.jacfwd(expectation)(theta, KEY)
    assert sum(float(jnp.sum(leaf**2)) for leaf in jax.tree.leaves(jacobian)) > 0.001, (
        "there is something to compare"
    )
    close_trees(jax.jacrev(expectation)(theta, KEY), jacobian)
    close_trees(jax.jit(expectation)(theta, KEY), value)

    at = lambda theta: expectation(theta, KEY)
    direction = jax.tree.map(lambda leaf: jnp.float32(0.7) + leaf, theta)
    primal, tangent = jax.jvp(at, (theta,), (direction,))
    identical_trees(primal, value)
    close_trees(tangent, along(jacobian, value, direction))
    close_trees(
        jax.jvp(at, (theta,), (jax.tree.map(lambda leaf: 2 * leaf, direction),))[1],
        jax.tree.map(lambda leaf: 2 * leaf, tangent),
    )

    primal, pullback = jax.vjp(at, theta)
    identical_trees(primal, value)
    cotangent = jax.tree.map(lambda leaf: jnp.cos(1 + leaf), value)
    inner = lambda a, b: sum(
        jnp.sum(p * q) for p, q in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )
    close(inner(pullback(cotangent)[0], direction), inner(cotangent, tangent))

    primal, tangent_map = jax.linearize(at, theta)
    identical_trees(primal, value)
    close_trees(tangent_map(direction), tangent)


@pytest.mark.parametrize("expectation, theta", CASES)
def test_grad_and_jit_in_any_order(expectation, theta):
    function = total(expectation)
    value, gradient = function(theta, KEY), jax.grad(function)(theta, KEY)
    jacobian = jax.jacfwd(function)(theta, KEY)
    close_trees(gradient, jacobian)
    for transformed in (
        jax.value_and_grad(function),
        jax.jit(jax.value_and_grad(function)),
        jax.value_and_grad(jax.jit(function)),
    ):
        found = transformed(theta, KEY)
        close(found[0], value)
        close_trees(found[1], gradient)


@pytest.mark.parametrize("expectation, theta", CASES)
def test_vmap_is_the_loop(expectation, theta):
    function = total(expectation)
    thetas, each_theta = several(theta)
    keys = jax.random.split(KEY, 3)
    gradient = jax.jit(jax.value_and_grad(function))
    over_theta = stack([gradient(theta, KEY) for theta in each_theta])
    over_keys = stack([gradient(theta, key) for key in keys])
    assert len(np.unique(over_theta[0])) == 3 and len(np.unique(over_keys[0])) == 3

    close(jax.vmap(function, (0, None))(thetas, KEY), over_theta[0])
    close_trees(jax.vmap(jax.value_and_grad(function), (0, None))(thetas, KEY), over_theta)
    close_trees(jax.jit(jax.vmap(jax.value_and_grad(function), (None, 0)))(theta, keys), over_keys)
    close_trees(
        jax.grad(lambda thetas: jax.vmap(function, (0, None))(thetas, KEY).sum())(thetas),
        over_theta[1],
    )


@pytest.mark.parametrize("expectation, theta", CASES)
def test_inside_scan(expectation, theta):
    function, keys = total(expectation), jax.random.split(KEY, 3)
    tangents = lambda key: jax.jvp(lambda theta: function(theta, key), (theta,), (theta,))[1]
    _, scanned = jax.lax.scan(lambda carry, key: (carry, tangents(key)), None, keys)
    close(scanned, jnp.stack([jax.jit(tangents)(key) for key in keys]))

    through = lambda theta: jax.lax.scan(
        lambda carry, key: (carry + function(theta, key), None), 0.0, keys
    )[0]
    close_trees(
        jax.grad(through)(theta),
        jax.grad(lambda theta: sum(function(theta, key) for key in keys))(theta),
    )


def test_chains_average_to_the_value():
    per_chain = NORMAL.per_chain(CASES[1].values[1], KEY)
    assert per_chain["first"].shape == (4,)
    close_trees(jax.tree.map(lambda leaf: leaf.mean(0), per_chain), NORMAL(CASES[1].values[1], KEY))


class FlipBit(diffmh.extend.Proposal):
    symmetric: bool = True

    def sample(self, key, x):
        site = jax.random.randint(key, (), 0, x.size)
        return x ^ (jnp.arange(x.size) == site)

    def log_prob(self, x, x_new):
        return jnp.where(jnp.sum(x != x_new) == 1, -jnp.log(x.size), -jnp.inf)


def log_tree(theta, x):
    return -0.5 * jnp.sum((x["a"] - theta) ** 2) - 0.5 * (x["b"][0] - theta * x["a"][0]) ** 2


PARTS = diffmh.Cycle(
    *(
        diffmh.MetropolisHastings(log_tree, diffmh.On(part, diffmh.GaussianWalk(1.0)))
        for part in (lambda x: x["a"], lambda x: x["b"])
    )
)


@pytest.mark.parametrize(
    "kernel, init, f",
    [
        (
            diffmh.MetropolisHastings(lambda theta, x: theta * x, diffmh.OtherState(4)),
            0,
            lambda theta, x: x,
        ),
        (
            diffmh.MetropolisHastings(lambda theta, x: theta * jnp.sum(x), diffmh.SpinFlip()),
            jnp.ones(5, jnp.int8),
            lambda theta, x: x[:2],
        ),
        (
            diffmh.MetropolisHastings(lambda theta, x: theta * jnp.sum(x), FlipBit()),
            jnp.zeros(5, bool),
            lambda theta, x: x,
        ),
        (
            diffmh.MetropolisHastings(lambda theta, x: -theta * x**2, diffmh.GaussianWalk(2.38)),
            0.0,
            lambda theta, x: x**2,
        ),
        (
            diffmh.MetropolisHastings(log_tree, diffmh.GaussianWalk(1.0)),
            {"a": jnp.zeros(2), "b": (0.0,)},
            lambda theta, x: x,
        ),
        (PARTS, {"a": jnp.zeros(2), "b": (0.0,)}, lambda theta, x: x),
    ],
    ids=["integer", "spins", "boolean", "float", "tree", "parts of a tree"],
)
def test_states(kernel, init, f):
    expectation = diffmh.expectation(f, kernel, init=init, num_samples=50, num_chains=4)
    at = lambda theta: expectation(theta, KEY)
    value, tangent = jax.jvp(at, (0.8,), (1.0,))
    assert (
        jax.tree.structure(tangent) == jax.tree.structure(value) == jax.tree.structure(f(0.8, init))
    )
    leaves = jax.tree.leaves(tangent)
    assert all(leaf.dtype == jnp.float32 and np.all(np.isfinite(leaf)) for leaf in leaves)
    assert all(np.any(leaf != 0) for leaf in leaves)


def test_network_in_theta():
    network = eqx.nn.MLP(
        "scalar", "scalar", width_size=3, depth=1, activation=jnp.tanh, key=jax.random.key(0)
    )
    weights, static = eqx.partition(network, eqx.is_array)
    log_density = lambda weights, x: -0.5 * x**2 + eqx.combine(weights, static)(x)
    kernel = diffmh.MetropolisHastings(log_density, diffmh.GaussianWalk(2.38))
    mean = diffmh.expectation(lambda weights, x: x, kernel, init=0.0, num_samples=50, num_chains=4)
    gradient = jax.grad(mean)(weights, KEY)
    assert jax.tree.structure(gradient) == jax.tree.structure(weights)
    jax.tree.map(
        lambda leaf, weight: np.testing.assert_equal(
            (leaf.shape, leaf.dtype), (weight.shape, weight.dtype)
        ),
        gradient,
        weights,
    )
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(gradient))
    assert np.any(gradient.layers[0].weight != 0)
    # A constant added to the log density moves nothing.
    np.testing.assert_array_equal(gradient.layers[-1].bias, 0)


def test_new_arguments_compile_nothing():
    traces = itertools.count()
    seen = []

    def log_density(theta, x, data, exponent):
        seen.append(next(traces))
        return -jnp.sum(jnp.abs(x - theta - data) ** exponent)

    kernel = diffmh.MetropolisHastings(log_density, diffmh.GaussianWalk(1.0))
    mean = diffmh.expectation(
        lambda theta, x, *args: x, kernel, init=0.0, num_samples=5, num_chains=2
    )
    for function in (mean, mean.run, jax.jit(jax.grad(mean)), jax.grad(mean)):
        function(0.5, KEY, jnp.zeros(3), 2.0)
        before, first = len(seen), mean(0.5, KEY, jnp.zeros(3), 2.0)
        function(0.7, jax.random.key(7), jnp.ones(3), 4.0)
        assert len(seen) == before, "new values were traced again"
    second = mean(0.5, KEY, jnp.ones(3), 2.0)
    assert first != second, "the data counts"
    mean(0.5, KEY, jnp.zeros(4), 2.0)
    assert len(seen) > before, "a new shape must be traced, or this test counts nothing"


THOROUGH_PRECISIONS = [
    pytest.param(parameter, state, marks=pytest.mark.thorough)
    for parameter, state in ((jnp.float64, jnp.float32), (jnp.float32, jnp.float64))
]


@pytest.mark.parametrize("parameter, state", [(jnp.float64, jnp.float64), *THOROUGH_PRECISIONS])
def test_double_precision(parameter, state):
    with jax.enable_x64(True):
        kernel = diffmh.MetropolisHastings(
            lambda theta, x: -0.5 * (x - theta) ** 2, diffmh.GaussianWalk(2.38)
        )
        mean = diffmh.expectation(
            lambda theta, x: x, kernel, init=jnp.zeros((), state), num_samples=50, num_chains=4
        )
        value, gradient = jax.value_and_grad(mean)(jnp.array(0.5, parameter), KEY)
        assert (value.dtype, gradient.dtype) == (state, parameter)
        assert np.isfinite(gradient) and gradient != 0
        np.testing.assert_array_equal(mean(jnp.array(0.5, parameter), KEY), value)
        if state == jnp.float64:
            assert value != value.astype(jnp.float32), "single precision in disguise"


def test_double_precision_of_labels():
    with jax.enable_x64(True):
        kernel = diffmh.MetropolisHastings(
            lambda h, j: -0.5 * ((h - jnp.array([-2.5, 2.0, 5.0])[j]) / 4) ** 2,
            diffmh.OtherState(3),
        )
        probabilities = diffmh.expectation(occupancy, kernel, init=0, num_samples=50, num_chains=4)
        jacobian = jax.jacobian(probabilities)(0.4, KEY)
        assert jacobian.dtype == jnp.float64 and jacobian.shape == (3,)
        np.testing.assert_allclose(jacobian.sum(), 0, atol=1e-15)


@jax.custom_vjp
def backward_only(theta, x):
    return -0.5 * (x - jnp.sum(theta)) ** 2


def _forth(theta, x):
    return backward_only(theta, x), (theta, x)


def _back(kept, cotangent):
    theta, x = kept
    slope = cotangent * (x - jnp.sum(theta))
    return slope * jnp.ones_like(theta), -slope


backward_only.defvjp(_forth, _back)


def forward_only(theta, x):
    """A `while_loop`, which has no reverse mode."""
    half = lambda carry: (carry[0] + 1, carry[1] - 0.25 * (x - jnp.sum(theta)) ** 2)
    return jax.lax.while_loop(lambda carry: carry[0] < 2, half, (0, 0.0))[1]


@pytest.mark.parametrize(
    ("density", "theta"),
    [(backward_only, jnp.array(0.5)), (forward_only, jnp.array([0.2, 0.3]))],
    ids=["custom_vjp of one parameter", "while_loop of two"],
)
def test_a_density_with_one_mode_of_differentiation(density, theta):
    """The mode of fewer passes is not to be had: the other is taken, with the same derivative."""

    def slope(density):
        kernel = diffmh.MetropolisHastings(density, diffmh.GaussianWalk(2.0))
        mean = diffmh.expectation(
            lambda theta, x: x, kernel, init=0.0, num_samples=20, num_chains=4
        )
        return jax.grad(mean)(theta, jax.random.key(0))

    plain = slope(lambda theta, x: -0.5 * (x - jnp.sum(theta)) ** 2)
    np.testing.assert_allclose(slope(density), plain, rtol=1e-4)
