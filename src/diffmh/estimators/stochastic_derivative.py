"""Algorithm 2: alternatives that branch off the primal where a decision could have gone the
other way.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import equinox as eqx
import jax
from jaxtyping import Array, Float, PyTree

from .. import _validate, alternatives, values
from ..alternatives import Alternatives, remember
from ..decisions import Weights
from ..values import Value
from .estimator import Estimator


class OwnNoise(eqx.Module):
    """The coupling's randomness, and the uniform that prunes: a draw of its own, never the one
    that accepts.
    """

    coupling: PyTree
    prune: Float[Array, "..."]


class StochasticDerivative(Estimator):
    """Unbiased for the finite chain: `(1/N) Σ_t Σ_k W_k (f(y_k) − f(x_t)) + ∂f/∂θ`. The default.

    - `weights="two-sided"`: a decision with probability α weighs `−dα` after an accept and `+dα`
      after a reject. Of all unbiased weights they have the least second moment; their variance is
      finite, and they are linear in dθ.
    - `weights="one-sided"`: those of the paper's Algorithm 2, `max(0, −dα)/α` after an accept and
      `max(0, dα)/(1 − α)` after a reject. For one scalar parameter only; on continuous states their
      variance is infinite.
    - `alternatives=K`: how many alternatives are followed at a time. The variance falls with K and
      the cost grows.

    >>> import diffmh
    >>> diffmh.StochasticDerivative(alternatives=4)
    StochasticDerivative(weights='two-sided', alternatives=4)
    """

    weights: Weights = eqx.field(static=True)
    alternatives: int = eqx.field(static=True)
    differentiates_steps: ClassVar[bool] = True

    def __init__(self, weights: Weights = "two-sided", alternatives: int = 1):
        if weights not in ("two-sided", "one-sided"):
            raise ValueError(
                "`StochasticDerivative(weights=...)` must be 'two-sided' or 'one-sided', got"
                f" {weights!r}."
            )
        self.weights = weights
        self.alternatives = _validate.count(alternatives, "StochasticDerivative(alternatives=...)")

    def refuse(self, kernel, num_parameters, lag):
        if self.weights == "one-sided" and num_parameters != 1:
            raise ValueError(
                "`StochasticDerivative(weights='one-sided')` exists for one scalar parameter only,"
                f" and `theta` has {num_parameters}: use weights='two-sided'."
            )

    def own_noise(self, update, key, x, num_steps):
        key_coupling, key_prune = jax.random.split(key)
        uniform = jax.random.uniform(key_prune, (num_steps,))
        return OwnNoise(update.coupling_noise(key_coupling, x, num_steps), uniform)

    def start(self, at):
        return alternatives.none_yet(at.state, at.past, self.alternatives, at.parameters)

    def look_back(self, memory: Alternatives):
        newest = lambda slot: remember(slot[0], Value(slot[1]))
        past = values.each_slot(newest, (memory.past, memory.state.x))
        return dataclasses.replace(memory, past=past)

    def advance(self, memory: Alternatives, at):
        noise: OwnNoise = at.own_noise
        return alternatives.advance(memory, at, noise.coupling, noise.prune, self.weights)

    def observe(self, memory: Alternatives, at):
        parameters = at.parameters.value_only()
        f = lambda place: at.observable(parameters, *place).primal
        return alternatives.differences(memory, f, at.value.primal) + at.explicit

    def derivative(self, means, value):
        return means
