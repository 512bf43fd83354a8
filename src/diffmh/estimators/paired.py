"""Pairs of chains: what a pair carries and observes, for the equilibrium's derivative and for the
finite chain's with the covariance as its control.

With X, Y, c_t and e_t of `core.pair`, and G_t the sum over all later steps of what a birth in the
step from t to t + 1 contributes,

    D = Σ_t (c_t + e_t) G^X_t − Σ_t e_t G^Y_{t−L} + H(∂f)

has the mean of the equilibrium's derivative. e_t is known when the birth happens: it depends on t
and on whether the chains have met. So D is the sum over two sets of slots, of X and of Y, whose
births are scaled. A pair is finished when t > last, the chains have met and all slots are empty.
"""

from __future__ import annotations

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..core import alternatives, pair
from ..core.alternatives import Alternatives, OwnNoise, Transition
from ..core.estimator import Estimator, Observation, SecondOrder, ValueOnly
from ..core.pair import PairSchedule, Second, weigh
from ..core.values import Value
from . import mixing
from .covariance import Covariance
from .covariance_hessian import CovarianceHessian, Origin
from .mixing import PairTerms
from .pair_recorder import PairRecorder


class Pair(eqx.Module):
    """The second chain beside a primal, and the alternatives of both.

    `slots` are the primal's; `corrections` are further ones of the primal, for the finite chain
    only; `second_slots` are those of the second chain. `origin` is the score at the start, and
    `origins` what second derivatives need there.
    """

    second: Second
    slots: Alternatives | None
    corrections: Alternatives | None
    second_slots: Alternatives | None
    origin: Float[Array, "P *C"] | None
    origins: Origin | None = None

    @property
    def weight(self) -> Float[Array, "K P"]:
        """The weights of the primal's slots, which a report counts."""
        if self.slots is None:
            raise AttributeError("a pair without alternatives")
        return self.slots.weight

    @property
    def alive(self) -> Bool[Array, "K"]:
        if self.slots is None:
            raise AttributeError("a pair without alternatives")
        return self.slots.alive

    @property
    def idle(self) -> Bool[Array, "*C"]:
        """True if all slots are empty; of one chain or, chains last, of several."""
        return self._empty(self.slots) & self._empty(self.corrections) & self.second_idle

    @property
    def second_idle(self) -> Bool[Array, "*C"]:
        """True if the second chain's slots are empty."""
        return self._empty(self.second_slots)

    def _empty(self, slots: Alternatives | None) -> Bool[Array, "*C"]:
        if slots is None:
            return jnp.ones_like(self.second.met)
        # A slot is empty if and only if its weight is 0 for every parameter.
        return jnp.all(slots.weight == 0, axis=(0, 1))


