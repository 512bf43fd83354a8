"""The rules for primitives without control flow."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..base import trees
from ..core import values as algebra
from ..core.autodiff import moving
from ..fast.apart import jit_apart
from ..jaxprs.program import Equation
from . import primitives, thinning
from .analysis import Analysis
from .draw import SAMPLE, Sampler, mapped
from .interpreter import ANY, RULES
from .marker import LINEAR
from .propose import PROPOSE
from .values import Lanes, Value, World, in_lanes, same


def by_evaluation(
    analysis: Analysis, world: World, equation: Equation, operands: Sequence[Value]
) -> tuple[World, list[Value]]:
    """Primal and alternatives by evaluation, tangent by JAX's own JVP."""
    outputs = [Value(primal) for primal in equation.bind(*(value.primal for value in operands))]
    outputs = in_alternatives(world, equation.bind, operands, outputs)
    moves = equation.primitive not in primitives.STOPPED
    if moves and any(value.tangent is not None for value in operands):
        along = _backward_twice if equation.primitive in _NO_JVP else _jvp
        tangents = _tangents(world, equation.bind, operands, along)
        outputs = [
            Value(v.primal, tangent, v.alternative)
            for v, tangent in zip(outputs, tangents, strict=True)
        ]
    return world, outputs


def in_alternatives(
    world: World,
    function: Callable[..., Sequence[Any]],
    operands: Sequence[Value],
    outputs: Sequence[Value],
) -> list[Value]:
    """`outputs` with their values in the lanes, if an operand has such values."""
    known = [value.alternative.shape[0] for value in operands if value.alternative is not None]
    # Operands may know different numbers of lanes; `in_lanes` fills the others with the primal.
    if not known:
        return list(outputs)
    still = [Value(world.still(value.primal), None, value.alternative) for value in operands]
    differing = [in_lanes(value, max(known)) for value in still if value.alternative is not None]

    def one(lane):
        own = iter(lane)
        return function(*(v.primal if v.alternative is None else next(own) for v in still))

    lanes = algebra.each_slot(one, differing)
    return [
        Value(value.primal, value.tangent, lane) for value, lane in zip(outputs, lanes, strict=True)
    ]


_NO_JVP = {"custom_vjp_call", "custom_vjp_call_jaxpr"}


def _jvp(function: Callable[..., list[Any]], points: tuple[Any, ...], direction: Any) -> list[Any]:
    return jax.jvp(function, points, direction)[1]


def _backward_twice(
    function: Callable[..., list[Any]], points: tuple[Any, ...], direction: Any
) -> list[Any]:
    """`J v` where only `u ↦ Jᵀu` is available: the transpose of that map."""
    outputs, pull = jax.vjp(function, *points)
    zeros = jax.tree.map(jnp.zeros_like, outputs)
    return jax.vjp(pull, zeros)[1](tuple(direction))[0]


def _tangents(
    world: World,
    function: Callable[..., Sequence[Any]],
    operands: Sequence[Value],
    derivative: Callable[..., list[Any]],
) -> list[Any]:
    """The directional derivative along each parameter; `None` for integers."""
    moving = [value.tangent is not None for value in operands]
    points = [world.still(value.primal) for value in operands]

    def of_moving(*moved):
        rest = iter(moved)
        outputs = function(
            *(next(rest) if moves else point for point, moves in zip(points, moving, strict=True))
        )
        return [output for output in outputs if jnp.issubdtype(output.dtype, jnp.inexact)]

    at = tuple(point for point, moves in zip(points, moving, strict=True) if moves)
    directions = [
        value.tangent.astype(value.primal.dtype) for value in operands if value.tangent is not None
    ]
    along = lambda direction: derivative(of_moving, at, tuple(direction))
    found = iter(algebra.each_slot(along, directions))
    # Integer results have no derivative and were left out above.
    kinds = jax.eval_shape(function, *points)
    return [next(found) if jnp.issubdtype(kind.dtype, jnp.inexact) else None for kind in kinds]


