"""A kernel written as a function of draws: `diffmh.extend.update`.

The function is run on a *tape*: the randomness of a step, one entry for each draw, known ahead.

- The primal plays the tape: each decision compares its entry with its own probability.
- An alternative's step plays the same tape from another state. Given what both chains drew so far,
  an entry is fresh, so whatever is drawn from it (`propose`: by a coupling) has the law that the
  alternative's own past asks for. By induction over the entries its step has the right law; and
  chains that have met draw the same.
- A flip plays it from the same state with one outcome replaced. Let `G_j` be the mean of what
  follows, given the draws before decision k and its outcome j. The derivative of the step's mean is
  the sum over k of `E Σ_j dp_j G_j`, where `dp_j` is taken with the outcomes before k fixed, and
  flips from i to j of weights `w_ij` carry `Σ_i p_i Σ_j w_ij (G_j − G_i)`, which is the same
  (`decisions`). Later entries are independent of outcome k, so playing them on from the flipped
  outcome, at their own new probabilities, has the mean `G_j`. A decision may therefore depend on
  the outcomes before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array, Float, Key, PyTree

from .. import analysis
from ..base import trees, validate
from ..base.validate import Checked
from ..core.decisions import Decision
from ..core.kernel import OfDensity, State, Step, Update
from ..core.parameters import Parameters
from ..core.values import Value
from .tape import DECISIONS, Draw, Moved, Noise, Playing, Recording, Slot, TapeEntry


class Played(Step):
    """A step of a function of draws: where its proposals led, the outcomes of decisions whose
    probabilities have no derivative, and the parameters and data that it was run with.
    """

    moves: tuple[Moved | None, ...] = ()
    others: tuple[Array | None, ...] = ()
    theta: PyTree = None
    arrays: PyTree = None
    rest: PyTree = eqx.field(static=True, default=None)


class FunctionUpdate(OfDensity, Update):
    """A function of draws as a kernel: `diffmh.extend.update`."""

    function: Callable[..., PyTree]
    # How its draws are made, where that is known: `prepared`.
    slots: tuple[Slot, ...] | None = None
    entries: tuple[TapeEntry, ...] | None = None

    @property
    def name_in_messages(self) -> str:
        return getattr(self.function, "__name__", type(self.function).__name__)

    def prepared(self, theta, x, args):
        """Its draws, as a trace finds them."""
        arrays, rest = eqx.partition(args, eqx.is_array)
        draws: list[Recording] = []

        def record(outcome, of, arrays):
            draw = Recording(self.name_in_messages, outcome)
            self._call(draw, of[0], of[1], eqx.combine(arrays, rest))
            draws.append(draw)
            return tuple(draw.deciding)

        outcome = jax.ShapeDtypeStruct((), bool)
        # A decision whose ratio depends neither on θ nor on the state has no derivative, and no
        # flips.
        by_outcome, by_state, _ = analysis.dependence(record, outcome, (theta, x), arrays)
        slots = tuple(draws[-1].slots)

        def entry(slot: Slot, depends: PyTree, moves: PyTree) -> TapeEntry:
            decides = slot.kind in DECISIONS and any(jax.tree.leaves(moves))
            return TapeEntry(slot.kind, slot.shape, decides, any(jax.tree.leaves(depends)))

        entries = tuple(
            entry(slot, depends, moves)
            for slot, depends, moves in zip(slots, by_outcome, by_state, strict=True)
        )
        return FunctionUpdate(self.density, self.function, slots, entries)

    def noise(self, key, x, num_steps):
        assert self.entries is not None, "not `prepared`"
        draws = tuple(slot.make(key, num_steps) for slot, key in self._with_keys(key))
        return Noise(draws, self.entries)

    def coupling_noise(self, key, x, num_steps):
        return tuple(
            None if slot.make_coupling is None else slot.make_coupling(key, num_steps)
            for slot, key in self._with_keys(key)
        )

    def _with_keys(self, key: Key[Array, ""]) -> Iterable[tuple[Slot, Key[Array, ""]]]:
        """Each draw with a key of its own."""
        assert self.slots is not None, "not `prepared`"
        return zip(self.slots, jax.random.split(key, len(self.slots)), strict=True)

    def step(self, parameters: Parameters, state: State, noise: Noise) -> Played:
        theta, args = parameters.theta, parameters.args
        draw, after = self._play(theta, state.x, args, noise)
        outcomes, moves, entries = tuple(draw.outcomes), tuple(draw.moves), noise.entries
        # With fixed outcomes everything is smooth in θ, and in a state that has a tangent;
        # where the state has none, proposals are fixed too.
        fixed = tuple(
            outcome if move is None or state.tangent is not None else move.x_new
            for outcome, move in zip(outcomes, moves, strict=True)
        )

        def decision(number: int) -> Decision:
            def ratio(theta, x, fixed, *args):
                return self._play(theta, x, args, noise, fixed, before=draw)[0].ratios[number]

            value = draw.ratios[number]
            slope = parameters.derivative(ratio, value, state.value, fixed)
            return DECISIONS[entries[number].kind](outcomes[number], Value(value, slope))

        def follow(x):
            return self._play(theta, x, args, noise, fixed)[1]

        tangent = None if state.tangent is None else parameters.follow(follow, state.value).tangent
        arrays, rest = eqx.partition(args, eqx.is_array)
        return Played(
            state,
            State(after, None, tangent),
            tuple(decision(number) for number, entry in enumerate(entries) if entry.decides),
            moves=moves,
            others=tuple(
                None if entry.decides else outcome
                for entry, outcome in zip(entries, outcomes, strict=True)
            ),
            theta=theta,
            arrays=arrays,
            rest=rest,
        )

    def coupled_step(self, parameters, step, alternative, noise, coupling_noise):
        assert isinstance(step, Played)
        theta, args = parameters.theta, parameters.args
        play = self._play(
            theta, alternative.x, args, noise, beside=step.moves, coupling_noise=coupling_noise
        )
        return State(play[1])

    def flipped(self, step, noise, decision, candidate):
        assert isinstance(step, Played)
        entries = noise.entries
        outcomes = list(step.others)
        decided = [number for number, entry in enumerate(entries) if entry.decides]
        for number, made in zip(decided, step.decisions, strict=True):
            outcomes[number] = made.outcome
        # Entries before the flipped one are settled by the primal's run. Those after it are played
        # on with the same randomness, unless nothing that decides them depends on an outcome.
        flipped = decided[decision]
        outcomes[flipped] = step.decisions[decision].flipped_outcome(candidate)

        def settled(number: int) -> PyTree:
            """The outcome that stays as it was: whatever decides it is not computed then."""
            if number > flipped and entries[number].depends:
                return None
            move = step.moves[number]
            return outcomes[number] if move is None else move.x_new

        known = [settled(number) for number in range(len(entries))]
        args = eqx.combine(step.arrays, step.rest)
        return State(self._play(step.theta, step.before.x, args, noise, known, step.moves)[1])

    def _play(
        self, theta, x, args, noise: Noise, known=None, beside=None, **how: Any
    ) -> tuple[Playing, PyTree]:
        """The function on a tape: what it drew, and the state that it led to."""
        draw = Playing(self.name_in_messages, noise, known, beside, **how)
        after = self._call(draw, theta, x, args)
        draw.finish()
        return draw, after

    def _call(self, draw: Draw, theta: PyTree, x: PyTree, args: tuple[Any, ...]) -> PyTree:
        name = self.name_in_messages
        after = trees.strong(validate.numbers(self.function(draw, theta, x, *args), f"`{name}`"))
        validate.same_form(after, x, f"what `{name}(draw, theta, x, *args)` returns")
        return after


class Writer(eqx.Module):
    """Makes a kernel of a function of draws; it is not a kernel itself."""

    density: Callable[..., Float[Array, ""]]

    def __call__(self, function: Checked[Callable[..., PyTree]]) -> FunctionUpdate:
        signature = "function(draw, theta, x, *args) -> the next x"
        where = "diffmh.extend.update(log_density)(function)"
        return FunctionUpdate(
            self.density, validate.function(function, where, "function", signature)
        )

    def __repr__(self) -> str:
        name = getattr(self.density, "__name__", self.density)
        return (
            f"`diffmh.extend.update({name})`, which makes a kernel of a function of draws: write"
            " `@diffmh.extend.update(log_density)` above the function"
        )


def update(log_density: Checked[Callable[..., Float[Array, ""]]]) -> Writer:
    """Makes a kernel of a function of draws: `function(draw, theta, x, *args)` returns the next
    state, and whatever is random it takes from `draw` (`Draw`).

    `log_density(theta, x, *args)` is the density that the step leaves invariant.

    θ may enter anywhere in what decides: log ratios, log odds and logits may depend on it, on the
    state and on earlier draws and their outcomes. The state that is returned may depend on θ
    through outcomes only. The function is called several times per step and must make the same
    draws in the same order each time; loops around draws are Python's.

    Refused: θ that reaches the state other than through outcomes; a draw inside of `jax.lax.cond`,
    `scan`, `vmap` or `jit`; a result of another form than the state's.

    >>> import jax, jax.numpy as jnp, diffmh
    >>> import diffmh.extend
    >>> density = lambda theta, x: theta * x[0] - 0.3 * x[1]
    >>> @diffmh.extend.update(density)
    ... def swap(draw, theta, x):
    ...     log_ratio = density(theta, x[::-1]) - density(theta, x)
    ...     return jnp.where(draw.accept(log_ratio), x[::-1], x)
    >>> first = diffmh.expectation(
    ...     lambda theta, x: x[0] * 1.0, swap, init=jnp.array([0, 1]), num_samples=20)
    >>> bool(jax.grad(first)(0.5, jax.random.key(0)) > 0)
    True
    """
    return Writer(validate.density(log_density, "diffmh.extend.update(log_density)"))
