"""Fifteen posteriors as people have them, one of each common kind, on scikit-learn's bundled data
or on simulated data: what `diffmh.sensitivity` must get right in one line.

`CASES` has for each the model, its data, its hyperparameters and the quantities of interest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from sklearn.datasets import load_breast_cancer, load_diabetes


@dataclasses.dataclass(frozen=True)
class Case:
    """A model with its data, hyperparameters and quantities, `f(theta, sites)`."""

    name: str
    model: Callable[..., None]
    data: tuple[Any, ...]
    theta: dict[str, float]
    f: Callable[[dict, dict], dict]


def picked(*names: str) -> Callable[[dict, dict], dict]:
    """The quantities that are sites of the model."""
    return lambda theta, sites: {name: sites[name] for name in names}


def standardised(columns: np.ndarray) -> np.ndarray:
    return (columns - columns.mean(axis=0)) / columns.std(axis=0)


# Groups of unequal precision, as in a meta-analysis: simulated.
_RANDOM = np.random.default_rng(20)
GROUP_ERRORS = np.array([1.0, 1.5, 0.8, 1.2, 2.0, 0.9, 1.1, 1.6, 0.7, 1.3])
GROUP_MEANS = 2.0 + 1.5 * _RANDOM.normal(size=10) + GROUP_ERRORS * _RANDOM.normal(size=10)


def centred(y, errors, mu_scale, tau_scale):
    mu = numpyro.sample("mu", dist.Normal(0.0, mu_scale))
    tau = numpyro.sample("tau", dist.HalfNormal(tau_scale))
    level = numpyro.sample("level", dist.Normal(mu, tau).expand([10]).to_event(1))
    numpyro.sample("y", dist.Normal(level, errors), obs=y)


def non_centred(y, errors, mu_scale, tau_scale):
    mu = numpyro.sample("mu", dist.Normal(0.0, mu_scale))
    tau = numpyro.sample("tau", dist.HalfNormal(tau_scale))
    eta = numpyro.sample("eta", dist.Normal(0.0, 1.0).expand([10]).to_event(1))
    level = numpyro.deterministic("level", mu + tau * eta)
    numpyro.sample("y", dist.Normal(level, errors), obs=y)


def schools_f(theta, sites):
    return {"mu": sites["mu"], "tau": sites["tau"], "first": sites["level"][0]}


def _diabetes():
    data = load_diabetes()
    return standardised(data.data[:150, [2, 3, 8]]), standardised(data.target[:150])


def regression(features, target, coefficient_scale, noise_scale):
    intercept = numpyro.sample("intercept", dist.Normal(0.0, coefficient_scale))
    beta = numpyro.sample("beta", dist.Normal(0.0, coefficient_scale).expand([3]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(noise_scale))
    numpyro.sample("y", dist.Normal(intercept + features @ beta, sigma), obs=target)


COUNTIES = 42


def _radon():
    """Houses in counties: an intercept and a slope for the floor in each, simulated."""
    random = np.random.default_rng(21)
    county = np.concatenate([np.arange(COUNTIES), random.integers(0, COUNTIES, 178)])
    floor = (random.uniform(size=county.size) < 0.35).astype(float)
    intercepts = 1.4 + 0.4 * random.normal(size=COUNTIES)
    slopes = -0.7 + 0.3 * random.normal(size=COUNTIES)
    level = intercepts[county] + slopes[county] * floor + 0.7 * random.normal(size=county.size)
    return county, floor, level


def radon(county, floor, level, mean_scale, spread_scale):
    """88 dimensions."""
    mean = numpyro.sample("mean", dist.Normal(0.0, mean_scale).expand([2]).to_event(1))
    spread = numpyro.sample("spread", dist.HalfNormal(spread_scale).expand([2]).to_event(1))
    eta = numpyro.sample("eta", dist.Normal(0.0, 1.0).expand([COUNTIES, 2]).to_event(2))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    effects = mean + spread * eta
    predicted = effects[county, 0] + effects[county, 1] * floor
    numpyro.sample("y", dist.Normal(predicted, sigma), obs=level)


def radon_f(theta, sites):
    return {"mean": sites["mean"], "spread": sites["spread"], "sigma": sites["sigma"]}


def _cancer():
    data = load_breast_cancer()
    return standardised(data.data[:120, [1, 4, 8]]), data.target[:120]


def logistic(features, target, intercept_scale, coefficient_scale):
    intercept = numpyro.sample("intercept", dist.Normal(0.0, intercept_scale))
    beta = numpyro.sample("beta", dist.Normal(0.0, coefficient_scale).expand([3]).to_event(1))
    numpyro.sample("y", dist.Bernoulli(logits=intercept + features @ beta), obs=target)


def _counts():
    random = np.random.default_rng(22)
    x = random.normal(size=60)
    mean = np.exp(1.0 + 0.4 * x)
    return x, random.poisson(mean), random.poisson(mean * random.gamma(3.0, 1 / 3, size=60))


def poisson(x, counts, intercept_scale, slope_scale):
    a = numpyro.sample("a", dist.Normal(0.0, intercept_scale))
    b = numpyro.sample("b", dist.Normal(0.0, slope_scale))
    numpyro.sample("y", dist.Poisson(jnp.exp(a + b * x)), obs=counts)


def negative_binomial(x, counts, intercept_scale, slope_scale, shape_rate):
    a = numpyro.sample("a", dist.Normal(0.0, intercept_scale))
    b = numpyro.sample("b", dist.Normal(0.0, slope_scale))
    shape = numpyro.sample("shape", dist.Gamma(2.0, shape_rate))
    numpyro.sample("y", dist.NegativeBinomial2(jnp.exp(a + b * x), shape), obs=counts)


def _curve():
    random = np.random.default_rng(23)
    x = np.sort(random.uniform(0.0, 5.0, 25))
    return x, np.sin(1.5 * x) + 0.3 * random.normal(size=25)


def gaussian_process(x, y, amplitude_scale, length_shape, noise_scale):
    """Its length scale, amplitude and noise, the function integrated out."""
    amplitude = numpyro.sample("amplitude", dist.HalfNormal(amplitude_scale))
    length = numpyro.sample("length", dist.InverseGamma(length_shape, 3.0))
    noise = numpyro.sample("noise", dist.HalfNormal(noise_scale))
    gaps = (x[:, None] - x[None, :]) / length
    covariance = amplitude**2 * jnp.exp(-0.5 * gaps**2) + (noise**2 + 1e-4) * jnp.eye(x.size)
    numpyro.sample("y", dist.MultivariateNormal(jnp.zeros(x.size), covariance), obs=y)


def _outliers():
    random = np.random.default_rng(24)
    x = random.normal(size=(60, 2))
    return x, 0.5 + x @ np.array([1.0, -0.5]) + 0.5 * random.standard_t(3.0, size=60)


def student(x, y, coefficient_scale, noise_scale, freedom_rate):
    """Robust regression: Student's t with unknown degrees of freedom."""
    intercept = numpyro.sample("intercept", dist.Normal(0.0, coefficient_scale))
    beta = numpyro.sample("beta", dist.Normal(0.0, coefficient_scale).expand([2]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(noise_scale))
    freedom = numpyro.sample("freedom", dist.Gamma(2.0, freedom_rate))
    numpyro.sample("y", dist.StudentT(freedom, intercept + x @ beta, sigma), obs=y)


def _series():
    random = np.random.default_rng(25)
    y = np.zeros(120)
    for t in range(2, 120):
        y[t] = 0.5 * y[t - 1] + 0.2 * y[t - 2] + random.normal()
    return (y[2:],)


def autoregression(y, coefficient_scale, noise_scale):
    """AR(2)."""
    phi = numpyro.sample("phi", dist.Normal(0.0, coefficient_scale).expand([2]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(noise_scale))
    predicted = phi[0] * y[1:-1] + phi[1] * y[:-2]
    numpyro.sample("y", dist.Normal(predicted, sigma), obs=y[2:])


PERIODS = 60


def _returns():
    random = np.random.default_rng(26)
    log_volatility = np.zeros(PERIODS)
    for t in range(1, PERIODS):
        log_volatility[t] = 0.9 * log_volatility[t - 1] + 0.4 * random.normal()
    return (np.exp(0.5 * log_volatility) * random.normal(size=PERIODS),)


def stochastic_volatility(returns, step_scale, level_scale):
    """A random walk of log volatilities, not centred: 62 dimensions."""
    level = numpyro.sample("level", dist.Normal(0.0, level_scale))
    step = numpyro.sample("step", dist.HalfNormal(step_scale))
    noise = numpyro.sample("noise", dist.Normal(0.0, 1.0).expand([PERIODS]).to_event(1))
    path = numpyro.deterministic("path", level + step * jnp.cumsum(noise))
    numpyro.sample("y", dist.Normal(0.0, jnp.exp(0.5 * path)), obs=returns)


def volatility_f(theta, sites):
    return {"level": sites["level"], "step": sites["step"], "last": sites["path"][-1]}


def _answers():
    random = np.random.default_rng(27)
    x = random.normal(size=100)
    latent = 1.2 * x + random.logistic(size=100)
    return x, np.digitize(latent, [-1.0, 0.5, 2.0])


def ordinal(x, answers, slope_scale, cut_scale):
    """Four ordered answers: the first cut point, and gaps that are positive."""
    slope = numpyro.sample("slope", dist.Normal(0.0, slope_scale))
    first = numpyro.sample("first", dist.Normal(0.0, cut_scale))
    gaps = numpyro.sample("gaps", dist.Gamma(2.0, 1.0).expand([2]).to_event(1))
    cuts = first + jnp.concatenate([jnp.zeros(1), jnp.cumsum(gaps)])
    numpyro.sample("y", dist.OrderedLogistic(slope * x, cuts), obs=answers)


PERSONS, ITEMS = 110, 16


def _tests():
    random = np.random.default_rng(28)
    ability = random.normal(size=PERSONS)
    difficulty, discrimination = random.normal(size=ITEMS), random.uniform(0.6, 1.8, ITEMS)
    logits = discrimination * (ability[:, None] - difficulty)
    return ((random.uniform(size=logits.shape) < 1 / (1 + np.exp(-logits))).astype(int),)


def item_response(answers, difficulty_scale, discrimination_scale):
    """Two parameters an item: 144 dimensions."""
    ability = numpyro.sample("ability", dist.Normal(0.0, 1.0).expand([PERSONS]).to_event(1))
    centre = numpyro.sample("centre", dist.Normal(0.0, 1.0))
    spread = numpyro.sample("spread", dist.HalfNormal(difficulty_scale))
    raw = numpyro.sample("raw", dist.Normal(0.0, 1.0).expand([ITEMS]).to_event(1))
    discrimination = numpyro.sample(
        "discrimination", dist.LogNormal(0.0, discrimination_scale).expand([ITEMS]).to_event(1)
    )
    difficulty = numpyro.deterministic("difficulty", centre + spread * raw)
    logits = discrimination * (ability[:, None] - difficulty)
    numpyro.sample("y", dist.Bernoulli(logits=logits).to_event(2), obs=answers)


def item_f(theta, sites):
    return {
        "spread": sites["spread"],
        "difficulty": sites["difficulty"][0],
        "discrimination": jnp.mean(sites["discrimination"]),
        "ability": sites["ability"][0],
    }


def _clusters():
    random = np.random.default_rng(29)
    label = random.uniform(size=40) < 0.4
    return (np.where(label, 1.5, -1.0) + random.normal(size=40),)


def mixture(y, low_scale, gap_rate, share_shape):
    """A label for each datum; the gap between the two means is positive."""
    share = numpyro.sample("share", dist.Beta(share_shape, share_shape))
    low = numpyro.sample("low", dist.Normal(0.0, low_scale))
    gap = numpyro.sample("gap", dist.Gamma(3.0, gap_rate))
    label = numpyro.sample("label", dist.Bernoulli(share).expand([y.size]).to_event(1))
    numpyro.sample("y", dist.Normal(low + gap * label, 1.0).to_event(1), obs=y)


def mixture_f(theta, sites):
    return {
        "share": sites["share"],
        "low": sites["low"],
        "gap": sites["gap"],
        "labels": jnp.mean(1.0 * sites["label"]),
    }


YEARS = 40


def _accidents():
    random = np.random.default_rng(30)
    return (random.poisson(np.where(np.arange(YEARS) < 17, 3.5, 1.8)),)


def change_point(counts, early_rate, late_rate):
    """Accidents a year, and the year in which their rate changes."""
    early = numpyro.sample("early", dist.Exponential(early_rate))
    late = numpyro.sample("late", dist.Exponential(late_rate))
    switch = numpyro.sample("switch", dist.DiscreteUniform(0, YEARS - 1))
    rate = jnp.where(jnp.arange(YEARS) < switch, early, late)
    numpyro.sample("y", dist.Poisson(rate), obs=counts)


def change_f(theta, sites):
    return {"early": sites["early"], "late": sites["late"], "switch": 1.0 * sites["switch"]}


SCALES = {"mu_scale": 5.0, "tau_scale": 2.0}
X, POISSON, OVERDISPERSED = _counts()

CASES = {
    case.name: case
    for case in (
        Case("centred", centred, (GROUP_MEANS, GROUP_ERRORS), SCALES, schools_f),
        Case("non-centred", non_centred, (GROUP_MEANS, GROUP_ERRORS), SCALES, schools_f),
        Case(
            "regression",
            regression,
            _diabetes(),
            {"coefficient_scale": 0.3, "noise_scale": 1.0},
            picked("intercept", "beta", "sigma"),
        ),
        Case("radon", radon, _radon(), {"mean_scale": 1.0, "spread_scale": 0.5}, radon_f),
        Case(
            "logistic",
            logistic,
            _cancer(),
            {"intercept_scale": 2.0, "coefficient_scale": 1.0},
            picked("intercept", "beta"),
        ),
        Case(
            "poisson",
            poisson,
            (X, POISSON),
            {"intercept_scale": 1.0, "slope_scale": 0.5},
            picked("a", "b"),
        ),
        Case(
            "negative binomial",
            negative_binomial,
            (X, OVERDISPERSED),
            {"intercept_scale": 1.0, "slope_scale": 0.5, "shape_rate": 0.5},
            picked("a", "b", "shape"),
        ),
        Case(
            "Gaussian process",
            gaussian_process,
            _curve(),
            {"amplitude_scale": 1.0, "length_shape": 3.0, "noise_scale": 0.5},
            picked("amplitude", "length", "noise"),
        ),
        Case(
            "Student-t",
            student,
            _outliers(),
            {"coefficient_scale": 1.0, "noise_scale": 1.0, "freedom_rate": 0.2},
            picked("intercept", "beta", "sigma", "freedom"),
        ),
        Case(
            "autoregression",
            autoregression,
            _series(),
            {"coefficient_scale": 0.5, "noise_scale": 2.0},
            picked("phi", "sigma"),
        ),
        Case(
            "stochastic volatility",
            stochastic_volatility,
            _returns(),
            {"step_scale": 0.3, "level_scale": 1.0},
            volatility_f,
        ),
        Case(
            "ordinal",
            ordinal,
            _answers(),
            {"slope_scale": 1.0, "cut_scale": 2.0},
            picked("slope", "first", "gaps"),
        ),
        Case(
            "item response",
            item_response,
            _tests(),
            {"difficulty_scale": 1.0, "discrimination_scale": 0.5},
            item_f,
        ),
        Case(
            "mixture",
            mixture,
            _clusters(),
            {"low_scale": 2.0, "gap_rate": 1.0, "share_shape": 2.0},
            mixture_f,
        ),
        Case(
            "change point",
            change_point,
            _accidents(),
            {"early_rate": 0.5, "late_rate": 0.5},
            change_f,
        ),
    )
}


def arrays(case: Case) -> tuple[Any, ...]:
    """A case's data as JAX arrays, in the precision in use."""
    return jax.tree.map(jnp.asarray, case.data)
