"""Gaussian steps: `x' = m(x) + L z` with `z` standard normal and `L` independent of the state."""

# No `from __future__ import annotations` here: equinox reads `AbstractVar` off the annotation
# itself.

import math
from abc import abstractmethod

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PyTree

from .. import _trees, _validate
from .proposal import NoiseProposal


class GaussianProposal(NoiseProposal):
    """`q(· | x) = N(m(x), L Lᵀ)`; `L` is a number, a vector (a diagonal) or a lower-triangular
    matrix.

    A vector or a matrix acts on the state flattened in the order of
    `jax.flatten_util.ravel_pytree`.
    """

    scale: eqx.AbstractVar[Float[Array, ""] | Float[Array, "d"] | Float[Array, "d d"]]

    @abstractmethod
    def mean(self, x: PyTree) -> PyTree:
        """`m(x)`."""

    def noise(self, key, x, num_steps):
        """`L z` for each step."""
        for path, leaf in jax.tree_util.tree_leaves_with_path(x):
            if not jnp.issubdtype(leaf.dtype, jnp.floating):
                raise TypeError(
                    f"`{type(self).__name__}` moves floats, but state{jax.tree_util.keystr(path)}"
                    f" is {leaf.dtype}:"
                    " start from a float, or move the real part alone with `On(where, ...)`."
                )
        leaves, structure = jax.tree.flatten(x)
        keys = [key] if len(leaves) == 1 else jax.random.split(key, len(leaves))
        draws = [
            jax.random.normal(k, (num_steps, *leaf.shape), leaf.dtype)
            for k, leaf in zip(keys, leaves, strict=True)
        ]
        return jax.vmap(self.colour)(jax.tree.unflatten(structure, draws))

    def move(self, x, noise):
        return _trees.add(self.mean(x), noise)

    def log_prob(self, x, x_new):
        z = self.whiten(_trees.subtract(x_new, self.mean(x)))
        size = sum(leaf.size for leaf in jax.tree.leaves(x))
        return -0.5 * (_trees.dot(z, z) + size * math.log(2 * math.pi)) - self._log_determinant(
            size
        )

    def colour(self, z: PyTree) -> PyTree:
        """`L z`."""
        return self._apply(z, lambda scale, leaf: scale * leaf, lambda scale, flat: scale @ flat)

    def whiten(self, step: PyTree) -> PyTree:
        """`L⁻¹ step`."""
        solve = lambda scale, flat: jax.scipy.linalg.solve_triangular(scale, flat, lower=True)
        return self._apply(step, lambda scale, leaf: leaf / scale, solve)

    def _apply(self, tree, elementwise, matrix):
        if self.scale.ndim == 0:
            return jax.tree.map(lambda leaf: elementwise(self.scale.astype(leaf.dtype), leaf), tree)
        flat, unravel = ravel_pytree(tree)
        if flat.size != self.scale.shape[0]:
            raise ValueError(
                f"`{type(self).__name__}(scale=...)` of shape {self.scale.shape} does not fit a"
                f" state of {flat.size} numbers."
            )
        scale = self.scale.astype(flat.dtype)
        return unravel(elementwise(scale, flat) if scale.ndim == 1 else matrix(scale, flat))

    def _log_determinant(self, size: int) -> Array:
        if self.scale.ndim == 0:
            return size * jnp.log(self.scale)
        return jnp.sum(jnp.log(self.scale if self.scale.ndim == 1 else jnp.diagonal(self.scale)))


class GaussianWalk(GaussianProposal):
    """The random walk `x' = x + L z`, on any pytree of float arrays.

    `scale` is `L`: a positive number, a vector of positive numbers, or a lower-triangular matrix
    with positive diagonal (`jnp.linalg.cholesky(covariance)`). Anything else is refused. Best
    coupled by `MaximalReflection`.

    >>> import diffmh, jax, jax.numpy as jnp
    >>> diffmh.GaussianWalk(2.38).sample(jax.random.key(0), jnp.zeros(3)).shape
    (3,)
    """

    scale: Float[Array, ""] | Float[Array, "d"] | Float[Array, "d d"]
    symmetric: bool = eqx.field(static=True)

    def __init__(self, scale: float | Array):
        self.scale = _checked_scale(scale, "GaussianWalk(scale=...)")
        self.symmetric = True

    def mean(self, x):
        return x


class CrankNicolson(GaussianProposal):
    """The preconditioned Crank–Nicolson walk `x' = c + √(1−β²)(x − c) + β L z`, reversible for the
    prior `N(c, L Lᵀ)`.

    `beta` in (0, 1]; `scale` is the prior's `L` as in `GaussianWalk`; `centre` its mean, a number
    or a state. For a target `prior × likelihood` the accept ratio reduces to the likelihood's,
    whatever the dimension. Best coupled by `MaximalReflection`.

    >>> import diffmh, jax, jax.numpy as jnp
    >>> diffmh.CrankNicolson(0.5).sample(jax.random.key(0), jnp.zeros(3)).shape
    (3,)
    """

    beta: Float[Array, ""]
    scale: Float[Array, ""] | Float[Array, "d"] | Float[Array, "d d"]
    centre: PyTree
    symmetric: bool = eqx.field(static=True)

    def __init__(self, beta: float | Array, scale: float | Array = 1.0, centre: PyTree = 0.0):
        self.beta = jnp.asarray(beta)
        _validate.real_dtype(self.beta.dtype, "`CrankNicolson(beta=...)`")
        if _validate.concrete(beta) and not 0 < float(beta) <= 1:
            raise ValueError(f"`CrankNicolson(beta=...)` must be in (0, 1], got {beta}.")
        self.scale = self.beta * _checked_scale(scale, "CrankNicolson(scale=...)")
        self.centre = jax.tree.map(jnp.asarray, centre)
        self.symmetric = False

    def mean(self, x):
        keep = jnp.sqrt(1 - self.beta**2)
        towards = lambda leaf, centre: (centre + keep * (leaf - centre)).astype(leaf.dtype)
        if jax.tree.structure(self.centre) == jax.tree.structure(0):
            return jax.tree.map(lambda leaf: towards(leaf, self.centre), x)
        return jax.tree.map(towards, x, self.centre)


def _checked_scale(scale: float | Array, name: str) -> Array:
    if isinstance(scale, str) or (
        not eqx.is_array_like(scale) and not isinstance(scale, list | tuple)
    ):
        raise TypeError(f"`{name}` must be a number, a vector or a matrix, got {scale!r}.")
    array = jnp.asarray(scale)
    if jnp.issubdtype(array.dtype, jnp.integer):
        array = array.astype(float)
    _validate.real_dtype(array.dtype, f"`{name}`")
    if array.ndim > 2 or (array.ndim == 2 and array.shape[0] != array.shape[1]):
        raise ValueError(
            f"`{name}` must be a number, a vector or a square matrix, got shape {array.shape}."
        )
    if not _validate.concrete(array):
        return array
    values = np.asarray(array)
    if values.ndim < 2 and not np.all(values > 0):
        raise ValueError(f"`{name}` must be positive, got {scale}.")
    if values.ndim == 2 and not (
        np.all(np.triu(values, 1) == 0) and np.all(np.diagonal(values) > 0)
    ):
        raise ValueError(
            f"`{name}` must be lower-triangular with a positive diagonal, got {scale}: pass"
            " `jnp.linalg.cholesky(covariance)`."
        )
    if not np.all(np.isfinite(values)):
        raise ValueError(f"`{name}` must be finite, got {scale}.")
    return array
