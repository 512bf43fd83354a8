"""Two chains of one kernel, the second L steps behind the first: where the second is, its step
beside the first's, and whether they have met.

The primal X moves alone for L steps; from then on X and Y move together by the kernel's own
coupling, X from X_t to X_{t+1} and Y from Y_{t−L} to Y_{t−L+1}. They meet at
`τ = min{t ≥ L : X_t = Y_{t−L}}`, and are one chain afterwards.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..base import trees
from ..fast import rounding
from .alternatives import Transition, remember
from .kernel import State, Step
from .parameters import Parameters
from .update_checks import checked_state
from .values import Value, without_tangents


class PairSchedule(eqx.Module):
    """The weights with which two chains, L steps apart, average over the equilibrium (Jacob,
    O'Leary and Atchadé, arXiv 1708.03625). Samples are `first ≤ t ≤ last`, n of them:

        c_t = 1[first ≤ t ≤ last] / n
        e_t = (⌊(t − first)/L⌋ − ⌈max(L, t − last)/L⌉ + 1) / n · 1[first + L ≤ t < τ]

    Then `H(φ) = Σ_t c_t φ(X_t) + e_t (φ(X_t) − φ(Y_{t−L}))` has the mean of φ at equilibrium.
    Methods return n times the weights, which are integers; a pair runs for at most `max_steps`.
    """

    lag: int = eqx.field(static=True)
    first: int = eqx.field(static=True)
    last: int = eqx.field(static=True)
    max_steps: int = eqx.field(static=True)

    @property
    def num_samples(self) -> int:
        return self.last - self.first + 1

    def counted(self, t: Int[Array, "*C"]) -> Bool[Array, "*C"]:
        """`n c_t`: whether t is a sample."""
        return (t >= self.first) & (t <= self.last)

    def excess(self, t: Int[Array, "*C"], met: Bool[Array, "*C"]) -> Int[Array, "*C"]:
        """`n e_t`; `met` says that `t ≥ τ`."""
        # n e_t is the number of samples from which t is reached by whole lags: of the j ≥ 1 with
        # first ≤ t − jL ≤ last. H is the sum over samples of φ(X_t) + Σ_{j≥1} (φ(X_{t+jL}) −
        # φ(Y_{t+(j−1)L})), collected by time.
        begin = (t - self.first) // self.lag
        # ⌈a/L⌉ = −⌊−a/L⌋.
        end = -(-jnp.maximum(self.lag, t - self.last) // self.lag)
        return jnp.where((t >= self.first + self.lag) & ~met, begin - end + 1, 0)


class Second(eqx.Module):
    """The second chain. `time` is t, of the primal, where the present step began; `together` says
    that the two are at the same place now, in all that f still looks at; `met` that they had met
    when the step began, and `meeting` when they did, −1 if they had not.
    """

    time: Int[Array, "*C"]
    state: State
    past: Value | None
    together: Bool[Array, "*C"]
    met: Bool[Array, "*C"]
    meeting: Int[Array, "*C"]

    @staticmethod
    def start(state: State, past: Value | None, primal: State) -> Second:
        """At its start; `past` is the primal's, whose form it has."""
        if past is not None:
            lag = jax.tree.leaves(past.primal)[0].shape[0]
            past = Value(trees.repeat(state.x, lag))
        time, no = jnp.full((), -1), jnp.zeros((), bool)
        return Second(time, state, past, trees.equal(state.x, primal.x), no, time)

    def begin(self, schedule: PairSchedule) -> Second:
        """Before a step."""
        met, meeting = self.now(schedule)
        return dataclasses.replace(self, time=self.time + 1, met=met, meeting=meeting)

    def now(self, schedule: PairSchedule) -> tuple[Bool[Array, "*C"], Int[Array, "*C"]]:
        """Return if they have met by now, after a step, and when."""
        now = self.time + 1
        # τ = min{t ≥ L : X_t = Y_{t−L}}: until t = L the second chain waits at Y_0, and to be equal
        # there is not to meet.
        met = self.met | (self.together & (now >= schedule.lag))
        return met, jnp.where(met & ~self.met, now, self.meeting)

    def look_back(self, schedule: PairSchedule) -> Second:
        """Before a step, where f looks at earlier states: the present becomes past, once it
        moves.
        """
        assert self.past is not None
        shifted = remember(self.past, Value(self.state.x))
        return dataclasses.replace(
            self, past=trees.select(self.time >= schedule.lag, shifted, self.past)
        )

    def after(self, step: Step, primal: Transition, schedule: PairSchedule) -> Second:
        """After an update, `step` being its own."""
        moved = trees.select(self.time >= schedule.lag, step.after, self.state)
        # One chain from the meeting on, whatever rounding makes of two copies of one step.
        state, past = moved, self.past
        if past is not None:
            past = trees.select(self.met, without_tangents(primal.past), past)
        state = trees.select(self.met, as_second(primal.step.after, moved), moved)
        # Equal places with different pasts still differ in a function of both, so pasts are
        # compared too.
        here = (primal.step.after.x, without_tangents(primal.past))
        return dataclasses.replace(
            self, state=state, past=past, together=trees.equal((state.x, past), here)
        )


def as_second(primal: State, like: State) -> State:
    """The primal's state in the second chain's form, which may lack tangents."""
    state = State(primal.x, primal.cache)
    same = jax.tree.structure(state) == jax.tree.structure(like)
    return state if same else without_tangents(state)


def transition(at: Transition, second: State, parameters: Parameters) -> Step:
    """The second chain's step beside the primal's, its values rounded alike in every program. With
    derivatives where `parameters` differentiate; else only `.after` is known.
    """
    update, name = at.update, at.update.name_in_messages

    def primal_and_rest(step, second, noise, coupling_noise):
        if parameters.differentiate:
            made = update.coupled_transition(parameters, step, second, noise, coupling_noise)
        else:
            plain = without_tangents(step)
            after = update.coupled_step(parameters, plain, second, noise, coupling_noise)
            made = Step(second, after)
        checked_state(made.after, second, f"{name}.coupled_step")
        return without_tangents((made.after.x, made.after.cache)), made

    # To meet is to be equal bit for bit: rounding must not depend on the program around the step,
    # or a value and its derivative would come from pairs that met at different times.
    fixed = rounding.with_fixed_rounding(primal_and_rest, parameters.barriers.opaque_false[0])
    return fixed(at.step, second, at.noise, at.own_noise.coupling)[1]


def weigh(weight: Int[Array, ""] | int, value: Any) -> Float[Array, "..."]:
    """`weight · value`, 0 where the weight is: there the value may be infinite."""
    weight = jnp.asarray(weight)
    return jnp.where(weight != 0, weight.astype(value.dtype) * value, 0.0)
