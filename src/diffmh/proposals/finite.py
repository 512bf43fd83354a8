"""Proposals on the states `0, 1, ..., n − 1`."""

from __future__ import annotations

from abc import abstractmethod

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int

from ..base import validate
from ..base.inversion import index_from_uniform
from ..base.validate import Checked
from .proposal import NoiseProposal


class FiniteProposal(NoiseProposal):
    """A proposal on finitely many states whose distribution can be written down. Its maximal
    coupling is computed exactly.
    """

    @abstractmethod
    def probabilities(self, x: Int[Array, ""]) -> Float[Array, "n"]:
        """`q(· | x)`."""

    def log_prob(self, x, x_new):
        return jnp.log(self.probabilities(x)[x_new])

    def log_probabilities(self, x: Int[Array, ""]) -> Float[Array, "n"]:
        """`log q(· | x)`, differentiable."""
        p = self.probabilities(x)
        # Two guards: where p = 0 the derivative of the logarithm would be NaN.
        return jnp.where(p > 0, jnp.log(jnp.where(p > 0, p, 1.0)), -jnp.inf)


class OtherState(FiniteProposal):
    """One of the other states, each with probability `1/(n − 1)`. The best coupling is `Maximal`.

    >>> import diffmh, jax, jax.numpy as jnp
    >>> int(diffmh.OtherState(3).sample(jax.random.key(0), jnp.array(1))) in (0, 2)
    True
    """

    num_states: int = eqx.field(static=True)
    symmetric: bool = eqx.field(static=True)

    def __init__(self, num_states: Checked[int]):
        self.num_states = validate.count(num_states, "OtherState(num_states=...)", least=2)
        self.symmetric = True

    def noise(self, key, x, num_steps):
        _check_index(x, "OtherState", self.num_states)
        # A shift of 1 to n − 1 modulo n: each of the other states with the same probability.
        return jax.random.randint(key, (num_steps,), 1, self.num_states)

    def move(self, x, noise):
        return shifted(x, noise, self.num_states)

    def refuse_start(self, x):
        refuse_labels(x, self.num_states, f"OtherState({self.num_states})")

    def probabilities(self, x):
        return jnp.where(jnp.arange(self.num_states) == x, 0.0, 1.0 / (self.num_states - 1))


class TransitionMatrix(FiniteProposal):
    """From state `i` propose `j` with probability `probabilities[i, j]`. Rows sum to one; zeros and
    asymmetry are allowed. If the matrix depends on theta, its normalised rows are differentiated.

    The best coupling is `Maximal`.

    >>> import diffmh, jax, jax.numpy as jnp
    >>> matrix = jnp.array([[0.0, 0.9, 0.1], [0.1, 0.0, 0.9], [0.9, 0.1, 0.0]])
    >>> ring = diffmh.TransitionMatrix(matrix)
    >>> round(float(jnp.exp(ring.log_prob(jnp.array(0), jnp.array(1)))), 6)
    0.9
    """

    matrix: Float[Array, "n n"]
    symmetric: bool = eqx.field(static=True)

    def __init__(self, probabilities: Checked[Array]):
        self.matrix = validate.real_array(probabilities, "TransitionMatrix(probabilities=...)")
        shape = self.matrix.shape
        if self.matrix.ndim != 2 or shape[0] != shape[1] or shape[0] < 2:
            raise ValueError(
                "`TransitionMatrix(probabilities=...)` must be square with at least two states, got"
                f" shape {shape}."
            )
        known = validate.concrete(self.matrix)
        values, _ = validate.numpy_of(self.matrix)
        self.symmetric = known and bool(np.all(values == values.T))
        if not known:
            # Single entries may vary without the row sums staying 1. The derivative is that of the
            # normalised rows, both in the choice and in `log_prob`.
            sums = jnp.sum(self.matrix, axis=1, keepdims=True)
            self.matrix = self.matrix / (sums / jax.lax.stop_gradient(sums))

    def conditions(self):
        return validate.probabilities(self.matrix, "TransitionMatrix(probabilities=...)")

    def noise(self, key, x, num_steps):
        _check_index(x, "TransitionMatrix", self.matrix.shape[0])
        return jax.random.uniform(key, (num_steps,), self.matrix.dtype)

    def move(self, x, noise):
        return index_from_uniform(self.probabilities(x), noise).astype(x.dtype)

    def probabilities(self, x):
        return self.matrix[x]

    def refuse_start(self, x):
        size = self.matrix.shape[0]
        refuse_labels(x, size, f"TransitionMatrix(probabilities=...) of {size} states")


def shifted(label: Array, shift: Array, num_values: int) -> Array:
    """`(label + shift) mod num_values` for a shift of 1 to `num_values − 1`, in the label's dtype,
    which may be too small for the sum.
    """
    # label + shift ≥ n iff label ≥ n − shift, so the sum is never computed.
    back = num_values - shift
    wide = label.astype(shift.dtype)
    return jnp.where(wide >= back, wide - back, wide + shift).astype(label.dtype)


def refuse_labels(x: ArrayLike, num_values: int, name: str) -> None:
    values = np.asarray(x)
    wrong = values[(values < 0) | (values >= num_values)]
    if wrong.size:
        raise ValueError(
            f"`{name}` moves labels 0 to {num_values - 1}, but the start has {wrong.flat[0]}: start"
            " with labels in this range."
        )


def check_label_dtype(dtype, num_values: int, name: str) -> None:
    most = 1 if dtype == jnp.bool_ else jnp.iinfo(dtype).max
    if num_values - 1 > most:
        raise TypeError(
            f"`{name}` moves labels 0 to {num_values - 1}, which do not fit {dtype}: start with"
            " a wider integer type such as int32."
        )


def _check_index(x, name, num_states):
    if not hasattr(x, "dtype") or x.shape != () or not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(
            f"`{name}` moves one integer, the index of a state, got {x}: start from an integer such"
            " as 0."
        )
    check_label_dtype(x.dtype, num_states, name)
