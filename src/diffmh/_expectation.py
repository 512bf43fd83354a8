"""expectation: an expectation under Metropolis–Hastings as an ordinary, differentiable JAX
function.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh
from jaxtyping import Array, Key, PyTree

from .base import trees, validate
from .base.validate import Checked
from .core import admission, compiled
from .core.adapted import Adapted, kernel_and_init
from .core.autodiff import not_differentiable
from .core.estimator import Estimator, SecondOrder
from .core.kernel import Kernel
from .core.plan import Plan
from .core.simulation import Simulation, flatten
from .estimators import StochasticDerivative
from .reports import meetings
from .reports.comparison import Comparison, candidates, compared, measure
from .reports.method import Method, applies
from .reports.report import Report, RunChains, report
from .reports.until import Stopping, Until, until_of
from .runs.checkpoint import Checkpoint, Store, checkpoint_of
from .runs.devices import Hosts, check_shares
from .runs.progress import Bar
from .runs.rounds import Course

_RUN_AGAIN = (
    "Start the same script again on all hosts, or on fewer: with `checkpoint=...` it goes on from"
    " there, without one from the beginning."
)


class Differentiable(ABC):
    """A function `(theta, key, *args)` of expectations that `jax.grad` differentiates, and that
    reports its own error.
    """

    num_chains: int

    @property
    def mesh(self) -> Mesh | None:
        """The devices that share the chains, if several do."""
        return None

    def __call__(
        self, theta: PyTree, key: Checked[Key[Array, ""]] | None = None, *args: Any
    ) -> PyTree:
        """The value, averaged over chains. `jit`, `grad`, `jvp`, `vmap` and their nestings
        apply.
        """
        return jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), self.per_chain(theta, key, *args))

    @abstractmethod
    def per_chain(
        self, theta: PyTree, key: Checked[Key[Array, ""]] | None = None, *args: Any
    ) -> PyTree:
        """The value of each chain along a leading axis, differentiable like the value, which is
        their mean.
        """

    @abstractmethod
    def run_chains(
        self,
        theta: PyTree,
        key: Checked[Key[Array, ""]] | None = None,
        *args: Any,
        course: Course | None = None,
    ) -> RunChains:
        """Each chain's value and derivative, and what was counted on the way; of all the rounds
        of a course, if there is one.
        """

    @property
    @abstractmethod
    def num_steps(self) -> int:
        """Steps of all chains together in one call."""

    def by(self, estimator: Estimator) -> Differentiable:
        """The same expectation, differentiated by another estimator."""
        raise TypeError(
            f"`diffmh.compare` takes what `diffmh.expectation` or `compose` returned, got {self!r}."
        )

    def applicable(self, theta: PyTree, key: Any, *args: Any) -> list[Estimator]:
        """Estimators that may be compared: the one in use, first, and the others."""
        raise TypeError(
            f"`diffmh.compare` takes what `diffmh.expectation` or `compose` returned, got {self!r}."
        )

    def compare(
        self, theta: PyTree, key: Checked[Key[Array, ""]] | None = None, *args: Any
    ) -> Comparison:
        """The comparison that `diffmh.compare` returns."""
        theta = trees.strong(validate.theta(theta))
        if self.num_chains < 2:
            raise ValueError("`compare` needs `num_chains` of at least 2, got 1.")
        estimators = self.applicable(theta, key, *args)
        form = jax.eval_shape(
            lambda: jax.tree.map(lambda leaf: leaf[0], self.per_chain(theta, key, *args))
        )
        programs = [_program(self.by(estimator), theta, key, args) for estimator in estimators]
        return compared(estimators, measure(programs), admission.Unflatten.of(form), theta)

    def run(
        self,
        theta: PyTree,
        key: Checked[Key[Array, ""]] | None = None,
        *args: Any,
        progress: Checked[bool] = False,
        until: Checked[float | Until] | None = None,
        checkpoint: Checked[Checkpoint | str | os.PathLike] | None = None,
        compare: Checked[bool] = False,
    ) -> Report:
        """Value and gradient, each with its standard error over the chains, and diagnostics.

        - `progress`: a bar on stderr, where that is a terminal.
        - `until`: run the chains again, with keys of their own, until the gradient is known this
          well: `0.01` for an interval of ± 1 %, or a `diffmh.Until`.
        - `checkpoint`: a directory, or a `diffmh.Checkpoint`. If the process is killed, the same
          line goes on from there; the report is the same, bit for bit, as if nothing had happened.
        - `compare`: also how the other estimators would have done (`diffmh.compare`), in
          `report.comparison`.

        Refused with a single chain, which gives no error, and inside `jit`, because it needs the
        numbers. A checkpoint of another problem, or a damaged one, is refused and not changed.
        """
        if self.num_chains < 2:
            raise ValueError(
                "`.run` takes its errors from the chains and needs `num_chains` of at least 2, got"
                " 1."
            )
        until, place = until_of(until), checkpoint_of(checkpoint)
        progress = validate.flag(progress, "run(progress=...)")
        compare = validate.flag(compare, "run(compare=...)")
        if not validate.concrete(theta, key, args):
            raise TypeError(
                "`.run` returns a report and cannot be traced: call the expectation itself instead."
            )
        hosts = Hosts(self.mesh)
        with contextlib.ExitStack() as stack:
            stack.enter_context(hosts.answering(_RUN_AGAIN))
            hosts.refuse_different("theta, key and args of `.run`", theta, key, args)
            store = None if place is None else stack.enter_context(Store(place, hosts))
            bar = stack.enter_context(Bar("run", 0, progress and hosts.leads))
            course = Course(bar, store, hosts)
            made = self._reported(theta, key, args, course, until)
            course.finish()
        if not compare:
            return made
        return dataclasses.replace(made, comparison=self.compare(theta, key, *args))

    def _reported(self, theta, key, args, course: Course, until: Until | None) -> Report:
        stopping = None if until is None else Stopping(until, self.num_chains, self.num_steps)
        rounds = 1 if stopping is None else stopping.first_rounds
        while True:
            course.again(rounds)
            chains = self.run_chains(theta, key, *args, course=course)
            if not validate.concrete(chains):
                raise TypeError(
                    "`.run` returns a report and cannot be traced: call the expectation"
                    " itself instead."
                )
            made = report(chains)
            if stopping is None:
                return made
            more = course.hosts.agree(stopping.next_rounds(made, rounds))
            if more == rounds:
                return stopping.said(made, rounds)
            rounds = more


def _program(expectation: Differentiable, theta: PyTree, key, args):
    """A compiled run: each chain's value and derivative, flat, chains last."""
    flat, unravel = ravel_pytree(theta)
    basis = jnp.eye(flat.size, dtype=flat.dtype)

    @eqx.filter_jit
    def both(theta, key, args):
        def along(direction):
            def value(theta):
                return jax.vmap(flatten, out_axes=-1)(expectation.per_chain(theta, key, *args))

            return jax.jvp(value, (theta,), (unravel(direction),))

        value, slope = jax.vmap(along, out_axes=(None, 0))(basis)
        return value, slope

    return lambda: both(theta, key, args)


