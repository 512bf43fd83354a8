"""Random structures: what a compiler sees of a problem in the public API on 2 to 8 states.

The parts of the state and their types, the kernels and how they are composed, couplings, estimator
and lengths.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

import diffmh

OUTPUTS = 2


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of the state with finitely many values: a label, ±1 spins, bits, or several labels 0
    and 1 (whole numbers), of some dtype.
    """

    kind: str
    length: int
    dtype: str

    @property
    def size(self) -> int:
        return self.length if self.kind == "label" else 2**self.length

    def encode(self, index):
        if self.kind == "label":
            return index.astype(self.dtype)
        bits = (index >> jnp.arange(self.length)) & 1
        return (1 - 2 * bits if self.kind == "spins" else bits).astype(self.dtype)

    def index(self, x):
        if self.kind == "label":
            return x.astype(jnp.int32)
        bits = x < 0 if self.kind == "spins" else x
        return jnp.sum(bits.astype(jnp.int32) << jnp.arange(self.length))


@dataclasses.dataclass(frozen=True)
class Move:
    """One Metropolis–Hastings or Gibbs step: which part it moves, how, and whether by a density of
    its own.
    """

    part: int
    proposal: str
    coupling: diffmh.extend.Coupling | None
    density: int


@dataclasses.dataclass(frozen=True)
class Structure:
    parts: tuple[Part, ...]
    moves: tuple[Move, ...]
    composition: Any  # an index of `moves`; ("cycle" or "mixture", ...); ("repeat", one, times)
    estimator: Any
    theta: str
    f: str
    tables: str
    start: str
    burn_in: int
    num_samples: int
    lag: int = 0

    @property
    def num_states(self) -> int:
        return int(np.prod([part.size for part in self.parts]))

    @property
    def num_parameters(self) -> int:
        return 1 if self.theta == "scalar" else 3

    @property
    def layout(self) -> tuple[str, ...]:
        return tuple(part.kind for part in self.parts)

    @property
    def rare(self) -> bool:
        """True if rare outcomes weigh much, as rejections do where α is near 1."""
        return not two_sided(self.estimator)

    def __str__(self) -> str:
        steps = "+".join(f"{move.proposal}({move.coupling or 'best'})" for move in self.moves)
        types = "x".join(f"{part.kind}{part.length}:{part.dtype}" for part in self.parts)
        lag = f" lag {self.lag}" if self.lag else ""
        return f"{types} {_shown(self.composition)} {steps} {self.estimator} {self.theta}{lag}"


def two_sided(estimator) -> bool:
    return isinstance(estimator, diffmh.StochasticDerivative) and estimator.weights == "two-sided"


def _shown(composition) -> str:
    if isinstance(composition, int):
        return "abc"[composition]
    name, *rest = composition
    if name == "repeat":
        return f"{_shown(rest[0])}*{rest[1]}"
    inside = ("|" if name == "mixture" else "").join(map(_shown, rest))
    return f"[{inside}]"


class FreshDraw(diffmh.extend.Coupling):
    """A user's coupling: y' is drawn anew."""

    def propose(self, key, proposal, x, x_new, y):
        return proposal.sample(key, y)


