"""Models of PyMC other than the schools, in a process of their own: PyTensor switches JAX to double
precision. Ends with an error where something is wrong.
"""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pymc as pm

import diffmh

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
        row = rows[f"[{i}]"]
        assert abs(row.derivative - slope) < 4 * (row.high - row.low) / 3.92, (row, slope)


def refusals() -> None:
    with pm.Model() as model:
        scales = pm.Data("scales", np.array([1, 2]))
        pm.Normal("x", 0.0, scales, shape=2)
    for wrong, theta, words in (
        (model, {"scales": np.ones(2)}, "whole numbers"),
        (model, {"other": 1.0}, "not data of the model"),
        (3, {"other": 1.0}, "pymc.Model"),
    ):
        try:
            diffmh.from_pymc(wrong, theta=theta)
        except (TypeError, ValueError) as error:
            assert words in str(error), error
        else:
            raise AssertionError(f"not refused: {words}")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    a_discrete_site_is_an_integer()
    refusals()
