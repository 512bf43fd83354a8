"""plots.trace: the path of the primal chain and the alternatives that branch off it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from ..base import validate
from ..base.validate import Checked
from ..reports.display import entries
from ..tools.trace import Trace
from . import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

End = Literal["recoupled", "pruned", "alive"]


class Span(NamedTuple):
    """The steps `birth, ..., stop - 1` (from 0) after which a slot held one alternative, and the
    reason why it ended in step `stop`: it met the primal ("recoupled"), another was born and took
    its slot ("pruned"), or the trace ended ("alive").
    """

    birth: int
    stop: int
    end: End


def spans(
    alive: Bool[np.ndarray, "n"], born: Bool[np.ndarray, "n"], recoupled: Bool[np.ndarray, "n"]
) -> list[Span]:
    """The alternatives of one slot, in order, without those that were born and met the primal
    within one step.

    >>> import numpy as np
    >>> flags = lambda text: np.array([letter == "1" for letter in text])
    >>> spans(flags("110111"), born=flags("100101"), recoupled=flags("001000"))
    [Span(birth=0, stop=2, end='recoupled'), Span(birth=3, stop=5, end='pruned'),
     Span(birth=5, stop=6, end='alive')]
    """
    found = []
    # A slot holds one alternative at a time: a birth ends the previous one. An alternative that is
    # no longer alive after a step has met the primal or was replaced.
    for birth in map(int, np.flatnonzero(born & alive)):
        stop = birth + 1
        while stop < len(alive) and alive[stop] and not born[stop]:
            stop += 1
        if stop == len(alive):
            end: End = "alive"
        else:
            end = "recoupled" if recoupled[stop] else "pruned"
        found.append(Span(birth, stop, end))
    return found


class Branch(NamedTuple):
    """The line of an alternative: one entry of its state, starting from the primal's before the
    birth at step `start`, one value for each step, and the weight of each segment.
    """

    start: int
    values: np.ndarray
    weights: np.ndarray
    end: End

    @property
    def last(self) -> int:
        return self.start + len(self.weights)


def branch(span: Span, path: np.ndarray, alternative: np.ndarray, weight: np.ndarray) -> Branch:
    """`path` begins with the start, so step t is `path[t]`; the other arrays begin at step 1. The
    line ends at the primal if it met it, otherwise where it was pruned.
    """
    # One more value than weights: each segment lies between two values.
    met = span.end == "recoupled"
    kept = slice(span.birth, span.stop)
    values = [path[span.birth], *alternative[kept], *path[span.stop + 1 :][:met]]
    weights = [*weight[kept], *weight[kept][-1:][:met]]
    return Branch(span.birth, np.array(values), np.array(weights), span.end)


def trace(
    trace: Checked[Trace], *, steps: Checked[tuple[int, int]] | None = None, most: Checked[int] = 4
) -> Figure:
    """A chain's path (grey) and its alternatives (red), one panel per entry of the state, with the
    weights of the alternatives below.

    An alternative is a second path that branches off where a decision could have had another
    outcome. Its line is the stronger the larger its weight (for a vector of weights, the norm). It
    ends where it meets the path; a cross marks one that was pruned, because another took its slot.

    **Arguments**

    - `trace`: the result of `diffmh.trace`.
    - `steps`: the first and the last step to show; by default all. Step 0 is the start.
    - `most`: the largest number of entries of the state to show, in the order of its leaves.

    **Refused**: steps that the trace does not have.

    >>> import jax, diffmh
    >>> from diffmh.models import gaussian
    >>> path = diffmh.trace(gaussian.sampler(), 0.5, jax.random.key(0), init=0.0, num_steps=200)
    >>> figure = diffmh.plots.trace(path, steps=(50, 100))
    >>> [ax.get_ylabel() for ax in figure.axes]
    ['x', 'weight']
    """
    validate.instance(trace, Trace, "plots.trace(trace)", "trace")
    most = validate.count(most, "plots.trace(most=...)")
    alive = np.asarray(trace.alive)
    low, high = _window(steps, len(alive))
    weights = _sizes(trace)
    shown, left_out = style.first(_paths(trace, weights), most)

    heights = [2.2] * len(shown) + [1.3]
    figure = style.empty(7.6, sum(heights))
    grid = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights, squeeze=False)
    axes = list(grid[:, 0])
    style.plain(axes)
    for ax, path in zip(axes[:-1], shown, strict=True):
        plot_branches(ax, path.branches, low, high)
        plot_primal(ax, path.primal, low, high)
        title = f"steps {low} to {high}{left_out}" if ax is axes[0] else ""
        style.name(ax, title, "", path.name)
    steps_of_weights = np.arange(1, len(alive) + 1)
    of_the_living = np.where(alive, weights, np.nan)
    axes[-1].plot(steps_of_weights, of_the_living, color=style.RED, lw=1, marker=".", ms=3)
    style.name(axes[-1], "", "step", "weight")
    axes[-1].set(xlim=(low - 0.5, high + 0.5))
    axes[-1].set_ylim(bottom=0)
    style.key(axes[0], loc="lower right", bbox_to_anchor=(1.0, 0.99), borderpad=0, ncols=3)
    return figure


class _Path(NamedTuple):
    """One entry of the state: the primal's values from the start, and the alternatives' lines."""

    name: str
    primal: np.ndarray
    branches: list[Branch]


def _paths(trace: Trace, weights: Float[np.ndarray, "n K"]) -> list[_Path]:
    flags = [np.asarray(flag) for flag in (trace.alive, trace.born, trace.recoupled)]
    slots = range(weights.shape[1])
    found = [(k, span) for k in slots for span in spans(*(flag[:, k] for flag in flags))]
    starts = entries(trace.init, "x")
    primals = entries(trace.primal, "x", leading=1)
    alternatives = entries(trace.alternative, "x", leading=2)
    paths = []
    # `init`, `primal` and `alternative` have the same structure, so entries come in one order.
    for start, primal, other in zip(starts, primals, alternatives, strict=True):
        whole = np.concatenate([start.values[None], primal.values])
        lines = [branch(span, whole, other.values[:, k], weights[:, k]) for k, span in found]
        paths.append(_Path(primal.name, whole, lines))
    return paths


def _sizes(trace: Trace) -> Float[np.ndarray, "n K"]:
    """The norm of each alternative's weights over all parameters."""
    by_parameter = [weight.values for weight in entries(trace.weight, "w", leading=2)]
    return np.linalg.norm(by_parameter, axis=0)


