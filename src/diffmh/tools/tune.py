"""tune: the parameters of a proposal, by our own gradient of how far the chain jumps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Key, PyTree

from .._compose import compose
from .._expectation import expectation
from ..base import validate
from ..base.validate import Checked
from ..core.kernel import Kernel
from .optimise import Ascent, optimise


def tune(
    kernel: Checked[Kernel],
    theta: PyTree,
    key: Checked[Key[Array, ""]],
    *args: Any,
    init: PyTree | Callable[[Key[Array, ""]], PyTree],
    objective: Checked[Callable[..., Array]] | None = None,
    lag: Checked[int] = 1,
    num_samples: Checked[int] = 500,
    burn_in: Checked[int] = 50,
    num_chains: Checked[int] = 64,
    num_iterations: Checked[int] = 300,
    optimizer: Any = None,
    progress: bool | None = None,
) -> Ascent:
    """Tunes the parameters of a proposal by gradient ascent on the efficiency of its chain.

    **Arguments**

    - `kernel`: a kernel whose moves depend on theta, such as
      `MetropolisHastings(log_density, lambda theta: GaussianWalk(theta))` or
      `Langevin(log_density, lambda theta: theta)`.
    - `theta`: where to begin.
    - `objective`: `objective(theta, x_earlier, x, *args)` of two states, whose mean is made as
      large as possible. If left out: `log det E[(x' − x)(x' − x)ᵀ]`, the jumps of the
      flattened state. It does not depend on the state's units, so that the proposal takes on the
      shape of the target; in one dimension it is the squared jump distance, whose maximum is the
      minimum of the autocovariance.
    - `lag`: how many steps apart the two states are. A proposal that jumps back and forth moves far
      in every step and still makes no progress; a larger lag shows that.
    - `optimizer`: an `optax` optimiser; Adam with a rate of 0.02 that decays to 0.002 if left out.
    - `init`, `num_samples`, `burn_in`, `num_chains`: the chains of each iteration.

    **Returns** an `Ascent`; its `average` is the tuned theta.

    Refused: a kernel that has no parameters of its own.

    >>> import jax, diffmh
    >>> walk = diffmh.MetropolisHastings(
    ...     lambda scale, x: -0.5 * x**2, lambda scale: diffmh.GaussianWalk(scale))
    >>> path = diffmh.tune(walk, 1.5, jax.random.key(0), init=0.0, num_iterations=5)
    >>> float(path.last) > 1.5                                         # on its way to 2.43
    True
    """
    validate.instance(kernel, Kernel, "tune(kernel, theta, key, ...)", "kernel")
    if not any(update.has_own_parameters for update in kernel.updates()):
        raise ValueError(
            "`tune(kernel, ...)` needs a kernel whose proposal or step is a function of theta, such"
            " as `MetropolisHastings(log_density, lambda theta: GaussianWalk(theta))`."
        )
    if objective is not None:
        signature = "objective(theta, x_earlier, x, *args) -> scalar"
        validate.function(objective, "tune(objective=...)", "objective", signature)
    observed = expectation(
        _jumps if objective is None else objective,
        kernel,
        init=init,
        num_samples=num_samples,
        burn_in=burn_in,
        num_chains=num_chains,
        lag=validate.count(lag, "tune(lag=...)"),
    )
    score = compose(_log_volume, observed) if objective is None else observed
    num_iterations = validate.count(num_iterations, "tune(num_iterations=...)")
    if optimizer is None:
        import optax

        optimizer = optax.adam(optax.exponential_decay(0.02, num_iterations, 0.1))
    return optimise(
        score,
        theta,
        key,
        *args,
        optimizer=optimizer,
        num_iterations=num_iterations,
        maximise=True,
        progress=progress,
        name="tune",
    )


def _jumps(theta: PyTree, x_earlier: PyTree, x: PyTree, *args: Any) -> Float[Array, "d d"]:
    """`(x' − x)(x' − x)ᵀ` of the flattened state."""
    jump = ravel_pytree(x)[0] - ravel_pytree(x_earlier)[0]
    return jump[:, None] * jump


def _log_volume(theta: PyTree, jumps: Float[Array, "d d"]) -> Float[Array, ""]:
    return jnp.linalg.slogdet(jumps)[1]