class Expectation(Differentiable):
    """`m(θ) = E[(1/N) Σ f(θ, x_t)]` over the chain's steps `B < t ≤ B + N`; made by
    `diffmh.expectation`.
    """

    def __init__(self, simulation: Simulation):
        self.simulation = simulation
        self.num_chains = simulation.num_chains
        self._admitted: dict[Any, tuple[compiled.Compiled, tuple[Any, ...]]] = {}

    def __repr__(self) -> str:
        s = self.simulation
        return (
            f"Expectation(num_samples={s.num_samples}, burn_in={s.burn_in},"
            f" num_chains={s.num_chains}, estimator={s.estimator})"
        )

    def by(self, estimator):
        return Expectation(self.simulation.by(estimator))

    def applicable(self, theta, key, *args):
        s = self.simulation
        admitted, theta, _, _ = self._admit(theta, key, args)
        num_parameters = ravel_pytree(theta)[0].size
        return [
            estimator
            for estimator in candidates(self._in_use(admitted.admission.plan, theta))
            if applies(estimator, s.kernel, num_parameters, s.lag)
        ]

    def _in_use(self, plan: Plan, theta: PyTree) -> Estimator:
        """The estimator as it was asked for, with the default number of alternatives filled in."""
        found = self.simulation.estimator
        if not isinstance(found, StochasticDerivative):
            return found
        return found.with_alternatives(ravel_pytree(theta)[0].size, self.num_chains, plan.state)

    def __call__(self, theta, key=None, *args):
        admitted, theta, key, args = self._admit(theta, key, args)
        return admitted.evaluate(theta, key, args, averaged=True)

    def per_chain(self, theta, key=None, *args):
        admitted, theta, key, args = self._admit(theta, key, args)
        return admitted.evaluate(theta, key, args, averaged=False)

    def run_chains(self, theta, key=None, *args, course=None):
        theta = not_differentiable(
            validate.theta(theta),
            "`.run` and `.run_chains` report value and derivative of their own; to differentiate,"
            " call the expectation itself, or its `.per_chain`.",
        )
        admitted, theta, key, args = self._admit(theta, key, args)
        found = admitted.admission
        given = self.simulation.by(self._in_use(found.plan, theta))
        outcome, jacobian = compiled.followed(found.plan, theta, key, args, course or Course())
        num_parameters = sum(jnp.size(leaf) for leaf in jax.tree.leaves(theta))
        if isinstance(given.estimator, SecondOrder):
            given = given.by(given.estimator.first_order)
        method = Method.of(given.kernel, given.estimator, num_parameters, given.lag)
        outcome = dataclasses.replace(outcome, method=method)
        return RunChains(
            found.unflatten,
            theta,
            outcome.observed.value,
            jacobian,
            (outcome,),
            found.jumps,
            tuple(meetings.notes(outcome, given)),
            stretched=True,
        )

    def hessian_product(self, theta, key, direction, args):
        """The derivative along a flat direction of each chain's gradient, flat, `(P, F, C)`, and
        how f's values are put together; for an estimator that has second derivatives.
        """
        admitted, theta, key, args = self._admit(theta, key, args)
        plan = admitted.admission.plan
        second = plan.estimator.second_order()
        assert second is not None
        _, found = compiled.hessian_product(plan.by(second), theta, key, args, direction)
        return found, admitted.admission.unflatten

    def refuse(self, theta, key, args):
        """Refuse what cannot be run and differentiated, without running it."""
        self._admit(theta, key, args)

    def refuse_jumps_of_derivatives(self, theta, key, args):
        """Refuse what has no second derivative by an identity at equilibrium."""
        admitted, theta, key, args = self._admit(theta, key, args)
        plan = admitted.admission.plan
        admission.refuse_jumps_of_derivatives(plan.simulation, theta, plan.state, args)

    @property
    def mesh(self) -> Mesh | None:
        return self.simulation.mesh

    @property
    def num_steps(self) -> int:
        return self.num_chains * self.simulation.num_steps

    def _admit(self, theta, key, args):
        """Refuses what cannot be run, once for each form of the arguments, and what can be seen
        of their values each time.
        """
        theta, key = validate.theta(theta), validate.typed_key(key)
        theta = trees.strong(theta)
        args = trees.data(args)
        leaves, structure = jax.tree.flatten((theta, args))
        signature = (structure, *map(_form, leaves), key.dtype)
        admitted, _ = self._admitted.get(signature, (None, ()))
        if admitted is None:
            found = admission.admit(self.simulation, theta, key, args)
            admitted = compiled.Compiled(found)
            if not found.closes_over_tracers:
                # Objects are known by their identity, so they are kept alive.
                held = tuple(leaf for leaf in leaves if not eqx.is_array(leaf))
                self._admitted[signature] = (admitted, held)
        if not admitted.admission.closes_over_tracers:
            admitted.check_start(theta, key, args)
        return admitted, theta, key, args