def sample(
    analysis: Analysis, world: World, equation: Equation, operands: Sequence[Value]
) -> tuple[World, list[Value]]:
    """A draw. Alternatives draw with the same uniform and their own parameters; flips of the
    primal's draw are the newcomers.
    """
    sampler = equation.params["sampler"]
    primals = [world.still(value.primal) for value in operands]
    (drawn,) = equation.bind(*primals)

    def redrawn(*others):
        # Equal operands must give equal draws, even if a compiler rounds one copy of the inversion
        # differently.
        fresh = sampler.values(*others)
        agree = [
            _by_draw(same(other, primal), fresh.ndim)
            for other, primal, operand in zip(others, primals, operands, strict=True)
            if operand.alternative is not None
        ]
        return [jnp.where(functools.reduce(jnp.logical_and, agree), drawn, fresh)]

    (value,) = in_alternatives(world, redrawn, operands, [Value(drawn)])
    if equation not in analysis.branching or drawn.size == 0:
        return world, [value]
    world, newcomers = _newcomers(world, sampler, drawn, operands)
    slots = in_lanes(value, world.num_slots)
    return world, [Value(drawn, None, jnp.concatenate([slots, newcomers]))]


def _by_draw(equal: Any, ndim: int) -> Any:
    return jnp.all(equal, axis=tuple(range(ndim, equal.ndim))) if equal.ndim > ndim else equal


def _newcomers(
    world: World, sampler: Sampler, drawn: Any, operands: Sequence[Value]
) -> tuple[World, Any]:
    """The flips of a draw that are followed, in the lanes after the slots."""
    count = sampler.num_candidates(drawn, [value.primal for value in operands[1:]])
    # A single candidate needs no choice and takes no uniform, as `num_uniforms` assumes.
    uniform = None
    if count > 1:
        world, uniform = world.uniform()
    given = [Value(value.primal, value.tangent) for value in operands[1:]]
    arguments = (sampler, world.lanes, world.running, uniform, drawn, given)
    lanes, newcomers = _born(*arguments, apart=world.is_long)
    return world.replace(lanes=lanes), newcomers


@functools.partial(jit_apart, static_argnums=0)
def _born(
    sampler: Sampler, lanes: Lanes, running: Any, uniform: Any, drawn: Any, given: Sequence[Value]
) -> tuple[Lanes, Any]:
    """Traced once for all draws of the same form."""
    still = (lambda array: array) if lanes.worth is None else jax.lax.stop_gradient
    parameters = [still(value.primal) for value in given]
    num_parameters, dtype = lanes.weight.shape[1], lanes.weight.dtype
    tangents = [value.tangents(num_parameters, dtype) for value in given]
    flipped, weight = sampler.candidates(drawn, parameters, tangents)
    # Weights are linear in the tangents, so the axis of P parameters may lead.
    weight = _while_running(running, jnp.moveaxis(weight, 1, 0).astype(dtype))
    weight = weight.reshape(num_parameters, -1)
    scale, worth = lanes.scale, lanes.worth
    scale = None if scale is None else scale + jnp.sum(jnp.abs(weight), axis=1)
    chosen = _choose(weight, scale, lanes.births.shape[0], uniform)
    if worth is not None:
        # Zeros that have the derivative of the parameters: JAX differentiates them to the weight.
        moved = [_zeros_that_move(value.primal)[None] for value in given]
        _, born = sampler.candidates(drawn, parameters, moved)
        born = chosen.take(_while_running(running, born).reshape(-1)) * still(chosen.factor)
        worth = jnp.concatenate([worth, born.astype(worth.dtype)])
    weight = jnp.concatenate([lanes.weight, chosen.take(weight.T) * chosen.factor[:, None]])
    scoreless = sampler.scoreless(drawn.ndim, parameters, tangents)
    if running is not None:
        scoreless = scoreless & running
    lanes = Lanes(weight, lanes.births, lanes.pinned, scale, worth, lanes.scoreless | scoreless)
    return lanes, chosen.flip(drawn, flipped)


def _zeros_that_move(parameter: Array) -> Array:
    """Zeros with the derivative of `parameter`."""
    zeros = jnp.zeros_like(parameter)
    return moving(zeros, parameter) if jnp.issubdtype(zeros.dtype, jnp.inexact) else zeros


