"""The language of programs. Limitations that StochasticAD.jl lists and that are lifted here
have tests named for them.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sad_runs import QUICK, derivatives
from unbiasedness import assert_unbiased

from diffmh import sad

RUNS = 20_000
BINOMIAL = [1, 3, 3, 1]


def binomial(k, p):
    return BINOMIAL[k] * p**k * (1 - p) ** (3 - k)


def agree(program, mean, theta, **options):
    """Unbiased for the derivative of `mean`, an exact expectation that JAX differentiates."""
    exact = np.asarray(jax.jit(jax.jacobian(mean))(jnp.asarray(theta)))
    found = derivatives(program, jnp.asarray(theta), RUNS, **options)
    assert_unbiased(found.reshape(RUNS, *exact.shape), exact)


@pytest.mark.parametrize("alternatives", [1, 2])
def test_branching_on_discrete_values(alternatives):
    """The alternative takes the other branch, in which it draws on its own."""

    def program(p, key):
        keys = jax.random.split(key, 4)
        heads = sad.bernoulli(keys[0], p)
        y = jax.lax.cond(
            heads,
            lambda: 3.0 * sad.bernoulli(keys[1], p * p),
            lambda: sad.binomial(keys[2], 3, p).astype(float) ** 2,
        )
        return y * sad.bernoulli(keys[3], jax.nn.sigmoid(y - 1))

    def mean(p):
        worth = lambda y: y * jax.nn.sigmoid(y - 1)
        return p * p * p * worth(3.0) + (1 - p) * sum(
            binomial(k, p) * worth(k**2.0) for k in range(4)
        )

    agree(program, mean, 0.4, alternatives=alternatives)


def test_switch_on_an_index_that_is_the_same_in_every_alternative():
    def program(p, key):
        keys = jax.random.split(key, 4)
        x = sad.bernoulli(keys[0], p)
        branches = [
            lambda x: 3.0 * sad.bernoulli(keys[1], p * jnp.where(x, 1.0, 0.5)),
            lambda x: 2.0 * x * p,
            lambda x: 1.0 - x,
        ]
        y = jax.lax.switch(jax.random.randint(keys[2], (), 0, 3), branches, x)
        return y * y + x

    mean = lambda p: (9 * (p * p + (1 - p) * p / 2) + 4 * p**3 + (1 - p)) / 3 + p
    agree(program, mean, 0.4)


def test_several_parameters_in_one_pass():
    """A pytree of theta, and the whole gradient from each run."""
    theta = {"p": jnp.array(0.3), "table": jnp.array([1.0, -0.5, 2.0])}

    def program(theta, key):
        key_i, key_x = jax.random.split(key)
        i = sad.categorical(key_i, theta["table"])
        return theta["table"][i] * sad.bernoulli(key_x, theta["p"] ** (1.0 + i))

    mean = lambda theta: jnp.sum(
        jax.nn.softmax(theta["table"]) * theta["table"] * theta["p"] ** jnp.arange(1.0, 4.0)
    )
    exact = jax.jit(jax.grad(mean))(theta)
    found = derivatives(program, theta, RUNS)[:, 0]
    assert_unbiased(found, np.append(exact["p"], exact["table"]))


def test_integer_and_boolean_intermediates():
    """Remainders, comparisons, bitwise logic, and an integer index into a table and into an
    array that is written.
    """

    def program(p, key):
        keys = jax.random.split(key, 2)
        n, m = sad.binomial(keys[0], 3, p), sad.binomial(keys[1], 3, p * p)
        odd = ((n % 2) == 1) ^ (m > 1)
        counts = jnp.zeros(4).at[n].add(1.5).at[m].set(jnp.where(odd, 2.0, p))
        return jnp.sort(counts)[2] * p + jnp.argmax(counts) + (odd & (n >= m))

    def mean(p):
        total = 0.0
        for n, m in itertools.product(range(4), repeat=2):
            odd = (n % 2 == 1) != (m > 1)
            counts = jnp.zeros(4).at[n].add(1.5).at[m].set(2.0 if odd else p)
            value = jnp.sort(counts)[2] * p + jnp.argmax(counts) + (odd and n >= m)
            total = total + binomial(n, p) * binomial(m, p * p) * value
        return total

    agree(program, mean, 0.6)


def test_vectorised_replicates():
    """`vmap` outside over keys and over theta, and `vmap` inside over agents that are pruned
    together.
    """

    def agent(p, key, weight):
        key_x, key_n = jax.random.split(key)
        x = sad.bernoulli(key_x, p * weight)
        return x + sad.binomial(key_n, 3, jnp.where(x, p, 0.2))

    weights = jnp.array([0.3, 0.5, 0.9])
    program = lambda p, key: jnp.prod(
        1.0 + jax.vmap(agent, (None, 0, 0))(p, jax.random.split(key, 3), weights)
    )
    mean = lambda p: jnp.prod(1 + p * weights * (1 + 3 * p) + (1 - p * weights) * 0.6)
    thetas = jnp.array([0.2, 0.6])
    gradient = jax.vmap(jax.vmap(jax.grad(sad.expectation(program)), (None, 0)))
    found = jax.jit(gradient, compiler_options=QUICK)(
        thetas, jax.random.split(jax.random.key(0), (2, RUNS))
    )
    assert_unbiased(found.T, jax.jit(jax.vmap(jax.grad(mean)))(thetas))


@pytest.mark.parametrize("alternatives", [1, 3])
def test_paths_used_nonlinearly(alternatives):
    """The whole path is kept for the alternative that lives at the end."""

    def program(theta, key):
        def step(x, key):
            x = x + sad.bernoulli(key, jax.nn.sigmoid(theta - x))
            return x, x

        _, path = jax.lax.scan(step, 0, jax.random.split(key, 4))
        return path[1] * path[3] + jnp.prod(1.0 + path)

    def mean(theta):
        total = 0.0
        for ups in itertools.product((0, 1), repeat=4):
            path = np.cumsum(ups)
            before = path - np.array(ups)
            up = [jax.nn.sigmoid(theta - x) for x in before]
            chance = np.prod([1.0]) * jnp.prod(
                jnp.stack([q if u else 1 - q for q, u in zip(up, ups, strict=True)])
            )
            total = total + chance * (path[1] * path[3] + np.prod(1.0 + path))
        return total

    agree(program, mean, 0.4, alternatives=alternatives)


def nested(theta, key):
    """A draw outside that matters inside of two loops and after them; a sum in a carry; reversed
    time.
    """
    keys = jax.random.split(key, 2)
    a = sad.binomial(keys[0], 3, theta)

    def outer(carry, key):
        x, total = carry

        def inner(x, key):
            x = (x + sad.bernoulli(key, theta * (1 + a + x) / 9)) % 3
            return x, x * a

        x, ys = jax.lax.scan(inner, x, jax.random.split(key, 2))
        return (x, total + ys.sum() * theta + x), x

    (x, total), xs = jax.lax.scan(outer, (0, 0.0), jax.random.split(keys[1], 2), reverse=True)
    return total + x * a + xs[0] * a * xs[1]


def nested_mean(theta):
    total = 0.0
    for a, draws in itertools.product(range(4), itertools.product((0, 1), repeat=4)):
        x, chance, result, xs = 0, binomial(a, theta), 0.0, []
        for pair in (draws[:2], draws[2:]):
            ys = 0
            for draw in pair:
                q = theta * (1 + a + x) / 9
                chance = chance * (q if draw else 1 - q)
                x = (x + draw) % 3
                ys += x * a
            result = result + ys * theta + x
            xs.append(x)
        total = total + chance * (result + x * a + xs[0] * a * xs[1])
    return total


@pytest.mark.parametrize("alternatives", [pytest.param(1, marks=pytest.mark.thorough), 2])
def test_nested_loops(alternatives):
    agree(nested, nested_mean, 0.6, alternatives=alternatives)


def constant_of_a_loop(theta, key):
    """`a` is used by the loop alone, whose carry forgets at once: the alternative in which `a`
    differs must live on.
    """
    keys = jax.random.split(key, 2)
    a = sad.bernoulli(keys[0], theta)

    def step(x, key):
        x = sad.bernoulli(key, jnp.where(a, theta, 0.3))
        return x, x * 1.0

    return jax.lax.scan(step, jnp.array(False), jax.random.split(keys[1], 6))[1].sum()


def test_constant_of_a_loop():
    agree(constant_of_a_loop, lambda theta: 6 * (theta**2 + (1 - theta) * 0.3), 0.6)


def test_slices_that_branched_before_the_loop():
    """Draws that a loop takes one by one, of which the later ones matter when the earlier ones
    are forgotten.
    """

    def program(theta, key):
        keys = jax.random.split(key, 2)
        marks = sad.bernoulli(keys[0], theta * jnp.array([0.2, 0.5, 0.9]))

        def step(_, inputs):
            mark, key = inputs
            x = sad.bernoulli(key, jnp.where(mark, theta, 0.3))
            return x, x * 1.0

        return jax.lax.scan(step, jnp.array(False), (marks, jax.random.split(keys[1], 3)))[1].sum()

    agree(
        program,
        lambda theta: sum(theta * w * theta + (1 - theta * w) * 0.3 for w in (0.2, 0.5, 0.9)),
        0.6,
    )


def test_number_of_rounds_is_random():
    """`fori_loop` up to a draw; what is added up is used nonlinearly."""

    def program(theta, key):
        key_n, key_x = jax.random.split(key)
        rounds = sad.binomial(key_n, 3, theta)

        def body(i, carry):
            total, x = carry
            x = x + sad.bernoulli(jax.random.fold_in(key_x, i), jax.nn.sigmoid(theta - x))
            return total + x * theta, x

        total, x = jax.lax.fori_loop(0, rounds, body, (0.0, 0))
        return total + x * total

    def mean(theta):
        result = 0.0
        for rounds in range(4):
            for ups in itertools.product((0, 1), repeat=rounds):
                chance, x, total = binomial(rounds, theta), 0, 0.0
                for up in ups:
                    q = jax.nn.sigmoid(theta - x)
                    chance = chance * (q if up else 1 - q)
                    x += up
                    total = total + x * theta
                result = result + chance * (total + x * total)
        return result

    agree(program, mean, 0.7)


def test_discounted_sum_in_a_loop_left_at_different_times():
    """Not a plain sum: it is carried in the alternative instead of banked."""

    def program(theta, key):
        def body(state):
            rounds, key, total = state
            key, key_stop = jax.random.split(key)
            stop = sad.bernoulli(key_stop, theta)
            return jnp.where(stop, 9, rounds + 1), key, 0.5 * total + 1.0

        return jax.lax.while_loop(lambda state: state[0] < 4, body, (0, key, 0.0))[2]

    def mean(theta):
        totals = [1.0, 1.5, 1.75, 1.875]
        stops = [theta * (1 - theta) ** k for k in range(3)] + [(1 - theta) ** 3]
        return sum(chance * total for chance, total in zip(stops, totals, strict=True))

    agree(program, mean, 0.3)


def test_smooth_functions_between_draws():
    """The tangent reaches a later draw's probability through `custom_jvp` functions, solvers and
    products.
    """

    def program(theta, key):
        keys = jax.random.split(key, 2)
        x = sad.bernoulli(keys[0], jax.nn.sigmoid(theta[0]))
        matrix = jnp.array([[2.0, 0.3], [0.3, 1.0]]) * (1 + x)
        solved = jnp.linalg.solve(matrix, jnp.stack([theta[0], theta[1] ** 2]))
        p = jax.nn.sigmoid(jax.nn.softplus(solved).sum() - 1)
        return sad.bernoulli(keys[1], p) * jax.nn.logsumexp(solved)

    def mean(theta):
        total = 0.0
        for x in (0, 1):
            chance = jax.nn.sigmoid(theta[0]) if x else 1 - jax.nn.sigmoid(theta[0])
            matrix = jnp.array([[2.0, 0.3], [0.3, 1.0]]) * (1 + x)
            solved = jnp.linalg.solve(matrix, jnp.stack([theta[0], theta[1] ** 2]))
            total += (
                chance
                * jax.nn.sigmoid(jax.nn.softplus(solved).sum() - 1)
                * jax.nn.logsumexp(solved)
            )
        return total

    agree(program, mean, [0.5, 0.8])


def test_continuous_noise_between_draws():
    """Noise that does not depend on θ may be compared, and a continuous value that does may be
    smooth in it.
    """

    def program(theta, key):
        keys = jax.random.split(key, 3)
        high = jax.random.uniform(keys[0]) > 0.25
        z = jax.random.uniform(keys[1]) * theta
        return sad.bernoulli(keys[2], jnp.where(high, z, 0.5)) * (1.0 + z)

    mean = lambda theta: 0.75 * (theta / 2 + theta**2 / 3) + 0.25 * 0.5 * (1 + theta / 2)
    agree(program, mean, 0.7)


def test_sampler_of_ones_own():
    """A two-point distribution on {−1, 2}."""
    invert = lambda uniform, p: jnp.where(uniform < p, 2, -1)
    flips = lambda value, parameters, tangents: [
        (1 - value, jnp.where(value == 2, -tangents[0], tangents[0]))
    ]
    points = sad.Sampler(invert, flips, (0,))
    program = lambda p, key: jnp.prod(points(key, p * jnp.array([0.5, 1.0])) + 0.5 * p)
    agree(program, lambda p: (3 * 0.5 * p - 1 + 0.5 * p) * (3 * p - 1 + 0.5 * p), 0.6)


def test_rule_of_ones_own():
    """`erf_inv`, as if it were not in the table: it is refused, until it is registered."""
    from diffmh.sad import interpreter, primitives

    program = lambda p, key: jax.lax.erf_inv(0.5 * p) + 2.0 * sad.bernoulli(key, p)
    rule = interpreter.RULES.pop("erf_inv")
    primitives.SMOOTH.remove("erf_inv")
    try:
        with pytest.raises(TypeError, match=r"primitive `erf_inv` at .*test_sad_language.py"):
            jax.grad(sad.expectation(program))(0.5, jax.random.key(0))
        sad.register("erf_inv", "smooth")
        exact = 2.0 + jax.grad(lambda p: jax.lax.erf_inv(0.5 * p))(0.5)
        assert abs(jax.grad(sad.expectation(program))(0.5, jax.random.key(0)) - exact) < 1e-5
    finally:
        primitives.SMOOTH.add("erf_inv")
        interpreter.RULES["erf_inv"] = rule
