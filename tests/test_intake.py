"""Draws from anywhere: every form that people have them in, and errors that name what was found."""

from __future__ import annotations

import copy
import types
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import diffmh
from diffmh.tools.tails import pareto_shape

xarray = pytest.importorskip("xarray")
arviz_base = pytest.importorskip("arviz_base")

KEY = jax.random.key(0)
Y = jnp.array([1.0, -0.5, 2.0])


def model(scale):
    mu = numpyro.sample("mu", dist.Normal(0.0, scale))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    theta = numpyro.sample("theta", dist.Normal(mu, 1.0).expand([3]).to_event(1))
    numpyro.deterministic("total", jnp.sum(theta))
    numpyro.sample("y", dist.Normal(theta, sigma), obs=Y)


def f(theta, sites):
    return {"mu": sites["mu"], "total": sites["total"]}


@pytest.fixture(scope="module")
def posterior():
    return diffmh.from_numpyro(model, theta={"scale": 2.0})


@pytest.fixture(scope="module")
def mcmc():
    """Three short chains of NUTS: whether they have converged does not matter here."""
    kernel = numpyro.infer.NUTS(model)
    made = numpyro.infer.MCMC(
        kernel, num_warmup=50, num_samples=60, num_chains=3, chain_method="vectorized",
        progress_bar=False,
    )  # fmt: skip
    made.run(KEY, scale=2.0, extra_fields=("diverging", "num_steps"))
    return made


@pytest.fixture(scope="module")
def sites(mcmc):
    return {
        name: np.asarray(array) for name, array in mcmc.get_samples(group_by_chain=True).items()
    }


@pytest.fixture(scope="module")
def table(posterior, sites):
    return diffmh.sensitivity(posterior, f, draws=sites)


def same(table, other, rtol=0.0):
    for row, wanted in zip(other.rows, table.rows, strict=True):
        assert (row.quantity, row.hyperparameter) == (wanted.quantity, wanted.hyperparameter)
        found, truth = (np.array([r.derivative, r.error, r.low]) for r in (row, wanted))
        np.testing.assert_allclose(found, truth, rtol=rtol, atol=1e-6 * bool(rtol))


def tree_of(sites, **groups):
    return arviz_base.from_dict({"posterior": sites, **groups}, check_conventions=False)


def test_numpyros_mcmc_and_its_divergences(posterior, mcmc, table):
    found = diffmh.sensitivity(posterior, f, draws=mcmc)
    same(table, found)
    assert found.draws is mcmc
    count = int(np.sum(mcmc.get_extra_fields()["diverging"]))
    assert f"divergent transitions: {count:,}, tree depth" in str(found)


def test_an_mcmc_that_has_not_run(posterior):
    fresh = numpyro.infer.MCMC(numpyro.infer.NUTS(model), num_warmup=1, num_samples=1)
    with pytest.raises(ValueError, match="call its `run` first"):
        diffmh.sensitivity(posterior, f, draws=fresh)


def test_trees_and_files(posterior, sites, table, tmp_path):
    tree = tree_of(sites)
    tree.to_netcdf(tmp_path / "draws.nc", engine="h5netcdf")
    for draws in (tree, tree.posterior.to_dataset(), tmp_path / "draws.nc"):
        same(table, diffmh.sensitivity(posterior, f, draws=draws))
    same(table, diffmh.sensitivity(posterior, f, draws=str(tmp_path / "draws.nc")))


def test_zarr(posterior, sites, table, tmp_path):
    pytest.importorskip("zarr")
    tree_of(sites).to_zarr(tmp_path / "draws.zarr")
    same(table, diffmh.sensitivity(posterior, f, draws=tmp_path / "draws.zarr"))


def test_inference_data(posterior, sites, table):
    """ArviZ before 1.0: groups are attributes. PyMC returns it."""
    dataset = tree_of(sites).posterior.to_dataset()
    stats = xarray.Dataset({"diverging": (("chain", "draw"), np.zeros((3, 60), bool))})
    data = types.SimpleNamespace(posterior=dataset, sample_stats=stats)
    found = diffmh.sensitivity(posterior, f, draws=data)
    same(table, found)
    assert "divergent transitions: 0" in str(found)


