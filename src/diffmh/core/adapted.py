"""Adapted: a kernel whose warm-up is done, and the states to go on from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Key, PyTree

from ..base import trees
from .kernel import Kernel


class Adapted(eqx.Module):
    """The result of `diffmh.adapt`: `kernel`, whose steps are set and frozen, and `states`, where
    the chains of the warm-up are, chains leading.

    `expectation`, `sample`, `trace`, `sensitivity` and `Posterior.expectation` take it as a kernel:
    if `init` is left out, chain c starts from state c; if there are more chains than states, each
    of the others starts from one of them at random.

    >>> import jax, diffmh
    >>> density = lambda theta, x: -0.5 * ((x - theta) / 100.0) ** 2
    >>> walk = diffmh.MetropolisHastings(density, diffmh.GaussianWalk(1.0))
    >>> adapted = diffmh.adapt(walk, 0.5, jax.random.key(0), init=0.0)
    >>> mean = diffmh.expectation(lambda theta, x: x, adapted, num_samples=100)
    >>> mean.num_chains, adapted.states.shape
    (16, (16,))
    """

    kernel: Kernel
    states: PyTree


class Continued(eqx.Module):
    """A start for each chain from the states of others, chains leading."""

    states: PyTree

    @property
    def num_states(self) -> int:
        return jax.tree.leaves(self.states)[0].shape[0]

    def __call__(self, key: Key[Array, ""]) -> PyTree:
        """One of the states at random."""
        return trees.take(self.states, jax.random.randint(key, (), 0, self.num_states))

    def of_chain(self, number: Int[Array, ""], key: Key[Array, ""]) -> PyTree:
        """The state with this number, or one at random if there are fewer states."""
        chosen = jax.random.randint(key, (), 0, self.num_states)
        return trees.take(self.states, jnp.where(number < self.num_states, number, chosen))


def kernel_and_init(
    kernel: Any, init: PyTree | Callable[[Key[Array, ""]], PyTree] | None, where: str
) -> tuple[Any, Any]:
    """The kernel and the start that were given, or those of an `Adapted`. `where` names the
    function that was called.
    """
    if isinstance(kernel, Adapted):
        return kernel.kernel, Continued(kernel.states) if init is None else init
    if init is None:
        raise TypeError(
            f"`{where}` needs `init`, a start state or a function `key -> state`, got None: only"
            " what `diffmh.adapt` returns has states to go on from."
        )
    return kernel, init
