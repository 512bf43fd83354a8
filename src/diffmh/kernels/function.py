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

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from .. import analysis, couplings, proposals
from ..base import trees, validate
from ..base.validate import Checked
from ..core.decisions import Acceptance, Bernoulli, Categorical, Decision
from ..core.kernel import State, Step, Update
from ..core.parameters import Parameters
from ..core.values import Value
from ..couplings import Coupling
from ..proposals import Proposal

_DECISIONS = {"accept": Acceptance, "bernoulli": Bernoulli, "categorical": Categorical}


class Draw:
    """The draws of one step, handed to a function that `diffmh.extend.update` makes a kernel of.

    Decisions, whose probabilities may depend on θ, on the state and on earlier draws. Each takes an
    array of independent ones as well.

    - `accept(log_ratio)`: true with probability `min(1, exp(log_ratio))`;
    - `bernoulli(log_odds)`: true with probability `1/(1 + exp(−log_odds))`;
    - `categorical(logits)`: j with probability `softmax(logits)_j`; the values lead.

    Noise: `uniform(shape)` on [0, 1), `normal(shape)`, and `propose(proposal, x)`.
    """

    def __init__(self, name: str):
        self._name, self._trace = name, analysis.current_trace()

    def accept(self, log_ratio: Checked[Float[Array, "*D"]]) -> Bool[Array, "*D"]:
        """Accept or reject: true with probability `min(1, exp(log_ratio))`."""
        return self._decide("accept", log_ratio)

    def bernoulli(self, log_odds: Checked[Float[Array, "*D"]]) -> Bool[Array, "*D"]:
        """True with probability `1/(1 + exp(−log_odds))`."""
        return self._decide("bernoulli", log_odds)

    def categorical(self, logits: Checked[Float[Array, "n *D"]]) -> Int[Array, "*D"]:
        """`j` with probability `softmax(logits)_j`: the n values are the leading axis."""
        return self._decide("categorical", logits)

    def uniform(self, shape: tuple[int, ...] = ()) -> Float[Array, "..."]:
        """Uniform numbers on [0, 1)."""
        return self._noise("uniform", shape)

    def normal(self, shape: tuple[int, ...] = ()) -> Float[Array, "..."]:
        """Standard normal numbers."""
        return self._noise("normal", shape)

    def propose(
        self, proposal: Checked[Proposal], x: PyTree, coupling: Checked[Coupling] | None = None
    ) -> PyTree:
        """`x' ~ q(· | x)`. An alternative proposes beside the primal by the coupling, or by the
        best for the proposal. It accepts nothing: unless the proposal is symmetric, the log ratio
        needs `proposal.log_prob(x', x) − proposal.log_prob(x, x')`.
        """
        self._check_place("propose")
        where = "draw.propose(proposal, x, coupling=None)"
        validate.instance(proposal, Proposal, where, "proposal")
        if coupling is not None:
            validate.instance(coupling, Coupling, where, "coupling")
        return self._propose(proposal, x, couplings.suitable(coupling, proposal))

    def _decide(self, kind: str, given: Any) -> Array:
        self._check_place(kind)
        what = f"what `{self._name}` passes to `draw.{kind}`"
        ratio = validate.array_of(given, what)
        validate.real_dtype(ratio.dtype, what)
        if kind == "categorical" and (ratio.ndim == 0 or ratio.shape[0] < 2):
            raise TypeError(
                f"{what} must have at least two values along its leading axis, got shape"
                f" {ratio.shape}."
            )
        return self._decided(kind, ratio)

    def _refuse_proposal(self, proposal: Proposal) -> None:
        """A coupling is one of two states with the same proposal: it must not depend on them."""
        raise TypeError(
            f"`{self._name}` makes the `{type(proposal).__name__}` that it passes to"
            " `draw.propose`: make it outside of the function, where it depends on nothing that"
            " the function is given; or write the move yourself, such as"
            " `x + scale * draw.normal(x.shape)`."
        )

    def _check_place(self, kind: str) -> None:
        """A draw inside of a loop or a branch would be made any number of times."""
        if self._trace != analysis.current_trace():
            raise TypeError(
                f"`{self._name}` calls `draw.{kind}` inside of `jax.lax.cond`, `scan`, `vmap` or"
                " `jit`: how many draws a step makes must be known. Draw before it, as many as may"
                " be needed (`draw.uniform((n,))`, or an array of log ratios), and use the results"
                " inside; or write the loop in Python."
            )

    @abstractmethod
    def _decided(self, kind: str, ratio: Array) -> Array:
        """The outcome of a decision."""

    @abstractmethod
    def _noise(self, kind: str, shape: tuple[int, ...]) -> Array:
        """Noise that no parameter enters."""

    @abstractmethod
    def _propose(self, proposal: Proposal, x: PyTree, coupling: Coupling) -> PyTree:
        """What is proposed."""


class Entry(NamedTuple):
    """A draw as it is known before any run: its kind and shape, whether its probabilities may
    have a derivative, and whether they (or the state that is moved) depend on earlier outcomes.
    """

    kind: str
    shape: tuple[int, ...] | None
    decides: bool
    depends: bool


