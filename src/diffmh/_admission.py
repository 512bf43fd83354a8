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

from . import _trees, _validate
from ._dependence import refuse_lost_derivatives
from ._differentiable import not_differentiable
from ._lowering import compat
from ._validate import NotDifferentiable
from .analysis import Jump, moving_jumps
from .chain import Stepper
from .estimators import Births, distinct_odds
from .kernel import Kernel, moves_with_theta
from .parameters import has_reverse_mode, jacobian
from .simulation import Simulation, flatten

# Of random starts so many are looked at one by one.
_LOOKED_AT = 64


class Unflatten(eqx.Module):
    """Turns `(F, C)` values of a flattened f into f's pytree, chains leading; whole numbers have
    become floats.
    """

    structure: Any = eqx.field(static=True)
    shapes: tuple[tuple[int, ...], ...] = eqx.field(static=True)

    def __call__(self, flat: Float[Array | np.ndarray, "F C"]) -> PyTree:
        ends = np.cumsum([math.prod(shape) for shape in self.shapes])
        # What is NumPy's stays so: JAX would compile a split for each shape.
        split = np.split if isinstance(flat, np.ndarray) else jnp.split
        parts = split(flat.T, ends[:-1], axis=1)
        leaves = [part.reshape(-1, *shape) for part, shape in zip(parts, self.shapes, strict=True)]
        return jax.tree.unflatten(self.structure, leaves)


class Given(eqx.Module):
    """What chains are run from, looked over."""

    theta: PyTree
    key: Key[Array, ""]
    args: tuple[Any, ...]
    init: PyTree | Callable[[Key[Array, ""]], PyTree]


def given(kernel: Any, theta: Any, key: Any, args: Any, init: Any, where: str, why: str) -> Given:
    """Refuses what is no kernel, theta, key or start; differentiating theta is refused with `why`.
    `where` names the function that was called.
    """
    _validate.instance(kernel, Kernel, where, "kernel")
    theta = _trees.strong(not_differentiable(_validate.theta(theta), why))
    array = lambda leaf: jnp.asarray(leaf) if eqx.is_array_like(leaf) else leaf
    start = init if callable(init) else _trees.strong(_validate.state(init, "`init`"))
    return Given(theta, _validate.typed_key(key), jax.tree.map(array, args), start)


class Admission(eqx.Module):
    """What was found out of a simulation with arguments of one form."""

    f_depends_on_theta: bool
    closes_over_tracers: bool
    reads_births: bool
    jumps: tuple[Jump, ...]
    unflatten: Callable[[Float[Array | np.ndarray, "F C"]], PyTree]


def admit(
    simulation: Simulation, theta: PyTree, key: Key[Array, ""], args: tuple[Any, ...]
) -> Admission:
    """Refuses a simulation that cannot run with arguments of this form; else says what was found
    out.
    """
    x, jumps = check_densities(simulation, theta, key, args)
    theta = compat.forms(theta)
    if simulation.estimator.differentiates_steps:
        refuse_lost_derivatives(simulation.kernel, theta, x, args)
    places = (x, x) if simulation.lag else (x,)
    f = lambda theta, places: _validate.numbers(simulation.f(theta, *places, *args), "`f`")
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
    shapes = tuple(leaf.shape for leaf in jax.tree.leaves(value))
    unflatten = Unflatten(jax.tree.structure(value), shapes)
    closes_over = _closes_over_tracers(simulation, theta, key, args)
    reads_births = _reads_births(simulation, theta, x, args, f_depends_on_theta)
    return Admission(f_depends_on_theta, closes_over, reads_births, jumps, unflatten)


def check_densities(
    simulation: Simulation, theta: PyTree, key: Key[Array, ""], args: tuple[Any, ...]
) -> tuple[PyTree, tuple[Jump, ...]]:
    """Refuses densities that cannot be differentiated along a chain; else the form of a state, and
    where they may jump.
    """
    num_parameters = sum(jnp.size(leaf) for leaf in jax.tree.leaves(theta))
    simulation.estimator.refuse(simulation.kernel, num_parameters, simulation.lag)
    starts = jax.eval_shape(simulation.starts, compat.forms(key))
    _validate.state(starts, "what `init(key)` returns")
    _validate.no_empty_leaves(starts, "`init`")
    x = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[:-1], leaf.dtype), starts)
    theta = compat.forms(theta)
    _check_scalars(simulation, theta, x, args)
    return x, _jumps(simulation, theta, x, args)


