"""Random problems in the public API on 2 to 8 states, and their exact values and derivatives.

A *structure* is what a compiler sees: the parts of the state and their types, the kernels and how
they are composed, couplings, estimator, lengths. The *numbers* (densities, f, proposal matrices,
starts, θ) are arguments: all problems of a structure are one program, mapped over them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from oracles import derivative, finite_chain_mean, log_ratio, transition_matrix

import diffmh

Numbers = dict[str, Any]
OUTPUTS = 2


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of the state with finitely many values: a label, ±1 spins or bits of some dtype."""

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
        return (bits if self.kind == "bits" else 1 - 2 * bits).astype(self.dtype)

    def index(self, x):
        if self.kind == "label":
            return x.astype(jnp.int32)
        bits = x if self.kind == "bits" else x < 0
        return jnp.sum(bits.astype(jnp.int32) << jnp.arange(self.length))


@dataclasses.dataclass(frozen=True)
class Move:
    """One Metropolis–Hastings step: which part it moves, how, and whether by a density of its
    own.
    """

    part: int
    proposal: str
    coupling: diffmh.Coupling | None
    density: int


@dataclasses.dataclass(frozen=True)
class Structure:
    parts: tuple[Part, ...]
    moves: tuple[Move, ...]
    composition: Any  # an index of `moves`, ("cycle", ...) or ("repeat", composition, times)
    estimator: Any
    theta: str
    f: str
    tables: str
    start: str
    burn_in: int
    num_samples: int

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
        """Whether what is rare weighs much, as rejections do where α is near 1."""
        return not two_sided(self.estimator)

    def __str__(self) -> str:
        steps = "+".join(f"{move.proposal}({move.coupling or 'best'})" for move in self.moves)
        types = "x".join(f"{part.kind}{part.length}:{part.dtype}" for part in self.parts)
        return f"{types} {_shown(self.composition)} {steps} {self.estimator} {self.theta}"


def two_sided(estimator) -> bool:
    return isinstance(estimator, diffmh.StochasticDerivative) and estimator.weights == "two-sided"


def _shown(composition) -> str:
    if isinstance(composition, int):
        return "abc"[composition]
    name, *rest = composition
    if name == "repeat":
        return f"{_shown(rest[0])}*{rest[1]}"
    return f"[{''.join(map(_shown, rest))}]"


# --- what problems are made of -------------------------------------------------------------------


class Table(eqx.Module):
    """A distribution over the values of a part, for `Independence`."""

    probabilities: jax.Array
    part: Part = eqx.field(static=True)

    def sample(self, key):
        return self.part.encode(inversion(key, self.probabilities))

    def log_prob(self, x):
        return jnp.log(row(self.probabilities, self.part.index(x)))


class Ring(diffmh.Proposal):
    """A user's proposal: one label up with probability `up`, else one down."""

    up: jax.Array
    num_states: int = eqx.field(static=True)
    symmetric: bool = eqx.field(static=True, default=False)

    def sample(self, key, x):
        step = jnp.where(jax.random.uniform(key) < self.up, 1, self.num_states - 1)
        return ((x.astype(jnp.int32) + step) % self.num_states).astype(x.dtype)

    def log_prob(self, x, x_new):
        apart = (x_new.astype(jnp.int32) - x.astype(jnp.int32)) % self.num_states
        up = jnp.where(apart == 1, self.up, 0.0)
        return jnp.log(up + jnp.where(apart == self.num_states - 1, 1 - self.up, 0.0))


class FlipBit(diffmh.Proposal):
    """A user's proposal: one bit is flipped."""

    symmetric: bool = eqx.field(static=True, default=True)

    def sample(self, key, x):
        return x ^ (jnp.arange(x.size) == jax.random.randint(key, (), 0, x.size))

    def log_prob(self, x, x_new):
        return jnp.where(jnp.sum(x != x_new) == 1, -jnp.log(x.size), -jnp.inf)


class FreshDraw(diffmh.Coupling):
    """A user's coupling: y' is drawn anew."""

    def propose(self, key, proposal, x, x_new, y):
        return proposal.sample(key, y)


class Density(eqx.Module):
    """`log g = base[s] + features[s] · θ`, with the tables as leaves of the kernel."""

    tables: Numbers
    number: int = eqx.field(static=True)
    index: Any = eqx.field(static=True)

    def __call__(self, theta, x, *args):
        return log_density(self.tables, self.number, self.index, theta, x)


