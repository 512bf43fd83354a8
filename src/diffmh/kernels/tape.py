"""The tape of a step: its randomness, one entry for each draw, known ahead.

`Recording` finds out, while a function is traced, which draws it makes; `Playing` runs the function
on a tape. Both are the `Draw` that the function is given. The module `function` explains why that
is right.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from .. import analysis, couplings, proposals
from ..base import trees, validate
from ..base.validate import Checked
from ..core.decisions import Acceptance, Bernoulli, Categorical
from ..core.values import Value
from ..couplings import Coupling
from ..proposals import Proposal

DECISIONS = {"accept": Acceptance, "bernoulli": Bernoulli, "categorical": Categorical}


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
            " `draw.propose`: make it outside of the function, so that it cannot depend on"
            " the function's arguments; or write the move yourself, such as"
            " `x + scale * draw.normal(x.shape)`."
        )

    def _check_place(self, kind: str) -> None:
        """A draw inside of a loop or a branch would be made any number of times."""
        if self._trace != analysis.current_trace():
            raise TypeError(
                f"`{self._name}` calls `draw.{kind}` inside of `jax.lax.cond`, `scan`, `vmap` or"
                " `jit`: the number of draws in a step must be known. Make all draws before it that"
                " may be needed (`draw.uniform((n,))`, or an array of log ratios), and use the"
                " results inside; or write the loop in Python."
            )

    @abstractmethod
    def _decided(self, kind: str, ratio: Array) -> Array:
        """The outcome of a decision."""

    @abstractmethod
    def _noise(self, kind: str, shape: tuple[int, ...]) -> Array:
        """Noise that no parameter enters."""

    @abstractmethod
    def _propose(self, proposal: Proposal, x: PyTree, coupling: Coupling) -> PyTree:
        """The state that is proposed."""


class TapeEntry(NamedTuple):
    """A draw as it is known before any run: its kind and shape, whether its probabilities may
    have a derivative, and whether they (or the state that is moved) depend on earlier outcomes.
    """

    kind: str
    shape: tuple[int, ...] | None
    decides: bool
    depends: bool


class Slot(NamedTuple):
    """Makes the randomness of a draw, for a key and a number of steps: the primal's, and the extra
    that an alternative needs.
    """

    kind: str
    shape: tuple[int, ...] | None
    make: Callable[[Any, int], PyTree]
    make_coupling: Callable[[Any, int], PyTree] | None = None


class Recording(Draw):
    """Notes which draws a function makes, while it is traced. `outcome`, which is traced too,
    stands for the outcomes of all decisions.
    """

    def __init__(self, name: str, outcome: Bool[Array, ""]):
        super().__init__(name)
        self._outcome = outcome
        self.slots: list[Slot] = []
        # What decides each draw: log ratios, or the state that is moved.
        self.deciding: list[PyTree] = []

    def _decided(self, kind, ratio):
        is_choice = kind == "categorical"
        shape = ratio.shape[1:] if is_choice else ratio.shape

        def draw(key, num_steps):
            return jax.random.uniform(key, (num_steps, *shape))

        self._add(Slot(kind, shape, draw), ratio)
        # One traced number for the outcomes of all decisions: what depends on it depends on some
        # earlier outcome, which is all that is asked.
        outcome = self._outcome.astype(int) if is_choice else self._outcome
        return jnp.broadcast_to(outcome, shape)

    def _noise(self, kind, shape):
        self._check_place(kind)
        shape = _checked_shape(shape, f"draw.{kind}(shape)")
        sample = getattr(jax.random, kind)

        def draw(key, num_steps):
            return sample(key, (num_steps, *shape))

        self._add(Slot(kind, shape, draw), None)
        # Noise does not depend on outcomes, and no value of it is looked at: zeros will do for a
        # trace.
        return jnp.zeros(shape)

    def _propose(self, proposal, x, coupling):
        if analysis.is_traced_with(proposal, self._outcome):
            self._refuse_proposal(proposal)
        x = trees.strong(x)
        form = jax.eval_shape(lambda: x)

        def ahead(key, num_steps):
            return proposals.proposal_noise(proposal, key, form, num_steps)

        def beside(key, num_steps):
            return couplings.coupling_noise(coupling, proposal, key, form, num_steps)

        self._add(Slot("propose", None, ahead, beside), x)
        return x

    def _add(self, slot: Slot, deciding: PyTree) -> None:
        self.slots.append(slot)
        self.deciding.append(deciding)


def _checked_shape(shape: Any, where: str) -> tuple[int, ...]:
    lengths = shape if isinstance(shape, tuple | list) else (shape,)
    return tuple(validate.count(length, where, least=0) for length in lengths)


class Noise(eqx.Module):
    """The tape of a step: what each draw is made from."""

    draws: tuple[PyTree, ...]
    entries: tuple[TapeEntry, ...] = eqx.field(static=True)


class Moved(eqx.Module):
    """A proposal of the primal, from `x` to `x_new`."""

    x: PyTree
    x_new: PyTree


class Playing(Draw):
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
        before: Playing | None = None,
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
            outcome = DECISIONS[kind].draw(self._tape.draws[here], Value(ratio)).outcome
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
            # From where the primal was the same noise leads where the primal went, bit for bit,
            # whatever a compiler rounds in this copy.
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

    def _refuse_order(self, here: int, now: str, expected: TapeEntry | None) -> None:
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