class _Slot(NamedTuple):
    """How the randomness of a draw is made, for a key and a number of steps: the primal's, and what
    an alternative needs on top.
    """

    kind: str
    shape: tuple[int, ...] | None
    make: Callable[[Any, int], PyTree]
    make_coupling: Callable[[Any, int], PyTree] | None = None


class _Recording(Draw):
    """Notes which draws a function makes, while it is traced. `outcome`, which is traced too,
    stands for the outcomes of all decisions.
    """

    def __init__(self, name: str, outcome: Bool[Array, ""]):
        super().__init__(name)
        self._outcome = outcome
        self.slots: list[_Slot] = []
        # What decides each draw: log ratios, or the state that is moved.
        self.deciding: list[PyTree] = []

    def _decided(self, kind, ratio):
        is_choice = kind == "categorical"
        shape = ratio.shape[1:] if is_choice else ratio.shape
        draw = lambda key, num_steps: jax.random.uniform(key, (num_steps, *shape))
        self._add(_Slot(kind, shape, draw), ratio)
        outcome = self._outcome.astype(int) if is_choice else self._outcome
        return jnp.broadcast_to(outcome, shape)

    def _noise(self, kind, shape):
        self._check_place(kind)
        shape = _checked_shape(shape, f"draw.{kind}(shape)")
        sample = getattr(jax.random, kind)
        self._add(_Slot(kind, shape, lambda key, num_steps: sample(key, (num_steps, *shape))), None)
        return jnp.zeros(shape)

    def _propose(self, proposal, x, coupling):
        if analysis.is_traced_with(proposal, self._outcome):
            self._refuse_proposal(proposal)
        x = trees.strong(x)
        form = jax.eval_shape(lambda: x)
        ahead = lambda key, num_steps: proposals.proposal_noise(proposal, key, form, num_steps)
        beside = lambda key, num_steps: couplings.coupling_noise(
            coupling, proposal, key, form, num_steps
        )
        self._add(_Slot("propose", None, ahead, beside), x)
        return x

    def _add(self, slot: _Slot, deciding: PyTree) -> None:
        self.slots.append(slot)
        self.deciding.append(deciding)


def _checked_shape(shape: Any, where: str) -> tuple[int, ...]:
    lengths = shape if isinstance(shape, tuple | list) else (shape,)
    return tuple(validate.count(length, where, least=0) for length in lengths)


class Noise(eqx.Module):
    """The tape of a step: what each draw is made from."""

    draws: tuple[PyTree, ...]
    entries: tuple[Entry, ...] = eqx.field(static=True)


class Moved(eqx.Module):
    """A proposal of the primal, from `x` to `x_new`."""

    x: PyTree
    x_new: PyTree


class _Playing(Draw):
    """Plays a tape. For each of its entries `known` is the outcome of a decision, or where a
    proposal led, if it is settled; `beside` are the primal's proposals for a chain that moves
    beside it, with the coupling's randomness or, where that is `None`, by the same noise. What the
    same function played `before` had the same proposals.
    """

    def __init__(
        self,
        name: str,
        noise: Noise,
        known: Sequence[Any] | None = None,
        beside: Sequence[Moved | None] | None = None,
        coupling_noise: Sequence[PyTree] | None = None,
        before: _Playing | None = None,
    ):
        super().__init__(name)
        count, self._before = len(noise.entries), before
        self._tape, self._known = noise, known or (None,) * count
        self._beside, self._coupling_noise = beside or (None,) * count, coupling_noise
        # For each entry the log ratio of a decision, its outcome, and the move of a proposal.
        self.ratios: list[Array | None] = []
        self.outcomes: list[Array | None] = []
        self.moves: list[Moved | None] = []
        self.proposals: list[Proposal] = []

    def _decided(self, kind, ratio):
        here = self._next(kind, ratio.shape[1:] if kind == "categorical" else ratio.shape)
        outcome = self._known[here]
        if outcome is None:
            outcome = _DECISIONS[kind].draw(self._tape.draws[here], Value(ratio)).outcome
        self._add(ratio, outcome, None)
        return outcome

    def _noise(self, kind, shape):
        self._check_place(kind)
        here = self._next(kind, _checked_shape(shape, f"draw.{kind}(shape)"))
        self._add(None, None, None)
        return self._tape.draws[here]

    def _propose(self, proposal, x, coupling):
        here = self._next("propose", None)
        # By identity: what is made outside is one object, whatever it hides from a trace.
        if self._before and self._before.proposals[len(self.proposals)] is not proposal:
            self._refuse_proposal(proposal)
        self.proposals.append(proposal)
        x, x_new = trees.strong(x), self._known[here]
        if x_new is None:
            x_new = self._moved(here, proposal, x, coupling)
            validate.same_form(x_new, x, f"what `{type(proposal).__name__}` proposes")
        self._add(None, None, Moved(x, x_new))
        return x_new

    def _moved(self, here: int, proposal: Proposal, x: PyTree, coupling: Coupling) -> PyTree:
        noise, primal = self._tape.draws[here], self._beside[here]
        if primal is None:
            return proposals.move(proposal, x, noise)
        if self._coupling_noise is None:
            moved = proposals.move(proposal, x, noise)
            return trees.select(trees.equal(primal.x, x), primal.x_new, moved)
        own = self._coupling_noise[here]
        return couplings.couple(coupling, proposal, primal.x, primal.x_new, x, noise, own)

    def _next(self, kind: str, shape: tuple[int, ...] | None) -> int:
        here = len(self.ratios)
        entries = self._tape.entries
        expected = entries[here] if here < len(entries) else None
        if expected is None or (expected.kind, expected.shape) != (kind, shape):
            self._refuse_order(here, _described(kind, shape), expected)
        return here

    def _refuse_order(self, here: int, now: str, expected: Entry | None) -> None:
        before = "no draw" if expected is None else _described(expected.kind, expected.shape)
        raise TypeError(
            f"`{self._name}` must make the same draws in the same order each time that it is"
            f" called: draw {here} was {before}, and now is {now}."
        )

    def _add(self, ratio: Array | None, outcome: Array | None, move: Moved | None) -> None:
        self.ratios.append(ratio)
        self.outcomes.append(outcome)
        self.moves.append(move)

    def finish(self) -> None:
        here, entries = len(self.ratios), self._tape.entries
        if here < len(entries):
            self._refuse_order(here, "no draw", entries[here])


