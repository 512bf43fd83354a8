"""trace: one chain step by step, with its alternatives, for plots and diagnostics."""

from __future__ import annotations

import functools
import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Key, PyTree

from . import _admission, _display, _validate
from ._validate import Checked
from .chain import Chain
from .decisions import Acceptance
from .estimators import StochasticDerivative
from .kernel import Kernel
from .loop import Loop
from .simulation import Simulation, nothing


class Trace(eqx.Module):
    """A chain's path `x_1, ..., x_n` and its alternatives' after each step; every array has `n` as
    its leading axis.

    - `primal`: the states `x_t`.
    - `alternative`: the states `y_t`, with the K slots as second axis; of meaning only where
      `alive`.
    - `weight`: the alternatives' weights, a pytree like `theta` with axes `(n, K, *leaf)`.
    - `accepted`: the share of the step's decisions that was accepted (0 or 1 for a kernel that
      makes one); NaN where it has none to accept (Gibbs).
    - `alive`, `born`, `recoupled`: by step and slot: an alternative is there; it is a new one; one
      met the primal.
    """

    init: PyTree
    primal: PyTree
    alternative: PyTree
    weight: PyTree
    accepted: Float[Array, "n"]
    alive: Bool[Array, "n K"]
    born: Bool[Array, "n K"]
    recoupled: Bool[Array, "n K"]

    def __repr__(self) -> str:
        num_steps, num_slots = self.alive.shape
        rate = float(jnp.nanmean(self.accepted))
        parts = {
            "num_steps": f"{num_steps:,}",
            "alternatives": str(num_slots),
            "accepted": "none to accept" if math.isnan(rate) else f"{rate:.1%}",
            "born": f"{int(self.born.sum()):,}",
            "recoupled": f"{int(self.recoupled.sum()):,}",
            "alive": f"{float(self.alive.mean()):.0%}",
        }
        return _display.named("Trace", parts)


class _Record(eqx.Module):
    """What happened in one step of the kernel, over its inner steps."""

    decisions: Array
    accepted: Array
    born: Bool[Array, "K"]
    recoupled: Bool[Array, "K"]

    def note(self, step, events) -> _Record:
        made = [decision for decision in step.decisions if isinstance(decision, Acceptance)]
        return _Record(
            self.decisions + sum(decision.count for decision in made),
            self.accepted + sum(jnp.sum(decision.accepted) for decision in made),
            self.born | events.born,
            self.recoupled | events.recoupled,
        )


def trace(
    kernel: Checked[Kernel],
    theta: PyTree,
    key: Checked[Key[Array, ""]],
    *args: Any,
    init: PyTree,
    num_steps: Checked[int],
    estimator: Checked[StochasticDerivative] | None = None,
) -> Trace:
    """Follows one chain for `num_steps` steps and keeps everything: the path, the alternatives,
    their weights, births, recouplings.

    It is the first of the chains that an `expectation` with the same kernel, key and `init`
    averages over, and is refused where that one is: for a start outside the support, or a density
    that jumps at a place that depends on theta, whose alternatives would carry a wrong derivative.

    >>> import jax, diffmh
    >>> density = lambda theta, x: -0.5 * (x - theta) ** 2
    >>> normal = diffmh.MetropolisHastings(density, diffmh.GaussianWalk(2.38))
    >>> path = diffmh.trace(normal, 0.5, jax.random.key(0), init=0.0, num_steps=200)
    >>> path.primal.shape, path.alternative.shape, path.weight.shape
    ((200,), (200, 1), (200, 1))
    """
    where = "trace(kernel, theta, key, *args, ...)"
    why = (
        "`trace` keeps a path to look at and is not differentiated: differentiate what"
        " `diffmh.expectation` returns."
    )
    given = _admission.given(kernel, theta, key, args, init, where, why)
    estimator = StochasticDerivative() if estimator is None else estimator
    _validate.instance(estimator, StochasticDerivative, where, "estimator")
    num_steps = _validate.count(num_steps, "num_steps=...")
    simulation = Simulation(kernel, given.init, nothing, estimator, num_steps, 0, 1)
    _admission.check_start(simulation, given.theta, given.key, given.args)
    return _follow(simulation, given.theta, given.key, given.args)


@eqx.filter_jit
def _follow(simulation: Simulation, theta, key, args) -> Trace:
    _admission.check_densities(simulation, theta, key, args)
    loop = Loop(simulation, theta, key, args, True)
    stepper = loop.stepper
    _, unravel = ravel_pytree(theta)
    assert isinstance(simulation.estimator, StochasticDerivative)
    num_slots = simulation.estimator.alternatives
    quiet = _Record(
        jnp.zeros((), int),
        jnp.zeros((), int),
        jnp.zeros(num_slots, bool),
        jnp.zeros(num_slots, bool),
    )
    only = functools.partial(jax.tree.map, lambda leaf: leaf[..., 0])

    def block(chain, index):
        parameters = stepper.parameters(jax.random.fold_in(key, index))
        noise = loop.block_noise(index)

        def step(chain: Chain, noise):
            chain, record = stepper.step(parameters, chain, noise, quiet, _Record.note)
            slots = chain.memory
            weight = jax.vmap(unravel)(slots.weight)
            return chain, (chain.state.x, slots.state.x, weight, record, slots.alive)

        return jax.lax.scan(step, chain, jax.tree.map(lambda leaf: leaf[..., 0], noise))

    start = loop.start()
    chain = only(start.chains)
    _, blocks = jax.lax.scan(block, chain, jnp.arange(loop.num_blocks))
    joined = jax.tree.map(
        lambda leaf: leaf.reshape(-1, *leaf.shape[2:])[: simulation.num_samples], blocks
    )
    primal, alternative, weight, record, alive = joined
    # Under `jit` nobody has looked at the start and at the kernel's parameters.
    valid = start.startable[0]
    weight = jax.tree.map(lambda leaf: jnp.where(valid, leaf, jnp.nan), weight)
    accepted = jnp.where(valid, record.accepted / record.decisions, jnp.nan)
    return Trace(
        chain.state.x, primal, alternative, weight, accepted, alive, record.born, record.recoupled
    )
