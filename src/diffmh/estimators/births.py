"""Births: the stochastic derivative for very many parameters.

The weight of a candidate is a vector over θ, `w = c · ∂ log odds`, of which only the number c ≥ 0
is needed to prune by (`Decision.flip_rate`). So a slot holds its birth, the states `x` and `y`
between which the decision was, the number c as its weight, and the sum S of `c (f(y_t) − f(x_t))`
over the samples since. A slot whose alternative has met the primal stays as it is until it is given
away: an update closes at most one birth. What is closed is kept until the end of a block of steps;
then `Σ_b S_b ∂ log odds_b` is read off at once, backward (one VJP of
`Σ_b ⟨cotangent, S_b⟩ log odds_b`), forward (one JVP of all odds) or chain by chain.
The density is differentiated once for each birth that was kept, and nothing of the size of
parameters × outputs exists unless it is asked for.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..base import trees
from ..core import alternatives, values
from ..core.alternatives import Alternatives, OwnNoise, Transition
from ..core.estimator import Estimator, Observation, Problem
from ..core.kernel import Kernel, Update
from ..core.odds import IndexedOdds, distinct_odds, odds_of, same_odds
from ..core.parameters import has_reverse_mode
from .birth_readout import (
    Backward,
    Birth,
    Closed,
    Forward,
    Kept,
    Place,
    Rows,
    matched_odds,
)
from .birth_recorder import BirthRecorder, pulled, pushed


class Open(eqx.Module):
    """One chain's slots: alternatives whose weight is the number c, their births, and their sums S
    by share and output (their pairing with the cotangent alone, where that is known); what the
    present step closed; and the cotangent, if it is known.
    """

    slots: Alternatives
    birth: Birth
    total: Float[Array, "K n S"]
    closed: Closed
    cotangent: Float[Array, "F"] | None

    @property
    def weight(self) -> Float[Array, "K 1"]:
        return self.slots.weight

    @property
    def alive(self) -> Bool[Array, "K"]:
        return self.slots.alive


class Births(Estimator):
    """`StochasticDerivative` for very many parameters; `StochasticDerivative(births=True)` makes
    it. `reading` is how births become a derivative, and `explicit` whether f has one of its own.
    """

    alternatives: int = eqx.field(static=True)
    reading: Backward | Forward | Rows = Rows()
    explicit: bool = eqx.field(static=True, default=False)
    differentiates_steps: ClassVar[bool] = False
    differentiates_f: ClassVar[bool] = False
    both_ways = (pushed, pulled)

    def refuse(self, kernel, num_parameters, lag):
        unknown = [update for update in kernel.updates() if None in odds_of(update)]
        if unknown:
            raise ValueError(
                "`StochasticDerivative(births=True)` needs `flip_odds`, the log odds of a decision"
                f" as a function of theta and two states, and `{unknown[0].name_in_messages}` has"
                " none. Kernels whose moves depend on theta (a step size, Langevin, Hamiltonian)"
                " cannot have them. Use births=False."
            )

    def own_noise(self, update, key, x, num_steps):
        return OwnNoise.draw(update, key, x, num_steps)

    def start(self, at: Observation) -> Open:
        count, x, dtype = self.alternatives, at.state.x, at.parameters.dtype
        num_outputs = 1 if self.reading.knows_cotangent else at.value.primal.size
        value = at.value.primal.dtype
        none = jnp.zeros(count, int)
        indexed = any(isinstance(odds, IndexedOdds) for odds in distinct_odds(at.kernel))
        x = trees.repeat(x, count)
        birth = Birth(x, x, none, none if indexed else None)
        total = jnp.zeros((count, self.reading.num_shares, num_outputs), value)
        # One update closes one birth at most; several may close each slot's once.
        num_closed = 1 if isinstance(at.kernel, Update) else count
        first = lambda leaf: leaf[:num_closed]
        return Open(
            alternatives.none_yet(at.state, at.past, count, 1, dtype),
            birth,
            total,
            jax.tree.map(first, Closed(birth, total)),
            jnp.zeros_like(at.value.primal) if self.reading.knows_cotangent else None,
        )

    def begin(self, memory: Open):
        return eqx.tree_at(lambda m: m.closed.total, memory, jnp.zeros_like(memory.closed.total))

    def look_back(self, memory: Open):
        return dataclasses.replace(memory, slots=alternatives.look_back(memory.slots))

    def advance(self, memory: Open, at: Transition):
        rates = _rates(at) if at.step.decisions else None
        slots, events = alternatives.follow(memory.slots, at, rates)
        if rates is None:
            return dataclasses.replace(memory, slots=slots), events
        born, count = events.born, memory.total.shape[0]
        kind, index = _kind_and_index(at, events.picked)
        # A slot is given away by its next birth alone: what its last one summed up is closed then,
        # and the new sum begins at 0.
        newborn = Birth(
            trees.repeat(at.step.after.x, count),
            slots.state.x,
            jnp.full(count, kind),
            None if memory.birth.index is None else jnp.full(count, index),
        )
        memory = Open(
            slots,
            trees.select(born, newborn, memory.birth),
            jnp.where(born[:, None, None], 0.0, memory.total),
            _closed(memory, born),
            memory.cotangent,
        )
        return memory, events

    def note(self, memory: Open, at: Observation, shares):
        """`S += c (f(y) − f(x))` in every share of the run that the step belongs to."""
        plain, slots = at.parameters.value_only(), memory.slots

        def change(place):
            outputs = at.observable(plain, *place).primal - at.value.primal
            if memory.cotangent is None:
                return outputs
            return jnp.sum(outputs * memory.cotangent)[None]

        changes = values.each_slot(change, (slots.state.x, slots.past))
        gain = jnp.where(slots.alive[:, None], slots.weight * changes, 0.0)
        counts = (shares > 0)[None, :, None]
        total = memory.total + jnp.where(counts, gain[:, None, :], 0.0).astype(memory.total.dtype)
        memory = dataclasses.replace(memory, total=total)
        # Forward, f's own derivative is observed step by step.
        later = self.explicit and not isinstance(self.reading, Forward)
        return memory, Kept(memory.closed, Place(at.state.x, at.past, shares) if later else None)

    def observe(self, memory: Open, at: Observation):
        match self.reading:
            case Rows():
                return self.reading.nothing(at)
            case Forward() if self.explicit:
                return self.reading.explicit(at)
        return None

    def derivative(self, means, value):
        return means

    def recorder(self, averages):
        return BirthRecorder(averages, self)


def _rates(at: Transition) -> Float[Array, "1 *C"]:
    """The numbers c of a step's candidates; 0 where one is known to lead nowhere else."""
    rates = alternatives.flip_rate(at.step)
    if rates.size > 1:
        return alternatives.without_idle(at, rates)
    # Rates are known without the derivative, which is what makes an idle accept weigh nothing.
    other = alternatives.flipped(at, jnp.zeros((), int))
    return jnp.where(trees.equal(other.x, at.step.after.x), 0.0, rates)


