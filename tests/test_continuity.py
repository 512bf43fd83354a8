"""Steps that make a jump are seen, by densities and by programs, and steps that make none pass."""

import jax
import jax.numpy as jnp
import jax.scipy.stats as stats
import numpy as np
import pytest

import diffmh
from diffmh import _crossing, sad
from diffmh._bounds import decided
from diffmh._continuity import moving_jumps
from diffmh._lowering import compat

KEY = jax.random.key(0)
KNOTS, HEIGHTS = jnp.array([-2.0, 0.0, 1.0, 3.0]), jnp.array([1.0, 0.0, 2.0, -1.0])
MANY = jnp.linspace(-2, 2, 50)

CONTINUOUS = {
    "leaky ReLU": jax.nn.leaky_relu,
    "elu": jax.nn.elu,
    "hard tanh": jax.nn.hard_tanh,
    "sparse plus": jax.nn.sparse_plus,
    "sinc": jnp.sinc,
    "Huber": lambda z: jnp.where(jnp.abs(z) <= 1.5, 0.5 * z**2, 1.5 * (jnp.abs(z) - 0.75)),
    "Huber of a vector": lambda z: jnp.sum(
        jnp.where(jnp.abs(z * MANY) < 1, 0.5 * (z * MANY) ** 2, jnp.abs(z * MANY) - 0.5)
    ),
    "interp": lambda z: jnp.interp(z, KNOTS, HEIGHTS),
    "piecewise": lambda z: jnp.piecewise(
        z, [z < 0, z >= 1], [lambda v: 0 * v, lambda v: 2 * v - 1, lambda v: v**2]
    ),
    "a window": lambda z: jnp.where(jnp.abs(z) < 1, 1 - z**2, 0.0),
    "a bracket far away": lambda z: jnp.where(z > 50_000, 0.2 * z - 5_000, 0.1 * z),
    "a root": lambda z: jnp.sqrt(jnp.where(z > 0, z, 0.0)),
    "sign": lambda z: jnp.sign(z) * z**2,
    "the largest": lambda z: (z * MANY)[jnp.argmax(z * MANY)],
    "an angle": lambda z: jnp.cos(jnp.arctan2(z, -0.5)),
    "distribution function": stats.norm.cdf,
    "gamma density": lambda z: stats.gamma.pdf(z, 2.0),
    "gamma log density": lambda z: stats.gamma.logpdf(jnp.exp(z), 2.0),
    "beta log density": lambda z: stats.beta.logpdf(jax.nn.sigmoid(z), 2.0, 3.0),
}

JUMPING = {
    "a step": lambda z: jnp.where(z <= 0.25, 0.0, 1.0),
    "a small step": lambda z: jnp.where(z > 0, z + 0.01, z),
    "one side of two": lambda z: jnp.where(jnp.abs(z) <= 1, z, 1.0),
    "Huber with a mistake": lambda z: jnp.where(jnp.abs(z) <= 1, 0.5 * z**2, jnp.abs(z)),
    "one of many": lambda z: jnp.sum(
        jnp.where(z * MANY > 1, jnp.where(jnp.arange(50) == 40, 2.0, 1.0), z * MANY)
    ),
    "a bracket far away": lambda z: jnp.where(z > 50_000, 0.2 * z - 4_000, 0.1 * z),
    "interp with a double knot": lambda z: jnp.interp(
        z, jnp.array([-1.0, 0.5, 0.50001, 2.0]), jnp.array([0.0, 0.0, 1.0, 1.0])
    ),
    "fraction": lambda z: z - jnp.floor(z),
    "remainder": lambda z: jax.lax.rem(z, 1.0),
    "modulo": lambda z: jnp.mod(z, 2.0),
    "rounding": lambda z: jnp.round(2 * z),
    "a table": lambda z: HEIGHTS[jnp.clip((z + 2).astype(int), 0, 3)],
    "a search": lambda z: 0.1 * jnp.searchsorted(MANY, z),
    "an index": lambda z: 1.0 * jnp.argmax(jnp.stack([z, 0.3])),
    "the nearest": lambda z: MANY[jnp.argmin(jnp.abs(MANY - z))],
    "top": lambda z: 1.0 * jax.lax.top_k(jnp.stack([z, 0.3]), 1)[1][0],
    "an atom": lambda z: jnp.where(jnp.clip(z, 0, 1) == 1, 3.0, jnp.clip(z, 0, 1)),
    "NaN": lambda z: jnp.where(jnp.isnan(jnp.log(z)), 5.0, 0.0),
    "infinity": lambda z: jnp.where(jnp.isfinite(jnp.log(z)), 1.0, 0.0),
    "a quotient": lambda z: (z + 0.5) / jnp.abs(z + 0.5),
    "an angle": lambda z: jnp.arctan2(z, -0.5),
    "a bit": lambda z: 1.0 * jnp.signbit(z),
    "payload": lambda z: jax.lax.sort((jnp.stack([z, 0.3]), jnp.ones(2).at[0].set(2.0)))[1][0],
    "a choice": lambda z: jax.lax.cond(z > 0.2, lambda: z, lambda: z + 0.5),
    "a count": lambda z: jax.lax.fori_loop(0, 5, lambda i, c: c + 0.2 * (z > 0.3 * i), 0.0),
    "a loop": lambda z: jax.lax.while_loop(lambda c: c < z, lambda c: c + 0.5, 0.0),
    "support": lambda z: stats.uniform.logpdf(z),
    "not a number": lambda z: jnp.where(z > 0.2, jnp.sqrt(z - 99), 1 + jnp.sqrt(z - 99)),
    "logarithm": lambda z: jnp.where(z > 0, jnp.log(jnp.where(z > 0, z, 1.0)), 0.0),
}


