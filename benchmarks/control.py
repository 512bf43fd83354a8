"""The gain and the cost of control variates: `docs/honest.md`."""

from __future__ import annotations

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np
from problems import Problem, lattice, logistic, normal, schools, three_components
from timing import row

import diffmh
from diffmh._expectation import _program
from diffmh.reports.comparison import measure


def compare(problem: Problem, alternatives: int, num_chains: int, most=None, steps=None):
    """Standard deviations of a chain's derivative with and without control, and the times."""
    if steps is not None:
        problem = Problem(
            **{**problem.__dict__, "num_samples": steps, "burn_in": min(problem.burn_in, steps)}
        )
    problem = Problem(**{**problem.__dict__, "num_chains": num_chains})
    began = time.perf_counter()
    key = jax.random.key(3)
    theta = jax.tree.map(jnp.asarray, problem.theta)
    programs = [
        _program(
            problem.expectation(diffmh.StochasticDerivative(alternatives=alternatives, control=c)),
            theta,
            key,
            (),
        )
        for c in (None, "f")
    ]
    plain, controlled = measure(programs, repeats=7)
    spread = lambda run: run.jacobian.std(axis=-1, ddof=1)
    ratio = float(np.exp(np.mean(np.log(spread(controlled) / spread(plain)))))
    slower = controlled.seconds / plain.seconds
    error = spread(controlled) / np.sqrt(num_chains)
    apart = controlled.jacobian.mean(-1) - plain.jacobian.mean(-1)
    both = np.hypot(error, spread(plain) / np.sqrt(num_chains))
    print(
        f"{problem.name}, K = {alternatives}, {num_chains} chains of {problem.num_samples:,}:"
        f" std {spread(plain).ravel()[0]:.4g} → {spread(controlled).ravel()[0]:.4g},"
        f" variance × time × {ratio**2 * slower:.2f},"
        f" differ by {np.abs(apart / both).max():.1f} σ ({time.perf_counter() - began:.0f} s)"
    )
    bar = ("(no bar)", True) if most is None else (f"≤ {most}", ratio <= most)
    print(row("  standard deviation with / without", f"{ratio:.3f}", *bar))
    bar = ("(no bar)", True) if most is None else ("≤ 1.3", slower <= 1.3)
    print(row("  time with / without", f"{slower:.2f}", *bar), flush=True)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--only", default="", help="part of a problem's name")
    only = options.parse_args().only
    cases = [
        (lattice(6.0), 1, 256, 0.6, None),
        (lattice(3.0), 1, 512, 0.75, None),
        (lattice(6.0), 4, 256, None, 300),
        (normal(), 1, 512, None, None),
        (three_components(), 1, 512, None, 1000),
        (logistic(), 1, 256, None, 1000),
        (schools(), 1, 256, None, 2000),
    ]
    for problem, alternatives, num_chains, most, steps in cases:
        if only in problem.name:
            compare(problem, alternatives, num_chains, most, steps)


if __name__ == "__main__":
    main()
