"""Values, and the alternatives that they belong to.

Beside its primal a value has, where it needs them, a tangent, its values in the K alternatives that
are followed, and its value in the *pending* alternative: the one that the latest draw gave rise to.
It is pending until it is known what became of the draw; then the alternatives that agree with the
primal in every value that still matters are dropped, and the pending one is pruned against the
lightest of the others. Which of these a value has is known when the program is traced: without them
it costs nothing.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from .. import values as algebra


class Value(eqx.Module):
    """A value of the program: `tangent` has the P parameters, `alternative` the K slots as its
    leading axis.
    """

    primal: Any
    tangent: Any = None
    alternative: Any = None
    pending: Any = None

    @property
    def branched(self) -> bool:
        """Whether it may differ in an alternative."""
        return self.alternative is not None or self.pending is not None

    def in_slots(self, num_slots: int) -> Any:
        """Its values in the slots."""
        if self.alternative is not None:
            return self.alternative
        return jnp.broadcast_to(self.primal, (num_slots, *jnp.shape(self.primal)))

    def in_pending(self) -> Any:
        return self.primal if self.pending is None else self.pending

    def tangents(self, num_parameters: int, dtype: Any) -> Any:
        """Its tangent, zero if it has none; of its own dtype, or of `dtype` if it is whole."""
        if self.tangent is not None:
            return self.tangent
        kind = self.primal.dtype if jnp.issubdtype(self.primal.dtype, jnp.inexact) else dtype
        return jnp.zeros((num_parameters, *jnp.shape(self.primal)), kind)


@dataclasses.dataclass(frozen=True)
class World:
    """What is kept once per program: the alternatives' weights, and how often each slot was given
    to a new one.

    A value that was computed when slot k had been given away `births[k]` times belongs to today's
    alternative iff the count is still the same. `pinned` is that count wherever something outside
    of the running loop differs in the alternative, else −1; `None` where nothing can. `uniforms`
    are for pruning, and `coupling_noise` holds what the equations that propose have had drawn ahead
    of a loop.
    """

    weight: Float[Array, "K P"]
    births: Int[Array, "K"]
    pinned: Int[Array, "K"] | None
    pending: Float[Array, "P"] | None
    running: Bool[Array, ""] | None
    uniforms: Float[Array, "n"]
    key: Key[Array, ""]
    taken: int = 0
    spawned: int = 0
    coupling_noise: Mapping[Any, Any] = dataclasses.field(default_factory=dict)

    @property
    def num_slots(self) -> int:
        return self.weight.shape[0]

    @property
    def num_parameters(self) -> int:
        return self.weight.shape[1]

    @property
    def alive(self) -> Bool[Array, "K"]:
        """NaN counts as alive: a derivative that is not a number must be seen, not dropped."""
        return algebra.norm(self.weight.T) != 0

    def replace(self, **changes: Any) -> World:
        return dataclasses.replace(self, **changes)

    def uniform(self) -> tuple[World, Float[Array, ""]]:
        """A uniform that the program itself has no part in."""
        assert self.taken < self.uniforms.shape[0], "more uniforms were taken than foreseen"
        return self.replace(taken=self.taken + 1), self.uniforms[self.taken]

    def spawn(self) -> tuple[World, Key[Array, ""]]:
        """A key for an inner program."""
        return self.replace(spawned=self.spawned + 1), jax.random.fold_in(self.key, self.spawned)


def no_alternatives(
    num_slots: int, num_parameters: int, dtype: Any, key: Key[Array, ""], num_uniforms: int
) -> World:
    """The world at the start of a program."""
    key_uniforms, key_inner = jax.random.split(key)
    return World(
        weight=jnp.zeros((num_slots, num_parameters), dtype),
        births=jnp.zeros(num_slots, jnp.int32),
        pinned=None,
        pending=None,
        running=None,
        uniforms=jax.random.uniform(key_uniforms, (num_uniforms,)),
        key=key_inner,
    )


def bank(world: World, value: Value) -> Value:
    """A value that enters the result linearly, turned into derivative: `ẋ + Σ_k W_k (x_k − x)`,
    and no alternative any more.
    """
    if not value.branched:
        return value
    tangent = value.tangents(world.num_parameters, world.weight.dtype)
    if value.alternative is not None:
        tangent += weighted(world.weight, world.alive, value.alternative - value.primal).astype(
            tangent.dtype
        )
    if value.pending is not None and world.pending is not None:
        weight = world.pending[None]
        alive = algebra.norm(weight.T) != 0
        tangent += weighted(weight, alive, (value.pending - value.primal)[None]).astype(
            tangent.dtype
        )
    return Value(value.primal, tangent)


def weighted(
    weight: Float[Array, "K P"], alive: Bool[Array, "K"], difference: Float[Array, "K ..."]
) -> Float[Array, "P ..."]:
    """`Σ_k W_k ⊗ difference_k` over the living."""
    flat = algebra.weighted(weight, alive, difference.reshape(difference.shape[0], -1))
    return flat.reshape(weight.shape[1], *difference.shape[1:])


def settle(world: World, values: dict[Any, Value]) -> tuple[World, dict[Any, Value]]:
    """Drops the alternatives that met the primal in all of `values`, which still matter, and
    prunes the pending one.
    """
    world = drop_recoupled(world, values.values())
    pending = world.pending
    if pending is None:
        return world, values
    differs = functools.reduce(
        jnp.logical_or, (differs_pending(value) for value in values.values()), jnp.zeros((), bool)
    )
    score = jnp.where(differs, algebra.norm(pending), 0.0)
    world, uniform = world.uniform()
    weight, replaced = algebra.compete(
        world.weight, algebra.norm(world.weight.T), pending, score, uniform
    )
    weight = jnp.where(jnp.isnan(score), jnp.nan, weight)
    settled = {
        name: value if not value.branched else _give_away(world, value, replaced)
        for name, value in values.items()
    }
    return world.replace(weight=weight, births=world.births + replaced, pending=None), settled


def _give_away(world: World, value: Value, replaced: Bool[Array, "K"]) -> Value:
    """Slots that were given to the pending alternative now hold its value."""
    slots = select_slots(replaced, value.in_pending()[None], value.in_slots(world.num_slots))
    return Value(value.primal, value.tangent, slots)


def drop_recoupled(world: World, values: Iterable[Value]) -> World:
    """Alternatives that agree with the primal in everything that still matters will do so for
    ever: their weight becomes 0.
    """
    kept = jnp.isnan(algebra.norm(world.weight.T))
    if world.pinned is not None:
        kept = kept | (world.pinned == world.births)
    alive = functools.reduce(jnp.logical_or, map(differs_in_slots, values), kept)
    return world.replace(weight=jnp.where(alive[:, None], world.weight, 0.0))


def pin(world: World, values: Iterable[Value]) -> World:
    """The world within a loop, outside of which `values` still matter."""
    branched = [value for value in values if value.alternative is not None]
    if not branched:
        return world
    differs = functools.reduce(jnp.logical_or, map(differs_in_slots, branched))
    return world.replace(
        pinned=jnp.where(differs, world.births, -1 if world.pinned is None else world.pinned)
    )


def forget(value: Value, replaced: Bool[Array, "K"]) -> Value:
    """A value from before the slots in `replaced` were given away: the new alternatives have it
    in common with the primal.
    """
    if value.alternative is None:
        return value
    return Value(
        value.primal,
        value.tangent,
        select_slots(replaced, value.primal[None], value.alternative),
        value.pending,
    )


def select_slots(condition: Bool[Array, "K"], chosen: Any, other: Any) -> Any:
    """`chosen` in the slots where `condition` holds."""
    return jnp.where(condition.reshape(-1, *(1,) * (jnp.ndim(other) - 1)), chosen, other)


def same(a: Any, b: Any) -> Any:
    """Element by element equal; NaN equals NaN, and keys are compared by their data."""
    if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
        return jnp.all(jax.random.key_data(a) == jax.random.key_data(b), axis=-1)
    equal = a == b
    return equal | ((a != a) & (b != b)) if jnp.issubdtype(a.dtype, jnp.inexact) else equal


def differs_in_slots(value: Value) -> Any:
    """In which slots a value is not the primal's."""
    if value.alternative is None:
        return jnp.zeros((), bool)
    equal = same(value.alternative, jnp.broadcast_to(value.primal, value.alternative.shape))
    return ~jnp.all(equal.reshape(equal.shape[0], -1), axis=1)


def differs_pending(value: Value) -> Any:
    return (
        jnp.zeros((), bool)
        if value.pending is None
        else ~jnp.all(same(value.pending, value.primal))
    )
