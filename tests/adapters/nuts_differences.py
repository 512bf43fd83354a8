"""Derivatives of eight schools' means by finite differences of long NUTS runs: the numbers
of `test_adapters.py`. Run it to make them anew (some minutes): `python nuts_differences.py`.
"""

import sys
from pathlib import Path

import jax
import numpy as np
from numpyro.infer import MCMC, NUTS

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))
from eight_schools import EFFECTS, ERRORS, hierarchical

THETA, STEP = {"mu_scale": 5.0, "tau_scale": 5.0}, 1.0
RUNS = {"num_warmup": 1_000, "num_samples": 25_000, "num_chains": 16}


def means(theta: dict, seed: int) -> np.ndarray:
    """Of `mu` and `tau`, one row a chain."""
    nuts = NUTS(hierarchical, target_accept_prob=0.9)
    runs = MCMC(nuts, **RUNS, chain_method="vectorized", progress_bar=False)
    runs.run(jax.random.key(seed), EFFECTS, ERRORS, **theta)
    draws = runs.get_samples(group_by_chain=True)
    return np.stack([np.asarray(draws[name], float).mean(axis=1) for name in ("mu", "tau")], -1)


if __name__ == "__main__":
    for number, name in enumerate(THETA):
        ends = [
            means({**THETA, name: THETA[name] + side * STEP}, 10 * number + at)
            for at, side in enumerate((-0.5, 0.5))
        ]
        slope = (ends[1].mean(0) - ends[0].mean(0)) / STEP
        error = np.sqrt(sum(end.var(0, ddof=1) / len(end) for end in ends)) / STEP
        for quantity, value, uncertain in zip(("mu", "tau"), slope, error, strict=True):
            print(f'("{quantity}", "{name}"): ({value:.5f}, {uncertain:.5f}),')
