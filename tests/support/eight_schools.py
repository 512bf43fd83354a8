"""Eight schools (Rubin 1981), not centred: the posterior of `mu`, `log_tau` and `eta`, with the
scales of the prior as parameters; for our own chains and for NumPyro's NUTS.
"""

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax.scipy.stats import norm

EFFECTS = jnp.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
ERRORS = jnp.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])
THETA = {"mu": jnp.float32(5.0), "tau": jnp.float32(5.0)}
START = {"mu": 4.0, "log_tau": 1.0, "eta": jnp.zeros(8)}


def log_density(theta, x):
    tau = jnp.exp(x["log_tau"])
    likelihood = norm.logpdf(EFFECTS, x["mu"] + tau * x["eta"], ERRORS)
    return log_prior(theta, {**x, "tau": tau}) + jnp.sum(likelihood + norm.logpdf(x["eta"]))


def log_prior(theta, x):
    """Of `mu` normal, of `tau` half-Cauchy, the latter by `log_tau`: up to what is free of θ."""
    half_cauchy = -jnp.log(theta["tau"]) - jnp.log1p((x["tau"] / theta["tau"]) ** 2)
    return norm.logpdf(x["mu"], 0.0, theta["mu"]) + half_cauchy + jnp.log(x["tau"])


def model():
    mu = numpyro.sample("mu", dist.Normal(0.0, THETA["mu"]))
    tau = numpyro.sample("tau", dist.HalfCauchy(THETA["tau"]))
    with numpyro.plate("schools", 8):
        eta = numpyro.sample("eta", dist.Normal(0.0, 1.0))
        numpyro.sample("effects", dist.Normal(mu + tau * eta, ERRORS), obs=EFFECTS)


def hierarchical(effects, errors, mu_scale, tau_scale):
    """The same model with its data and the scales of its priors as arguments."""
    mu = numpyro.sample("mu", dist.Normal(0.0, mu_scale))
    tau = numpyro.sample("tau", dist.HalfCauchy(tau_scale))
    with numpyro.plate("schools", 8):
        eta = numpyro.sample("eta", dist.Normal(0.0, 1.0))
        numpyro.sample("effects", dist.Normal(mu + tau * eta, errors), obs=effects)
