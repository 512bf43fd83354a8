"""Models of PyMC other than the schools, in a process of their own: PyTensor switches JAX to double
precision. Ends with an error where something is wrong.
"""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pymc as pm

import diffmh
from diffmh.analysis import moving_jumps

OBSERVED = np.array([-1.2, 0.3, 1.9, 2.2])


def labels() -> pm.Model:
    """A label for each datum, and one that nothing depends on."""
    with pm.Model() as model:
        z = pm.Bernoulli("z", pm.Data("share", 0.4), shape=4)
        c = pm.Categorical("c", p=np.ones(3) / 3)
        pm.Normal("y", 2.0 * z + 0.0 * c, 1.0, observed=OBSERVED)
    return model


def exact(share):
    """P(z = 1)."""
    one, none = -0.5 * (OBSERVED - 2) ** 2, -0.5 * OBSERVED**2
    return jax.nn.sigmoid(one - none + jnp.log(share) - jnp.log1p(-share))


def a_discrete_site_is_an_integer() -> None:
    posterior = diffmh.from_pymc(labels(), theta={"share": 0.4})
    assert posterior.num_values == {"z": 2, "c": 3}
    table = diffmh.sensitivity(
        posterior,
        lambda theta, sites: 1.0 * sites["z"],
        jax.random.key(0),
        num_samples=2_000,
        burn_in=100,
        num_chains=32,
    )
    rows = {row.quantity: row for row in table.rows if row.hyperparameter == "share"}
    slopes = jax.jacobian(exact)(0.4)
    for i, slope in enumerate(slopes):
        row = rows[f"f[{i}]"]
        assert abs(row.derivative - slope) < 4 * (row.high - row.low) / 3.92, (row, slope)


def draws_by_the_models_names() -> None:
    """As dictionaries and as ArviZ' groups, constrained or not; the prior by site adds up."""
    import arviz

    with pm.Model() as model:
        mean = pm.Normal("mean", 0.0, pm.Data("scale", 1.0))
        sigma = pm.HalfNormal("sigma", 1.0)
        pm.Normal("y", mean, sigma, observed=OBSERVED)
    posterior = diffmh.from_pymc(model, theta={"scale": 1.0})
    x = posterior.init(jax.random.key(0))
    terms = posterior.log_prior_by_site(posterior.theta, x)
    assert set(terms) == {"mean", "sigma"}
    np.testing.assert_allclose(sum(terms.values()), posterior.log_prior(posterior.theta, x))
    rng = np.random.default_rng(0)
    sites = {"mean": rng.normal(size=(4, 200)), "sigma": np.exp(rng.normal(size=(4, 200)))}
    states = {"mean": sites["mean"], "sigma_log__": np.log(sites["sigma"])}
    f = lambda theta, sites: {"mean": sites["mean"]}
    table = diffmh.sensitivity(posterior, f, draws=sites, prior="mean")
    with_states = arviz.from_dict(posterior=sites)
    with_states.add_groups({"unconstrained_posterior": states})
    for draws in (arviz.from_dict(posterior=sites), with_states):
        for row in diffmh.sensitivity(posterior, f, draws=draws, prior="mean"):
            wanted = table[row.quantity, row.hyperparameter]
            np.testing.assert_allclose(row.derivative, wanted.derivative, rtol=1e-9)
    # These are not draws of the posterior: with weights, there are no control variates.
    plain = diffmh.sensitivity(posterior, f, draws=sites, prior="mean", weights=np.ones((4, 200)))
    of_prior = plain["mean", "power of the prior"].derivative
    centred = sites["mean"] - sites["mean"].mean()
    np.testing.assert_allclose(of_prior, np.mean(centred * -0.5 * sites["mean"] ** 2), atol=1e-2)


def refusals() -> None:
    with pm.Model() as model:
        scales = pm.Data("scales", np.array([1, 2]))
        pm.Normal("x", 0.0, scales, shape=2)
    for wrong, theta, words in (
        (model, {"scales": np.ones(2)}, "integer data"),
        (model, {"other": 1.0}, "not data of the model"),
        (3, {"other": 1.0}, "pymc.Model"),
    ):
        try:
            diffmh.from_pymc(wrong, theta=theta)
        except (TypeError, ValueError) as error:
            assert words in str(error), error
        else:
            raise AssertionError(f"not refused: {words}")


def counted() -> pm.Model:
    """A count whose values are unbounded, a year, and a trial of as many as the count."""
    with pm.Model() as model:
        n = pm.Poisson("n", pm.Data("rate", 3.0))
        year = pm.DiscreteUniform("year", 1851, 1860)
        pm.Normal("y", n + (year - 1855.0), 2.0, observed=6.0)
    return model


