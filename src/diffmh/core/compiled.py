"""The compiled programs of an expectation: values, derivatives, and the rounds of a run that
is reported.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from ..base import trees, validate
from ..runs.checkpoint import fingerprint
from ..runs.devices import on_every_device
from ..runs.rounds import Course, Round, round_key
from .admission import Admission, check_start, refuse_jumps_of_derivatives, start_values
from .autodiff import differentiable, differentiable_both_ways
from .estimator import SecondOrder
from .execute import advance, at_home, loop_of, run
from .loop import Loop, Progress
from .plan import Plan
from .simulation import Observed, Outcome, joined
from .watch import Stretches, Watch


class Compiled:
    """An admitted simulation with its programs, compiled when they are first asked for."""

    def __init__(self, admission: Admission):
        self.admission = admission
        self._programs: dict[bool | str, Callable[..., PyTree]] = {}
        self._plan = eqx.partition(admission.plan, eqx.is_array)
        self._start_was_checked = False

    def check_start(self, theta, key, args) -> None:
        """Refuse what `admission.check_start` refuses. A fixed start that it has passed once is
        asked for one number from then on: the state is the same, only θ and the data may differ.
        """
        simulation = self.admission.plan.simulation
        known = validate.concrete(theta, key, args)
        if known and self._start_was_checked and self._start_is_sound(theta, key, args):
            return
        check_start(simulation, theta, key, args)
        self._start_was_checked = known and not callable(simulation.init)

    def _start_is_sound(self, theta, key, args) -> bool:
        arrays, static = self._partition(args)

        def program(theta, key, arrays):
            plan, args = eqx.combine(arrays, static)
            conditions, _, densities, value = start_values(plan.simulation, theta, key, args)
            holds = [jnp.all(condition.holds) for condition in conditions]
            finite = [jnp.all(jnp.isfinite(densities)), ~jnp.any(jnp.isnan(value))]
            return jnp.all(jnp.stack([*holds, *finite]))

        compiled = self._programs.setdefault("start", jax.jit(program))
        found = compiled(theta, key, arrays)
        # Within an outer `jit` even constants are traced.
        return validate.concrete(found) and bool(found)

    def _partition(self, args) -> tuple[PyTree, PyTree]:
        """The arrays of plan and data, and the rest, which is the same for every call."""
        arrays, static = self._plan
        if not args:
            return (arrays, ()), (static, ())
        data, objects = eqx.partition(args, eqx.is_array)
        return (arrays, data), (static, objects)

    def evaluate(self, theta, key, args, averaged: bool) -> PyTree:
        """The value of f for each chain, with chains as the first axis, or its mean over chains.
        JAX differentiates it with respect to θ.
        """
        admission = self.admission
        arrays, static = self._partition(args)

        def program(theta, key, arrays):
            plan, args = eqx.combine(arrays, static)
            chains = _values(plan, admission.closes_over_tracers, theta, key, args)
            chains = admission.unflatten(chains)
            return jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), chains) if averaged else chains

        # A tracer of an outer transformation must not be kept in a program that outlives it.
        if admission.closes_over_tracers:
            return program(theta, key, arrays)
        compiled = self._programs.setdefault(averaged, jax.jit(program))
        return compiled(theta, key, arrays)


def _values(
    plan: Plan, closes_over_tracers: bool, theta, key, args: tuple[Any, ...]
) -> Float[Array, "F C"]:
    """Each chain's value, as a function that JAX differentiates with respect to θ."""
    estimator = plan.estimator

    def ahead(function, *more):
        # With tracers closed over, every program is traced ahead.
        if not closes_over_tracers:
            return function
        return eqx.filter_closure_convert(function, theta, key, args, *more)

    value = eqx.Partial(_value, plan.by(estimator.for_value()))
    if estimator.both_ways is None:
        # The second derivative is not worth tracing ahead.
        second = None if closes_over_tracers else estimator.second_order()
        jacobian, hessian = eqx.Partial(_value_and_jacobian, plan), None
        if second is not None:
            hessian = eqx.Partial(value_jacobian_and_hessian, plan.by(second))
        return differentiable(ahead(value), ahead(jacobian), hessian, theta, key, args)
    theta = on_every_device(theta, plan.simulation.mesh)
    values = eqx.filter_eval_shape(value, theta, key, args)
    pushed, pulled = (eqx.Partial(_compiled, way, plan) for way in estimator.both_ways)
    return differentiable_both_ways(
        ahead(value), ahead(pushed, theta), ahead(pulled, values), theta, key, args
    )


