"""Admission: what is found out about a simulation before it runs, by tracing it and by looking
at its start.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key, PyTree

from ..analysis import Jump, moving_jumps
from ..base import trees, validate
from ..base.validate import NotDifferentiable
from ..jaxprs import compat
from ..jaxprs.once import with_lines
from .adapted import kernel_and_init
from .autodiff import not_differentiable
from .chain import Stepper
from .dependence import refuse_lost_derivatives
from .estimator import Problem, ValueOnly
from .kernel import Kernel, OfDensity, moves_with_theta
from .parameters import jacobian
from .plan import Plan, start_of_one
from .simulation import Simulation, flatten

# Of random starts so many are looked at one by one.
_LOOKED_AT = 64


class Unflatten(eqx.Module):
    """Turns `(F, C)` values of a flattened f into f's pytree, chains leading; integers have
    become floats.
    """

    structure: Any = eqx.field(static=True)
    shapes: tuple[tuple[int, ...], ...] = eqx.field(static=True)

    @staticmethod
    def of(form: PyTree) -> Unflatten:
        """For an f that returns this form."""
        return Unflatten(
            jax.tree.structure(form), tuple(leaf.shape for leaf in jax.tree.leaves(form))
        )

    def __call__(self, flat: Float[Array | np.ndarray, "F C"]) -> PyTree:
        ends = np.cumsum([math.prod(shape) for shape in self.shapes])
        # What is NumPy's stays so: JAX would compile a split for each shape.
        split = np.split if isinstance(flat, np.ndarray) else jnp.split
        parts = split(flat.T, ends[:-1], axis=1)
        leaves = [part.reshape(-1, *shape) for part, shape in zip(parts, self.shapes, strict=True)]
        return jax.tree.unflatten(self.structure, leaves)


class Given(eqx.Module):
    """The arguments that chains are run from, after validation."""

    kernel: Kernel
    theta: PyTree
    key: Key[Array, ""]
    args: tuple[Any, ...]
    init: PyTree | Callable[[Key[Array, ""]], PyTree]


def given(kernel: Any, theta: Any, key: Any, args: Any, init: Any, where: str, why: str) -> Given:
    """Refuses what is not a kernel, theta, key or start; differentiating theta is refused with
    `why`. `where` names the function that was called. An `Adapted` has a start of its own.
    """
    kernel, init = kernel_and_init(kernel, init, where)
    validate.instance(kernel, Kernel, where, "kernel")
    theta = trees.strong(not_differentiable(validate.theta(theta), why))
    start = init if callable(init) else trees.strong(validate.state(init, "`init`"))
    return Given(kernel, theta, validate.typed_key(key), trees.data(args), start)


class Admission(eqx.Module):
    """A simulation that may run with arguments of one form: its plan, the places where its
    densities may jump, and how f's values are put together again.
    """

    plan: Plan
    closes_over_tracers: bool
    jumps: tuple[Jump, ...]
    unflatten: Unflatten


def admit(
    simulation: Simulation, theta: PyTree, key: Key[Array, ""], args: tuple[Any, ...]
) -> Admission:
    """Refuses a simulation that cannot run with arguments of this form; else plans it."""
    x, jumps = check_densities(simulation, theta, key, args)
    theta = compat.forms(theta)
    if simulation.estimator.differentiates_steps:
        refuse_lost_derivatives(simulation.kernel, theta, x, args, jumps)
    places = (x, x) if simulation.lag else (x,)
    f = lambda theta, places: validate.numbers(simulation.f(theta, *places, *args), "`f`")
    value = check_observable(jax.eval_shape(f, theta, places))
    f_depends_on_theta = compat.depends_on(f, theta, places)
    depends = f_depends_on_theta or moves_with_theta(simulation.kernel)
    if not depends and not _density_depends_on_theta(simulation, theta, x, args):
        raise ValueError(
            "`log_density` does not depend on `theta` in a way that moves the distribution of x"
            " smoothly, and `f` does not"
            " depend on `theta` either: the derivative would be zero. Use `theta` in"
            " `log_density(theta, x, *args)`, not a"
            " value that it closes over."
        )
    flat = lambda theta, x: flatten(f(theta, (x, x) if simulation.lag else (x,)))
    problem = Problem(
        simulation.kernel,
        theta,
        x,
        args,
        flat,
        f_depends_on_theta,
        simulation.lag,
        simulation.num_samples,
        simulation.burn_in,
        simulation.num_chains,
    )
    resolved = simulation.by(simulation.estimator.resolve(problem))
    plan = Plan.of(resolved, theta, key, args, f_depends_on_theta)
    return Admission(plan, _closes_over_tracers(plan, theta, key, args), jumps, Unflatten.of(value))


def check_densities(
    simulation: Simulation, theta: PyTree, key: Key[Array, ""], args: tuple[Any, ...]
) -> tuple[PyTree, tuple[Jump, ...]]:
    """Refuses densities that cannot be differentiated along a chain; else the form of a state, and
    where they may jump.
    """
    _check_signatures(simulation, args)
    num_parameters = sum(jnp.size(leaf) for leaf in jax.tree.leaves(theta))
    simulation.estimator.refuse(simulation.kernel, num_parameters, simulation.lag)
    x = jax.eval_shape(lambda key: start_of_one(simulation, key), compat.forms(key))
    validate.state(x, "what `init(key)` returns")
    theta = compat.forms(theta)
    _check_scalars(simulation, theta, x, args)
    return x, _jumps(simulation, theta, x, args)


def start_values(simulation: Simulation, theta, key, args):
    """The conditions of the kernel's parameters, the starts of all chains, and the log densities
    and f there, chains last.
    """

    def one(x):
        places = (x, x) if simulation.lag else (x,)
        updates = simulation.kernel.updates()
        densities = [_scalar(update.log_density(theta, x, *args), theta, x) for update in updates]
        return jnp.stack(densities), flatten(simulation.f(theta, *places, *args))

    starts = Plan.of(simulation, theta, key, args).starts(key)
    conditions = simulation.kernel.conditions(theta, *args)
    return conditions, starts, *jax.vmap(one, in_axes=-1, out_axes=-1)(starts)


_start = eqx.filter_jit(start_values)


def check_start(
    simulation: Simulation, theta: PyTree, key: Key[Array, ""], args: tuple[Any, ...]
) -> None:
    """Refuses parameters of the kernel that are out of their ranges, and a start where a log
    density or f is not finite, or that a proposal cannot move.
    Under `jit` the values are not known: the result is NaN then.
    """
    if not validate.concrete(simulation, theta, key, args):
        return
    conditions, starts, densities, value = _start(simulation, theta, key, args)
    validate.require(conditions)
    if not validate.concrete(starts, densities, value):
        return  # They close over what is traced, or all happens within `jit`.
    state_of = lambda chain: jax.tree.map(lambda leaf: np.asarray(leaf)[..., chain], starts)
    for number, density in enumerate(np.asarray(densities)):
        bad = np.flatnonzero(~np.isfinite(density))
        if bad.size:
            which = f" of kernel {number}" if len(densities) > 1 else ""
            raise ValueError(
                f"`log_density`{which} is {density[bad[0]]} at the start state"
                f" {state_of(bad[0])}: give an `init` inside the support, where it is finite."
            )
    bad = np.flatnonzero(np.isnan(np.asarray(value)).any(axis=0))
    if bad.size:
        raise ValueError(f"`f` is NaN at the start state {state_of(bad[0])}.")
    differ = simulation.num_chains if callable(simulation.init) else 1
    for chain in range(min(differ, _LOOKED_AT)):
        for update in simulation.kernel.updates():
            update.refuse_start(state_of(chain))


def _jumps(simulation, theta, x, args) -> tuple[Jump, ...]:
    """Refuses a density that certainly jumps in x at a place that depends on θ, and an f that may;
    returns where the density may.
    """
    moves = moves_with_theta(simulation.kernel)
    found: list[Jump] = []
    for density in simulation.kernel.densities().values():
        at_args = lambda theta, x, density=density: density(theta, x, *args)
        found += moving_jumps(at_args, theta, x, moves)
    refuse_jumps([jump for jump in found if jump.certain], "log_density", moves)
    places = (x, x) if simulation.lag else (x,)
    f = lambda theta, places: validate.numbers(simulation.f(theta, *places, *args), "`f`")
    refuse_jumps(moving_jumps(f, theta, places, moves), "f", moves)
    return tuple(found)


def refuse_jumps_of_derivatives(
    simulation: Simulation, theta: PyTree, x: PyTree, args: tuple[Any, ...]
) -> None:
    """Refuses a second derivative where `∂_θ log g` or `∂_θ f` may jump in x at a place that
    depends on θ: `log g = −|x − θ|` has a first derivative by the covariance, and no second one.
    """
    theta = compat.forms(theta)

    def f(theta, x):
        return flatten(simulation.f(theta, x, *args))

    for density in simulation.kernel.densities().values():
        at_args = lambda theta, x, density=density: density(theta, x, *args)
        refuse_jumps_of_slope(at_args, theta, x, "log_density")
    refuse_jumps_of_slope(f, theta, x, "f")


def refuse_jumps_of_slope(
    function: Callable[[PyTree, PyTree], Any], theta: PyTree, x: PyTree, name: str, order: int = 1
) -> None:
    """Refuses a function whose derivative of this order with respect to θ may jump in x at a place
    that depends on θ.
    """

    def slope(theta, x):
        of_theta = lambda theta: function(theta, x)
        for _ in range(order):
            of_theta = lambda theta, inner=of_theta: jacobian(inner, theta)
        return of_theta(theta)

    # Traced anew: what is kept of a function may be one equation, which hides what is inside.
    with with_lines():
        found = moving_jumps(slope, theta, x, False)
    for jump in found:
        times = {1: "", 2: " second", 3: " third"}.get(order, f" {order}th")
        raise NotDifferentiable(
            f"The{times} derivative of `{name}` with respect to theta"
            f" {'jumps' if jump.certain else 'may jump'} in x at a place that depends on theta"
            f" (`{jump.primitive}` at {jump.where}): the estimator cannot see the moving jump, so"
            f" derivatives of order {order + 1} would be wrong. Those of lower order are right."
        )


def refuse_jumps(jumps: Sequence[Jump], name: str, moves: bool) -> None:
    """Refuses the function `name` for jumps in x at places that depend on θ; `moves` says that x
    itself moves with θ.
    """
    for jump in jumps:
        jumps_at = "jumps" if jump.certain else "may jump"
        why = (
            "and this kernel's moves depend on theta"
            if moves
            else "at a place that depends on theta"
        )
        raise NotDifferentiable(
            f"`{name}` {jumps_at} in x {why} (`{jump.primitive}` at {jump.where}): the estimator"
            " cannot see the moving jump, so the derivative would be wrong. Write x in units in"
            " which the place is fixed (a support (0, 1) scaled by theta)"
            f"{', or take a kernel whose moves do not depend on theta' if moves else ''}. If"
            f" `{name}` is continuous, vouch for it: `{name} = diffmh.continuous({name})`"
            f"{', or `posterior = diffmh.continuous(posterior)`' if name == 'log_density' else ''}."
        )


def _check_signatures(simulation, args) -> None:
    where, data = "expectation(f, kernel, ...)", validate.data_names(args)
    for update in simulation.kernel.updates():
        if isinstance(update, OfDensity):
            validate.takes(update.density, where, "log_density", "theta", "x", *data)
    earlier = ["x_earlier"] if simulation.lag else []
    validate.takes(simulation.f, where, "f", "theta", *earlier, "x", *data)


def _check_scalars(simulation, theta, x, args) -> None:
    for update in simulation.kernel.updates():

        def evaluate(theta, x, update=update):
            return validate.numbers(update.log_density(theta, x, *args), "`log_density`")

        check_scalar(jax.eval_shape(evaluate, theta, x), theta, x)


def check_scalar(density: Any, theta: PyTree, x: PyTree) -> None:
    """Refuse what a `log_density` must not return, here at a state of this form."""
    validate.real_dtype(_scalar(density, theta, x).dtype, "what `log_density` returns")


def _scalar(density: Any, theta: PyTree, x: PyTree) -> Any:
    found = getattr(density, "shape", () if isinstance(density, int | float) else density)
    if found != ():
        raise TypeError(
            f"`log_density` must return a scalar, got shape {found} for `theta` of shape"
            f" {trees.shapes(theta)} and a state of shape {trees.shapes(x)}: add the"
            " terms up with `jnp.sum`."
        )
    return density


def check_observable(value: PyTree) -> PyTree:
    leaves = jax.tree_util.tree_leaves_with_path(value)
    if not leaves:
        raise TypeError(f"`f` must return numbers, got {value!r}.")
    for path, leaf in leaves:
        where = f"what `f` returns{jax.tree_util.keystr(path)}"
        if 0 in leaf.shape:
            raise ValueError(f"{where} has shape {leaf.shape}: there is nothing in it.")
        if not (jnp.issubdtype(leaf.dtype, jnp.integer) or leaf.dtype == jnp.bool_):
            validate.real_dtype(leaf.dtype, where)
    return value


def _density_depends_on_theta(simulation, theta, x, args) -> bool:
    """True if `∂ log g / ∂θ` varies with x, for some step: else θ only scales the density, which
    does not change the chain.
    """

    def gradient(x, theta, density):
        return jacobian(lambda theta: density(theta, x, *args), theta)

    # Traced anew: what is kept of a function may be one equation, which hides what depends on what.
    with with_lines():
        return any(
            compat.depends_on(
                lambda x, theta, density=density: gradient(x, theta, density), x, theta
            )
            for density in simulation.kernel.densities().values()
        )


def _closes_over_tracers(plan: Plan, theta, key, args) -> bool:
    arrays, static = eqx.partition(args, eqx.is_array)

    def probe(theta, key, arrays):
        stepper = Stepper(plan.by(ValueOnly()), theta, eqx.combine(arrays, static))
        return stepper.first_value(key)

    return compat.closes_over_tracers(probe, theta, key, arrays)
