"""`over_chains` is `jax.vmap` over the last axis, whatever it is given."""

from __future__ import annotations

import ast
import pathlib

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equinox.internal import unvmap_any

import diffmh
from diffmh.fast.chains import over_chains

X = jax.random.normal(jax.random.key(0), (3, 4, 5))
TABLE = jnp.arange(10.0, 17.0)
WEIGHTS = jax.random.normal(jax.random.key(1), (4, 2))

FUNCTIONS = {
    "elementwise, with a constant": lambda x: jnp.exp(x) * jnp.arange(4.0) - x.T[0, 1],
    "a scalar condition": lambda x: jnp.where(x[0, 0] > 0, x, -x),
    "clamped between scalars": lambda x: jax.lax.clamp(x[0, 0], x, x[0, 0] + 1.0),
    "axes of length 1": lambda x: x[:, :1] * x[:1, :] + x,
    "sums and running sums": lambda x: (
        jnp.sum(x, 1),
        jnp.cumsum(x, 0),
        jnp.argmax(x, 1),
        jnp.all(x > 0),
        x.max(),
    ),
    "shapes": lambda x: (
        x.reshape(2, 6),
        x.T,
        x[None],
        jnp.roll(x, 1, 0),
        x[::-1, 1:3],
        jnp.pad(x, ((1, 0), (0, 2))),
    ),
    "joined with a constant": lambda x: jnp.concatenate([x, jnp.ones((1, 4))]),
    "stacked and split": lambda x: (jnp.stack([x, x + 1], 1), jnp.split(x, 2, axis=1)),
    "products of matrices": lambda x: (x @ WEIGHTS, WEIGHTS.T @ x.T, jnp.einsum("ij,kj->ik", x, x)),
    "gathered and scattered": lambda x: (
        x[:, jnp.argmax(x[0])],
        x.at[0, 1].set(9.0),
        x.at[jnp.array([0, 2])].add(1.0),
    ),
    "sorted": lambda x: jnp.sort(x, axis=0),
    "an entry of a table": lambda x: (
        TABLE[jnp.argmax(x[0])],
        x[0][jnp.argmax(x[1])],
        TABLE[jnp.argmax(x[0]) + 9],
        TABLE[-1],
    ),
    "a slice anywhere": lambda x: jax.lax.dynamic_slice(x, (jnp.int32(1), jnp.int32(2)), (2, 2)),
    "a slice that begins too early or too late": lambda x: [
        jax.lax.dynamic_slice(x, (jnp.int32(i), jnp.int32(0)), (2, 2), allow_negative_indices=False)
        for i in (-1, 5)
    ],
    "padded with what differs": lambda x: jax.lax.pad(x, x[0, 0], ((1, 0, 1), (0, 2, 0))),
    "an update too early": lambda x: jax.lax.dynamic_update_slice(
        jnp.zeros((3, 4)),
        x[:2, :2],
        (jnp.int32(-1), jnp.int32(2)),
        allow_negative_indices=False,
    ),
    "an update anywhere": lambda x: jax.lax.dynamic_update_slice(
        jnp.zeros((3, 4)), x[:2, :2], (jnp.int32(1), jnp.int32(2))
    ),
    "bits": lambda x: (
        jax.lax.bitcast_convert_type(x, jnp.uint32) ^ 1,
        jax.lax.bitcast_convert_type(x, jnp.uint8),
    ),
    "a call": lambda x: jax.jit(jnp.tanh)(x) + jax.nn.relu(x),
    "a scan": lambda x: jax.lax.scan(lambda c, row: (c + row, c * row), jnp.zeros(4), x),
    "a scan over constants": lambda x: jax.lax.scan(
        lambda c, w: (c * w, w), x, jnp.arange(3.0), reverse=True
    ),
    "a common branch": lambda x: jax.lax.cond(
        WEIGHTS[0, 0] > 0, lambda x: x + 1, lambda x: jnp.zeros_like(x), x
    ),
    "a branch of its own": lambda x: jax.lax.cond(x[0, 0] > 0, lambda x: x + 1, lambda x: x - 1, x),
    "a while loop": lambda x: jax.lax.while_loop(lambda x: jnp.sum(x) < 10, lambda x: x + 1, x),
    "its own gradient": lambda x: jax.grad(lambda x: jnp.sum(jnp.sin(x) @ WEIGHTS))(x),
    "a map": lambda x: jax.vmap(lambda row, w: jnp.outer(row, w), (1, 0))(x, WEIGHTS),
    "nothing of it": lambda x: jnp.arange(3),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_over_chains_is_vmap(name):
    found, wanted = over_chains(FUNCTIONS[name])(X), jax.vmap(FUNCTIONS[name], -1, -1)(X)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_only_one_room_reads_jaxs_parameters():
    """Elsewhere `equation.params` is asked for what our own primitives put there, and nothing
    else.
    """
    ours = {"sampler", "form", "batches"}
    root = pathlib.Path(diffmh.__file__).parent
    for file in set(root.rglob("*.py")) - set((root / "jaxprs").glob("*.py")):
        tree = ast.parse(file.read_text())
        reads = {n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr == "params"}
        named = {
            n.value
            for n in ast.walk(tree)
            if isinstance(n, ast.Subscript)
            and isinstance(n.slice, ast.Constant)
            and n.slice.value in ours
        }
        assert reads <= named, f"{file} reads parameters of a jaxpr"


def test_chains_stay_last():
    """Nothing is transposed on the way of a state through elementwise operations, shifts, sums
    and branches.
    """

    def function(x):
        around = jnp.roll(x, 1, 0) + jnp.roll(x, -1, 1) + jnp.arange(4)
        return jnp.where(around > jnp.sum(x), around, x[0, 0])

    text = str(jax.make_jaxpr(over_chains(function))(X))
    assert "transpose" not in text
    assert "transpose" in str(jax.make_jaxpr(jax.vmap(function, -1, -1))(X))


RANDOM = {
    "in a loop": lambda key: jax.lax.scan(
        lambda x, key: (x + jax.random.normal(key), None), 0.0, jax.random.split(key, 7)
    )[0],
    "splits": lambda key: [
        jax.random.uniform(k, (2,)) for k in jax.random.split(jax.random.fold_in(key, 3), 3)
    ],
    "carried": lambda key: jax.lax.fori_loop(
        0, 4, lambda i, k: jax.random.fold_in(jax.random.split(k)[1], i), key
    ),
    "chosen": lambda key: jax.lax.cond(
        jax.random.bernoulli(key), lambda k: jax.random.split(k)[0], lambda k: k, key
    ),
    "many and few bits": lambda key: (
        jax.random.bits(key, (3, 5)),
        jax.random.bits(key, (2,), jnp.uint8),
        jax.random.key_data(key),
    ),
    "mapped": lambda key: jax.vmap(jax.random.exponential)(
        jax.random.split(key, (4, 2)).reshape(8)
    ),
    "until": lambda key: jax.lax.while_loop(
        lambda k: jax.random.uniform(k) < 0.7, lambda k: jax.random.split(k)[0], key
    ),
    "of other shapes": lambda key: jax.vmap(
        lambda k: jax.random.bits(jax.random.fold_in(k, 1), (3,))
    )(jax.random.split(key, (2, 5)).ravel()),
    "by the hundred": lambda key: jax.vmap(lambda k: jax.random.uniform(k, (7, 11)), out_axes=1)(
        jax.random.split(key, 5)
    ),
    "many alike, in rounds": lambda key: [
        jax.random.uniform(k, (3,)) + jax.random.bits(jax.random.fold_in(k, 7), (2, 3))[i % 2]
        for i, first in enumerate(jax.random.split(key, 5))
        for k in jax.random.split(first)
    ],
    "many alike, one from another": lambda key: [
        key := jax.random.split(key)[i % 2] for i in range(6)
    ],
    "counts": lambda key: jax.random.poisson(key, 3.0, (4,)),
    "stacked": lambda key: jax.random.normal(jnp.stack([key, jax.random.split(key)[0]])[1]),
}


@pytest.mark.parametrize("name", RANDOM)
def test_draws_over_chains_are_jaxs(name):
    """Whatever becomes of keys, chains draw what they would have drawn alone from JAX's own."""
    keys = jax.random.split(jax.random.key(5), 6)
    bare = lambda tree: [
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        for x in jax.tree.leaves(tree)
    ]
    found = over_chains(lambda key: bare(RANDOM[name](key)))(keys)
    wanted = jax.vmap(lambda key: bare(RANDOM[name](key)), out_axes=-1)(keys)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def refusing(limit):
    """N(θ, 1), whose density raises beyond a limit."""

    def log_density(theta, x):
        x = eqx.error_if(x, jnp.abs(x) > limit, "x is too far out")
        return -0.5 * (x - theta) ** 2

    return diffmh.expectation(
        lambda theta, x: x,
        diffmh.MetropolisHastings(log_density, diffmh.GaussianWalk(2.38)),
        init=0.0,
        num_samples=20,
        num_chains=8,
    )


def test_draws_that_are_alike_are_made_at_once():
    """However many kernels a cycle has, Threefry is written out as often."""

    def written_out(num_kernels):
        draw = lambda key: [jax.random.uniform(k) for k in jax.random.split(key, num_kernels)]
        keys = jax.random.split(jax.random.key(0), 3)
        return str(jax.make_jaxpr(over_chains(draw))(keys)).count("shift_left")

    assert written_out(10) == written_out(40)


def test_errors_that_are_not_true_do_not_raise():
    key = jax.random.key(0)
    found = jax.value_and_grad(refusing(1e6))(0.5, key)
    wanted = jax.value_and_grad(refusing(jnp.inf))(0.5, key)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    with pytest.raises(Exception, match="too far out"):
        jax.block_until_ready(jax.value_and_grad(refusing(1.0))(0.5, key))


@pytest.mark.parametrize("worst, raises", [(9.0, False), (11.0, True)])
def test_errors_of_some_chains_raise(worst, raises):
    """In a common branch, in a loop, and by themselves, wherever only one chain errs."""

    def function(x):
        check = lambda x: eqx.error_if(x, x > 10, "one is too large")
        x = jax.lax.cond(WEIGHTS[0, 0] > -9, check, lambda x: x, x)
        return jax.lax.fori_loop(0, 3, lambda i, x: check(x), x)

    mapped = eqx.filter_jit(over_chains(function))
    x = jnp.array([1.0, worst, 2.0])
    if raises:
        with pytest.raises(Exception, match="one is too large"):
            jax.block_until_ready(mapped(x))
    else:
        np.testing.assert_array_equal(mapped(x), x)


def test_effects_are_not_left_out():
    """A print of a chain's values appears for each chain, one of shared values once."""
    seen = []

    def function(x):
        jax.debug.callback(lambda x: seen.append(float(x)), x)
        jax.debug.callback(lambda x: seen.append(float(x)), WEIGHTS[0, 0])
        return x + 1

    jax.block_until_ready(jax.jit(over_chains(function))(jnp.arange(4.0)))
    jax.effects_barrier()
    assert sorted(seen) == sorted([0.0, 1.0, 2.0, 3.0, float(WEIGHTS[0, 0])])


def test_what_vmap_does_not_map_stays_common():
    """The result of a primitive that looks at all chains at once is one, not one each."""
    common = lambda x: jax.lax.cond(unvmap_any(x > 2), lambda x: -x, lambda x: x, x)
    text = str(jax.make_jaxpr(over_chains(common))(jnp.arange(4.0)))
    assert "cond" in text and "select_n" not in text
    np.testing.assert_array_equal(over_chains(common)(jnp.arange(4.0)), -jnp.arange(4.0))


def test_keys_of_other_kinds():
    mean = diffmh.expectation(
        lambda theta, x: x,
        diffmh.MetropolisHastings(
            lambda theta, x: -0.5 * (x - theta) ** 2, diffmh.GaussianWalk(2.38)
        ),
        init=0.0,
        num_samples=50,
        num_chains=64,
    )
    value, slope = jax.value_and_grad(mean)(0.5, jax.random.key(0, impl="rbg"))
    assert abs(value - 0.5) < 0.3 and abs(slope - 1.0) < 0.5


def test_a_large_chain_by_itself_goes_without_the_axis():
    """The same numbers, keys included, whether or not there is an axis of chains."""

    def function(key, x):
        return x * jax.random.normal(key, x.shape) + jnp.roll(x, 1, axis=0), jnp.any(x > 2, axis=1)

    key, x = jax.random.key(3), jax.random.normal(jax.random.key(4), (70, 70))
    found = over_chains(function)(key[None], x[..., None])
    pair = over_chains(function)(jnp.stack([key, key]), jnp.stack([x, x], axis=-1))
    for one, two in zip(found, pair, strict=True):
        assert one.shape == (*two.shape[:-1], 1)
        np.testing.assert_array_equal(one[..., 0], two[..., 0])