@eqx.filter_jit
def _compiled(function, plan: Plan, theta, key, args, along) -> PyTree:
    return function(plan, theta, key, args, along)


@eqx.filter_jit
def _value(plan: Plan, theta, key, args) -> Float[Array, "F C"]:
    return run(plan, theta, key, args).observed.value


@eqx.filter_jit
def _value_and_jacobian(plan: Plan, theta, key, args):
    observed = run(plan, theta, key, args).observed
    return observed.value, plan.estimator.derivative(observed.estimator, observed.value)


@eqx.filter_jit
def value_jacobian_and_hessian(plan: Plan, theta, key, args):
    """Each chain's value, derivative and second derivative: shapes `(F, C)`, `(P, F, C)` and
    `(Q, P, F, C)`.
    """
    estimator = plan.estimator
    assert isinstance(estimator, SecondOrder)
    refuse_jumps_of_derivatives(plan.simulation, theta, plan.state, args)
    observed = run(plan, theta, key, args).observed
    value, means = observed.value, observed.estimator
    return value, estimator.derivative(means, value), estimator.second_derivative(means, value)


@eqx.filter_jit
def hessian_product(plan: Plan, theta, key, args, direction):
    """Each chain's value and derivative of its gradient along a flat direction: shapes `(F, C)` and
    `(P, F, C)`.
    """
    estimator = plan.estimator
    assert isinstance(estimator, SecondOrder)
    along = plan.by(estimator.along(direction))
    value, _, second = value_jacobian_and_hessian(along, theta, key, args)
    return value, second[0]


@eqx.filter_jit
def _advance(loop: Loop, progress: Progress, first, last):
    progress, outcome = advance(loop, progress, first, last)
    return progress, _with_derivative(loop.plan, outcome)


def _with_derivative(plan: Plan, outcome: Outcome):
    """The outcome with what its stretches and halves say, and the derivative of the whole."""
    derivative, watch = plan.estimator.derivative, outcome.watch
    assert isinstance(watch, Watch)
    if watch.sums is None:
        # Chains that stop by themselves are not cut into stretches.
        return outcome, derivative(outcome.observed.estimator, outcome.observed.value)

    def stretches(sums: Observed, lengths: tuple[int, ...]) -> Stretches:
        def divide(leaf):
            return leaf / jnp.maximum(1, jnp.array(lengths)).reshape(-1, *(1,) * (leaf.ndim - 1))

        means = jax.tree.map(divide, sums)
        return Stretches(means.value, jax.vmap(derivative)(means.estimator, means.value), lengths)

    window = watch.window
    halves = (window.middle - window.first, plan.simulation.num_steps - window.middle)
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
    return trees.zeros(eqx.filter_eval_shape(loop.start))


def followed(plan: Plan, theta, key, args, course: Course):
    """Outcome and derivative of all rounds of a course.

    Invariant: what a checkpoint stores has the form of a run without the mesh, so that it may be
    continued on any number of devices; only where arrays are placed depends on the mesh.
    """
    loop = loop_of(plan, theta, key, args, diagnose=True)
    alone = loop.plan.alone()
    unbegun = _unbegun(dataclasses.replace(loop, plan=alone))
    begin = at_home(loop, unbegun)
    blocks = (jnp.int32(0), jnp.int32(1))

    def form():
        return eqx.filter_eval_shape(_advance, loop, begin, *blocks)[1]

    def problem():
        def program(theta, key, args, plan, length, start):
            return _advance(loop_of(plan, theta, key, args, diagnose=True), *start)

        parts = {"theta": theta, "key": key, "args": args, "f, kernel, init or estimator": alone}
        parts |= {"length": plan.num_blocks, "start": (unbegun, *blocks)}
        return fingerprint(program, parts)

    def round_of(number: int) -> Round:
        # A round is the run with its own key, pilot chains included.
        own = loop_of(plan, theta, round_key(key, number), args, diagnose=True)

        def advance(first, last, progress):
            return _advance(own, progress, jnp.int32(first), jnp.int32(last))

        return Round(plan.num_blocks, begin, form, advance, problem)

    results = course.follow(round_of)
    if len(results) == 1:
        return results[0]
    jacobian = jnp.concatenate([slope for _, slope in results], axis=-1)
    return joined([outcome for outcome, _ in results]), jacobian
