"""Fig. 4: a lattice, its alternative, and how they meet again."""

from __future__ import annotations

import jax
import numpy as np

from ..estimators import StochasticDerivative
from ..expectation import expectation
from ..models import ising as model
from ..plots import recoupling as draw
from ..trace import trace
from .experiment import Experiment, Outcome, Row

SIZE, TEMPERATURE, SWEEPS = 12, 3.0, 6


def compute(key, fast: bool) -> Outcome:
    key_path, key_runs = jax.random.split(key)
    path = trace(
        model.sampler(), TEMPERATURE, key_path, init=model.cold(SIZE), num_steps=2_000, estimator=StochasticDerivative("one-sided")
    )
    lattices = jax.vmap(model.Spins.lattice)
    primal, alternative = lattices(path.primal), lattices(jax.tree.map(lambda leaf: leaf[:, 0], path.alternative))
    primal, alternative, alive = np.asarray(primal), np.asarray(alternative), np.asarray(path.alive[:, 0])
    alternative = np.where(alive[:, None, None], alternative, primal)
    first = window(np.asarray(path.born[:, 0]), alive, np.sum(primal != alternative, axis=(1, 2)))
    shown = slice(max(0, first - 6), first + 42)
    ordered = np.all((alternative >= primal).all(axis=(1, 2)) | (alternative <= primal).all(axis=(1, 2)))

    num_chains = 64 if fast else 256
    lifetimes = {}
    for name, flip in (("coupled", False), ("uncoupled", True)):
        energy = expectation(
            model.energy, model.sampler(flip), init=model.cold(SIZE), num_samples=200, burn_in=100, num_chains=num_chains
        )
        lifetimes[name] = energy.run(TEMPERATURE, jax.random.fold_in(key_runs, flip))
    data = {
        "primal": primal[shown].astype(np.int8),
        "alternative": alternative[shown].astype(np.int8),
        "alive": alive[shown],
        "weight": np.asarray(path.weight[:, 0])[shown],
        "first": np.array(first - shown.start),
        "sweep": np.arange(len(primal))[shown] + 1,
        "num_sweeps": np.array(SWEEPS),
        "temperature": np.array(TEMPERATURE),
    }
    alive_fraction = {name: float(report.alive_fraction) for name, report in lifetimes.items()}
    error = {name: float(report.gradient_error) for name, report in lifetimes.items()}
    rows = [
        Row(
            "order of primal and alternative in 2,000 sweeps",
            "preserved",
            "preserved",
            "preserved" if ordered else "lost",
            "every sweep",
            bool(ordered),
        ),
        Row(
            "error of dE/dT at T = 3: uncoupled / coupled",
            "—",
            "—",
            f"{error['uncoupled'] / error['coupled']:.1f} (alive {alive_fraction['uncoupled']:.0%} / {alive_fraction['coupled']:.0%})",
            "> 1",
            error["uncoupled"] > error["coupled"],
        ),
    ]
    return Outcome(data, f"L = {SIZE}, T = {TEMPERATURE}, checkerboard sweeps from a cold start, one alternative.", rows)


def window(born: np.ndarray, alive: np.ndarray, differing: np.ndarray) -> int:
    """The first sweep of an alternative, after 100, that nothing replaces and that meets the primal within the sweeps shown.

    Of those, the one whose differing cells are most at their most.
    """
    best, most = 100, -1
    for start in range(100, len(alive) - SWEEPS):
        inside = slice(start, start + SWEEPS)
        one_alternative = born[start] and alive[start : start + SWEEPS - 1].all() and not born[start + 1 : start + SWEEPS - 1].any()
        if one_alternative and not alive[start + SWEEPS - 1] and differing[inside].max() > most:
            best, most = start, int(differing[inside].max())
    return best


def film(data) -> dict:
    """Per sweep: the primal as rows of 0 and 1, and the cells in which the alternative differs."""
    bits = lambda lattice: ["".join("1" if spin > 0 else "0" for spin in row) for row in lattice]
    return {
        "kind": "lattices",
        "title": "Coupled lattices, sweep by sweep",
        "first": int(data["sweep"][0]),
        "frames": [
            {"spins": bits(x), "differ": bits(np.where(x != y, 1, -1)), "weight": round(float(w) if alive else 0.0, 3)}
            for x, y, w, alive in zip(data["primal"], data["alternative"], data["weight"], data["alive"], strict=True)
        ],
    }


EXPERIMENT = Experiment(
    name="recoupling",
    figure=4,
    title="Recoupling lattices",
    shows="The primal's spins (black and white) and the cells in which the alternative differs (red), over six successive sweeps. Both get the"
    " same proposals and the same uniforms, so they keep their order and meet again.",
    compute=compute,
    draw=draw.figure,
    film=film,
)
