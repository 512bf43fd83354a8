"""expectation: the expectation of a program's result as a function that JAX differentiates
without bias.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any, NoReturn

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Key, PyTree

from .._expectation import Differentiable
from ..base import trees, validate
from ..base.validate import Checked, NotDifferentiable
from ..core.autodiff import differentiable, differentiable_by
from ..fast.chains import mapped_over_chains
from ..jaxprs import compat
from ..reports.report import Report, RunChains
from ..reports.until import Until
from ..runs.devices import check_mesh
from ..runs.rounds import Course, Round, round_key
from . import derivative
from .choose_estimator import find
from .estimators import Alternatives, Combined, Estimator, Found, Runs, disagreement, notes
from .plan import Plan, Run


class Expectation(Differentiable):
    """`E[program(theta, key, *args)]`; made by `sad.expectation`."""

    def __init__(
        self,
        program: Callable[..., PyTree],
        estimator: Estimator | None,
        alternatives: int,
        num_replicates: int,
        mesh: Mesh | None = None,
    ):
        self.program = program
        self.estimator = Alternatives(alternatives) if estimator is None else estimator
        self.of_many = Combined(alternatives) if estimator is None else estimator
        self.num_chains = num_replicates
        # Whether many replicates may be put together, for a report of them alone.
        self.grouped = False
        self._mesh = mesh

    def __repr__(self) -> str:
        name = getattr(self.program, "__name__", repr(self.program))
        return f"Expectation({name}, estimator={self.of_many}, num_replicates={self.num_chains})"

    def __call__(self, theta, key=None, *args, **options):
        """One run of the program, whose derivative is unbiased."""
        run = self._admit(theta, key, args, options)
        plan = run.plan
        if plan.goes_backward or not isinstance(self.estimator, Alternatives):
            return plan.unflatten(self._by_surrogate(run, plan, self.estimator, 1)[:, 0])
        count = self.estimator.num_alternatives

        def value(theta, key, given):
            return Run(run.program, theta, key, *given).value()

        def jacobian(theta, key, given):
            return derivative.forward(Run(run.program, theta, key, *given), count)

        given = (run.args, run.options)
        if plan.closes_over_tracers:
            value = eqx.filter_closure_convert(value, run.theta, run.key, given)
            jacobian = eqx.filter_closure_convert(jacobian, run.theta, run.key, given)
        # Under `jax.vmap` a run is mapped as chains are: last axis, by `over_chains`.
        value, jacobian = (
            eqx.Partial(mapped_over_chains, function) for function in (value, jacobian)
        )
        return plan.unflatten(differentiable(value, jacobian, run.theta, run.key, given))

    def per_chain(self, theta, key=None, *args):
        """The value of each replicate along a leading axis, differentiable."""
        run = self._admit(theta, key, args, {})
        plan = run.plan
        flat = self._by_surrogate(run, plan, self.of_many, self.num_chains)
        return jax.vmap(plan.unflatten, in_axes=-1)(flat)

    @property
    def mesh(self) -> Mesh | None:
        return self._mesh

    @property
    def num_steps(self) -> int:
        """A run of the program counts as one."""
        return self.num_chains

    def run_chains(self, theta, key=None, *args, course=None):
        run = self._admit(theta, key, args, {})
        if not validate.concrete(run):
            raise TypeError(
                "`sad.run` makes a report for people and cannot be traced: use `sad.expectation`"
                " instead."
            )
        plan = run.plan

        def advance(number: int, *_):
            keys = jax.random.split(round_key(run.key, number), self.num_chains)
            runs = Runs(run, keys, plan.goes_backward, mesh=self.mesh)
            return None, find(self.of_many, runs, self.grouped)

        def round_of(number: int) -> Round:
            once = functools.partial(advance, number)
            return Round(1, None, _no_checkpoint, once, _no_checkpoint)

        results = (course or Course()).follow(round_of)
        found = results[0] if len(results) == 1 else _pooled(results)
        return RunChains(
            jax.vmap(plan.unflatten, in_axes=-1),
            run.theta,
            found.value,
            found.jacobian,
            (),
            notes=(*notes(self.of_many, found), _counted(found)),
            warnings=(*_not_finite(found), *disagreement(found)),
        )

    def _reported(self, theta, key, args, course: Course, until: Until | None) -> Report:
        # Groups need no derivative of single replicates, which a composition would ask for.
        alone = copy.copy(self)
        alone.grouped = True
        return super(Expectation, alone)._reported(theta, key, args, course, until)

    def _by_surrogate(self, run: Run, plan: Plan, estimator: Estimator, count: int):
        """The values of replicates, replicates last; a single one has the key itself."""
        reverse = plan.goes_backward

        def runs(theta, key, given):
            keys = jax.random.split(key, count) if count > 1 else key[None]
            mesh = self.mesh if count > 1 else None
            return Runs(Run(run.program, theta, key, *given), keys, reverse, mesh=mesh)

        def value(theta, key, given):
            return runs(theta, key, given).each(Run.value)

        def surrogate(theta, key, given):
            if compat.inside_shard_map():
                raise NotDifferentiable(
                    f"`sad.{type(estimator).__name__}` inside of `jax.shard_map` cannot be"
                    " differentiated: what the devices contribute would not be added up. Share the"
                    " replicates out by `sad.expectation(..., mesh=...)`."
                )
            return estimator.surrogate(runs(theta, key, given))

        given = (run.args, run.options)
        if plan.closes_over_tracers:
            value = eqx.filter_closure_convert(value, run.theta, run.key, given)
            surrogate = eqx.filter_closure_convert(surrogate, run.theta, run.key, given)
        return differentiable_by(value, surrogate, run.theta, run.key, given)

    def _admit(self, theta, key, args, options) -> Run:
        theta, key = trees.strong(validate.theta(theta)), validate.typed_key(key)
        array = lambda leaf: jnp.asarray(leaf) if eqx.is_array_like(leaf) else leaf
        args, options = jax.tree.map(array, (args, options))
        return Run(self.program, theta, key, args, options)


def _not_finite(found: Found) -> tuple[str, ...]:
    if np.all(np.isfinite(np.asarray(found.value))):
        return ()
    return (
        "values are not finite: a draw had a parameter out of range (a probability beyond [0, 1], a"
        " negative rate, NaN), or the program returned such a value.",
    )


def _counted(found: Found) -> str:
    count, group = found.value.shape[-1], found.group
    together = f" in {count:,} groups" if group > 1 else ""
    return f"{count * group:,} replicates{together}"


def _pooled(rounds: list[Found]) -> Found:
    """The replicates of several rounds; what the others would have had is told of the first."""
    join = lambda parts: jnp.concatenate(parts, axis=-1)
    value, slope = (join([getattr(one, name) for one in rounds]) for name in ("value", "jacobian"))
    return Found(value, slope, rounds[0].others, rounds[0].group)


def _no_checkpoint() -> NoReturn:
    raise TypeError(
        "`checkpoint=...` is for chains: a run of a `sad` program is too short to be interrupted."
        " Keep the reports of several runs, with keys of their own."
    )


def expectation(
    program: Checked[Callable[..., PyTree]],
    *,
    estimator: Checked[Estimator] | None = None,
    alternatives: Checked[int] = 1,
    num_replicates: Checked[int] = 1024,
    mesh: Checked[Mesh] | None = None,
) -> Expectation:
    """`E[program(theta, key, *args)]` as a function `(theta, key, *args)`: one run of the program,
    whose derivative is unbiased.

    **Arguments**

    - `program(theta, key, *args)`: plain JAX, with its discrete decisions drawn by `sad.bernoulli`,
      `sad.categorical` and so on. It returns any pytree of numbers.
    - `estimator`: `sad.Alternatives(K)` for one run and `sad.Combined(K)` for many, if left out;
      `sad.Score()`; `sad.Smooth()`, which is biased.
    - `alternatives`: K, how many are followed at a time, if no estimator is given. The variance
      falls with it and the cost grows.
    - `num_replicates`: independent runs in `.run`, in `.per_chain` and under `diffmh.compose`,
      where they play the part of chains.
    - `mesh`: a `jax.sharding.Mesh` whose axis `chains` shares out these replicates over its
      devices, of which their numbers don't depend. A call is one run, on one device.

    **Returns** what `diffmh.expectation` returns: a function of `theta` (any pytree of floats),
    `key` (a typed key), `args` and keyword arguments (data) to which `jax.grad`, `jax.jvp`,
    `jax.jacobian`, `jax.vmap` and `jax.jit` apply, with `.run` for a `Report`. Its value is the
    program's.

    **Refused**: whatever would make the derivative wrong, with the line of the program: see
    `docs/sad.md`.

    >>> import jax, jax.numpy as jnp
    >>> from diffmh import sad
    >>> def program(p, key):
    ...     key_x, key_y = jax.random.split(key)
    ...     x = sad.bernoulli(key_x, p)
    ...     return x * sad.bernoulli(key_y, jnp.where(x, p, 0.5))        # E = p²
    >>> gradient = jax.vmap(jax.grad(sad.expectation(program)), in_axes=(None, 0))
    >>> round(float(gradient(0.3, jax.random.split(jax.random.key(0), 20_000)).mean()), 1)
    0.6
    """
    where = "sad.expectation(program)"
    validate.function(program, where, "program", "program(theta, key, *args) -> pytree of numbers")
    if estimator is not None and not isinstance(estimator, Estimator):
        raise TypeError(
            f"`{where}`: `estimator` must be `sad.Alternatives()`, `sad.Score()`, `sad.Combined()`"
            f" or `sad.Smooth()`, got {estimator!r}."
        )
    return Expectation(
        program,
        estimator,
        validate.count(alternatives, "sad.expectation(alternatives=...)"),
        validate.count(num_replicates, "sad.expectation(num_replicates=...)"),
        None if mesh is None else check_mesh(mesh, "sad.expectation(mesh=...)"),
    )


def run(
    program: Checked[Callable[..., PyTree]],
    theta: PyTree,
    key: Checked[Key[Array, ""]],
    *args: Any,
    num_replicates: Checked[int] = 1024,
    alternatives: Checked[int] = 1,
    estimator: Checked[Estimator] | None = None,
    mesh: Checked[Mesh] | None = None,
    **options: Any,
) -> Report:
    """Runs `program(theta, key, *args)` with independent keys: a `Report` of the mean of its
    results and of their derivatives, with errors, by `sad.Combined` unless another estimator is
    named. It says what each estimator would have had. The devices of a `mesh` share the runs.

    >>> import jax
    >>> from diffmh import sad
    >>> program = lambda rate, key: sad.poisson(key, rate).astype(float) ** 2
    >>> report = sad.run(program, 2.0, jax.random.key(0), num_replicates=10_000)
    >>> abs(report.gradient - 5.0) < 5 * report.gradient_error               # E = λ + λ²
    Array(True, dtype=bool)
    """
    count = validate.count(num_replicates, "sad.run(num_replicates=...)", least=2)
    validate.function(program, "sad.run(program, ...)", "program", "program(theta, key, *args)")
    if options:
        _refuse_unknown(program, options)
        program = functools.partial(program, **options)
    made = expectation(
        program, estimator=estimator, alternatives=alternatives, num_replicates=count, mesh=mesh
    )
    return made.run(theta, key, *args)


def _refuse_unknown(program: Callable[..., PyTree], options: dict[str, Any]) -> None:
    """Options that are neither `sad.run`'s nor the program's."""
    try:
        parameters = inspect.signature(program).parameters
    except ValueError:  # Nothing is known of some that are not written in Python.
        return
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for name in options:
        if name not in parameters:
            raise TypeError(
                f"`sad.run({name}=...)` is neither an option of `sad.run` nor an argument of the"
                " program: `progress` and `until` are those of `sad.expectation(program).run`."
            )
