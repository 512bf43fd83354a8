"""Parts of a state: a node of the pytree, or elements of one of its arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PyTree

from . import validate


def replace(where: Callable[[Any], Any], x: PyTree, part: PyTree, name: str) -> PyTree:
    """`x` with `where(x)` replaced by `part`: a node of `x`, as in `equinox.tree_at`, or elements
    of its arrays, such as `x[3]`, whose index may be traced. Errors begin with `name`.
    """
    chosen, values = places(where, x, name), jax.tree.leaves(part)
    leaves, structure = jax.tree.flatten(x)
    if chosen is None:
        numbers = _numbered(x)
        for place, value in zip(jax.tree.leaves(where(numbers)), values, strict=True):
            own = zip(leaves, jax.tree.leaves(numbers), strict=True)
            leaves = [_put_traced(leaf, number, place, value) for leaf, number in own]
        return structure.unflatten(leaves)
    # The elements of leaf i have the numbers from starts[i] to starts[i + 1].
    starts = np.cumsum([0, *(leaf.size for leaf in leaves)])
    for place, value in zip(chosen, values, strict=True):
        owner = int(np.searchsorted(starts, place.flat[0], side="right")) - 1
        local = place - starts[owner]
        if np.any((local < 0) | (local >= leaves[owner].size)):
            raise ValueError(
                f"`{name}`: `where` joins several arrays of the state into one: return a tuple"
                " instead, as in `lambda x: (x[0], x[1])`."
            )
        leaves[owner] = _put(leaves[owner], local, value)
    return structure.unflatten(leaves)


def is_node(where: Callable[[Any], Any], x: PyTree) -> bool:
    """True if `where` selects a node of the pytree, rather than elements of an array, possibly all
    of them (`x[:n]`). Tested with leaves that cannot be indexed.
    """
    opaque = jax.tree.map(lambda _: object(), x)
    try:
        picked = jax.tree.leaves(where(opaque))
    except (TypeError, AttributeError):
        return False
    return all(any(one is leaf for leaf in jax.tree.leaves(opaque)) for one in picked)


def _numbered(x: PyTree) -> PyTree:
    """The state with its elements numbered from 0, so that `where` of it shows what it selects."""
    leaves, structure = jax.tree.flatten(x)
    begins = [sum(leaf.size for leaf in leaves[:index]) for index in range(len(leaves))]
    numbers = [
        begin + jnp.arange(leaf.size).reshape(leaf.shape)
        for begin, leaf in zip(begins, leaves, strict=True)
    ]
    return structure.unflatten(numbers)


def _put(leaf: Any, local: np.ndarray | np.integer, value: Any) -> Any:
    """`leaf` with `value` at the fixed flat indices `local`, without a scatter. A value of another
    dtype is not converted: the caller compares dtypes.
    """
    if np.array_equal(local, np.arange(leaf.size).reshape(leaf.shape)):
        return value
    # For each element of the leaf, the element of the value that it takes, if any. A gather with
    # fixed indices and a selection vectorise over chains; a scatter does not.
    chosen, source = np.zeros(leaf.size, bool), np.zeros(leaf.size, int)
    chosen[local.ravel()] = True
    source[local.ravel()] = np.arange(local.size)
    spread = value.reshape(()) if local.size == 1 else value.ravel()[source].reshape(leaf.shape)
    return jnp.where(chosen.reshape(leaf.shape), spread, leaf)


def _put_traced(leaf: Any, number: Array, place: Array, value: Any) -> Any:
    """`leaf`, whose elements have the numbers `number`, with `value` at those equal to `place`."""
    value = jnp.asarray(value, leaf.dtype)
    if jnp.ndim(place) == 0:
        return jnp.where(number == place, value, leaf)
    if leaf.size == 0:
        return leaf
    # The numbers of a leaf are consecutive, so the first one is its offset.
    index = place - number.ravel()[0]
    # Elements outside of this leaf are moved beyond its end, where they are dropped.
    index = jnp.where((index >= 0) & (index < leaf.size), index, leaf.size)
    return leaf.ravel().at[index].set(value, mode="drop").reshape(leaf.shape)


def places(where: Callable[[Any], Any], x: Any, name: str) -> list[np.ndarray] | None:
    """For each array of the part, the numbers of its elements, where the elements of the state are
    numbered from 0: `where` of these numbers. `None` if `where` uses a traced index. `x` may
    consist of shapes only. A `where` that computes something raises an error.
    """
    # A pure selection gives numbers n, and −1 − n when applied to −1 − n.
    with jax.ensure_compile_time_eval():
        numbers = _numbered(x)
        first, again = (
            jax.tree.leaves(where(each))
            for each in (numbers, jax.tree.map(lambda number: -1 - number, numbers))
        )
    if not validate.concrete((first, again)):
        return None
    picked, again = ([np.asarray(leaf) for leaf in leaves] for leaves in (first, again))
    if not picked or any(np.any(a != -1 - b) for a, b in zip(picked, again, strict=True)):
        raise ValueError(
            f"`{name}`: `where` must pick a part of the state and compute nothing, as in"
            " `lambda x: x['label']` or `lambda x: x[3]`."
        )
    every = np.concatenate([place.ravel() for place in picked])
    if np.unique(every).size != every.size:
        raise ValueError(f"`{name}`: `where` picks an element of the state twice.")
    return picked


class Unlike(Exception):
    """Parts that differ in structure, shape or dtype."""


class OneOf(eqx.Module):
    """One of several `where` functions, chosen by an index that may be traced: kernels that differ
    only in the part that they move become one kernel with an index.

    Raises `Unlike` if the parts differ in structure, shape or dtype.
    """

    wheres: tuple[Callable[[Any], Any], ...]
    index: Int[Array, ""]

    def __call__(self, x: PyTree) -> PyTree:
        parts = [where(x) for where in self.wheres]
        forms = [jax.eval_shape(lambda part=part: part) for part in parts]
        if any(form != forms[0] for form in forms):
            raise Unlike
        elements = self._elements(x)
        if elements is not None:
            return jax.tree.unflatten(jax.tree.structure(parts[0]), elements)
        return jax.tree.map(lambda *leaves: self._pick(leaves), *parts)

    def _elements(self, x: PyTree) -> list[Array] | None:
        """The part by its positions, if all parts are elements of the same arrays."""
        all_places = [places(where, x, "where") for where in self.wheres]
        if any(each is None for each in all_places):
            return None
        leaves, found = jax.tree.leaves(x), []
        starts = np.cumsum([0, *(leaf.size for leaf in leaves)])
        for each in zip(*all_places, strict=True):  # pyright: ignore[reportArgumentType]
            stacked = np.stack(each)
            owners = np.searchsorted(starts, stacked.ravel(), side="right") - 1
            # Elements of different arrays have no common index, so the parts are selected one by
            # one.
            if stacked.size == 0 or np.any(owners != owners[0]):
                return None
            local = jnp.asarray(stacked - starts[owners[0]])[self.index]
            flat = leaves[owners[0]].ravel()
            found.append(flat[local])
        return found

    def _pick(self, leaves: tuple[Array, ...]) -> Array:
        found = leaves[0]
        for number, leaf in enumerate(leaves[1:], 1):
            found = jnp.where(self.index == number, leaf, found)
        return found
