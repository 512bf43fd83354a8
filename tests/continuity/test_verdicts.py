"""The verdict on each function that an audit tried: what jumps is refused, what does not is
admitted, and `continuous` is believed.
"""

import jax
import jax.numpy as jnp
import jax.scipy.stats as stats
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from doors import (
    ADMITTED,
    KEY,
    THETA,
    admitted,
    draws_like,
    expect,
    in_core_density,
    in_core_f,
    in_from_draws,
    in_program,
    langevin,
    log_normal,
    verdict,
    walk,
)
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

import diffmh
from diffmh import sad


def uniform(key):
    return jax.random.uniform(key)


def with_poisson(theta, key):
    key_count, key_uniform = jax.random.split(key)
    n = sad.poisson(key_count, 3.0)
    return jnp.where(uniform(key_uniform) < theta, n * (n - 1) / 2.0, 0.0)


def in_scan(theta, key):
    is_below = uniform(key) < theta
    step = lambda total, i: (total + jnp.where(is_below, i * (i - 1.0), 0), None)
    return lax.scan(step, 0.0, jnp.arange(5))[0]


def compared_in_scan(theta, key):
    u = uniform(key)
    step = lambda total, i: (total + jnp.where(u < theta, i * (i - 1.0), 0), None)
    return lax.scan(step, 0.0, jnp.arange(5))[0]


def excess(p, key, loss):
    return 100.0 - jnp.where(uniform(key) < p, jnp.maximum(loss - 500, 0), 0).sum()


def with_energies(theta, key, kT):
    return jnp.where(uniform(key) < theta, 2 * kT, kT) / kT


