"""The values of a program that is run for all chains at once: those that differ between chains,
those that all chains share, and random keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Key

from . import threefry


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PerChain:
    """An array with the chains as its last axis."""

    array: Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Once:
    """An array, or a number, that is the same for all chains."""

    array: ArrayLike


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Keys:
    """Random keys with the chains as their last axis, as two arrays of words: side by side in
    memory, words would not vectorise.
    """

    left: Array
    right: Array
    once: bool = field(default=False, metadata={"static": True})

    @property
    def array(self) -> Key[Array, "*n C"]:
        return threefry.from_words(self.left, self.right)

    def each(self, function: Callable[[PerChain], Sequence[Any]]) -> list[Value]:
        """Operations that move keys move both words alike."""
        return [
            Keys(*words, self.once)
            for words in zip(
                function(PerChain(self.left)), function(PerChain(self.right)), strict=True
            )
        ]


Value = PerChain | Once | Keys


def take_in(array: Array | Once, once: bool = False) -> Value:
    """An array with chains last; keys by their words, if we know how to draw from those."""
    if isinstance(array, Once):
        return array
    is_known = threefry.is_threefry(array)
    return Keys(*threefry.words(array), once) if is_known else PerChain(array)


def per_chain(value: Value, count: int) -> Array:
    """The array with chains last, whether or not they differ."""
    if not isinstance(value, Once):
        return value.array
    # Chains are added as the last axis, so the others keep their numbers.
    array = jnp.asarray(value.array)
    return jax.lax.broadcast_in_dim(array, (*array.shape, count), tuple(range(array.ndim)))


def for_each(value: Value, count: int) -> Value:
    """The value with chains, so that loops and branches agree on what they pass on."""
    return value if isinstance(value, Keys) else take_in(per_chain(value, count))
