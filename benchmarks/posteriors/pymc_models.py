"""Four of the models of `models.py` in PyMC, with the same data and hyperparameters."""

from __future__ import annotations

import pymc as pm
import pytensor.tensor as pt
from models import CASES, YEARS


def _hyperparameters(name: str) -> dict:
    return {key: pm.Data(key, value) for key, value in CASES[name].theta.items()}


def non_centred() -> pm.Model:
    y, errors = CASES["non-centred"].data
    with pm.Model() as model:
        theta = _hyperparameters("non-centred")
        mu = pm.Normal("mu", 0.0, theta["mu_scale"])
        tau = pm.HalfNormal("tau", theta["tau_scale"])
        eta = pm.Normal("eta", 0.0, 1.0, shape=10)
        level = pm.Deterministic("level", mu + tau * eta)
        pm.Normal("y", level, errors, observed=y)
    return model


def logistic() -> pm.Model:
    features, target = CASES["logistic"].data
    with pm.Model() as model:
        theta = _hyperparameters("logistic")
        intercept = pm.Normal("intercept", 0.0, theta["intercept_scale"])
        beta = pm.Normal("beta", 0.0, theta["coefficient_scale"], shape=3)
        pm.Bernoulli("y", logit_p=intercept + features @ beta, observed=target)
    return model


def negative_binomial() -> pm.Model:
    x, counts = CASES["negative binomial"].data
    with pm.Model() as model:
        theta = _hyperparameters("negative binomial")
        a = pm.Normal("a", 0.0, theta["intercept_scale"])
        b = pm.Normal("b", 0.0, theta["slope_scale"])
        shape = pm.Gamma("shape", 2.0, theta["shape_rate"])
        pm.NegativeBinomial("y", mu=pt.exp(a + b * x), alpha=shape, observed=counts)
    return model


def change_point() -> pm.Model:
    (counts,) = CASES["change point"].data
    with pm.Model() as model:
        theta = _hyperparameters("change point")
        early = pm.Exponential("early", theta["early_rate"])
        late = pm.Exponential("late", theta["late_rate"])
        switch = pm.DiscreteUniform("switch", 0, YEARS - 1)
        rate = pt.switch(pt.arange(YEARS) < switch, early, late)
        pm.Poisson("y", rate, observed=counts)
    return model


MODELS = {
    "non-centred": non_centred,
    "logistic": logistic,
    "negative binomial": negative_binomial,
    "change point": change_point,
}
