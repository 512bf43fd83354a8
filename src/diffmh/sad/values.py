"""The alternatives of a running program.

A value has a primal and, if needed, a tangent and its values in the *lanes*. The first K lanes are
the slots: the alternatives that are followed. The lanes after them hold, for a while, the
newcomers from the latest draw. They stay until the effect of the draw is known. Then alternatives
that agree with the primal in every value that is still used are dropped, and the rest is thinned
to K. The parts of a value are known when the program is traced, so a missing part costs nothing.
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

from ..base import trees
from ..core import values as algebra
from ..core.autodiff import moving
from ..core.values import Value as Value
from ..fast.apart import jit_apart
from . import thinning

# With more draws than this, in a program or in an iteration of a loop, each is compiled separately.
_MANY_UNIFORMS = 8


class Lanes(eqx.Module):
    """The state of the alternatives, which is carried through loops.

    `births[k]` counts how often slot k was reassigned. A value belongs to the current alternative
    iff the count was the same when the value was computed. `pinned` is that count where a value
    outside of the running loop differs in the alternative, else −1; `None` if none can. `scale`
    sums the weights born so far for each parameter, so that scores measure each parameter in its
    own units; a single parameter has none. In the reverse mode, `worth` are zeros whose derivative
    by JAX is the weight, and `weight` is known along the probing directions only. `scoreless` is
    True if the score does not exist for a draw so far.
    """

    weight: Float[Array, "L P"]
    births: Int[Array, "K"]
    pinned: Int[Array, "K"] | None
    scale: Float[Array, "P"] | None
    worth: Float[Array, "L"] | None
    scoreless: Bool[Array, ""]


@dataclasses.dataclass(frozen=True)
class World:
    """The state of a running program beside its values.

    `running` is False if the primal has left a loop in which alternatives continue. `uniforms` are
    for pruning. `coupling_noise` holds the noise of proposals that was drawn in advance for a
    loop.
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
        """True if there are so many draws, loops excluded, that compiling them together would take
        too long.
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
        """A uniform that is independent of the program's own randomness."""
        assert self.taken < self.uniforms.shape[0], "more uniforms were taken than foreseen"
        return self.replace(taken=self.taken + 1), self.uniforms[self.taken]

    def spawn(self) -> tuple[World, Key[Array, ""]]:
        """A key for an inner program."""
        return self.replace(spawned=self.spawned + 1), jax.random.fold_in(self.key, self.spawned)

    def still(self, array: Any) -> Any:
        """The array without the derivative that JAX takes in the reverse mode."""
        return array if self.lanes.worth is None else jax.lax.stop_gradient(array)


def no_alternatives(
    num_slots: int,
    num_parameters: int,
    dtype: Any,
    key: Key[Array, ""],
    num_uniforms: int,
    reverse: bool = False,
) -> World:
    """The world at the start of a program, without alternatives."""
    key_uniforms, key_inner = jax.random.split(key)
    lanes = Lanes(
        # A slot of weight 0 is empty: its values contribute nothing to a derivative.
        weight=jnp.zeros((num_slots, num_parameters), dtype),
        births=jnp.zeros(num_slots, jnp.int32),
        pinned=None,
        scale=jnp.zeros(num_parameters, dtype) if num_parameters > 1 else None,
        worth=jnp.zeros(num_slots, dtype) if reverse else None,
        scoreless=jnp.zeros((), bool),
    )
    return World(lanes, None, jax.random.uniform(key_uniforms, (num_uniforms,)), key_inner)


def in_lanes(value: Value, num_lanes: int) -> Any:
    """A value in the first lanes. Where it has no entry, it is the primal's."""
    repeated = lambda count: jnp.broadcast_to(value.primal, (count, *jnp.shape(value.primal)))
    if value.alternative is None:
        return repeated(num_lanes)
    # A value computed before the latest draw has no entries for the newcomers, which share their
    # past with the primal.
    missing = num_lanes - value.alternative.shape[0]
    return jnp.concatenate([value.alternative, repeated(missing)]) if missing else value.alternative


def bank(world: World, value: Value) -> Value:
    """Turn the alternatives of a value that enters the result linearly into a derivative:
    `ẋ + Σ_k W_k (x_k − x)`.
    """
    if value.alternative is None:
        return value
    # E[Σ_k W_k (x_k − x)] is the contribution of the decisions so far to ∂E[x]. A linear function
    # of x commutes with the expectation, so the sum may be taken here instead of at the result.
    difference = value.alternative - world.still(value.primal)[None]
    return add_difference(world, Value(value.primal, value.tangent), difference)