class _Chosen(eqx.Module):
    """The candidates that become newcomers, and the factors of their weights; `None` if all
    candidates do.
    """

    index: Int[Array, "M"] | None
    factor: Float[Array, "M"]

    def take(self, candidates: Array) -> Array:
        if self.index is None:
            return candidates
        if self.index.shape[0] == 1:
            return trees.entry(candidates, self.index[0])[None]
        return candidates[self.index]

    def flip(self, drawn: Array, flipped: Array) -> Array:
        """The draw's values with one flip each."""
        if self.index is None:
            return flipped.reshape(-1, *drawn.shape)
        here = jnp.arange(drawn.size)[None] == (self.index % drawn.size)[:, None]
        flips = self.take(flipped.reshape(-1)).astype(drawn.dtype)
        values = jnp.where(here, flips[:, None], drawn.reshape(1, -1))
        return values.reshape(-1, *drawn.shape)


def _while_running(running: Any, weight: Any) -> Any:
    """The weight, or 0 if the primal does not run: alternatives are born only while it does."""
    return weight if running is None else jnp.where(running, weight, 0.0)


def _choose(weight: Float[Array, "P C"], scale: Any, num_slots: int, uniform: Any) -> _Chosen:
    """Choose at most one newcomer for each slot, with probability proportional to their scores."""
    count = weight.shape[1]
    if count <= 1:
        return _Chosen(None, jnp.ones(count, weight.dtype))
    if num_slots == 1:
        picked = algebra.pick(weight, uniform, jnp.zeros((), weight.dtype), scale)
        score = algebra.norm(trees.entry(weight.T, picked.index), scale)
        # A NaN derivative must not disappear, even if the chosen candidate has weight 0.
        none = (score == 0) & ~jnp.isnan(picked.score)
        factor = jnp.where(none, 0.0, picked.score / jnp.where(score == 0, 1.0, score))
        return _Chosen(picked.index[None], factor[None])
    scores = algebra.norm(weight, scale)
    index, factor = thinning.several(scores, min(count, num_slots), uniform)
    return _Chosen(index, factor.astype(weight.dtype))


def propose(
    analysis: Analysis, world: World, equation: Equation, operands: Sequence[Value]
) -> tuple[World, list[Value]]:
    """A proposal. Alternatives propose with the coupling, given the primal's proposal."""
    form, batches = equation.params["form"], equation.params["batches"]
    primals = [world.still(value.primal) for value in operands]
    proposed = equation.bind(*primals)
    state_at = len(operands) - form.sizes[-1]

    if not any(value.alternative is not None for value in operands):
        return world, [Value(primal) for primal in proposed]
    coupling_noise = world.coupling_noise.get(equation)
    if coupling_noise is None:
        world, key = world.spawn()
        arrays = primals[1 : 1 + form.sizes[1]]
        coupling_noise = jax.tree.map(
            lambda leaf: leaf[0], noise_of_coupling(equation, key, arrays, 1)
        )

    def one(x_new, operands, others, noise):
        coupled = form.couple(x_new, operands, others[state_at:], noise)
        if key_is_shared:
            return coupled
        # An alternative that continues in a loop that the primal has left has its own noise.
        together, alone = same(operands[0], others[0]), form.propose(*others)
        return [jnp.where(together, a, b) for a, b in zip(coupled, alone, strict=True)]

    key_is_shared = operands[0].alternative is None

    def beside(*others):
        function = mapped(one, batches)
        return function(list(proposed), primals, list(others), coupling_noise)

    return world, in_alternatives(world, beside, operands, [Value(primal) for primal in proposed])


def noise_of_coupling(equation: Equation, key: Any, arrays: Sequence[Any], num_steps: int) -> Any:
    """The randomness of a coupling for `num_steps` evaluations of the equation, each with as many
    batches as it has.
    """
    form, batches = equation.params["form"], equation.params["batches"]
    states = equation.outputs
    shape = states[0].shape[:batches] if states else ()
    x = [jax.ShapeDtypeStruct(state.shape[batches:], state.dtype) for state in states]

    def noise(key, arrays):
        return form.coupling_noise(key, arrays, x, num_steps)

    keys = jax.random.split(key, shape) if batches else key
    return mapped(noise, batches, out_axes=1)(keys, list(arrays))


RULES.update(
    dict.fromkeys(primitives.SMOOTH | primitives.JUMPS | primitives.EVALUATED, by_evaluation)
)
RULES.update(
    {
        ANY: by_evaluation,
        SAMPLE: sample,
        PROPOSE: propose,
        LINEAR: lambda analysis, world, equation, operands: (world, operands),
    }
)