def test_unconstrained_states_are_taken_as_they_are(posterior, sites, table):
    """A group of somebody else's, which counts only where sites are missing."""
    free = jax.vmap(jax.vmap(lambda one: posterior.unconstrain(posterior.theta, one)))(sites)
    free = {name: np.asarray(array) for name, array in free.items()}
    tree = tree_of({"mu": sites["mu"]}, unconstrained_posterior=free)
    same(table, diffmh.sensitivity(posterior, f, draws=tree))
    other = {**free, "sigma": 2 * free["sigma"]}  # of another transform
    tree = tree_of(sites, unconstrained_posterior=other)
    same(table, diffmh.sensitivity(posterior, f, draws=tree))
    # Taken for sites, log σ would be an impossible or another σ.
    with pytest.raises(ValueError, match="outside its support or on its boundary"):
        diffmh.sensitivity(posterior, f, draws=free)


@pytest.fixture(scope="module")
def sampled(posterior):
    return posterior.sample(KEY, num_warmup=20, num_samples=40)


def test_trees_of_our_own_say_what_they_hold(posterior, sampled, tmp_path):
    """A group by itself, in memory or in a file, is of sites or of states, and knows which."""
    wanted = diffmh.sensitivity(posterior, f, draws=sampled)
    sites, free = sampled.posterior, sampled.unconstrained_posterior
    alone = xarray.DataTree.from_dict({"/posterior": sites.to_dataset()})
    alone.to_netcdf(tmp_path / "sites.nc", engine="h5netcdf")
    forms = (sites, alone, tmp_path / "sites.nc", sites.to_dataset(), free, free.to_dataset())
    for draws in forms:
        same(wanted, diffmh.sensitivity(posterior, f, draws=draws), rtol=1e-4)
    chains = {"init": posterior.init, "num_samples": 40, "num_chains": 4}
    walk = diffmh.sample(posterior.kernel(), posterior.theta, KEY, **chains)
    wanted = diffmh.sensitivity(posterior, f, draws=walk)
    same(wanted, diffmh.sensitivity(posterior, f, draws=walk.posterior))
    states = jax.vmap(jax.vmap(lambda x: posterior.constrain(posterior.theta, x)))
    x = {name: jnp.asarray(walk.posterior[name].values) for name in posterior.init(KEY)}
    same(wanted, diffmh.sensitivity(posterior, f, draws=states(x)), rtol=1e-4)


def test_draws_at_other_hyperparameters_are_seen(sampled):
    there = diffmh.from_numpyro(model, theta={"scale": 2.5})
    with pytest.raises(ValueError, match=r"made at the hyperparameters \{'scale': 2.0\}, not"):
        diffmh.sensitivity(there, f, draws=sampled)
    with pytest.raises(ValueError, match="made at the hyperparameters"):
        diffmh.influence(there, f, sampled)
    found = diffmh.sensitivity(there, f, draws=sampled, at={"scale": 2.0})
    assert "weighted draws" in str(found)


def by_default(scale=2.0):
    model(scale)


def with_any(**kwargs):
    model(kwargs["scale"])


def handled(scale):
    model(scale)


CALLS = {
    "by name": (model, (), {"scale": 2.0}),
    "by position": (model, (2,), {}),
    "by default": (by_default, (), {}),
    "among others": (with_any, (), {"scale": np.float64(2.0)}),
    "within a handler": (numpyro.handlers.reparam(handled, config={}), (), {"scale": 2.0}),
}


