"""Gaussian steps: `x' = m(x) + L z` with `z` standard normal and `L` independent of the state."""

# No `from __future__ import annotations` here: equinox needs `AbstractVar` as an object, not text.

import math
import operator
from abc import abstractmethod

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, ArrayLike, Float, PyTree

from ..base import trees, validate
from ..base.validate import Checked
from .proposal import NoiseProposal


class GaussianProposal(NoiseProposal):
    """`q(· | x) = N(m(x), L Lᵀ)`. `L` is a number, a vector (a diagonal), a lower-triangular
    matrix, or a pytree of scales like the state (a diagonal).

    A vector or a matrix acts on the state flattened in the order of
    `jax.flatten_util.ravel_pytree`. Each scale of a pytree is a number or has its leaf's shape.
    """

    scale: eqx.AbstractVar[PyTree]

    @abstractmethod
    def mean(self, x: PyTree) -> PyTree:
        """`m(x)`."""

    @property
    def scale_name(self) -> str:
        """The argument that `L` comes from, for messages."""
        return f"{type(self).__name__}(scale=...)"

    def noise(self, key, x, num_steps):
        """`L z` for each step."""
        self.check_floats(x)
        leaves, structure = jax.tree.flatten(x)
        # A state of one array uses the key itself, so that it gets the same noise as a bare array.
        keys = [key] if len(leaves) == 1 else jax.random.split(key, len(leaves))
        draws = [
            jax.random.normal(k, (num_steps, *leaf.shape), leaf.dtype)
            for k, leaf in zip(keys, leaves, strict=True)
        ]
        return jax.vmap(self.colour)(jax.tree.unflatten(structure, draws))

    def check_floats(self, x: PyTree) -> None:
        """Raise an error if the state is not of floats. Shapes and dtypes are sufficient."""
        remedy = "(`init`, or `x`), or move the real part alone with `On(where, ...)`"
        check_floats(x, self.scale_name.partition("(")[0], remedy)

    def conditions(self):
        return scale_conditions(self.scale, self.scale_name)

    def move(self, x, noise):
        return trees.add(self.mean(x), noise)

    def log_prob(self, x, x_new):
        z = self.whiten(trees.subtract(x_new, self.mean(x)))
        log_constant = 0.5 * trees.size(x) * math.log(2 * math.pi) + self._log_determinant(x)
        return -0.5 * trees.dot(z, z) - log_constant

    def colour(self, z: PyTree) -> PyTree:
        """`L z`."""
        return self._apply(z, operator.mul, operator.matmul)

    def whiten(self, step: PyTree) -> PyTree:
        """`L⁻¹ step`."""
        return self._apply(step, lambda scale, leaf: leaf / scale, _solve)

    def pull(self, gradient: PyTree) -> PyTree:
        """`Lᵀ gradient`: the gradient with respect to `L⁻¹ x`."""
        return self._apply(gradient, operator.mul, lambda scale, flat: scale.T @ flat)

    def _apply(self, tree, elementwise, matrix):
        if not eqx.is_array(self.scale):
            return jax.tree.map(elementwise, self._by_leaf(tree), tree)
        if self.scale.ndim == 0:
            return jax.tree.map(lambda leaf: elementwise(self.scale.astype(leaf.dtype), leaf), tree)
        # A vector or a matrix acts on the flattened state, in the order of `ravel_pytree`.
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
        scales = scale_by_leaf(self.scale, x, self.scale_name)
        return jax.tree.map(lambda scale, leaf: scale.astype(leaf.dtype), scales, x)

    def _log_determinant(self, x: PyTree) -> Array:
        if not eqx.is_array(self.scale):

            def log_volume(scale, leaf):
                return jnp.sum(jnp.log(jnp.broadcast_to(scale, leaf.shape)))

            logs = jax.tree.leaves(jax.tree.map(log_volume, self._by_leaf(x), x))
            return jnp.sum(jnp.stack(logs))
        if self.scale.ndim == 0:
            return trees.size(x) * jnp.log(self.scale)
        return jnp.sum(jnp.log(self.scale)) if self.scale.ndim == 1 else _log_volume(self.scale)


# L itself is lower-triangular (`scale_conditions`), but its derivative with respect to θ need not
# be: `L(θ) = θ`. So the derivatives are those for any matrix, with `∂L` above the diagonal.


@jax.custom_jvp
def _solve(scale: Float[Array, "d d"], step: Float[Array, "d"]) -> Float[Array, "d"]:
    """`L⁻¹ step`."""
    return jax.scipy.linalg.solve_triangular(scale, step, lower=True)


@_solve.defjvp
def _solve_jvp(primals, tangents):
    """`d(L⁻¹ s) = L⁻¹ (ds − dL L⁻¹ s)`."""
    (scale, step), (scale_dot, step_dot) = primals, tangents
    solved = _solve(scale, step)
    return solved, _solve(scale, step_dot - scale_dot @ solved)


@jax.custom_jvp
def _log_volume(scale: Float[Array, "d d"]) -> Float[Array, ""]:
    """`log |det L|`."""
    return jnp.sum(jnp.log(jnp.diagonal(scale)))


@_log_volume.defjvp
def _log_volume_jvp(primals, tangents):
    """`d log |det L| = tr L⁻¹ dL`."""
    (scale,), (scale_dot,) = primals, tangents
    columns = jax.vmap(_solve, in_axes=(None, 1), out_axes=1)(scale, scale_dot)
    return _log_volume(scale), jnp.trace(columns)


