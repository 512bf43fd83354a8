"""Eight schools by PyMC: prints `((quantity, hyperparameter), (derivative, error))` a line.

A program of its own: PyTensor switches JAX to double precision for the whole process.
"""

import sys
import warnings
from pathlib import Path

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))
from eight_schools import EFFECTS, ERRORS

import diffmh


def schools():
    import pymc as pm

    with pm.Model() as model:
        mu = pm.Normal("mu", 0.0, pm.Data("mu_scale", 5.0))
        tau = pm.HalfCauchy("tau", pm.Data("tau_scale", 5.0))
        eta = pm.Normal("eta", 0.0, 1.0, shape=8)
        pm.Normal("effects", mu + tau * eta, np.asarray(ERRORS), observed=np.asarray(EFFECTS))
    return model


def main() -> None:
    posterior = diffmh.from_pymc(schools(), theta={"mu_scale": 5.0, "tau_scale": 5.0})
    # Forward and back through PyMC's transforms.
    start = jax.tree.map(lambda leaf: leaf + 0.3, posterior.init(jax.random.key(0)))
    back = posterior.unconstrain(posterior.theta, posterior.constrain(posterior.theta, start))
    assert all(np.allclose(start[name], back[name]) for name in start)
    table = diffmh.sensitivity(
        posterior,
        lambda theta, sites: {name: sites[name] for name in ("mu", "tau")},
        jax.random.key(1),
        kernel=lambda density: diffmh.MetropolisHastings(density, diffmh.GaussianWalk(0.5)),
        num_samples=20_000,
        burn_in=2_000,
        num_chains=32,
    )
    for row in table.rows:
        print(((row.quantity, row.hyperparameter), (row.derivative, (row.high - row.low) / 3.92)))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