PROPOSALS = {
    "label": ("OtherState", "TransitionMatrix", "Independence", "Ring"),
    "spins": ("SpinFlip", "SpinFlip of a site", "Independence"),
    "bits": ("FlipBit", "Independence"),
}
COUPLINGS = (
    None,
    diffmh.Maximal(),
    diffmh.CommonRandomNumbers(),
    diffmh.Independent(),
    FreshDraw(),
)
LABELS = ("int8", "int16", "int32", "uint8", "uint16", "uint32")
SPINS = ("int8", "int16", "int32", "float32")
LAYOUTS = (
    ("label",),
    ("label", "spins"),
    ("spins",),
    ("label", "label"),
    ("bits",),
    ("bits", "label"),
)
COMPOSITIONS = (
    0,
    ("cycle", 0, 1),
    ("repeat", 0, 2),
    ("cycle", 0, ("repeat", 1, 2)),
    ("repeat", ("cycle", 0, 1), 2),
    ("cycle", ("cycle", 0, 1), 2),
)
# What the first structures do not visit: Gibbs, blocks, arrays of labels, mixtures, births, lags.
WIDER_PROPOSALS = {
    "label": ("Gibbs", "OtherState"),
    "labels": ("OneLabel", "Gibbs of an entry", "OneLabel of a site"),
    "spins": ("BlockGibbs", "SpinFlip"),
    "bits": ("Gibbs of an entry", "FlipBit"),
}
WIDER_LAYOUTS = (("labels",), ("label", "spins"), ("bits", "label"), ("spins",), ("labels", "bits"))
WIDER_COMPOSITIONS = (
    ("mixture", 0, 1),
    ("cycle", 0, ("mixture", 1, 2)),
    ("cycle", 0, 1),
    ("repeat", ("mixture", 0, ("cycle", 0, 1)), 2),
)
WIDER_ESTIMATORS = (
    diffmh.StochasticDerivative(),
    diffmh.StochasticDerivative(alternatives=2, births=True),
    diffmh.StochasticDerivative("one-sided"),
    diffmh.Score(),
    diffmh.StochasticDerivative(births=True),
    diffmh.StochasticDerivative(alternatives=4),
)
ESTIMATORS = (
    *(diffmh.StochasticDerivative(alternatives=k) for k in (1, 2, 4)),
    diffmh.StochasticDerivative("one-sided"),
    diffmh.Score(),
    *(diffmh.StochasticDerivative(alternatives=k) for k in (4, 1, 2)),
    diffmh.StochasticDerivative("one-sided", alternatives=2),
    diffmh.Score("other chains"),
)


def _deck(rng, cards) -> Iterator[Any]:
    """Deals all the cards, shuffled, again and again: few structures have something of all."""
    while True:
        yield from (cards[i] for i in rng.permutation(len(cards)))


def structures(count: int, seed: int = 0, wider: bool = False) -> list[Structure]:
    rng = np.random.default_rng(seed)
    deal = lambda cards: _deck(rng, cards)
    layouts, compositions = deal(LAYOUTS), deal(COMPOSITIONS)
    names, estimators, couplings = PROPOSALS, ESTIMATORS, deal(COUPLINGS)
    if wider:
        layouts, compositions = deal(WIDER_LAYOUTS), deal(WIDER_COMPOSITIONS)
        names, estimators = WIDER_PROPOSALS, WIDER_ESTIMATORS
    proposals = {kind: deal(names) for kind, names in names.items()}
    dtypes = {"label": deal(LABELS), "spins": deal(SPINS), "bits": deal(("bool",))}
    dtypes["labels"] = deal(LABELS) if wider else iter(())
    sizes = {
        "alone": {"label": deal((2, 3, 5, 8)), "spins": deal((1, 2, 3)), "bits": deal((2, 3))},
        "together": {"label": deal((2, 4)), "spins": deal((1,)), "bits": deal((1,))},
    }
    thetas, fs = deal(("scalar", "vector", "tree")), deal(("table", "with theta", "tree"))
    tables, starts = deal(("args", "closure", "module")), deal(("fixed", "drawn"))
    burn_ins, lengths, apart = deal((0, 1, 2, 3)), deal((3, 4, 5, 6)), deal((True, False))
    lags = deal((0, 1, 2)) if wider else iter(lambda: 0, None)
    for size in sizes.values() if wider else ():
        size["labels"] = deal((2,))

    def structure(estimator):
        kinds, composition = next(layouts), next(compositions)
        size = sizes["alone" if len(kinds) == 1 else "together"]
        parts = tuple(Part(kind, next(size[kind]), next(dtypes[kind])) for kind in kinds)
        own = next(apart)
        moves = tuple(
            Move(
                number % len(parts),
                next(proposals[parts[number % len(parts)].kind]),
                next(couplings),
                number if own else 0,
            )
            for number in range(_steps(composition))
        )
        one_sided = isinstance(estimator, diffmh.StochasticDerivative) and not two_sided(estimator)
        theta = "scalar" if one_sided else next(thetas)
        return Structure(
            parts,
            moves,
            composition,
            estimator,
            theta,
            next(fs),
            next(tables),
            next(starts),
            next(burn_ins),
            next(lengths),
            next(lags),
        )

    return [structure(estimators[i % len(estimators)]) for i in range(count)]


def _steps(composition) -> int:
    if isinstance(composition, int):
        return composition + 1
    inner = composition[1:2] if composition[0] == "repeat" else composition[1:]
    return max(_steps(part) for part in inner)
