"""Programs that would be silently wrong raise an error that names the line; and `sad.expectation`
is an ordinary JAX function.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import diffmh
from diffmh import sad

KEY = jax.random.key(0)
HERE = r"test_sad_refusals\.py:\d+"


def gradient(program, theta=0.4):
    return jax.grad(sad.expectation(program))(theta, KEY)


@pytest.mark.parametrize(
    "program",
    [
        lambda p, key: 1.0 * (jax.random.uniform(key) < p),
        lambda p, key: 1.0 * (jnp.log(jax.random.uniform(key)) < jnp.log(p)),
        lambda p, key: 1.0 * (p * jax.random.normal(key) - 0.3 > 0),
        lambda p, key: 1.0 * jax.random.bernoulli(key, p),
        lambda p, key: 1.0 * jax.random.categorical(key, jnp.array([p, 0.0, -p])),
        lambda p, key: 1.0 * jax.random.geometric(key, p),
        lambda p, key: 1.0 * jax.random.poisson(key, p),
        lambda p, key: 1.0 * jax.random.binomial(key, 5, p),
        lambda p, key: 1.0 * jax.random.choice(key, 3, p=jnp.array([p, 0.1, 0.9 - p])),
        lambda p, key: jnp.floor(p * jax.random.exponential(key)),
        lambda p, key: jnp.round(p + jax.random.normal(key)),
        lambda p, key: jnp.sign(p - jax.random.uniform(key)),
        lambda p, key: 1.0 * (p + jax.random.uniform(key)).astype(int),
        lambda p, key: 1.0 * jnp.argmax(jnp.array([0.1, p]) + jax.random.gumbel(key, (2,))),
        lambda p, key: (p + jax.random.uniform(key)) % 0.5,
        lambda p, key: jax.lax.cond(p > jax.random.uniform(key), lambda: 1.0, lambda: 2.0),
        lambda p, key: jax.lax.while_loop(
            lambda x: x < 3.0, lambda x: x + p * jax.random.uniform(key), 0.0
        ),
    ],
)
def test_steps_of_continuous_values(program):
    with pytest.raises(
        diffmh.NotDifferentiable, match=rf"(?s)no rule.*{HERE}|{HERE}.*sad.bernoulli"
    ):
        gradient(program)


def test_steps_of_deterministic_and_discrete_values_are_welcome():
    program = lambda p, key: (
        (p > 0.3) * p + jnp.floor(p * 3) + (p * sad.bernoulli(key, 0.5) > 0.2) * p
    )
    slope = gradient(program)
    assert slope in (1.0, 2.0)


def test_logsumexp_of_continuous_values_is_smooth():
    assert np.isfinite(gradient(lambda p, key: jax.nn.logsumexp(p * jax.random.normal(key, (3,)))))


def test_proposal_that_depends_on_theta():
    program = lambda scale, key: sad.propose(key, diffmh.GaussianWalk(scale), None, jnp.array(0.0))
    with pytest.raises(
        diffmh.NotDifferentiable, match=rf"`sad.propose` at .*{HERE}.* proposal.* depends on theta"
    ):
        gradient(program)
    program = lambda x, key: sad.propose(key, diffmh.GaussianWalk(1.0), None, x * 1.0)
    with pytest.raises(diffmh.NotDifferentiable, match=rf"{HERE}.* the x depends on theta"):
        gradient(program)


def test_draw_in_a_condition():
    def program(p, key):
        condition = lambda state: sad.bernoulli(jax.random.fold_in(key, state), p)
        return 1.0 * jax.lax.while_loop(condition, lambda state: state + 1, 0)

    with pytest.raises(diffmh.NotDifferentiable, match=rf"condition of a `while_loop` at .*{HERE}"):
        gradient(program)


def test_draw_in_a_custom_derivative():
    @jax.custom_jvp
    def draw(p, key):
        return 1.0 * sad.bernoulli(key, p)

    draw.defjvp(lambda primals, tangents: (draw(*primals), tangents[0]))
    with pytest.raises(diffmh.NotDifferentiable, match="inside of `custom_jvp_call`"):
        gradient(draw)


@pytest.mark.parametrize(
    "use",
    [
        lambda value, x: value**2,
        lambda value, x: value * x,
        lambda value, x: jnp.exp(value),
        lambda value, x: 1.0 * (value > 0.5),
        lambda value, x: jnp.where(x > 0, value, 0.0),
    ],
)
def test_marker_on_what_is_not_linear(use):
    def program(p, key):
        x = 1.0 * sad.bernoulli(key, p)
        return use(sad.linear(x), x)

    with pytest.raises(
        diffmh.NotDifferentiable,
        match=rf"`sad.linear\(value\)` at .*{HERE}.* doesn't \(`.*` at .*{HERE}",
    ):
        gradient(program)


def test_plain_differentiation_of_a_program():
    program = lambda p, key: 2.0 * sad.bernoulli(key, p)
    with pytest.raises(diffmh.NotDifferentiable, match=r"`sad\.expectation\(program\)` instead"):
        jax.grad(program)(0.4, KEY)


@pytest.mark.parametrize(
    "draw, mean, variance",
    [
        (lambda key: sad.poisson(key, 1e8), 1e8, 1e8),
        (lambda key: sad.binomial(key, 2**30, 0.1), 2**30 * 0.1, 2**30 * 0.09),
    ],
)
def test_counts_beyond_what_float32_tells_apart(draw, mean, variance):
    """`2²⁴ + 1` is `2²⁴` there: the sum of masses would never end."""
    drawn = np.asarray(jax.vmap(draw)(jax.random.split(KEY, 200)), float)
    assert abs(drawn.mean() - mean) < 5 * (variance / 200) ** 0.5
    assert abs(drawn.var() / variance - 1) < 0.5


def test_value_by_the_score_is_the_program_s():
    """However large the log probabilities: the derivative hangs on the value without rounding."""
    program = lambda rate, key: 1.0 * sad.poisson(key, rate)
    for rate in (3.0, 1e6):
        by_score = sad.expectation(program, estimator=sad.Score())
        value, _ = jax.jit(jax.value_and_grad(by_score))(rate, KEY)
        assert float(value) == float(program(rate, KEY))


def test_masked_logits_of_many_parameters():
    """−∞ for what may not be chosen, differentiated backward: value and derivative are numbers."""
    mask = jnp.arange(60) % 3 != 1
    program = lambda logits, key: jnp.sin(
        1.0 * sad.categorical(key, jnp.where(mask, logits, -jnp.inf))
    )
    logits = jnp.linspace(-1.0, 1.0, 60)
    values, slopes = jax.jit(jax.vmap(jax.value_and_grad(sad.expectation(program)), (None, 0)))(
        logits, jax.random.split(KEY, 500)
    )
    p, f = jax.nn.softmax(jnp.where(mask, logits, -jnp.inf)), jnp.sin(jnp.arange(60.0))
    assert np.all(np.isfinite(values))
    error = jnp.mean(slopes, axis=0) - p * (f - jnp.sum(p * f))
    assert np.all(np.abs(error) <= 5 * jnp.std(slopes, axis=0) / 500**0.5)


def test_draws_of_no_size_and_of_zero_probability():
    empty = lambda p, key: jnp.sum(sad.bernoulli(key, p * jnp.ones(0))) + p
    assert gradient(empty) == 1.0
    chosen = lambda p, key: 1.0 * sad.categorical(key, probs=jnp.stack([p, 0.0 * p, 1 - p]))
    chosen_slopes = jax.jit(jax.vmap(jax.grad(sad.expectation(chosen)), (None, 0)))
    slopes = chosen_slopes(0.4, jax.random.split(KEY, 64))
    assert np.all(np.isfinite(slopes))
    with pytest.raises(TypeError, match="probs"):
        sad.categorical(KEY)
    with pytest.raises(ValueError, match="categories"):
        sad.categorical(KEY, jnp.zeros((3, 0)))


def of_svd(p):
    return jnp.linalg.svd(jnp.array([[p, 1.0], [0.0, p]]), compute_uv=False).sum()


def test_unknown_primitive():
    """Where a `while_loop` keeps JAX from going backward."""

    def program(p, key):
        draws = jax.lax.while_loop(lambda n: n < 3, lambda n: n + sad.bernoulli(key, p), 0)
        return of_svd(p) * draws

    with pytest.raises(
        diffmh.NotDifferentiable, match=rf"no rule for the primitive `svd` at .*{HERE}"
    ):
        gradient(program)


@jax.custom_vjp
def quarter(x):
    return x


quarter.defvjp(lambda x: (x, None), lambda _, cotangent: (cotangent / 4,))


@jax.custom_jvp
def half(x):
    return x


half.defjvp(lambda primals, tangents: (primals[0], tangents[0] / 2))


@pytest.mark.parametrize(
    "estimator", [sad.Alternatives(), sad.Score(), sad.Combined(), sad.Smooth()], ids=str
)
@pytest.mark.parametrize("step", [of_svd, quarter, half])
def test_whatever_jax_differentiates(step, estimator):
    """Few parameters too, backward if that is the only way: one run, many, and a report."""
    mean = sad.expectation(
        lambda p, key: step(p) + sad.bernoulli(key, 0.5), estimator=estimator, num_replicates=32
    )
    exact = jax.grad(step)(0.4)
    found = [
        jax.grad(mean)(0.4, KEY),
        jax.grad(lambda p: jnp.mean(mean.per_chain(p, KEY)))(0.4),
        mean.run(0.4, KEY).gradient,
    ]
    np.testing.assert_allclose(found, exact, rtol=1e-5)


def test_arguments():
    program = lambda p, key: 1.0 * sad.bernoulli(key, p)
    with pytest.raises(TypeError, match=r"jax\.random\.key"):
        sad.expectation(program)(0.3)
    with pytest.raises(ValueError, match="alternatives"):
        sad.expectation(program, alternatives=0)
    with pytest.raises(TypeError, match="binomial"):
        sad.binomial(KEY, 2.5, 0.3)
    with pytest.raises(TypeError, match="bernoulli"):
        sad.bernoulli(KEY, jnp.array([1, 2]))
    with pytest.raises(ValueError, match="num_replicates"):
        sad.run(program, 0.3, KEY, num_replicates=1)
    with pytest.raises(ValueError, match="MaximalReflection"):
        sad.propose(KEY, diffmh.OtherState(3), diffmh.MaximalReflection(), jnp.array(0))


def test_derivatives_that_are_not_computed():
    expected = sad.expectation(lambda p, key, scale: scale * sad.bernoulli(key, p))
    with pytest.raises(diffmh.NotDifferentiable, match="second derivative"):
        jax.grad(jax.grad(expected))(0.3, KEY, 2.0)
    with pytest.raises(diffmh.NotDifferentiable, match="args"):
        jax.grad(expected, argnums=2)(0.3, KEY, 2.0)
    with pytest.raises(diffmh.NotDifferentiable, match="closes over"):
        jax.grad(
            lambda scale: sad.expectation(lambda p, key: scale * sad.bernoulli(key, p))(0.3, KEY)
        )(2.0)


def test_a_derivative_that_is_not_a_number_is_seen():
    """Of √p at 0, although no draw can come out otherwise."""

    def program(p, key):
        def step(x, key):
            x = sad.bernoulli(key, jnp.sqrt(p) * 0.0 + 0.5)
            return x, x * 1.0

        return jax.lax.scan(step, jnp.array(False), jax.random.split(key, 5))[1].sum()

    assert np.isnan(gradient(program, 0.0))


def test_every_transformation():
    """Pytrees in and out, data in `args`, closed-over tracers; grad, jvp, jacobian, vmap and jit
    agree.
    """

    def program(theta, key, scale):
        x = sad.poisson(key, theta["rate"])
        return {"mean": x * scale, "both": (theta["shift"] + x, jnp.stack([x, x**2]))}

    theta = {"rate": jnp.array(1.5), "shift": jnp.ones(2)}
    expected = sad.expectation(program)
    value = expected(theta, KEY, 2.0)
    assert jax.tree.structure(value) == jax.tree.structure(program(theta, KEY, 2.0))
    forward, backward = (
        jax.jit(jax.jacfwd(expected))(theta, KEY, 2.0),
        jax.jacrev(expected)(theta, KEY, 2.0),
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), forward, backward)
    np.testing.assert_allclose(forward["both"][0]["shift"], np.eye(2))
    direction = {"rate": 0.3, "shift": jnp.array([1.0, 2.0])}
    _, along = jax.jvp(lambda theta: expected(theta, KEY, 2.0)["mean"], (theta,), (direction,))
    np.testing.assert_allclose(along, 0.3 * forward["mean"]["rate"], rtol=1e-5)
    scaled = jax.vmap(
        lambda s: jax.grad(
            lambda theta: sad.expectation(lambda t, k: s * program(t, k, 1.0)["mean"])(theta, KEY)
        )(theta)
    )
    np.testing.assert_allclose(
        scaled(jnp.array([1.0, 2.0]))["rate"][1], forward["mean"]["rate"], rtol=1e-5
    )


def test_report():
    estimate = sad.run(
        lambda theta, key: {"x": sad.binomial(key, 4, theta[0]) * theta[1]},
        jnp.array([0.3, 2.0]),
        KEY,
    )
    assert estimate.gradient["x"].shape == (2,) and np.all(estimate.gradient_error["x"] > 0)
    assert np.all(
        np.abs(estimate.gradient["x"] - np.array([8.0, 1.2])) < 5 * estimate.gradient_error["x"]
    )
    assert "±" in str(estimate) and "1,024 replicates" in str(estimate)
    assert estimate.num_chains == 1024


def test_bits_of_a_draw_do_not_depend_on_who_draws():
    """Equal parameters and uniforms make equal draws in the primal and in an alternative: the
    difference is exactly zero.
    """

    def program(p, key):
        keys = jax.random.split(key, 6)
        other = sad.bernoulli(keys[0], p)
        rate = 1.7 + 0.0 * other
        draws = [
            sad.poisson(keys[1], rate),
            sad.binomial(keys[2], 9, rate / 4),
            sad.geometric(keys[3], rate / 4),
        ]
        return jnp.stack([*draws, sad.categorical(keys[4], rate * jnp.arange(4.0))]).astype(float)

    slopes = jax.jit(jax.vmap(jax.jacfwd(sad.expectation(program)), (None, 0)))(
        0.4, jax.random.split(KEY, 2_000)
    )
    assert np.all(slopes == 0)
