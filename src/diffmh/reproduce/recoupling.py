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

SIZE, TEMPERATURE, SWEEPS, ALTERNATIVES = 12, 3.0, 6, 8


def compute(key, fast: bool) -> Outcome:
    key_path, key_runs = jax.random.split(key)
    estimator = StochasticDerivative(alternatives=ALTERNATIVES)
    path = trace(
        model.sampler(),
        TEMPERATURE,
        key_path,
        init=model.cold(SIZE),
        num_steps=1_000,
        estimator=estimator,
    )
    primal = np.asarray(jax.vmap(model.Spins.lattice)(path.primal))
    slots = np.asarray(jax.vmap(jax.vmap(model.Spins.lattice))(path.alternative))
    alive, born = np.asarray(path.alive), np.asarray(path.born)
    slots = np.where(alive[:, :, None, None], slots, primal[:, None])
    above, below = (
        (slots >= primal[:, None]).all(axis=(2, 3)),
        (slots <= primal[:, None]).all(axis=(2, 3)),
    )
    ordered = bool(np.all(above | below))
    differing = np.sum(slots != primal[:, None], axis=(2, 3))
    first, slot = window(born, alive, differing)
    shown = slice(max(0, first - 6), first + 42)

    num_chains = 64 if fast else 256
    reports = {}
    for name, flip in (("coupled", False), ("uncoupled", True)):
        energy = expectation(
            model.energy,
            model.sampler(flip),
            init=model.cold(SIZE),
            num_samples=200,
            burn_in=100,
            num_chains=num_chains,
        )
        reports[name] = energy.run(TEMPERATURE, jax.random.fold_in(key_runs, flip))
    data = {
        "primal": primal[shown].astype(np.int8),
        "alternative": slots[shown, slot].astype(np.int8),
        "alive": alive[shown, slot],
        "weight": np.asarray(path.weight)[shown, slot],
        "first": np.array(first - shown.start),
        "sweep": np.arange(len(primal))[shown] + 1,
        "num_sweeps": np.array(SWEEPS),
        "temperature": np.array(TEMPERATURE),
    }
    error = {name: float(report.gradient_error) for name, report in reports.items()}
    rows = [
        Row(
            "order of primal and alternatives in 1,000 sweeps",
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
            f"{error['uncoupled'] / error['coupled']:.1f}",
            "> 1",
            error["uncoupled"] > error["coupled"],
        ),
    ]
    return Outcome(
        data,
        f"L = {SIZE}, T = {TEMPERATURE}, checkerboard sweeps from a cold start; one of"
        f" {ALTERNATIVES} alternatives.",
        rows,
    )


def window(born: np.ndarray, alive: np.ndarray, differing: np.ndarray) -> tuple[int, int]:
    """The first sweep and the slot of an alternative, after sweep 100, that lives for all sweeps
    shown but the last.

    Nothing replaces it on the way, and it has met the primal in the last. Of those, the one that
    differs in most cells at its most.
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


def film(data) -> dict:
    """Per sweep: the primal as rows of 0 and 1, and the cells in which the alternative differs."""
    bits = lambda lattice: ["".join("1" if spin > 0 else "0" for spin in row) for row in lattice]
    return {
        "kind": "lattices",
        "title": "Coupled lattices, sweep by sweep",
        "first": int(data["sweep"][0]),
        "frames": [
            {
                "spins": bits(x),
                "differ": bits(np.where(x != y, 1, -1)),
                "weight": round(float(w) if alive else 0.0, 3),
            }
            for x, y, w, alive in zip(
                data["primal"], data["alternative"], data["weight"], data["alive"], strict=True
            )
        ],
    }


EXPERIMENT = Experiment(
    name="recoupling",
    figure=4,
    title="Recoupling lattices",
    shows=(
        "The primal's spins (black and white) and the cells in which the alternative differs (red),"
        " over six successive"
        " sweeps. Both get the same proposals and the same uniforms, so they keep their order and"
        " meet again."
    ),
    compute=compute,
    draw=draw.figure,
    film=film,
)
