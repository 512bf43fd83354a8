"""Kernels of a cycle that differ in the part that they move are run by one loop: the same chain."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import diffmh
from diffmh.kernels import compose


def of_leaves(theta, x):
    whole = jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(x)])
    return -0.5 * jnp.sum((whole - theta) ** 2) - 0.25 * jnp.sum((whole[1:] - whole[:-1]) ** 2)


def potts(theta, x):
    z = x["z"]
    return theta * jnp.sum(z[1:] == z[:-1]) + 0.3 * theta * jnp.sum(z == 0) * x["field"]


def leaf(name):
    return lambda x: x[name]


def walk(name, scale):
    return diffmh.MetropolisHastings(of_leaves, diffmh.On(leaf(name), diffmh.GaussianWalk(scale)))


def numbers():
    return [walk(name, 0.5 + 0.2 * i) for i, name in enumerate("abcde")], dict.fromkeys(
        "abcde", 0.0
    )


def vectors():
    return [walk(name, 0.8) for name in "abcd"], dict.fromkeys("abcd", jnp.zeros(2))


def of_two_forms():
    """Six numbers, among them one vector: no loop."""
    state = dict.fromkeys("abcdef", 0.0) | {"c": jnp.zeros(2)}
    return [walk(name, 0.8) for name in "abcdef"], state


def labels():
    site = lambda i: lambda x: x["z"][i]
    kernels = [diffmh.Gibbs(potts, site(i), 3) for i in range(4)]
    return kernels, {"z": jnp.zeros(4, jnp.uint8), "field": 1.0}


def labels_then_choices():
    """Two runs, and a kernel of another kind between them."""
    site = lambda i: lambda x: x["z"][i]
    choose = lambda i: diffmh.MetropolisHastings(potts, diffmh.On(site(i), diffmh.OtherState(3)))
    field = diffmh.MetropolisHastings(
        lambda theta, x: potts(theta, x) - 0.5 * x["field"] ** 2,
        diffmh.On(leaf("field"), diffmh.GaussianWalk(1.0)),
    )
    gibbs, state = labels()
    return [*gibbs, field, *map(choose, range(4))], state


def total(theta, x):
    return sum(jnp.sum(jnp.cos(1.0 * leaf)) for leaf in jax.tree.leaves(x))


CASES = (numbers, vectors, of_two_forms, labels, labels_then_choices)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_loop_is_the_kernels_in_turn(case, monkeypatch):
    """The same chain bit for bit, and the same derivative up to rounding."""
    kernels, init = case()

    def run():
        mean = diffmh.expectation(
            total, diffmh.Cycle(*kernels), init=init, num_samples=10, num_chains=8
        )
        return jax.jit(jax.value_and_grad(mean))(0.7, jax.random.key(30))

    monkeypatch.setattr(compose, "_MANY", 4)
    looped = run()
    monkeypatch.setattr(compose, "_MANY", 100)
    in_turn = run()
    assert looped[0] == in_turn[0]
    np.testing.assert_allclose(looped[1], in_turn[1], rtol=1e-4)
    assert looped[1] != 0


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_which_kernels_are_looped(case, monkeypatch):
    monkeypatch.setattr(compose, "_MANY", 4)
    kernels, _ = case()
    loops = [run.loop is not None for run in compose._runs(tuple(kernels))]
    assert loops == ([True, False, True] if case is labels_then_choices else [True])


def test_a_cycle_of_twice_the_kernels_is_no_larger_a_program():
    """The compiled program grows by the parts of each kernel, not by a copy of the step."""

    def lines(count):
        names = [f"part {number:02d}" for number in range(count)]
        mean = diffmh.expectation(
            lambda theta, x: x[names[0]],
            diffmh.Cycle(*(walk(name, 0.8) for name in names)),
            init=dict.fromkeys(names, 0.0),
            num_samples=10,
            num_chains=8,
        )
        lowered = jax.jit(jax.grad(mean)).lower(0.7, jax.random.key(31))
        return lowered.as_text().count("\n")

    assert lines(16) < 1.5 * lines(8)
