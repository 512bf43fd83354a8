"""Fig. 3: energy and heat capacity of the Ising model over temperature."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ..compose import compose
from ..estimators import StochasticDerivative
from ..expectation import expectation
from ..models import ising as model
from ..plots import ising as draw
from .experiment import Experiment, Outcome, against_exact, estimate, worst

SIZE = 12
TEN_TEMPERATURES = (1.0, 1.6, 2.0, 2.2, 2.35, 2.6, 3.0, 4.0, 6.0, 9.0)
SLOPES_AT = (2.6, 3.0, 4.0, 6.0)


def moments(
    num_samples: int,
    burn_in: int,
    num_chains: int,
    *,
    flip: bool = False,
    estimator: StochasticDerivative | None = None,
):
    """Those of the excitation energy, from a cold start."""
    runs = {"num_samples": num_samples, "burn_in": burn_in, "num_chains": num_chains}
    return expectation(
        model.excitation_moments,
        model.sampler(flip),
        init=model.cold(SIZE),
        estimator=estimator,
        **runs,
    )


def compute(key, fast: bool) -> Outcome:
    num_samples, burn_in, num_chains = (200, 250, 64) if fast else (1_000, 500, 256)
    energy_and_capacity = lambda t, m: jnp.stack([m[0] - 2.0 * SIZE**2, model.heat_capacity(t, m)])
    estimator = StochasticDerivative(alternatives=4)
    both = compose(
        energy_and_capacity, moments(num_samples, burn_in, num_chains, estimator=estimator)
    )
    at = jax.jit(lambda temperature, key: estimate(both, temperature, key))
    grid = np.linspace(0.05, 10.0, 25 if fast else 50)
    temperatures = np.concatenate([grid, TEN_TEMPERATURES])
    found = [
        at(t, jax.random.fold_in(key, i)) for i, t in enumerate(temperatures.astype(np.float32))
    ]
    value, value_error, slope, slope_error = (
        np.array(column) for column in zip(*found, strict=True)
    )
    curve = np.linspace(0.05, 10.0, 400)
    exact = np.array([model.exact(SIZE, t) for t in temperatures])
    data = {
        "temperature": temperatures,
        "on_grid": np.arange(len(temperatures)) < len(grid),
        "value": value,
        "value_error": value_error,
        "slope": slope,
        "slope_error": slope_error,
        "exact": exact,
        "curve_temperature": curve,
        "curve": np.array([model.exact(SIZE, t) for t in curve]),
        "peak": np.array(model.peak(SIZE)),
    }
    ten = slice(len(grid), None)
    rows = [
        worst(
            f"E at ten temperatures, L = {SIZE}",
            "Kaufman",
            exact[ten, 0],
            value[ten, 0],
            value_error[ten, 0],
        ),
        worst(
            f"C at ten temperatures, L = {SIZE}",
            "Kaufman",
            exact[ten, 1],
            value[ten, 1],
            value_error[ten, 1],
        ),
    ]
    for t in SLOPES_AT:
        i = len(grid) + TEN_TEMPERATURES.index(t)
        rows.append(against_exact(f"dE/dT at T = {t}", exact[i, 1], slope[i, 0], slope_error[i, 0]))
        rows.append(against_exact(f"dC/dT at T = {t}", exact[i, 2], slope[i, 1], slope_error[i, 1]))
    runs = f"{burn_in} + {num_samples:,} checkerboard sweeps, {num_chains} chains, 4 alternatives"
    settings = f"L = {SIZE}, cold start, {runs}, {len(grid)} temperatures."
    return Outcome(data, settings, rows)


EXPERIMENT = Experiment(
    name="ising",
    figure=3,
    title="Energy and heat capacity of the Ising model",
    shows=(
        "Mean energy and heat capacity of the 12×12 lattice, and the derivative of the heat"
        " capacity in temperature,"
        " all from the chains; the line is Kaufman's exact solution of the finite lattice."
    ),
    compute=compute,
    draw=draw.figure,
)