def exact_counts(rate):
    """E[n] and E[year], enumerated."""
    n, year = jnp.arange(40)[:, None], jnp.arange(1851, 1861)
    log_weight = n * jnp.log(rate) - jax.scipy.special.gammaln(n + 1.0)
    log_weight = log_weight - (6.0 - n - (year - 1855.0)) ** 2 / 8
    weight = jax.nn.softmax(log_weight.ravel()).reshape(40, 10)
    return jnp.stack([jnp.sum(weight * n), jnp.sum(weight * year)])


def unknown_values() -> None:
    """The error says what to write, and it works when written: in `sample` and in `kernel`."""
    posterior = diffmh.from_pymc(counted(), theta={"rate": 3.0})
    assert posterior.num_values == {} and posterior.ranges == {"year": range(1851, 1861)}
    written = {"n": diffmh.OtherState(40)}
    for call in (lambda: posterior.sample(jax.random.key(0)), posterior.kernel):
        try:
            call()
        except ValueError as error:
            assert "proposals={'n': diffmh.OtherState(n)}" in str(error), error
        else:
            raise AssertionError("not refused")
    draws = posterior.sample(jax.random.key(0), num_samples=2_000, proposals=written)
    for name, exact in zip(("n", "year"), exact_counts(3.0), strict=True):
        found = np.asarray(draws.posterior[name], float)
        error = found.mean(axis=1).std(ddof=1) / 2
        assert abs(found.mean() - exact) < 6 * max(error, 0.02), (name, found.mean(), exact)
    matrix = diffmh.On(lambda year: year, diffmh.OtherState(1861))
    kernel = posterior.kernel(proposals={**written, "year": matrix})
    mean = posterior.expectation(
        lambda theta, sites: 1.0 * sites["n"], kernel, num_samples=4_000, num_chains=64
    )
    value = mean.per_chain(posterior.theta, jax.random.key(1))
    exact, error = exact_counts(3.0)[0], np.std(value) / 8
    assert abs(np.mean(value) - exact) < 5 * error, (np.mean(value), exact, error)


def a_continuous_model() -> None:
    """NUTS on PyMC's density, in double precision: N(Σy s² / (1 + n s²), 1 / (n + 1/s²))."""
    with pm.Model() as model:
        mean = pm.Normal("mean", 0.0, pm.Data("scale", 2.0))
        pm.Deterministic("twice", 2 * mean)
        pm.Normal("y", mean, 1.0, observed=OBSERVED)
    posterior = diffmh.from_pymc(model, theta={"scale": 2.0})
    draws = posterior.sample(jax.random.key(0))
    found = np.asarray(draws.posterior["mean"])
    assert found.dtype == np.float64 and set(draws.posterior) == {"mean", "twice"}
    variance = 1 / (4 + 1 / 4)
    error = np.sqrt(variance / 800)
    assert abs(found.mean() - variance * OBSERVED.sum()) < 5 * error
    assert abs(found.var() - variance) < 0.2 * variance


def softplus_is_continuous() -> None:
    """PyTensor lowers it to four pieces that agree to rounding."""
    with pm.Model() as model:
        slope = pm.Normal("slope", 0.0, pm.Data("scale", 2.0))
        pm.Bernoulli("y", logit_p=slope * OBSERVED, observed=OBSERVED > 0)
    posterior = diffmh.from_pymc(model, theta={"scale": 2.0})
    start = posterior.init(jax.random.key(0))
    assert moving_jumps(posterior.log_density, posterior.theta, start, x_moves=True) == []


def influence_of_an_observation() -> None:
    """`Cov(μ, ℓ_n) = v (y_n − m)` for a normal mean whose posterior is N(m, v)."""
    with pm.Model() as model:
        mean = pm.Normal("mean", 0.0, pm.Data("scale", 2.0))
        pm.Normal("y", mean, 1.0, observed=OBSERVED)
    posterior = diffmh.from_pymc(model, theta={"scale": 2.0})
    variance = 1 / (4 + 1 / 4)
    noise = np.random.default_rng(0).normal(size=(4, 2_000))
    draws = {"mean": variance * OBSERVED.sum() + variance**0.5 * noise}
    table = diffmh.influence(posterior, lambda theta, sites: sites["mean"], draws)
    (row,) = table["y[3]"]
    exact = variance * (OBSERVED[3] - variance * OBSERVED.sum())
    assert abs(row.influence - exact) < 5 * row.error, (row, exact)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    a_continuous_model()
    unknown_values()
    a_discrete_site_is_an_integer()
    draws_by_the_models_names()
    influence_of_an_observation()
    softplus_is_continuous()
    refusals()