def add_difference(world: World, value: Value, difference: Any) -> Value:
    """Add the differences of alternatives, `Σ_k W_k ⊗ difference_k`, to the derivative of a value.
    In the reverse mode JAX sees them through the primal.
    """
    count = difference.shape[0]
    weight, alive = world.weight[:count], world.alive[:count]
    tangent = value.tangents(world.num_parameters, weight.dtype)
    tangent = tangent + algebra.weighted(weight, alive, difference).astype(tangent.dtype)
    primal = value.primal
    if world.lanes.worth is not None:
        # `worth` is 0 and its derivative is the weight: `primal + Σ worth · difference` has the
        # primal's value and the derivative Σ W · difference. The differences are held fixed:
        # otherwise JAX would trace their derivative, only to multiply it with 0.
        worth = world.lanes.worth[:count, None]
        moved = algebra.weighted(worth, alive, world.still(difference))[0]
        primal = moving(primal, moved.astype(primal.dtype))
    return Value(primal, tangent)


def prune(world: World, values: dict[Any, Value]) -> tuple[World, dict[Any, Value]]:
    """Drop the alternatives that agree with the primal in all of `values`, which are those still
    used, and thin the rest to the number of slots.
    """
    branched = {name: value for name, value in values.items() if value.alternative is not None}
    plain = [Value(value.primal, None, value.alternative) for value in branched.values()]
    if world.num_lanes == world.num_slots:
        return world.replace(lanes=_dropped(world.lanes, plain)), values
    # Each pruning has its own uniform: thinning is unbiased given all values, so the uniform must
    # be independent of the program's randomness.
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
    # The count of a reassigned slot grows by one. Values of the old alternative are recognised by
    # their older count.
    births = lanes.births + kept.replaced
    after = dataclasses.replace(lanes, weight=weight, births=births, worth=worth)
    return after, [kept.take(in_lanes(value, num_lanes)) for value in values]


def _dropped(lanes: Lanes, values: Sequence[Value]) -> Lanes:
    """Set the weight to 0 for alternatives that agree with the primal in everything that is still
    used: they will agree from here on.
    """
    num_lanes, num_slots = lanes.weight.shape[0], lanes.births.shape[0]
    # Alive iff a value that is still used differs, here or, if pinned, outside of the loop.
    differs = [differs_in_lanes(value, num_lanes) for value in values]
    # Newcomers (after the slots) are never pinned: they were born after the loop was entered.
    if lanes.pinned is not None:
        differs.append(_pad(lanes.pinned == lanes.births, num_lanes - num_slots))
    alive = functools.reduce(jnp.logical_or, differs) if differs else jnp.zeros(num_lanes, bool)
    return dataclasses.replace(lanes, weight=algebra.drop(lanes.weight, ~alive))


def _pad(flags: Bool[Array, "n"], count: int) -> Bool[Array, "L"]:
    return jnp.concatenate([flags, jnp.zeros(count, bool)]) if count else flags


def pin(world: World, values: Iterable[Value]) -> World:
    """The world within a loop after which `values` are still used."""
    branched = [value for value in values if value.alternative is not None]
    if not branched:
        return world
    # Pinned by the birth count, not by a flag: the next alternative in the slot is not pinned.
    differs = [differs_in_lanes(value, world.num_slots) for value in branched]
    pinned = -1 if world.lanes.pinned is None else world.lanes.pinned
    return world.with_lanes(
        pinned=jnp.where(functools.reduce(jnp.logical_or, differs), world.births, pinned)
    )


def forget(value: Value, replaced: Bool[Array, "K"]) -> Value:
    """A value from before the slots in `replaced` were reassigned. Their new alternatives share it
    with the primal.
    """
    if value.alternative is None:
        return value
    return Value(
        value.primal,
        value.tangent,
        trees.select(replaced, value.primal[None], value.alternative),
    )


def same(a: Any, b: Any) -> Any:
    """Elementwise equality; keys are compared by their data. NaN differs from everything."""
    if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
        return jnp.all(jax.random.key_data(a) == jax.random.key_data(b), axis=-1)
    return a == b


def differs_in_lanes(value: Value, num_lanes: int) -> Bool[Array, "L"]:
    """For each lane, True if the value differs from the primal's."""
    if value.alternative is None:
        return jnp.zeros(num_lanes, bool)
    # Bitwise: two chains that agree up to rounding have not met. NaN equals nothing, so an
    # alternative that is NaN is never dropped.
    equal = same(value.alternative, value.primal[None])
    differs = ~jnp.all(equal, axis=tuple(range(1, equal.ndim)))
    return _pad(differs, num_lanes - differs.shape[0])
