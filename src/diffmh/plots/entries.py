"""The entries of a pytree of arrays, by name: what a picture has one line for."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

T = TypeVar("T")


class Entry(NamedTuple):
    """One number of a tree, or the sequence of it along the leading axes."""

    name: str
    values: np.ndarray


def entries(tree: Any, root: str, leading: int = 0) -> list[Entry]:
    """Every entry of every leaf, as Python would index it; `leading` axes are kept as values.

    >>> import numpy as np
    >>> [entry.name for entry in entries({"a": np.zeros(2), "b": 0.0}, "theta")]
    ["theta['a'][0]", "theta['a'][1]", "theta['b']"]
    """
    found = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        values = np.asarray(leaf)
        for index in np.ndindex(values.shape[leading:]):
            place = f"[{', '.join(map(str, index))}]" if index else ""
            name = root + jax.tree_util.keystr(path) + place
            found.append(Entry(name, values[(..., *index)]))
    return found


def first(found: list[T], most: int) -> tuple[list[T], str]:
    """At most so many of them, and words for what is left out."""
    left_out = f", {most} of {len(found):,} entries" if len(found) > most else ""
    return found[:most], left_out
