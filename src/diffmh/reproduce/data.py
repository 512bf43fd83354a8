"""Data: the content of a figure, which is saved and read back unchanged."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from typing import TypeVar

import equinox as eqx
import numpy as np


class Data(eqx.Module):
    """Named arrays and numbers. Every figure has its own subclass with the fields that its plot
    reads.
    """


D = TypeVar("D", bound=Data)


def to_arrays(data: Data) -> dict[str, np.ndarray]:
    """Every field, by name."""
    return {name: np.asarray(getattr(data, name)) for name in typing.get_type_hints(type(data))}


def from_arrays(kind: type[D], arrays: Mapping[str, np.ndarray]) -> D:
    """The inverse of `to_arrays`. Raises `KeyError` where a field is missing."""
    fields = {name: arrays[name] for name in typing.get_type_hints(kind)}
    return kind(**{name: field if field.ndim else field.item() for name, field in fields.items()})
