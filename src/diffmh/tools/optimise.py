"""optimise: gradient descent or ascent on a random objective, with any optax optimiser."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Key, PyTree

from .._expectation import Differentiable
from ..base import trees, validate
from ..base.validate import Checked
from ..reports import display
from ..runs.checkpoint import Checkpoint, Store, checkpoint_of, fingerprint
from ..runs.journal import Journal, Part
from ..runs.progress import tqdm
from . import newton as newton_steps
from .evidence import Evidence
from .reuse import Draws, KeptDraws, with_draws


class Ascent(eqx.Module):
    """The iterates of an optimisation; every array has the n iterations as its leading axis.

    - `theta`: the parameters at which each iteration took its gradient, a pytree like theta.
    - `value`, `gradient`: the objective's, and `value_error`, `gradient_error`: their standard
      errors over the chains (NaN for an objective that has no chains).
    - `sampled`: True where the iteration ran the chains, False where it reused their draws.
    - `last`: the parameters after the last step. `average`: the mean of the iterates of the tail
      (Polyak and Ruppert).
    """

    theta: PyTree
    value: Float[Array, "n"]
    value_error: Float[Array, "n"]
    gradient: PyTree
    gradient_error: PyTree
    last: PyTree
    average: PyTree
    sampled: Bool[Array, "n"] | None = None

    def __repr__(self) -> str:
        ends = [
            display.number_with_error(float(self.value[i]), float(self.value_error[i]))
            if np.isfinite(self.value_error[i])
            else f"{float(self.value[i]):.5g}"
            for i in (0, -1)
        ]
        first = jax.tree.map(lambda leaf: leaf[0], self.theta)
        parts = {
            "num_iterations": f"{len(self.value):,}",
            "value": f"{ends[0]} → {ends[1]}",
            "theta": f"{display.numbers(first)} → {display.numbers(self.last)}",
            "average": display.numbers(self.average),
        }
        return display.named("Ascent", parts)


class _Evaluation(eqx.Module):
    """The record of each iterate of an `Ascent`."""

    value: Array
    value_error: Array
    gradient: PyTree
    gradient_error: PyTree
    sampled: Array


def optimise(
    objective: Checked[Callable[..., Array]],
    theta: PyTree,
    key: Checked[Key[Array, ""]],
    *args: Any,
    optimizer: Any = None,
    num_iterations: Checked[int],
    newton: Checked[bool | str] = False,
    reuse: Checked[float] | None = None,
    maximise: Checked[bool] = False,
    average_from: Checked[float] = 0.5,
    progress: Checked[bool | Callable[[range], Iterable[int]]] | None = None,
    checkpoint: Checked[Checkpoint | str | os.PathLike] | None = None,
    name: Checked[str] = "optimise",
) -> Ascent:
    """Steps of an optax optimiser along the gradient of `objective(theta, key, *args)`, with a new
    key for each.

    **Arguments**

    - `objective`: what `diffmh.expectation` or `diffmh.compose` returns, with a scalar value; what
      `diffmh.evidence` returns, whose value is not known and NaN in the result; or any function of
      `(theta, key, *args)` that JAX differentiates.
    - `optimizer`: an `optax.GradientTransformation`. One with a line search (`optax.lbfgs()`) asks
      for values of the objective at other parameters: they are computed with the iteration's key.
      The value of a chain with a fixed key jumps, so a line search suits objectives that are not
      random; for others prefer `optax.adam` or `optax.lbfgs(linesearch=None)`.
    - `newton`: for objectives of `diffmh.evidence`. True takes Newton's steps, by the observed
      information `−∂² log Z` (of `observed − log Z` likewise); `"natural"` takes natural gradients,
      by the Fisher information `Cov(s)`, of energy models alone. The optimiser then scales Newton's
      step instead of the gradient; left out, the step is taken as it is.
    - `reuse`: use the draws of the chains, reweighted, in the next steps too, while their effective
      size stays above this share of them; below it the chains run again. For expectations by
      `Covariance()` and for `evidence`, because value and derivative are those of the equilibrium.
      The draws are kept in memory.
    - `maximise`: climb rather than descend.
    - `average_from`: the share of the iterations that the average leaves out. The gradients are
      random, so single iterates scatter about the optimum; their average scatters far less.
    - `progress`: a bar on stderr, by default where stderr is a terminal; or a function that wraps
      the iterations and shows a bar, such as `tqdm.notebook.tqdm`.
    - `checkpoint`: a directory, or a `diffmh.Checkpoint`. If the process is killed, the same line
      goes on from there, optimiser's state and all, and returns the same digits; with a larger
      `num_iterations` it goes on beyond them.

    The step of iteration i is reproducible: its key is `jax.random.fold_in(key, i)`.

    Raises `FloatingPointError` where the objective or its gradient is not finite, or where the
    information of a Newton step is not positive definite, naming the iteration and where it was.

    >>> import jax, optax, diffmh
    >>> from diffmh.models import mixture
    >>> length = dict(num_samples=500, burn_in=20, num_chains=8)
    >>> p = diffmh.expectation(mixture.indicator, mixture.sampler(), init=0, **length)
    >>> entropy = diffmh.compose(lambda h, p: mixture.entropy(p), p)
    >>> adam = dict(optimizer=optax.adam(0.1), num_iterations=30)
    >>> path = diffmh.optimise(entropy, 2.0, jax.random.key(0), **adam, maximise=True)
    >>> path.value.shape, abs(float(path.average) - 1.0) < 0.5
    ((30,), True)
    """
    validate.function(
        objective, "optimise(objective, ...)", "objective", "objective(theta, key, *args)"
    )
    num_iterations = validate.count(num_iterations, "optimise(num_iterations=...)")
    average_from = validate.number(
        average_from, "optimise(average_from=...)", above=0, below=1, least=True
    )
    maximise = validate.flag(maximise, "optimise(maximise=...)")
    validate.text(name, "optimise(name=...)")
    if progress is not None and not callable(progress):
        progress = validate.flag(progress, "optimise(progress=...)")
    newton = newton_steps.newton_of(newton, objective)
    optimizer = newton_steps.FullStep() if newton and optimizer is None else optimizer
    _refuse_unless_optimizer(optimizer)
    if isinstance(objective, Evidence):
        newton_steps.refuse_unless_of_chains(objective)
    if reuse is not None:
        reuse = validate.number(reuse, "optimise(reuse=...)", above=0, below=1)
    theta, key = trees.strong(validate.theta(theta)), validate.typed_key(key)
    place = checkpoint_of(checkpoint)
    if place is not None and jax.process_count() > 1:
        raise ValueError(
            "`optimise(checkpoint=...)` is for one host, because several would continue from"
            " different iterates. Keep `theta` yourself, or give the checkpoint to `.run`."
        )
    run = _Run(objective, _Way(optimizer, maximise, newton), reuse, key, args)
    begin = (theta, optimizer.init(theta), KeptDraws(theta, jnp.int32(-1)))
    draws = None if reuse is None else Draws(objective, reuse)
    with contextlib.ExitStack() as stack:
        journal = Journal(None if place is None else stack.enter_context(Store(place)))
        part = journal.part(begin, lambda: run.form(begin), lambda: run.fingerprint(begin))
        for i in _bar(num_iterations, progress, name):
            if i < len(part.results):  # It is known from the checkpoint.
                continue
            journal.refuse_unless_writable()
            run.take_step(part, draws)
            if journal.due:
                journal.save()
        journal.finish()
    return _ascent(part, num_iterations, average_from)


def _ascent(part: Part, num_iterations: int, average_from: float) -> Ascent:
    # The checkpoint may know of more iterations than are asked for.
    last = [*(at for at, _ in part.results), part.state[0]][num_iterations]
    iterates = part.results[:num_iterations]
    thetas, evaluations = jax.tree.map(lambda *leaves: jnp.stack(leaves), *iterates)
    tail = int(average_from * num_iterations)
    average = jax.tree.map(lambda leaf: jnp.mean(leaf[tail:], axis=0), thetas)
    return Ascent(thetas, **vars(evaluations), last=last, average=average)


class _Way(eqx.Module):
    """The rule of a step: its optimiser, its direction (up or down) and its information."""

    optimizer: Any
    maximise: bool = eqx.field(static=True)
    newton: bool | str = eqx.field(static=True)


class _Run(eqx.Module):
    """The steps of an optimisation. Their state is the iterate, the optimiser's memory and where
    reused draws come from.
    """

    objective: Any
    way: _Way
    share: float | None
    key: Key[Array, ""]
    args: tuple[Any, ...]

    def form(self, begin: PyTree) -> tuple[PyTree, _Evaluation]:
        """The form of an iterate and its evaluation, in which a checkpoint is read."""
        found = eqx.filter_eval_shape(_step, self.objective, self.way, begin, self.key, self.args)
        return begin[0], found[0]

    def fingerprint(self, begin: PyTree) -> dict[str, str]:
        """The digests of everything that determines the iterates."""

        def program(theta, key, args, objective, optimizing, maximise, reuse):
            (optimizer, newton), state = optimizing
            way = _Way(optimizer, maximise, newton)
            return _step(objective, way, (theta, *state), key, args)

        theta, *state = begin
        parts = {"theta": theta, "key": self.key, "args": self.args, "objective": self.objective}
        optimizing = ((self.way.optimizer, self.way.newton), tuple(state))
        parts |= {"optimizer": optimizing, "maximise": self.way.maximise, "reuse": self.share}
        return fingerprint(program, parts)

    def take_step(self, part: Part, draws: Draws | None) -> None:
        """Add an iterate to the results, and go to the next."""
        objective, way, key, args = self.objective, self.way, self.key, self.args
        i, (theta, memory, kept) = len(part.results), part.state
        # The key depends on the number of the iteration alone, so a run that goes on from a
        # checkpoint takes the steps of one that was never interrupted.
        own = jax.random.fold_in(key, i)
        if draws is None:
            found, state = _step(objective, way, part.state, own, args)
        else:
            kept, made, sampled = draws.at(kept, theta, key, i, args)
            found, state = _step_on_draws(objective, way, (theta, memory, kept), made, own, args)
            found = dataclasses.replace(found, sampled=jnp.asarray(sampled))
        # The value of an evidence is not known, and NaN.
        known = (found.value, found.gradient)
        known = (found.gradient,) if isinstance(objective, Evidence) else known
        if not all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(known)):
            raise FloatingPointError(
                f"`optimise`: at iteration {i}, theta = {theta}, the objective is"
                f" {found.value} with gradient {found.gradient}: no step can be taken."
            )
        newton_steps.refuse_no_step(way.newton, i, theta, state[0])
        part.results.append((theta, found))
        part.state, part.done = state, i + 1


@eqx.filter_jit
def _step_on_draws(objective, way: _Way, state, draws, key, args):
    """The step with draws, which are arguments, in place of the chains."""
    return _step(with_draws(objective, state[2].at, draws), way, state, key, args)


@eqx.filter_jit
def _step(objective, way: _Way, state, key, args):
    """The evaluation at the iterate, and the next one's parameters and optimiser's state."""
    theta, memory, kept = state
    sign = -1.0 if way.maximise else 1.0

    def height(theta):
        return sign * objective(theta, key, *args)

    def moved(leaf, update):
        return (leaf + update).astype(leaf.dtype)

    if isinstance(objective, Evidence):
        at = newton_steps.EvidenceAt.of(objective, theta, key, args, sign, way.newton)
        nothing = jnp.full((), jnp.nan)
        found = _Evaluation(nothing, nothing, at.gradient, at.gradient_error, jnp.asarray(True))
        downhill, height = at.downhill, newton_steps.no_values
    else:
        evaluate = _by_chain if isinstance(objective, Differentiable) else _plain
        found = evaluate(objective, theta, key, args)
        downhill = jax.tree.map(lambda leaf: sign * leaf, found.gradient)
    # optax descends: what it is given is the gradient of sign · objective.
    updates, memory = _update(way.optimizer, downhill, memory, theta, sign * found.value, height)
    return found, (jax.tree.map(moved, theta, updates), memory, kept)


def _update(optimizer, gradient, state, theta, value, height):
    """The optimiser's step; one that takes more than the gradient gets the value and the objective
    too.
    """
    extra = {"value": value, "grad": gradient, "value_fn": height}
    accepts = inspect.signature(optimizer.update).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepts.values()):
        extra = {name: extra[name] for name in extra if name in accepts}
    return optimizer.update(gradient, state, theta, **extra)


def _refuse_unless_optimizer(optimizer: Any) -> None:
    if callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None)):
        return
    advice = ""
    if callable(optimizer):
        advice = (
            f": call it, as in `optimizer=optax.{getattr(optimizer, '__name__', 'adam')}(0.01)`"
        )
    raise TypeError(
        "`optimise(optimizer=...)` must be an `optax.GradientTransformation`, such as"
        f" `optax.adam(0.01)`, got {optimizer!r}{advice}."
    )


def _by_chain(objective: Differentiable, theta, key, args) -> _Evaluation:
    """Value and gradient with errors from the spread over chains, both from one run."""

    def per_chain(theta):
        return objective.per_chain(theta, key, *args)

    def mean(leaf):
        return jnp.mean(leaf, axis=0)

    def error(leaf):
        return jnp.std(leaf, axis=0, ddof=1) / num_chains**0.5

    values, pull = eqx.filter_vjp(per_chain, theta)
    _refuse_unless_scalar(jax.tree.map(lambda leaf: leaf[0], values))
    num_chains = values.shape[0]
    # The cotangent e_c pulls back to the gradient of chain c alone: one run gives all of them.
    (gradients,) = jax.vmap(pull)(jnp.eye(num_chains, dtype=values.dtype))
    return _Evaluation(
        mean(values),
        error(values),
        jax.tree.map(mean, gradients),
        jax.tree.map(error, gradients),
        jnp.asarray(True),
    )


def _plain(objective, theta, key, args) -> _Evaluation:
    """Value and gradient of any function, whose errors are not known."""
    _refuse_unless_scalar(jax.eval_shape(objective, theta, key, *args))
    found = jax.value_and_grad(objective)(theta, key, *args)
    unknown = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), found)
    return _Evaluation(found[0], unknown[0], found[1], unknown[1], jnp.asarray(True))


def _refuse_unless_scalar(value):
    for leaf in jax.tree.leaves(value):
        if hasattr(leaf, "dtype"):
            validate.real_dtype(leaf.dtype, "what `objective` of `optimise` returns")
    if getattr(value, "shape", None) != ():
        form = jax.tree.map(lambda leaf: getattr(leaf, "shape", leaf), value)
        raise ValueError(
            "`optimise(objective, ...)` needs an objective with one number as its value, got shape"
            f" {form}: make one of them, as in `diffmh.compose(lambda theta, m: jnp.sum(m),"
            " objective)`."
        )


def _bar(num_iterations: int, progress: bool | Callable[[range], Iterable[int]] | None, name: str):
    """The iterations, with a progress bar on stderr where somebody looks at it."""
    bar = sys.stderr.isatty() if progress is None else progress
    if not isinstance(bar, bool):
        return bar(range(num_iterations))
    if not bar:
        return range(num_iterations)
    return tqdm()(range(num_iterations), desc=name, file=sys.stderr)