@pytest.mark.parametrize("call", CALLS)
def test_the_arguments_of_an_mcmc_are_seen(mcmc, call):
    """Its run names the hyperparameters that it was made with."""
    run = copy.copy(mcmc)
    run.sampler = copy.copy(mcmc.sampler)
    run.sampler._model, run._args, run._kwargs = CALLS[call]
    for scale, fits in ((2.0, True), (2.5, False)):
        there = diffmh.from_numpyro(model, theta={"scale": scale})
        if fits:
            diffmh.sensitivity(there, f, draws=run)
            continue
        with pytest.raises(ValueError, match=r"made at the .* \{'scale': 2.0\}, not .*at="):
            diffmh.sensitivity(there, f, draws=run)
        assert "weighted draws" in str(diffmh.sensitivity(there, f, draws=run, at={"scale": 2.0}))
        with pytest.raises(ValueError, match="made at the hyperparameters"):
            diffmh.sensitivity(there, f, draws=run, at={"scale": 2.2})


@pytest.mark.parametrize("kwargs", [{"scale": None}, {"scale": "2.0 cm"}, {"other": 1.0}, None])
def test_arguments_that_tell_nothing(mcmc, kwargs):
    """They are not compared with theta."""
    run = copy.copy(mcmc)
    run._args, run._kwargs = (), kwargs
    diffmh.sensitivity(diffmh.from_numpyro(model, theta={"scale": 2.5}), f, draws=run)


def test_sites_for_a_density_of_states_are_refused(posterior, mcmc, sampled):
    """`posterior.log_density` of sites would be another number, not an error."""
    at_state = lambda theta, x: x["mu"]
    for draws in (mcmc, sampled, sampled.posterior):
        with pytest.raises(ValueError, match="takes unconstrained"):
            diffmh.from_draws(at_state, posterior.log_density, draws)
    with pytest.raises(ValueError, match="takes unconstrained"):
        diffmh.evidence(posterior.log_density, sampled, at=posterior.theta)
    vouched = diffmh.continuous(posterior)
    with pytest.raises(ValueError, match="takes unconstrained"):
        diffmh.from_draws(at_state, vouched.log_density, sampled)
    free = diffmh.from_draws(at_state, posterior.log_density, sampled.unconstrained_posterior)
    to_state = lambda sites: posterior.unconstrain(posterior.theta, sites)
    made = diffmh.from_draws(at_state, posterior.log_density, sampled, state=to_state)
    one, other = (e.run(posterior.theta).gradient["scale"] for e in (free, made))
    np.testing.assert_allclose(one, other, rtol=1e-4)


def labelled(y, share):
    kind = numpyro.sample("kind", dist.Categorical(jnp.array([share, 0.9 - share, 0.1])))
    numpyro.sample("y", dist.Normal(jnp.array([-1.0, 0.0, 1.0])[kind], 1.0), obs=y)


@pytest.mark.parametrize("shift", [0, 1, 0.5])
def test_labels_that_count_from_one_are_refused(shift):
    mixture = diffmh.from_numpyro(labelled, 0.3, theta={"share": 0.4})
    labels = np.arange(300).reshape(3, 100) % 3
    kind = lambda theta, sites: sites["kind"]
    if shift == 0:
        assert len(diffmh.sensitivity(mixture, kind, draws={"kind": labels})) == 3
        return
    with pytest.raises(ValueError, match=r"'kind' has the values 0, ..., 2 in the model, got"):
        diffmh.sensitivity(mixture, kind, draws={"kind": labels + shift})


class States(NamedTuple):
    """A stack of BlackJAX' states."""

    position: dict
    logdensity: jax.Array


def test_states_of_blackjax(posterior, sites, table):
    free = jax.vmap(jax.vmap(lambda one: posterior.unconstrain(posterior.theta, one)))(sites)
    same(table, diffmh.sensitivity(posterior, f, draws=States(free, sites["mu"])))
    one = jax.tree.map(lambda leaf: leaf[0], States(free, sites["mu"]))
    first = {name: array[:1] for name, array in sites.items()}
    same(
        diffmh.sensitivity(posterior, f, draws=first),
        diffmh.sensitivity(posterior, f, draws=one),
    )
    scanned = jax.tree.map(lambda leaf: leaf.swapaxes(0, 1), States(free, sites["mu"]))
    with pytest.raises(ValueError, match=r"60 chains of 3 draws.*swapaxes"):
        diffmh.sensitivity(posterior, f, draws=scanned)
    with pytest.raises(ValueError, match="swapaxes"):
        diffmh.from_draws(lambda t, x: x["mu"], lambda t, x: -t * x["mu"], scanned)
    flat = diffmh.from_draws(
        lambda t, x: x["mu"], lambda t, x: t * x["mu"], States(free, sites["mu"])
    )
    np.testing.assert_allclose(flat.run(1.0).value, sites["mu"].mean(), rtol=1e-4)


