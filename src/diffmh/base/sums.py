"""Compensated sums of pytrees, since long float32 sums drift, and means over the other chains."""

from __future__ import annotations

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree, Shaped

from . import trees


class CompensatedSum(eqx.Module):
    """A running sum and the low-order digits that it lost: the total is `total + lost` (Neumaier
    1974).
    """

    total: PyTree
    lost: PyTree

    @staticmethod
    def like(zeros: PyTree) -> CompensatedSum:
        return CompensatedSum(zeros, zeros)

    def plus(self, amount: PyTree) -> CompensatedSum:
        total = trees.add(self.total, amount)

        def slip(before, amount, after):
            # The digits lost in `after` are those of the smaller number; this difference is exact.
            keeps_before = jnp.abs(before) >= jnp.abs(amount)
            return jnp.where(keeps_before, (before - after) + amount, (amount - after) + before)

        return CompensatedSum(
            total, trees.add(self.lost, jax.tree.map(slip, self.total, amount, total))
        )

    def value(self) -> PyTree:
        return trees.add(self.total, self.lost)


def mean_of_others(
    values: Shaped[Array, "..."], axis: int | tuple[int, ...] = -1
) -> Shaped[Array, "..."]:
    """For each of the C entries along one or several axes, the mean of the other entries:
    `m + (m − x_c) / (C − 1)`; 0 if there is only one.
    """
    axes = axis if isinstance(axis, tuple) else (axis,)
    count = math.prod(values.shape[axis] for axis in axes)
    if count == 1:
        return jnp.zeros_like(values)
    # From the mean, not from the sum, which would lose digits of a large common part.
    mean = jnp.mean(values, axis=axes, keepdims=True)
    return mean + (mean - values) / (count - 1)