# Each returned 0, or its smooth part; the right derivative is in the comment.
PROGRAMS = {
    "pairs": (lambda t, k, n: jnp.where(uniform(k) < t, n * (n - 1) / 2.0, 0.0), 5),  # 10
    "pairs of a draw": (with_poisson,),  # 4.5
    "half": (lambda t, k, n: jnp.where(jax.random.bernoulli(k, t), n // 2, 0) * 1.0, 6),  # 3
    "scan": (in_scan,),  # 20
    "compared in scan": (compared_in_scan,),  # 20
    "cond": (
        lambda t, k, n: lax.cond(uniform(k) < t, lambda: n * (n - 1) / 2.0, lambda: 0.0),
        5,
    ),  # 10
    "losses": (excess, np.array([300.0, 800.0, 1500.0])),  # −1300
    "small of large": (lambda t, k: 1e9 * jnp.where(uniform(k) < t, 5e-9, 1e-9),),  # 4
    "energies": (with_energies, np.float32(4e-21)),  # 1
    "energies closed over": (lambda t, k: with_energies(t, k, 4e-21),),  # 1
    "large numbers": (lambda t, k: jnp.where(uniform(k) < t, 1000010.0, 1000000.0),),  # 10
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_jump_by_the_data_is_refused(name):
    program, *args = PROGRAMS[name]
    assert in_program(program, *args) != ADMITTED


def test_the_data_of_the_first_call_prove_nothing():
    """No jump with n = 1, and the verdict is kept for arguments of the same form."""
    program = sad.expectation(PROGRAMS["pairs"][0])
    pairs = lambda theta, x, n: jnp.where(x < theta, n * (n - 1) / 2.0, 0.0)
    mean = expect(pairs, walk(log_normal), 0.3)
    from_draws = diffmh.from_draws(pairs, log_normal, draws_like(0.3))
    calls = {
        "sad": lambda n: jax.eval_shape(lambda t: jax.grad(program)(t, KEY, n), THETA),
        "f": lambda n: jax.eval_shape(lambda t: mean(t, KEY, n), THETA),
        "from_draws": lambda n: from_draws.run(THETA, n).warnings,
    }
    for name, call in calls.items():
        say = lambda n, call=call: verdict(lambda: str(call(n))[:0])
        say(1)
        assert say(5) != ADMITTED, name


# f with a threshold that moves, at t = 0.5 under N(t, 1): exactly +0.3521, 1.044; 0.352 where the
# density is free of theta.
THRESHOLDS = {
    "indicator": (lambda t, x: 1.0 * (x < 2 * t), log_normal),
    "part": (lambda t, x: jnp.where(x < 2 * t, x, 0), log_normal),
    "density free of theta": (lambda t, x: 1.0 * (x < t), lambda t, x: -0.5 * x**2),
}


# Signs and orders that jump where z changes its sign.
FACTORS = {
    "qr": lambda z: jnp.linalg.qr(jnp.array([[z, 1.0], [2.0, 3.0]]))[0][1, 0],
    "eigenvectors": lambda z: jnp.linalg.eigh(jnp.diag(jnp.stack([z, 0.0 * z])))[1][0, 0],
    "singular vectors": lambda z: jnp.linalg.svd(jnp.diag(jnp.stack([z + 1.0, 1.0])))[0][0, 0],
    "order of eigenvalues": lambda z: jnp.linalg.eig(jnp.diag(jnp.stack([z, 0.0])))[0][0].real,
}


@pytest.mark.parametrize("name", FACTORS)
def test_a_factor_whose_sign_may_jump_is_refused(name):
    value = lambda t, x: FACTORS[name](x - t)
    assert in_core_f(value, 0.3) != ADMITTED
    assert in_from_draws(0.3, f=value) != ADMITTED
    assert in_program(lambda t, key: FACTORS[name](uniform(key) - t)) != ADMITTED
    # At a place that does not depend on theta it is no concern, and it may be vouched for.
    assert in_core_f(lambda t, x: FACTORS[name](x) + t, 0.3) == ADMITTED
    assert in_core_f(diffmh.continuous(value), 0.3) == ADMITTED


def test_the_refused_factors_do_jump():
    at = lambda name, z: float(FACTORS[name](jnp.float32(z)))
    for name in ("qr", "eigenvectors", "singular vectors"):
        assert abs(at(name, 1e-3) - at(name, -1e-3)) > 0.5, name


@pytest.mark.parametrize("name", THRESHOLDS)
@pytest.mark.parametrize("kernel", [walk, langevin])
def test_a_moving_threshold_in_f_is_refused(name, kernel):
    f, log_density = THRESHOLDS[name]
    assert in_core_f(f, 0.3, kernel=kernel, log_density=log_density) != ADMITTED


def test_from_draws_examines_density_and_f():
    support = lambda t, x: jnp.where((x > 0) & (x < 2 * t), -x * t, -jnp.inf)
    assert in_from_draws(0.3, log_density=support) != ADMITTED
    assert in_from_draws(0.3, f=THRESHOLDS["indicator"][0]) != ADMITTED


# Steps at z = 0 without a comparison.
QUOTIENTS = {
    "|z|/z": lambda z: jnp.abs(z) / z,
    "z/sqrt(z²)": lambda z: z / jnp.sqrt(z**2),
    "z rsqrt(z z)": lambda z: z * lax.rsqrt(z * z),
    "v/norm(v)": lambda z: (z[None] / jnp.linalg.norm(z[None]))[0],
    "relu(z)/z": lambda z: jax.nn.relu(z) / z,
    "arctan(1/z)": lambda z: jnp.arctan(1 / z),
}


@pytest.mark.parametrize("name", QUOTIENTS)
def test_a_step_of_smooth_parts_is_seen(name):
    step = QUOTIENTS[name]
    function = lambda t, x: step(x - t)
    assert in_program(lambda t, k: step(uniform(k) - t)) != ADMITTED
    assert in_core_f(function, 0.3) != ADMITTED
    assert in_from_draws(0.3, f=function) != ADMITTED
    density = lambda t, x: log_normal(t, x) + step(x - t)
    assert in_core_density(density, 0.3) != ADMITTED
    assert in_from_draws(0.3, log_density=density) != ADMITTED


def two_levels(theta, x):
    return jnp.where(x < 2 * theta, 0.0, 1.0)


def undecided(theta, x):
    """Continuous, by an identity that no analysis of equations is asked to know."""
    return jnp.where(x > theta, jnp.exp(x) * jnp.exp(theta), jnp.exp(x + theta))


def test_a_proved_jump_is_refused_everywhere():
    density = lambda t, x: log_normal(t, x) + two_levels(t, x)
    assert in_core_density(density, 0.3).startswith("refused")
    assert in_core_f(two_levels, 0.3).startswith("refused")
    assert in_from_draws(0.3, f=two_levels).startswith("refused")
    assert in_from_draws(0.3, log_density=density).startswith("refused")
    assert in_program(lambda t, k: two_levels(t, uniform(k))).startswith("refused")


def test_what_is_undecided_is_a_warning_for_a_density_alone():
    density = lambda t, x: log_normal(t, x) + undecided(t, x)
    assert in_core_density(density, 0.3).startswith("warned")
    for said in (
        in_core_f(undecided, 0.3),
        in_from_draws(0.3, f=undecided),
        in_from_draws(0.3, log_density=density),
        in_program(lambda t, k: undecided(t, uniform(k))),
    ):
        assert said.startswith("refused") and "continuous(" in said


def test_the_warning_is_in_the_report():
    density = lambda t, x: log_normal(t, x) + undecided(t, x)
    report = expect(lambda t, x: x, walk(density), 0.3).run(THETA, KEY)
    assert any("continuous(" in warning for warning in report.warnings)


def test_theta_in_the_support_of_a_distribution_is_refused():
    """`jnp.select` in JAX 0.12: an index, by `argmax` of comparisons."""
    density = lambda t, x: stats.uniform.logpdf(x, t, 2.0) + t * x
    assert in_core_density(density, 0.5).startswith("refused")
    assert in_from_draws(0.5, log_density=density).startswith("refused")


def _mystery():
    """A primitive that nobody knows here; it computes sin."""
    primitive = Primitive("mystery")
    primitive.def_impl(np.sin)
    primitive.def_abstract_eval(lambda kind: jax.core.ShapedArray(kind.shape, kind.dtype))
    ad.defjvp(primitive, lambda tangent, x: jnp.cos(x) * tangent)
    batching.defvectorized(primitive)
    mlir.register_lowering(primitive, mlir.lower_fun(jnp.sin, multiple_results=False))
    return primitive.bind


mystery = _mystery()


def test_an_unknown_primitive_that_theta_reaches_is_refused():
    density = lambda t, x: log_normal(t, x) + mystery(x * t)
    for said in (
        in_core_density(density, 0.3),
        in_core_f(lambda t, x: mystery(x * t), 0.3),
        in_from_draws(0.3, f=lambda t, x: mystery(x * t)),
        in_from_draws(0.3, log_density=density),
        in_program(lambda t, k: mystery(uniform(k) * t)),
    ):
        assert said.startswith("refused") and "mystery" in said
    of_data = lambda t, x, d: log_normal(t, x) * mystery(d)
    assert in_core_density(of_data, 0.3, 0.2) == ADMITTED


def in_all(function, x=0.3):
    """The verdicts of all doors on a function, in a density and in an f."""
    density = lambda t, x: log_normal(t, x) + function(t, x)
    return [
        in_core_density(density, x),
        in_core_f(function, x),
        in_from_draws(x, f=function, log_density=density),
        in_program(lambda t, k: function(t, jax.random.normal(k, np.shape(x)))),
    ]


ALLOWED = {
    "in theta alone": lambda t, x: jnp.where(t > 0.3, 2.0, 1.0) * jnp.tanh(x),
    "in theta alone, by floor": lambda t, x: jnp.floor(3 * t) * jnp.tanh(x),
    "in x alone": lambda t, x: jnp.where(x > 0.7, t, 0.0),
    "in x alone, by an index": lambda t, x: t * jnp.array([1.0, 5.0])[(x > 0.7).astype(int)],
    "decided by bounds": lambda t, x: jnp.where(jnp.exp(x - t) > 0, x, 0.0),
    "decided by larger bounds": lambda t, x: jnp.where(jnp.tanh(x - t) < 2, x, 0.0),
    "is finite": lambda t, x: jnp.where(jnp.isfinite(jnp.tanh(x - t)), x, 0.0),
    "no atoms": lambda t, x: jnp.where(x == t, 5.0, x),
    "no atoms, the other way round": lambda t, x: jnp.where(x - t != 0, x, 5.0),
    "off zero": lambda t, x: 1 / (1 + (x - t) ** 2),
    "off zero by exp": lambda t, x: jnp.tanh(1 / jnp.exp(x - t)),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_what_makes_no_moving_jump_is_allowed(name):
    assert in_all(ALLOWED[name]) == [ADMITTED] * 4


def test_what_is_stopped_does_no_harm_in_a_program():
    assert in_program(lambda t, k: t * lax.stop_gradient(1.0 * (uniform(k) < t))) == ADMITTED


ATOMS = {
    "maximum": lambda t, x: jnp.where(jnp.maximum(x, t) == t, 5.0, x),
    "clip": lambda t, x: jnp.where(jnp.clip(x - t, 0, 1) != 0, 5.0, x),
    "where": lambda t, x: jnp.where(jnp.where(x > t, x - t, 0.0) == 0, 5.0, x),
    "rounding": lambda t, x: jnp.where(jnp.round(x - t) == 0, 5.0, x),
}


@pytest.mark.parametrize("name", ATOMS)
def test_equality_with_an_atom_is_a_jump(name):
    assert ADMITTED not in in_all(ATOMS[name])


def test_a_denominator_of_positive_terms_is_allowed():
    def shares(theta, key):
        draws = jax.random.exponential(key, (3,)) * jnp.exp(theta * jnp.arange(3.0))
        return (draws / draws.sum())[0]

    by_hand = lambda t, x: (jnp.exp(t * x) / jnp.exp(t * x).sum())[0]
    assert in_program(shares) == ADMITTED
    assert in_all(by_hand, np.array([0.1, 0.2, -0.3], np.float32)) == [ADMITTED] * 4


def test_discrete_values_may_be_compared():
    label = diffmh.OtherState(3)
    steps = lambda t, j: jnp.where(j * t > 0.6, 2.0, 1.0)
    density = lambda t, j: -t * j + steps(t, j)
    kernel = lambda log_density: diffmh.MetropolisHastings(log_density, label)
    assert in_core_density(density, 0, kernel=kernel, f=steps) == ADMITTED
    draws = np.zeros((2, 8), np.int32)
    say = lambda: str(diffmh.from_draws(steps, density, draws).run(THETA))[:0]
    assert verdict(say) == ADMITTED
    assert in_program(lambda t, k: steps(t, sad.poisson(k, 2 * t))) == ADMITTED


def test_a_threshold_that_does_not_move_needs_moves_that_do_not():
    f = lambda t, x: 1.0 * (x < 1.0)
    assert in_core_f(f, 0.3) == ADMITTED
    assert in_from_draws(0.3, f=f) == ADMITTED
    assert in_core_f(f, 0.3, kernel=langevin) != ADMITTED


def test_continuous_is_believed_for_a_function():
    assert ADMITTED not in in_all(undecided)
    assert in_all(diffmh.continuous(undecided)) == [ADMITTED] * 4


def test_continuous_is_believed_for_a_whole_density_f_or_program():
    density = lambda t, x, d: log_normal(t, x) + d * undecided(t, x)
    f = lambda t, x, d: {"term": undecided(t, x), "all": d}
    draw = lambda t, k: sad.bernoulli(jax.random.fold_in(k, 1), t)
    program = lambda t, k, d: undecided(t, uniform(jax.random.fold_in(k, 0))) + draw(t, k) * d
    vouched = diffmh.continuous
    assert in_core_density(vouched(density), 0.3, 2.0) == ADMITTED
    assert in_core_density(vouched(density), 0.3, 2.0, kernel=langevin) == ADMITTED
    assert in_core_f(vouched(f), 0.3, 2.0) == ADMITTED
    assert in_core_f(vouched(f), 0.3, 2.0, kernel=langevin) == ADMITTED
    both = dict(f=vouched(f), log_density=vouched(density))
    assert in_from_draws(0.3, 2.0, **both) == ADMITTED
    assert in_program(vouched(program), 2.0) == ADMITTED


def test_continuous_is_believed_for_a_posterior():
    def model(scale):
        x = numpyro.sample("x", dist.Normal(0.0, 1.0))
        numpyro.factor("term", undecided(scale, x))

    posterior = diffmh.from_numpyro(model, theta={"scale": 0.5})
    f = lambda theta, sites: undecided(theta["scale"], sites["x"])

    def say(posterior, f):
        mean = posterior.expectation(f, num_samples=2, num_chains=2)
        return verdict(lambda: admitted(mean, theta=posterior.theta))

    assert say(posterior, lambda theta, sites: sites["x"]) != ADMITTED
    vouched = diffmh.continuous(posterior)
    assert say(vouched, diffmh.continuous(f)) == ADMITTED


def test_floats_of_few_values_count_as_continuous():
    """Nothing says that they are few: the same labels as integers are admitted, or as floats if
    `continuous` vouches for f, which is right.
    """
    to_label = lambda theta, x: 1.0 * (x[0] < 2 * theta)
    density = lambda theta, x: 1.3 * theta * x[0] * x[1]
    kernel = diffmh.MetropolisHastings(density, diffmh.SpinFlip())

    def mean(f, dtype):
        start = jnp.ones(2, dtype)
        return diffmh.expectation(f, kernel, init=start, num_samples=5, num_chains=16)

    with pytest.raises(diffmh.NotDifferentiable, match="continuous"):
        jax.grad(mean(to_label, float))(0.3, KEY)
    slopes = [
        jax.grad(mean(f, dtype))(0.3, KEY)
        for f, dtype in ((to_label, int), (diffmh.continuous(to_label), float))
    ]
    assert slopes[0] == slopes[1] != 0
