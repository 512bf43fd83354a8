"""The alternatives of a running program.

Beside its primal a value has, where it needs them, a tangent and its values in the *lanes*. The
first K lanes are the slots, whose alternatives are followed; behind them are, for a while, the
newcomers that the latest draw gave rise to. They stay until it is known what became of the draw;
then the alternatives that agree with the primal in every value that still matters are dropped, and
those that are left are thinned to K. Which of these a value has is known when the program is
traced: without them it costs nothing.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from ..core import values as algebra
from ..core.autodiff import moving
from ..core.values import Value as Value
from ..fast.apart import jit_apart
from . import thinning

# Beyond about as many draws, in a program or in an iteration of a loop, each is compiled apart.
_MANY_UNIFORMS = 8


class Lanes(eqx.Module):
    """The state of the alternatives, which is carried through loops.

    A value that was computed when slot k had been given away `births[k]` times belongs to today's
    alternative iff the count is still the same. `pinned` is that count wherever something outside
    of the running loop differs in the alternative, else −1; `None` where nothing can. `scale` adds
    up what weights were born so far, parameter by parameter, so that scores measure each in its own
    units; one parameter needs none. `worth` are zeros whose derivative by JAX is the weight, in the
    reverse mode, where `weight` is known along some probing directions only.
    """

    weight: Float[Array, "L P"]
    births: Int[Array, "K"]
    pinned: Int[Array, "K"] | None
    scale: Float[Array, "P"] | None
    worth: Float[Array, "L"] | None


@dataclasses.dataclass(frozen=True)
class World:
    """The state of a running program beside its values.

    `running` says whether the primal runs, where it may have left a loop that alternatives have
    not. `uniforms` are for pruning, and `coupling_noise` holds what the equations that propose have
    had drawn ahead of a loop.
    """

    lanes: Lanes
    running: Bool[Array, ""] | None
    uniforms: Float[Array, "n"]
    key: Key[Array, ""]
    taken: int = 0
    spawned: int = 0
    coupling_noise: Mapping[Any, Any] = dataclasses.field(default_factory=dict)

    @property
    def weight(self) -> Float[Array, "L P"]:
        return self.lanes.weight

    @property
    def births(self) -> Int[Array, "K"]:
        return self.lanes.births

    @property
    def num_slots(self) -> int:
        return self.lanes.births.shape[0]

    @property
    def num_lanes(self) -> int:
        return self.lanes.weight.shape[0]

    @property
    def num_parameters(self) -> int:
        return self.lanes.weight.shape[1]

    @property
    def is_long(self) -> bool:
        """True if so many draws follow each other, loops aside, that compiling them together
        would take too long.
        """
        return self.uniforms.shape[0] > _MANY_UNIFORMS

    @property
    def alive(self) -> Bool[Array, "L"]:
        return algebra.is_alive(jnp.max(jnp.abs(self.weight), axis=1))

    def replace(self, **changes: Any) -> World:
        return dataclasses.replace(self, **changes)

    def with_lanes(self, **changes: Any) -> World:
        return self.replace(lanes=dataclasses.replace(self.lanes, **changes))

    def uniform(self) -> tuple[World, Float[Array, ""]]:
        """A uniform that the program itself has no part in."""
        assert self.taken < self.uniforms.shape[0], "more uniforms were taken than foreseen"
        return self.replace(taken=self.taken + 1), self.uniforms[self.taken]

    def spawn(self) -> tuple[World, Key[Array, ""]]:
        """A key for an inner program."""
        return self.replace(spawned=self.spawned + 1), jax.random.fold_in(self.key, self.spawned)

    def still(self, array: Any) -> Any:
        """Without the derivative that JAX takes in the reverse mode."""
        return array if self.lanes.worth is None else jax.lax.stop_gradient(array)


def no_alternatives(
    num_slots: int,
    num_parameters: int,
    dtype: Any,
    key: Key[Array, ""],
    num_uniforms: int,
    reverse: bool = False,
) -> World:
    """The world at the start of a program."""
    key_uniforms, key_inner = jax.random.split(key)
    lanes = Lanes(
        # A slot without weight is empty: whatever value it holds adds nothing to a derivative.
        weight=jnp.zeros((num_slots, num_parameters), dtype),
        births=jnp.zeros(num_slots, jnp.int32),
        pinned=None,
        scale=jnp.zeros(num_parameters, dtype) if num_parameters > 1 else None,
        worth=jnp.zeros(num_slots, dtype) if reverse else None,
    )
    return World(lanes, None, jax.random.uniform(key_uniforms, (num_uniforms,)), key_inner)


def in_lanes(value: Value, num_lanes: int) -> Any:
    """A value in the first lanes; in those that it knows nothing of it is the primal's."""
    repeated = lambda count: jnp.broadcast_to(value.primal, (count, *jnp.shape(value.primal)))
    if value.alternative is None:
        return repeated(num_lanes)
    # A value computed before the latest draw has no entries for its newcomers, which share the past
    # with the primal.
    missing = num_lanes - value.alternative.shape[0]
    return jnp.concatenate([value.alternative, repeated(missing)]) if missing else value.alternative


def bank(world: World, value: Value) -> Value:
    """A value that enters the result linearly, turned into derivative: `ẋ + Σ_k W_k (x_k − x)`,
    and no alternative any more.
    """
    if value.alternative is None:
        return value
    # E[Σ_k W_k (x_k − x)] is what the decisions so far add to ∂E[x]. A linear function of x
    # commutes with the expectation, so that the sum may be taken here instead of at the result.
    difference = value.alternative - world.still(value.primal)[None]
    return add_difference(world, Value(value.primal, value.tangent), difference)


