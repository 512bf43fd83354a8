"""Programs whose derivative was silently wrong: each is right now, or refused with its line; and
for each a deliberate mistake that is caught.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sad_runs import derivatives
from unbiasedness import assert_unbiased, is_caught

import diffmh
from diffmh import sad
from diffmh.jaxprs import inlining
from diffmh.sad import analysis, interpreter, keys, refusals

KEY = jax.random.key(0)
HERE = r"test_sad_audit\.py:\d+"
RUNS = 4_000


def outlived_by_a_draw(theta, key):
    """E = 3θ: `x` differs when the loop, which draws nothing, has brought `n` together."""
    x = sad.bernoulli(key, theta)
    n = jax.lax.while_loop(lambda n: n < 3, lambda n: 3 + 0 * n, jnp.where(x, 1, 0))
    return 1.0 * x * n


def counted_down(theta, key):
    """E = θ + θ²."""
    q = sad.poisson(key, theta)
    left = jax.lax.while_loop(lambda q: q > 0, lambda q: q - 1, q)
    return 1.0 * (q**2 + left)


def counted_down_in_a_scan(theta, key):
    """E = 2 (θ + θ²): the loop that draws nothing is the body of another."""
    q = sad.poisson(key, theta)

    def round_(total, _):
        left = jax.lax.while_loop(lambda q: q > 0, lambda q: q - 1, q)
        return total + q**2 + left, None

    return 1.0 * jax.lax.scan(round_, 0, None, length=2)[0]


OUTLIVED = {
    "bernoulli": (outlived_by_a_draw, 0.4, 3.0),
    "poisson": (counted_down, 2.0, 5.0),
    "scan": (counted_down_in_a_scan, 2.0, 10.0),
}


@pytest.mark.parametrize("alternatives", [1, 3])
@pytest.mark.parametrize("name", OUTLIVED)
def test_values_that_outlive_a_loop_without_draws(name, alternatives):
    program, theta, exact = OUTLIVED[name]
    found = derivatives(program, theta, RUNS, alternatives=alternatives)[:, 0, 0]
    assert_unbiased(found, np.array(exact), name)


def test_mistake_nothing_is_pinned_around_a_loop_without_draws(monkeypatch):
    monkeypatch.setattr(interpreter, "pin", lambda world, values: world)
    assert is_caught(derivatives(counted_down, 2.0, RUNS)[:, 0, 0], np.array(5.0))


def phase(theta, key):
    return jnp.real(jnp.exp(1j * theta))


def spectrum(theta, key):
    return jnp.abs(jnp.fft.fft(jnp.stack([theta, 1.0, 2.0])))[1]


def random_phase(theta, key):
    """A complex number of which both the branch and the phase depend on θ."""
    x = sad.bernoulli(key, theta)
    z = jnp.where(x, 2.0 + 1.0j, 1.0) * jnp.exp(1j * theta)
    return jnp.stack([z.real, z.imag, jnp.abs(z) ** 2, (z * z).real])


def test_complex_numbers():
    for program in (phase, spectrum):
        found = jax.jit(jax.grad(sad.expectation(program)))(0.4, KEY)
        np.testing.assert_allclose(
            found, jax.jit(jax.grad(lambda t: program(t, KEY)))(0.4), rtol=1e-5
        )

    def mean(theta):
        z = jnp.stack([2.0 + 1.0j, 1.0]) * jnp.exp(1j * theta)
        values = jnp.stack([z.real, z.imag, jnp.abs(z) ** 2, (z * z).real])
        return values @ jnp.stack([theta, 1 - theta])

    assert_unbiased(derivatives(random_phase, 0.4, RUNS)[:, :, 0], jax.jit(jax.jacfwd(mean))(0.4))


def test_mistake_complex_values_without_a_tangent(monkeypatch):
    forward = analysis._forward_primitive

    def forgetful(facts, equation):
        forward(facts, equation)
        kept = [v for v in facts.tangent if not jnp.issubdtype(v.dtype, jnp.complexfloating)]
        facts.tangent.intersection_update(kept)

    monkeypatch.setattr(analysis, "_forward_primitive", forgetful)
    monkeypatch.setattr(analysis, "until_stable", lambda step, facts: [step() for _ in range(5)])
    found = jax.grad(sad.expectation(phase))(0.4, KEY)
    assert abs(found - jax.grad(lambda t: phase(t, KEY))(0.4)) > 0.1


def callback(theta, key):
    uniform = jax.pure_callback(
        lambda: np.float32(np.random.default_rng().uniform()), jax.ShapeDtypeStruct((), jnp.float32)
    )
    return 1.0 * (uniform < theta)


def noise(theta, key):
    return theta - jax.random.uniform(key)


SILENT = {
    "isnan": lambda t, key: 1.0 * jnp.isnan(jnp.log(noise(t, key))),
    "isfinite": lambda t, key: 1.0 * jnp.isfinite(jnp.log(noise(t, key))),
    "slogdet": lambda t, key: jnp.linalg.slogdet(jnp.diag(jnp.stack([1.0, noise(t, key)])))[0],
    "lu": lambda t, key: jax.scipy.linalg.lu(jnp.array([[1.0, 2.0], [3.0, 4.0]]) * noise(t, key))[
        0
    ][0, 0],
    "atan2": lambda t, key: jnp.arctan2(noise(t, key), -1.0),
    "log of a complex number": lambda t, key: jnp.log(-1.0 + 1j * noise(t, key)).imag,
    "z/abs(z)": lambda t, key: (lambda z: z / jnp.abs(z))(noise(t, key)),
    "key_data": lambda t, key: 1.0 * (jax.random.key_data(key)[0] / 2.0**32 < t),
    "rng_uniform": lambda t, key: 1.0 * (jax.lax.rng_uniform(0.0, 1.0, ()) < t),
    "rng_bit_generator": lambda t, key: (
        1.0 * (jax.lax.rng_bit_generator(jnp.zeros(4, jnp.uint32), (), jnp.uint32)[1] / 2.0**32 < t)
    ),
    "callback": callback,
}


@pytest.mark.parametrize("name", SILENT)
def test_silent_zeros_are_refused(name):
    with pytest.raises(diffmh.NotDifferentiable, match=rf"{HERE}.*step of a continuous random"):
        jax.grad(sad.expectation(SILENT[name]))(0.4, KEY)


@pytest.mark.parametrize("name", ["isnan", "slogdet", "key_data"])
def test_mistake_a_step_that_is_not_seen(name, monkeypatch):
    """Without the refusal the derivative is zero, where it is not."""
    monkeypatch.setattr(refusals, "refuse_jumps", lambda *_: None)
    assert jax.grad(sad.expectation(SILENT[name]))(0.4, KEY) == 0.0
    mean = lambda t: np.mean(
        jax.vmap(lambda key: SILENT[name](t, key))(jax.random.split(KEY, 10_000))
    )
    assert abs(mean(0.6) - mean(0.4)) > 0.1


def test_steps_that_do_no_harm():
    """Hidden by `stop_gradient`, whether before or after the step; values of a sort; the log of a
    determinant; a solution of equations.
    """
    matrix = lambda t, key: jnp.eye(2) * (2.0 + noise(t, key))
    for program in (
        lambda t, key: t * jnp.isnan(jax.lax.stop_gradient(noise(t, key))),
        lambda t, key: t * jax.lax.stop_gradient(1.0 * (noise(t, key) > 0)),
        lambda t, key: jax.lax.top_k(t * jax.random.normal(key, (3,)), 2)[0].sum(),
        lambda t, key: jnp.sort(t * jax.random.normal(key, (3,)))[0],
        lambda t, key: jnp.linalg.slogdet(matrix(t, key))[1],
        lambda t, key: jnp.linalg.solve(matrix(t, key), jnp.ones(2)).sum(),
        lambda t, key: jax.nn.logsumexp(t * jax.random.normal(key, (3,))),
    ):
        found = jax.grad(sad.expectation(program))(0.4, KEY)
        np.testing.assert_allclose(
            found, jax.grad(lambda t, p=program: p(t, KEY))(0.4), rtol=1e-4, atol=1e-5
        )


def test_steps_that_make_no_jump():
    """A leaky ReLU is seen to be continuous, Huber's loss and a table too (`test_continuity.py`);
    `sad.continuous` vouches for the rest; what does jump is refused.
    """
    huber = lambda z: jnp.where(jnp.abs(z) < 1.0, 0.5 * z**2, jnp.abs(z) - 0.5)
    table = lambda z: jnp.interp(z, jnp.array([-9.0, 0.0, 9.0]), jnp.array([1.0, 0.0, 2.0]))
    triangles = sad.continuous(lambda z: jnp.abs(jnp.mod(z, 2.0) - 1.0))
    for function in (jax.nn.leaky_relu, huber, table, triangles):
        program = lambda t, key, f=function: f(3 * t * jax.random.normal(key))
        found = jax.grad(sad.expectation(program))(0.4, KEY)
        np.testing.assert_allclose(found, jax.grad(program)(0.4, KEY), rtol=1e-5)
    jumps = lambda t, key: jnp.where(noise(t, key) > 0, 1.0, noise(t, key))
    with pytest.raises(diffmh.NotDifferentiable, match=HERE):
        jax.grad(sad.expectation(jumps))(0.4, KEY)


def shared(theta, key):
    """0.6 by flips of one alone, where E = min(θ, 0.6) has derivative 1."""
    return 1.0 * sad.bernoulli(key, theta) * sad.bernoulli(key, 0.6)


def shared_by_slices(theta, key):
    keys_ = jax.random.split(key, 2)
    return sad.bernoulli(keys_[0], theta) * jax.random.normal(keys_[0])


def shared_by_splits(theta, key):
    """Taken from the same split, once as a pair and once by its index."""
    first, _ = jax.random.split(key)
    return sad.bernoulli(first, theta) * jax.random.normal(jax.random.split(key)[0])


def shared_by_splits_of_other_numbers(theta, key):
    """The first of two is the first of five."""
    return sad.bernoulli(jax.random.split(key)[0], theta) * jax.random.normal(
        jax.random.split(key, 5)[0]
    )


def shared_by_folding(theta, key):
    """A key folded with 1 is the second of its split."""
    return sad.bernoulli(jax.random.split(key)[1], theta) * jax.random.normal(
        jax.random.fold_in(key, 1)
    )


def shared_by_rounds(theta, key):
    step = lambda total, _: (total + sad.bernoulli(key, theta), None)
    return 1.0 * jax.lax.scan(step, 0, None, length=3)[0]


def shared_by_rounds_of_rounds(theta, key):
    inner = lambda total, key: (total + sad.bernoulli(key, theta), None)
    outer = lambda total, _: (jax.lax.scan(inner, total, jax.random.split(key, 2))[0], None)
    return 1.0 * jax.lax.scan(outer, 0, None, length=3)[0]


def shared_by_lanes(theta, key):
    return jnp.sum(1.0 * jax.vmap(lambda scale: sad.bernoulli(key, theta * scale))(jnp.ones(3)))


@pytest.mark.parametrize(
    "program",
    [
        shared,
        shared_by_slices,
        shared_by_splits,
        shared_by_splits_of_other_numbers,
        shared_by_folding,
        shared_by_rounds,
        shared_by_rounds_of_rounds,
        shared_by_lanes,
    ],
)
def test_one_key_for_two_draws(program):
    with pytest.raises(diffmh.NotDifferentiable, match=rf"One key is used .*{HERE}"):
        jax.grad(sad.expectation(program))(0.4, KEY)


def test_one_key_for_draws_that_do_not_meet():
    """In two branches, of which one is taken; folded with a counter; both free of theta."""

    def program(theta, key):
        keys_ = jax.random.split(key, 3)
        a = jax.lax.cond(
            jax.random.bernoulli(keys_[0], 0.5),
            lambda: sad.bernoulli(keys_[1], theta),
            lambda: sad.bernoulli(keys_[1], theta / 2),
        )
        add = lambda i, total: total + sad.bernoulli(jax.random.fold_in(keys_[2], i), theta)
        total = jax.lax.fori_loop(0, 3, add, 0)
        key_free = jax.random.fold_in(key, 7)
        free = jax.random.uniform(key_free) + jax.random.uniform(key_free)
        return a * 1.0 + total + free

    found = derivatives(program, 0.4, RUNS)[:, 0, 0]
    assert_unbiased(found, np.array(3.75))


def test_mistake_a_key_that_is_not_seen(monkeypatch):
    monkeypatch.setattr(keys, "_refuse", lambda *_: None)
    assert is_caught(derivatives(shared, 0.4, RUNS)[:, 0, 0], np.array(1.0))


def lanes(theta, key):
    """Each lane counts to a draw of its own: E = Σ (θ_i + θ_i²) with θ_i = θ, 2θ."""
    counts = sad.poisson(key, theta * jnp.array([1.0, 2.0]))
    reached = jax.vmap(lambda n: jax.lax.while_loop(lambda i: i < n, lambda i: i + 1, 0))(counts)
    return jnp.sum(1.0 * reached**2)


def free_lanes(theta, key):
    """A sampler of JAX's own, mapped, in code free of theta: E = 6θ."""
    counts = jax.vmap(jax.random.poisson)(jax.random.split(key, 3), jnp.arange(1.0, 4.0))
    return theta * jnp.sum(1.0 * counts)


