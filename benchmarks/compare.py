"""How often `diffmh.compare` recommends the estimator of least variance × time: `docs/honest.md`.

The chains of a problem are run once, many times more than one comparison needs. All of them
together determine the estimator of least cost; each group of them is one comparison.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import time

import jax
import numpy as np
from problems import (
    Problem,
    autocovariance,
    lattice,
    logistic,
    normal,
    potts,
    schools,
    short_mixture,
    three_components,
)
from timing import row

import diffmh
from diffmh._expectation import _program
from diffmh.core.admission import Unflatten
from diffmh.models import mixture
from diffmh.reports.comparison import Comparison, Measured, compared, measure

GROUPS, CHAINS = 8, 64


def problems() -> list[tuple[Problem, bool]]:
    """Ten problems, with True for those that are composed to an entropy."""
    shorter = lambda problem, count: dataclasses.replace(problem, num_samples=count, burn_in=100)
    alone = [
        shorter(three_components(), 1000),
        short_mixture(),
        normal(),
        autocovariance(),
        shorter(logistic(), 1000),
        shorter(lattice(3.0, 8), 200),
        shorter(lattice(6.0, 8), 200),
        potts(),
        shorter(schools(), 1000),
    ]
    entropy = dataclasses.replace(shorter(three_components(), 500), name="mixture, entropy")
    return [*((problem, False) for problem in alone), (entropy, True)]


def runs(problem: Problem, composed: bool):
    problem = dataclasses.replace(problem, num_chains=CHAINS)
    made = problem.expectation(groups=GROUPS)
    if composed:
        made = diffmh.compose(lambda h, p: mixture.entropy(p), made)
    theta = jax.tree.map(jax.numpy.asarray, problem.theta)
    key = jax.random.key(5)
    estimators = made.applicable(theta, key)
    programs = [_program(made.by(estimator), theta, key, ()) for estimator in estimators]
    return theta, estimators, measure(programs)


def judge(theta, estimators, measured, chains: slice) -> Comparison:
    some = [
        Measured(run.value[..., chains], run.jacobian[..., chains], run.seconds) for run in measured
    ]
    shapes = ((measured[0].value.shape[0],),)
    return compared(estimators, some, Unflatten(jax.tree.structure(0), shapes), theta)


def short(estimator) -> str:
    count = getattr(estimator, "alternatives", None)
    return f"K = {count}" if count else type(estimator).__name__


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--only", default="", help="part of a problem's name")
    chosen = options.parse_args()
    right, near, picks, wrong_quantity, count = 0, 0, 0, 0, 0
    for problem, composed in problems():
        if chosen.only not in problem.name:
            continue
        began = time.perf_counter()
        theta, estimators, measured = runs(problem, composed)
        truth = judge(theta, estimators, measured, slice(None))
        least = truth.row(truth.recommended)
        groups = [
            judge(theta, estimators, measured, slice(g * CHAINS, (g + 1) * CHAINS))
            for g in range(GROUPS)
        ]
        excess = [truth.row(found.recommended).cost / least.cost for found in groups]
        exactly = np.array(excess) == 1
        count, right = count + 1, right + bool(exactly[0])
        near, picks = near + bool(excess[0] <= 1.1), picks + exactly.mean()
        wrong_quantity += sum(
            found.row(found.recommended).quantity != "finite chain" for found in groups
        )
        costs = ", ".join(
            f"{short(line.estimator)} {line.cost / least.cost:.3g}"
            for line in truth.rows
            if math.isfinite(line.cost)
        )
        print(f"{problem.name} ({time.perf_counter() - began:.0f} s): variance × time {costs}")
        print(
            f"  picked {short(groups[0].recommended)}; the least in {exactly.mean():.0%} of"
            f" {GROUPS} comparisons of {CHAINS} chains, at worst {max(excess):.2f} times it",
            flush=True,
        )
    print(row("the pick is the least, problems", f"{right} of {count}", "≥ 9 of 10", right >= 9))
    print(f"  within 10 % of the least: {near} of {count}; over all groups {picks:.1f} of {count}")
    print(row("picks of another quantity", str(wrong_quantity), "0", wrong_quantity == 0))


if __name__ == "__main__":
    main()
