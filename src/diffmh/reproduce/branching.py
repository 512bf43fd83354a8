"""Fig. 1: a chain on N(θ, 1) and the alternatives that branch off it."""

from __future__ import annotations

import jax
import numpy as np

from ..estimators import StochasticDerivative
from ..expectation import expectation
from ..models import gaussian
from ..plots import branching as draw
from ..trace import trace
from .experiment import Experiment, Outcome, Row, against_exact

THETA, NUM_STEPS, WINDOW = 0.5, 200, (50, 100)


def compute(key, fast: bool) -> Outcome:
    key_path, key_mean = jax.random.split(key)
    path = trace(
        gaussian.sampler(),
        THETA,
        key_path,
        init=0.0,
        num_steps=NUM_STEPS,
        estimator=StochasticDerivative("one-sided"),
    )
    num_chains = 1_000 if fast else 10_000
    mean = expectation(
        lambda theta, x: x,
        gaussian.sampler(),
        init=0.0,
        num_samples=150,
        burn_in=50,
        num_chains=num_chains,
    )
    report = mean.run(THETA, key_mean)
    data = {
        "primal": np.concatenate([np.asarray(path.init)[None], path.primal]),
        "alternative": np.asarray(path.alternative[:, 0]),
        "weight": np.asarray(path.weight[:, 0]),
        "alive": np.asarray(path.alive[:, 0]),
        "born": np.asarray(path.born[:, 0]),
        "recoupled": np.asarray(path.recoupled[:, 0]),
        "window": np.array(WINDOW),
        "theta": np.array(THETA),
    }
    time = float(report.recoupling_time)
    rows = [
        Row(
            "steps until an alternative meets the primal, N(θ,1)",
            "≈ 5",
            "—",
            f"{time:.2f}",
            "1 to 10",
            1 < time < 10,
        ),
        against_exact(
            "dE[x]/dθ, N(θ,1)",
            1.0,
            float(report.gradient),
            float(report.gradient_error),
            form=".4f",
        ),
    ]
    settings = f"θ = 0.5, Gaussian walk of scale 2.38 from 0, maximal reflection, {NUM_STEPS} steps; dE[x]/dθ from {num_chains:,} chains."
    return Outcome(data, settings, rows)


def film(data) -> dict:
    """What the page's player draws: the path up to a step, and the alternatives so far."""
    low, high = (int(end) for end in data["window"])
    return {
        "kind": "branching",
        "title": "Branching paths, step by step",
        "first": low,
        "primal": np.round(data["primal"], 3).tolist()[low : high + 1],
        "branches": [
            {
                "start": branch.start - low,
                "values": np.round(branch.values, 3).tolist(),
                "weights": np.round(branch.weights, 3).tolist(),
            }
            for branch in draw.branches(data)
            if low <= branch.start and branch.start + len(branch.values) - 1 <= high
        ],
    }


EXPERIMENT = Experiment(
    name="branching",
    figure=1,
    title="Branching paths",
    shows=(
        "The primal chain (grey) and the alternatives (red) that branch off where an accept/reject"
        " decision could have"
        " gone the other way. Coupled to the primal by maximal reflection, they soon meet it again."
        " The stronger the"
        " red, the larger the weight."
    ),
    compute=compute,
    draw=draw.figure,
    film=film,
)
