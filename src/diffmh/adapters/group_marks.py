"""The attributes of a group of draws: they say if the draws are states of a density rather than
sites of a model, and name the hyperparameters that they were made with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

_HOLDS, _STATES, _THETA = "holds", "states of a density", "theta"

# The attributes of a group of states, which `log_density` takes as they are.
STATES = {_HOLDS: _STATES}


def holds_states(attributes: Mapping[Any, Any]) -> bool:
    return attributes.get(_HOLDS) == _STATES


def made_with(theta: PyTree) -> dict[str, str]:
    """The attribute that records hyperparameters, as text: files take nothing else."""
    return {_THETA: json.dumps(numbers_of(theta))}


def recorded_theta(attributes: Mapping[Any, Any]) -> dict[str, Any] | None:
    """The hyperparameters by the names of their leaves, if they were recorded."""
    text = attributes.get(_THETA)
    try:
        found = json.loads(text) if isinstance(text, str) else None
    except json.JSONDecodeError:
        return None
    return found if isinstance(found, dict) else None


def same_theta(recorded: dict[str, Any], theta: PyTree) -> bool:
    """True if these are the recorded hyperparameters, up to the rounding of single precision."""
    here = numbers_of(theta)
    if recorded.keys() != here.keys():
        return False
    pairs = [(np.asarray(recorded[name]), np.asarray(here[name])) for name in here]
    return all(a.shape == b.shape and np.allclose(a, b, rtol=1e-6, atol=0) for a, b in pairs)


def numbers_of(theta: PyTree) -> dict[str, Any]:
    """Hyperparameters as numbers and lists, by the names of their leaves."""
    leaves = jax.tree_util.tree_leaves_with_path(theta)
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator=".")
    return {name(path): np.asarray(leaf, float).tolist() for path, leaf in leaves}
