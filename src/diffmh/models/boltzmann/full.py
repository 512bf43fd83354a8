"""The fully connected machine."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from ...base import validate
from ...base.validate import Checked
from ...kernels import BlockGibbs, Sweep
from .enumeration import configurations, log_sum_exp


class Full(eqx.Module):
    """`log g(s) = Σ_i h_i s_i + Σ_{i<j} J_ij s_i s_j` for spins `s_i = ±1`. The same class holds
    the parameters and the moments.

    - `fields`: h, of shape (n,).
    - `couplings`: J for the pairs (0, 1), (0, 2), ..., (n − 2, n − 1), of shape (n(n − 1)/2,).

    >>> import jax, diffmh
    >>> from diffmh.models import boltzmann
    >>> theta = boltzmann.Full.random(jax.random.key(0), 4)
    >>> moments = diffmh.expectation(
    ...     boltzmann.Full.moments, theta.sampler(), init=theta.start(), num_samples=50, burn_in=10)
    >>> moments(theta, jax.random.key(1)).couplings.shape, theta.exact_moments().fields.shape
    ((6,), (4,))
    """

    fields: Float[Array, "n"]
    couplings: Float[Array, "pairs"]

    @staticmethod
    def zeros(num_spins: Checked[int]) -> Full:
        """No fields and no couplings: all configurations are equally probable."""
        count = validate.count(num_spins, "Full.zeros(num_spins=...)")
        return Full(jnp.zeros(count), jnp.zeros(count * (count - 1) // 2))

    @staticmethod
    def random(
        key: Checked[Key[Array, ""]], num_spins: Checked[int], scale: Checked[float] = 1.0
    ) -> Full:
        """Fields of standard deviation `scale`, couplings of `scale/√n`."""
        zeros = Full.zeros(num_spins)
        scale = validate.number(scale, "Full.random(scale=...)", above=0, least=True)
        key_fields, key_couplings = jax.random.split(validate.typed_key(key))
        fields = scale * jax.random.normal(key_fields, zeros.fields.shape)
        couplings = scale * jax.random.normal(key_couplings, zeros.couplings.shape)
        return Full(fields, couplings / jnp.sqrt(num_spins))

    @property
    def num_spins(self) -> int:
        return self.fields.shape[0]

    @property
    def matrix(self) -> Float[Array, "n n"]:
        """J as a symmetric matrix with zero diagonal."""
        rows, columns = np.triu_indices(self.num_spins, 1)
        upper = jnp.zeros((self.num_spins, self.num_spins)).at[rows, columns].set(self.couplings)
        return upper + upper.T

    def log_density(self, s: Int[Array, "n"], *args: Any) -> Float[Array, ""]:
        """`log g(s)`, unnormalised."""
        # Each pair occurs twice in the symmetric matrix.
        return s @ self.fields + 0.5 * (s @ self.matrix @ s)

    def moments(self, s: Int[Array, "n"], *args: Any) -> Full:
        """`s_i` and `s_i s_j` of one configuration, to be averaged."""
        rows, columns = np.triu_indices(self.num_spins, 1)
        return Full(s * 1.0, s[rows] * s[columns] * 1.0)

    def start(self) -> Int[Array, "n"]:
        """All spins up."""
        return jnp.ones(self.num_spins, jnp.int8)

    def sampler(self) -> Sweep:
        """A sweep of Gibbs draws, spin by spin; the kernel fits any machine of this size."""

        # log p(s_i = 1)/p(s_i = −1) given the others; the diagonal of J is 0.
        def at(site):
            def log_odds(theta, s, *args):
                return 2 * (theta.fields[site] + theta.matrix[site] @ s)

            return BlockGibbs(log_odds, lambda s: s[site], Full.log_density, (-1, 1))

        return Sweep(at, self.num_spins)

    def log_partition(self) -> float:
        """`log Σ_s g(s)`, exactly, for at most 20 spins."""
        return log_sum_exp(self._terms()[1])

    def exact_moments(self) -> Full:
        """`E[s_i]` and `E[s_i s_j]`, exactly, for at most 20 spins."""
        s, terms = self._terms()
        p = np.exp(terms - log_sum_exp(terms))
        pairs = (s * p[:, None]).T @ s
        upper = pairs[np.triu_indices(self.num_spins, 1)]
        return Full(jnp.asarray(p @ s, float), jnp.asarray(upper, float))

    def _terms(self) -> tuple[np.ndarray, np.ndarray]:
        s = configurations(self.num_spins, (-1, 1), "`Full`")
        matrix = np.asarray(self.matrix, float)
        # ½, as each pair occurs twice in the symmetric matrix.
        return s, s @ np.asarray(self.fields, float) + 0.5 * np.sum((s @ matrix) * s, axis=1)
