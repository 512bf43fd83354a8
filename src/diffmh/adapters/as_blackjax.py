"""A kernel as a BlackJAX algorithm."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from ..base import trees, validate
from ..base.validate import Checked
from ..core.chain import Chain, Stepper
from ..core.decisions import acceptances
from ..core.estimator import ValueOnly
from ..core.kernel import Kernel
from ..core.plan import Plan
from ..core.simulation import Simulation, nothing
from .posterior import extra


class KernelState(NamedTuple):
    """A chain where it is, with what its kernel has cached there."""

    position: PyTree
    chain: Chain


class KernelInfo(NamedTuple):
    """The acceptance rate of one step, over all parts of the kernel. It is NaN for a kernel that
    does not accept or reject (Gibbs).
    """

    acceptance_rate: Array


def as_blackjax(kernel: Checked[Kernel], theta: PyTree, *args: Any) -> Any:
    """The kernel at these parameters as a BlackJAX `SamplingAlgorithm`: its loops and diagnostics
    run on it. It has `init(position) -> state` and `step(rng_key, state) -> (state, info)`.

    A state's `position` is the chain's; `info.acceptance_rate` is the step's. For derivatives use
    `diffmh.expectation`: `jax.grad` through this loop misses the derivative of the accept
    decisions, as with any other sampler.

    >>> import blackjax, diffmh, jax                                       # doctest: +SKIP
    >>> walk = diffmh.as_blackjax(kernel, theta)                           # doctest: +SKIP
    >>> state = walk.init(0.0)                                             # doctest: +SKIP
    >>> state, info = jax.jit(walk.step)(jax.random.key(0), state)         # doctest: +SKIP
    """
    with extra("as_blackjax", "blackjax"):
        from blackjax.base import SamplingAlgorithm

    validate.instance(kernel, Kernel, "as_blackjax(kernel, theta)", "kernel")
    theta = trees.strong(validate.theta(theta))
    validate.require(kernel.conditions(theta, *args))

    def stepper(key, position) -> Stepper:
        simulation = Simulation(kernel, position, nothing, ValueOnly(), 1, 0, 1)
        return Stepper(Plan.of(simulation, theta, key, args), theta, args)

    def init(position: PyTree, rng_key: Array | None = None) -> KernelState:
        position = trees.strong(validate.state(position, "`init(position)`"))
        key = jax.random.key(0)
        return KernelState(position, stepper(key, position).first(key))

    def step(rng_key: Array, state: KernelState) -> tuple[KernelState, KernelInfo]:
        key = rng_key
        if not jnp.issubdtype(rng_key.dtype, jax.dtypes.prng_key):
            key = jax.random.wrap_key_data(rng_key)
        none = (jnp.zeros((), int), jnp.zeros((), int))
        here = stepper(key, state.position)
        chain, (decided, accepted) = here.single_step(key, state.chain, none, _note)
        return KernelState(chain.state.x, chain), KernelInfo(accepted / decided)

    return SamplingAlgorithm(init, step)  # pyright: ignore[reportArgumentType]


def _note(record, step, events):
    made, taken = acceptances(step.decisions)
    return record[0] + made, record[1] + taken
