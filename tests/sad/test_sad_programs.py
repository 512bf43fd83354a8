"""Programs that were not made for `sad`: random walks, queues, filters, inventories, each
against its exact derivative.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import derivative, finite_chain_mean
from sad_runs import QUICK, derivatives
from scipy.stats import poisson
from unbiasedness import assert_unbiased

from diffmh import sad

TABLE = np.array([0.3, -1.0, 0.8, 0.1])

# Each sampler at a parameter θ, and d/dθ E[X²].
SAMPLERS = {
    "bernoulli": (sad.bernoulli, [1e-4, 0.02, 0.5, 0.97, 0.9999], lambda p: 1.0),
    "binomial": (
        lambda key, p: sad.binomial(key, 7, p),
        [1e-3, 0.02, 0.5, 0.97, 0.999],
        lambda p: 7 * (1 - 2 * p) + 98 * p,
    ),
    "poisson": (sad.poisson, [0.01, 0.3, 2.5, 40.0], lambda rate: 1 + 2 * rate),
    "geometric": (sad.geometric, [0.05, 0.3, 0.97, 0.99], lambda p: (p - 4) / p**3),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_second_moment_of_each_sampler(name):
    sampler, grid, exact = SAMPLERS[name]
    program = sad.expectation(lambda theta, key: sampler(key, theta).astype(float) ** 2)
    keys = jax.random.split(jax.random.key(0), (len(grid), 40_000))
    found = jax.jit(jax.vmap(jax.vmap(jax.grad(program), (None, 0))), compiler_options=QUICK)(
        jnp.array(grid), keys
    )
    assert_unbiased(found.T, np.array([exact(theta) for theta in grid]), name)


def test_second_moment_of_categorical():
    """Among the grid, categories of probability 10⁻⁶ and nearly 1."""
    program = sad.expectation(
        lambda theta, key: sad.categorical(key, theta * TABLE).astype(float) ** 2
    )
    mean = lambda theta: jax.nn.softmax(theta * TABLE) @ jnp.arange(4.0) ** 2
    grid = jnp.array([0.0, 0.7, -3.0, 8.0, -12.0])
    keys = jax.random.split(jax.random.key(0), (len(grid), 40_000))
    found = jax.jit(jax.vmap(jax.vmap(jax.grad(program), (None, 0))), compiler_options=QUICK)(
        grid, keys
    )
    assert_unbiased(found.T, jax.jit(jax.vmap(jax.grad(mean)))(grid), "categorical")


def test_product_of_dependent_draws():
    def program(theta, key):
        key_x, key_y = jax.random.split(key)
        x = sad.binomial(key_x, 3, theta)
        return x * sad.bernoulli(key_y, theta ** (1 + x.astype(float)))

    mean = lambda p: sum(
        c * p**k * (1 - p) ** (3 - k) * k * p ** (1 + k) for k, c in enumerate([1, 3, 3, 1])
    )
    assert_unbiased(derivatives(program, 0.4, 40_000)[:, 0, 0], jax.jit(jax.grad(mean))(0.4))


def test_random_walk_whose_steps_depend_on_its_position():
    """n = 50: E[x], E[x²] of the end and the mean of x on the way."""

    def program(theta, key):
        def step(x, key):
            up = sad.bernoulli(key, jax.nn.sigmoid(theta[0] - theta[1] * x))
            x = x + jnp.where(up, 1, -1)
            return x, x

        x, path = jax.lax.scan(step, 0, jax.random.split(key, 50))
        return jnp.stack([x.astype(float), x.astype(float) ** 2, path.mean()])

    positions = np.arange(-50, 51)

    def mean(theta):
        up = 1 / (1 + np.exp(theta[1] * positions - theta[0]))
        matrix = np.zeros((101, 101), complex)
        matrix[np.arange(100), np.arange(1, 101)] = up[:-1]
        matrix[np.arange(1, 101), np.arange(100)] = (1 - up)[1:]
        powers = np.stack([positions, positions**2], axis=1)
        end = finite_chain_mean(matrix, 50, powers, 1, 49)
        return np.append(end, finite_chain_mean(matrix, 50, powers, 50, 0)[0])

    theta = np.array([0.2, 0.1])
    assert_unbiased(derivatives(program, jnp.array(theta), 20_000), derivative(mean, theta)[1])


@pytest.mark.parametrize("counted_as", ["float", "int"])
@pytest.mark.parametrize("alternatives", [pytest.param(1, marks=pytest.mark.thorough), 3])
def test_queue_until_it_empties(counted_as, alternatives):
    """Alternative and primal empty at different times; totals are banked as floats, and carried
    along as integers.
    """
    dtype = jnp.float32 if counted_as == "float" else jnp.int32

    def program(theta, key):
        def serve(state):
            length, key, steps, waiting = state
            key, key_arrive, key_serve = jax.random.split(key, 3)
            arrives = sad.bernoulli(key_arrive, theta)
            served = jax.random.bernoulli(key_serve, 0.6)
            waiting = waiting + length.astype(dtype)
            return length + arrives.astype(int) - served.astype(int), key, steps + 1, waiting

        start = (jnp.array(2), key, jnp.zeros((), dtype), jnp.zeros((), dtype))
        _, _, steps, waiting = jax.lax.while_loop(lambda state: state[0] > 0, serve, start)
        return jnp.stack([steps, waiting])

    def mean(theta):
        p, size = theta[0], 200
        up, down = p * 0.4, (1 - p) * 0.6
        matrix = np.eye(size, dtype=complex) * (1 - up - down)
        matrix += np.diag(np.full(size - 1, up), 1) + np.diag(np.full(size - 1, down), -1)
        lengths = np.arange(1, size + 1)
        total = np.linalg.solve(
            np.eye(size) - matrix, np.stack([np.ones(size), lengths], axis=1).astype(complex)
        )
        return total[1]

    found = derivatives(program, 0.2, 20_000, alternatives=alternatives)
    assert_unbiased(found, derivative(mean, 0.2)[1])


def neighbours(board, roll):
    shifts = [shift for shift in itertools.product([-1, 0, 1], repeat=2) if shift != (0, 0)]
    return sum(roll(board, shift, (0, 1)) for shift in shifts)


def test_stochastic_game_of_life():
    """4×4 torus, three steps: what Conway's rule lets live does so with probability θ₀ (if it
    lived before) or θ₁.
    """
    start = np.array([[0, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0]])

    def program(theta, key):
        def step(board, key):
            around = neighbours(board, jnp.roll)
            survives, is_born = (
                (board == 1) & ((around == 2) | (around == 3)),
                (board == 0) & (around == 3),
            )
            board = sad.bernoulli(
                key, jnp.where(survives, theta[0], jnp.where(is_born, theta[1], 0.0))
            ).astype(int)
            return board, None

        board, _ = jax.lax.scan(step, jnp.array(start), jax.random.split(key, 3))
        return jnp.stack([board.sum(), board[1, 1] * board[2, 2]]).astype(float)

    def mean(theta):
        boards = {start.tobytes(): 1.0 + 0j}
        for _ in range(3):
            after: dict[bytes, complex] = {}
            for key, weight in boards.items():
                board = np.frombuffer(key, start.dtype).reshape(4, 4)
                around = neighbours(board, np.roll)
                survives, is_born = (
                    (board == 1) & ((around == 2) | (around == 3)),
                    (board == 0) & (around == 3),
                )
                sites = np.argwhere(survives | is_born)
                p = [theta[0] if survives[tuple(site)] else theta[1] for site in sites]
                for alive in itertools.product([0, 1], repeat=len(sites)):
                    result = np.zeros((4, 4), start.dtype)
                    result[tuple(sites.T)] = alive
                    chance = np.prod([q if a else 1 - q for q, a in zip(p, alive, strict=True)])
                    after[result.tobytes()] = after.get(result.tobytes(), 0) + weight * chance
            boards = after
        total = np.zeros(2, complex)
        for key, weight in boards.items():
            board = np.frombuffer(key, start.dtype).reshape(4, 4)
            total += weight * np.array([board.sum(), board[1, 1] * board[2, 2]])
        return total

    theta = np.array([0.8, 0.7])
    assert_unbiased(derivatives(program, jnp.array(theta), 20_000), derivative(mean, theta)[1])


def test_particle_filter():
    """Three particles, resampled by weights that depend on θ; the log likelihood's estimate and
    the mean of the particles.
    """
    observations, drift, start = (
        np.array([0.5, 1.5, 1.0]),
        np.array([-1.0, 0.0, 1.0]),
        np.array([0.0, 1.0, 2.0]),
    )

    def program(theta, key):
        def step(carry, inputs):
            particles, log_likelihood = carry
            observation, key = inputs
            log_weight = -theta * (particles - observation) ** 2
            log_likelihood = log_likelihood + jax.nn.logsumexp(log_weight)
            parents = sad.categorical(key, jnp.broadcast_to(log_weight, (3, 3)))
            return (0.7 * particles[parents] + drift, log_likelihood), None

        inputs = (jnp.array(observations), jax.random.split(key, 3))
        (particles, log_likelihood), _ = jax.lax.scan(step, (jnp.array(start), 0.0), inputs)
        return jnp.stack([log_likelihood, particles.mean(), jnp.prod(particles)])

    def mean(theta):
        def rest(particles, log_likelihood, observations):
            if not observations:
                return np.array([log_likelihood, particles.mean(), particles.prod()])
            weight = np.exp(-theta[0] * (particles - observations[0]) ** 2)
            likelihood, p = log_likelihood + np.log(weight.sum()), weight / weight.sum()
            total = np.zeros(3, complex)
            for parents in itertools.product(range(3), repeat=3):
                after = 0.7 * particles[list(parents)] + drift
                total += np.prod(p[list(parents)]) * rest(after, likelihood, observations[1:])
            return total

        return rest(start, 0.0, list(observations))

    assert_unbiased(derivatives(program, 0.6, 20_000)[:, :, 0], derivative(mean, 0.6)[1][:, 0])


def test_inventory_policy():
    """(s, S) = (3, 8), Poisson demand, twelve periods: d cost by demand and by the price of
    holding stock.
    """
    low, high, periods = 3, 8, 12

    def program(theta, key):
        def period(stock, key):
            demand = sad.poisson(key, theta["rate"])
            lost = jnp.maximum(demand - stock, 0)
            left = jnp.maximum(stock - demand, 0)
            orders = left < low
            cost = (
                theta["holding"] * left
                + 4.0 * lost
                + jnp.where(orders, 2.0 + 0.5 * (high - left), 0.0)
            )
            return jnp.where(orders, high, left), cost

        _, costs = jax.lax.scan(period, jnp.array(high), jax.random.split(key, periods))
        return costs.sum()

    def mean(theta):
        holding, rate = theta
        demands = np.arange(80)
        p = poisson.pmf(demands, rate.real) * (1 + 1j * (demands / rate.real - 1) * rate.imag)
        matrix, cost = np.zeros((high + 1, high + 1), complex), np.zeros(high + 1, complex)
        for stock in range(high + 1):
            left, lost = np.maximum(stock - demands, 0), np.maximum(demands - stock, 0)
            orders = left < low
            cost[stock] = p @ (
                holding * left + 4.0 * lost + np.where(orders, 2.0 + 0.5 * (high - left), 0.0)
            )
            np.add.at(matrix[stock], np.where(orders, high, left), p)
        row = np.eye(high + 1, dtype=complex)[high]
        total = np.zeros(1, complex)
        for _ in range(periods):
            total = total + row @ cost
            row = row @ matrix
        return total

    theta = {"holding": jnp.array(0.3), "rate": jnp.array(2.5)}
    assert_unbiased(derivatives(program, theta, 20_000), derivative(mean, [0.3, 2.5])[1])


def test_nested_binomials():
    """A binomial draw of a binomial draw is one of n and p²: E[X²] = n p² (1 − p²) + n² p⁴."""

    def program(p, key):
        key_n, key_x = jax.random.split(key)
        x = sad.binomial(key_x, sad.binomial(key_n, 10, p), p)
        return jnp.stack([1.0 * x, 1.0 * x**2])

    mean = lambda p: jnp.stack([10 * p**2, 10 * p**2 * (1 - p**2) + 100 * p**4])
    assert_unbiased(derivatives(program, 0.6, 20_000)[:, :, 0], jax.jit(jax.jacfwd(mean))(0.6))


@pytest.mark.parametrize("alternatives", [pytest.param(1, marks=pytest.mark.thorough), 3])
def test_counts_that_remember(alternatives):
    """An integer GARCH: the mean of the counts follows a linear recursion."""

    def program(theta, key):
        def step(state, key):
            count, rate = state
            rate = theta[0] + theta[1] * count + theta[2] * rate
            count = sad.poisson(key, rate)
            return (count, rate), 1.0 * count

        start = (jnp.array(1), jnp.array(1.0))
        return jax.lax.scan(step, start, jax.random.split(key, 12))[1].mean()

    def mean(theta):
        count, rate, total = 1.0, 1.0, 0.0
        for _ in range(12):
            rate = theta[0] + theta[1] * count + theta[2] * rate
            count = rate
            total = total + count
        return total / 12

    theta = jnp.array([0.5, 0.4, 0.3])
    found = derivatives(program, theta, 20_000, alternatives=alternatives)[:, 0]
    assert_unbiased(found, jax.jit(jax.grad(mean))(theta))


def test_random_walk_of_a_hundred_steps():
    """Steps down with a probability that grows with the position: mean and mean square at the end,
    against the matrix of the walk.
    """

    def program(theta, key):
        def step(x, key):
            return x + 1 - 2 * sad.bernoulli(key, 1 - jnp.exp(-(x + 101) / theta)), None

        x, _ = jax.lax.scan(step, 0, jax.random.split(key, 100))
        return jnp.stack([1.0 * x, (1.0 * x) ** 2])

    positions = np.arange(-100, 101)

    def mean(theta):
        down = 1 - np.exp(-(positions + 101) / theta[0])
        matrix = np.zeros((201, 201), complex)
        matrix[np.arange(200), np.arange(1, 201)] = (1 - down)[:-1]
        matrix[np.arange(1, 201), np.arange(200)] = down[1:]
        powers = np.stack([positions, positions**2], axis=1)
        return finite_chain_mean(matrix, 100, powers, 1, 99)

    exact = derivative(mean, np.array([150.0]))[1]
    assert_unbiased(derivatives(program, 150.0, 20_000), exact)
