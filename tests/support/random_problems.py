"""The numbers of random problems, and their exact values and derivatives.

A *structure* is what a compiler sees. The *numbers* (densities, f, proposal matrices, starts, θ)
are arguments: all problems of a structure are one program, mapped over them.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from oracles import (
    derivative,
    finite_chain_mean,
    lagged_chain_mean,
    log_ratio,
    transition_matrix,
)
from random_structures import OUTPUTS, Move, Structure

Numbers = dict[str, Any]


def numbers(structure: Structure, seed: int, tied: bool) -> Numbers:
    """The numbers of one problem; with `tied`, exact ties occur, and else none.

    float32 throughout, so that the oracle differentiates the very chain that is sampled; no log
    ratio is so near to zero that rounding decides on which side it is.
    """
    rng = np.random.default_rng(seed)
    while True:
        drawn = _draw(structure, rng, tied)
        ratios = np.concatenate([_log_ratios(structure, drawn, move) for move in structure.moves])
        if not ratios.size:
            return drawn  # nothing is accepted or rejected
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
        case "FlipBit" | "OneLabel":
            own = np.mean([flip(bit) for bit in range(part.length)], axis=0)
        case "OneLabel of a site":
            own = flip(part.length - 1)
        case "SpinFlip":
            own = np.eye(size) / 2 + np.mean([flip(bit) for bit in range(part.length)], axis=0) / 2
        case "SpinFlip of a site":
            own = (np.eye(size) + flip(part.length - 1)) / 2
        case _:
            raise ValueError(move.proposal)
    return _on_the_whole(structure, move, own)


def _on_the_whole(structure: Structure, move: Move, own: np.ndarray) -> np.ndarray:
    """A matrix on the states of the part, on the states of the whole."""
    sizes = [part.size for part in structure.parts]
    before, after = np.prod(sizes[: move.part]), np.prod(sizes[move.part + 1 :])
    return np.kron(np.kron(np.eye(int(before)), own), np.eye(int(after)))


def _gibbs_matrix(structure: Structure, move: Move, table: np.ndarray) -> np.ndarray:
    """Each state with the conditional probability of what is drawn anew, the rest being as it is:
    the whole label, the last of several, or of a block of spins the first.
    """
    part = structure.parts[move.part]
    drawn = {"Gibbs": part.size - 1, "BlockGibbs": 1}.get(move.proposal, 1 << (part.length - 1))
    rest = np.arange(part.size) & ~drawn if move.proposal != "Gibbs" else np.zeros(part.size)
    together = _on_the_whole(structure, move, 1.0 * (rest[:, None] == rest[None, :]))
    weights = together * np.exp(table)[None, :]
    return weights / weights.sum(axis=1, keepdims=True)


def _log_ratios(structure: Structure, drawn: Numbers, move: Move) -> np.ndarray:
    """Of all moves to another state that may be proposed; of Gibbs draws there are none."""
    if "Gibbs" in move.proposal:
        return np.zeros(0)
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
            if "Gibbs" in move.proposal:
                return _gibbs_matrix(structure, move, table)
            return transition_matrix(table, _proposal_matrix(structure, drawn, move), share)
        name, *rest = composition
        if name == "repeat":
            return np.linalg.matrix_power(matrix(rest[0], theta), rest[1])
        if name == "mixture":
            return np.mean([matrix(inner, theta) for inner in rest], axis=0)
        return functools.reduce(np.matmul, [matrix(inner, theta) for inner in rest])

    def mean(theta):
        observed = _observed(structure, drawn, theta)
        step = matrix(structure.composition, theta)
        lengths = (structure.num_samples, structure.burn_in)
        if structure.lag:
            earlier = drawn["values"][:, :1]
            return lagged_chain_mean(
                step, drawn["start"], earlier, observed, *lengths, structure.lag
            )
        return finite_chain_mean(step, drawn["start"], observed, *lengths)

    value, slope = derivative(mean, drawn["theta"])
    return np.concatenate([value[:, None], slope], axis=1)
