"""Second derivatives with their errors, in the trees that `jax.hessian` returns."""

from __future__ import annotations

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from ..base import validate
from ..base.validate import Checked
from . import display
from .convergence import mean_and_error
from .display import with_errors
from .intervals import Shape, interval_tree, shape
from .report import Report


class HessianReport(eqx.Module):
    """The result of `diffmh.hessian(...).run`. Print it.

    `hessian` and `hessian_error` have at each leaf of f a pytree like theta of pytrees like theta,
    as `jax.hessian` does; errors are standard errors over chains or batches of draws. `report` has
    value and gradient of the same run, and how far to trust them.
    """

    hessian: PyTree
    hessian_error: PyTree
    hessian_shape: Shape
    report: Report

    @property
    def value(self) -> PyTree:
        return self.report.value

    @property
    def value_error(self) -> PyTree:
        return self.report.value_error

    @property
    def gradient(self) -> PyTree:
        return self.report.gradient

    @property
    def gradient_error(self) -> PyTree:
        return self.report.gradient_error

    @property
    def warnings(self) -> tuple[str, ...]:
        return self.report.warnings

    def interval(self, level: Checked[float] = 0.95) -> PyTree:
        """Confidence intervals of the second derivatives: a pytree like `hessian`, each leaf with a
        last axis of two ends, as `Report.interval` has them for value and gradient.
        """
        level = validate.number(level, "HessianReport.interval(level=...)", above=0, below=1)
        second = (self.hessian, self.hessian_error, self.hessian_shape)
        return interval_tree(*second, self.report.num_chains, level)

    def __repr__(self) -> str:
        parts = {
            "hessian": with_errors(self.hessian, self.hessian_error),
            "gradient": with_errors(self.gradient, self.gradient_error),
            "value": with_errors(self.value, self.value_error),
        }
        return display.named("HessianReport", parts, self.warnings)

    def __str__(self) -> str:
        return "hessian  " + with_errors(self.hessian, self.hessian_error) + f"\n{self.report}"


def hessian_report(
    unflatten: Callable[[Float[np.ndarray, "F P"]], PyTree],
    theta: PyTree,
    second: Float[Array | np.ndarray, "P P F C"],
    report: Report,
) -> HessianReport:
    """Summarise what each chain or batch contributes to the second derivative."""
    second = np.asarray(second, float)
    mean, error = mean_and_error(second)

    def tree(flat):
        return hessian_tree(unflatten, theta, flat)

    return HessianReport(tree(mean), tree(error), jax.tree.map(tree, shape(second)), report)


def hessian_tree(
    unflatten: Callable[[Float[np.ndarray, "F P"]], PyTree],
    theta: PyTree,
    flat: Float[Array | np.ndarray, "P P F"],
) -> PyTree:
    """Flat second derivatives as f's tree of theta's trees of theta's trees."""
    flat = np.asarray(flat)
    size, _, num_values = flat.shape

    def of_value(block):
        # block: (P·P, *f's leaf); the parameters go last, as in `jax.hessian`.
        block = block.reshape(size, size, *block.shape[1:])
        return square(theta, np.moveaxis(block, (0, 1), (-2, -1)))

    columns = np.moveaxis(flat, -1, 0).reshape(num_values, size * size)
    return jax.tree.map(of_value, unflatten(columns))


def square(theta: PyTree, matrix: Float[Array | np.ndarray, "... P P"]) -> PyTree:
    """Matrices over the flattened θ as theta's tree of theta's trees, as `jax.hessian` has them."""
    leaves, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, theta))
    ends = np.cumsum([leaf.size for leaf in leaves]).tolist()
    parts = [(leaf, slice(end - leaf.size, end)) for leaf, end in zip(leaves, ends, strict=True)]

    def row(first, rows):
        shapes = [(*matrix.shape[:-2], *first.shape, *second.shape) for second, _ in parts]
        blocks = [matrix[..., rows, columns] for _, columns in parts]
        shaped = zip(blocks, shapes, strict=True)
        return structure.unflatten(jnp.asarray(b.reshape(s), first.dtype) for b, s in shaped)

    return structure.unflatten(row(*part) for part in parts)
