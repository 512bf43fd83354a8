"""Deliberate mistakes in `sad` that the tests must catch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import derivative, mixture_occupancy
from sad_runs import derivatives
from test_sad_chains import PROGRAMS
from test_sad_language import constant_of_a_loop
from unbiasedness import is_caught

from diffmh import sad
from diffmh.sad import control_flow, interpreter, primitives, samplers
from diffmh.sad.values import Value

RUNS = 20_000


def mixture_derivatives(num_runs=RUNS):
    return derivatives(PROGRAMS["mixture"][0], 0.4, num_runs)[:, :, 0]


def second_moment(theta, key):
    return sad.poisson(key, theta).astype(float) ** 2


def square(theta, key):
    x = sad.binomial(key, 3, theta).astype(float)
    return x * x


def before_and_within(theta, key):
    """E = 3θ²."""
    keys = jax.random.split(key, 4)
    a = sad.bernoulli(keys[0], theta)
    count, _ = jax.lax.scan(
        lambda count, key: (count + sad.bernoulli(key, theta), None), 0, keys[1:]
    )
    return a * count


def test_nothing_is_banked(monkeypatch):
    monkeypatch.setattr(
        interpreter, "bank", lambda world, value: Value(value.primal, value.tangent)
    )
    assert is_caught(mixture_derivatives(), derivative(mixture_occupancy(20, 0), 0.4)[1][:, 0])


def test_banked_only_at_the_end(monkeypatch):
    """Unbiased, since the path is kept for the alternative that lives on, but useless: its
    variance shows it.
    """
    right = mixture_derivatives(4_000).var(axis=0)
    monkeypatch.setattr(
        primitives, "linear_in", lambda equation, fixed: [False] * len(equation.inputs)
    )
    wrong = mixture_derivatives(4_000).var(axis=0)
    assert np.all(wrong > 1.3 * right), wrong / right


def test_dead_although_something_outside_differs(monkeypatch):
    for module in (interpreter, control_flow):
        monkeypatch.setattr(module, "pin", lambda world, values: world)
    exact = jax.grad(lambda theta: 6 * (theta**2 + (1 - theta) * 0.3))(0.6)
    assert is_caught(derivatives(constant_of_a_loop, 0.6, RUNS)[:, 0, 0], exact)


def test_values_of_an_alternative_that_was_replaced(monkeypatch):
    assert not is_caught(derivatives(before_and_within, 0.2, RUNS)[:, 0, 0], np.array(1.2))
    for module in (interpreter, control_flow):
        monkeypatch.setattr(module, "forget", lambda value, replaced: value)
    assert is_caught(derivatives(before_and_within, 0.2, RUNS)[:, 0, 0], np.array(1.2))


def test_a_product_taken_for_linear(monkeypatch):
    monkeypatch.setattr(primitives, "BILINEAR", set())
    monkeypatch.setattr(primitives, "LINEAR_IN_ALL", primitives.LINEAR_IN_ALL | {"mul"})
    assert is_caught(derivatives(square, 0.6, RUNS)[:, 0, 0], np.array(10.2))


@pytest.mark.parametrize("mistake", ["up only", "half"])
def test_a_wrong_weight(monkeypatch, mistake):
    right = samplers.POISSON

    def flips(value, parameters, tangents):
        up, down = right.flips(value, parameters, tangents)
        return (
            [up, (down[0], 0.0 * down[1])]
            if mistake == "up only"
            else [(up[0], up[1] / 2), (down[0], down[1] / 2)]
        )

    monkeypatch.setattr(
        samplers, "POISSON", samplers.Sampler(right.invert, flips, right.event_ndims)
    )
    assert is_caught(derivatives(second_moment, 2.0, RUNS)[:, 0, 0], np.array(5.0))


def test_alternatives_that_do_not_stop(monkeypatch):
    """An alternative that has left a loop stays as it is while the primal runs on."""

    def program(theta, key):
        def body(state):
            rounds, key, total = state
            key, key_stop = jax.random.split(key)
            stop = sad.bernoulli(key_stop, theta)
            return jnp.where(stop, 9, rounds + 1), key, total + 1.0

        return jax.lax.while_loop(lambda state: state[0] < 4, body, (0, key, 0.0))[2]

    mean = lambda theta: sum((1 - theta) ** k for k in range(4))
    assert not is_caught(derivatives(program, 0.3, RUNS)[:, 0, 0], jax.jit(jax.grad(mean))(0.3))
    frozen = control_flow._frozen
    always = lambda world, old, new, runs, banked: frozen(
        world, old, new, control_flow._Runs(runs.primal, runs.slots | True), banked
    )
    monkeypatch.setattr(control_flow, "_frozen", always)
    assert is_caught(derivatives(program, 0.3, RUNS)[:, 0, 0], jax.jit(jax.grad(mean))(0.3))