def _window(steps: Checked[tuple[int, int]] | None, num_steps: int) -> tuple[int, int]:
    if steps is None:
        return 0, num_steps
    if not isinstance(steps, tuple | list) or len(steps) != 2:
        raise TypeError(f"`plots.trace(steps=...)` must be (first, last), got {steps!r}.")
    low, high = (validate.count(step, "plots.trace(steps=...)", least=0) for step in steps)
    if not low < high <= num_steps:
        raise ValueError(
            f"`plots.trace(steps=...)` must be (first, last) with first < last ≤ {num_steps}, the"
            f" steps of the trace, got {steps}."
        )
    return low, high


def plot_primal(ax: Axes, path: np.ndarray, low: int, high: int) -> None:
    steps = np.arange(low, high + 1)
    look = {"color": style.GREY, "lw": 1.6, "marker": "o", "ms": 2.6}
    ax.plot(steps, path[low : high + 1], **look, label="primal", zorder=3)


def plot_branches(ax: Axes, lines: list[Branch], low: int, high: int) -> None:
    """The alternatives that are visible between two steps, with a cross where one was pruned."""
    from matplotlib.collections import LineCollection
    from matplotlib.colors import to_rgba

    seen = [line for line in lines if line.start < high and line.last > low]
    heaviest = max((float(line.weights.max()) for line in seen), default=0.0)
    pieces, colours = [], []
    for line in seen:
        for i, weight in enumerate(line.weights):
            at = line.start + i
            pieces.append([(at, line.values[i]), (at + 1, line.values[i + 1])])
            colours.append(to_rgba(style.RED, style.opacity(float(weight), heaviest)))
    ax.add_collection(LineCollection(pieces, colors=colours, lw=1.4, capstyle="round", zorder=2))
    pruned = [line for line in seen if line.end == "pruned" and low <= line.last <= high]
    ax.plot([], [], color=style.RED, lw=1.4, label="alternatives, stronger by weight")
    if pruned:
        at, ends = [line.last for line in pruned], [line.values[-1] for line in pruned]
        look = {"color": style.RED, "ms": 4.5, "mew": 1.1, "ls": ""}
        ax.plot(at, ends, marker="x", **look, label="pruned", zorder=2)
