"""optimise: gradient descent or ascent on a random objective, with any optax optimiser."""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key, PyTree

from . import _display, _trees, _validate
from ._validate import Checked
from .checkpoint import Checkpoint, Store, checkpoint_of, fingerprint, restored
from .expectation import Differentiable


class Ascent(eqx.Module):
    """The iterates of an optimisation; every array has the n iterations as its leading axis.

    - `theta`: the parameters at which each iteration took its gradient, a pytree like theta.
    - `value`, `gradient`: the objective's, and `value_error`, `gradient_error`: their standard
      errors over the chains (NaN for an objective that has no chains).
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

    def __repr__(self) -> str:
        ends = [
            _display.number_with_error(float(self.value[i]), float(self.value_error[i]))
            if np.isfinite(self.value_error[i])
            else f"{float(self.value[i]):.5g}"
            for i in (0, -1)
        ]
        first = jax.tree.map(lambda leaf: leaf[0], self.theta)
        parts = {
            "num_iterations": f"{len(self.value):,}",
            "value": f"{ends[0]} → {ends[1]}",
            "theta": f"{_display.numbers(first)} → {_display.numbers(self.last)}",
            "average": _display.numbers(self.average),
        }
        return _display.named("Ascent", parts)


class _Evaluation(eqx.Module):
    value: Array
    value_error: Array
    gradient: PyTree
    gradient_error: PyTree


def optimise(
    objective: Checked[Callable[..., Array]],
    theta: PyTree,
    key: Checked[Key[Array, ""]],
    *args: Any,
    optimizer: Any,
    num_iterations: Checked[int],
    maximise: Checked[bool] = False,
    average_from: Checked[float] = 0.5,
    progress: Checked[bool | Callable[[range], Iterable[int]]] | None = None,
    checkpoint: Checked[Checkpoint | str | os.PathLike] | None = None,
    name: Checked[str] = "optimise",
) -> Ascent:
    """Steps of an optax optimiser along the gradient of `objective(theta, key, *args)`, with a new
    key for each.

    **Arguments**

    - `objective`: what `diffmh.expectation` or `diffmh.compose` returns, with a scalar value; or
      any function of `(theta, key, *args)` that JAX differentiates.
    - `optimizer`: an `optax.GradientTransformation`. One with a line search (`optax.lbfgs()`) asks
      for values of the objective at other parameters: they are computed with the iteration's key.
      The value of a chain with a fixed key jumps, so a line search suits objectives that are not
      random; for others prefer `optax.adam` or `optax.lbfgs(linesearch=None)`.
    - `maximise`: climb rather than descend.
    - `average_from`: the share of the iterations that the average leaves out. The gradients are
      random, so single iterates scatter about the optimum; their average scatters far less.
    - `progress`: a bar on stderr, by default where stderr is a terminal; or what goes over the
      iterations and shows how far they are, such as `tqdm.notebook.tqdm`.
    - `checkpoint`: a directory, or a `diffmh.Checkpoint`. If the process is killed, the same line
      goes on from there, optimiser's state and all, and returns the same digits; with a larger
      `num_iterations` it goes on beyond them.

    The step of iteration i is reproducible: its key is `jax.random.fold_in(key, i)`.

    Raises `FloatingPointError` where the objective or its gradient is not finite, naming the
    iteration and where it was.

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
    _validate.function(
        objective, "optimise(objective, ...)", "objective", "objective(theta, key, *args)"
    )
    num_iterations = _validate.count(num_iterations, "optimise(num_iterations=...)")
    average_from = _validate.number(
        average_from, "optimise(average_from=...)", above=0, below=1, least=True
    )
    maximise = _validate.flag(maximise, "optimise(maximise=...)")
    _validate.text(name, "optimise(name=...)")
    if progress is not None and not callable(progress):
        progress = _validate.flag(progress, "optimise(progress=...)")
    _refuse_unless_optimizer(optimizer)
    theta, key = _trees.strong(_validate.theta(theta)), _validate.typed_key(key)
    place = checkpoint_of(checkpoint)
    if place is not None and jax.process_count() > 1:
        raise ValueError(
            "`optimise(checkpoint=...)` is for one host: several would go on from iterates of their"
            " own. Keep `theta` yourself, or give the checkpoint to `.run`."
        )
    step = eqx.Partial(_step, objective, optimizer, maximise)
    with contextlib.ExitStack() as stack:
        store = None if place is None else stack.enter_context(Store(place))
        path = _Path(step, theta, optimizer.init(theta), key, args, store)
        for i in _bar(num_iterations, progress, name):
            path.reach(i + 1)
        path.keep()
    last = path.theta_after(num_iterations)
    iterates = path.iterates[:num_iterations]
    thetas, evaluations = jax.tree.map(lambda *leaves: jnp.stack(leaves), *iterates)
    tail = int(average_from * num_iterations)
    average = jax.tree.map(lambda leaf: jnp.mean(leaf[tail:], axis=0), thetas)
    return Ascent(
        thetas,
        evaluations.value,
        evaluations.value_error,
        evaluations.gradient,
        evaluations.gradient_error,
        last=last,
        average=average,
    )


