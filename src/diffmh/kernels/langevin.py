"""Langevin: Metropolis-adjusted Langevin steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
from jaxtyping import Array, Float, PyTree

from ..base import trees, validate
from ..base.validate import Checked
from ..couplings import Coupling
from ..proposals import GaussianProposal, scale_array, scale_conditions
from .metropolis import OneUpdate, ProposalOfTheta


class LangevinDrift(GaussianProposal):
    """`x' = x + ½ L Lᵀ ∇ log g(x) + L z`."""

    scale: PyTree
    log_density: Callable[[PyTree], Float[Array, ""]]
    symmetric: bool = eqx.field(static=True, default=False)

    def mean(self, x):
        # L Lᵀ ∇: the gradient in the metric whose unit step is L z.
        uphill = self.colour(self.pull(jax.grad(self.log_density)(x)))
        return trees.add(x, jax.tree.map(lambda leaf: 0.5 * leaf, uphill))

    @property
    def scale_name(self):
        return "Langevin(step_size=...)"


class _DriftOf(eqx.Module):
    """The drift at given parameters and data."""

    density: Callable[..., Float[Array, ""]]
    step_size: Any
    kind: ClassVar[type[LangevinDrift]] = LangevinDrift

    def __call__(self, theta, *args):
        step_size = self.step_size
        if callable(step_size):
            step_size = scale_array(step_size(theta), "Langevin(step_size=...)")
        return LangevinDrift(scale=step_size, log_density=lambda x: self.density(theta, x, *args))


class Langevin(OneUpdate):
    """MALA: propose `x' = x + ½ h² ∇ log g_θ(x) + h z` and accept or reject as
    Metropolis–Hastings does. The state must be floats.

    **Arguments**

    - `log_density(theta, x, *args)`: `log g_θ(x)`, a real scalar, differentiable in x.
    - `step_size`: h, a positive number; a pytree like the state, each entry a number or of its
      leaf's shape; a vector or a lower-triangular matrix L for the flattened state, which
      preconditions by `L Lᵀ`; or a function of theta.
    - `coupling`: maximal reflection if left out.

    The derivative is the full one: that of the moves, through the drift and the step size, and
    that of every accept and reject. It needs second derivatives of the log density along the state.

    Refused: a step size that is not positive.

    >>> import jax, diffmh
    >>> mala = diffmh.Langevin(lambda theta, x: -0.5 * (x - theta) ** 2, 1.2)
    >>> mean = diffmh.expectation(lambda theta, x: x, mala, init=0.0, num_samples=500, burn_in=50)
    >>> slope = jax.grad(mean)(0.5, jax.random.key(0))                               # exactly 1
    """

    update: ProposalOfTheta

    def __init__(
        self,
        log_density: Checked[Callable[..., Float[Array, ""]]],
        step_size: PyTree | Callable[[PyTree], PyTree],
        coupling: Checked[Coupling] | None = None,
    ):
        where = "Langevin(log_density, step_size, coupling)"
        log_density = validate.density(log_density, where)
        if coupling is not None:
            validate.instance(coupling, Coupling, where, "coupling")
        if not callable(step_size):
            step_size = scale_array(step_size, "Langevin(step_size=...)")
            validate.require(scale_conditions(step_size, "Langevin(step_size=...)"))
        drift = _DriftOf(log_density, step_size)
        fixed = not callable(step_size)
        self.update = ProposalOfTheta(log_density, drift, coupling, through_density_alone=fixed)
