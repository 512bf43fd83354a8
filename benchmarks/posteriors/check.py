"""`diffmh.sensitivity` on fifteen posteriors in one line each, against the references.

    python benchmarks/posteriors/check.py [--pymc] [--seed N] [--seeds COUNT] [NAME ...]

Prints for each model the largest |z| of its unmarked rows, the share of rows that are unmarked, CPU
time relative to `posterior.sample`, both compiled, and what Stein's control variates gain: the
variance of the plain covariance over that with them, by 40 batches of the same draws, least and
median over the rows. `--pymc` runs the four models that are
written for PyMC too, in double precision, which PyTensor switches JAX to.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import pathlib
import time
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from models import CASES, Case, arrays

import diffmh
from diffmh.tools.intake import read
from diffmh.tools.intake_sites import states_of
from diffmh.tools.powers import WithPowers
from diffmh.tools.sensitivity import _from_draws

FILE = pathlib.Path(__file__).parent / "references.json"


def cpu_seconds(run: Callable[[], Any]) -> tuple[float, Any]:
    began = time.process_time()
    result = run()
    return time.process_time() - began, result


def z_scores(made: diffmh.Sensitivity, rows: list[dict]) -> dict[tuple[str, str], float]:
    """Of the unmarked rows, the reference's error included."""
    wanted = {(row["quantity"], row["hyperparameter"]): row for row in rows}
    found = {}
    for row in made.rows:
        name = (row.quantity, row.hyperparameter)
        reference = wanted.pop(name)
        own = (row.high - row.low) / (2 * 1.96)
        if row.trusted:
            error = math.hypot(own, reference["error"])
            found[name] = (row.derivative - reference["derivative"]) / error
    assert not wanted, f"no row for {sorted(wanted)}"
    return found


def gains_of_stein(posterior: diffmh.Posterior, case: Case, draws: Any) -> list[float]:
    """For each derivative the variance over batches of the plain covariance, over that with the
    control variates that `sensitivity` has; none where it has none.
    """
    problem = WithPowers(posterior, case.f, None)
    states = states_of(posterior, read(draws), "draws")
    over = _from_draws(problem, states, None)
    if over.control is None:
        return []
    controlled = over.at_draws(problem.theta)
    plain = dataclasses.replace(controlled, control=None)
    spread = [np.var(one.batches(10)[1], axis=-1).ravel() for one in (plain, controlled)]
    return [float(a / b) for a, b in zip(*spread, strict=True) if b > 0]


def checked(case: Case, posterior: diffmh.Posterior, seed: int, references: dict) -> dict[str, Any]:
    key, again = jax.random.split(jax.random.key(seed))
    compiling, made = cpu_seconds(lambda: diffmh.sensitivity(posterior, case.f, key))
    sampling, draws = cpu_seconds(lambda: posterior.sample(again))
    whole, _ = cpu_seconds(lambda: diffmh.sensitivity(posterior, case.f, again))
    scores = z_scores(made, references[case.name])
    worst = max(scores, key=lambda name: abs(scores[name])) if scores else None
    return {
        "gains": gains_of_stein(posterior, case, made.draws),
        "rows": len(made.rows),
        "unmarked": len(scores),
        "z": abs(scores[worst]) if worst else math.nan,
        "worst": worst,
        "rms": float(np.sqrt(np.mean(np.square(list(scores.values()))))) if scores else math.nan,
        "first": compiling,
        "sample": sampling,
        "ratio": whole / sampling,
        "diverging": int(draws.sample_stats["diverging"].sum()),
        "depth": int(draws.sample_stats["tree_depth"].max()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--pymc", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=1, help="how many, from that one")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    references = json.loads(FILE.read_text())
    if given.pymc:
        from pymc_models import MODELS

    rows = unmarked = 0
    gains: list[float] = []
    names = given.names or (MODELS if given.pymc else CASES)
    seeds = range(given.seed, given.seed + given.seeds)
    for name, seed in itertools.product(names, seeds):
        case = CASES[name]
        if given.pymc:
            posterior = diffmh.from_pymc(MODELS[name](), theta=case.theta)
        else:
            posterior = diffmh.from_numpyro(case.model, *arrays(case), theta=case.theta)
        found = checked(case, posterior, seed, references)
        rows, unmarked = rows + found["rows"], unmarked + found["unmarked"]
        gains += found["gains"]
        print(
            f"{name:22} max |z| {found['z']:4.1f} {'ok  ' if found['z'] < 4 else 'HIGH'}"
            f" rms {found['rms']:.2f}  unmarked {found['unmarked']}/{found['rows']}"
            f"  CPU: first {found['first']:.1f} s, sample {found['sample']:.1f} s,"
            f" ratio {found['ratio']:.2f}  divergences {found['diverging']}"
            f"  depth {found['depth']}  Stein {min(found['gains'], default=math.nan):.2f} least,"
            f" {np.median(found['gains'] or math.nan):.1f} median  {found['worst']}",
            flush=True,
        )
    print(f"unmarked rows: {unmarked} of {rows}, {unmarked / rows:.0%} (goal ≥ 90 %)")
    if not gains:
        return
    print(f"Stein's gain: least {min(gains):.2f} (goal ≥ 0.9), median {np.median(gains):.1f} (≥ 3)")


if __name__ == "__main__":
    main()
