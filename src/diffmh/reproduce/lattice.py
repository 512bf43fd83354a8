"""Shared by the Ising figures: the lattice, its moments, and the ascent on the heat capacity."""

from __future__ import annotations

import optax
from jaxtyping import Array, Key

from .._compose import compose
from .._expectation import Expectation, expectation
from ..estimators import StochasticDerivative
from ..models import ising as model
from ..tools.optimise import Ascent, optimise
from .experiment import length
from .progress import Status

SIZE = 12
START = 6.0


def moments(
    num_samples: int,
    burn_in: int,
    num_chains: int,
    *,
    flip: bool = False,
    estimator: StochasticDerivative | None = None,
) -> Expectation:
    """The moments of the excitation energy, from a cold start."""
    return expectation(
        model.excitation_moments,
        model.sampler(flip),
        init=model.cold(SIZE),
        estimator=estimator,
        **length(num_samples, burn_in, num_chains),
    )


def climb(key: Key[Array, ""], mean: Expectation, num_iterations: int, progress: Status) -> Ascent:
    """Gradient ascent on the heat capacity, estimated across chains, from T = 6: large steps first,
    then smaller ones, and the average over the second half.
    """
    schedule = optax.piecewise_interpolate_schedule(
        "cosine", 0.2, {int(0.2 * num_iterations): 1.0, num_iterations: 0.02}
    )
    return optimise(
        compose(model.heat_capacity, mean),
        START,
        key,
        optimizer=optax.adam(schedule, b2=0.9),
        num_iterations=num_iterations,
        maximise=True,
        progress=progress.along("iteration of the ascent"),
    )