@pytest.mark.parametrize("write", ["theta[{}]", "theta.{}"])
@pytest.mark.parametrize("first", [0, 1])
def test_flat_names_are_put_together(posterior, sites, table, write, first):
    """As posteriordb and CmdStan have them, in any order."""
    flat = {name: sites[name] for name in ("mu", "sigma")}
    for i in (2, 0, 1):
        flat[write.format(i + first)] = sites["theta"][..., i]
    same(table, diffmh.sensitivity(posterior, f, draws=flat))


def test_a_list_of_chains(posterior, sites, table):
    """As posteriordb's files have them, in lists."""
    chains = [{name: array[c].tolist() for name, array in sites.items()} for c in range(3)]
    same(table, diffmh.sensitivity(posterior, f, draws=chains))


def test_thinned_draws(posterior, sites):
    thinned = {name: array[:, ::2] for name, array in sites.items()}
    assert "3 chains of 30 draws" in str(diffmh.sensitivity(posterior, f, draws=thinned))


def without(sites, *names):
    return {name: array for name, array in sites.items() if name not in names}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: without(s, "theta"), r"theta not found.*theta \(3,\).*mu \(3, 60\)"),
        (lambda s: {**s, "theta": s["theta"][..., :2]}, r"theta of another shape.*\(3, 60, 2\)"),
        (lambda s: {**without(s, "theta"), "theta[1]": s["mu"]}, r"theta not found.*theta\[1\]"),
        (lambda s: {k: v.reshape(180, *v.shape[2:]) for k, v in s.items()}, "no axis of chains"),
        (lambda s: {**s, "mu": s["mu"][:, :50]}, "disagree about chains and draws"),
        (lambda s: {**s, "sigma": -s["sigma"]}, "'sigma' are not finite, or lie outside"),
        (lambda s: {**s, "mu": "a"}, "'mu' is 'a', not an array"),
        (lambda s: s["mu"], "arrays by the names of the posterior's sites, mu"),
        (lambda s: [{"mu": [1.0]}, {"mu": [1.0, 2.0]}], "must be of one length"),
        (lambda s: tree_of(s).posterior.to_dataset().rename(chain="walker"), "'walker': 3"),
        (lambda s: tree_of(s).children and xarray.DataTree.from_dict({"a": None}), "no group"),
    ],
)
def test_what_does_not_fit_is_listed(posterior, sites, change, words):
    with pytest.raises((TypeError, ValueError), match=words):
        diffmh.sensitivity(posterior, f, draws=change(sites))


def test_a_path_that_is_not_there_or_holds_no_draws(posterior, tmp_path):
    with pytest.raises(FileNotFoundError, match="nothing at"):
        diffmh.sensitivity(posterior, f, draws=tmp_path / "none.nc")
    (tmp_path / "text.nc").write_text("not netCDF")
    with pytest.raises(ValueError, match="cannot read"):
        diffmh.sensitivity(posterior, f, draws=tmp_path / "text.nc")


# Draws of N(0, 2²) with weights that make them N(θ, 1).
THETA = 0.3
WIDE = 2.0 * jax.random.normal(KEY, (4, 10_000))


def log_normal(theta, x):
    return -0.5 * (x - theta) ** 2


def log_weights(x):
    return log_normal(THETA, x) + 0.125 * x**2


def square(theta, x):
    return {"x": x, "square": x**2 + theta * x}