def _kind_and_index(
    at: Transition, candidate: Int[Array, ""] | None
) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """By which of the kernel's odds a birth of this candidate is read."""

    def of(odds):
        index = odds.index if isinstance(odds, IndexedOdds) else 0
        return jnp.asarray(_number(at, odds)), jnp.asarray(index, int)

    (first, odds), *others = matched_odds(at.update, at.step)
    found, begin = of(odds), first.num_candidates
    for decision, odds in others:
        assert candidate is not None
        found = trees.select(candidate < begin, found, of(odds))
        begin += decision.num_candidates
    return found


def _number(at: Transition, own: Any) -> int:
    """The number of some odds among those of the kernel."""
    assert at.kernel is not None
    known = distinct_odds(at.kernel)
    found = [number for number, odds in enumerate(known) if same_odds(odds, own)]
    if not found:
        raise ValueError(
            f"the log odds of `{type(at.update).__name__}` differ from site to site of a sweep (its"
            " `log_density` or `logits` is made anew for each, or holds arrays that vary), and"
            " `StochasticDerivative(births=True)` needs one function of the states for all sites."
            " Define the density once, outside of `kernel_at`, or use births=False."
        )
    return found[0]


def _closed(memory: Open, born: Bool[Array, "K"]) -> Closed:
    """The births that the step has closed, after an update that gave away the slots `born`."""
    closing = born & jnp.any(memory.total != 0, axis=(1, 2))
    here, before = Closed(memory.birth, memory.total), memory.closed
    if before.total.shape[0] == closing.shape[0]:
        return trees.select(closing, here, before)
    # At most one closes. Written out: an index of its own for each chain is slow.
    for slot in range(closing.shape[0]):
        own = jax.tree.map(lambda leaf, slot=slot: leaf[slot][None], here)
        before = trees.select(closing[slot][None], own, before)
    return before


def applicable(kernel: Kernel) -> bool:
    """False where births do not apply: where odds are not known, or a sweep makes them anew for
    each site, so that a birth does not say by which of them it is read.
    """
    # Odds that are made anew for each call are different objects, as both are alive here: then a
    # birth does not say which site's they were.
    here, again = (
        [odds for update in kernel.updates() for odds in odds_of(update)] for _ in range(2)
    )
    known = all(odds is not None for odds in here)
    return known and all(same_odds(odds, other) for odds, other in zip(here, again, strict=True))


def readable(found: Births, problem: Problem, asked: bool | None) -> Births | None:
    """The estimator for a problem, or `None` where births cannot be read, which is done backward.
    Refused if births were asked for.
    """
    known = distinct_odds(problem.kernel)

    def odds(theta, x):
        return jnp.stack([odds(theta, x, x, *problem.args) for odds in known])

    read = (odds, problem.f) if problem.f_depends_on_theta else (odds,)
    if all(has_reverse_mode(function, problem.theta, problem.x) for function in read):
        return dataclasses.replace(found, explicit=problem.f_depends_on_theta)
    if asked:
        raise ValueError(
            "`StochasticDerivative(births=True)` differentiates `log_density` and `f` backward, and"
            " a `while_loop`, or a `fori_loop` with traced bounds, has only a forward derivative:"
            " use births=False, or `jax.lax.scan`."
        )
    return None
