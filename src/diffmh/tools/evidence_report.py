"""The report of `diffmh.evidence`: gradient and Hessian of a log normaliser with errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PyTree

from ..base import validate
from ..base.validate import Checked
from ..reports import display
from ..reports.curvature import square
from ..reports.display import with_errors
from ..reports.report import Report


class ObservedTerm(eqx.Module):
    """The term that is added to `sign · log Z`: gradient and Hessian of `observed`, flat."""

    sign: int = eqx.field(static=True)
    slope: Float[Array, "P"]
    second: Float[Array, "P P"]

    @staticmethod
    def of(
        observed: Callable[..., Array] | None, theta: PyTree, args: tuple[Any, ...]
    ) -> ObservedTerm:
        flat, unravel = ravel_pytree(theta)
        if observed is None:
            return ObservedTerm(
                1, jnp.zeros_like(flat), jnp.zeros((flat.size, flat.size), flat.dtype)
            )

        def of_flat(flat):
            value = validate.numbers(observed(unravel(flat), *args), "`observed`")
            if jnp.shape(value) != ():
                raise TypeError(
                    "`evidence(observed=...)` must return a scalar, got shape"
                    f" {jnp.shape(value)}: take the mean over observations."
                )
            return value

        return ObservedTerm(-1, jax.grad(of_flat)(flat), jax.hessian(of_flat)(flat))

    def trees(
        self, theta: PyTree, score: Float[Array, "P"], rows: Float[Array, "P P"]
    ) -> tuple[PyTree, PyTree]:
        """Gradient and Hessian of the sum, like theta and like theta's trees of theta's."""
        return like_theta(theta, self.slope + self.sign * score), square(
            theta, self.second + self.sign * rows
        )


def like_theta(theta: PyTree, flat: Array) -> PyTree:
    return ravel_pytree(theta)[1](jnp.asarray(flat, ravel_pytree(theta)[0].dtype))


class EvidenceReport(eqx.Module):
    """The result of `diffmh.evidence(...).run`. Print it.

    `gradient` is like theta, `hessian` like `jax.hessian`; each with standard errors over chains or
    batches of draws. `score_covariance` is `Cov(s)`: the missing information where Z is the
    evidence of data, the Fisher information of one observation where x is observed. The observed
    information is `−hessian`. `report` is that of the scores.
    """

    gradient: PyTree
    gradient_error: PyTree
    hessian: PyTree
    hessian_error: PyTree
    score_covariance: PyTree
    score_covariance_error: PyTree
    report: Report
    term: ObservedTerm
    theta: PyTree

    @staticmethod
    def of(term: ObservedTerm, theta: PyTree, report: Report) -> EvidenceReport:
        gradient, hessian = term.trees(
            theta, report.value["score"], _rows(report.gradient["score"])
        )
        return EvidenceReport(
            gradient,
            like_theta(theta, report.value_error["score"]),
            hessian,
            square(theta, _rows(report.gradient_error["score"])),
            square(theta, _rows(report.gradient["fixed"])),
            square(theta, _rows(report.gradient_error["fixed"])),
            report,
            term,
            theta,
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        return self.report.warnings

    def interval(self, level: Checked[float] = 0.95) -> tuple[PyTree, PyTree]:
        """Confidence intervals of gradient and Hessian: two pytrees like them, each leaf with a
        last axis of two ends.
        """
        value, slope = self.report.interval(level)

        def end(index):
            value_end = value["score"][..., index]
            slope_end = _rows(jax.tree.map(lambda leaf: leaf[..., index], slope["score"]))
            return self.term.trees(self.theta, value_end, slope_end)

        # With −log Z the lower end is the upper one's.
        low, high = (end(index) for index in ((0, 1) if self.term.sign > 0 else (1, 0)))
        joined = jax.tree.map(lambda a, b: jnp.stack([a, b], -1), low, high)
        return joined[0], joined[1]

    def __repr__(self) -> str:
        parts = {
            "gradient": with_errors(self.gradient, self.gradient_error),
            "hessian": with_errors(self.hessian, self.hessian_error),
        }
        return display.named("EvidenceReport", parts, self.warnings)

    def __str__(self) -> str:
        lines = [
            "gradient " + with_errors(self.gradient, self.gradient_error),
            "hessian  " + with_errors(self.hessian, self.hessian_error),
            "Cov(s)   " + with_errors(self.score_covariance, self.score_covariance_error),
            *self.report.notes,
            *(f"warning: {warning}" for warning in self.warnings),
        ]
        return "\n".join(lines)


def _rows(tree: PyTree) -> Array:
    """A tree like theta, each leaf with P rows, as a matrix."""
    leaves = [jnp.reshape(leaf, (jnp.shape(leaf)[0], -1)) for leaf in jax.tree.leaves(tree)]
    return jnp.concatenate(leaves, axis=1)
