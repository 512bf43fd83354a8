"""Parameters out of range: refused where they are known, NaN in value and derivative where they are
known only when a compiled program runs; and draws that need more than the bits of one float.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from diffmh import sad
from diffmh.base.validate import NotDifferentiable
from diffmh.sad import samplers

KEY = jax.random.key(0)
NAN, INF = float("nan"), float("inf")

REFUSED = {
    r"bernoulli\(p=": [lambda x=x: sad.bernoulli(KEY, x) for x in (1.3, -0.3, NAN, INF)],
    r"poisson\(rate=": [lambda x=x: sad.poisson(KEY, x) for x in (-2.0, 1e10, NAN, INF)],
    r"geometric\(p=": [lambda x=x: sad.geometric(KEY, x) for x in (0.0, 1e-9, 1.3, NAN)],
    r"binomial\(p=": [lambda: sad.binomial(KEY, 3, 1.3)],
    r"binomial\(n=": [lambda: sad.binomial(KEY, -1, 0.5)],
    r"negative_binomial\(r=": [lambda: sad.negative_binomial(KEY, -1, 0.5)],
    r"negative_binomial\(p=": [lambda: sad.negative_binomial(KEY, 5, 0.0)],
    r"multinomial\(n=": [lambda: sad.multinomial(KEY, -1, jnp.array([0.5, 0.5]))],
    r"multinomial\(probs=": [
        lambda p=p: sad.multinomial(KEY, 3, jnp.array(p))
        for p in ([0.8, -0.2], [0.0, 0.0], [NAN, 1.0])
    ],
    r"categorical\(probs=": [lambda: sad.categorical(KEY, probs=jnp.array([0.5, -0.1, 0.6]))],
    r"categorical\(logits=": [
        lambda x=x: sad.categorical(KEY, jnp.array(x)) for x in ([0.0, INF], [-INF, -INF])
    ],
    r"uniform_int\(low=": [lambda: sad.uniform_int(KEY, 3, 3)],
}


@pytest.mark.parametrize("where", REFUSED)
def test_known_parameters_out_of_range_are_refused(where):
    for draw in REFUSED[where]:
        with pytest.raises(ValueError, match=where):
            draw()


def one_of(logit):
    return jnp.stack([logit, jnp.zeros_like(logit)])


# A draw whose distribution is that of `x`, and which x are in range.
DRAWS = {
    "bernoulli": (sad.bernoulli, [0.0, 0.4, 1.0], [1.3, -0.3, NAN, INF]),
    "poisson": (sad.poisson, [0.0, 2.0, 40.0], [-2.0, 1e10, NAN, INF]),
    "one-sided": (
        lambda key, x: sad.poisson(key, x, flips="one-sided"),
        [0.0, 2.0],
        [-2.0, 1e10, NAN],
    ),
    "geometric": (sad.geometric, [0.4, 1.0], [0.0, 1e-9, 1.3, NAN]),
    "binomial": (lambda key, x: sad.binomial(key, 3, x), [0.0, 0.5, 1.0], [-0.1, 1.1, NAN]),
    "trials": (
        lambda key, x: sad.binomial(key, jnp.round(jnp.nan_to_num(x)).astype(int), x / x / 2),
        [1.0, 3.0],
        [-1.0, 0.0],
    ),
    "negative_binomial": (
        lambda key, x: sad.negative_binomial(key, 5, x),
        [0.5, 1.0],
        [0.0, 1.2, 1e-8, NAN],
    ),
    "categorical": (
        lambda key, x: sad.categorical(key, one_of(x)),
        [0.0, 3.0, -INF],
        [INF, NAN],
    ),
    "probs": (
        lambda key, x: sad.categorical(key, probs=jnp.stack([x, 0.5 + 0 * x])),
        [0.0, 2.0],
        [-0.1, INF, NAN],
    ),
    "multinomial": (
        lambda key, x: sad.multinomial(key, 3, jnp.stack([0.5 + 0 * x, x]))[1],
        [0.0, 2.0],
        [-0.1, -0.5, -2.0, NAN],
    ),
    "uniform_int": (
        lambda key, x: sad.uniform_int(key, 0, jnp.round(x).astype(int)) + x.astype(float) * 0.0,
        [1.0, 7.0],
        [0.0, -3.0],
    ),
}


@pytest.mark.parametrize("name", DRAWS)
def test_out_of_range_when_it_runs(name):
    """Value, forward derivative and derivative by the score are numbers in range, NaN beyond."""
    draw, inside, outside = DRAWS[name]
    x = jnp.array([*inside, *outside])
    program = lambda theta, key, x: draw(key, x + 0.0 * theta) + theta

    def all_of(x):
        calls = [
            sad.expectation(program),
            sad.expectation(program, estimator=sad.Score()),
        ]
        return [
            calls[0](0.7, KEY, x),
            *(jax.value_and_grad(call)(jnp.float32(0.7), KEY, x) for call in calls),
        ]

    for found in jax.tree.leaves(jax.jit(jax.vmap(all_of))(x)):
        assert np.isfinite(found[: len(inside)]).all(), found
        assert np.isnan(found[len(inside) :]).all(), found


def looped(key, x):
    step = lambda total, key: (total + sad.bernoulli(key, x), None)
    return jax.lax.scan(step, 0.0, jax.random.split(key))[0]


def waited(key, x):
    def step(state):
        key, rounds = state
        key, key_draw = jax.random.split(key)
        return key, rounds + 1 + sad.bernoulli(key_draw, x)

    return jax.lax.while_loop(lambda state: state[1] < 2, step, (key, 0))[1] * 1.0


def chosen(key, x):
    key_choice, key_draw = jax.random.split(key)
    return jax.lax.cond(
        sad.bernoulli(key_choice, 1.0),
        lambda: sad.bernoulli(key_draw, x) * 2.0,
        lambda: sad.bernoulli(key_draw, 0.5) * 1.0,
    )


def mapped(key, x):
    return jax.vmap(sad.bernoulli)(jax.random.split(key), jnp.stack([x, x / x / 2])).sum()


def in_all(key, x):
    """Loops within loops, and a conditional in them."""

    def step(total, key):
        key_chosen, key_waited = jax.random.split(key)
        return total + jax.jit(chosen)(key_chosen, x) + waited(key_waited, x), None

    return jax.lax.scan(step, 0.0, jax.random.split(key))[0]


CONSTRUCTS = [looped, waited, chosen, mapped, in_all]
ESTIMATORS = [sad.Alternatives(), sad.Alternatives(3), sad.Score(), sad.Combined(), sad.Smooth()]


@pytest.mark.parametrize("moves", [True, False], ids=["theta", "args"])
def test_out_of_range_within_loops_and_conditionals(moves):
    """The same if theta or the data lead there, and for any number of parameters."""

    def program(theta, key, x, construct):
        return construct(key, x + (0.0 * theta.sum() if moves else 0.0)) + theta[0]

    # JAX goes backward with 17 parameters, and then through no `while_loop`.
    for count, constructs in ((1, CONSTRUCTS), (17, [looped, chosen, mapped])):
        theta = jnp.full(count, 0.3)

        def all_of(x, theta=theta, constructs=constructs):
            found = []
            for construct in constructs:
                call = sad.expectation(
                    lambda theta, key, x, construct=construct: program(theta, key, x, construct)
                )
                found += [call(theta, KEY, x), *jax.value_and_grad(call)(theta, KEY, x)]
            return found

        found = jax.jit(jax.vmap(all_of))(jnp.array([0.4, 1.3, NAN]))
        for one in found:
            assert np.isfinite(one[0]).all(), found
            assert np.isnan(one[1:]).all(), found


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=str)
@pytest.mark.parametrize("count", [1, 17])
def test_a_report_of_a_program_out_of_range(estimator, count):
    theta = jnp.full(count, 1.3 / count)
    program = lambda theta, key: looped(key, theta.sum())
    report = sad.run(program, theta, KEY, estimator=estimator, num_replicates=64)
    assert np.isnan(report.value) and np.isnan(report.gradient).all()
    assert any("out of range" in warning for warning in report.warnings)


def test_a_parameter_that_is_nan():
    """Also where JAX by itself has a number for the derivative, and nothing is drawn from it."""
    for program in (
        lambda theta, key: sad.bernoulli(key, theta),
        lambda theta, key: sad.bernoulli(key, 0.5) + theta,
    ):
        call = jax.jit(jax.value_and_grad(sad.expectation(program)))
        assert np.isnan(call(NAN, KEY)).all()
        assert np.isfinite(call(0.5, KEY)).all()


def test_a_probability_rounded_beyond_one_counts_as_one():
    above = 1 + jnp.finfo(float).eps
    mean = sad.expectation(lambda p, key: sad.bernoulli(key, p))
    assert jax.value_and_grad(mean)(above, KEY) == (1.0, 1.0)


def test_a_draw_in_the_condition_of_a_loop_has_known_parameters():
    goes_on = lambda state, p: sad.bernoulli(jax.random.fold_in(KEY, state), p)
    call = lambda p: sad.expectation(
        lambda theta, key, x: (
            theta
            + jax.lax.while_loop(
                lambda state: goes_on(state, 0.5 if p else x), lambda state: state + 1, 0
            )
        )
    )
    assert call(True)(1.0, KEY, 0.5) >= 1.0
    with pytest.raises(NotDifferentiable, match="draw in the body"):
        call(False)(1.0, KEY, 0.5)


BOUNDS = {
    "int8": [(-100, 100), (-128, 127), (3, 4)],
    "uint8": [(0, 255), (250, 255)],
    "int16": [(-32768, 32767)],
    "int32": [(0, 2**26), (-(2**31), 2**31 - 1), (-5, 2**30 + 7)],
    "uint32": [(0, 2**32 - 1), (7, 11)],
    "int64": [(0, 2**40), (-(2**63), 2**63 - 1), (-3, 2**62 + 5)],
}


@pytest.mark.parametrize("dtype", BOUNDS)
def test_uniform_integers_are_made_of_enough_bits(dtype):
    """`low + ⌊U (high − low)⌋` in exact arithmetic, U of twice as many bits as the integers."""
    with jax.enable_x64(True):
        wide = np.uint64 if dtype == "int64" else np.uint32
        width = np.iinfo(wide).bits
        bits = np.random.default_rng(0).integers(0, 2**width, (2, 500), wide)
        bits[:, :2] = [[0, 2**width - 1]] * 2
        for low, high in BOUNDS[dtype]:
            bounds = (jnp.full(500, bound, dtype) for bound in (low, high))
            first, last = bounds
            found = samplers.UNIFORM_INT.invert(jnp.asarray(bits[0]), first, last, bits[1])
            assert found.dtype == dtype
            exact = [
                low + ((int(a) << width) + int(b)) * (high - low) // 4**width for a, b in bits.T
            ]
            np.testing.assert_array_equal(np.asarray(found).astype(object), exact)


def test_uniform_integers_of_a_wide_range():
    """Twenty-six bits and more: their last one is random too."""
    keys = jax.random.split(KEY, 4_000)
    wide, narrow = jax.jit(
        jax.vmap(
            lambda key: (
                sad.uniform_int(key, 0, 2**26),
                sad.uniform_int(key, jnp.int8(-100), jnp.int8(100)),
            )
        )
    )(keys)
    assert abs(np.mean(np.asarray(wide) % 2) - 0.5) < 4 * 0.5 / 4_000**0.5
    assert abs(np.mean(np.asarray(wide) / 2.0**26) - 0.5) < 4 * 12**-0.5 / 4_000**0.5
    assert abs(np.mean(np.asarray(narrow, float)) + 0.5) < 4 * 57.74 / 4_000**0.5


@pytest.mark.parametrize(("r", "p"), [(5, 0.5), (1, 0.05), (40, 0.9), (0, 0.5), (3, 1.0)])
def test_negative_binomials_by_inversion(r, p):
    """`k` is drawn by the uniforms between `F(k − 1)` and `F(k)`."""
    uniform = (np.arange(2_000) + 0.4) / 2_000
    with jax.enable_x64(True):
        found = jax.vmap(samplers.NEGATIVE_BINOMIAL.invert, (0, None, None))(
            jnp.asarray(uniform), jnp.asarray(r), jnp.asarray(p)
        )
    exact = stats.nbinom.ppf(uniform, r, p) if r else 0
    np.testing.assert_array_equal(found, exact)
