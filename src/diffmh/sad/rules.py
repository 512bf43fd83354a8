"""The rules of primitives without control flow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .. import values as algebra
from .._lowering.program import Equation
from . import primitives
from .analysis import Analysis
from .interpreter import RULES
from .marker import LINEAR
from .propose import PROPOSE
from .samplers import SAMPLE
from .values import Value, World, same


def by_evaluation(
    analysis: Analysis, world: World, equation: Equation, operands: Sequence[Value]
) -> tuple[World, list[Value]]:
    """Primal and alternatives by evaluation, the tangent by JAX's own JVP."""
    outputs = [Value(primal) for primal in equation.bind(*(value.primal for value in operands))]
    outputs = in_alternatives(world, equation.bind, operands, outputs)
    moves = equation.primitive not in primitives.STOPPED
    if moves and any(value.tangent is not None for value in operands):
        tangents = _tangents(world, equation.bind, operands)
        outputs = [
            Value(v.primal, tangent, v.alternative, v.pending)
            for v, tangent in zip(outputs, tangents, strict=True)
        ]
    return world, outputs


def in_alternatives(
    world: World,
    function: Callable[..., Sequence[Any]],
    operands: Sequence[Value],
    outputs: Sequence[Value],
) -> list[Value]:
    """`outputs` with their values in the slots and in the pending alternative, where the
    operands have such.
    """
    slots = pending = [None] * len(outputs)
    if any(value.alternative is not None for value in operands):
        slots = _each_slot(
            function,
            [(v.primal, None) if v.alternative is None else (v.alternative, 0) for v in operands],
        )
    if any(value.pending is not None for value in operands):
        pending = function(*(value.in_pending() for value in operands))
    return [
        Value(v.primal, v.tangent, slot, other)
        for v, slot, other in zip(outputs, slots, pending, strict=True)
    ]


def _each_slot(
    function: Callable[..., Sequence[Any]], operands: Sequence[tuple[Any, int | None]]
) -> Sequence[Any]:
    """`function` over the leading axis of the operands that have it; one slot needs no `vmap`,
    whose primitives may be slower.
    """
    arrays, axes = zip(*operands, strict=True)
    if next(array.shape[0] for array, axis in operands if axis == 0) > 1:
        return jax.vmap(function, in_axes=axes)(*arrays)
    return [
        leaf[None]
        for leaf in function(*(array if axis is None else array[0] for array, axis in operands))
    ]


def _tangents(
    world: World, function: Callable[..., Sequence[Any]], operands: Sequence[Value]
) -> list[Any]:
    """The directional derivatives along each parameter; `None` for whole numbers."""
    moving = [value.tangent is not None for value in operands]

    def of_moving(*moved):
        rest = iter(moved)
        outputs = function(
            *(
                next(rest) if moves else value.primal
                for value, moves in zip(operands, moving, strict=True)
            )
        )
        return [output for output in outputs if jnp.issubdtype(output.dtype, jnp.inexact)]

    points = tuple(value.primal for value in operands if value.tangent is not None)
    directions = tuple(
        value.tangent.astype(value.primal.dtype) for value in operands if value.tangent is not None
    )
    along = lambda *direction: jax.jvp(of_moving, points, direction)[1]
    found = iter(_each_slot(along, [(direction, 0) for direction in directions]))
    kinds = jax.eval_shape(function, *(value.primal for value in operands))
    return [next(found) if jnp.issubdtype(kind.dtype, jnp.inexact) else None for kind in kinds]


