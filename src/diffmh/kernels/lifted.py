"""Kernels on a part of a larger state: one replica of several, or the state beside its log weight.

The rest of the state does not change, so that decisions, couplings and flips are those of the part.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array, Float, Int, PyTree

from ..core.kernel import Kernel, State, Step, Update


class StatePart(eqx.Module):
    """A part of a state, and of trees like it whose leaves have further leading axes."""

    @abstractmethod
    def of(self, tree: PyTree, num_leading: int = 0) -> PyTree:
        """The part."""

    @abstractmethod
    def put(self, tree: PyTree, part: PyTree, num_leading: int = 0) -> PyTree:
        """The tree with another part."""

    def form(self, x: PyTree) -> PyTree:
        """Shapes and dtypes of the part of a state."""
        return jax.eval_shape(self.of, x)


class Whole(StatePart):
    """All of the state."""

    def of(self, tree, num_leading=0):
        return tree

    def put(self, tree, part, num_leading=0):
        return part


class Row(StatePart):
    """One of several states that are stacked along the leading axis."""

    index: Int[Array, ""]

    def of(self, tree, num_leading=0):
        take = lambda leaf: jax.lax.dynamic_index_in_dim(leaf, self.index, num_leading, False)
        return jax.tree.map(take, tree)

    def put(self, tree, part, num_leading=0):
        def one(leaf, new):
            return jax.lax.dynamic_update_index_in_dim(leaf, new, self.index, num_leading)

        return jax.tree.map(one, tree, part)


class LiftedStep(Step):
    """A step of a part of the state; `inner` is the part's own."""

    inner: Step | None = None


class Lifted(Update):
    """An update of a part of the state.

    `density` is that of the whole state, if the update is to be known by it, and `odds` the log
    odds of its flips.
    """

    update: Update
    part: StatePart
    density: Callable[..., Float[Array, ""]] | None = None
    odds: Any = None

    @property
    def theta_enters_by_evaluate(self) -> bool:  # pyright: ignore
        return self.update.theta_enters_by_evaluate

    @property
    def name_in_messages(self):
        return self.update.name_in_messages

    def log_density(self, theta, x, *args):
        if self.density is not None:
            return self.density(theta, x, *args)
        return self.update.log_density(theta, self.part.of(x), *args)

    @property
    def density_identity(self):
        return self.update.density_identity if self.density is None else self.density

    @property
    def flip_odds(self):
        return self.odds

    @property
    def cached_function(self):
        return self.update.cached_function

    @property
    def moves_with_theta(self):
        return self.update.moves_with_theta

    @property
    def has_own_parameters(self):
        return self.update.has_own_parameters

    # For reports, which name the coupling in use and the proposal's best.
    @property
    def coupling(self) -> Any:
        return getattr(self.update, "coupling", None)

    @property
    def proposal(self) -> Any:
        return getattr(self.update, "proposal", None)

    def conditions(self, theta, *args):
        return self.update.conditions(theta, *args)

    def without_cache(self):
        return dataclasses.replace(self, update=self.update.without_cache())

    def prepared(self, theta, x, args):
        inner = self.update.prepared(theta, self.part.form(x), args)
        return dataclasses.replace(self, update=inner)

    def noise(self, key, x, num_steps):
        return self.update.noise(key, self.part.form(x), num_steps)

    def coupling_noise(self, key, x, num_steps):
        return self.update.coupling_noise(key, self.part.form(x), num_steps)

    def refuse_start(self, x):
        self.update.refuse_start(self.part.of(x))

    def start(self, parameters, x):
        return State(x, self.update.start(parameters, self.part.of(x)).cache)

    def step(self, parameters, state, noise):
        # Every update needs the part's tangent, whether it moves with θ itself or not: its accept
        # probability depends on θ through where others have moved the chain.
        tangent = None if state.tangent is None else self.part.of(state.tangent, 1)
        moves = bool(jax.tree.leaves(tangent))
        inner = self.update.step(
            parameters, State(self.part.of(state.x), state.cache, tangent if moves else None), noise
        )
        after = self._with(state, inner.after)
        tangent = self.part.put(state.tangent, inner.after.tangent, 1) if moves else state.tangent
        after = State(after.x, after.cache, tangent)
        return LiftedStep(state, after, inner.decisions, inner=inner)

    def coupled_step(self, parameters, step, alternative, noise, coupling_noise):
        assert isinstance(step, LiftedStep) and step.inner is not None
        beside = State(self.part.of(alternative.x), alternative.cache)
        moved = self.update.coupled_step(parameters, step.inner, beside, noise, coupling_noise)
        return self._with(alternative, moved)

    def flipped(self, step, noise, decision, candidate):
        assert isinstance(step, LiftedStep) and step.inner is not None
        return self._with(step.before, self.update.flipped(step.inner, noise, decision, candidate))

    def _with(self, state: State, part: State) -> State:
        """The state with another part, and what is known of that."""
        return State(self.part.put(state.x, part.x), part.cache)


Lift = Callable[[Update], Update]


def distribute_lifted(kernel: Kernel, lift: Lift, make: Callable[..., PyTree], key) -> PyTree:
    """`Kernel.distribute` of a kernel whose updates are lifted."""
    return kernel.distribute(lambda update, key: make(lift(update), key), key)


def fold_lifted(kernel: Kernel, lift: Lift, advance: Callable[..., Any], carry, noise) -> Any:
    """`Kernel.fold` of a kernel whose updates are lifted."""

    def lifted(update, carry, noise):
        return advance(lift(update), carry, noise)

    return kernel.fold(lifted, carry, noise)


def one_density(kernel: Kernel, where: str, why: str) -> None:
    """Refuse a kernel whose updates do not share one density."""
    # Both are held, as objects that are gone may have the same identity.
    densities, first = kernel.densities(), kernel.updates()[0]
    if set(densities) != {id(first.density_identity)}:
        raise ValueError(
            f"`{where}`: {why}, so all updates of a kernel need one density, and those of this"
            " kernel have different ones: give each the same `log_density` function, made"
            " once in `kernel_at`."
        )
