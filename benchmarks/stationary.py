"""`Stationary` and `StochasticDerivative(control="covariance")` against what they are made of:
variance of the derivative for each chain, CPU seconds of a compiled gradient (the least of several,
taken in turn), and their product.

    python benchmarks/stationary.py [equilibrium] [finite] [--chains 4096] [--runs 4] [--only NAME]
"""

from __future__ import annotations

import argparse
import functools
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from timing import best_times

import diffmh
from diffmh.core import admission
from diffmh.core.execute import run
from diffmh.models import gaussian, ising, mixture

KEY = 5


def problems(num_chains: int):
    """Name, expectation by an estimator, θ and the exact derivative at equilibrium."""
    few = max(64, num_chains // 16)
    energy = ising.exact(8, 3.0).heat_capacity
    return (
        ("N(θ, 1), burn_in 9, 101 samples", lambda estimator: diffmh.expectation(
            lambda theta, x: x, gaussian.sampler(), init=4.0, num_samples=101, burn_in=9,
            num_chains=num_chains, estimator=estimator), 0.5, [1.0]),
        ("mixture, burn_in 50, 100 samples", lambda estimator: diffmh.expectation(
            mixture.indicator, mixture.sampler(), init=0, num_samples=100, burn_in=50,
            num_chains=num_chains, estimator=estimator), 0.4, [-0.079093, 0.022615, 0.056478]),
        ("Ising 8×8, T = 3, burn_in 100, 400 samples", lambda estimator: diffmh.expectation(
            ising.energy, ising.sampler(), init=ising.cold(8), num_samples=400, burn_in=100,
            num_chains=few, estimator=estimator), 3.0, [energy]),
    )  # fmt: skip


def finite_problems(num_chains: int):
    """The finite chain of 1,000 steps."""
    few = max(64, num_chains // 4)
    length = dict(num_samples=1_000, num_chains=few)
    return (
        ("mixture, N = 1,000", lambda estimator: diffmh.expectation(
            mixture.indicator, mixture.sampler(), init=0, estimator=estimator, **length), 0.4),
        ("N(θ, 1), N = 1,000", lambda estimator: diffmh.expectation(
            lambda theta, x: x, gaussian.sampler(), init=0.0, estimator=estimator, **length), 0.5),
    )  # fmt: skip


def slopes_of(expectation, theta: float):
    """A compiled program of each chain's derivative, by key."""

    @jax.jit
    def slopes(key):
        return jax.jacfwd(lambda theta: expectation.per_chain(theta, key))(theta)

    return slopes


def moments(slopes, runs: int) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variance of each chain's derivative (variance: of their mean, times the chains)."""
    found = [np.asarray(slopes(jax.random.key(KEY + number)), float) for number in range(runs)]
    stacked = np.concatenate([each.reshape(len(each), -1) for each in found])
    return stacked.mean(axis=0), stacked.var(axis=0, ddof=1)


def decisions_alone(expectation, theta: float, runs: int) -> np.ndarray:
    """The variance of each pair's D, without the covariance."""
    found, at = [], jnp.asarray(theta)
    for each in range(runs):
        key = jax.random.key(KEY + each)
        plan = admission.admit(expectation.simulation, at, key, ()).plan
        means = eqx.filter_jit(run)(plan, at, key, ()).observed.estimator
        found.append(np.asarray(means.derivative, float)[0].T)
    return np.concatenate(found).var(axis=0, ddof=1)


def table(name: str, make, theta: float, estimators, runs: int, exact=None) -> None:
    print(f"\n{name}")
    programs = {str(estimator): slopes_of(make(estimator), theta) for estimator in estimators}
    key = jax.random.key(KEY)
    calls = {label: functools.partial(program, key) for label, program in programs.items()}
    times = best_times(calls, clock=time.process_time)
    rows = {label: moments(program, runs) for label, program in programs.items()}
    _, first = next(iter(rows.values()))
    first_seconds = next(iter(times.values()))
    for label, (mean, variance) in rows.items():
        seconds = times[label]
        ratio = variance / first
        product = np.exp(np.mean(np.log(ratio))) * seconds / first_seconds
        text = np.array2string(ratio, precision=3)
        print(f"  {label:66s} variance {text} time {seconds / first_seconds:.2f}", end="")
        print(f" product {product:.2f}", end="")
        if exact is not None:
            count = runs * make(estimators[0]).num_chains
            print(f"  z {np.array2string((mean - exact) / np.sqrt(variance / count), precision=2)}")
        else:
            print()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", default=["equilibrium", "finite"])
    parser.add_argument("--chains", type=int, default=4096)
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--only", default="", help="problems whose name begins so")
    given = parser.parse_args()
    if "equilibrium" in given.parts:
        estimators = (
            diffmh.Covariance(),
            diffmh.Stationary(),
            diffmh.Stationary(alternatives=0),
            diffmh.StochasticDerivative(),
        )
        for name, make, theta, exact in problems(given.chains):
            if not name.startswith(given.only):
                continue
            table(name, make, theta, estimators, given.runs, exact)
            mean = make(diffmh.Stationary())
            alone = decisions_alone(mean, theta, given.runs)
            share = moments(slopes_of(mean, theta), given.runs)[1] / alone
            print(
                f"  Stationary: variance over that of D alone {np.array2string(share, precision=3)}"
            )
    if "finite" in given.parts:
        estimators = (
            diffmh.StochasticDerivative(alternatives=1),
            diffmh.StochasticDerivative(control="covariance"),
            diffmh.StochasticDerivative(alternatives=4),
            diffmh.StochasticDerivative(alternatives=4, control="covariance"),
        )
        for name, make, theta in finite_problems(given.chains):
            if not name.startswith(given.only):
                continue
            table(name, make, theta, estimators, given.runs)


if __name__ == "__main__":
    main()