@eqx.filter_jit
def _start(simulation: Simulation, theta, key, args):
    def one(x):
        places = (x, x) if simulation.lag else (x,)
        updates = simulation.kernel.updates()
        densities = [_scalar(update.log_density(theta, x, *args), theta, x) for update in updates]
        return jnp.stack(densities), flatten(simulation.f(theta, *places, *args))

    starts = simulation.starts(key)
    conditions = simulation.kernel.conditions(theta, *args)
    return conditions, starts, *jax.vmap(one, in_axes=-1, out_axes=-1)(starts)


def check_start(
    simulation: Simulation, theta: PyTree, key: Key[Array, ""], args: tuple[Any, ...]
) -> None:
    """Refuses parameters of the kernel that are out of their ranges, and a start where a log
    density or f is not finite, or that a proposal cannot move.
    Under `jit` the values are not known: the result is NaN then.
    """
    if not _validate.concrete(simulation, theta, key, args):
        return
    conditions, starts, densities, value = _start(simulation, theta, key, args)
    _validate.require(conditions)
    if not _validate.concrete(starts, densities, value):
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
    f = lambda theta, places: _validate.numbers(simulation.f(theta, *places, *args), "`f`")
    refuse_jumps(moving_jumps(f, theta, places, moves), "f", moves)
    return tuple(found)


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
            f" `{name}` is continuous, vouch for it: `{name} = diffmh.continuous({name})`."
        )


def _check_scalars(simulation, theta, x, args) -> None:
    for update in simulation.kernel.updates():

        def evaluate(theta, x, update=update):
            return _validate.numbers(update.log_density(theta, x, *args), "`log_density`")

        density = _scalar(jax.eval_shape(evaluate, theta, x), theta, x)
        _validate.real_dtype(density.dtype, "what `log_density` returns")


def _scalar(density: Any, theta: PyTree, x: PyTree) -> Any:
    found = getattr(density, "shape", () if isinstance(density, int | float) else density)
    if found != ():
        raise TypeError(
            f"`log_density` must return a scalar, got shape {found} for `theta` of shape"
            f" {_trees.shapes(theta)} and a state (`init`) of shape {_trees.shapes(x)}: add the"
            " terms up with `jnp.sum`."
        )
    return density


def check_observable(value: PyTree) -> PyTree:
    leaves = jax.tree_util.tree_leaves_with_path(value)
    if not leaves:
        raise TypeError(f"`f` must return numbers, got {value!r}.")
    _validate.no_empty_leaves(value, "what `f` returns")
    for path, leaf in leaves:
        whole = jnp.issubdtype(leaf.dtype, jnp.integer) or leaf.dtype == jnp.bool_
        if not whole:
            _validate.real_dtype(leaf.dtype, f"what `f` returns{jax.tree_util.keystr(path)}")
    return value


def _density_depends_on_theta(simulation, theta, x, args) -> bool:
    """Whether `∂ log g / ∂θ` varies with x, for some step: else θ only scales the density, which
    nobody sees.
    """

    def gradient(x, theta, density):
        return jacobian(lambda theta: density(theta, x, *args), theta)

    return any(
        compat.depends_on(lambda x, theta, density=density: gradient(x, theta, density), x, theta)
        for density in simulation.kernel.densities().values()
    )


def _reads_births(simulation, theta, x, args, f_depends_on_theta: bool) -> bool:
    """Whether births can be read, which is done backward. Refused if they cannot and were asked
    for.
    """
    num_parameters = sum(leaf.size for leaf in jax.tree.leaves(theta))
    kernel, lag, estimator = simulation.kernel, simulation.lag, simulation.estimator
    if not isinstance(estimator.sized(kernel, num_parameters, lag), Births):
        return False

    def odds(theta, x):
        return jnp.stack([odds(theta, x, x, *args) for odds in distinct_odds(kernel)])

    def f(theta, x):
        return flatten(simulation.f(theta, *((x, x) if lag else (x,)), *args))

    read = (odds, f) if f_depends_on_theta else (odds,)
    possible = all(has_reverse_mode(function, theta, x) for function in read)
    if not possible and getattr(estimator, "births", True):
        raise ValueError(
            "`StochasticDerivative(births=True)` differentiates `log_density` and `f` backward, and"
            " a `while_loop`, or a `fori_loop` with traced bounds, has only a forward derivative:"
            " use births=False, or `jax.lax.scan`."
        )
    return possible


def _closes_over_tracers(simulation, theta, key, args) -> bool:
    arrays, static = eqx.partition(args, eqx.is_array)

    def probe(theta, key, arrays):
        args = eqx.combine(arrays, static)
        return Stepper(simulation.plain(), theta, key, args, differentiate=False).first_value()

    return compat.closes_over_tracers(probe, theta, key, arrays)
