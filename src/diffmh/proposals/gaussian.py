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
from jaxtyping import Array, ArrayLike, Float, PyTree

from .. import _trees, _validate
from .proposal import NoiseProposal


class GaussianProposal(NoiseProposal):
    """`q(· | x) = N(m(x), L Lᵀ)`; `L` is a number, a vector (a diagonal), a lower-triangular
    matrix, or a diagonal as a pytree of scales like the state.

    A vector or a matrix acts on the state flattened in the order of
    `jax.flatten_util.ravel_pytree`. Each scale of a pytree is a number or of its leaf's shape.
    """

    scale: eqx.AbstractVar[PyTree]

    @abstractmethod
    def mean(self, x: PyTree) -> PyTree:
        """`m(x)`."""

    @property
    def scale_name(self) -> str:
        """What its user calls `L`."""
        return f"{type(self).__name__}(scale=...)"

    def noise(self, key, x, num_steps):
        """`L z` for each step."""
        self.refuse_whole(x)
        leaves, structure = jax.tree.flatten(x)
        keys = [key] if len(leaves) == 1 else jax.random.split(key, len(leaves))
        draws = [
            jax.random.normal(k, (num_steps, *leaf.shape), leaf.dtype)
            for k, leaf in zip(keys, leaves, strict=True)
        ]
        return jax.vmap(self.colour)(jax.tree.unflatten(structure, draws))

    def refuse_whole(self, x: PyTree) -> None:
        """Refuses states that are not floats; their shapes and dtypes are enough."""
        name = self.scale_name.partition("(")[0]
        for path, leaf in jax.tree_util.tree_leaves_with_path(x):
            if not jnp.issubdtype(leaf.dtype, jnp.floating):
                raise TypeError(
                    f"`{name}` moves floats, but state{jax.tree_util.keystr(path)}"
                    f" is {leaf.dtype}:"
                    " start from a float, or move the real part alone with `On(where, ...)`."
                )

    def move(self, x, noise):
        return _trees.add(self.mean(x), noise)

    def log_prob(self, x, x_new):
        z = self.whiten(_trees.subtract(x_new, self.mean(x)))
        size = sum(leaf.size for leaf in jax.tree.leaves(x))
        log_constant = 0.5 * size * math.log(2 * math.pi) + self._log_determinant(x)
        return -0.5 * _trees.dot(z, z) - log_constant

    def colour(self, z: PyTree) -> PyTree:
        """`L z`."""
        return self._apply(z, lambda scale, leaf: scale * leaf, lambda scale, flat: scale @ flat)

    def whiten(self, step: PyTree) -> PyTree:
        """`L⁻¹ step`."""
        solve = lambda scale, flat: jax.scipy.linalg.solve_triangular(scale, flat, lower=True)
        return self._apply(step, lambda scale, leaf: leaf / scale, solve)

    def pull(self, gradient: PyTree) -> PyTree:
        """`Lᵀ gradient`: the gradient with respect to `L⁻¹ x`."""
        transposed = lambda scale, flat: scale.T @ flat
        return self._apply(gradient, lambda scale, leaf: scale * leaf, transposed)

    def _apply(self, tree, elementwise, matrix):
        if not eqx.is_array(self.scale):
            return jax.tree.map(elementwise, self._by_leaf(tree), tree)
        if self.scale.ndim == 0:
            return jax.tree.map(lambda leaf: elementwise(self.scale.astype(leaf.dtype), leaf), tree)
        flat, unravel = ravel_pytree(tree)
        if flat.size != self.scale.shape[0]:
            raise ValueError(
                f"`{self.scale_name}` of shape {self.scale.shape} does not fit a"
                f" state of {flat.size} numbers."
            )
        scale = self.scale.astype(flat.dtype)
        return unravel(elementwise(scale, flat) if scale.ndim == 1 else matrix(scale, flat))

    def _by_leaf(self, x: PyTree) -> PyTree:
        """The scale of each leaf, where `scale` is a pytree."""
        name = f"`{self.scale_name}`"
        expected, found = jax.tree.structure(x), jax.tree.structure(self.scale)
        if expected != found:
            raise ValueError(f"{name} must be a pytree like the state, {expected}, got {found}.")

        def fitted(path, scale, leaf):
            if scale.shape not in ((), leaf.shape):
                raise ValueError(
                    f"{name}{jax.tree_util.keystr(path)} of shape {scale.shape} does not fit the"
                    f" state's {leaf.shape}: give a number or that shape."
                )
            return scale.astype(leaf.dtype)

        return jax.tree_util.tree_map_with_path(fitted, self.scale, x)

    def _log_determinant(self, x: PyTree) -> Array:
        if not eqx.is_array(self.scale):
            logs = jax.tree.map(
                lambda scale, leaf: jnp.sum(jnp.log(jnp.broadcast_to(scale, leaf.shape))),
                self._by_leaf(x),
                x,
            )
            return jnp.sum(jnp.stack(jax.tree.leaves(logs)))
        if self.scale.ndim == 0:
            return sum(leaf.size for leaf in jax.tree.leaves(x)) * jnp.log(self.scale)
        return jnp.sum(jnp.log(self.scale if self.scale.ndim == 1 else jnp.diagonal(self.scale)))


