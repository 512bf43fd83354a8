"""What an expectation asks of its simulation, compiled: values, derivatives, and the rounds of a
run that is reported.
"""

from __future__ import annotations

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from ._admission import Admission
from ._differentiable import differentiable_both_ways
from .checkpoint import fingerprint, lowered
from .counts import Watch
from .course import Course, Round, round_key
from .intervals import Stretches
from .loop import Loop, Progress
from .running import advance, at_home, pulled, pushed, run
from .simulation import Observed, Outcome, Simulation, joined


@eqx.filter_jit
def value_of(simulation: Simulation, theta, key, args) -> Float[Array, "F C"]:
    return run(simulation.plain(), theta, key, args, differentiate=False).observed.value


def by_births(simulation: Simulation, form: Admission, theta, key, args):
    """The values, differentiable by births, forward and backward."""
    value = eqx.Partial(value_of, simulation)
    pushforward, pullback = eqx.Partial(_pushed, simulation), eqx.Partial(_pulled, simulation)
    if form.closes_over_tracers:
        values = eqx.filter_eval_shape(value, theta, key, args)
        value = eqx.filter_closure_convert(value, theta, key, args)
        pushforward = eqx.filter_closure_convert(pushforward, theta, key, args, theta)
        pullback = eqx.filter_closure_convert(pullback, theta, key, args, values)
    return differentiable_both_ways(value, pushforward, pullback, theta, key, args)


@eqx.filter_jit
def _pushed(simulation: Simulation, theta, key, args, direction) -> Float[Array, "F C"]:
    return pushed(simulation, theta, key, args, direction)


@eqx.filter_jit
def _pulled(simulation: Simulation, theta, key, args, cotangent) -> PyTree:
    return pulled(simulation, theta, key, args, cotangent)


@eqx.filter_jit
def value_and_jacobian(simulation: Simulation, theta, key, args):
    observed = run(simulation, theta, key, args).observed
    return observed.value, simulation.estimator.derivative(observed.estimator, observed.value)


@eqx.filter_jit
def _advance(loop: Loop, progress: Progress, first, last):
    progress, outcome = advance(loop, progress, first, last)
    return progress, _with_derivative(loop.simulation, outcome)


def _with_derivative(simulation: Simulation, outcome: Outcome):
    """The outcome with what its stretches and halves say, and the derivative of the whole."""
    derivative, watch = simulation.estimator.derivative, outcome.watch
    assert isinstance(watch, Watch)

    def stretches(sums: Observed, lengths: tuple[int, ...]) -> Stretches:
        def divide(leaf):
            return leaf / jnp.maximum(1, jnp.array(lengths)).reshape(-1, *(1,) * (leaf.ndim - 1))

        means = jax.tree.map(divide, sums)
        return Stretches(means.value, jax.vmap(derivative)(means.estimator, means.value), lengths)

    window = watch.window
    halves = (window.middle - window.first, simulation.num_steps - window.middle)
    outcome = dataclasses.replace(
        outcome,
        stretches=stretches(watch.sums, watch.batches.samples),
        halves=stretches(watch.halves, halves),
    )
    if outcome.gathered is not None:
        return dataclasses.replace(outcome, gathered=None), outcome.gathered
    return outcome, derivative(outcome.observed.estimator, outcome.observed.value)


@eqx.filter_jit
def _unbegun(loop: Loop) -> Progress:
    """Zeros in the form of a run's progress."""
    form = eqx.filter_eval_shape(loop.start)
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), form)


def followed(simulation: Simulation, theta, key, args, course: Course):
    """Outcome and derivative of all rounds of a course."""
    loop_with = lambda key: Loop(simulation, theta, key, args, True, True)
    loop = loop_with(key)
    # Without the mesh: what is begun on several devices may be continued on any number of them.
    alone = dataclasses.replace(loop, simulation=dataclasses.replace(simulation, mesh=None))
    unbegun = _unbegun(alone)
    begin = at_home(loop, unbegun)
    blocks = (jnp.int32(0), jnp.int32(1))
    form = lambda: eqx.filter_eval_shape(_advance, loop, begin, *blocks)[1]

    def problem():
        text = lowered(_advance, alone, unbegun, *blocks)
        kernel = eqx.filter((simulation.kernel, simulation.init), eqx.is_array)
        return fingerprint(text, theta=theta, key=key, args=args, kernel=kernel)

    def round_of(number: int) -> Round:
        own = loop_with(round_key(key, number))

        def advance(first, last, progress):
            return _advance(own, progress, jnp.int32(first), jnp.int32(last))

        return Round(loop.num_blocks, begin, form, advance, problem)

    results = course.follow(round_of)
    if len(results) == 1:
        return results[0]
    jacobian = jnp.concatenate([slope for _, slope in results], axis=-1)
    return joined([outcome for outcome, _ in results]), jacobian