class GaussianWalk(GaussianProposal):
    """The random walk `x' = x + L z`, on any pytree of float arrays.

    `scale` is `L`: a positive number, a vector of positive numbers, a lower-triangular matrix with
    positive diagonal (`jnp.linalg.cholesky(covariance)`), or a pytree of positive scales like the
    state, each a number or of its leaf's shape. Anything else raises an error. If it is a function
    of theta that leaves these ranges under `jit`, the result is NaN. The best coupling is
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
        self.scale = scale_array(scale, self.scale_name)
        self.symmetric = True

    def mean(self, x):
        return x


class CrankNicolson(GaussianProposal):
    """The preconditioned Crank–Nicolson walk `x' = c + √(1−β²)(x − c) + β L z`, reversible for the
    prior `N(c, L Lᵀ)`.

    `beta` in (0, 1]; `scale` is the prior's `L` as in `GaussianWalk`; `centre` is its mean, a
    number or a state. For a target `prior × likelihood`, the accept ratio is that of the likelihood
    in any dimension. The best coupling is `MaximalReflection`.

    >>> import diffmh, jax, jax.numpy as jnp
    >>> diffmh.CrankNicolson(0.5).sample(jax.random.key(0), jnp.zeros(3)).shape
    (3,)
    """

    beta: Float[Array, ""]
    scale: PyTree
    centre: PyTree
    symmetric: bool = eqx.field(static=True)

    def __init__(self, beta: Checked[ArrayLike], scale: PyTree = 1.0, centre: PyTree = 0.0):
        self.beta = validate.real_array(beta, "CrankNicolson(beta=...)", shape=())
        prior = scale_array(scale, self.scale_name)
        validate.require((*self._beta_in_range(), *scale_conditions(prior, self.scale_name)))
        self.scale = jax.tree.map(lambda scale: self.beta * scale, prior)
        self.centre = validate.real_arrays(centre, "CrankNicolson(centre=...)")
        self.symmetric = False

    def _beta_in_range(self) -> tuple[validate.Condition, ...]:
        beta, _ = validate.numpy_of(self.beta)
        name = "`CrankNicolson(beta=...)` must be in (0, 1]"
        return (validate.Condition((beta > 0) & (beta <= 1), self.beta, name),)

    def conditions(self):
        centre = validate.finite(self.centre, "CrankNicolson(centre=...)")
        return (*self._beta_in_range(), *super().conditions(), *centre)

    def mean(self, x):
        # If x has the distribution N(c, L Lᵀ), so has c + √(1−β²)(x − c) + β L z.
        keep = jnp.sqrt(1 - self.beta**2)

        def towards(leaf, centre):
            return (centre + keep * (leaf - centre)).astype(leaf.dtype)

        if jax.tree.structure(self.centre) == jax.tree.structure(0):
            return jax.tree.map(lambda leaf: towards(leaf, self.centre), x)
        return jax.tree.map(towards, x, self.centre)


def scale_array(scale: PyTree, name: str) -> PyTree:
    """A number, vector or square matrix as an array, or a pytree of arrays, all floats."""
    if eqx.is_array_like(scale) or _numbers(scale):
        array = validate.real_array(scale, name)
        if array.ndim > 2 or (array.ndim == 2 and array.shape[0] != array.shape[1]):
            raise ValueError(
                f"`{name}` must be a number, a vector or a square matrix, got shape {array.shape}."
            )
        return array
    if not jax.tree.leaves(scale) or not all(map(eqx.is_array_like, jax.tree.leaves(scale))):
        raise TypeError(
            f"`{name}` must be a number, a vector, a matrix or a pytree of scales like the state,"
            f" got {scale!r}."
        )
    return validate.real_arrays(scale, name)


def _numbers(scale: PyTree) -> bool:
    """True for a vector or a matrix written as lists or tuples of Python numbers."""
    if isinstance(scale, list | tuple) and not hasattr(scale, "_fields"):
        return bool(scale) and all(_numbers(entry) for entry in scale)
    return isinstance(scale, int | float)


def scale_conditions(scale: PyTree, name: str) -> tuple[validate.Condition, ...]:
    """Positive and finite; a matrix is lower-triangular with a positive diagonal."""
    if not (eqx.is_array(scale) and scale.ndim == 2):
        leaves = jax.tree.leaves(scale)
        return tuple(each for leaf in leaves for each in validate.positive(leaf, name))
    matrix, xp = validate.numpy_of(scale)
    triangular = xp.all(xp.triu(matrix, 1) == 0) & xp.all(xp.diagonal(matrix) > 0)
    wanted = (
        f"`{name}` must be lower-triangular with a positive diagonal"
        " (`jnp.linalg.cholesky(covariance)`)"
    )
    return (validate.Condition(triangular, scale, wanted), *validate.finite(scale, name))


def scale_by_leaf(scale: PyTree, x: PyTree, name: str) -> PyTree:
    """The scale of each leaf of the state, from a pytree of scales like the state."""
    expected, found = jax.tree.structure(x), jax.tree.structure(scale)
    if expected != found:
        raise ValueError(
            f"`{name}` is a pytree, so it must have the structure of the state, {expected}, got"
            f" {found}."
        )

    def fitted(path, scale, leaf):
        if jnp.shape(scale) not in ((), jnp.shape(leaf)):
            raise ValueError(
                f"`{name}`{jax.tree_util.keystr(path)} of shape {jnp.shape(scale)} does not fit the"
                f" state's {jnp.shape(leaf)}: give a number or that shape."
            )
        return scale

    return jax.tree_util.tree_map_with_path(fitted, scale, x)


def check_floats(x: PyTree, name: str, remedy: str) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(x):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise TypeError(
                f"`{name}` moves floats, but state{jax.tree_util.keystr(path)} is {leaf.dtype}:"
                f" start from a float {remedy}."
            )