class GaussianWalk(GaussianProposal):
    """The random walk `x' = x + L z`, on any pytree of float arrays.

    `scale` is `L`: a positive number, a vector of positive numbers, a lower-triangular matrix with
    positive diagonal (`jnp.linalg.cholesky(covariance)`), or a pytree of positive scales like the
    state, each a number or of its leaf's shape. Anything else is refused. Best coupled by
    `MaximalReflection`.

    >>> import diffmh, jax, jax.numpy as jnp
    >>> diffmh.GaussianWalk(2.38).sample(jax.random.key(0), jnp.zeros(3)).shape
    (3,)
    >>> diffmh.GaussianWalk({"mean": 0.5, "log_scale": jnp.array([0.1, 0.2])}).symmetric
    True
    """

    scale: PyTree
    symmetric: bool = eqx.field(static=True)

    def __init__(self, scale: PyTree):
        self.scale = checked_scale(scale, "GaussianWalk(scale=...)")
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
    scale: PyTree
    centre: PyTree
    symmetric: bool = eqx.field(static=True)

    def __init__(self, beta: ArrayLike, scale: PyTree = 1.0, centre: PyTree = 0.0):
        self.beta = jnp.asarray(beta)
        _validate.real_dtype(self.beta.dtype, "`CrankNicolson(beta=...)`")
        if _validate.concrete(self.beta) and not 0 < float(self.beta) <= 1:
            raise ValueError(f"`CrankNicolson(beta=...)` must be in (0, 1], got {beta}.")
        prior = checked_scale(scale, "CrankNicolson(scale=...)")
        self.scale = jax.tree.map(lambda scale: self.beta * scale, prior)
        self.centre = jax.tree.map(jnp.asarray, centre)
        self.symmetric = False

    def mean(self, x):
        keep = jnp.sqrt(1 - self.beta**2)

        def towards(leaf, centre):
            return (centre + keep * (leaf - centre)).astype(leaf.dtype)

        if jax.tree.structure(self.centre) == jax.tree.structure(0):
            return jax.tree.map(lambda leaf: towards(leaf, self.centre), x)
        return jax.tree.map(towards, x, self.centre)


def checked_scale(scale: PyTree, name: str) -> PyTree:
    if eqx.is_array_like(scale) or _numbers(scale):
        return _checked_array(scale, name, dimensions=2)
    leaves = jax.tree_util.tree_leaves_with_path(scale)
    if not leaves or not all(eqx.is_array_like(leaf) for _, leaf in leaves):
        raise TypeError(
            f"`{name}` must be a number, a vector, a matrix or a pytree of scales like the state,"
            f" got {scale!r}."
        )
    checked = lambda path, leaf: _checked_array(leaf, name, dimensions=None)
    return jax.tree_util.tree_map_with_path(checked, scale)


def _numbers(scale: PyTree) -> bool:
    """Whether it is a vector or a matrix written as lists or tuples of Python numbers."""
    if isinstance(scale, list | tuple) and not hasattr(scale, "_fields"):
        return bool(scale) and all(_numbers(entry) for entry in scale)
    return isinstance(scale, int | float)


def _checked_array(scale: ArrayLike, name: str, dimensions: int | None) -> Array:
    """Positive and finite; a number, vector or triangular matrix if `dimensions` is 2."""
    array = jnp.asarray(scale)
    if jnp.issubdtype(array.dtype, jnp.integer):
        array = array.astype(float)
    _validate.real_dtype(array.dtype, f"`{name}`")
    matrix = dimensions == 2 and array.ndim == 2
    if dimensions == 2 and (array.ndim > 2 or (matrix and array.shape[0] != array.shape[1])):
        raise ValueError(
            f"`{name}` must be a number, a vector or a square matrix, got shape {array.shape}."
        )
    if not _validate.concrete(array):
        return array
    values = np.asarray(array)
    if not matrix and not np.all(values > 0):
        raise ValueError(f"`{name}` must be positive, got {scale}.")
    if matrix and not (np.all(np.triu(values, 1) == 0) and np.all(np.diagonal(values) > 0)):
        raise ValueError(
            f"`{name}` must be lower-triangular with a positive diagonal, got {scale}: pass"
            " `jnp.linalg.cholesky(covariance)`."
        )
    if not np.all(np.isfinite(values)):
        raise ValueError(f"`{name}` must be finite, got {scale}.")
    return array