def inversion(key, probabilities):
    """An index drawn from `probabilities`: one uniform compiles faster than `categorical`."""
    cumulative = jnp.cumsum(probabilities)
    return jnp.sum(cumulative <= jax.random.uniform(key) * cumulative[-1])


def row(table, index):
    """`table[index]`, by a product: much faster than a gather where many chains look up at once."""
    return jax.nn.one_hot(index, table.shape[0]) @ table


def log_density(tables, number, index, theta, x):
    flat = ravel_pytree(theta)[0]
    return row(tables["base"][number] + tables["features"][number] @ flat, index(x))


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


def structures(count: int, seed: int = 0) -> list[Structure]:
    rng = np.random.default_rng(seed)
    deal = lambda cards: _deck(rng, cards)
    layouts, compositions, couplings = deal(LAYOUTS), deal(COMPOSITIONS), deal(COUPLINGS)
    proposals = {kind: deal(names) for kind, names in PROPOSALS.items()}
    dtypes = {"label": deal(LABELS), "spins": deal(SPINS), "bits": deal(("bool",))}
    sizes = {
        "alone": {"label": deal((2, 3, 5, 8)), "spins": deal((1, 2, 3)), "bits": deal((2, 3))},
        "together": {"label": deal((2, 4)), "spins": deal((1,)), "bits": deal((1,))},
    }
    thetas, fs = deal(("scalar", "vector", "tree")), deal(("table", "with theta", "tree"))
    tables, starts = deal(("args", "closure", "module")), deal(("fixed", "drawn"))
    burn_ins, lengths, apart = deal((0, 1, 2, 3)), deal((3, 4, 5, 6)), deal((True, False))

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
        )

    return [structure(ESTIMATORS[i % len(ESTIMATORS)]) for i in range(count)]


def _steps(composition) -> int:
    if isinstance(composition, int):
        return composition + 1
    inner = composition[1:2] if composition[0] == "repeat" else composition[1:]
    return max(_steps(part) for part in inner)


# --- numbers -------------------------------------------------------------------------------------


def numbers(structure: Structure, seed: int, tied: bool) -> Numbers:
    """The numbers of one problem; with `tied`, exact ties occur, and else none.

    float32 throughout, so that the oracle differentiates the very chain that is sampled; no log
    ratio is so near to zero that rounding decides on which side it is.
    """
    rng = np.random.default_rng(seed)
    while True:
        drawn = _draw(structure, rng, tied)
        ratios = np.concatenate([_log_ratios(structure, drawn, move) for move in structure.moves])
        exact_ties = bool(np.any(ratios == 0))
        away = np.abs(ratios[ratios != 0])
        if exact_ties == tied and np.all(away > (0.03 if structure.rare else 1e-4)):
            return drawn


def _draw(structure: Structure, rng, tied: bool) -> Numbers:
    states, count = structure.num_states, structure.num_parameters
    densities = 1 + max(move.density for move in structure.moves)
    if tied:  # sums of these are exact in float32
        base = rng.integers(0, 2, size=(densities, states)) / 2
        features = rng.integers(-1, 2, size=(densities, states, count)) * 1.0
        theta = rng.integers(-2, 3, size=count) / 2
    else:
        base = rng.normal(size=(densities, states))
        features = rng.normal(size=(densities, states, count))
        theta = rng.normal(size=count)
    drawn = {
        "base": base,
        "features": features,
        "values": rng.normal(size=(states, OUTPUTS)),
        "slopes": rng.normal(size=(states, OUTPUTS)),
        "theta": theta,
        "start": rng.dirichlet(np.ones(states))
        if structure.start == "drawn"
        else np.eye(states)[rng.integers(states)],
        "moves": [_of_the_proposal(structure, move, rng, tied) for move in structure.moves],
    }
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float32).astype(float), drawn)


