"""Checks of f and a log density before they are averaged over draws."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, PyTree

from ..analysis import Jump, moving_jumps
from ..base import validate
from ..core.admission import check_observable, check_scalar, refuse_jumps
from ..estimators import stein
from ..jaxprs import compat


class Examination(eqx.Module):
    """The form of f's value, and whether f itself depends on θ."""

    form: PyTree
    explicit: bool


class Examinations:
    """The examinations of one pair of functions, for each form of the arguments."""

    def __init__(self):
        # Objects among the arguments are known by identity, so they are kept alive.
        self._found: dict[Any, tuple[Examination, tuple[Any, ...]]] = {}
        self._in_x: dict[Any, list[Jump]] = {}

    def of(
        self,
        f: Callable[..., PyTree],
        log_density: Callable[..., Array],
        theta: PyTree,
        draws: PyTree,
        args: tuple[Any, ...],
    ) -> Examination:
        # The analysis reads the values of `args`: what it proves of one call's data says nothing
        # of another's, so only functions without data are examined once for each form.
        leaves, structure = jax.tree.flatten(args)
        if any(map(eqx.is_array, leaves)):
            return examine(f, log_density, theta, draws, args)
        forms = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(theta)]
        signature = (jax.tree.structure(theta), structure, *forms, *map(id, leaves))
        if signature not in self._found:
            found = examine(f, log_density, theta, draws, args)
            self._found[signature] = (found, tuple(leaves))
        return self._found[signature][0]

    def jumps_in_x(
        self, log_density: Callable[..., Array], theta: PyTree, draws: PyTree, args: tuple[Any, ...]
    ) -> list[Jump]:
        """The places where the density may jump in continuous x, wherever they are."""
        x = one_draw(draws)
        if args:
            return stein.jumps_in_x(lambda theta, x: log_density(theta, x, *args), theta, x)
        forms = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(theta)]
        signature = (jax.tree.structure(theta), *forms)
        if signature not in self._in_x:
            self._in_x[signature] = stein.jumps_in_x(log_density, theta, x)
        return self._in_x[signature]


# Pairs of functions whose examinations are kept for the next call.
_MOST_KEPT = 16
_kept: OrderedDict[Any, tuple[Examinations, list[Any]]] = OrderedDict()


def examinations_of(f: Any, log_density: Any, draws: PyTree) -> Examinations:
    """The examinations of two functions at states of this form: those of an earlier call if both
    have the same parts.

    As under `jit`, functions and JAX arrays are the same if they are the same objects. NumPy's can
    be changed in place, so that functions that hold some are examined in each call.
    """
    leaves, structure = jax.tree.flatten((f, log_density))
    if any(isinstance(leaf, np.ndarray) for leaf in leaves):
        return Examinations()
    forms, form = jax.tree.flatten(one_draw(draws))
    key = (structure, form, *((leaf.shape, leaf.dtype) for leaf in forms), *map(id, leaves))
    # The leaves are kept alive, so that no other object gets the identity of one.
    found, _ = _kept.setdefault(key, (Examinations(), leaves))
    _kept.move_to_end(key)
    if len(_kept) > _MOST_KEPT:
        _kept.popitem(last=False)
    return found


def examine(
    f: Callable[..., PyTree],
    log_density: Callable[..., Array],
    theta: PyTree,
    draws: PyTree,
    args: tuple[Any, ...],
) -> Examination:
    """Refuses functions that cannot be differentiated over draws."""
    theta = compat.forms(theta)
    x = one_draw(draws)
    given = ("theta", "x", *validate.data_names(args))
    validate.takes(f, "from_draws(f, log_density, draws)", "f", *given)
    validate.takes(log_density, "from_draws(f, log_density, draws)", "log_density", *given)

    def value(theta, x):
        return validate.numbers(f(theta, x, *args), "`f`")

    def density(theta, x):
        return validate.numbers(log_density(theta, x, *args), "`log_density`")

    form = check_observable(jax.eval_shape(value, theta, x))
    check_scalar(jax.eval_shape(density, theta, x), theta, x)
    refuse_jumps(moving_jumps(density, theta, x), "log_density", moves=False)
    refuse_jumps(moving_jumps(value, theta, x), "f", moves=False)
    return Examination(form, compat.depends_on(value, theta, x))


def one_draw(draws: PyTree) -> PyTree:
    """The form of one draw."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[2:], leaf.dtype), draws)
