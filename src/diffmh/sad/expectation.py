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

# The number of runs in a report, by default.
_REPORTED = 1024


class Expectation(Differentiable):
    """`E[program(theta, key, *args)]`, created by `sad.expectation`."""

    def __init__(
        self,
        program: Callable[..., PyTree],
        estimator: Estimator | None,
        alternatives: int,
        num_replicates: int | None,
        mesh: Mesh | None = None,
    ):
        self.program = program
        self.estimator = Alternatives(alternatives) if estimator is None else estimator
        self.of_many = Combined(alternatives) if estimator is None else estimator
        self.num_chains = _REPORTED if num_replicates is None else num_replicates
        self._in_a_call = 1 if num_replicates is None else num_replicates
        # True if replicates may be grouped: for reports, which need no single derivatives.
        self.grouped = False
        self._mesh = mesh

    def __repr__(self) -> str:
        name = getattr(self.program, "__name__", repr(self.program))
        return f"Expectation({name}, estimator={self.of_many}, num_replicates={self.num_chains})"

    def __call__(self, theta, key=None, *args, **options):
        """The mean of `num_replicates` runs of the program, of one run if it was left out, with an
        unbiased derivative.
        """
        run = self._admit(theta, key, args, options)
        plan = run.plan
        if self._in_a_call > 1:
            flat = self._by_surrogate(run, plan, self.of_many, self._in_a_call)
            return plan.unflatten(jnp.mean(flat, axis=-1))
        if plan.goes_backward or not isinstance(self.estimator, Alternatives):
            return plan.unflatten(self._by_surrogate(run, plan, self.estimator, 1)[:, 0])
        count = self.estimator.num_alternatives

        def value(theta, key, given):
            return Run(run.program, theta, key, *given).value()

        def jacobian(theta, key, given):
            return derivative.forward(Run(run.program, theta, key, *given), count)[:2]

        given = (run.args, run.options)
        if plan.closes_over_tracers:
            value = eqx.filter_closure_convert(value, run.theta, run.key, given)
            jacobian = eqx.filter_closure_convert(jacobian, run.theta, run.key, given)
        # Under `jax.vmap` runs are mapped like chains: along the last axis, by `over_chains`.
        value, jacobian = (
            eqx.Partial(mapped_over_chains, function) for function in (value, jacobian)
        )
        return plan.unflatten(differentiable(value, jacobian, None, run.theta, run.key, given))

    def per_chain(self, theta, key=None, *args):
        """The value of each replicate along a leading axis; differentiable."""
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
                "`sad.run` returns a report and cannot be traced: use `sad.expectation` instead."
            )
        plan = run.plan

        def round_of(number: int) -> Round:
            # Rounds have different keys, so their replicates are independent and may be pooled.
            def advance(*_):
                keys = jax.random.split(round_key(run.key, number), self.num_chains)
                runs = Runs(run, keys, plan.goes_backward, mesh=self.mesh)
                return None, find(self.of_many, runs, self.grouped)

            return Round(1, None, _no_checkpoint, advance, _no_checkpoint)

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
        # Groups have no derivatives of single replicates, which a composition needs.
        alone = copy.copy(self)
        alone.grouped = True
        return super(Expectation, alone)._reported(theta, key, args, course, until)

    def _by_surrogate(self, run: Run, plan: Plan, estimator: Estimator, count: int):
        """The values of replicates along the last axis. A single replicate uses the key itself."""
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
                    f"`sad.{type(estimator).__name__}` cannot be differentiated inside of"
                    " `jax.shard_map`: the contributions of the devices would not be summed."
                    " Distribute the replicates with `sad.expectation(..., mesh=...)`."
                )
            return estimator.surrogate(runs(theta, key, given))

        given = (run.args, run.options)
        # Tracers of an outer transformation must become inputs, so that their derivative is seen.
        if plan.closes_over_tracers:
            value = eqx.filter_closure_convert(value, run.theta, run.key, given)
            surrogate = eqx.filter_closure_convert(surrogate, run.theta, run.key, given)
        return differentiable_by(value, surrogate, run.theta, run.key, given)

    def _admit(self, theta, key, args, options) -> Run:
        theta, key = trees.strong(validate.theta(theta)), validate.typed_key(key)
        return Run(self.program, theta, key, *trees.data((args, options)))