def _of_the_proposal(structure: Structure, move: Move, rng, tied: bool):
    size = structure.parts[move.part].size
    match move.proposal:
        case "TransitionMatrix" if tied:
            # q(j | i) depends on |j − i| alone.
            weights = rng.dirichlet(np.ones(size))
            steps = (np.arange(size)[None] - np.arange(size)[:, None]) % size
            return np.float32((weights + weights[-np.arange(size) % size]) / 2)[steps]
        case "TransitionMatrix":
            kept = rng.random((size, size)) < 0.7
            kept[np.arange(size), (np.arange(size) + 1) % size] = True
            matrix = rng.dirichlet(np.ones(size), size=size) * kept
            return matrix / matrix.sum(axis=1, keepdims=True)
        case "Independence":
            weights = rng.integers(1, 3, size=size) if tied else rng.random(size) + 0.2
            return weights / weights.sum()
        case "Ring":
            return np.array(0.5 if tied else 0.2 + 0.6 * rng.random())
    return np.zeros(())


# --- the oracle ----------------------------------------------------------------------------------


def _proposal_matrix(structure: Structure, drawn: Numbers, move: Move) -> np.ndarray:
    """`q` on the states of the whole, of which the part is moved."""
    part, given = structure.parts[move.part], drawn["moves"][structure.moves.index(move)]
    size, states = part.size, np.arange(part.size)
    flip = lambda bit: np.eye(size)[states ^ (1 << bit)]
    match move.proposal:
        case "OtherState":
            own = (1 - np.eye(size)) / (size - 1)
        case "TransitionMatrix":
            own = given
        case "Independence":
            own = np.broadcast_to(given, (size, size))
        case "Ring":
            up = np.eye(size)[(states + 1) % size]
            own = given * up + (1 - given) * np.eye(size)[(states - 1) % size]
        case "FlipBit":
            own = np.mean([flip(bit) for bit in range(part.length)], axis=0)
        case "SpinFlip":
            own = np.eye(size) / 2 + np.mean([flip(bit) for bit in range(part.length)], axis=0) / 2
        case "SpinFlip of a site":
            own = (np.eye(size) + flip(part.length - 1)) / 2
        case _:
            raise ValueError(move.proposal)
    sizes = [part.size for part in structure.parts]
    before, after = np.prod(sizes[: move.part]), np.prod(sizes[move.part + 1 :])
    return np.kron(np.kron(np.eye(int(before)), own), np.eye(int(after)))


def _log_ratios(structure: Structure, drawn: Numbers, move: Move) -> np.ndarray:
    """Of all moves to another state that may be proposed."""
    proposal = _proposal_matrix(structure, drawn, move)
    table = drawn["base"][move.density] + drawn["features"][move.density] @ drawn["theta"]
    away = (proposal > 0) & (proposal.T > 0) & ~np.eye(len(proposal), dtype=bool)
    return log_ratio(table, proposal)[away]


def _observed(structure: Structure, drawn: Numbers, theta) -> np.ndarray:
    values = drawn["values"] + (structure.f != "table") * drawn["slopes"] * theta[0]
    if structure.f != "tree":
        return values
    whole = np.arange(structure.num_states)
    return np.stack([whole == 0, whole, values[:, 0], values[:, 1]], axis=1)


def exact(structure: Structure, drawn: Numbers, share: float = 0.5) -> np.ndarray:
    """The value, and the derivative along each parameter: (F, 1 + P). `share` of the derivative
    counts at a tie.
    """

    def matrix(composition, theta):
        if isinstance(composition, int):
            move = structure.moves[composition]
            table = drawn["base"][move.density] + drawn["features"][move.density] @ theta
            return transition_matrix(table, _proposal_matrix(structure, drawn, move), share)
        name, *rest = composition
        if name == "repeat":
            return np.linalg.matrix_power(matrix(rest[0], theta), rest[1])
        return functools.reduce(np.matmul, [matrix(inner, theta) for inner in rest])

    def mean(theta):
        observed = _observed(structure, drawn, theta)
        step = matrix(structure.composition, theta)
        return finite_chain_mean(
            step, drawn["start"], observed, structure.num_samples, structure.burn_in
        )

    value, slope = derivative(mean, drawn["theta"])
    return np.concatenate([value[:, None], slope], axis=1)


# --- the library ---------------------------------------------------------------------------------


def _proposal(part: Part, name: str, given):
    match name:
        case "OtherState":
            return diffmh.OtherState(part.size)
        case "TransitionMatrix":
            return diffmh.TransitionMatrix(given)
        case "Independence":
            return diffmh.Independence(Table(given, part))
        case "Ring":
            return Ring(given, part.size)
        case "FlipBit":
            return FlipBit()
        case "SpinFlip":
            return diffmh.SpinFlip()
        case "SpinFlip of a site":
            return diffmh.SpinFlip(part.length - 1)
    raise ValueError(name)


