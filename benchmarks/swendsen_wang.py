"""What it gains that flips which lead nowhere take no slot, for Swendsen–Wang on 3×3 spins.

    taskset -c 0 python benchmarks/swendsen_wang.py

A flipped bond leads nowhere if it joins clusters that draw the same spin, or leaves a cluster that
is joined another way. `nothing` says so of no candidate, `joins` of bonds that would join (read off
the new spins), `all` of every one (each candidate's clusters are found anew). Derivatives are held
against the exact one, by enumeration.
"""

from __future__ import annotations

import itertools
import time
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from timing import best_times

import diffmh
from diffmh.extend import Bernoulli, BlockUpdate

SIZE, THETA, CHAINS = 3, 0.6, 512
SITES = np.arange(SIZE**2).reshape(SIZE, SIZE)
# Both ends of each of the 12 bonds.
ENDS = np.concatenate(
    [
        np.stack([SITES[:, :-1].ravel(), SITES[:, 1:].ravel()], axis=1),
        np.stack([SITES[:-1].ravel(), SITES[1:].ravel()], axis=1),
    ]
)


def agreeing(theta, x):
    """The number of bonds between equal spins."""
    return jnp.sum(x[ENDS[:, 0]] == x[ENDS[:, 1]]).astype(float)


class SwendsenWang(BlockUpdate):
    """A bond between equal spins with probability `1 − exp(−θ)`; then each cluster draws the spin
    of its first site.
    """

    says: Literal["nothing", "joins", "all"] = eqx.field(static=True)

    def log_density(self, theta, x):
        return theta * agreeing(theta, x)

    def noise(self, key, x, num_steps):
        key_bond, key_spin = jax.random.split(key)
        spins = jax.random.bernoulli(key_spin, 0.5, (num_steps, x.size))
        return jax.random.uniform(key_bond, (num_steps, len(ENDS))), spins.astype(x.dtype)

    def decide(self, parameters, state, noise):
        def log_odds(theta, x):
            equal = x[ENDS[:, 0]] == x[ENDS[:, 1]]
            return jnp.where(equal, jnp.log(jnp.expm1(theta)), -jnp.inf)

        return Bernoulli.draw(noise[0], parameters.evaluate(log_odds, state.x))

    def result(self, x, noise, outcome):
        one, other = ENDS.T
        joined = jnp.eye(x.size).at[one, other].set(outcome).at[other, one].set(outcome)
        # Walks of up to 2³ bonds, the longest path of 9 sites.
        for _ in range(3):
            joined = jnp.minimum(joined @ joined, 1.0)
        return noise[1][jnp.argmax(joined > 0, axis=1)]

    def leads_nowhere(self, step, noise):
        if self.says == "nothing":
            return None
        bonds, after = step.decisions[0].outcome, step.after.x
        if self.says == "joins":
            return ~bonds & (after[ENDS[:, 0]] == after[ENDS[:, 1]])

        def idle(bond):
            other = self.result(step.before.x, noise, bonds.at[bond].set(~bonds[bond]))
            return jnp.all(other == after)

        return jax.vmap(idle)(jnp.arange(len(ENDS)))


def exact() -> float:
    """The variance of the number of agreeing bonds, which is the derivative of its mean."""
    states = np.array(list(itertools.product([0, 1], repeat=SIZE**2)))
    equal = np.sum(states[:, ENDS[:, 0]] == states[:, ENDS[:, 1]], axis=1)
    weight = np.exp(THETA * equal)
    weight /= weight.sum()
    return float(weight @ equal**2 - (weight @ equal) ** 2)


def main() -> None:
    runs = {}
    for count, says in itertools.product((1, 4), ("nothing", "joins", "all")):
        mean = diffmh.expectation(
            agreeing,
            SwendsenWang(says),
            init=jnp.zeros(SIZE**2, int),
            num_samples=100,
            burn_in=30,
            num_chains=CHAINS,
            estimator=diffmh.StochasticDerivative(alternatives=count),
        )
        slope = jax.jit(jax.jacfwd(mean.per_chain))
        runs[count, says] = lambda slope=slope: slope(THETA, jax.random.key(0))
    times = best_times(runs, 5, time.process_time)
    print(f"exact derivative {exact():.3f}; {CHAINS} chains; ratios to saying nothing at K = 1")
    first = None
    for (count, says), run in runs.items():
        each = np.asarray(run(), float)
        error = each.std(ddof=1) / CHAINS**0.5
        found = np.array([each.var(ddof=1), times[count, says]])
        first = found if first is None else first
        variance, seconds = found / first
        print(
            f"K = {count}, {says:<8} {each.mean():.3f} ± {error:.3f}, variance {variance:.2f},"
            f" time {seconds:.2f}, variance × time {variance * seconds:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
