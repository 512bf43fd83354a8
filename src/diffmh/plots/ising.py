"""Fig. 3: energy, heat capacity and its derivative over temperature."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from . import style


def figure(data: dict[str, np.ndarray]) -> Figure:
    figure, axes = style.panels(3.3, 3.3, 3.3, height=3.1)
    order = np.argsort(data["temperature"])
    t, exact = data["temperature"][order], data["curve"]
    columns = (
        (data["value"][order, 0], data["value_error"][order, 0], "a) mean energy E"),
        (data["value"][order, 1], data["value_error"][order, 1], "b) heat capacity C"),
        (data["slope"][order, 1], data["slope_error"][order, 1], "c) dC/dT"),
    )
    for i, (ax, (value, error, title)) in enumerate(zip(axes, columns, strict=True)):
        ax.axvline(float(data["peak"]), color=style.FAINT, lw=1.2, zorder=0)
        ax.plot(
            data["curve_temperature"],
            exact[:, i],
            color=style.BLUE,
            lw=1.2,
            label="exact (Kaufman)",
            zorder=2,
        )
        ax.errorbar(
            t,
            value,
            error,
            fmt=".",
            color=style.RED,
            ms=4.5,
            elinewidth=1,
            label="from the chains ± error",
            zorder=3,
        )
        style.name(ax, title, "temperature T")
    axes[2].set_ylim(1.35 * exact[:, 2].min(), 1.35 * exact[:, 2].max())
    axes[1].annotate(
        f"peak {float(data['peak']):.4f}",
        (float(data["peak"]), exact[:, 1].max()),
        xytext=(10, -4),
        textcoords="offset points",
        fontsize=8.5,
        color=style.INK,
    )
    style.key(axes[0], loc="lower right")
    return figure
