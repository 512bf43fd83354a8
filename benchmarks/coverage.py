"""How often 95 % intervals contain the truth, and how often each warning occurs: `docs/honest.md`.

A seed is a group of the chains of one long run, with its own report.
"""

from __future__ import annotations

import argparse
import collections
import time

import jax
import numpy as np
from problems import Problem, lattice, logistic, normal, schools, three_components
from scipy.special import stdtrit
from timing import row

import diffmh
from diffmh.reports.report import RunChains, report


def group(chains: RunChains, number: int, size: int) -> RunChains:
    """The chains of one group, as a separate run would return them."""
    total = chains.value.shape[-1]
    some = slice(number * size, (number + 1) * size)

    def pick(leaf):
        per_chain = isinstance(leaf, np.ndarray) and leaf.shape[-1:] == (total,)
        return leaf[..., some] if per_chain else leaf

    return jax.tree.map(pick, chains)


def on_host(chains: RunChains) -> RunChains:
    return jax.tree.map(lambda leaf: np.asarray(leaf) if hasattr(leaf, "shape") else leaf, chains)


def flat(tree) -> np.ndarray:
    """(entries, 2) intervals, or (entries,) numbers."""
    return np.asarray(jax.tree.leaves(tree)[0], float)


class Tally:
    """Counts over the reports of one problem."""

    def __init__(self, problem: Problem):
        assert problem.exact is not None
        self.value, self.slope = problem.exact()
        self.num_chains = problem.num_chains
        self.held = {"value": [], "gradient": [], "t: value": [], "t: gradient": []}
        self.warned = collections.Counter()
        self.missed, self.missed_warned, self.count = 0, 0, 0

    def add(self, found: diffmh.Report) -> None:
        # A leaf of the gradient has shape (F, P).
        truths = {"value": self.value, "gradient": self.slope.T}
        estimates = {
            "value": (found.value, found.value_error),
            "gradient": (found.gradient, found.gradient_error),
        }
        quantile = stdtrit(self.num_chains - 1, 0.975)
        hit = True
        for (name, truth), interval in zip(truths.items(), found.interval(0.95), strict=True):
            ends = flat(interval).reshape(-1, 2)
            truth = truth.reshape(-1)
            held = (ends[:, 0] <= truth) & (truth <= ends[:, 1])
            mean, error = (flat(part).reshape(-1) for part in estimates[name])
            self.held[name].append(held)
            self.held[f"t: {name}"].append(np.abs(mean - truth) <= quantile * error)
            hit &= bool(held.all())
        self.count += 1
        self.missed += not hit
        self.missed_warned += (not hit) and bool(found.warnings)
        for text in (*found.warnings, *found.notes):
            self.warned[" ".join(text.split(":")[0].split()[:4])] += 1


def measure(problem: Problem, groups: int, alternatives: int) -> Tally:
    estimator = diffmh.StochasticDerivative(alternatives=alternatives)
    began = time.perf_counter()
    chains = on_host(
        problem.expectation(estimator, groups).run_chains(problem.theta, jax.random.key(11))
    )
    tally = Tally(problem)
    for number in range(groups):
        tally.add(report(group(chains, number, problem.num_chains)))
    seconds = time.perf_counter() - began
    shape = f"{problem.num_chains} chains of {problem.num_samples:,}, K = {alternatives}"
    print(f"{problem.name}: {groups} seeds, {shape} ({seconds:.0f} s)")
    return tally


def show(problem: Problem, tally: Tally, healthy: bool) -> None:
    for name in ("value", "gradient"):
        held, plain = (np.mean(tally.held[key], axis=0) for key in (name, f"t: {name}"))
        figures = ", ".join(f"{100 * rate:.1f}" for rate in held)
        inside = bool(np.all((held >= 0.92) & (held <= 0.98)))
        print(row(f"  {name}: intervals hold, %", figures, "92–98", inside))
        print(f"    Student's t alone: {', '.join(f'{100 * rate:.1f}' for rate in plain)}")
    for text, count in tally.warned.most_common():
        rate = count / tally.count
        if healthy:
            print(row(f"  warned “{text} …”", f"{rate:.2%}", "< 2 %", rate < 0.02))
        else:
            print(f"  warned “{text} …” in {rate:.1%} of the runs")
    if not healthy and tally.missed:
        rate = tally.missed_warned / tally.missed
        what = f"  of {tally.missed} runs with a miss, warned"
        print(row(what, f"{rate:.1%}", "≥ 95 %", rate >= 0.95))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seeds", type=int, default=400)
    options.add_argument("--alternatives", type=int, default=1)
    options.add_argument("--only", default="", help="part of a problem's name")
    chosen = options.parse_args()
    problems = [(three_components(), True), (normal(), True), (logistic(), True)]
    problems += [(lattice(3.0), True), (schools(), False)]
    for problem, healthy in problems:
        if chosen.only in problem.name:
            show(problem, measure(problem, chosen.seeds, chosen.alternatives), healthy)


if __name__ == "__main__":
    main()
