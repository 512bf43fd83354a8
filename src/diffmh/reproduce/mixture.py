"""Fig. 2: the observation for which the component it came from is most uncertain."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.optimize
from jaxtyping import Array, Float, Int, Key
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .._compose import compose
from .._expectation import Differentiable, expectation
from ..estimators import StochasticDerivative
from ..models import mixture as model
from ..plots import style
from ..tools.optimise import optimise
from ..tools.trace import trace
from .experiment import (
    Claim,
    Data,
    Experiment,
    Result,
    Size,
    against_exact,
    estimate,
    length,
    worst,
)
from .progress import Status

NUM_SEEDS, TOLERANCE = 10, 0.02
# Adam with rate 0.1 overshoots and oscillates until about iteration 180, then it has converged.
NUM_ITERATIONS, TAIL = 300, 100


class MixtureData(Data):
    """A chain at h = 4; the entropy and its slope over a grid of h; one ascent per seed."""

    path: Int[np.ndarray, "n"]
    h: Float[np.ndarray, "H"]
    posterior: Float[np.ndarray, "H 3"]
    entropy: Float[np.ndarray, "H"]
    slope: Float[np.ndarray, "H"]
    slope_error: Float[np.ndarray, "H"]
    exact_entropy: Float[np.ndarray, "H"]
    exact_slope: Float[np.ndarray, "H"]
    ascents: Float[np.ndarray, "seeds iterations"]
    maximiser: float


def entropy_of_posterior(num_samples: int, num_chains: int) -> Differentiable:
    """The entropy of the posterior given h, from MH alone, across chains."""
    runs = length(num_samples, 50, num_chains)
    occupancy = expectation(
        model.indicator,
        model.sampler(),
        init=0,
        estimator=StochasticDerivative(alternatives=1),
        **runs,
    )
    return compose(lambda h, p: model.entropy(p), occupancy)


def exact(h: float) -> tuple[float, float]:
    """The entropy and its slope, by enumeration, in double precision."""
    with jax.enable_x64(True):
        both = jax.value_and_grad(lambda h: model.entropy(model.posterior(h)))
        value, slope = both(jnp.asarray(h, jnp.float64))
        return float(value), float(slope)


def maximiser() -> float:
    return float(scipy.optimize.root_scalar(lambda h: exact(h)[1], bracket=(-2.0, 4.0)).root)


def climb(
    num_samples: int, key: Key[Array, ""], progress: Status
) -> Float[np.ndarray, "seeds iterations"]:
    """Adam from h = 8, one ascent for each of ten seeds, with 16 chains each. They run as one: the
    gradient of the sum of the entropies consists of their gradients, and Adam is elementwise.
    """
    entropy = entropy_of_posterior(num_samples, 16)

    def together(h, key):
        return jnp.sum(jax.vmap(entropy)(h, jax.random.split(key, NUM_SEEDS)))

    start = jnp.full(NUM_SEEDS, 8.0)
    steps = {"optimizer": optax.adam(0.1), "num_iterations": NUM_ITERATIONS, "maximise": True}
    along = progress.along(f"iteration of {NUM_SEEDS} ascents")
    return np.asarray(optimise(together, start, key, **steps, progress=along).theta).T


def reached(ascents: Float[np.ndarray, "seeds iterations"], best: float) -> list[Claim]:
    """The claims that the ascents have converged: each one to the maximum, and their mean to it
    within its error.
    """
    ends = ascents[:, -TAIL:].astype(float).mean(axis=1)
    error = float(ends.std(ddof=1)) / len(ends) ** 0.5
    budget = f"mean of the last {TAIL} of {ascents.shape[1]} iterations"
    furthest = float(np.max(np.abs(ends - best)))
    mean = f"h of greatest entropy: {budget}, over {len(ends)} seeds"
    each = (f"the same, the furthest of {len(ends)} seeds", "—", f"{best:.4f}")
    return [
        against_exact(mean, best, float(ends.mean()), error, "≈ 1"),
        Claim(*each, f"{furthest:.3f} off", f"≤ {TOLERANCE}", furthest <= TOLERANCE),
    ]


def compute(key: Key[Array, ""], size: Size, progress: Status) -> Result[MixtureData]:
    key_path, key_sweep, key_ascent = jax.random.split(key, 3)
    path = trace(model.sampler(), 4.0, key_path, init=0, num_steps=150)
    h = np.arange(-14.0, 14.25, 0.5)
    num_samples, num_chains, num_climb = size.pick(
        (2_000, 64, 1_000), (5_000, 96, 1_000), (5_000, 256, 5_000)
    )
    entropy = entropy_of_posterior(num_samples, num_chains)
    at = jax.jit(lambda h, key: estimate(entropy, h, key))
    keys = jax.random.split(key_sweep, len(h))
    points = list(zip(h.astype(np.float32), keys, strict=True))
    found = [at(*point) for point in progress.over(points, lambda point: f"h = {point[0]:.1f}")]
    value, _, slope, slope_error = (np.array(column) for column in zip(*found, strict=True))
    best = maximiser()
    # The claims compare with enumeration, never with another run.
    entropies, slopes = np.array([exact(at) for at in h]).T
    data = MixtureData(
        path=np.asarray(path.primal),
        h=h,
        posterior=np.stack([np.asarray(model.posterior(at)) for at in h]),
        entropy=value,
        slope=slope,
        slope_error=slope_error,
        exact_entropy=entropies,
        exact_slope=slopes,
        ascents=climb(num_climb, key_ascent, progress),
        maximiser=best,
    )
    what = f"entropy's derivative at {len(h)} values of h"
    rows = [worst(what, "enumeration", slopes, slope, slope_error), *reached(data.ascents, best)]
    settings = (
        f"Burn-in 50; sweep with {num_chains} chains of {num_samples:,} samples; ascent by Adam"
        f" 0.1 from h = 8, 16 chains of {num_climb:,}, {NUM_ITERATIONS} iterations (the paper's"
        " 100 end while it still swings)."
    )
    return Result(data, settings, rows)


def plot(data: MixtureData, narrow: bool) -> Figure:
    if narrow:
        figure, axes = style.panels(*[3.9] * 5, height=2.7, narrow=True)
    else:
        figure = style.empty(9.6, 5.8)
        mosaic = figure.subplot_mosaic([[*"aabbcc"], [*"dddeee"]])
        axes = [mosaic[letter] for letter in "abcde"]
        style.plain(axes)
    parts = (_components, _samples, _entropy, _gradient, _ascent)
    for ax, part in zip(axes, parts, strict=True):
        part(ax, data)
    return figure


def _components(ax: Axes, data: MixtureData) -> None:
    fine = np.linspace(-14, 14, 400)
    for j, mean in enumerate(model.MEANS):
        density = np.exp(-0.5 * ((fine - mean) / model.SCALE) ** 2)
        density /= model.SCALE * np.sqrt(2 * np.pi)
        ax.plot(fine, density, color=style.COMPONENTS[j], lw=1.6, label=f"{j + 1}")
    ax.set(ylim=(0, 0.128))
    style.name(ax, "a) components", "h", "density")
    style.key(ax, loc="upper center", ncols=3, handlelength=1.2, columnspacing=1.0)


def _samples(ax: Axes, data: MixtureData) -> None:
    path = data.path
    steps = np.arange(1, len(path) + 1)
    ax.plot(steps, path + 1, color=style.FAINT, lw=0.8, zorder=1)
    ax.scatter(steps, path + 1, c=[style.COMPONENTS[j] for j in path], s=7, zorder=2)
    ax.set(yticks=[1, 2, 3], ylim=(0.6, 3.4))
    style.name(ax, "b) samples at h = 4", "step", "component")


def _entropy(ax: Axes, data: MixtureData) -> None:
    h, upper = data.h, np.cumsum(data.posterior, axis=1)
    for j in range(3):
        lower = upper[:, j - 1] if j else 0.0
        ax.fill_between(h, lower, upper[:, j], color=style.COMPONENTS[j], alpha=0.16, lw=0)
    ax.plot(h, data.exact_entropy, color=style.GREY, lw=1.2, label="entropy, exact")
    ax.plot(h, data.entropy, ".", color=style.INK, ms=4, label="from chains")
    ax.axvline(data.maximiser, color=style.GREY, lw=0.8, ls=":")
    ax.set(xlim=(-14, 14), ylim=(0, 1.4))
    style.name(ax, "c) posterior bands, entropy", "h")
    style.key(ax, loc="upper left", ncols=2, columnspacing=1.0, handlelength=1.4)


def _gradient(ax: Axes, data: MixtureData) -> None:
    ax.axhline(0.0, color=style.FAINT, lw=1)
    ax.axvline(data.maximiser, color=style.GREY, lw=0.8, ls=":")
    ax.plot(data.h, data.exact_slope, color=style.GREY, lw=1.2, label="exact")
    look = {"fmt": ".", "color": style.RED, "ms": 4.5, "elinewidth": 1}
    ax.errorbar(data.h, data.slope, data.slope_error, **look, label="from the chains ± error")
    ax.set(xlim=(-14, 14))
    style.name(ax, "d) the entropy's gradient", "h")
    style.key(ax, loc="upper right")


def _ascent(ax: Axes, data: MixtureData) -> None:
    ax.plot(data.ascents.T, color=style.RED, lw=0.9, alpha=0.5)
    look = {"color": style.GREY, "lw": 0.9, "ls": ":"}
    ax.axhline(data.maximiser, **look, label=f"exact {data.maximiser:.3f}")
    style.name(ax, f"e) ascent, {len(data.ascents)} seeds", "iteration", "h")
    style.key(ax, loc="upper right")
    closer = ax.inset_axes((0.42, 0.3, 0.55, 0.42))
    style.plain([closer])
    closer.plot(data.ascents.T, color=style.RED, lw=0.7, alpha=0.5)
    closer.axhline(data.maximiser, **look)
    tail = max(1, data.ascents.shape[1] // 3)
    closer.set(xlim=(tail, data.ascents.shape[1]))
    closer.set(ylim=(data.maximiser - 0.14, data.maximiser + 0.08))
    closer.tick_params(labelsize=7.5)


EXPERIMENT = Experiment(
    name="mixture",
    figure=2,
    title="The most ambiguous observation",
    shows=(
        "From which of three normal components did an observation h come? Metropolis–Hastings"
        " samples the component. The gradient of the posterior's entropy, estimated from the"
        " chains alone, leads to the h for which this is most uncertain."
    ),
    data=MixtureData,
    compute=compute,
    plot=plot,
)
