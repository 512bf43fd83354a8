"""trace: one chain step by step, with its alternatives, for plots and diagnostics."""

from __future__ import annotations

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from ..base import validate
from ..base.validate import Checked
from ..core import admission
from ..core.adapted import Adapted
from ..core.decisions import acceptances
from ..core.kernel import Kernel
from ..core.loop import Loop, over_chains
from ..core.plan import Plan
from ..core.recorder import Recorder
from ..core.simulation import Simulation, nothing
from ..estimators import StochasticDerivative
from ..reports import display


class Trace(eqx.Module):
    """A chain's path `x_1, ..., x_n` and its alternatives' after each step. Every array but those
    of `init` has `n` as its leading axis.

    - `init`: the start state `x_0`.
    - `primal`: the states `x_t`.
    - `alternative`: the states `y_t`, with the K slots as second axis; meaningful only where
      `alive`.
    - `weight`: the alternatives' weights, a pytree like `theta` with axes `(n, K, *leaf)`.
    - `accepted`: the share of the step's decisions that was accepted (0 or 1 for a kernel that
      makes one); NaN where it has none to accept (Gibbs).
    - `alive`, `born`, `recoupled`: for each step and slot, True if it has an alternative, if that
      is a new one, and if one met the primal.
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
        return display.named("Trace", parts)


class _Counts(eqx.Module):
    """Counts of one step of the kernel, over its updates."""

    decisions: Int[Array, "..."]
    accepted: Int[Array, "..."]
    born: Bool[Array, "K ..."]
    recoupled: Bool[Array, "K ..."]


class _Seen(eqx.Module):
    """A chain and its alternatives after a step. In a path steps lead, and chains are last."""

    primal: PyTree
    alternative: PyTree
    weight: Float[Array, "... K P *C"]
    alive: Bool[Array, "... K *C"]
    counts: _Counts


class _Path(eqx.Module):
    """All steps so far; `own` counts within a step."""

    seen: _Seen
    own: _Counts


class PathRecorder(Recorder):
    """Keeps everything: states, alternatives, weights, births and recouplings of every step."""

    num_steps: int = eqx.field(static=True)

    def start(self, loop, parameters, chains):
        count, none = jnp.zeros((), int), jnp.zeros(chains.memory.alive.shape[:1], bool)
        quiet = over_chains(lambda alive: _Counts(count, count, none, none))(chains.memory.alive)

        def seen(chain, own):
            return self.after_step(loop.stepper, parameters, chain, own, count)[2]

        form = jax.eval_shape(over_chains(seen), chains, quiet)
        room = lambda leaf: jnp.zeros((self.num_steps, *leaf.shape), leaf.dtype)
        return _Path(jax.tree.map(room, form), quiet)

    def open_block(self, loop, progress):
        return progress.record

    def after_update(self, own, step, events):
        assert events is not None, "an estimator that follows alternatives says what happened"
        made, taken = acceptances(step.decisions)
        return _Counts(
            own.decisions + made,
            own.accepted + taken,
            own.born | events.born,
            own.recoupled | events.recoupled,
        )

    def after_step(self, stepper, parameters, chain, own, time):
        slots = chain.memory
        seen = _Seen(chain.state.x, slots.state.x, slots.weight, slots.alive, own)
        return chain, jax.tree.map(jnp.zeros_like, own), seen

    def add(self, block, own, seen, time, row):
        put = lambda path, leaf: path.at[time].set(leaf)
        return _Path(jax.tree.map(put, block.seen, seen), own)

    def close_block(self, loop, progress, chains, block, index):
        return chains, block

    def result(self, loop, progress) -> _Seen:
        return progress.record.seen


def trace(
    kernel: Checked[Kernel | Adapted],
    theta: PyTree,
    key: Checked[Key[Array, ""]],
    *args: Any,
    init: PyTree | None = None,
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
        "`trace` returns a path for plots and cannot be differentiated: differentiate what"
        " `diffmh.expectation` returns."
    )
    given = admission.given(kernel, theta, key, args, init, where, why)
    estimator = StochasticDerivative() if estimator is None else estimator
    validate.instance(estimator, StochasticDerivative, where, "estimator")
    num_steps = validate.count(num_steps, "num_steps=...")
    simulation = Simulation(given.kernel, given.init, nothing, estimator, num_steps, 0, 1)
    admission.check_start(simulation, given.theta, given.key, given.args)
    return _follow(simulation, given.theta, given.key, given.args)


@eqx.filter_jit
def _follow(simulation: Simulation, theta, key, args) -> Trace:
    admission.check_densities(simulation, theta, key, args)
    plan = Plan.of(simulation, theta, key, args)
    loop = Loop(plan, theta, key, args, PathRecorder(simulation.num_samples))
    start = loop.start()
    path = loop.recorder.result(loop, loop.blocks(0, plan.num_blocks, start))
    begin, path = jax.tree.map(lambda leaf: leaf[..., 0], (start.chains.state.x, path))
    _, unravel = ravel_pytree(theta)
    # Under `jit` nobody has looked at the start and at the kernel's parameters.
    valid = start.startable[0]
    weight = jax.vmap(jax.vmap(unravel))(jnp.where(valid, path.weight, jnp.nan))
    counts: _Counts = path.counts
    accepted = jnp.where(valid, counts.accepted / counts.decisions, jnp.nan)
    return Trace(
        begin,
        path.primal,
        path.alternative,
        weight,
        accepted,
        path.alive,
        counts.born,
        counts.recoupled,
    )