def expectation(
    f: Checked[Callable[..., PyTree]],
    kernel: Checked[Kernel | Adapted],
    *,
    init: PyTree | Callable[[Key[Array, ""]], PyTree] | None = None,
    num_samples: Checked[int],
    burn_in: Checked[int] = 0,
    num_chains: Checked[int] = 16,
    lag: Checked[int] = 0,
    estimator: Checked[Estimator] | None = None,
    mesh: Checked[Mesh] | None = None,
) -> Expectation:
    """The expectation of `f` under a kernel's chain, as a function `(theta, key, *args)` that JAX
    differentiates without bias.

    `m(θ) = E[(1/N) Σ_{t=B+1}^{B+N} f(θ, x_t)]` with `N = num_samples`, `B = burn_in`, `x_0 = init`
    never counted. The derivative is that of this finite chain, burn-in included.

    **Arguments**

    - `f(theta, x, *args)`: a pytree of real arrays; with `lag=L` it is
      `f(theta, x_earlier, x, *args)`, `x_earlier` being the state L steps back (before the start,
      the start): autocovariances, squared jump distances.
    - `kernel`: a `Kernel`, such as `MetropolisHastings(log_density, proposal)`, or an `Adapted`.
    - `init`: the start state, or a function `key -> state` for a random one. It may be left out
      for an `Adapted`, whose chains then go on.
    - `num_samples`, `burn_in`: steps counted, and steps before them. Memory grows with neither.
    - `num_chains`: independent chains, which give the error.
    - `estimator`: `StochasticDerivative()` if left out; `Score()`; `Covariance()`; `Stationary()`,
      whose value and derivative are those of the equilibrium.
    - `mesh`: a `jax.sharding.Mesh` whose axis `chains` shares out the chains over its devices. The
      numbers do not depend on how many there are.

    **Returns** an `Expectation`: call it with `(theta, key, *args)` for the value, differentiate
    that call with any of JAX's transformations, or call `.run` for value and gradient with their
    errors. `theta` is any pytree of floats, `key` a typed key, `args` data that is passed through
    and never differentiated.

    **Refused**: second derivatives, except by `Covariance()` and `Stationary()`
    (`diffmh.hessian`); derivatives with
    respect to `args`, `init` or anything that `f` and the kernel close over; parameters on which
    nothing depends; half precision; and values that are not finite at the start.

    >>> import jax, diffmh
    >>> density = lambda theta, x: -0.5 * (x - theta) ** 2
    >>> normal = diffmh.MetropolisHastings(density, diffmh.GaussianWalk(2.38))
    >>> length = dict(num_samples=2_000, burn_in=50, num_chains=64)
    >>> mean = diffmh.expectation(lambda theta, x: x, normal, init=0.0, **length)
    >>> value, gradient = jax.value_and_grad(mean)(0.5, jax.random.key(0))
    >>> round(float(value), 1), round(float(gradient), 1)                # exactly 0.5 and 1
    (0.5, 1.0)
    """
    estimator = StochasticDerivative() if estimator is None else estimator
    where = "expectation(f, kernel, ...)"
    kernel, init = kernel_and_init(kernel, init, where)
    simulation = Simulation(
        kernel=validate.instance(kernel, Kernel, where, "kernel"),
        init=init if callable(init) else trees.strong(validate.state(init, "`init`")),
        f=validate.function(f, where, "f", "f(theta, x, *args) -> pytree of real arrays"),
        estimator=validate.instance(estimator, Estimator, where, "estimator"),
        num_samples=validate.count(num_samples, "num_samples=..."),
        burn_in=validate.count(burn_in, "burn_in=...", least=0),
        num_chains=validate.count(num_chains, "num_chains=..."),
        lag=validate.count(lag, "lag=...", least=0),
        mesh=None if mesh is None else check_shares(mesh, num_chains),
    )
    estimator.refuse_kernel(simulation.kernel, simulation.num_steps)
    return Expectation(simulation)


def _form(leaf: Any) -> Any:
    """The form of an array, or the object itself: all that is known of it before its value."""
    if eqx.is_array(leaf):
        return leaf.shape, leaf.dtype
    # Objects by identity: two that look alike need not compute alike.
    plain = isinstance(leaf, str | bytes | int | float | complex | None)
    return (type(leaf), leaf) if plain else id(leaf)
