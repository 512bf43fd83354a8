"""sample: the chains of an expectation, as ArviZ has them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import diffmh

KEY = jax.random.key(5)
START = {"place": (jnp.zeros(2), 1.0), "label": 0}


def log_density(theta, x):
    (a, b), label = x["place"], x["label"]
    return -0.5 * jnp.sum((a - theta) ** 2) - 0.5 * (b - label) ** 2 - 0.3 * label


MIXED = diffmh.Cycle(
    diffmh.MetropolisHastings(
        log_density, diffmh.On(lambda x: x["place"], diffmh.GaussianWalk(1.4))
    ),
    diffmh.MetropolisHastings(log_density, diffmh.On(lambda x: x["label"], diffmh.OtherState(3))),
)


def drawn(**options):
    given = {"init": START, "num_samples": 100, "num_chains": 3, "burn_in": 70, "thinning": 3}
    return diffmh.sample(MIXED, 0.5, KEY, **(given | options))


@pytest.fixture(scope="module")
def whole():
    return drawn()


def same(one, other):
    return all(
        np.array_equal(one[group][name].values, other[group][name].values)
        for group in ("posterior", "sample_stats")
        for name in one[group].data_vars
    )


@pytest.mark.optimised
def test_draws_are_the_chain_that_is_traced(whole):
    assert sorted(whole.posterior.data_vars) == ["label", "place.0", "place.1"]
    assert whole.posterior["place.0"].shape == (3, 100, 2)
    assert whole.posterior.label.dtype == np.int32
    path = diffmh.trace(MIXED, 0.5, KEY, init=START, num_steps=370)
    kept = lambda leaf: np.asarray(leaf)[72::3]
    np.testing.assert_array_equal(whole.posterior["place.0"][0], kept(path.primal["place"][0]))
    np.testing.assert_array_equal(whole.posterior["place.1"][0], kept(path.primal["place"][1]))
    np.testing.assert_array_equal(whole.posterior.label[0], kept(path.primal["label"]))
    rate = np.asarray(path.accepted)[70:].reshape(-1, 3).mean(axis=1)
    np.testing.assert_allclose(whole.sample_stats.acceptance_rate[0], rate, rtol=1e-6)
    last = {name: whole.posterior[name][2, -1].values for name in whole.posterior.data_vars}
    x = {"place": (last["place.0"], last["place.1"]), "label": last["label"]}
    np.testing.assert_allclose(whole.sample_stats.lp[2, -1], log_density(0.5, x), rtol=1e-5)


def test_blocks_are_invisible(whole):
    """The same digits however few draws wait to be written out."""
    assert same(whole, drawn(block_size=1)) and same(whole, drawn(block_size=10_000))
    assert not same(whole, drawn(init={**START, "label": 1})), "the comparison sees a difference"


def test_on_disk_they_are_read_when_asked_for(whole, tmp_path):
    place = diffmh.Checkpoint(tmp_path / "draws", seconds=0)
    first = drawn(checkpoint=place)
    assert isinstance(first.posterior.label.variable._data, np.memmap) and same(whole, first)
    again = drawn(checkpoint=place)
    assert same(whole, again)


@pytest.mark.parametrize("damage", ["short", "changed", "gone"])
def test_damaged_draws_are_refused_and_left_alone(damage, tmp_path):
    drawn(checkpoint=tmp_path / "d")
    file = tmp_path / "d" / "draws" / "000.npy"
    content = bytearray(file.read_bytes())
    if damage == "short":
        content = content[:-100]
    content[200] ^= damage == "changed"
    file.unlink() if damage == "gone" else file.write_bytes(content)
    with pytest.raises(ValueError, match=r"draws in 'draws' are damaged.*nothing was overwritten"):
        drawn(checkpoint=tmp_path / "d")
    assert damage == "gone" or file.read_bytes() == bytes(content)


def test_a_single_array_is_x_and_gibbs_has_no_acceptance_rate():
    coin = diffmh.Gibbs(lambda theta, x: theta * x, lambda x: x, 2)
    draws = diffmh.sample(coin, 0.5, KEY, init=0, num_samples=4, num_chains=2)
    assert list(draws.posterior.data_vars) == ["x"]
    assert np.isnan(draws.sample_stats.acceptance_rate).all()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"num_samples": 0}, ValueError, "num_samples"),
        ({"thinning": 0}, ValueError, "thinning"),
        ({"block_size": 1.5}, TypeError, "block_size"),
        ({"checkpoint": 3}, TypeError, "checkpoint"),
        ({"init": {**START, "place": (jnp.zeros(2), jnp.nan)}}, ValueError, "start state"),
    ],
)
def test_refusals(change, error, message):
    with pytest.raises(error, match=message):
        drawn(**change)


def test_its_derivative_is_refused():
    walk = diffmh.MetropolisHastings(lambda t, x: -0.5 * (x - t) ** 2, diffmh.GaussianWalk(2.0))
    with pytest.raises(TypeError, match="sample"):
        jax.grad(lambda t: diffmh.sample(walk, t, KEY, init=0.0, num_samples=5))(0.5)
