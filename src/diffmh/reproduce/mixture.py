"""Fig. 2: for which observation is it hardest to say which component it came from?"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.optimize

from ..compose import compose
from ..expectation import expectation
from ..models import mixture as model
from ..optimise import optimise
from ..plots import mixture as draw
from ..trace import trace
from .experiment import Experiment, Outcome, Row, estimate, worst

NUM_SEEDS, NUM_ITERATIONS, TOLERANCE = 10, 100, 0.1
ADAM = optax.adam(0.1)


def entropy_of_posterior(num_samples: int, num_chains: int):
    """The posterior's entropy at h from MH alone, across chains."""
    occupancy = expectation(
        model.indicator,
        model.sampler(),
        init=0,
        num_samples=num_samples,
        burn_in=50,
        num_chains=num_chains,
    )
    return compose(lambda h, p: model.entropy(p), occupancy)


def exact_entropy(h: float) -> float:
    """By enumeration, in double precision."""
    with jax.enable_x64(True):
        return float(model.entropy(model.posterior(jnp.asarray(h, jnp.float64))))


def exact_slope(h: float) -> float:
    with jax.enable_x64(True):
        return float(
            jax.grad(lambda h: model.entropy(model.posterior(h)))(jnp.asarray(h, jnp.float64))
        )


def maximiser() -> float:
    return float(scipy.optimize.root_scalar(exact_slope, bracket=(-2.0, 4.0)).root)


def compute(key, fast: bool) -> Outcome:
    key_path, key_sweep, key_ascent = jax.random.split(key, 3)
    path = trace(model.sampler(), 4.0, key_path, init=0, num_steps=150)
    h = np.arange(-14.0, 14.25, 0.5)
    num_samples, num_chains = (2_000, 64) if fast else (5_000, 256)
    entropy = entropy_of_posterior(num_samples, num_chains)
    found = jax.vmap(lambda h, key: estimate(entropy, h, key))(
        jnp.asarray(h), jax.random.split(key_sweep, len(h))
    )
    exact, slope = (
        np.array([function(at) for at in h]) for function in (exact_entropy, exact_slope)
    )

    best = maximiser()
    climb = entropy_of_posterior(num_samples, 16)
    climb_from = lambda seed: optimise(
        climb,
        8.0,
        jax.random.fold_in(key_ascent, seed),
        optimizer=ADAM,
        num_iterations=NUM_ITERATIONS,
        maximise=True,
        average_from=0.9,
        name=f"mixture, seed {seed}",
    )
    ascents = [climb_from(seed) for seed in range(NUM_SEEDS)]
    ends = np.array([float(ascent.average) for ascent in ascents])
    reached = int(np.sum(np.abs(ends - best) < TOLERANCE))
    data = {
        "path": np.asarray(path.primal),
        "h": h,
        "posterior": np.stack([np.asarray(model.posterior(at)) for at in h]),
        "entropy": np.asarray(found.value),
        "entropy_error": np.asarray(found.value_error),
        "slope": np.asarray(found.slope),
        "slope_error": np.asarray(found.slope_error),
        "exact_entropy": exact,
        "exact_slope": slope,
        "ascents": np.stack([np.asarray(ascent.theta) for ascent in ascents]),
        "maximiser": np.array(best),
        "means": np.array(model.MEANS),
        "scale": np.array(model.SCALE),
    }
    rows = [
        worst(
            f"entropy's derivative at {len(h)} values of h",
            "enumeration",
            slope,
            data["slope"],
            data["slope_error"],
        ),
        Row(
            f"h of greatest entropy: mean of the last 10 of {NUM_ITERATIONS} iterations,"
            f" {NUM_SEEDS} seeds",
            "≈ 1",
            f"{best:.4f}",
            f"{ends.mean():.3f}, all within {np.max(np.abs(ends - best)):.3f}",
            f"{NUM_SEEDS} of {NUM_SEEDS} within {TOLERANCE}",
            reached == NUM_SEEDS,
        ),
    ]
    settings = f"Burn-in 50; sweep with {num_chains} chains of {num_samples:,} samples; ascent by Adam 0.1 from h = 8, 16 chains."
    return Outcome(data, settings, rows)


EXPERIMENT = Experiment(
    name="mixture",
    figure=2,
    title="The most ambiguous observation",
    shows=(
        "Which of three normal components did an observation h come from? Metropolis–Hastings"
        " samples the component;"
        " the gradient of the posterior's entropy, estimated from the chains alone, leads to the h"
        " for which it is"
        " hardest to say."
    ),
    compute=compute,
    draw=draw.figure,
)
