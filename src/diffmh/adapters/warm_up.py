"""The warm-up of NUTS: step size and variances in Stan's windows, from all chains together.

Dual averaging and Welford's algorithm are BlackJAX's. Chains share what they
learn, so that a window has as many samples as all of them draw, and their trajectories have about
the same length, which is what vectorised chains wait for.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from ..base import trees

# The stages of an iteration: the step size alone is learnt, the variances too, nothing any more, or
# nothing is done at all (the rest of a block).
FAST, SLOW, FROZEN, IDLE = range(4)


class Learnt(NamedTuple):
    """The step size and the inverse mass matrix (variances) in use, and what they come from."""

    step_size: Float[Array, ""]
    variances: Float[Array, "d"]
    averaging: Any
    welford: Any


class WarmUp(eqx.Module):
    """Window adaptation for an acceptance rate of `target`."""

    target: float = eqx.field(static=True)

    def _parts(self):
        from blackjax.adaptation.mass_matrix import mass_matrix_adaptation
        from blackjax.adaptation.step_size import dual_averaging_adaptation

        return dual_averaging_adaptation(self.target), mass_matrix_adaptation(True)

    def start(self, dimension: int, step_size: float) -> Learnt:
        (averaging, _, _), (welford, _, _) = self._parts()
        began = welford(dimension)
        learnt = Learnt(
            jnp.asarray(step_size, float), began.inverse_mass_matrix, averaging(step_size), began
        )
        # Numbers of Python's would make the first block another program than the next.
        return trees.strong(learnt)

    def update(
        self,
        learnt: Learnt,
        stage: Int[Array, ""],
        window_ends: Array,
        positions: PyTree,
        acceptance_rate: Float[Array, ""],
    ) -> Learnt:
        """The state after learning from one step of all chains, chains leading in `positions`."""
        (restart, average, averaged), (_, observe, conclude) = self._parts()

        def fast(learnt: Learnt) -> Learnt:
            averaging = average(learnt.averaging, acceptance_rate)
            step_size = jnp.exp(averaging.log_step_size)
            return learnt._replace(step_size=step_size, averaging=averaging)

        def slow(learnt: Learnt) -> Learnt:
            # Each chain's position is one more sample of the window.
            welford, _ = jax.lax.scan(
                lambda state, position: (observe(state, position), None), learnt.welford, positions
            )
            return fast(learnt)._replace(welford=welford)

        def conclude_window(learnt: Learnt) -> Learnt:
            welford = conclude(learnt.welford)
            # A step size belongs to its metric: with new variances it is learnt anew, from the
            # average so far.
            averaging = restart(averaged(learnt.averaging))
            step_size = jnp.exp(averaging.log_step_size)
            return Learnt(step_size, welford.inverse_mass_matrix, averaging, welford)

        def same_types(branch):
            def strong(learnt):
                return jax.tree.map(
                    lambda new, old: jnp.asarray(new, old.dtype), branch(learnt), learnt
                )

            return strong

        branches = (same_types(fast), same_types(slow), lambda learnt: learnt)
        learnt = jax.lax.switch(jnp.minimum(stage, FROZEN), branches, learnt)
        ends = window_ends & (stage == SLOW)
        return jax.lax.cond(ends, same_types(conclude_window), lambda learnt: learnt, learnt)

    def freeze(self, learnt: Learnt) -> Learnt:
        """The final state, with the average of the step sizes as the step size."""
        _, _, averaged = self._parts()[0]
        return learnt._replace(step_size=trees.strong(averaged(learnt.averaging)))


def schedule(num_warmup: int) -> tuple[np.ndarray, np.ndarray]:
    """The stage of each iteration of the warm-up, and whether a window ends with it.

    Stan's: 75 fast iterations, slow windows of 25, 50, 100, ..., and 50 fast ones; the last window
    takes what is left. In a short warm-up there is one window, of three quarters of it; in one of
    fewer than 20 iterations none.
    """
    stages, ends = np.full(num_warmup, FAST), np.zeros(num_warmup, bool)
    if num_warmup < 20:
        return stages, ends
    first, window, last = 75, 25, num_warmup - 50
    if first + window > last:
        first, last = int(0.15 * num_warmup), num_warmup - int(0.1 * num_warmup)
        window = last - first
    stages[first:last] = SLOW
    while first < last:
        # A window that leaves less than one of twice its length takes the rest too.
        end = first + window if first + 3 * window <= last else last
        ends[end - 1] = True
        first, window = end, 2 * window
    return stages, ends
