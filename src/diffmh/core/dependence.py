"""The ways in which θ reaches the state after a step, read off the step's trace.

The derivative of a chain is carried by its decisions, whose `Value`s have one, and by the tangents
of states where moves depend on θ. Along any other path it would silently be lost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from ..analysis import Jump, moving_jumps
from ..base.validate import NotDifferentiable
from ..fast.rounding import Barriers
from ..jaxprs import compat
from ..jaxprs.once import with_lines
from ..jaxprs.program import Atom, Program, Variable
from .kernel import Kernel, State, Update
from .parameters import Parameters
from .update_checks import checked_noise, checked_step
from .values import Value


class _Traced(eqx.Module):
    """A step's results: the leaves of the state after it that θ must not reach but through a
    decision, and for each decision its outcome and its `Value`s.
    """

    after: PyTree
    outcomes: list[PyTree]
    values: list[list[Any]]


def refuse_lost_derivatives(
    kernel: Kernel, theta: PyTree, x: PyTree, args: tuple[Any, ...], jumps: tuple[Jump, ...] = ()
) -> None:
    """Refuses updates in which θ reaches the outcome of a decision other than through its `Value`,
    or a state without a tangent other than through the outcomes; and those whose decisions may jump
    elsewhere than their densities, whose `jumps` are reported. `theta` and `x` may be forms.
    """
    known = {jump.where for jump in jumps}
    for update in kernel.updates():
        if not update.theta_enters_by_evaluate:
            _refuse(update, kernel, theta, x, args, known)


def _refuse(update: Update, kernel: Kernel, theta, x, args, known: set[str]) -> None:
    name, update = update.name_in_messages, update.prepared(theta, x, args)

    def step(theta, x, noise):
        parameters = Parameters(theta, args, Barriers(jnp.zeros(2, bool)), True)
        # A state of a chain, with a tangent where the update asks for one.
        tangent = parameters.zero_tangent(x) if update.moves_with_theta else None
        before = State(x, kernel.start(parameters, x).cache, tangent)
        made = checked_step(update, update.step(parameters, before, noise), before)
        values = [_values(decision) for decision in made.decisions]
        for value in jax.tree.leaves(values, is_leaf=_is_value):
            if value.tangent is None:
                raise NotDifferentiable(
                    f"a decision of `{name}` has a `Value` without a derivative: make it by"
                    " `parameters.evaluate(function, *operands)`, which is `function(theta,"
                    " *operands, *args)` with its derivative."
                )
        # Where a state has a tangent, that is what carries the derivative.
        after = made.after.x
        if made.after.tangent is not None:
            after = [leaf for leaf in jax.tree.leaves(after) if not eqx.is_inexact_array(leaf)]
        # The cut of the proof: θ → `Value`s → outcomes → state. A path from θ to an outcome around
        # its `Value`s, or to the state around the outcomes, has a derivative that nobody carries.
        outcomes = [decision.outcome for decision in made.decisions]
        return _Traced(after, outcomes, [[value.primal for value in each] for each in values])

    draw = lambda key: checked_noise(update.noise(key, x, 1), 1, f"{name}.noise")
    noise = jax.eval_shape(draw, jax.eval_shape(jax.random.key, 0))
    # Noise has a leading axis of steps, of which this is one.
    noise = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), noise)
    with with_lines():
        program, form = compat.program(step, theta, x, noise, differentiated=False)
    found: _Traced = jax.tree.unflatten(jax.tree.structure(form), program.outputs)
    _refuse_jumps(name, step, theta, (x, noise), known)
    sources = program.inputs[: len(jax.tree.leaves(theta))]
    for number, (outcome, values) in enumerate(zip(found.outcomes, found.values, strict=True)):
        where = _reached(program, sources, values, outcome)
        if values and where is not None:
            raise NotDifferentiable(
                f"the outcome of decision {number} of `{name}` depends on theta other than through"
                f" the decision's `Value`{where}, so a part of the derivative would be missing. Let"
                " theta enter only by `parameters.evaluate(function, *operands)`, and draw the"
                " outcome with noise that does not depend on it (`Acceptance.draw(uniform,"
                " log_ratio)`)."
            )
    where = _reached(program, sources, found.outcomes, found.after)
    if where is not None:
        raise NotDifferentiable(
            f"the state after a step of `{name}` depends on theta other than through the outcomes"
            f" of its decisions{where}, so a part of the derivative would be missing. Draw whatever"
            " depends on theta by a decision (`Acceptance`, `Bernoulli`, `Categorical`) that the"
            " step returns, and let the state depend on its `outcome`. If floats of the state move"
            " smoothly with theta, set `moves_with_theta = True` and return their tangents."
            " `Covariance()` needs neither."
        )


def _refuse_jumps(
    name: str, step: Callable[..., _Traced], theta: PyTree, x: PyTree, known: set[str]
) -> None:
    """Refuses decisions whose probabilities may jump in the noise, or in a state of floats, at a
    place that depends on θ and is not `known`; earlier outcomes are given.
    """

    def decided(theta, x):
        made = step(theta, *x)
        return made.values, made.outcomes

    for jump in moving_jumps(decided, theta, x, fixes=True):
        if jump.where not in known:
            jumps = "jumps" if jump.certain else "may jump"
            raise NotDifferentiable(
                f"the probability of a decision of `{name}` {jumps} at a place that depends on"
                f" theta (`{jump.primitive}` at {jump.where}), so a part of the derivative would be"
                " missing. Make the comparison of noise with a value that depends on theta a"
                " decision, or integrate the noise out. If it is continuous, vouch for the function"
                " that computes it: `diffmh.continuous(function)`."
            )


def _is_value(node: Any) -> bool:
    return isinstance(node, Value)


def _values(decision: Any) -> list[Value]:
    return [part for part in jax.tree.leaves(decision, is_leaf=_is_value) if _is_value(part)]


def _reached(program: Program, sources: tuple[Variable, ...], cut: Any, results: Any) -> str | None:
    """A place where any of the results is computed from the sources by a path that avoids the atoms
    `cut`; `None` if there is no such path. Loops and conditionals are taken whole, so that it errs
    on the side of finding one.
    """
    # By identity of the program's variables: equal numbers that are computed twice are two paths.
    avoided = {id(atom) for atom in jax.tree.leaves(cut, is_leaf=_is_atom)}
    # The line of the equation that computes each variable.
    reached: dict[int, str] = {id(source): "" for source in sources}
    for equation in program.equations:
        if any(id(atom) in reached for atom in equation.inputs):
            fresh = (variable for variable in equation.outputs if id(variable) not in avoided)
            reached.update((id(variable), equation.where) for variable in fresh)
    for atom in jax.tree.leaves(results, is_leaf=_is_atom):
        if id(atom) in reached and id(atom) not in avoided:
            where = reached[id(atom)]
            return f" (at {where})" if where else ""
    return None


def _is_atom(node: Any) -> bool:
    return isinstance(node, Atom)
