"""A structure and its numbers as the library's own objects, and their estimates."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from programs import each
from random_problems import Numbers
from random_structures import Move, Part, Structure

import diffmh

SIGNS = np.array([-1.0, 1.0], np.float32)


class Table(eqx.Module):
    """A distribution over the values of a part, for `Independence`."""

    probabilities: jax.Array
    part: Part = eqx.field(static=True)

    def sample(self, key):
        return self.part.encode(inversion(key, self.probabilities))

    def log_prob(self, x):
        return jnp.log(row(self.probabilities, self.part.index(x)))


class Ring(diffmh.extend.Proposal):
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


class FlipBit(diffmh.extend.Proposal):
    """A user's proposal: one bit is flipped."""

    symmetric: bool = eqx.field(static=True, default=True)

    def sample(self, key, x):
        return x ^ (jnp.arange(x.size) == jax.random.randint(key, (), 0, x.size))

    def log_prob(self, x, x_new):
        return jnp.where(jnp.sum(x != x_new) == 1, -jnp.log(x.size), -jnp.inf)


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
        case "OneLabel":
            return diffmh.OneLabel(2)
        case "OneLabel of a site":
            return diffmh.OneLabel(2, part.length - 1)
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


def _gibbs(structure: Structure, move: Move, density) -> diffmh.extend.Kernel:
    """A draw of a label, of the last of several, or of the first of a block of spins."""
    part = structure.parts[move.part]
    whole = lambda x: x if len(structure.parts) == 1 else x[f"part {move.part}"]
    if move.proposal == "Gibbs":
        return diffmh.Gibbs(density, whole, part.size)
    if move.proposal == "Gibbs of an entry":
        return diffmh.Gibbs(density, lambda x: whole(x)[part.length - 1], 2)

    def log_odds(theta, x, *args):
        with_spin = lambda spin: eqx.tree_at(whole, x, whole(x).at[0].set(spin))
        return jnp.stack([density(theta, with_spin(s), *args) for s in (-1, 1)])[None] @ SIGNS

    return diffmh.BlockGibbs(log_odds, lambda x: whole(x)[:1], density, values=(-1, 1))


def _kernel(structure: Structure, drawn: Numbers, index) -> diffmh.extend.Kernel:
    def density(number):
        if structure.tables == "module":
            return Density({name: drawn[name] for name in ("base", "features")}, number, index)
        if structure.tables == "closure":
            return lambda theta, x: log_density(drawn, number, index, theta, x)
        return lambda theta, x, tables: log_density(tables, number, index, theta, x)

    densities = [density(number) for number in range(drawn["base"].shape[0])]

    def step(move: Move, given):
        if "Gibbs" in move.proposal:
            return _gibbs(structure, move, densities[move.density])
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
        kinds = {"cycle": diffmh.Cycle, "mixture": diffmh.Mixture}
        return kinds[name](*(compose(inner) for inner in rest))

    return compose(structure.composition)


def expectation_of(structure: Structure, drawn: Numbers, num_runs: int) -> diffmh.Expectation:
    encode, index = _state(structure)

    def f(theta, *states_and_args):
        *earlier, x = states_and_args[: 1 + bool(structure.lag)]
        args = states_and_args[1 + bool(structure.lag) :]
        tables = args[0] if args else drawn
        if not earlier:
            return now(theta, x, tables)
        before = row(tables["values"], index(earlier[0]))[0]
        return jax.tree.map(lambda leaf: before * leaf, now(theta, x, tables))

    def now(theta, x, tables):
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
        lag=structure.lag,
        estimator=structure.estimator,
    )


THETAS = {
    "scalar": lambda flat: flat[0],
    "vector": lambda flat: flat,
    "tree": lambda flat: {"a": flat[:2], "b": flat[2]},
}


def estimates(
    structure: Structure, problems: list[Numbers], num_runs: int, seed: int = 1
) -> np.ndarray:
    """Values and derivatives by many runs of each problem: (problems, runs, F, 1 + P)."""

    def one(drawn, key):
        expectation = expectation_of(structure, drawn, num_runs)
        args = (drawn,) if structure.tables == "args" else ()

        def flattened(flat):
            value = expectation.per_chain(THETAS[structure.theta](flat), key, *args)
            leaves = [jnp.reshape(leaf, (num_runs, -1)) for leaf in jax.tree.leaves(value)]
            flat_value = jnp.concatenate(leaves, axis=1)
            return flat_value, flat_value

        slope, value = jax.jacfwd(flattened, has_aux=True)(drawn["theta"])
        return jnp.concatenate([value[..., None], slope], axis=-1)

    return each(one, problems, seed)