class PairEstimator(SecondOrder):
    """Pairs of chains with `alternatives` slots for each chain, and the sums of the covariance if
    `covariance`; with neither, the value alone. `finite`: F of the finite chain, and `F − D`.
    `twice`: the covariance's identities hold, so that there are second derivatives of the
    equilibrium, for which it observes the `cumulants`.
    """

    schedule: PairSchedule
    alternatives: int = eqx.field(static=True)
    covariance: bool = eqx.field(static=True)
    finite: bool = eqx.field(static=True, default=False)
    twice: bool = eqx.field(static=True, default=False)
    cumulants: CovarianceHessian | None = None
    # All pairs have met, and the second chains' slots are empty: they are the primals.
    merged: bool = eqx.field(static=True, default=False)
    # Before the samples: c_t = e_t = 0, so there are no births and nothing is added up.
    burning_in: bool = eqx.field(static=True, default=False)
    carries_tangents = False
    has_second_start = True

    @property
    def differentiates_steps(self) -> bool:  # pyright: ignore
        return self.alternatives > 0

    @property
    def differentiates_f(self) -> bool:  # pyright: ignore
        return self.alternatives > 0 or self.covariance

    def for_value(self):
        if self.finite:
            return ValueOnly()
        return PairEstimator(self.schedule, 0, False)

    @property
    def first_order(self) -> Estimator:
        return dataclasses.replace(self, cumulants=None)

    def second_order(self):
        if not self.twice:
            return None
        return dataclasses.replace(self, cumulants=CovarianceHessian(Covariance()))

    def along(self, direction):
        assert self.cumulants is not None
        return dataclasses.replace(self, cumulants=self.cumulants.along(direction))

    def most_steps(self, num_steps):
        return self.schedule.max_steps

    def recorder(self, averages):
        return PairRecorder(self, averages.diagnose)

    def own_noise(self, update, key, x, num_steps):
        # One draw of the coupling's for both chains' alternatives and the second chain. All sets of
        # slots prune by one uniform: the mean of each is right by itself.
        return OwnNoise.draw(update, key, x, num_steps, prunes=self.alternatives > 0)

    def start(self, at):
        size, dtype = at.parameters.size, at.parameters.dtype
        own = at.state if at.second is None else at.second
        second = Second.start(pair.as_second(own, own), at.past, at.state)

        def slots(wanted: bool) -> Alternatives | None:
            if not wanted or not self.alternatives:
                return None
            return alternatives.none_yet(at.state, at.past, self.alternatives, size, dtype)

        # A covariance does not see a constant, and without it float32 loses fewer digits of H(f s)
        # − H(f) H(s).
        origin = _score(at) if self.covariance else None
        origins = None if self.cumulants is None else self.cumulants.start(at)
        return Pair(second, slots(True), slots(self.finite), slots(True), origin, origins)

    def begin(self, memory: Pair):
        return dataclasses.replace(memory, second=memory.second.begin(self.schedule))

    def look_back(self, memory: Pair):
        back = lambda slots: None if slots is None else alternatives.look_back(slots)
        return dataclasses.replace(
            memory,
            second=memory.second.look_back(self.schedule),
            slots=back(memory.slots),
            corrections=back(memory.corrections),
            second_slots=back(memory.second_slots),
        )

    def advance(self, memory: Pair, at):
        if not self.merged:
            memory = self._second_step(memory, at)
        if memory.slots is None or self.burning_in:
            return memory, None
        # `met` is of the beginning of the step, which e_t may depend on: if it depended on what the
        # step decides, E[e_t G_t] would not be E[e_t E(G_t | X_t)].
        t, excess = memory.second.time, self._excess(memory.second.time, memory.second.met)
        counted = self.schedule.counted(t).astype(int)
        # Of the finite chain: F's births are 0 ≤ t < last, of which D counts those from `first` on,
        # to their end; and that of t = last, whose sum begins after the samples.
        scale = (t <= self.schedule.last).astype(int) if self.finite else counted + excess
        slots, events = alternatives.follow(memory.slots, at, _scaled_flips(at, scale))
        corrections = memory.corrections
        if corrections is not None:
            scale = (t < self.schedule.first).astype(int) - excess
            corrections, _ = alternatives.follow(corrections, at, _scaled_flips(at, scale))
        return dataclasses.replace(memory, slots=slots, corrections=corrections), events

    def _excess(self, t: Int[Array, ""], met: Bool[Array, ""]) -> Int[Array, ""] | int:
        """`n e_t`, with `met` at t."""
        return 0 if self.merged else self.schedule.excess(t, met)

    def _second_step(self, memory: Pair, at: Transition) -> Pair:
        """The step of the second chain and its alternatives."""
        second, slots = memory.second, memory.second_slots
        parameters = at.parameters if self.alternatives else at.parameters.value_only()
        step = pair.transition(at, second.state, parameters)
        after = second.after(step, at, self.schedule)
        if slots is None or self.burning_in:
            return dataclasses.replace(memory, second=after)
        # Beside the primal's step with the second chain's own coupling noise: each of them is a
        # function of the primal's step, that noise and its own state. So an alternative that is
        # where the second chain is stays there, and has by itself the law of the kernel.
        moved = alternatives.propagate(slots, at)
        here = dataclasses.replace(step, after=after.state)
        beside = dataclasses.replace(at, step=here, past=after.past)
        excess = self._excess(second.time, second.met)
        # D has −Σ e_t G^Y_{t−L}, and F − D its opposite.
        flips = _scaled_flips(beside, jnp.asarray(excess if self.finite else -excess))
        slots, _ = alternatives.settle(moved, beside, flips)
        return dataclasses.replace(memory, second=after, second_slots=slots)

    def observe(self, memory: Pair, at: Observation) -> PairTerms:
        """The terms of t, where the primal is now."""
        terms = self._terms(memory, at)
        # Zeros of their form: the compiler drops the terms themselves.
        return jax.tree.map(jnp.zeros_like, terms) if self.burning_in else terms

    def _terms(self, memory: Pair, at: Observation) -> PairTerms:
        second, schedule = memory.second, self.schedule
        t, (met, _) = second.time + 1, second.now(schedule)
        excess = self._excess(t, met)
        counted = schedule.counted(t).astype(int)
        here = self._functions(memory, at)
        apart = here if self.merged else self._functions(memory, self._at_second(memory, at))

        def average(here, there):
            """Its term of H."""
            own = weigh(counted + excess, here)
            return own if self.merged else own - weigh(excess, there)

        terms = jax.tree.map(average, here, apart)
        derivative = correction = None
        if self.alternatives:
            derivative, correction = self._carried(memory, at, t)
            if self.finite:
                assert correction is not None
                derivative = derivative + weigh(counted, here.explicit)
                correction = correction + weigh(counted, here.explicit) - terms.explicit
            else:
                derivative = derivative + terms.explicit
        plain = weigh(counted, here.value) if self.finite else None
        explicit = terms.explicit if self.covariance else None
        return dataclasses.replace(
            terms, plain=plain, derivative=derivative, correction=correction, explicit=explicit
        )

    def _functions(self, memory: Pair, at: Observation) -> PairTerms:
        """The terms at one place: f, s less its value at the start, f s, ∂f, and the moments."""
        value = at.value.primal
        explicit = score = product = moments = None
        if self.differentiates_f:
            shape = (at.parameters.size, value.size)
            explicit = jnp.broadcast_to(at.explicit, shape).astype(value.dtype)
        if self.covariance:
            assert memory.origin is not None
            score = _score(at) - memory.origin
            product = score[:, None] * value[None, :]
        if self.cumulants is not None:
            assert memory.origins is not None
            moments = self.cumulants.observe(memory.origins, at)
            # The origins are no average: they are the memory's.
            moments = dataclasses.replace(moments, origin=None)
        return PairTerms(value, product=product, score=score, explicit=explicit, moments=moments)

    @staticmethod
    def _at_second(memory: Pair, at: Observation) -> Observation:
        second = memory.second
        value = at.observable(at.parameters, second.state.x, second.past)
        return dataclasses.replace(at, state=second.state, past=second.past, value=value)

    def _carried(
        self, memory: Pair, at: Observation, t: Int[Array, ""]
    ) -> tuple[Array, Array | None]:
        """The alternatives' sum, without ∂f: D; or, of the finite chain, F and F − D."""
        plain = at.parameters.value_only()
        f = lambda place: at.observable(plain, *place).primal
        second, schedule = memory.second, self.schedule
        assert memory.slots is not None and memory.second_slots is not None

        own = alternatives.differences(memory.slots, f, at.value.primal)
        others = 0.0
        if not self.merged:
            there = f((second.state.x, second.past))
            others = alternatives.differences(memory.second_slots, f, there)
        if not self.finite:
            return own + others, None
        # F counts r from first to last. F − D: all later r of the births before `first`, which
        # `corrections` has with those of −e_t, less the r > last of all births up to `last`. The
        # births before `first` are in both, and what is left of them is r ≤ last.
        assert memory.corrections is not None
        late = (t > schedule.last).astype(int)
        further = alternatives.differences(memory.corrections, f, at.value.primal)
        further = weigh((t >= schedule.first).astype(int), further)
        finite = weigh(schedule.counted(t).astype(int), own)
        return finite, further - weigh(late, own) + others

    def derivative(self, means: PairTerms, value):
        return mixing.mixed(means, value)

    def second_derivative(self, means: PairTerms, value):
        # Each H is unbiased and pairs are independent, so products of the means of different pairs
        # are unbiased too: what holds for chains at equilibrium holds for pairs.
        assert self.cumulants is not None and means.moments is not None
        return self.cumulants.second_derivative(means.moments, value)


def _scaled_flips(at: Transition, scale: Int[Array, ""]) -> Float[Array, "P *C"] | None:
    """The weights of the flips of a step, times a scale; exactly 0 where that is."""
    if not at.step.decisions:
        return None
    return weigh(scale, alternatives.flip_weight(at.step, "two-sided"))


def _score(at: Observation) -> Float[Array, "P"]:
    """`∂ log g` where the chain is: what the kernel has cached there, if it is that."""
    # The covariance is refused unless all updates have one density (`no_covariance`), so the first
    # speaks for all.
    update, cache = at.kernel.updates()[0], at.state.cache
    cached = isinstance(cache, Value) and cache.tangent is not None
    if cached and update.cached_function is update.density_identity:
        return cache.tangent  # pyright: ignore
    return at.parameters.evaluate(update.log_density, at.state.x).tangent
