"""Small made-up data of each figure of the paper."""

from __future__ import annotations

import numpy as np

from diffmh.reproduce.ascent import Ascents
from diffmh.reproduce.branching import Branching
from diffmh.reproduce.ising import Ising
from diffmh.reproduce.mixture import MixtureData
from diffmh.reproduce.recoupling import Recoupling
from diffmh.reproduce.variance import Variance


def flags(text: str) -> np.ndarray:
    return np.array([letter == "1" for letter in text])


H = np.linspace(-14, 14, 9)
LATTICES = np.where(np.random.default_rng(0).random((8, 12, 12)) < 0.5, 1, -1).astype(np.int8)
TWO = np.array([1e-3, 1e-4])
PATH = np.stack([np.linspace(6, 2.3, 40), np.ones(40)])
SMALL = {
    "branching": Branching(
        primal=np.linspace(0, 1, 9),
        alternative=np.linspace(1, 2, 8),
        weight=np.full(8, 0.3),
        alive=flags("11011100"),
        born=flags("10010100"),
        recoupled=flags("00100010"),
        first=0,
        last=8,
        theta=0.5,
    ),
    "mixture": MixtureData(
        path=np.array([0, 1, 2, 1]),
        h=H,
        posterior=np.full((9, 3), 1 / 3),
        entropy=1 - H**2 / 400,
        slope=-H / 200,
        slope_error=0 * H + 0.01,
        exact_entropy=1 - H**2 / 400,
        exact_slope=-H / 200,
        ascents=np.ones((2, 5)),
        maximiser=1.0,
    ),
    "ising": Ising(
        temperature=np.array([3.0, 1.0, 2.0]),
        value=np.ones((3, 2)),
        value_error=np.ones((3, 2)),
        slope=np.ones((3, 2)),
        slope_error=np.ones((3, 2)),
        exact=np.ones((3, 3)),
        curve_temperature=H,
        curve=np.stack([H, H, H], 1),
        peak=2.3,
        optimum=2.6,
    ),
    "recoupling": Recoupling(
        primal=LATTICES,
        alternative=-LATTICES,
        alive=flags("11111110"),
        born=flags("10010000"),
        recoupled=flags("00000001"),
        first_sweep=10,
        first=1,
        num_sweeps=6,
    ),
    "variance": Variance(np.array([50, 500]), *[TWO] * 5),
    "ascent": Ascents(coupled=PATH, uncoupled=PATH, ours=PATH, average=2.3, peak=2.33),
}