def add_difference(world: World, value: Value, difference: Any) -> Value:
    """A value whose derivative takes up the differences of alternatives, `Σ_k W_k ⊗ difference_k`;
    in the reverse mode JAX sees it in the primal.
    """
    count = difference.shape[0]
    weight, alive = world.weight[:count], world.alive[:count]
    tangent = value.tangents(world.num_parameters, weight.dtype)
    tangent = tangent + algebra.weighted(weight, alive, difference).astype(tangent.dtype)
    primal = value.primal
    if world.lanes.worth is not None:
        # `worth` is 0 and its derivative is the weight: `primal + Σ worth · difference` has the
        # primal's value, and Σ W · difference for its derivative. The differences themselves must
        # not move, or their own derivative times 0 would be traced for nothing.
        worth = world.lanes.worth[:count, None]
        moved = algebra.weighted(worth, alive, world.still(difference))[0]
        primal = moving(primal, moved.astype(primal.dtype))
    return Value(primal, tangent)


def prune(world: World, values: dict[Any, Value]) -> tuple[World, dict[Any, Value]]:
    """Drops the alternatives that met the primal in all of `values`, which still matter, and thins
    the others to as many as there are slots.
    """
    branched = {name: value for name, value in values.items() if value.alternative is not None}
    plain = [Value(value.primal, None, value.alternative) for value in branched.values()]
    if world.num_lanes == world.num_slots:
        return world.replace(lanes=_dropped(world.lanes, plain)), values
    # One uniform per pruning, of the pruning's own: thinning is unbiased given all values, so the
    # program's randomness must not enter.
    world, uniform = world.uniform()
    lanes, slots = _pruned(world.lanes, plain, uniform, apart=world.is_long)
    after = {
        name: Value(value.primal, value.tangent, slot)
        for (name, value), slot in zip(branched.items(), slots, strict=True)
    }
    return world.replace(lanes=lanes), values | after


@jit_apart
def _pruned(
    lanes: Lanes, values: list[Value], uniform: Float[Array, ""]
) -> tuple[Lanes, list[Any]]:
    """Traced once for all draws of the same form."""
    lanes = _dropped(lanes, values)
    num_lanes, num_slots = lanes.weight.shape[0], lanes.births.shape[0]
    kept = thinning.thin(algebra.norm(lanes.weight.T, lanes.scale), num_slots, uniform)
    weight = kept.take(lanes.weight) * kept.factor[:, None].astype(lanes.weight.dtype)
    worth = lanes.worth
    if worth is not None:
        worth = kept.take(worth) * jax.lax.stop_gradient(kept.factor).astype(worth.dtype)
    # A slot that is given away counts one birth more: values of the old alternative know by that
    # count that they are no longer its.
    births = lanes.births + kept.replaced
    after = dataclasses.replace(lanes, weight=weight, births=births, worth=worth)
    return after, [kept.take(in_lanes(value, num_lanes)) for value in values]


def drop_recoupled(world: World, values: Iterable[Value]) -> World:
    """Alternatives that agree with the primal in everything that still matters will do so for
    ever: their weight becomes 0.
    """
    branched = [Value(v.primal, None, v.alternative) for v in values if v.alternative is not None]
    return world.replace(lanes=_dropped(world.lanes, branched))


def _dropped(lanes: Lanes, values: Sequence[Value]) -> Lanes:
    num_lanes, num_slots = lanes.weight.shape[0], lanes.births.shape[0]
    # Alive iff something that still matters differs, here or, where it is pinned, outside.
    differs = [differs_in_lanes(value, num_lanes) for value in values]
    # Newcomers (behind the slots) are never pinned: they were born after the loop was entered.
    if lanes.pinned is not None:
        differs.append(_pad(lanes.pinned == lanes.births, num_lanes - num_slots))
    alive = functools.reduce(jnp.logical_or, differs) if differs else jnp.zeros(num_lanes, bool)
    return dataclasses.replace(lanes, weight=algebra.drop(lanes.weight, ~alive))


def _pad(flags: Bool[Array, "n"], count: int) -> Bool[Array, "L"]:
    return jnp.concatenate([flags, jnp.zeros(count, bool)]) if count else flags


def pin(world: World, values: Iterable[Value]) -> World:
    """The world within a loop, outside of which `values` still matter."""
    branched = [value for value in values if value.alternative is not None]
    if not branched:
        return world
    # By the birth count, not by a flag: whoever gets the slot later is not pinned by it.
    differs = [differs_in_lanes(value, world.num_slots) for value in branched]
    pinned = -1 if world.lanes.pinned is None else world.lanes.pinned
    return world.with_lanes(
        pinned=jnp.where(functools.reduce(jnp.logical_or, differs), world.births, pinned)
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
    )


def select_slots(condition: Bool[Array, "K"], chosen: Any, other: Any) -> Any:
    """`chosen` in the slots where `condition` holds."""
    return jnp.where(condition.reshape(-1, *(1,) * (jnp.ndim(other) - 1)), chosen, other)


def same(a: Any, b: Any) -> Any:
    """Element by element equal; keys are compared by their data. NaN differs from everything."""
    if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
        return jnp.all(jax.random.key_data(a) == jax.random.key_data(b), axis=-1)
    return a == b


def differs_in_lanes(value: Value, num_lanes: int) -> Bool[Array, "L"]:
    """In which lanes a value is not the primal's."""
    if value.alternative is None:
        return jnp.zeros(num_lanes, bool)
    # Bit for bit: two chains that agree up to rounding have not met. NaN equals nothing, so an
    # alternative that is NaN is never dropped in silence.
    equal = same(value.alternative, value.primal[None])
    differs = ~jnp.all(equal, axis=tuple(range(1, equal.ndim)))
    return _pad(differs, num_lanes - differs.shape[0])
