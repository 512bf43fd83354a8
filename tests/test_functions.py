"""Kernels written as functions of draws: against transition matrices, and what is refused."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import own_functions
import own_kernels
import pytest
from own_functions import FUNCTIONS, RING, leaping, with_function
from own_kernels import full
from unbiasedness import assert_unbiased, is_caught

import diffmh
from diffmh.extend import update
from diffmh.kernels import function

STEPS = 3


@pytest.mark.parametrize("name", FUNCTIONS)
def test_derivatives(name):
    case = with_function(name)
    assert_unbiased(case.derivatives(STEPS), case.exact(STEPS), name)


def in_turn():
    return dataclasses.replace(own_kernels.in_turn(), kernel=own_functions.in_turn)


@pytest.mark.parametrize("case", [in_turn, leaping])
@pytest.mark.parametrize("estimator", [None, diffmh.Score()])
def test_decisions_may_depend_on_earlier_outcomes(case, estimator):
    case = case()
    assert_unbiased(case.derivatives(STEPS, estimator=estimator), case.exact(STEPS))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_kernel_takes_at_most_12_lines(name):
    lines = inspect.getsource(FUNCTIONS[name].function).splitlines()
    assert len(lines) <= 12


def test_flips_that_keep_later_outcomes_are_caught(monkeypatch):
    """A later decision must be made anew where it depends on the one that is flipped."""
    prepared = function.FunctionUpdate.prepared

    def forgetting(self, theta, x, args):
        found = prepared(self, theta, x, args)
        kept = tuple(entry._replace(depends=False) for entry in found.entries)
        return function.FunctionUpdate(found.density, found.function, found.slots, kept)

    monkeypatch.setattr(function.FunctionUpdate, "prepared", forgetting)
    for case in (in_turn(), leaping()):
        assert is_caught(case.derivatives(STEPS), case.exact(STEPS))


def density_of_data(theta, x, tables):
    return theta @ tables[:, x]


@update(density_of_data)
def with_data(draw, theta, x, tables):
    y = draw.propose(RING, x)
    change = density_of_data(theta, y, tables) - density_of_data(theta, x, tables)
    return jnp.where(draw.accept(change), y, x)


def test_data_is_passed_on():
    """The same density and proposal as of a `MetropolisHastings`, so the same derivative."""
    tables, theta = jnp.asarray(own_kernels.table(2, 5)), jnp.array([0.7, -0.4])

    def derivative(kernel):
        f = lambda theta, x, tables: tables[0, x]
        mean = diffmh.expectation(f, kernel, init=0, num_samples=4, num_chains=20_000).per_chain
        return jax.jit(jax.jacfwd(mean))(theta, jax.random.key(0), tables)

    found = derivative(with_data)
    expected = derivative(diffmh.MetropolisHastings(density_of_data, RING))
    error = np.std(np.stack([found, expected]), axis=1).max() * np.sqrt(2 / 20_000)
    np.testing.assert_allclose(found.mean(axis=0), expected.mean(axis=0), atol=5 * error)


def normal(theta, x):
    return -0.5 * (x - theta) ** 2


WALK = diffmh.GaussianWalk(2.38)


@update(normal)
def walk(draw, theta, x):
    y = draw.propose(WALK, x)
    return jnp.where(draw.accept(normal(theta, y) - normal(theta, x)), y, x)


@update(normal)
def walk_by_noise(draw, theta, x):
    y = x + 2.38 * draw.normal()
    return jnp.where(draw.accept(normal(theta, y) - normal(theta, x)), y, x)


def wider(theta, x):
    return normal(theta, x) / 4


def test_covariance_knows_its_density():
    """It is known by the function that it was given, beside other kernels too."""

    def mean(density):
        kernel = diffmh.Cycle(walk, diffmh.MetropolisHastings(density, WALK))
        estimator = diffmh.Covariance()
        length = dict(num_samples=500, burn_in=20, num_chains=64)
        return diffmh.expectation(lambda _, x: x, kernel, init=0.0, estimator=estimator, **length)

    report = mean(normal).run(0.5, jax.random.key(0))
    assert abs(report.gradient - 1) < 5 * report.gradient_error < 0.5
    with pytest.raises(ValueError, match=r"`Covariance\(\)` needs one density"):
        jax.grad(mean(wider))(0.5, jax.random.key(0))


@pytest.mark.parametrize("kernel", [walk, walk_by_noise])
def test_floats_meet_by_the_best_coupling(kernel):
    """Its chains meet, where those with the same noise do so in the limit only."""
    mean = diffmh.expectation(lambda theta, x: x, kernel, init=0.0, num_samples=50, num_chains=256)
    report = mean.run(0.5, jax.random.key(0))
    assert np.isfinite(report.recoupling_time) == (kernel is walk)
    assert abs(report.value - 0.5) < 5 * report.value_error + 0.1


def test_tangents_of_a_cycle_go_through_a_function():
    """A walk whose step depends on θ, and a reflection that is accepted, against differences."""

    @update(lambda theta, x: -0.5 * x**2)
    def reflect(draw, theta, x):
        return jnp.where(draw.accept(-jnp.abs(x) - 0.3 * theta), -x, x)

    steps = diffmh.MetropolisHastings(
        lambda theta, x: -0.5 * x**2, lambda theta: diffmh.GaussianWalk(theta)
    )
    mean = diffmh.expectation(
        lambda theta, x: jnp.tanh(x + 0.5),
        diffmh.Cycle(steps, reflect),
        init=0.3,
        num_samples=2,
        num_chains=40_000,
    ).per_chain
    run = jax.jit(mean)
    slope = jax.jit(jax.jacfwd(mean))(1.3, jax.random.key(1))
    far, near = (
        run(1.3 + h, jax.random.key(0)) - run(1.3 - h, jax.random.key(0)) for h in (0.2, 0.1)
    )
    difference = (8 * near - far) / (12 * 0.1)
    spread = np.sqrt((np.var(slope) + np.var(difference)) / 40_000)
    assert abs(np.mean(slope) - np.mean(difference)) < 5 * spread


def ring_case(kernel):
    return dataclasses.replace(own_kernels.delayed(), kernel=kernel)


def first_gradient(kernel):
    case = ring_case(kernel)
    return jax.jacfwd(case.expectation(STEPS, 2))(case.at, jax.random.key(0))


@update(full)
def moves(draw, theta, x):
    return (x + (draw.uniform() < theta[0, 0])).astype(x.dtype) % 5


@update(full)
def by_level(draw, theta, x):
    level = full(theta, x) + jnp.log(draw.uniform())
    return draw.categorical(jnp.where(theta[0] > level, 0.0, -jnp.inf)).astype(x.dtype)


@update(full)
def leans(draw, theta, x):
    low = draw.uniform() < theta[1, 0]
    return jnp.where(draw.accept(jnp.where(low, theta[0, 0], -1.0)), (x + 1) % 5, x)


@pytest.mark.parametrize(
    "kernel, message",
    [
        (moves, "the state after a step of `moves` depends on theta other than through"),
        (by_level, r"a decision of `by_level` may jump at a place that depends on theta \(`gt`"),
        (leans, r"a decision of `leans` (may )?jumps? at a place that depends on theta \(`lt`"),
    ],
)
def test_lost_derivatives_are_refused(kernel, message):
    with pytest.raises(diffmh.NotDifferentiable, match=message):
        first_gradient(kernel)


@update(full)
def in_a_branch(draw, theta, x):
    yes = lambda: draw.accept(full(theta, x))
    return jnp.where(jax.lax.cond(x > 2, yes, lambda: False), (x + 1) % 5, x)


@update(full)
def in_a_loop(draw, theta, x):
    body = lambda x, _: (jnp.where(draw.accept(-theta[0, 0]), (x + 1) % 5, x), None)
    return jax.lax.scan(body, x, None, 3)[0]


@update(full)
def in_a_map(draw, theta, x):
    return jnp.sum(jax.vmap(lambda ratio: draw.accept(ratio))(theta[0])).astype(x.dtype) % 5


@update(full)
def to_a_float(draw, theta, x):
    return 1.0 * jnp.where(draw.accept(full(theta, x)), (x + 1) % 5, x)


@update(full)
def to_nothing(draw, theta, x):
    draw.accept(full(theta, x))


@update(full)
def to_a_word(draw, theta, x):
    return "x"


@update(full)
def complex_ratio(draw, theta, x):
    return jnp.where(draw.accept(1j * full(theta, x)), (x + 1) % 5, x)


@update(full)
def whole_ratio(draw, theta, x):
    return jnp.where(draw.accept(x), (x + 1) % 5, x)


@update(full)
def word_ratio(draw, theta, x):
    return jnp.where(draw.accept("high"), (x + 1) % 5, x)


@update(full)
def one_value(draw, theta, x):
    return x + draw.categorical(full(theta, x))


@update(full)
def walk_of_theta(draw, theta, x):
    return draw.propose(diffmh.GaussianWalk(theta[0, 0]), 1.0 * x).astype(x.dtype) % 5


@update(full)
def hides_a_decision(draw, theta, x):
    """Its proposals look alike to a trace."""
    shift = draw.bernoulli(theta[0, 0]).astype(x.dtype)
    there = diffmh.On(lambda x: x + shift, RING)
    return jnp.where(draw.accept(-theta[1, 0]), draw.propose(there, x), x)


@update(full)
def no_proposal(draw, theta, x):
    return draw.propose(lambda x: x, x)


@update(full)
def no_coupling(draw, theta, x):
    return draw.propose(RING, x, coupling="maximal")


@update(full)
def fractional_shape(draw, theta, x):
    return (x + draw.uniform((1.5,)).sum()).astype(x.dtype)


CALLS = []


@update(full)
def another_each_time(draw, theta, x):
    CALLS.append(None)
    accepted = draw.accept(full(theta, x)) if len(CALLS) % 2 else draw.uniform() < 0.5
    return jnp.where(accepted, (x + 1) % 5, x)


@update(full)
def fewer_each_time(draw, theta, x):
    CALLS.append(None)
    for _ in range(len(CALLS) % 2):
        x = jnp.where(draw.accept(full(theta, x)), (x + 1) % 5, x)
    return x


INSIDE = "calls `draw.accept` inside of `jax.lax.cond`, `scan`, `vmap` or `jit`: the number of"
ORDER = "must make the same draws in the same order each time that it is called: draw 0 was"


@pytest.mark.parametrize(
    "kernel, message",
    [
        (in_a_branch, f"`in_a_branch` {INSIDE}"),
        (in_a_loop, f"`in_a_loop` {INSIDE}"),
        (in_a_map, f"`in_a_map` {INSIDE}"),
        (to_a_float, r"what `to_a_float\(.*\)` returns must have the form of the state, int32"),
        (to_nothing, r"what `to_nothing\(.*\)` returns must have the form of the state"),
        (to_a_word, "`to_a_word` must return numbers, got 'x'"),
        (
            complex_ratio,
            "what `complex_ratio` passes to `draw.accept` is complex64: it must be real",
        ),
        (whole_ratio, "what `whole_ratio` passes to `draw.accept` is int32: it must be float32"),
        (word_ratio, "what `word_ratio` passes to `draw.accept` must be a number or an array"),
        (one_value, r"passes to `draw.categorical` must have at least two values .* shape \(\)"),
        (walk_of_theta, "`walk_of_theta` makes the `GaussianWalk` that it passes .* outside of"),
        (hides_a_decision, "`hides_a_decision` makes the `On` that it passes"),
        (no_proposal, "`proposal` must be a `diffmh.extend.Proposal`"),
        (no_coupling, "`coupling` must be a `diffmh.extend.Coupling`"),
        (fractional_shape, r"`draw.uniform\(shape\)` must be an integer, got 1.5"),
        (another_each_time, f"`another_each_time` {ORDER} `accept`, and now is `uniform`"),
        (fewer_each_time, f"`fewer_each_time` {ORDER} "),
    ],
)
def test_mistakes_are_named(kernel, message):
    CALLS.clear()
    with pytest.raises(TypeError, match=message):
        first_gradient(kernel)


def test_what_is_decorated_is_named():
    with pytest.raises(TypeError, match="`log_density` must be a function"):
        update(3.0)
    with pytest.raises(TypeError, match=r"`function` must be a function `function\(draw, theta"):
        update(full)(3.0)
    with pytest.raises(TypeError, match=r"write `@diffmh.extend.update\(log_density\)` above"):
        first_gradient(update(full))


def test_check_tries_functions():
    theta = jnp.asarray(own_kernels.table(2, 5), float)
    assert diffmh.check(own_functions.delayed, theta, jax.random.key(0), init=0)

    @update(full)
    def half(draw, theta, x):
        y = draw.propose(RING, x)
        return jnp.where(draw.accept(0.5 * (full(theta, y) - full(theta, x))), y, x)

    found = diffmh.check(half, theta, jax.random.key(0), init=0)
    assert not found and "half leaves its density invariant" in str(found)
