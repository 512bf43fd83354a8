"""Draws for a posterior: its sites or states found by name, with the shapes that it has."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ..adapters import Posterior
from .intake import GivenDraws, few, refuse_draws_first

_WHERE = "sensitivity(draws=...)"
# `theta[1]`, `theta[2,3]` of Stan and posteriordb, `theta.1.2` of CmdStan.
_ELEMENT = re.compile(r"^(?P<name>.+?)(?:\[(\d+(?:, ?\d+)*)\]|\.(\d+(?:\.\d+)*))$")

Shapes = dict[str, tuple[int, ...]]


def states_of(posterior: Posterior, given: GivenDraws) -> PyTree:
    """The unconstrained states `(chain, draw, ...)` that `posterior.log_density` takes."""
    form = jax.eval_shape(posterior.init, jax.random.key(0))
    if given.states is not None:
        states = _matched(_by_name(given.states, _shapes(form)), _shapes(form), given.stacked)
        if given.stacked:
            refuse_draws_first(states, _WHERE)
        return _typed(states, form)
    sites = jax.eval_shape(posterior.constrain, posterior.theta, form)
    latent = jax.eval_shape(posterior.log_prior_by_site, posterior.theta, form)
    expected = {name: sites[name] for name in latent}
    found = _matched(_by_name(given.sites, _shapes(expected)), _shapes(expected))
    free = jax.jit(jax.vmap(jax.vmap(lambda one: posterior.unconstrain(posterior.theta, one))))
    states = free(_typed(found, expected))
    _refuse_boundary(states)
    return _typed(states, form)


def _by_name(draws: Any, expected: Shapes) -> dict[str, np.ndarray]:
    """Arrays by name, of a dictionary or of a list with a dictionary for each chain."""
    if isinstance(draws, list | tuple) and draws and all(isinstance(c, Mapping) for c in draws):
        names = set.intersection(*(set(chain) for chain in draws))
        draws = {name: _stacked([chain[name] for chain in draws], name) for name in names}
    if not isinstance(draws, Mapping):
        raise TypeError(
            f"`{_WHERE}` must have arrays by the names of the posterior's sites,"
            f" {_listed(expected)} after the axes (chain, draw), got {draws!r:.300}."
        )
    return {str(name): _array(array, name) for name, array in draws.items()}


def _stacked(chains: list[Any], name: str) -> np.ndarray:
    arrays = [_array(chain, name) for chain in chains]
    if len({array.shape for array in arrays}) > 1:
        raise ValueError(
            f"`{_WHERE}`: the chains of {name!r} have shapes"
            f" {few(str(array.shape) for array in arrays)}; they must be of one length."
        )
    return np.stack(arrays)


def _array(value: Any, name: Any) -> np.ndarray:
    try:
        array = np.asarray(value)
    except ValueError:
        array = np.asarray(None)
    if array.dtype.kind not in "biuf":
        raise TypeError(f"`{_WHERE}`: {name!r} is {value!r:.300}, not an array of numbers.")
    return array


def _matched(
    named: dict[str, np.ndarray], expected: Shapes, stacked: bool = False
) -> dict[str, np.ndarray]:
    """The expected arrays, after the axes (chain, draw), those in elements put together; a stack of
    states along one axis is one chain.
    """
    found = {
        name: named[name] if name in named else _assembled(named, name, shape)
        for name, shape in expected.items()
    }
    found = {name: array for name, array in found.items() if array is not None}
    if stacked and all(array.shape[1:] == expected[name] for name, array in found.items()):
        found = {name: array[None] for name, array in found.items()}
    missing = sorted(set(expected) - set(found))
    axes = {array.shape[:2] for array in found.values()}
    wrong = [
        name for name, array in found.items() if array.ndim < 2 or array.shape[2:] != expected[name]
    ]
    if not missing and not wrong and len(axes) == 1:
        return found
    problem = f"{few(missing)} not found" if missing else f"{few(wrong)} of another shape"
    if not missing and not wrong:
        problem = "the arrays disagree about chains and draws"
    flat = all(array.shape[1:] == expected[name] for name, array in found.items())
    raise ValueError(
        f"`{_WHERE}` does not fit the posterior: {problem}. Expected after the axes (chain, draw):"
        f" {_listed(expected)}. Found with them:"
        f" {_listed({name: array.shape for name, array in named.items()})}."
        + (_WITHOUT_CHAINS if flat and found else _SAME_MODEL)
    )


_WITHOUT_CHAINS = (
    " The draws have no axis of chains: pass NumPyro's `MCMC` itself or"
    " `get_samples(group_by_chain=True)`, and `array[None]` for a single chain."
)
_SAME_MODEL = (
    " Draws must be of the same model: sites by the names that it gives them, or their elements as"
    " `name[1]`, `name[2]`."
)


def _assembled(
    named: dict[str, np.ndarray], name: str, shape: tuple[int, ...]
) -> np.ndarray | None:
    """An array from its elements `name[1,2]`, counted from 1 or from 0; None unless each is there
    exactly once.
    """
    elements: dict[tuple[int, ...], np.ndarray] = {}
    for key, array in named.items():
        match = _ELEMENT.match(key)
        if match and match["name"] == name:
            index = tuple(map(int, re.split(r"[,.] ?", match[2] or match[3])))
            elements[index] = array
    for first in (1, 0):
        wanted = [tuple(i + first for i in index) for index in np.ndindex(shape)]
        if shape and set(wanted) == set(elements):
            parts = [elements[index] for index in wanted]
            if len({part.shape for part in parts}) == 1:
                return np.stack(parts, axis=-1).reshape(*parts[0].shape, *shape)
    return None


def _refuse_boundary(states: dict[str, Any]) -> None:
    for name, array in states.items():
        if not bool(jnp.all(jnp.isfinite(array))):
            raise ValueError(
                f"`{_WHERE}`: some draws of {name!r} are not finite, or lie outside its support"
                " or on its boundary, and so have no unconstrained state. Draws must be of the"
                " same model at the same hyperparameters, in the model's own (constrained) sites."
            )


def _typed(arrays: Mapping[str, Any], form: Mapping[str, Any]) -> dict[str, Any]:
    """In the order and with the dtypes that the posterior has."""
    return {name: jnp.asarray(arrays[name], like.dtype) for name, like in form.items()}


def _shapes(form: Mapping[str, Any]) -> Shapes:
    return {name: tuple(leaf.shape) for name, leaf in form.items()}


def _listed(shapes: Shapes) -> str:
    return few(f"{name} {shape}" for name, shape in shapes.items())
