"""Fig. 4: a lattice and its alternative, until they meet again."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Bool, Int8, Key
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from .._expectation import expectation
from ..estimators import StochasticDerivative
from ..models import ising as model
from ..plots import style
from ..tools.trace import Trace, trace
from .experiment import Claim, Data, Experiment, Result, Size, length
from .lattice import SIZE
from .progress import Status

TEMPERATURE, SWEEPS, ALTERNATIVES = 3.0, 6, 8
# Spins stay black and white on a dark page too. The red differs from both.
BLACK, WHITE, DIFFERS = "#14171a", "#fdfdfd", "#e5203a"


class Recoupling(Data):
    """A slot of the trace over some sweeps; `num_sweeps` of them, from `first` on, are drawn. If
    the slot is empty, the alternative equals the primal.
    """

    primal: Int8[np.ndarray, "n L L"]
    alternative: Int8[np.ndarray, "n L L"]
    alive: Bool[np.ndarray, "n"]
    born: Bool[np.ndarray, "n"]
    recoupled: Bool[np.ndarray, "n"]
    first_sweep: int
    first: int
    num_sweeps: int


def compute(key: Key[Array, ""], size: Size, progress: Status) -> Result[Recoupling]:
    key_path, key_runs = jax.random.split(key)
    estimator = StochasticDerivative(alternatives=ALTERNATIVES)
    start = model.cold(SIZE)
    path = trace(
        model.sampler(), TEMPERATURE, key_path, init=start, num_steps=1_000, estimator=estimator
    )
    primal, slots = _lattices(path)
    # Both get the same proposals and uniforms, and the kernel is monotone: an alternative that is
    # born above the primal in every cell stays above it, and likewise below.
    above = (slots >= primal[:, None]).all(axis=(2, 3))
    below = (slots <= primal[:, None]).all(axis=(2, 3))
    ordered = bool(np.all(above | below))

    num_chains = size.pick(64, 256, 256)
    error = {}
    for name in progress.over(("coupled", "uncoupled"), lambda name: f"{num_chains} {name} chains"):
        flip = name == "uncoupled"
        energy = expectation(
            model.energy,
            model.sampler(flip),
            init=start,
            estimator=StochasticDerivative(alternatives=1),
            **length(200, 100, num_chains),
        )
        report = energy.run(TEMPERATURE, jax.random.fold_in(key_runs, flip))
        error[name] = float(report.gradient_error)
    ratio = error["uncoupled"] / error["coupled"]
    order = ("preserved", "preserved", "preserved" if ordered else "lost", "every sweep")
    what = "error of dE/dT at T = 3: uncoupled / coupled"
    rows = [
        Claim("order of primal and alternatives in 1,000 sweeps", *order, ordered),
        Claim(what, "—", "—", f"{ratio:.1f}", "> 1", ratio > 1),
    ]
    settings = (
        f"L = {SIZE}, T = {TEMPERATURE}, checkerboard sweeps from a cold start; one of"
        f" {ALTERNATIVES} alternatives."
    )
    return Result(_excerpt(path, primal, slots), settings, rows)


def _lattices(path: Trace) -> tuple[np.ndarray, np.ndarray]:
    """The lattices of the primal and of each slot after every sweep."""
    lattice = model.Spins.lattice
    primal = np.asarray(jax.vmap(lattice)(path.primal))
    slots = np.asarray(jax.vmap(jax.vmap(lattice))(path.alternative))
    alive = np.asarray(path.alive)[:, :, None, None]
    return primal, np.where(alive, slots, primal[:, None])


def _excerpt(path: Trace, primal: np.ndarray, slots: np.ndarray) -> Recoupling:
    alive, born = np.asarray(path.alive), np.asarray(path.born)
    first, slot = window(born, alive, np.sum(slots != primal[:, None], axis=(2, 3)))
    shown = slice(max(0, first - 6), first + 42)
    names = ("alive", "born", "recoupled")
    return Recoupling(
        primal=primal[shown].astype(np.int8),
        alternative=slots[shown, slot].astype(np.int8),
        **{name: np.asarray(getattr(path, name))[shown, slot] for name in names},
        first_sweep=shown.start + 1,
        first=first - shown.start,
        num_sweeps=SWEEPS,
    )


def window(born: np.ndarray, alive: np.ndarray, differing: np.ndarray) -> tuple[int, int]:
    """The first sweep and the slot of an alternative, after sweep 100, that lives for all sweeps
    shown but the last.

    It is not replaced in between and has met the primal in the last sweep. Among those, choose the
    one with the largest number of differing cells.
    """
    found = [
        (int(differing[start : start + SWEEPS, slot].max()), -start, slot)
        for start in range(100, len(alive) - SWEEPS)
        for slot in range(alive.shape[1])
        if born[start, slot]
        and alive[start : start + SWEEPS - 1, slot].all()
        and not born[start + 1 : start + SWEEPS, slot].any()
        and not alive[start + SWEEPS - 1, slot]
    ]
    _, start, slot = max(found)
    return -start, slot


def plot(data: Recoupling, narrow: bool) -> Figure:
    rows = 2 if narrow else 1
    columns = -(-data.num_sweeps // rows)
    side = 1.3 if narrow else 1.6
    figure = style.empty(side * columns, (side + 0.35) * rows)
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    style.plain(axes)
    for ax, i in zip(axes, range(data.first, data.first + data.num_sweeps), strict=True):
        differing = int(np.sum(data.primal[i] != data.alternative[i]))
        _lattice(ax, data.primal[i], data.alternative[i], size=(0.34 * side * 72 / SIZE) ** 2)
        under = f"{differing} differ" if differing else "recoupled"
        style.name(ax, f"sweep {data.first_sweep + i}", under)
    return figure


def _lattice(ax: Axes, primal: np.ndarray, alternative: np.ndarray, size: float) -> None:
    """The primal in black and white; red where the alternative differs, with the primal's spin in
    the middle.
    """
    up, differ = primal > 0, primal != alternative
    colours = np.array([to_rgb(colour) for colour in (BLACK, WHITE, DIFFERS)])
    ax.imshow(colours[np.where(differ, 2, up.astype(int))], interpolation="nearest")
    for spin, colour in ((True, WHITE), (False, BLACK)):
        row, column = np.nonzero(differ & (up == spin))
        ax.scatter(column, row, s=size, c=colour, marker="s", lw=0)
    ax.set(xticks=[], yticks=[])
    ax.spines[["top", "right"]].set_visible(True)
    ax.spines[:].set_color(style.GREY)


def film(data: Recoupling) -> dict[str, Any]:
    """Per sweep: the primal as rows of 0 and 1, and the cells in which the alternative differs."""

    def bits(lattice):
        return ["".join("1" if spin > 0 else "0" for spin in row) for row in lattice]

    # A birth in a slot that was alive and had not recoupled: its alternative was pruned.
    alive_before = np.concatenate([[False], data.alive[:-1]])
    pruned = data.born & alive_before & ~data.recoupled
    frames = zip(data.primal, data.alternative, data.born, pruned, strict=True)
    return {
        "kind": "lattices",
        "title": "Coupled lattices, sweep by sweep",
        "first": data.first_sweep,
        "start": data.first,
        "colours": {"black": BLACK, "white": WHITE, "differs": DIFFERS},
        "frames": [
            {
                "spins": bits(x),
                "differ": bits(np.where(x != y, 1, -1)),
                "born": bool(born),
                "pruned": bool(pruned),
            }
            for x, y, born, pruned in frames
        ],
    }


EXPERIMENT = Experiment(
    name="recoupling",
    figure=4,
    title="Recoupling lattices",
    shows=(
        "The primal's spins (black and white) and the cells in which the alternative differs"
        " (red, the primal's spin in the middle), over six successive sweeps. Both get the same"
        " proposals and the same uniforms, so they keep their order and meet again. In the film,"
        " an alternative that is replaced by a new one before it has met the primal was pruned, as"
        " in Fig. 1."
    ),
    data=Recoupling,
    compute=compute,
    plot=plot,
    film=film,
)