class _Path:
    """The iterates so far, and where the next one begins."""

    def __init__(self, step: eqx.Partial, theta, state, key, args, store: Store | None):
        self.step, self.key, self.args, self.store = step, key, args, store
        self.theta, self.state = theta, state
        self.iterates: list[tuple[PyTree, _Evaluation]] = []
        self.num_kept = 0
        self.problem: dict[str, str] = {}
        if store is not None:
            self._load(store)

    def reach(self, count: int) -> None:
        """Takes a step, if there are fewer."""
        i = len(self.iterates)
        if i >= count:
            return
        if self.store is not None:
            self.store.refuse_unless_writable()
        key = jax.random.fold_in(self.key, i)
        found, theta, self.state = self.step(self.theta, self.state, key, self.args)
        if not all(
            np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves((found.value, found.gradient))
        ):
            raise FloatingPointError(
                f"`optimise`: at iteration {i}, theta = {self.theta}, the objective is"
                f" {found.value} with gradient {found.gradient}: there is no direction to go."
            )
        self.iterates.append((self.theta, found))
        self.theta = theta
        if self.store is not None and self.store.due:
            self.keep()

    def theta_after(self, count: int) -> PyTree:
        return self.theta if count == len(self.iterates) else self.iterates[count][0]

    def keep(self) -> None:
        """As a checkpoint, if there are any and some iterates are new."""
        if self.store is None or self.num_kept == len(self.iterates):
            return
        iterates = zip(*(jax.tree.leaves(iterate) for iterate in self.iterates), strict=True)
        now = jax.tree.leaves(eqx.filter((self.theta, self.state), eqx.is_array))
        groups = {"iterates": [np.stack(leaves) for leaves in iterates], "now": now}
        self.store.save(self.problem, groups)
        self.num_kept = len(self.iterates)

    def _load(self, store: Store) -> None:
        found = store.load()
        objective, optimizer, maximise = self.step.args

        def program(theta, key, args, objective, optimizing, maximise):
            optimizer, state = optimizing
            return _step(objective, optimizer, maximise, theta, state, key, args)

        parts = {"theta": self.theta, "key": self.key, "args": self.args, "objective": objective}
        parts |= {"optimizer": (optimizer, self.state), "maximise": maximise}
        self.problem = fingerprint(program, parts)
        if found is None:
            return
        store.refuse_another(self.problem, found[0])
        arrays, rest = eqx.partition((self.theta, self.state), eqx.is_array)
        form = eqx.filter_eval_shape(self.step, self.theta, self.state, self.key, self.args)[0]
        like = (self.theta, form)
        rows = zip(*found[1]["iterates"], strict=True)
        self.iterates = [restored(row, like) for row in rows]
        self.num_kept = len(self.iterates)
        self.theta, self.state = eqx.combine(restored(found[1]["now"], arrays), rest)


@eqx.filter_jit
def _step(objective, optimizer, maximise: bool, theta, state, key, args):
    evaluate = _by_chain if isinstance(objective, Differentiable) else _plain
    found = evaluate(objective, theta, key, args)
    sign = -1.0 if maximise else 1.0
    downhill = jax.tree.map(lambda leaf: sign * leaf, found.gradient)

    def height(theta):
        return sign * objective(theta, key, *args)

    updates, state = _update(optimizer, downhill, state, theta, sign * found.value, height)
    return (
        found,
        jax.tree.map(lambda leaf, update: (leaf + update).astype(leaf.dtype), theta, updates),
        state,
    )


def _update(optimizer, gradient, state, theta, value, height):
    """The optimiser's step; one that takes more than the gradient gets the value and the objective
    too.
    """
    accepts = inspect.signature(optimizer.update).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepts):
        named = {"value": value, "grad": gradient, "value_fn": height}
        extra = {p.name: named[p.name] for p in accepts if p.name in named}
        return optimizer.update(gradient, state, theta, **extra)
    return optimizer.update(gradient, state, theta, value=value, grad=gradient, value_fn=height)


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
    values, pull = eqx.filter_vjp(lambda theta: objective.per_chain(theta, key, *args), theta)
    _refuse_unless_scalar(jax.tree.map(lambda leaf: leaf[0], values))
    num_chains = values.shape[0]
    gradients = jax.vmap(lambda chain: pull(chain)[0])(jnp.eye(num_chains, dtype=values.dtype))
    mean = lambda leaf: jnp.mean(leaf, axis=0)
    error = lambda leaf: jnp.std(leaf, axis=0, ddof=1) / num_chains**0.5
    return _Evaluation(
        mean(values), error(values), jax.tree.map(mean, gradients), jax.tree.map(error, gradients)
    )


def _plain(objective, theta, key, args) -> _Evaluation:
    """Value and gradient of any function; nobody knows their errors."""
    _refuse_unless_scalar(jax.eval_shape(objective, theta, key, *args))
    value, gradient = jax.value_and_grad(objective)(theta, key, *args)
    unknown = lambda leaf: jnp.full_like(leaf, jnp.nan)
    return _Evaluation(value, unknown(value), gradient, jax.tree.map(unknown, gradient))


def _refuse_unless_scalar(value):
    for leaf in jax.tree.leaves(value):
        if hasattr(leaf, "dtype"):
            _validate.real_dtype(leaf.dtype, "what `objective` of `optimise` returns")
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
    from tqdm import tqdm

    return tqdm(range(num_iterations), desc=name, file=sys.stderr)