def test_weighted_draws():
    weights = jnp.exp(log_weights(WIDE))
    report = diffmh.from_draws(square, log_normal, WIDE, weights=weights).run(THETA)
    value = {"x": THETA, "square": 1 + 2 * THETA**2}
    slope = {"x": 1.0, "square": 4 * THETA}
    for name in value:
        assert abs(report.value[name] - value[name]) < 4 * report.value_error[name]
        assert abs(report.gradient[name] - slope[name]) < 4 * report.gradient_error[name]
        assert report.gradient_error[name] < 0.1
    assert "weighted draws" in str(report) and not report.warnings
    # Without the weights it is another distribution.
    plain = diffmh.from_draws(square, log_normal, WIDE).run(THETA)
    assert abs(plain.gradient["x"] - 1) > 20 * plain.gradient_error["x"]


def test_errors_of_weighted_draws():
    """z-scores of 100 runs of 400 draws: their spread is 1 within 5 standard errors (0.07)."""
    from diffmh.tools.draw_averages import AtDraws

    z = []
    for x in np.asarray(WIDE, float).reshape(100, 4, 100):
        weight = np.exp(log_weights(x))
        at = AtDraws(
            x[..., None], (x - THETA)[..., None], np.zeros(x.shape), weight / weight.mean()
        )
        (value,), ((slope,),) = at.batches(10)
        z.append([(value.mean() - THETA) / value.std(), (slope.mean() - 1) / slope.std()])
    spread = np.std(np.array(z) * np.sqrt(40), axis=0)
    assert np.all((spread > 0.65) & (spread < 1.35)), spread


def test_equal_weights_are_none():
    plain = diffmh.from_draws(square, log_normal, WIDE).run(THETA)
    equal = diffmh.from_draws(square, log_normal, WIDE, weights=jnp.full(WIDE.shape, 3.0)).run(
        THETA
    )
    np.testing.assert_allclose(equal.gradient["square"], plain.gradient["square"], rtol=1e-5)
    error = plain.gradient_error["square"]
    np.testing.assert_allclose(equal.gradient_error["square"], error, rtol=1e-4)


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        (-jnp.ones(WIDE.shape), "non-negative"),
        (jnp.zeros(WIDE.shape), "not all zero"),
        (jnp.ones(7), "of shape"),
        (jnp.full(WIDE.shape, jnp.nan), "finite"),
        ("a", "number or an array"),
    ],
)
def test_weights_that_are_refused(weights, words):
    with pytest.raises((TypeError, ValueError), match=words):
        diffmh.from_draws(square, log_normal, WIDE, weights=weights)


def test_heavy_weights_are_seen():
    """Draws of N(0, ¼²) for N(θ, 1): the weights have infinite variance, with k = 15/16."""
    narrow = WIDE / 8
    weights = jnp.exp(log_normal(THETA, narrow) + 8 * narrow**2)
    report = diffmh.from_draws(square, log_normal, narrow, weights=weights).run(THETA)
    assert any("heavy tail" in warning for warning in report.warnings)


@pytest.mark.parametrize("k", [0.3, 1.0])
def test_pareto_shape(k):
    """Of Pareto tails with 2,000 draws, k̂ has a standard deviation of about 0.1."""
    drawn = np.random.default_rng(0).uniform(size=(40, 2_000)) ** -k
    found = np.array([pareto_shape(values) for values in drawn])
    assert abs(found.mean() - k) < 0.1 and found.std() < 0.2


def test_the_upper_tail_is_the_one_that_is_fitted():
    """Also of numbers whose sum is negative or zero."""
    heavy = np.random.default_rng(1).uniform(size=2_000) ** -0.8
    for values in (heavy - 100.0, heavy - heavy.mean()):
        np.testing.assert_allclose(pareto_shape(values), pareto_shape(heavy), rtol=1e-6)
    assert pareto_shape(-heavy) < 0.1


@pytest.mark.parametrize("values", [np.zeros(4_000), np.repeat([1.0, 2.0], 500), np.arange(9.0)])
def test_no_tail_has_no_shape(values):
    assert pareto_shape(values) == -np.inf
