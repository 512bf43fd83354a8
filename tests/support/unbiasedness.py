"""One bound for every sampled test of the suite, and what it means."""

from __future__ import annotations

import numpy as np

# |z| < 5 fails a right answer once in 1.7 million. The suite looks at fewer than 100,000 z-scores,
# all of fixed seeds: a false alarm in at most 6 % of choices of the seeds.
Z = 5.0
# Fewer runs than this do not make a z-score: the tails of a mean of N terms are not normal yet.
LEAST_RUNS = 2000


def z_scores(samples: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """z-scores of the mean over the leading axis."""
    samples = np.asarray(samples, float)
    assert samples.shape[0] >= LEAST_RUNS, f"{samples.shape[0]} runs do not make a z-score"
    assert np.all(np.isfinite(samples)), "a run is not finite"
    error = samples.std(axis=0, ddof=1) / np.sqrt(samples.shape[0])
    difference = samples.mean(axis=0) - exact
    # Where nothing is random, rounding remains: some units of the last place of numbers near one,
    # of which a derivative that is exactly zero may be the difference.
    rounding = 1e-5 * (1e-1 + np.abs(exact))
    return np.where(np.abs(difference) < rounding, 0.0, difference / np.maximum(error, 1e-30))


def assert_unbiased(samples: np.ndarray, exact: np.ndarray, what: str = "") -> None:
    scores = z_scores(samples, exact)
    worst = np.unravel_index(np.argmax(np.abs(scores)), scores.shape)
    mean = np.asarray(samples, float).mean(axis=0)
    assert np.abs(scores[worst]) < Z, (
        f"{what}: z = {scores[worst]:.1f} at {worst}: mean {mean[worst]:.6g}, exact"
        f" {np.broadcast_to(exact, mean.shape)[worst]:.6g}"
    )


def is_caught(samples: np.ndarray, exact: np.ndarray) -> bool:
    """True if `assert_unbiased` would fail."""
    return bool(np.max(np.abs(z_scores(samples, exact))) >= Z)
