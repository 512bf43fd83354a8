"""The parts of the analysis of continuity: terms, bounds, and both sides of a step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffmh.analysis import moving_jumps
from diffmh.analysis.algebra import Algebra
from diffmh.analysis.facts import Facts
from diffmh.analysis.sides import Prover
from diffmh.analysis.terms import ONE, ZERO, Singular, number
from diffmh.jaxprs import compat

PRECISION = 1e-6


def variables():
    algebra = Algebra()
    return algebra, algebra.unknown("x"), algebra.unknown("y")


def test_polynomials_are_equal_if_their_coefficients_are():
    algebra, x, y = variables()
    total = algebra.add(x, y)
    square = algebra.multiply(total, total)
    expanded = algebra.add(
        algebra.multiply(x, x), algebra.scale(2.0, algebra.multiply(x, y)), algebra.multiply(y, y)
    )
    assert algebra.equal(square, expanded, PRECISION)
    assert not algebra.equal(square, algebra.add(expanded, number(1e-3)), PRECISION)
    # n (n − 1)/2 is 0 for n = 0 and n = 1, which proves nothing.
    assert not algebra.equal(algebra.multiply(x, algebra.subtract(x, ONE)), ZERO, PRECISION)


def test_small_and_large_constants_are_compared_by_their_own_size():
    algebra = Algebra()
    assert not algebra.equal(number(8e-21), number(4e-21), PRECISION)
    assert not algebra.equal(number(1_000_010.0), number(1_000_000.0), PRECISION)
    assert algebra.equal(number(1_000_000.01), number(1_000_000.0), PRECISION)


def test_fractions_roots_and_magnitudes():
    algebra, x, y = variables()
    total = algebra.add(x, y)
    fraction = algebra.add(algebra.divide(x, total), algebra.divide(y, total))
    assert algebra.equal(fraction, ONE, PRECISION)
    root = algebra.function("sqrt", total)
    assert algebra.equal(algebra.multiply(root, root), total, PRECISION)
    magnitude = algebra.function("abs", algebra.subtract(x, y))
    assert algebra.equal(magnitude, algebra.function("abs", algebra.subtract(y, x)), PRECISION)
    assert not algebra.equal(magnitude, algebra.subtract(x, y), PRECISION)
    with pytest.raises(Singular):
        algebra.divide(x, ZERO)
    with pytest.raises(Singular):
        algebra.multiply(ZERO, algebra.function("log", ZERO))


@pytest.mark.parametrize(
    ("compare", "always"),
    [
        (lambda x: jnp.exp(x) >= 0, True),
        (lambda x: jnp.exp(x) > 0, True),  # Underflow is not a step.
        (lambda x: jnp.exp(x) < 0, True),
        (lambda x: jnp.exp(x) > 1e-3, False),
        (lambda x: jax.nn.sigmoid(x) > 1, True),
        (lambda x: jax.nn.sigmoid(x) < 0.5, False),
        (lambda x: 1 - jax.nn.sigmoid(x) < 1, True),
        (lambda x: x**2 + 1 < 1, True),
        (lambda x: x**2 > 0, False),
        (lambda x: jnp.sqrt(x**2) > 0, False),
        (lambda x: x**2 - 1 < 0, False),
        (lambda x: x**3 < 0, False),
        (lambda x: jnp.abs(x) <= 1, False),
        (lambda x: jnp.tanh(x) / (2 + x**2) > 1, True),
        (lambda x: jnp.tanh(x) / (2 - x**2) > 1, False),
        (lambda x: jnp.maximum(x, 3.0) == 2, True),
        (lambda x: jnp.maximum(x, 3.0) == 3, False),
        (lambda x: -jnp.sum(jnp.sqrt(x * jnp.arange(3.0))) <= 0, True),
        (lambda x: x < 0, False),
        (lambda x: jnp.isfinite(x**2), True),
        (lambda x: jnp.isfinite(jnp.log(x)), False),
        (lambda x: jnp.log(1 + x**2) == jnp.inf, True),
    ],
)
def test_bounds_decide_comparisons(compare, always):
    program, _ = compat.program(compare, 0.3)
    values = [*program.inputs, *(v for e in program.equations for v in e.outputs)]
    facts = Facts(program, program.inputs, values)
    assert (facts.bounds.truth(program.outputs[0]) is not None) == always


def pieces(seed, jump):
    """A continuous function in random pieces, one of which is moved by `jump`."""
    rng = np.random.default_rng(seed)
    knots, slopes = np.sort(rng.normal(size=4)), rng.normal(size=(5, 2))
    moved = rng.integers(0, 4)

    def function(theta, x):
        z = x - theta
        value = slopes[0, 0] * z + slopes[0, 1] * z**2
        for i, knot in enumerate(knots):
            further = slopes[i + 1, 0] * (z - knot) + slopes[i + 1, 1] * (z - knot) ** 2
            value = jnp.where(z > knot, value + further + jump * (i == moved), value)
        return value

    return function


@pytest.mark.parametrize("seed", range(6))
def test_random_pieces(seed):
    assert not moving_jumps(pieces(seed, 0.0), 0.7, 0.1)
    assert moving_jumps(pieces(seed, 0.02), 0.7, 0.1)
    assert moving_jumps(pieces(seed, 1e-4), 0.7, 0.1)


def test_mistake_sides_that_are_not_compared(monkeypatch):
    """The proof does the work: if all sides were found equal, jumps would pass."""
    monkeypatch.setattr(Prover, "_differ", lambda *_: False)
    assert not moving_jumps(pieces(0, 0.02), 0.7, 0.1)


def test_mistake_a_value_with_steps_taken_for_the_same_on_both_sides(monkeypatch):
    """A value that cannot be taken apart keeps its steps: here a carry of a loop."""

    def counted(theta, x):
        above = jax.lax.fori_loop(0, 3, lambda i, n: n + jnp.where(x > theta + i, 1.0, 0.0), 0.0)
        return jnp.where(x > theta, above, above)

    assert moving_jumps(counted, 0.7, 0.1)
    monkeypatch.setattr(Prover, "remaining", lambda *_: {})
    assert not moving_jumps(counted, 0.7, 0.1)


def test_data_are_unknown():
    """A fact that holds for some numbers only is not proved, wherever they come from."""
    where = jnp.where
    for n in (5, 1):
        assert moving_jumps(lambda t, x, n=n: where(x < t, jnp.int32(n) * x, 0.0), 0.7, 0.1)
    table = jnp.array([0.0, 1.0])
    assert moving_jumps(lambda t, x: where(x * table < t, table - 1, 0.0).sum(), 0.7, 0.1)
    assert not moving_jumps(lambda t, x: where(x * table < t, x * table, t).sum(), 0.7, 0.1)
    assert moving_jumps(lambda t, x: where(x[0] < t, x[1], t), 0.7, jnp.zeros(2))
    pairs = lambda t, x: where(x[:, None] > t * x[None, :], x[:, None], t * x[None, :]).sum()
    crossed = lambda t, x: where(x[:, None] > t * x[None, :], x[None, :], t * x[:, None]).sum()
    assert not moving_jumps(pairs, 0.7, jnp.zeros(3))
    assert moving_jumps(crossed, 0.7, jnp.zeros(3))


def test_norms_need_entries_of_their_own():
    unit = lambda v: v / jnp.linalg.norm(v)
    assert not moving_jumps(lambda t, x: unit(x - t)[0], 0.7, jnp.zeros(3))
    assert moving_jumps(lambda t, x: unit(x - t)[0], 0.7, jnp.zeros(2))
    # One number three times is a sign.
    assert moving_jumps(lambda t, x: unit((x - t) * jnp.ones(3))[0], 0.7, 0.1)
    assert moving_jumps(lambda t, x: unit((x - t) * jnp.array([1.0, 0, 0]))[0], 0.7, jnp.zeros(3))


def test_functions_are_known_by_their_equations():
    """Not by their name, nor by one equation of many."""
    from jax.scipy import special

    assert not moving_jumps(lambda t, x: special.betaln(jnp.exp(x - t), 2.0), 0.7, 0.1)
    assert not moving_jumps(lambda t, x: jnp.interp(x - t, jnp.arange(3.0), jnp.ones(3)), 0.7, 0.1)
    double = jnp.array([0.0, 1.0, 1.0])
    assert moving_jumps(lambda t, x: jnp.interp(x - t, double, jnp.arange(3.0)), 0.7, 0.1)

    @jax.jit
    def sinc(z):
        return jnp.where(z > 0, 1.0, 0.0)

    assert moving_jumps(lambda t, x: sinc(x - t), 0.7, 0.1)
    step = lambda z: jnp.where(z > 0.3, jnp.log(jnp.abs(z)), 0.0)
    assert moving_jumps(lambda t, x: special.betaln(jnp.exp(x), 2.0) + step(x - t), 0.7, 0.1)


def _key_of(x, other):
    return jax.lax.sort((x, other), num_keys=2)[1][0]


JUMPS = {
    "integers round when they are divided": lambda t, x, n: jnp.where(x < t, (n // 2) * 2, n) * 1.0,
    "small integers wrap": lambda t, x, n: jnp.where(x < t, n.astype(jnp.int8), n) * 1.0,
    "unsigned integers wrap": lambda t, x, n: (
        jnp.where(x < t, n.astype(jnp.uint8) - jnp.uint8(9), n.astype(jnp.uint8) - 9.0) * 1.0
    ),
    "a root of a square has two branches": lambda t, x, n: jnp.where(
        jnp.sqrt((x - t) ** 2) == x - t, 1.0, 0.0
    ),
    "a second key": lambda t, x, n: _key_of(jnp.stack([x, t]), jnp.array([0.0, 1.0])),
    "a matrix stops being positive": lambda t, x, n: jnp.where(
        jnp.isnan(jnp.linalg.cholesky((x - t) * jnp.eye(2))).any(), 1.0, 0.0
    ),
    "half precision": lambda t, x, n: jnp.where(x < t, jnp.float16(1.0), jnp.float16(1.004)).astype(
        float
    ),
}


@pytest.mark.parametrize("name", JUMPS)
def test_what_only_looks_equal(name):
    n = jnp.int32(5)
    assert moving_jumps(lambda t, x: JUMPS[name](t, x, n), 0.7, 0.1)


def _part_of_a_surface(function):
    """`where(place > 0, ...)` whose place has two factors: it steps where either of them is 0."""
    return moving_jumps(lambda t, x: function(x[0] - t, x[1], x[2]), 0.3, jnp.zeros(3))


FACTORS = {
    "a factor that the value does not have": lambda u, a, b: jnp.where(u * (a + 1) > 0, a + 1, 0.0),
    "a factor that is 0 on an interval": lambda u, a, b: jnp.where(
        jnp.maximum(u, 0.0) * (a + 1) > 0, a + 1, 0.0
    ),
    "three factors": lambda u, a, b: jnp.where(u * (u + b) * (a + 1) > 0, (a + 1) * (u + b), 0.0),
    "one variable in two factors": lambda u, a, b: jnp.where(b * (b - u) > 0, b - u, 0.0),
    "one variable in two factors, and no other": lambda u, a, b: jnp.where(u * (u + 1) > 0, u, 0.0),
}


@pytest.mark.parametrize("name", FACTORS)
def test_a_surface_has_as_many_parts_as_factors(name):
    assert _part_of_a_surface(FACTORS[name])


def test_continuous_on_every_part_of_a_surface():
    def positive_part(place):
        return jnp.where(place > 0, place, 0.0)

    assert not _part_of_a_surface(lambda u, a, b: positive_part(u * (a + 1)))
    assert not _part_of_a_surface(lambda u, a, b: positive_part(u * (u + b)))
    assert not _part_of_a_surface(lambda u, a, b: positive_part(jnp.maximum(u, 0.0) * (a + 1)))
    assert not _part_of_a_surface(lambda u, a, b: positive_part(a * u + b))
    assert not _part_of_a_surface(lambda u, a, b: positive_part(jnp.exp(a) * u + jnp.exp(a) * b))


def softplus(z, below=jnp.exp, first=-37.0, above=lambda z: z + jnp.exp(-z), last=33.3):
    """In four pieces, as PyTensor lowers it to JAX."""
    middle = jnp.where(z < 18.0, jnp.log1p(jnp.exp(z)), jnp.where(z < last, above(z), z))
    return jnp.where(z < first, below(z), middle)


def jumps_of_softplus(**pieces):
    of_pieces = lambda theta, x: jnp.sum(softplus(DATA @ x - theta, **pieces))
    with jax.enable_x64(True):
        return moving_jumps(of_pieces, np.float64(0.3), np.zeros(2))


DATA = np.array([[1.0, 0.5], [1.0, -0.7], [1.0, 2.0]])


def test_pieces_that_agree_to_rounding():
    assert jumps_of_softplus() == []


@pytest.mark.parametrize(
    "pieces",
    [
        {"below": lambda z: 0.0 * z},
        {"below": lambda z: (1 + 1e-12) * jnp.exp(z)},
        {"first": -25.0},
        {"above": lambda z: z + 2 * jnp.exp(-z)},
        {"above": lambda z: z},
        {"last": 25.0},
    ],
    ids=["0 below", "a factor", "too early", "a factor above", "no exp above", "too early above"],
)
def test_mistake_pieces_that_do_not_agree(pieces):
    """Jumps of 1e-28 to 1e-8, the smallest relative to their value 5e-13."""
    assert [jump.primitive for jump in jumps_of_softplus(**pieces)] == ["lt"]
