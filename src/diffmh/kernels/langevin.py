"""Langevin: Metropolis-adjusted Langevin steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array, Float, PyTree

from .. import _trees, _validate
from .._validate import Checked
from ..couplings import Coupling
from ..kernel import Kernel
from ..proposals import GaussianProposal, scale_array, scale_conditions
from .metropolis import MetropolisHastings, ProposalOf


class Drift(GaussianProposal):
    """`x' = x + ½ L Lᵀ ∇ log g(x) + L z`."""

    scale: PyTree
    log_density: Callable[[PyTree], Float[Array, ""]]
    symmetric: bool = eqx.field(static=True, default=False)

    def mean(self, x):
        uphill = self.colour(self.pull(jax.grad(self.log_density)(x)))
        return _trees.add(x, jax.tree.map(lambda leaf: 0.5 * leaf, uphill))

    @property
    def scale_name(self):
        return "Langevin(step=...)"


class LangevinProposal(ProposalOf):
    """The drift at given parameters and data."""

    density: Callable[..., Float[Array, ""]]
    step: Any

    @property
    def has_own_parameters(self):
        return callable(self.step)

    def at(self, theta, args):
        log_density = lambda x: self.density(theta, x, *args)
        step = self.step
        if callable(step):
            step = scale_array(step(theta), "Langevin(step=...)")
        return Drift(scale=step, log_density=log_density)


class Langevin(Kernel):
    """MALA: propose `x' = x + ½ h² ∇ log g_θ(x) + h z` and accept or reject as
    Metropolis–Hastings does. The state must be floats.

    **Arguments**

    - `log_density(theta, x, *args)`: `log g_θ(x)`, a real scalar, differentiable by x.
    - `step`: h, a positive number; a pytree like the state, each entry a number or of its leaf's
      shape; a vector or a lower-triangular matrix L for the flattened state, which preconditions by
      `L Lᵀ`; or a function of theta.
    - `coupling`: maximal reflection if left out.

    The derivative is the full one: that of the moves, through the drift and the step size, and
    that of every accept and reject. It needs second derivatives of the log density along the state.

    Refused: a step that is not positive.

    >>> import jax, diffmh
    >>> mala = diffmh.Langevin(lambda theta, x: -0.5 * (x - theta) ** 2, 1.2)
    >>> mean = diffmh.expectation(lambda theta, x: x, mala, init=0.0, num_samples=500, burn_in=50)
    >>> slope = jax.grad(mean)(0.5, jax.random.key(0))                               # exactly 1
    """

    kernel: MetropolisHastings

    def __init__(
        self,
        log_density: Checked[Callable[..., Float[Array, ""]]],
        step: PyTree | Callable[[PyTree], PyTree],
        coupling: Checked[Coupling] | None = None,
    ):
        _validate.function(
            log_density,
            "Langevin(log_density, step)",
            "log_density",
            "log_density(theta, x, *args) -> scalar",
        )
        if not callable(step):
            step = scale_array(step, "Langevin(step=...)")
            _validate.require(scale_conditions(step, "Langevin(step=...)"))
        self.kernel = MetropolisHastings(log_density, LangevinProposal(log_density, step), coupling)

    def updates(self):
        return self.kernel.updates()

    def start(self, parameters, x):
        return self.kernel.start(parameters, x)

    def distribute(self, make, key):
        return self.kernel.distribute(make, key)

    def fold(self, advance, carry, noise):
        return self.kernel.fold(advance, carry, noise)

    def conditions(self, theta, *args):
        return self.kernel.conditions(theta, *args)

    def forgetful(self):
        return eqx.tree_at(lambda langevin: langevin.kernel, self, self.kernel.forgetful())
