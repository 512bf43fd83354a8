"""A kernel as a BlackJAX algorithm."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from .. import _trees, _validate
from .._validate import Checked
from ..chain import Chain, Stepper
from ..decisions import acceptances
from ..estimators import ValueOnly
from ..kernel import Kernel
from ..simulation import Simulation, nothing
from .posterior import extra


class KernelState(NamedTuple):
    """A chain where it is, with what its kernel remembers of the place."""

    position: PyTree
    chain: Chain


class KernelInfo(NamedTuple):
    """Of one step, through every part of the kernel: how often it accepted; NaN where it decides
    nothing by acceptance (Gibbs).
    """

    acceptance_rate: Array


def as_blackjax(kernel: Checked[Kernel], theta: PyTree, *args: Any) -> Any:
    """The kernel at these parameters as a BlackJAX `SamplingAlgorithm`: its loops and diagnostics
    run on it. It has `init(position) -> state` and `step(rng_key, state) -> (state, info)`.

    A state's `position` is the chain's; `info.acceptance_rate` is the step's. For derivatives use
    `diffmh.expectation`: through this loop `jax.grad` sees nothing of what is accepted, as in any
    other.

    >>> import blackjax, diffmh, jax                                       # doctest: +SKIP
    >>> walk = diffmh.as_blackjax(kernel, theta)                           # doctest: +SKIP
    >>> state = walk.init(0.0)                                             # doctest: +SKIP
    >>> state, info = jax.jit(walk.step)(jax.random.key(0), state)         # doctest: +SKIP
    """
    with extra("as_blackjax", "blackjax"):
        from blackjax.base import SamplingAlgorithm

    _validate.instance(kernel, Kernel, "as_blackjax(kernel, theta)", "kernel")
    theta = _trees.strong(_validate.theta(theta))
    _validate.require(kernel.conditions(theta, *args))

    def stepper(key, position) -> Stepper:
        simulation = Simulation(kernel, position, nothing, ValueOnly(), 1, 0, 1)
        return Stepper(simulation, theta, key, args, differentiate=False)

    def init(position: PyTree, rng_key: Array | None = None) -> KernelState:
        position = _trees.strong(_validate.state(position, "`init(position)`"))
        return KernelState(position, stepper(jax.random.key(0), position).first())

    def step(rng_key: Array, state: KernelState) -> tuple[KernelState, KernelInfo]:
        key = rng_key
        if not jnp.issubdtype(rng_key.dtype, jax.dtypes.prng_key):
            key = jax.random.wrap_key_data(rng_key)
        none = (jnp.zeros((), int), jnp.zeros((), int))
        here = stepper(key, state.position)
        chain, (decided, accepted) = here.single_step(state.chain, none, _note)
        return KernelState(chain.state.x, chain), KernelInfo(accepted / decided)

    return SamplingAlgorithm(init, step)  # pyright: ignore[reportArgumentType]


def _note(record, step, events):
    made, taken = acceptances(step.decisions)
    return record[0] + made, record[1] + taken
