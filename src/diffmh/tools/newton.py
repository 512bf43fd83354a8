"""Steps of `optimise` on what `diffmh.evidence` returns: gradients, Newton's and natural ones."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from .evidence import Evidence
from .evidence_report import like_theta


class FullStep(eqx.Module):
    """The optimiser of a Newton step of length one, with the interface of optax."""

    def init(self, theta: PyTree) -> PyTree:
        return ()

    def update(self, gradient: PyTree, state: PyTree, theta: PyTree) -> tuple[PyTree, PyTree]:
        return jax.tree.map(jnp.negative, gradient), state


def newton_of(newton: Any, objective: Any) -> bool | str:
    """Return which information scales a step: none, that of the objective, or Fisher's."""
    if not isinstance(newton, bool | np.bool_) and newton != "natural":
        raise ValueError(
            "`optimise(newton=...)` must be False, True (steps by the observed information) or"
            f" 'natural' (by the Fisher information of an energy model), got {newton!r}."
        )
    if not newton:
        return False
    if not isinstance(objective, Evidence):
        raise TypeError(
            "`optimise(newton=...)` is for objectives that `diffmh.evidence` returns, which have a"
            f" Hessian, got {objective!r}."
        )
    if newton == "natural" and objective.observed is None:
        raise ValueError(
            "`optimise(newton='natural')` is for energy models, whose x is observed:"
            " `evidence(..., observed=...)`. Here Z is the evidence of data, where Cov(s) is the"
            " *missing* information, and steps by it would have the wrong length: use"
            " `newton=True`, which steps by the observed information."
        )
    return "natural" if newton == "natural" else bool(newton)


def refuse_unless_of_chains(objective: Evidence) -> None:
    if not objective.has_chains:
        raise TypeError(
            "`optimise(objective, ...)` samples at each theta, and this evidence was made of draws:"
            " make it with a kernel, `evidence(log_density, kernel, init=..., num_samples=...)`;"
            " `reuse=0.5` keeps its draws from step to step."
        )


class EvidenceAt(eqx.Module):
    """Gradient with error, and the direction downhill of `sign · objective`, in the units of the
    step: the gradient's, or the solution of `information · direction = gradient`.
    """

    gradient: PyTree
    gradient_error: PyTree
    downhill: PyTree

    @staticmethod
    def of(
        objective: Evidence, theta: PyTree, key, args, sign: float, newton: bool | str
    ) -> EvidenceAt:
        chains, hessian, fisher = objective.per_chain(theta, key, args, bool(newton))
        gradient = jnp.mean(chains, axis=0)
        error = jnp.std(chains, axis=0, ddof=1) / chains.shape[0] ** 0.5
        downhill = sign * gradient
        if newton and hessian is not None and fisher is not None:
            information = fisher if newton == "natural" else sign * hessian
            downhill = _solved(information, downhill)
        parts = (like_theta(theta, part) for part in (gradient, error, downhill))
        return EvidenceAt(*parts)


def _solved(information: Float[Array, "P P"], gradient: Float[Array, "P"]) -> Float[Array, "P"]:
    """`information⁻¹ gradient`; NaN where the information is not positive definite, as the step
    would lead to a saddle or the wrong way.
    """
    # An information is symmetric; its estimate is so up to noise, which the mean of both halves
    # shares out.
    symmetric = (information + information.T) / 2
    values, vectors = jnp.linalg.eigh(symmetric)
    step = vectors @ ((vectors.T @ gradient) / values)
    return jnp.where(jnp.all(values > 0), step, jnp.nan)


def refuse_no_step(newton: bool | str, i: int, theta: PyTree, after: PyTree) -> None:
    """Raise `FloatingPointError` where Newton's step does not exist."""
    if newton and not all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(after)):
        which = "Fisher information" if newton == "natural" else "observed information"
        raise FloatingPointError(
            f"`optimise(newton={newton!r})`: at iteration {i}, theta = {theta}, the {which} is not"
            " positive definite, so Newton's step would not lead to an optimum. Start nearer to it,"
            " take some steps with an optax optimiser and without `newton` first, or use more"
            " samples. Check `maximise` too."
        )


def no_values(theta: PyTree) -> Array:
    """A line search asks for values of the objective, and log Z has none."""
    raise TypeError(
        "`optimise(optimizer=...)`: this optimiser needs values of the objective, and"
        " `diffmh.evidence` has only gradients and Hessians: use one without a line search."
    )
