"""Fig. 4: the lattice and its alternative over successive sweeps."""

from __future__ import annotations

import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from . import style


def picture(primal: np.ndarray, alternative: np.ndarray) -> np.ndarray:
    """The primal in black and white, the cells in which the alternative differs in red (dark red
    on black).
    """
    colours = np.array([to_rgb(style.INK), to_rgb("#ffffff"), to_rgb("#9c0d24"), to_rgb("#ef5a6f")])
    return colours[(primal > 0).astype(int) + 2 * (primal != alternative)]


def figure(data: dict[str, np.ndarray]) -> Figure:
    first, count = int(data["first"]), int(data["num_sweeps"])
    figure, axes = style.panels(*[1.6] * count, height=1.95)
    for ax, i in zip(axes, range(first, first + count), strict=True):
        ax.imshow(picture(data["primal"][i], data["alternative"][i]), interpolation="nearest")
        differing = int(np.sum(data["primal"][i] != data["alternative"][i]))
        ax.set(xticks=[], yticks=[])
        style.name(
            ax,
            f"sweep {int(data['sweep'][i])}",
            f"{differing} differ" if differing else "recoupled",
        )
        ax.spines[["top", "right"]].set_visible(True)
        ax.spines[:].set_color(style.GREY)
    return figure
