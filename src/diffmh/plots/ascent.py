"""Fig. 6: temperature and heat capacity over the iterations of the ascent."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from . import style

LOOKS = {
    "coupled": (style.RED, "one coupled chain"),
    "uncoupled": (style.GREY, "one uncoupled chain"),
}


def figure(data: dict[str, np.ndarray]) -> Figure:
    figure, (temperature, capacity, ours) = style.panels(3.3, 3.3, 3.3, height=3.1)
    for name, (colour, label) in LOOKS.items():
        iterations = np.arange(len(data[f"{name}_theta"]))
        temperature.plot(iterations, data[f"{name}_theta"], color=colour, lw=1.4, label=label)
        capacity.plot(iterations, data[f"{name}_value"], color=colour, lw=0.5, alpha=0.8)
    style.name(temperature, "a) the paper's budget", "iteration", "T")
    style.name(capacity, "b) C on the way", "iteration", "C")
    style.key(temperature, loc="lower left", bbox_to_anchor=(0.0, 0.1))

    theta = data["ours_theta"]
    ours.plot(np.arange(len(theta)), theta, color=style.BLUE, lw=1.2, label="iterates")
    ours.plot(
        [len(theta) // 2, len(theta)],
        [float(data["average"])] * 2,
        color=style.INK,
        lw=1.4,
        label=f"average {float(data['average']):.4f}",
    )
    style.name(ours, "c) many chains, averaged", "iteration", "T")
    for ax in (temperature, ours):
        ax.axhline(
            float(data["peak"]),
            color=style.GREY,
            lw=0.9,
            ls=":",
            label=f"exact peak {float(data['peak']):.4f}",
        )
    style.key(ours, loc="upper right")
    return figure
