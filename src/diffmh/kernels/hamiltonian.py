"""Hamiltonian: Hamiltonian Monte Carlo with a fixed number of leapfrog steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from .. import _trees, _validate
from .._validate import Checked
from ..decisions import Acceptance
from ..kernel import State, Step, Update
from ..parameters import Parameters
from ..values import Value


class Noise(eqx.Module):
    """The randomness of one step: the momentum, and the uniform that decides."""

    momentum: PyTree
    uniform: Float[Array, "..."]


class Hamiltonian(Update):
    """HMC: draw a momentum `p ~ N(0, 1)`, follow `num_steps` leapfrog steps of size `step` from
    `(x, p)` to `(x', p')`, accept with probability `min(1, g(x') e^{−p'²/2} / (g(x) e^{−p²/2}))`.
    The state must be floats.

    **Arguments**

    - `log_density(theta, x, *args)`: `log g_θ(x)`, a real scalar, differentiable by x.
    - `step`: a positive number, a pytree of them like the state, or a function of theta.
    - `num_steps`: leapfrog steps.

    The derivative is the full one: through the trajectory, and of every accept and reject. An
    alternative has the same momentum: chains come closer where the density is log-concave, but they
    meet only to rounding. Mix in a walk under which they do:
    `Mixture(Hamiltonian(...), MetropolisHastings(log_density, GaussianWalk(...)))`.

    Refused: a step that is not positive, states that are not floats.

    >>> import jax, diffmh
    >>> density = lambda theta, x: -0.5 * (x - theta) ** 2
    >>> walk = diffmh.MetropolisHastings(density, diffmh.GaussianWalk(1.0))
    >>> both = diffmh.Mixture(diffmh.Hamiltonian(density, 0.3, 5), walk)
    >>> mean = diffmh.expectation(lambda theta, x: x, both, init=0.0, num_samples=500, burn_in=50)
    >>> slope = jax.grad(mean)(0.5, jax.random.key(0))                               # exactly 1
    """

    density: Callable[..., Float[Array, ""]]
    step_size: Any
    num_steps: int = eqx.field(static=True)

    def __init__(
        self,
        log_density: Checked[Callable[..., Float[Array, ""]]],
        step: PyTree | Callable[[PyTree], PyTree],
        num_steps: Checked[int],
    ):
        self.density = _validate.function(
            log_density,
            "Hamiltonian(log_density, step, num_steps)",
            "log_density",
            "log_density(theta, x, *args) -> scalar",
        )
        self.step_size = step if callable(step) else _steps(step)
        if not callable(step):
            _validate.require(_step_conditions(self.step_size))
        self.num_steps = _validate.count(num_steps, "Hamiltonian(num_steps=...)")

    def log_density(self, theta, x, *args):
        return self.density(theta, x, *args)

    @property
    def target(self):
        return self.density

    @property
    def moves_with_theta(self):
        return True

    @property
    def has_own_parameters(self):
        return callable(self.step_size)

    def conditions(self, theta, *args):
        return _step_conditions(self._step_at(theta))

    def _step_at(self, theta: PyTree) -> PyTree:
        step = self.step_size
        return _steps(step(theta)) if callable(step) else step

    def noise(self, key, x, num_steps):
        for path, leaf in jax.tree_util.tree_leaves_with_path(x):
            if not jnp.issubdtype(leaf.dtype, jnp.floating):
                raise TypeError(
                    f"`Hamiltonian` moves floats, but state{jax.tree_util.keystr(path)} is"
                    f" {leaf.dtype}: start from a float (`init`)."
                )
        key_momentum, key_accept = jax.random.split(key)
        leaves, structure = jax.tree.flatten(x)
        keys = jax.random.split(key_momentum, len(leaves))
        draw = lambda key, leaf: jax.random.normal(key, (num_steps, *leaf.shape), leaf.dtype)
        momenta = [draw(key, leaf) for key, leaf in zip(keys, leaves, strict=True)]
        uniform = jax.random.uniform(key_accept, (num_steps,))
        return Noise(structure.unflatten(momenta), uniform)

    def step(self, parameters: Parameters, state: State, noise: Noise) -> Step:
        proposed, acceptance = self._propose(parameters, state, noise)
        after = _trees.select(acceptance.accepted, proposed, State(state.x, None, state.tangent))
        return Step(state, after, (acceptance,), proposed)

    def coupled_step(self, parameters, step, alternative, noise, coupling_noise):
        proposed, acceptance = self._propose(parameters, alternative, noise)
        moved = _trees.select(acceptance.accepted, proposed.x, alternative.x)
        # Chains that have met stay together, however two copies of one trajectory are rounded.
        met = _trees.equal(step.before.x, alternative.x)
        return State(_trees.select(met, step.after.x, moved))

    def flipped(self, step, noise, decision, candidate):
        assert step.proposed is not None
        accepted = step.decisions[0].outcome
        return State(_trees.select(accepted, step.before.x, step.proposed.x))

    def _propose(
        self, parameters: Parameters, state: State, noise: Noise
    ) -> tuple[State, Acceptance]:
        follow = lambda theta, x, *args: self._trajectory(theta, x, noise.momentum, args)
        end = parameters.evaluate(follow, state.value)
        x_new, log_ratio = end.primal
        _validate.same_form(x_new, state.x, "what `Hamiltonian` proposes")
        tangent, slope = (None, None) if end.tangent is None else end.tangent
        acceptance = Acceptance.draw(noise.uniform, Value(log_ratio, slope))
        return State(x_new, None, tangent), acceptance

    def _trajectory(
        self, theta: PyTree, x: PyTree, momentum: PyTree, args: tuple[Any, ...]
    ) -> tuple[PyTree, Float[Array, ""]]:
        """`x'` and `log r`."""
        step = _by_leaf(self._step_at(theta), x)
        density = jax.value_and_grad(lambda x: self.density(theta, x, *args))

        def along(start, direction, share):
            def go(start, step, direction):
                return start + (share * step * direction).astype(start.dtype)

            return jax.tree.map(go, start, step, direction)

        def leap(carry, _):
            x, momentum, gradient, _ = carry
            half = along(momentum, gradient, 0.5)
            x = along(x, half, 1.0)
            value, gradient = density(x)
            return (x, along(half, gradient, 0.5), gradient, value), None

        value, gradient = density(x)
        first = (x, momentum, gradient, value)
        (x_new, end, _, there), _ = jax.lax.scan(leap, first, None, length=self.num_steps)
        return x_new, there - value + 0.5 * (_trees.dot(momentum, momentum) - _trees.dot(end, end))


def _steps(step: Any) -> PyTree:
    if not jax.tree.leaves(step) or not all(map(eqx.is_array_like, jax.tree.leaves(step))):
        raise TypeError(
            "`Hamiltonian(step=...)` must be a number, a pytree of them like the state, or a"
            f" function of theta, got {step!r}."
        )
    return _validate.real_arrays(step, "Hamiltonian(step=...)")


def _step_conditions(step: PyTree) -> tuple[_validate.Condition, ...]:
    leaves, name = jax.tree.leaves(step), "Hamiltonian(step=...)"
    return tuple(each for leaf in leaves for each in _validate.positive(leaf, name))


def _by_leaf(step: PyTree, x: PyTree) -> PyTree:
    """The step of each leaf of the state."""
    expected, given = jax.tree.structure(x), jax.tree.structure(step)
    if expected != given:
        if given != jax.tree.structure(0) or jnp.shape(step) != ():
            raise ValueError(
                "`Hamiltonian(step=...)` must be a number or a pytree like the state, "
                f"{expected}, got {given}."
            )
        return jax.tree.map(lambda leaf: step, x)

    def fitted(path, one, leaf):
        if jnp.shape(one) not in ((), jnp.shape(leaf)):
            raise ValueError(
                f"`Hamiltonian(step=...)`{jax.tree_util.keystr(path)} of shape {jnp.shape(one)}"
                f" does not fit the state's {jnp.shape(leaf)}: give a number or that shape."
            )
        return one

    return jax.tree_util.tree_map_with_path(fitted, step, x)
