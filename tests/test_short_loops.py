"""Loops in parts run every row once, in order, and only where XLA gains from it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import diffmh
from diffmh.fast import plain_jax, short_loops
from diffmh.models import gaussian


def order(index, row, carry):
    """Depends on the order, on each row and on its index."""
    return carry * 0.5 + row["a"] * jnp.cos(index) + jnp.sum(row["b"], axis=0)


def rows(total: int, chains: int, width: int = 1):
    draw = lambda number, *shape: jax.random.normal(jax.random.key(number), (total, *shape, chains))
    return {"a": draw(0), "b": draw(1, width)}


@pytest.mark.parametrize(
    ("total", "chains", "width", "length"),
    [
        (128, 16, 1, 8),
        (101, 16, 2, 4),
        (7, 32, 2, 2),
        (9, 16, 1, 8),
        # None for a reason of each kind: all rows are small, none is, one row is.
        (8, 16, 1, None),
        (128, 200, 1, None),
        (128, 64, 2, None),
    ],
)
@pytest.mark.parametrize("missing", [0, 1, 6])
def test_every_row_is_taken_once(total, chains, width, length, missing):
    given, carry = rows(total, chains, width), jnp.zeros(chains)
    assert short_loops._part_length(order, given, carry) == length
    number = max(total - missing, 0)
    run = lambda many: jax.jit(short_loops.over_rows, static_argnums=(0, 4))(
        order, given, number, carry, many
    )
    expected = np.zeros(chains)
    for index in range(number):
        expected = order(index, jax.tree.map(lambda leaf: np.asarray(leaf[index]), given), expected)
    np.testing.assert_allclose(run(True), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(run(True), run(False))


def test_large_arrays_within_a_step_are_found():
    data = jnp.ones((40, 16))

    def closes_over(index, row, carry):
        return carry + row["a"] * jnp.sum(data)

    def computes(index, row, carry):
        return carry + jnp.sum(jnp.outer(row["a"], row["a"]) @ carry[:, None], axis=1)

    def within_a_loop(index, row, carry):
        return jax.lax.fori_loop(0, 2, lambda _, carry: computes(index, row, carry), carry)

    given, carry = rows(128, 16), jnp.zeros(16)
    for step in (closes_over, computes, within_a_loop):
        assert short_loops._part_length(step, given, carry) is None
    with plain_jax(True):
        assert short_loops._part_length(order, given, carry) is None
    assert short_loops._part_length(order, {}, carry) is None


@pytest.mark.parametrize("num_samples", [5, 131])
def test_few_chains_take_the_same_path(num_samples, monkeypatch):
    """Value and gradient bit for bit those of one loop."""

    def found():
        mean = diffmh.expectation(
            # A new function, so that nothing is found in a cache.
            lambda theta, x: x + theta,
            gaussian.sampler(),
            init=0.0,
            num_samples=num_samples,
            num_chains=16,
        )
        return jax.value_and_grad(mean)(0.5, jax.random.key(0))

    lengths, length_of = [], short_loops._part_length

    def noted(*given):
        lengths.append(length_of(*given))
        return lengths[-1]

    monkeypatch.setattr(short_loops, "_part_length", noted)
    in_parts = found()
    assert lengths[-1] == (None if num_samples == 5 else 8)
    monkeypatch.setattr(short_loops, "_part_length", lambda *_: None)
    for one, other in zip(in_parts, found(), strict=True):
        np.testing.assert_array_equal(one, other)
