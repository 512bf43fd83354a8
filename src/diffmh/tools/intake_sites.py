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
from ..adapters.group_marks import numbers_of, same_theta
from ..base.batches import in_batches
from .intake import GivenDraws, few, refuse_draws_first

# Draws that are evaluated at once.
_AT_ONCE = 1024
# `theta[1]`, `theta[2,3]` of Stan and posteriordb, `theta.1.2` of CmdStan.
_ELEMENT = re.compile(r"^(?P<name>.+?)(?:\[(\d+(?:, ?\d+)*)\]|\.(\d+(?:\.\d+)*))$")

Shapes = dict[str, tuple[int, ...]]


def states_of(posterior: Posterior, given: GivenDraws, where: str) -> PyTree:
    """The unconstrained states `(chain, draw, ...)` that `posterior.log_density` takes, from draws
    at its `theta`. `where` names the argument that they came as.
    """
    _refuse_other_theta(posterior, given, where)
    form = jax.eval_shape(posterior.init, jax.random.key(0))
    known = jax.eval_shape(posterior.constrain, posterior.theta, form)
    latent = jax.eval_shape(posterior.log_prior_by_site, posterior.theta, form)
    sites = {name: known[name] for name in latent}
    are_states = given.sites is None or given.marked
    # A group of states of somebody else's may come from another transform: sites are preferred to
    # it if they are all there.
    if not are_states and given.states is not None:
        are_states = not all(name in given.sites for name in sites)
    draws, expected = (given.states, form) if are_states else (given.sites, sites)
    named = _by_name(draws, _shapes(expected), where)
    found = _matched(named, _shapes(expected), where, given.stacked)
    if given.stacked:
        refuse_draws_first(found, where)
    _refuse_other_values(posterior, found, form, where)
    if not are_states:
        free = jax.jit(jax.vmap(jax.vmap(lambda one: posterior.unconstrain(posterior.theta, one))))
        found = free(_typed(found, sites))
    _refuse_infinite(found, where)
    return _typed(found, form)


def _refuse_other_theta(posterior: Posterior, given: GivenDraws, where: str) -> None:
    """Refuse draws that say that they were made at other hyperparameters than the posterior's."""
    theta, made_at = posterior.theta, given.theta
    if made_at is None:
        arguments = given.arguments or {}
        known = [name for name in theta if arguments.get(name) is not None]
        theta = {name: theta[name] for name in known}
        try:
            made_at = numbers_of({name: arguments[name] for name in known})
        except (TypeError, ValueError):  # not numbers
            return
    if not same_theta(made_at, theta):
        raise ValueError(
            f"`{where}`: these draws were made at the hyperparameters {_rounded(made_at)}, not"
            f" at {_rounded(numbers_of(theta))}: pass the former as"
            " `sensitivity(at=...)`, or sample anew."
        )


def _rounded(numbers: dict[str, Any]) -> dict[str, Any]:
    return jax.tree.map(lambda number: float(f"{number:.6g}"), numbers)


def weights_between(made_by: Posterior, wanted: Posterior, states: PyTree) -> np.ndarray:
    """Weights of draws of one posterior for another one of the same model, up to a factor."""

    def log_weight(x):
        return wanted.log_density(wanted.theta, x) - made_by.log_density(made_by.theta, x)

    every = jax.jit(lambda states: in_batches(log_weight, states, _AT_ONCE, axes=2))
    found = np.asarray(every(states), float)
    if not np.isfinite(found.max()):
        raise ValueError(
            "`sensitivity(at=...)`: the log density is not finite at some draws, for the"
            " hyperparameters that they were made with or for the posterior's: the draws are not of"
            " this model."
        )
    return np.exp(found - found.max())


def _refuse_other_values(
    posterior: Posterior, arrays: Mapping[str, Any], form: Mapping[str, Any], where: str
) -> None:
    """Refuse labels that are not the model's, such as those of Stan, which count from 1: a density
    that looks one up in a table would take another entry for it.
    """
    for name, like in form.items():
        if jnp.issubdtype(like.dtype, jnp.inexact):
            continue
        array = np.asarray(arrays[name])
        known = posterior.values_of(name)
        fits = np.array_equal(array, np.round(array))
        if known is not None:
            fits = fits and array.min() >= known.start and array.max() < known.stop
        if not fits:
            wanted = f"{known.start}, ..., {known.stop - 1}" if known else "integers"
            raise ValueError(
                f"`{where}`: site {name!r} has the values {wanted} in the model, got draws between"
                f" {array.min()} and {array.max()}."
            )


def _by_name(draws: Any, expected: Shapes, where: str) -> dict[str, np.ndarray]:
    """Arrays by name, of a dictionary or of a list with a dictionary for each chain."""
    if isinstance(draws, list | tuple) and draws and all(isinstance(c, Mapping) for c in draws):
        names = set.intersection(*(set(chain) for chain in draws))
        draws = {name: _stacked([chain[name] for chain in draws], name, where) for name in names}
    if not isinstance(draws, Mapping):
        raise TypeError(
            f"`{where}` must have arrays by the names of the posterior's sites,"
            f" {_listed(expected)} after the axes (chain, draw), got {draws!r:.300}."
        )
    return {str(name): _array(array, name, where) for name, array in draws.items()}


def _stacked(chains: list[Any], name: str, where: str) -> np.ndarray:
    arrays = [_array(chain, name, where) for chain in chains]
    if len({array.shape for array in arrays}) > 1:
        raise ValueError(
            f"`{where}`: the chains of {name!r} have shapes"
            f" {few(str(array.shape) for array in arrays)}; they must be of one length."
        )
    return np.stack(arrays)


def _array(value: Any, name: Any, where: str) -> np.ndarray:
    try:
        array = np.asarray(value)
    except ValueError:
        array = np.asarray(None)
    if array.dtype.kind not in "biuf":
        raise TypeError(f"`{where}`: {name!r} is {value!r:.300}, not an array of numbers.")
    return array


def _matched(
    named: dict[str, np.ndarray], expected: Shapes, where: str, stacked: bool = False
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
        f"`{where}` does not fit the posterior: {problem}. Expected after the axes (chain, draw):"
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


def _refuse_infinite(states: Mapping[str, Any], where: str) -> None:
    for name, array in states.items():
        if not np.all(np.isfinite(array)):
            raise ValueError(
                f"`{where}`: some draws of {name!r} are not finite, or lie outside its support"
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
