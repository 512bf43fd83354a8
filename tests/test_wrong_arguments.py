"""Wrong arguments are refused by name: `wrong_arguments.py` goes over all of them."""

import functools

import jax
import jax.numpy as jnp
import pytest
import wrong_arguments
from wrong_arguments import Call, attempt, attempts, calls, public_names

import diffmh
from diffmh import sad

KEY = jax.random.key(0)


def assert_refused_by_name(outcomes):
    outcomes = list(outcomes)
    unnamed = [outcome for outcome in outcomes if outcome.verdict == "not named"]
    accepted = [o for o in outcomes if o.verdict == "accepted" and o.reason is None]
    assert len(unnamed) < 0.02 * len(outcomes), "\n".join(map(str, unnamed))
    assert not accepted, "\n".join(map(str, accepted))


def test_what_is_not_run():
    assert_refused_by_name(attempts(calls(dear=False)))


@pytest.mark.thorough
def test_all():
    assert_refused_by_name(attempts(calls()))


def test_every_public_name_is_tried():
    tried = {call.name.split(",")[0] for call in calls()} | {"from_pymc"}
    tried |= {part for name in tried for part in name.replace("()", "").split(".")}
    assert public_names() <= tried | wrong_arguments.WITHOUT_ARGUMENTS


def test_verdicts():
    """A call of each kind is told apart."""

    def named(number):
        raise TypeError(f"`number` must be 1, got {number!r}.")

    def unnamed(number):
        return number + 1

    verdicts = [
        attempt(Call("", function, {"number": 1}), "number", "'a'").verdict
        for function in (named, unnamed, lambda number: None)
    ]
    assert verdicts == ["named", "not named", "accepted"]
    assert attempt(Call("", lambda number: None, {"number": 1}), "number", "'a'").reason is None


MEAN = diffmh.expectation(
    lambda theta, x: x, diffmh.models.gaussian.sampler(), init=0.0, num_samples=3, num_chains=2
)


def adapt_inside_jit():
    adapt = lambda theta: diffmh.adapt(MEAN.simulation.kernel, theta, KEY, init=0.0)
    return jax.jit(lambda theta: adapt(theta).kernel.proposal.scale)(0.5)


def coin(theta, key):
    return 1.0 * sad.bernoulli(key, theta)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: diffmh.Until(relative="a"), r"`Until\(relative=...\)` must be a number, got 'a'"),
        (lambda: diffmh.Checkpoint(None), r"`Checkpoint\(directory=...\)` must be the path"),
        (lambda: MEAN.run(0.5, KEY).interval("a"), r"interval\(level=...\)` must be a number"),
        (
            lambda: diffmh.sensitivity(wrong_arguments.posterior()[1], None, KEY),
            r"`f` must be a function",
        ),
        (
            lambda: sad.run(coin, 0.5, KEY, checkpoint="a"),
            r"`sad.run\(checkpoint=...\)` is neither an option .* nor an argument of the program",
        ),
        (
            lambda: diffmh.Hamiltonian(lambda theta, x: -(x**2), jnp.inf, 3),
            r"`Hamiltonian\(step_size=...\)` must be finite, got inf",
        ),
        (lambda: diffmh.StochasticDerivative(births="abc"), r"births=...\)` must be True or False"),
        (lambda: diffmh.continuous(None), r"`function` must be a function .*, got None"),
        (adapt_inside_jit, "`adapt` inspects its chains and cannot be traced"),
        (lambda: MEAN.run(0.5, KEY, until=-1.0), r"`until=...` must be positive"),
    ],
)
def test_messages(call, words):
    with pytest.raises((TypeError, ValueError), match=words):
        call()


def test_options_of_a_program_still_reach_it():
    program = lambda theta, key, *, power: coin(theta, key) ** power
    assert sad.run(program, 0.5, KEY, num_replicates=4, power=2.0).value.shape == ()


def test_functions_that_add_arguments_to_those_they_wrap():
    """A decorated function is called with its own arguments, not with those of the one inside."""

    def with_data(function):
        @functools.wraps(function)
        def wrapped(theta, x):
            return function(theta, x, 2.0)

        return wrapped

    @with_data
    def log_density(theta, x, scale):
        return -0.5 * ((x - theta) / scale) ** 2

    @with_data
    def f(theta, x, factor):
        return factor * x

    kernel = diffmh.MetropolisHastings(log_density, diffmh.GaussianWalk(2.0))
    mean = diffmh.expectation(f, kernel, init=0.0, num_samples=3, num_chains=2)
    assert jnp.isfinite(mean(0.5, KEY))
    draws = jax.random.normal(KEY, (4, 20))
    assert jnp.isfinite(diffmh.from_draws(f, log_density, draws).run(0.5).value)


def test_traced_draws_are_refused():
    log_density = lambda theta, x: -0.5 * (x - theta) ** 2

    def evidence(draws):
        return diffmh.evidence(log_density, draws, at=0.5)(0.5)

    def mean(draws):
        return diffmh.from_draws(lambda theta, x: x, log_density, draws, at=0.5)(0.5)

    for function in (evidence, mean):
        with pytest.raises(TypeError, match=r"`from_draws\(draws=...\)` must be known"):
            jax.jit(function)(jnp.ones((4, 20)))
