"""optimise: the loop around an optax optimiser."""

from __future__ import annotations

import io

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import diffmh
from diffmh.models import gaussian

KEY = jax.random.key(0)


def noisy_bowl(theta, key, centre=1.0):
    """Least at `centre`, with a gradient that is right on average."""
    noise = jax.random.normal(key, jnp.shape(theta["a"]))
    return jnp.sum((theta["a"] - centre) ** 2) + jnp.sum(noise * theta["a"])


def test_descent_and_its_trace():
    start = {"a": jnp.array([3.0, -2.0])}
    path = diffmh.optimise(
        noisy_bowl, start, KEY, 0.5, optimizer=optax.sgd(0.05), num_iterations=400
    )
    assert path.theta["a"].shape == path.gradient["a"].shape == (400, 2) and path.value.shape == (
        400,
    )
    np.testing.assert_array_equal(path.theta["a"][0], start["a"])
    np.testing.assert_allclose(
        path.theta["a"][1:],
        path.theta["a"][:-1] - 0.05 * path.gradient["a"][:-1],
        rtol=1e-5,
        atol=1e-6,
    )
    np.testing.assert_allclose(
        path.last["a"], path.theta["a"][-1] - 0.05 * path.gradient["a"][-1], rtol=1e-5, atol=1e-6
    )
    np.testing.assert_allclose(path.average["a"], path.theta["a"][200:].mean(axis=0), rtol=1e-6)
    np.testing.assert_allclose(path.average["a"], 0.5, atol=0.15)
    assert np.isnan(path.value_error).all() and np.isnan(path.gradient_error["a"]).all()


def test_averaging_is_what_makes_it_precise():
    """The spread of averaged ends over seeds is a fraction of that of last iterates."""
    run = lambda seed: diffmh.optimise(
        noisy_bowl,
        {"a": jnp.zeros(1)},
        jax.random.key(seed),
        optimizer=SGD,
        num_iterations=200,
        average_from=0.2,
    )
    paths = [run(seed) for seed in range(20)]
    last, average = (
        np.std([float(end["a"][0]) for end in ends])
        for ends in zip(*((p.last, p.average) for p in paths), strict=True)
    )
    assert average < 0.4 * last


SGD = optax.sgd(0.2)


def test_an_expectation_reports_its_errors():
    mean = diffmh.expectation(
        lambda theta, x: (x - 2.0) ** 2,
        gaussian.sampler(),
        init=0.0,
        num_samples=200,
        burn_in=20,
        num_chains=32,
    )
    path = diffmh.optimise(mean, 0.0, KEY, optimizer=optax.adam(0.1), num_iterations=3)
    report = mean.run(0.0, jax.random.fold_in(KEY, 0))
    first = (path.value[0], path.value_error[0], path.gradient[0], path.gradient_error[0])
    np.testing.assert_allclose(
        first, (report.value, report.value_error, report.gradient, report.gradient_error), rtol=1e-4
    )


def test_the_same_key_gives_the_same_digits():
    one, two = (
        diffmh.optimise(noisy_bowl, {"a": jnp.ones(2)}, KEY, optimizer=SGD, num_iterations=5)
        for _ in range(2)
    )
    assert all(
        np.array_equal(a, b, equal_nan=True)
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True)
    )


def test_not_a_number_is_refused():
    with pytest.raises(FloatingPointError, match="at iteration 2"):
        diffmh.optimise(
            lambda t, key: jnp.sqrt(t), 1.0, KEY, optimizer=optax.sgd(1.2), num_iterations=9
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_iterations": 0}, "num_iterations"),
        ({"average_from": 1.0}, "average_from"),
        ({"objective": 3.0}, "objective"),
        ({"objective": lambda t, key: jnp.stack([t, t])}, "one number"),
        ({"theta": 1}, "theta"),
        ({"key": jnp.zeros(2, jnp.uint32)}, "key"),
    ],
)
def test_refusals(change, message):
    given = {
        "objective": lambda t, key: t**2,
        "theta": 1.0,
        "key": KEY,
        "optimizer": SGD,
        "num_iterations": 2,
    } | change
    with pytest.raises((ValueError, TypeError), match=message):
        diffmh.optimise(given.pop("objective"), given.pop("theta"), given.pop("key"), **given)


@pytest.mark.parametrize("terminal", [True, False])
def test_the_bar_goes_to_a_terminals_stderr(terminal, monkeypatch, capsys):
    class Screen(io.StringIO):
        def isatty(self):
            return terminal

    screen = Screen()
    monkeypatch.setattr("sys.stderr", screen)
    diffmh.optimise(lambda t, key: t**2, 1.0, KEY, optimizer=SGD, num_iterations=2, name="a bowl")
    assert ("a bowl" in screen.getvalue()) == terminal
    assert capsys.readouterr().out == ""


def test_the_iterations_may_be_gone_over_by_somebody_else():
    seen: list[int] = []

    def told(iterations):
        for i in iterations:
            seen.append(i)
            yield i

    steps = {"optimizer": SGD, "num_iterations": 3}
    path = diffmh.optimise(lambda t, key: t**2, 1.0, KEY, **steps, progress=told)
    assert seen == [0, 1, 2] and len(path.value) == 3
