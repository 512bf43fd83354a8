"""Combination of estimates, with coefficients fitted on other replicates."""

from __future__ import annotations

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

# With fewer replicates than this, no coefficients are fitted.
LEAST_REPLICATES = 32
# At most one control for this many replicates: more would be fitted to noise.
_PER_CONTROL = 16


class ScoreParts(eqx.Module):
    """For each replicate: the value, the estimate of its derivative by the score, and the score
    itself, which has mean zero.
    """

    value: Float[Array, "F C"]
    slope: Float[Array, "P F C"]
    score: Float[Array, "P C"]


def combine(parts: ScoreParts, alternatives: Float[Array, "P F C"] | None) -> Float[Array, "P F C"]:
    """The combination `A + a (G − A) + Σ_q b_q S_q` of least variance: A by alternatives, G by the
    score, S the score itself. Without alternatives, `G + Σ_q b_q S_q`. The coefficients for each
    half of the replicates are fitted on the other half.
    """
    # Coefficients fitted on the replicates that they are applied to would cause a bias.
    # E[b S] = E[b] E[S] = 0 for a coefficient b that is independent of S.
    half = parts.slope.shape[-1] // 2
    one, other = (
        jax.tree.map(lambda array: array[..., where], (parts, alternatives))
        for where in (slice(0, half), slice(half, None))
    )
    return jnp.concatenate([_fitted(*one, *other), _fitted(*other, *one)], axis=-1)


def _fitted(
    parts: ScoreParts,
    alternatives: Float[Array, "P F C"] | None,
    others: ScoreParts,
    other_alternatives: Float[Array, "P F D"] | None,
) -> Float[Array, "P F C"]:
    """Apply coefficients fitted on other replicates: first remove the part of A and of G − A that
    the score explains, then the part of A that the rest of G − A explains.
    """
    base, other_base = parts.slope, others.slope
    if alternatives is not None and other_alternatives is not None:
        base, other_base = alternatives, other_alternatives
    explained = _explained(others.score, other_base)
    base, other_base = (
        _less(explained, scores.score, array)
        for scores, array in ((parts, base), (others, other_base))
    )
    if alternatives is None or other_alternatives is None:
        return base
    difference, other_difference = parts.slope - alternatives, others.slope - other_alternatives
    explained = _explained(others.score, other_difference)
    difference = _less(explained, parts.score, difference)
    other_difference = _less(explained, others.score, other_difference)
    covariance = _covariance(other_base, other_difference)
    variance = _covariance(other_difference, other_difference)
    # min_a Var(A + a (G − A)) is at a = −Cov(A, G − A) / Var(G − A).
    share = _ratio(covariance, variance) * _varies(other_alternatives)
    return base - share[..., None] * difference


def _explained(score: Float[Array, "P D"], base: Float[Array, "P F D"]) -> Float[Array, "P F Q"]:
    """The coefficients with which the scores best explain each entry of `base`: the scores of all
    parameters or, with many parameters, only its own (Q = 1).
    """
    count, size = score.shape
    still = _centred(score)
    with_base = jnp.einsum("qd,pfd->pfq", still, _centred(base))
    if count * _PER_CONTROL > size:
        own = jnp.einsum("pfp->pf", with_base)
        found = _ratio(own, jnp.sum(still**2, axis=-1)[:, None])[..., None]
    else:
        # Scores in their own units with a small ridge, so that collinear scores do no harm.
        unit = jnp.sqrt(jnp.sum(still**2, axis=-1))
        unit = jnp.where(unit > 0, unit, 1.0)
        alike = (still / unit[:, None]) @ (still / unit[:, None]).T + 1e-4 * jnp.eye(count)
        found = jnp.linalg.solve(alike, (with_base / unit).reshape(-1, count).T).T
        found = found.reshape(with_base.shape) / unit
    return found * _varies(base)[..., None]


def _less(
    coefficients: Float[Array, "P F Q"], score: Float[Array, "P C"], base: Float[Array, "P F C"]
) -> Float[Array, "P F C"]:
    if coefficients.shape[-1] == 1:
        return base - coefficients * score[:, None]
    return base - jnp.einsum("pfq,qc->pfc", coefficients, score)


def _varies(base: Float[Array, "P F D"]) -> Array:
    """True where `base` varies by more than rounding. Entries without variance stay unchanged."""
    mean, size = jnp.mean(base, axis=-1), jnp.finfo(base.dtype).eps * math.sqrt(base.shape[-1])
    return _covariance(base, base) > (size * mean) ** 2


def _covariance(a: Float[Array, "P F D"], b: Float[Array, "P F D"]) -> Float[Array, "P F"]:
    return jnp.mean(_centred(a) * _centred(b), axis=-1)


def _centred(array: Array) -> Array:
    return array - jnp.mean(array, axis=-1, keepdims=True)


def _ratio(covariance: Array, variance: Array) -> Array:
    return jnp.where(variance > 0, covariance / jnp.where(variance > 0, variance, 1.0), 0.0)
