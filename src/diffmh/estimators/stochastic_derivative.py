"""Algorithm 2: alternatives that branch off the primal where a decision could have gone the
other way.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from .. import _validate, alternatives
from ..alternatives import Alternatives, Events
from ..kernel import Step
from .estimator import Estimator, explicit

Weights = Literal["two-sided", "one-sided"]


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

    def refuse(self, num_parameters):
        if self.weights == "one-sided" and num_parameters != 1:
            raise ValueError(
                "`StochasticDerivative(weights='one-sided')` exists for one scalar parameter only,"
                " and `theta` has"
                f" {num_parameters}: use weights='two-sided'."
            )

    def draw(self, step, key, x, num_steps):
        key_coupling, key_prune = jax.random.split(key)
        uniform = jax.random.uniform(key_prune, (num_steps,))
        return OwnNoise(step.coupling_noise(key_coupling, x, num_steps), uniform)

    def start(self, parameters, kernel, state):
        dtype = jnp.result_type(*jax.tree.leaves(parameters.theta))
        return alternatives.none_yet(state, self.alternatives, parameters.size, dtype)

    def advance(self, parameters, kernel, step, memory: Alternatives, noise, own_noise: OwnNoise):
        state = alternatives.propagate(kernel, parameters, step, memory, noise, own_noise.coupling)
        moved = Alternatives(state, memory.weight)
        remaining = alternatives.drop_recoupled(moved, step.after)
        candidate = flip_weight(step, self.weights).astype(memory.weight.dtype)
        pruned, born = alternatives.prune(kernel, step, remaining, candidate, own_noise.prune)
        score = jnp.sum(alternatives.norm(candidate))
        return pruned, Events(moved.alive & ~remaining.alive, born, score)

    def observe(self, parameters, kernel, observable, value, state, memory: Alternatives):
        at_alternatives = alternatives.values(
            lambda y: observable(parameters.value_only(), y.x).value, memory
        )
        return alternatives.contribution(memory, value.value, at_alternatives) + explicit(value)

    def derivative(self, means, value):
        return means


def flip_weight(step: Step, weights: Weights) -> Float[Array, "P *D"]:
    """The weight of the alternative in which each decision of the step went the other way."""
    log_gradient = step.log_accept_gradient
    if weights == "two-sided":
        probability_gradient = step.accept_probability * log_gradient
        return jnp.where(step.accepted, -probability_gradient, probability_gradient)
    return jnp.where(
        step.accepted, jnp.maximum(0.0, -log_gradient), jnp.maximum(0.0, -step.log_reject_gradient)
    )
