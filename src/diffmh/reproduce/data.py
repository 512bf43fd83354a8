"""Data: what a figure is drawn from, saved and read back as it was."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from typing import Any, TypeVar

import equinox as eqx
import numpy as np


class Data(eqx.Module):
    """Named arrays, numbers, and further `Data` under a name.

    Every figure of `reproduce` has a subclass of its own, which says what its drawing reads.
    """


D = TypeVar("D", bound=Data)


def to_arrays(data: Data) -> dict[str, np.ndarray]:
    """By name; what is under a name has its own name after a dot."""
    arrays = {}
    for name in typing.get_type_hints(type(data)):
        value = getattr(data, name)
        if isinstance(value, Data):
            arrays |= {f"{name}.{inner}": array for inner, array in to_arrays(value).items()}
        else:
            arrays[name] = np.asarray(value)
    return arrays


def from_arrays(kind: type[D], arrays: Mapping[str, np.ndarray]) -> D:
    """The other way. Raises `KeyError` where something is missing."""
    fields: dict[str, Any] = {}
    for name, annotation in typing.get_type_hints(kind).items():
        if isinstance(annotation, type) and issubclass(annotation, Data):
            start = name + "."
            inner = {k.removeprefix(start): v for k, v in arrays.items() if k.startswith(start)}
            fields[name] = from_arrays(annotation, inner)
        elif annotation in (int, float):
            fields[name] = annotation(arrays[name])
        else:
            fields[name] = arrays[name]
    return kind(**fields)