def _state(structure: Structure):
    """How states are made of their number, and numbered: one part stands for itself, several are
    a tree.
    """
    parts, sizes = structure.parts, [part.size for part in structure.parts]
    if len(parts) == 1:
        return parts[0].encode, parts[0].index
    strides = [int(np.prod(sizes[i + 1 :])) for i in range(len(parts))]

    def encode(index):
        each = zip(parts, strides, sizes, strict=True)
        return {
            f"part {i}": part.encode(index // stride % size)
            for i, (part, stride, size) in enumerate(each)
        }

    def index(x):
        each = zip(parts, strides, strict=True)
        return sum(part.index(x[f"part {i}"]) * stride for i, (part, stride) in enumerate(each))

    return encode, index


def _kernel(structure: Structure, drawn: Numbers, index) -> diffmh.Kernel:
    def density(number):
        if structure.tables == "module":
            return Density({name: drawn[name] for name in ("base", "features")}, number, index)
        if structure.tables == "closure":
            return lambda theta, x: log_density(drawn, number, index, theta, x)
        return lambda theta, x, tables: log_density(tables, number, index, theta, x)

    densities = [density(number) for number in range(drawn["base"].shape[0])]

    def step(move: Move, given):
        proposal = _proposal(structure.parts[move.part], move.proposal, given)
        if len(structure.parts) > 1:
            proposal = diffmh.On(lambda x: x[f"part {move.part}"], proposal)
        return diffmh.MetropolisHastings(densities[move.density], proposal, move.coupling)

    steps = [step(*pair) for pair in zip(structure.moves, drawn["moves"], strict=True)]

    def compose(composition):
        if isinstance(composition, int):
            return steps[composition]
        name, *rest = composition
        if name == "repeat":
            return diffmh.Repeat(compose(rest[0]), rest[1])
        return diffmh.Cycle(*(compose(inner) for inner in rest))

    return compose(structure.composition)


def _expectation(structure: Structure, drawn: Numbers, num_runs: int) -> diffmh.Expectation:
    encode, index = _state(structure)

    def f(theta, x, *args):
        tables = args[0] if args else drawn
        values = row(tables["values"], index(x))
        if structure.f != "table":
            values = values + row(tables["slopes"], index(x)) * ravel_pytree(theta)[0][0]
        if structure.f != "tree":
            return values
        return {"a": index(x) == 0, "b": (index(x), values)}

    start = drawn["start"]
    init = lambda key: encode(inversion(key, start))
    return diffmh.expectation(
        f,
        _kernel(structure, drawn, index),
        init=init if structure.start == "drawn" else encode(jnp.argmax(start)),
        num_samples=structure.num_samples,
        burn_in=structure.burn_in,
        num_chains=num_runs,
        estimator=structure.estimator,
    )


THETAS = {
    "scalar": lambda flat: flat[0],
    "vector": lambda flat: flat,
    "tree": lambda flat: {"a": flat[:2], "b": flat[2]},
}


@eqx.filter_jit
def _estimates(structure: Structure, problems: Numbers, keys, num_runs: int):
    def one(drawn, key):
        expectation = _expectation(structure, drawn, num_runs)
        args = (drawn,) if structure.tables == "args" else ()

        def flattened(flat):
            value = expectation.per_chain(THETAS[structure.theta](flat), key, *args)
            leaves = [jnp.reshape(leaf, (num_runs, -1)) for leaf in jax.tree.leaves(value)]
            flat_value = jnp.concatenate(leaves, axis=1)
            return flat_value, flat_value

        slope, value = jax.jacfwd(flattened, has_aux=True)(drawn["theta"])
        return jnp.concatenate([value[..., None], slope], axis=-1)

    return jax.vmap(one)(problems, keys)


def estimates(
    structure: Structure, problems: list[Numbers], num_runs: int, seed: int = 1
) -> np.ndarray:
    """Values and derivatives by many runs of each problem: (problems, runs, F, 1 + P)."""
    stacked = jax.tree.map(lambda *leaves: jnp.asarray(np.stack(leaves), jnp.float32), *problems)
    keys = jax.random.split(jax.random.key(seed), len(problems))
    return np.asarray(_estimates(structure, stacked, keys, num_runs))