def _not_finite(found: Found) -> tuple[str, ...]:
    if np.all(np.isfinite(np.asarray(found.value))):
        return ()
    return (
        "values are not finite: a parameter of a draw was out of range (a probability outside of"
        " [0, 1], a negative rate, NaN), or the program returned such a value.",
    )


def _counted(found: Found) -> str:
    count, group = found.value.shape[-1], found.group
    together = f" in {count:,} groups" if group > 1 else ""
    return f"{count * group:,} replicates{together}"


def _pooled(rounds: list[Found]) -> Found:
    """The replicates of several rounds. The other estimators are those of the first round."""
    join = lambda parts: jnp.concatenate(parts, axis=-1)
    value, slope = (join([getattr(one, name) for one in rounds]) for name in ("value", "jacobian"))
    scoreless = any(bool(one.scoreless) for one in rounds)
    return Found(value, slope, rounds[0].others, rounds[0].group, scoreless)


def _no_checkpoint() -> NoReturn:
    raise TypeError(
        "`checkpoint=...` is for chains: runs of a `sad` program are too short to be interrupted."
        " Combine the reports of several runs with different keys instead."
    )


def expectation(
    program: Checked[Callable[..., PyTree]],
    *,
    estimator: Checked[Estimator] | None = None,
    alternatives: Checked[int] = 1,
    num_replicates: Checked[int] | None = None,
    mesh: Checked[Mesh] | None = None,
) -> Expectation:
    """`E[program(theta, key, *args)]` as a function of `(theta, key, *args)`: the mean of
    `num_replicates` runs of the program, of one run if it is left out, with an unbiased derivative.

    **Arguments**

    - `program(theta, key, *args)`: plain JAX, with its discrete decisions drawn by `sad.bernoulli`,
      `sad.categorical` and so on. It returns any pytree of numbers.
    - `estimator`: by default `sad.Alternatives(K)` for one run and `sad.Combined(K)` for many.
      Others are `sad.Score()` and `sad.Smooth()`, which is biased.
    - `alternatives`: K, the number of alternative runs followed at a time, if no estimator is
      given. With larger K the variance falls and the cost grows.
    - `num_replicates`: the number of independent runs that a call averages, and those of `.run`,
      of `.per_chain` and under `diffmh.compose`, where they take the role of chains. If it is left
      out, a call is one run and the others have 1,024.
    - `mesh`: a `jax.sharding.Mesh` whose axis `chains` distributes these replicates over devices.
      Results do not depend on the number of devices. A single run is on one device.

    **Returns** the same kind of object as `diffmh.expectation`: a function of `theta` (any pytree
    of floats), `key` (a typed key), `args` and keyword arguments (data). `jax.grad`, `jax.jvp`,
    `jax.jacobian`, `jax.vmap` and `jax.jit` apply to it, and `.run` returns a `Report`. Its value
    is that of the program.

    **Refused**: programs whose derivative would be wrong. The error names the line of the program;
    see `docs/sad.md`.

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
    name = "sad.expectation(num_replicates=...)"
    return Expectation(
        program,
        estimator,
        validate.count(alternatives, "sad.expectation(alternatives=...)"),
        None if num_replicates is None else validate.count(num_replicates, name),
        None if mesh is None else check_mesh(mesh, "sad.expectation(mesh=...)"),
    )


def run(
    program: Checked[Callable[..., PyTree]],
    theta: PyTree,
    key: Checked[Key[Array, ""]],
    *args: Any,
    num_replicates: Checked[int] = _REPORTED,
    alternatives: Checked[int] = 1,
    estimator: Checked[Estimator] | None = None,
    mesh: Checked[Mesh] | None = None,
    **options: Any,
) -> Report:
    """Run `program(theta, key, *args)` with independent keys and return a `Report`: the mean of the
    results and of their derivatives, with errors. The default estimator is `sad.Combined`; the
    report also shows the error of each estimator alone. The devices of a `mesh` share the runs.

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
    """Refuse options that neither `sad.run` nor the program has."""
    try:
        parameters = inspect.signature(program).parameters
    except ValueError:  # Some callables that are not written in Python have no signature.
        return
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for name in options:
        if name not in parameters:
            raise TypeError(
                f"`sad.run({name}=...)` is neither an option of `sad.run` nor an argument of the"
                " program. Use `sad.expectation(program).run` for `progress` and `until`."
            )
