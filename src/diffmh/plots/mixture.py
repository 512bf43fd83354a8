"""Fig. 2: the mixture, its chain, the posterior's entropy with its gradient, and the ascent."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from . import style


def figure(data: dict[str, np.ndarray]) -> Figure:
    figure, (densities, samples, sweep, ascent) = style.panels(2.5, 2.5, 4.2, 2.5, height=3.1)
    h, scale = data["h"], float(data["scale"])
    fine = np.linspace(-14, 14, 400)
    for j, mean in enumerate(data["means"]):
        density = np.exp(-0.5 * ((fine - mean) / scale) ** 2) / (scale * np.sqrt(2 * np.pi))
        densities.plot(fine, density, color=style.COMPONENTS[j], lw=1.6, label=f"{j + 1}")
    densities.set(title="a) components", xlabel="h", ylabel="density", ylim=(0, 0.142))
    style.key(densities, loc="upper center", ncols=3, handlelength=1.2, columnspacing=1.0)

    path = data["path"]
    samples.plot(np.arange(1, len(path) + 1), path + 1, color=style.FAINT, lw=0.8, zorder=1)
    samples.scatter(np.arange(1, len(path) + 1), path + 1, c=[style.COMPONENTS[j] for j in path], s=7, zorder=2)
    samples.set(title="b) samples at h = 4", xlabel="step", ylabel="component", yticks=[1, 2, 3], ylim=(0.6, 3.4))

    upper = np.cumsum(data["posterior"], axis=1)
    for j in range(3):
        lower = upper[:, j - 1] if j else 0.0
        sweep.fill_between(h, lower, upper[:, j], color=style.COMPONENTS[j], alpha=0.16, lw=0)
    sweep.plot(h, data["exact_entropy"], color=style.GREY, lw=1.2, label="exact entropy")
    sweep.plot(h, data["entropy"], ".", color=style.INK, ms=4, label="from the chains")
    reach = 0.42
    across = 1.0 / np.sqrt(1.0 + (12 * data["slope"]) ** 2)  # arrows of even length on the paper
    sweep.quiver(
        h, data["entropy"], reach * across * 2, reach * across * 2 * data["slope"],
        angles="xy", scale_units="xy", scale=1, color=style.RED, width=0.005, headwidth=4, label="gradient",
    )  # fmt: skip
    sweep.axvline(float(data["maximiser"]), color=style.GREY, lw=0.8, ls=":")
    sweep.set(title="c) posterior, its entropy and gradient", xlabel="h", xlim=(-14, 14), ylim=(0, 1.42))
    style.key(sweep, loc="upper center", ncols=3, handlelength=1.2, columnspacing=1.0)

    ascent.plot(data["ascents"].T, color=style.RED, lw=0.9, alpha=0.5)
    ascent.axhline(float(data["maximiser"]), color=style.GREY, lw=0.8, ls=":")
    ascent.set(title=f"d) ascent, {len(data['ascents'])} seeds", xlabel="iteration", ylabel="h")
    return figure
