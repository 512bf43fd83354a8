"""Fig. 3: energy and heat capacity of the Ising model as functions of temperature."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key
from matplotlib.figure import Figure

from .._compose import compose
from ..estimators import StochasticDerivative
from ..models import ising as model
from ..plots import style
from .experiment import (
    Claim,
    Data,
    Estimate,
    Experiment,
    Result,
    Size,
    against_exact,
    estimate,
    within,
    worst,
)
from .lattice import SIZE, climb, moments
from .progress import Status

TEN_TEMPERATURES = (1.0, 1.6, 2.0, 2.2, 2.35, 2.6, 3.0, 4.0, 6.0, 9.0)
SLOPES_AT = (2.6, 3.0, 4.0, 6.0)
NUM_ITERATIONS, TOLERANCE = 60, 0.15


class Ising(Data):
    """E and C, and their derivatives with respect to T, with errors, at every temperature;
    the exact `E, C, dC/dT` there and on a fine grid; the temperature of largest C, exact and found.
    """

    temperature: Float[np.ndarray, "T"]
    value: Float[np.ndarray, "T 2"]
    value_error: Float[np.ndarray, "T 2"]
    slope: Float[np.ndarray, "T 2"]
    slope_error: Float[np.ndarray, "T 2"]
    exact: Float[np.ndarray, "T 3"]
    curve_temperature: Float[np.ndarray, "n"]
    curve: Float[np.ndarray, "n 3"]
    peak: float
    optimum: float


def compute(key: Key[Array, ""], size: Size, progress: Status) -> Result[Ising]:
    num_samples, burn_in, num_chains = size.pick(
        (200, 250, 64), (1_000, 500, 96), (1_000, 500, 256)
    )

    def energy_and_capacity(t, m):
        return jnp.stack([m[0] - 2.0 * SIZE**2, model.heat_capacity(t, m)])

    four = StochasticDerivative(alternatives=4)
    both = compose(energy_and_capacity, moments(num_samples, burn_in, num_chains, estimator=four))
    at = jax.jit(lambda temperature, key: estimate(both, temperature, key))
    grid = np.linspace(0.05, 10.0, size.pick(25, 40, 50))
    temperatures = np.concatenate([grid, TEN_TEMPERATURES])
    points = list(enumerate(temperatures.astype(np.float32)))
    found = [
        jax.device_get(at(t, jax.random.fold_in(key, i)))
        for i, t in progress.over(points, lambda point: f"T = {point[1]:.2f}")
    ]
    estimated = {name: np.array([getattr(one, name) for one in found]) for name in Estimate._fields}
    path = climb(
        jax.random.fold_in(key, len(points)),
        moments(200, 200, 64, estimator=four),
        NUM_ITERATIONS,
        progress,
    )
    curve = np.linspace(0.05, 10.0, 400)
    data = Ising(
        temperature=temperatures,
        **estimated,
        exact=np.array([model.exact(SIZE, t) for t in temperatures]),
        curve_temperature=curve,
        curve=np.array([model.exact(SIZE, t) for t in curve]),
        peak=model.peak(SIZE),
        optimum=float(path.average),
    )
    runs = f"{burn_in} + {num_samples:,} checkerboard sweeps, {num_chains} chains, 4 alternatives"
    settings = f"L = {SIZE}, cold start, {runs}, {len(grid)} temperatures."
    return Result(data, settings, _rows(data, len(grid)))


def _rows(data: Ising, num_grid: int) -> list[Claim]:
    ten = slice(num_grid, None)
    # The grid is for the curve; the claims use the ten temperatures after it.
    rows = [
        worst(
            f"{name} at ten temperatures, L = {SIZE}",
            "Kaufman",
            data.exact[ten, i],
            data.value[ten, i],
            data.value_error[ten, i],
        )
        for i, name in enumerate("EC")
    ]
    for t in SLOPES_AT:
        at = num_grid + TEN_TEMPERATURES.index(t)
        for i, name in enumerate("EC"):
            slope, error = float(data.slope[at, i]), float(data.slope_error[at, i])
            exact = float(data.exact[at, i + 1])
            rows.append(against_exact(f"d{name}/dT at T = {t}", exact, slope, error))
    return [
        *rows,
        within(
            f"T of greatest C by {NUM_ITERATIONS} steps of ascent (Fig. 6 takes more)",
            "≈ 2.42",
            data.peak,
            data.optimum,
            TOLERANCE,
        ),
    ]


def plot(data: Ising, narrow: bool) -> Figure:
    figure, axes = style.panels(3.3, 3.3, 3.3, height=3.1 if not narrow else 2.8, narrow=narrow)
    order = np.argsort(data.temperature)
    t, exact = data.temperature[order], data.curve
    columns = (
        (data.value[order, 0], data.value_error[order, 0], "a) mean energy E"),
        (data.value[order, 1], data.value_error[order, 1], "b) heat capacity C"),
        (data.slope[order, 1], data.slope_error[order, 1], "c) dC/dT"),
    )
    look = {"fmt": ".", "color": style.INK, "ms": 4.5, "elinewidth": 1, "zorder": 3}
    for i, (ax, (value, error, title)) in enumerate(zip(axes, columns, strict=True)):
        ax.axvline(data.peak, color=style.BLUE, lw=1, ls=":", zorder=0)
        ax.axvline(data.optimum, color=style.RED, lw=1.3, zorder=1)
        curve = exact[:, i]
        label = "exact (Kaufman)"
        ax.plot(data.curve_temperature, curve, color=style.BLUE, lw=1.2, label=label, zorder=2)
        ax.errorbar(t, value, error, **look, label="from the chains ± error")
        style.name(ax, title, "temperature T")
    axes[2].set_ylim(1.35 * exact[:, 2].min(), 1.35 * exact[:, 2].max())
    lines = (
        axes[1].plot([], [], color=style.RED, lw=1.3)[0],
        axes[1].plot([], [], color=style.BLUE, lw=1, ls=":")[0],
    )
    words = (f"optimum found {data.optimum:.3f}", f"exact peak {data.peak:.3f}")
    style.key(axes[0], loc="lower right")
    style.key(axes[1], handles=lines, labels=words, loc="upper right")
    return figure


EXPERIMENT = Experiment(
    name="ising",
    figure=3,
    title="Energy and heat capacity of the Ising model",
    shows=(
        "Mean energy and heat capacity of the 12×12 lattice, and the derivative of the heat"
        " capacity with respect to temperature, all from the chains. The curve is Kaufman's exact"
        " solution of the finite lattice. The red line is the temperature of largest heat capacity"
        " that gradient ascent found; the dotted line is the exact peak."
    ),
    data=Ising,
    compute=compute,
    plot=plot,
)