def _described(kind: str, shape: tuple[int, ...] | None) -> str:
    return f"`{kind}`" + (f" of shape {shape}" if shape else "")


class Played(Step):
    """A step of a function of draws: where its proposals led, the outcomes of decisions whose
    probabilities have no derivative, and the parameters and data that it was run with.
    """

    moves: tuple[Moved | None, ...] = ()
    others: tuple[Array | None, ...] = ()
    theta: PyTree = None
    arrays: PyTree = None
    rest: PyTree = eqx.field(static=True, default=None)


class FunctionUpdate(Update):
    """A function of draws as a kernel: `diffmh.extend.update`."""

    function: Callable[..., PyTree]
    density: Callable[..., Float[Array, ""]]
    # How its draws are made, where that is known: `prepared`.
    slots: tuple[_Slot, ...] | None = None
    entries: tuple[Entry, ...] | None = None

    @property
    def name_in_messages(self) -> str:
        return getattr(self.function, "__name__", type(self.function).__name__)

    def log_density(self, theta, x, *args):
        return self.density(theta, x, *args)

    @property
    def target(self) -> Any:
        return self.density

    def prepared(self, theta, x, args):
        """Its draws, as a trace finds them."""
        arrays, rest = eqx.partition(args, eqx.is_array)
        draws: list[_Recording] = []

        def record(outcome, of, arrays):
            draw = _Recording(self.name_in_messages, outcome)
            self._call(draw, of[0], of[1], eqx.combine(arrays, rest))
            draws.append(draw)
            return tuple(draw.deciding)

        outcome = jax.ShapeDtypeStruct((), bool)
        by_outcome, by_state, _ = analysis.dependence(record, outcome, (theta, x), arrays)
        slots = tuple(draws[-1].slots)
        used = lambda tree: any(jax.tree.leaves(tree))
        entries = tuple(
            Entry(slot.kind, slot.shape, slot.kind in _DECISIONS and used(moves), used(depends))
            for slot, depends, moves in zip(slots, by_outcome, by_state, strict=True)
        )
        return FunctionUpdate(self.function, self.density, slots, entries)

    def noise(self, key, x, num_steps):
        assert self.entries is not None, "not `prepared`"
        draws = tuple(slot.make(key, num_steps) for slot, key in self._with_keys(key))
        return Noise(draws, self.entries)

    def coupling_noise(self, key, x, num_steps):
        return tuple(
            None if slot.make_coupling is None else slot.make_coupling(key, num_steps)
            for slot, key in self._with_keys(key)
        )

    def _with_keys(self, key: Key[Array, ""]) -> Iterable[tuple[_Slot, Key[Array, ""]]]:
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
            return _DECISIONS[entries[number].kind](outcomes[number], Value(value, slope))

        follow = lambda x: self._play(theta, x, args, noise, fixed)[1]
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
        flipped = decided[decision]
        outcomes[flipped] = step.decisions[decision].flipped_outcome(candidate)

        def settled(number: int) -> PyTree:
            """What comes out as it did: what decides it is not computed then."""
            if number > flipped and entries[number].depends:
                return None
            move = step.moves[number]
            return outcomes[number] if move is None else move.x_new

        known = [settled(number) for number in range(len(entries))]
        args = eqx.combine(step.arrays, step.rest)
        return State(self._play(step.theta, step.before.x, args, noise, known, step.moves)[1])

    def _play(
        self, theta, x, args, noise: Noise, known=None, beside=None, **how: Any
    ) -> tuple[_Playing, PyTree]:
        """The function on a tape: what it drew, and the state that it led to."""
        draw = _Playing(self.name_in_messages, noise, known, beside, **how)
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
            validate.function(function, where, "function", signature), self.density
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