def is_refused(function):
    def program(theta, key):
        key_normal, key_draw = jax.random.split(key)
        z = theta + jax.random.normal(key_normal)
        return function(z) * (1.0 + sad.bernoulli(key_draw, jax.nn.sigmoid(theta)))

    try:
        jax.eval_shape(jax.grad(sad.expectation(program)), 0.3, KEY)
    except diffmh.NotDifferentiable:
        return True
    return False


@pytest.mark.parametrize("name", CONTINUOUS)
def test_continuous(name):
    function = CONTINUOUS[name]
    assert not moving_jumps(lambda theta, x: function(x - theta), 0.7, 0.1)
    assert not is_refused(function)


@pytest.mark.parametrize("name", JUMPING)
def test_jumping(name):
    function = JUMPING[name]
    assert moving_jumps(lambda theta, x: function(x - theta), 0.7, 0.1)
    assert is_refused(function)


def pieces(seed, jump):
    """A continuous function in random pieces, one of which is moved by `jump`."""
    rng = np.random.default_rng(seed)
    knots, slopes = np.sort(rng.normal(size=4)), rng.normal(size=(5, 2))
    moved = rng.integers(0, 4)

    def function(z):
        value = slopes[0, 0] * z + slopes[0, 1] * z**2
        for i, knot in enumerate(knots):
            further = slopes[i + 1, 0] * (z - knot) + slopes[i + 1, 1] * (z - knot) ** 2
            value = jnp.where(z > knot, value + further + jump * (i == moved), value)
        return value

    return function


@pytest.mark.parametrize("seed", range(6))
def test_random_pieces(seed):
    for jump, jumps in ((0.0, False), (0.02, True)):
        function = pieces(seed, jump)
        found = moving_jumps(lambda theta, x, f=function: f(x - theta), 0.7, 0.1)
        assert bool(found) == jumps
        assert is_refused(function) == jumps


def test_a_jump_is_not_seen_without_both_sides(monkeypatch):
    """The trial does the work: if all that it compares were the same, jumps would pass."""
    monkeypatch.setattr(_crossing, "_jumps", lambda *_: False)
    monkeypatch.setattr(_crossing, "_FOUND", {})
    assert not is_refused(JUMPING["a small step"])


def test_what_is_continuous_has_the_right_derivative():
    """`E f(θ + Z)`, by quadrature."""
    fine = jnp.linspace(-9, 9, 20_001)
    density = jnp.exp(-0.5 * fine**2)
    density = density / density.sum()
    for name in ("Huber", "interp", "distribution function"):
        function = CONTINUOUS[name]
        mean = lambda theta, f=function: jnp.sum(density * jax.vmap(f)(theta + fine))
        program = lambda theta, key, f=function: f(theta + jax.random.normal(key))
        report = sad.run(program, 0.3, KEY, num_replicates=20_000)
        assert abs(report.gradient - jax.grad(mean)(0.3)) < 5 * report.gradient_error


@pytest.mark.parametrize(
    ("compare", "always"),
    [
        (lambda x: jnp.exp(x) >= 0, True),
        (lambda x: jnp.exp(x) > 0, False),  # It underflows.
        (lambda x: jnp.exp(x) < 0, True),
        (lambda x: jax.nn.sigmoid(x) > 1, True),
        (lambda x: jax.nn.sigmoid(x) < 0.5, False),
        (lambda x: 1 - jax.nn.sigmoid(x) <= 1, True),
        (lambda x: x**2 + 1 < 1, True),
        (lambda x: x**2 - 1 < 0, False),
        (lambda x: x**3 < 0, False),
        (lambda x: jnp.abs(x) <= 1, False),
        (lambda x: jnp.tanh(x) / (2 + x**2) > 1, True),
        (lambda x: jnp.tanh(x) / (2 - x**2) > 1, False),
        (lambda x: jnp.maximum(x, 3.0) == 2, True),
        (lambda x: jnp.maximum(x, 3.0) == 3, False),
        (lambda x: -jnp.sum(jnp.sqrt(x * jnp.arange(3.0))) <= 0, True),
        (lambda x: x < 0, False),
    ],
)
def test_bounds_decide_comparisons(compare, always):
    program, _ = compat.program(compare, 0.3, differentiated=False)
    comparison = program.equations[-1]
    assert comparison.outputs[0].dtype == bool
    assert decided(program, comparison) == always