def sample(
    analysis: Analysis, world: World, equation: Equation, operands: Sequence[Value]
) -> tuple[World, list[Value]]:
    """A draw: alternatives draw by the same uniform at their own parameters, and flips of the
    primal's draw are candidates.
    """
    sampler = equation.params["sampler"]
    primals = [value.primal for value in operands]
    (drawn,) = equation.bind(*primals)

    def draw(*others):
        # Equal operands make equal draws, whatever a compiler rounds in one copy of the inversion
        # and not in the other.
        fresh = sampler.draw(*others)
        agree = [
            _by_draw(same(other, primal), fresh.ndim)
            for other, primal in zip(others, primals, strict=True)
        ]
        return [jnp.where(jnp.stack(agree).all(axis=0), drawn, fresh)]

    (value,) = in_alternatives(world, draw, operands, [Value(drawn)])
    if equation not in analysis.branching:
        return world, [value]
    tangents = [
        operand.tangents(world.num_parameters, world.weight.dtype) for operand in operands[1:]
    ]
    flipped, weight = sampler.candidates(drawn, primals[1:], tangents)
    weight = jnp.moveaxis(weight, 1, 0).astype(world.weight.dtype)
    if world.running is not None:
        weight = jnp.where(world.running, weight, 0.0)
    world, pending, chosen = _pick(world, drawn, flipped, weight)
    return world.replace(pending=chosen), [Value(drawn, None, value.alternative, pending)]


def _by_draw(equal: Any, ndim: int) -> Any:
    return jnp.all(equal, axis=tuple(range(ndim, equal.ndim)))


def _pick(world: World, drawn: Any, flipped: Any, weight: Any) -> tuple[World, Any, Any]:
    """One of the flips of all draws, in proportion to its score: the draws with it, and its
    weight.
    """
    if flipped.size == 1:
        return world, flipped.reshape(drawn.shape), weight.reshape(-1)
    world, uniform = world.uniform()
    picked = algebra.pick(weight, uniform, jnp.zeros((), weight.dtype))
    index, chosen = picked.index, picked.weight
    here = (jnp.arange(drawn.size) == index % drawn.size).reshape(drawn.shape)
    return world, jnp.where(here, flipped.reshape(-1)[index], drawn), chosen


def propose(
    analysis: Analysis, world: World, equation: Equation, operands: Sequence[Value]
) -> tuple[World, list[Value]]:
    """A proposal: alternatives propose by the coupling beside the primal."""
    form, batches = equation.params["form"], equation.params["batches"]
    primals = [value.primal for value in operands]
    proposed = equation.bind(*primals)
    state_at = len(operands) - form.sizes[-1]

    if not any(value.branched for value in operands):
        return world, [Value(primal) for primal in proposed]
    coupling_noise = world.coupling_noise.get(equation)
    if coupling_noise is None:
        world, key = world.spawn()
        arrays = primals[1 : 1 + form.sizes[1]]
        coupling_noise = jax.tree.map(
            lambda leaf: leaf[0], draw_coupling_noise(equation, key, arrays, 1)
        )

    def one(x_new, operands, others, noise):
        coupled = form.couple(x_new, operands, others[state_at:], noise)
        if key_is_shared:
            return coupled
        # An alternative that runs on in a loop that the primal has left has noise of its own.
        together, alone = same(operands[0], others[0]), form.propose(*others)
        return [jnp.where(together, a, b) for a, b in zip(coupled, alone, strict=True)]

    key_is_shared = not operands[0].branched

    def beside(*others):
        function = one
        for _ in range(batches):
            function = jax.vmap(function)
        return function(list(proposed), primals, list(others), coupling_noise)

    return world, in_alternatives(world, beside, operands, [Value(primal) for primal in proposed])


def draw_coupling_noise(equation: Equation, key: Any, arrays: Sequence[Any], num_steps: int) -> Any:
    """The randomness of a coupling for `num_steps` runs of the equation that proposes, each of
    as many batches as it has.
    """
    form, batches = equation.params["form"], equation.params["batches"]
    states = equation.outputs
    shape = states[0].shape[:batches] if states else ()
    x = [jax.ShapeDtypeStruct(state.shape[batches:], state.dtype) for state in states]
    draw = lambda key, arrays: form.coupling_noise(key, arrays, x, num_steps)
    for _ in range(batches):
        draw = jax.vmap(draw, out_axes=1)
    return draw(jax.random.split(key, shape) if batches else key, list(arrays))


RULES.update(
    dict.fromkeys(primitives.SMOOTH | primitives.JUMPS | primitives.EVALUATED, by_evaluation)
)
RULES.update(
    {
        SAMPLE: sample,
        PROPOSE: propose,
        LINEAR: lambda analysis, world, equation, operands: (world, operands),
    }
)
