"""Fig. 2: the mixture, its chain, the posterior's entropy with its gradient, and the ascent."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from . import style


def figure(data: dict[str, np.ndarray]) -> Figure:
    figure = Figure(figsize=(9.6, 5.6), layout="constrained")
    axes = figure.subplot_mosaic([["a", "a", "b", "b", "e", "e"], ["c", "c", "c", "d", "d", "d"]])
    style.plain(axes.values())
    _components(axes["a"], data)
    _samples(axes["b"], data)
    _entropy(axes["c"], data)
    _gradient(axes["d"], data)
    _ascent(axes["e"], data)
    return figure


def _components(ax: Axes, data: dict[str, np.ndarray]) -> None:
    scale, fine = float(data["scale"]), np.linspace(-14, 14, 400)
    for j, mean in enumerate(data["means"]):
        density = np.exp(-0.5 * ((fine - mean) / scale) ** 2) / (scale * np.sqrt(2 * np.pi))
        ax.plot(fine, density, color=style.COMPONENTS[j], lw=1.6, label=f"{j + 1}")
    ax.set(ylim=(0, 0.128))
    style.name(ax, "a) components", "h", "density")
    style.key(ax, loc="upper center", ncols=3, handlelength=1.2, columnspacing=1.0)


def _samples(ax: Axes, data: dict[str, np.ndarray]) -> None:
    path = data["path"]
    steps = np.arange(1, len(path) + 1)
    ax.plot(steps, path + 1, color=style.FAINT, lw=0.8, zorder=1)
    ax.scatter(steps, path + 1, c=[style.COMPONENTS[j] for j in path], s=7, zorder=2)
    ax.set(yticks=[1, 2, 3], ylim=(0.6, 3.4))
    style.name(ax, "b) samples at h = 4", "step", "component")


def _entropy(ax: Axes, data: dict[str, np.ndarray]) -> None:
    h, upper = data["h"], np.cumsum(data["posterior"], axis=1)
    for j in range(3):
        lower = upper[:, j - 1] if j else 0.0
        ax.fill_between(h, lower, upper[:, j], color=style.COMPONENTS[j], alpha=0.16, lw=0)
    ax.plot(h, data["exact_entropy"], color=style.GREY, lw=1.2, label="entropy, exact")
    ax.plot(h, data["entropy"], ".", color=style.INK, ms=4.5, label="from the chains")
    ax.axvline(float(data["maximiser"]), color=style.GREY, lw=0.8, ls=":")
    ax.set(xlim=(-14, 14), ylim=(0, 1.32))
    style.name(ax, "c) posterior of the components, and its entropy", "h")
    style.key(ax, loc="upper left", ncols=2)


def _gradient(ax: Axes, data: dict[str, np.ndarray]) -> None:
    h = data["h"]
    ax.axhline(0.0, color=style.FAINT, lw=1)
    ax.axvline(float(data["maximiser"]), color=style.GREY, lw=0.8, ls=":")
    ax.plot(h, data["exact_slope"], color=style.GREY, lw=1.2, label="exact")
    ax.errorbar(
        h,
        data["slope"],
        data["slope_error"],
        fmt=".",
        color=style.RED,
        ms=4.5,
        elinewidth=1,
        label="from the chains ± error",
    )
    ax.set(xlim=(-14, 14))
    style.name(ax, "d) the entropy's gradient", "h")
    style.key(ax, loc="upper right")


def _ascent(ax: Axes, data: dict[str, np.ndarray]) -> None:
    ax.plot(data["ascents"].T, color=style.RED, lw=0.9, alpha=0.5)
    ax.axhline(
        float(data["maximiser"]),
        color=style.GREY,
        lw=0.8,
        ls=":",
        label=f"exact {float(data['maximiser']):.3f}",
    )
    style.name(ax, f"e) ascent, {len(data['ascents'])} seeds", "iteration", "h")
    style.key(ax, loc="upper right")
