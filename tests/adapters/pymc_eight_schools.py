"""Eight schools by PyMC: prints `((quantity, hyperparameter), (derivative, error))` a line."""

import warnings

import jax
import numpy as np
from eight_schools import EFFECTS, ERRORS

warnings.simplefilter("ignore")
import pymc as pm  # noqa: E402

import diffmh  # noqa: E402

with pm.Model() as model:
    mu = pm.Normal("mu", 0.0, pm.Data("mu_scale", 5.0))
    tau = pm.HalfCauchy("tau", pm.Data("tau_scale", 5.0))
    eta = pm.Normal("eta", 0.0, 1.0, shape=8)
    pm.Normal("effects", mu + tau * eta, np.asarray(ERRORS), observed=np.asarray(EFFECTS))

posterior = diffmh.from_pymc(model, theta={"mu_scale": 5.0, "tau_scale": 5.0})
table = diffmh.sensitivity(
    posterior,
    lambda theta, sites: {name: sites[name] for name in ("mu", "tau")},
    jax.random.key(1),
    kernel=lambda density: diffmh.MetropolisHastings(density, diffmh.GaussianWalk(0.5)),
    num_samples=20_000,
    burn_in=2_000,
    num_chains=32,
)
# Forward and back through PyMC's transforms.
start = jax.tree.map(lambda leaf: leaf + 0.3, posterior.init(jax.random.key(0)))
back = posterior.unconstrain(posterior.theta, posterior.constrain(posterior.theta, start))
assert all(np.allclose(start[name], back[name]) for name in start)
for row in table.rows:
    print(((row.quantity, row.hyperparameter), (row.derivative, (row.high - row.low) / 3.92)))
