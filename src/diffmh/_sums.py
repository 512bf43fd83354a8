"""Compensated sums of pytrees: long float32 sums drift otherwise."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from . import _trees


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
        total = _trees.add(self.total, amount)

        def slip(before, amount, after):
            keeps_before = jnp.abs(before) >= jnp.abs(amount)
            return jnp.where(keeps_before, (before - after) + amount, (amount - after) + before)

        return CompensatedSum(
            total, _trees.add(self.lost, jax.tree.map(slip, self.total, amount, total))
        )

    def value(self) -> PyTree:
        return _trees.add(self.total, self.lost)