def drawing_lanes(theta, key):
    """Each lane draws until its first success, at most three times: E = 2 (3 − 3θ + θ²)."""

    def one(key):
        def step(state):
            tries, _, key = state
            key, key_try = jax.random.split(key)
            return tries + 1, sad.bernoulli(key_try, theta), key

        goes_on = lambda state: (state[0] < 3) & ~state[1]
        return jax.lax.while_loop(goes_on, step, (0, jnp.array(False), key))[0]

    return jnp.sum(1.0 * jax.vmap(one)(jax.random.split(key, 2)))


LANES = {
    "counting": (lanes, 0.5, 1 + 2 * 0.5 + 2 + 8 * 0.5),
    "free": (free_lanes, 0.5, 6.0),
    "drawing": (drawing_lanes, 0.4, 2 * (-3 + 2 * 0.4)),
}


@pytest.mark.parametrize("name", LANES)
def test_a_condition_for_each_lane(name):
    program, theta, exact = LANES[name]
    assert_unbiased(derivatives(program, theta, RUNS)[:, 0, 0], np.array(exact))


def test_mistake_lanes_that_do_not_stop(monkeypatch):
    def until_all_have_stopped(params, *operands):
        constants, start = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        goes_on = lambda carry: jnp.any(
            jax.extend.core.jaxpr_as_fun(params["cond_jaxpr"])(*operands[:constants], *carry)[0]
        )
        body = lambda carry: jax.extend.core.jaxpr_as_fun(params["body_jaxpr"])(
            *operands[constants:start], *carry
        )
        return jax.lax.while_loop(goes_on, body, list(operands[start:]))

    monkeypatch.setattr(inlining, "_while_of_lanes", until_all_have_stopped)
    assert is_caught(derivatives(lanes, 0.5, RUNS)[:, 0, 0], np.array(LANES["counting"][2]))


def test_a_primitive_without_a_rule_is_an_error(monkeypatch):
    """Also where the refusals have let it pass."""
    monkeypatch.delitem(interpreter.RULES, "sin")
    with pytest.raises(diffmh.NotDifferentiable, match="no rule for the primitive `sin`"):
        jax.grad(sad.expectation(lambda t, key: jnp.sin(t)))(0.4, KEY)


def test_complex_results_are_refused():
    with pytest.raises(TypeError, match=r"jnp\.real"):
        sad.expectation(lambda t, key: jnp.exp(1j * t))(0.4, KEY)


def test_the_sign_of_a_complex_number_has_no_rule():
    with pytest.raises(diffmh.NotDifferentiable, match="`sign`"):
        jax.grad(sad.expectation(lambda t, key: jnp.sign(t + 1j).real))(0.4, KEY)
