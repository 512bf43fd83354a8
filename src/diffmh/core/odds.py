"""The log odds of flips: those of an update, and which of them are the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array, Float, Int, PyTree

from ..base import validate
from ..base.validate import Checked
from .kernel import Kernel, Odds, Update


class DensityOdds(eqx.Module):
    """`log g_θ(y) − log g_θ(x)`, the log odds of a flip for whatever leaves g invariant decision by
    decision.

    >>> import diffmh
    >>> odds = diffmh.extend.DensityOdds(lambda theta, x: theta * x)
    >>> odds(2.0, 1.0, 4.0)
    6.0
    """

    density: Checked[Callable[..., float | Float[Array, ""]]]

    def __check_init__(self):
        signature = "density(theta, x, *args) -> scalar"
        validate.function(self.density, "DensityOdds(density)", "density", signature)

    def __call__(self, theta: PyTree, x: PyTree, y: PyTree, *args: Any) -> float | Float[Array, ""]:
        return self.density(theta, y, *args) - self.density(theta, x, *args)


class IndexedOdds(eqx.Module):
    """One of a family of log odds that an integer tells apart: those of a stage.

    Two of them are the same odds if their families are: a birth then says by its index which one
    it is read by.
    """

    family: Callable[[Int[Array, ""]], Odds]
    index: Int[Array, ""]

    def at(self, index: Int[Array, ""]) -> Odds:
        return self.family(index)

    def __call__(self, theta: PyTree, x: PyTree, y: PyTree, *args: Any) -> float | Float[Array, ""]:
        return self.at(self.index)(theta, x, y, *args)


def same_odds(one: Any, other: Any) -> bool:
    """True if two log odds are the same function, of the same parts by identity; or of the same
    family.
    """
    if isinstance(one, IndexedOdds) and isinstance(other, IndexedOdds):
        one, other = one.family, other.family
    # By identity and not by value: arrays may be traced, so that their values are
    # not known here.
    leaves, structure = jax.tree.flatten(one)
    others, other_structure = jax.tree.flatten(other)
    return structure == other_structure and all(a is b for a, b in zip(leaves, others, strict=True))


def odds_of(update: Update) -> tuple[Any, ...]:
    """The log odds of the flips of each of an update's decisions."""
    odds = update.flip_odds
    return odds if isinstance(odds, tuple) else (odds,)


def distinct_odds(kernel: Kernel) -> list[Odds]:
    """The different log odds of a kernel's flips."""
    found: list[Any] = []
    for own in (odds for update in kernel.updates() for odds in odds_of(update)):
        if not any(same_odds(own, odds) for odds in found):
            found.append(own)
    return found
