"""Hamiltonian: Hamiltonian Monte Carlo with a fixed number of leapfrog steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from ..base import trees, validate
from ..base.validate import Checked
from ..core.decisions import Acceptance
from ..core.kernel import OfDensity, State, Step, Update
from ..core.parameters import Parameters
from ..core.values import Value
from ..proposals import check_floats, scale_by_leaf
from .accept_reject import ProposalNoise


class Hamiltonian(OfDensity, Update):
    """HMC: draw a momentum `p ~ N(0, 1)`, follow `num_leapfrog_steps` leapfrog steps of size
    `step_size` from `(x, p)` to `(x', p')`, accept with probability
    `min(1, g(x') e^{−p'²/2} / (g(x) e^{−p²/2}))`. The state must be floats.

    **Arguments**

    - `log_density(theta, x, *args)`: `log g_θ(x)`, a real scalar, differentiable in x.
    - `step_size`: a positive number, a pytree of them like the state, or a function of theta.
    - `num_leapfrog_steps`: how many of them.

    The derivative is the full one: through the trajectory, and of every accept and reject. An
    alternative has the same momentum: chains come closer where the density is log-concave, but they
    meet only to rounding. Mix in a walk under which they do:
    `Mixture(Hamiltonian(...), MetropolisHastings(log_density, GaussianWalk(...)))`.

    Refused: a step size that is not positive, states that are not floats.

    >>> import jax, diffmh
    >>> density = lambda theta, x: -0.5 * (x - theta) ** 2
    >>> walk = diffmh.MetropolisHastings(density, diffmh.GaussianWalk(1.0))
    >>> both = diffmh.Mixture(diffmh.Hamiltonian(density, 0.3, 5), walk)
    >>> mean = diffmh.expectation(lambda theta, x: x, both, init=0.0, num_samples=500, burn_in=50)
    >>> slope = jax.grad(mean)(0.5, jax.random.key(0))                               # exactly 1
    """

    theta_enters_by_evaluate: ClassVar[bool] = True
    step_size: Any
    num_leapfrog_steps: int = eqx.field(static=True)

    def __init__(
        self,
        log_density: Checked[Callable[..., Float[Array, ""]]],
        step_size: PyTree | Callable[[PyTree], PyTree],
        num_leapfrog_steps: Checked[int],
    ):
        where = "Hamiltonian(log_density, step_size, num_leapfrog_steps)"
        self.density = validate.density(log_density, where)
        self.step_size = step_size if callable(step_size) else _checked_steps(step_size)
        if not callable(step_size):
            validate.require(_step_conditions(self.step_size))
        count = validate.count(num_leapfrog_steps, "Hamiltonian(num_leapfrog_steps=...)")
        self.num_leapfrog_steps = count

    @property
    def moves_with_theta(self):
        return True

    @property
    def keeps_apart(self):
        # With one momentum, two different points meet under the leapfrog map only to rounding.
        return True

    @property
    def has_own_parameters(self):
        return callable(self.step_size)

    def conditions(self, theta, *args):
        return _step_conditions(self._step_at(theta))

    def _step_at(self, theta: PyTree) -> PyTree:
        step_size = self.step_size
        return _checked_steps(step_size(theta)) if callable(step_size) else step_size

    def noise(self, key, x, num_steps):
        check_floats(x, "Hamiltonian", "(`init`)")
        key_momentum, key_accept = jax.random.split(key)
        leaves, structure = jax.tree.flatten(x)
        keys = jax.random.split(key_momentum, len(leaves))
        momenta = [
            jax.random.normal(key, (num_steps, *leaf.shape), leaf.dtype)
            for key, leaf in zip(keys, leaves, strict=True)
        ]
        uniform = jax.random.uniform(key_accept, (num_steps,))
        return ProposalNoise(structure.unflatten(momenta), uniform)

    def step(self, parameters: Parameters, state: State, noise: ProposalNoise) -> Step:
        proposed, acceptance = self._propose(parameters, state, noise)
        after = trees.select(acceptance.accepted, proposed, State(state.x, None, state.tangent))
        return Step(state, after, (acceptance,), proposed)

    def coupled_step(self, parameters, step, alternative, noise, coupling_noise):
        proposed, acceptance = self._propose(parameters, alternative, noise)
        moved = trees.select(acceptance.accepted, proposed.x, alternative.x)
        # Chains that have met stay together, however two copies of one trajectory are rounded.
        met = trees.equal(step.before.x, alternative.x)
        return State(trees.select(met, step.after.x, moved))

    def leads_nowhere(self, step, noise):
        # A trajectory hardly ever ends where it began, bit for bit: looking is not worth it.
        return None

    def flipped(self, step, noise, decision, candidate):
        assert step.proposed is not None
        accepted = step.decisions[0].outcome
        return State(trees.select(accepted, step.before.x, step.proposed.x))

    def _propose(
        self, parameters: Parameters, state: State, noise: ProposalNoise
    ) -> tuple[State, Acceptance]:
        def follow(theta, x, *args):
            return self._trajectory(theta, x, noise.proposal, args)

        end = parameters.evaluate(follow, state.value)
        x_new, log_ratio = end.primal
        validate.same_form(x_new, state.x, "what `Hamiltonian` proposes")
        tangent, slope = (None, None) if end.tangent is None else end.tangent
        acceptance = Acceptance.draw(noise.uniform, Value(log_ratio, slope))
        return State(x_new, None, tangent), acceptance

    def _trajectory(
        self, theta: PyTree, x: PyTree, momentum: PyTree, args: tuple[Any, ...]
    ) -> tuple[PyTree, Float[Array, ""]]:
        """`x'` and `log r`."""
        step = self._step_at(theta)
        if jax.tree.structure(step) == jax.tree.structure(0) and jnp.shape(step) == ():
            step = jax.tree.map(lambda leaf: step, x)
        step = scale_by_leaf(step, x, "Hamiltonian(step_size=...)")
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
        (x_new, end, _, there), _ = jax.lax.scan(leap, first, None, length=self.num_leapfrog_steps)
        return x_new, there - value + 0.5 * (trees.dot(momentum, momentum) - trees.dot(end, end))


def _checked_steps(step: Any) -> PyTree:
    if not jax.tree.leaves(step) or not all(map(eqx.is_array_like, jax.tree.leaves(step))):
        raise TypeError(
            "`Hamiltonian(step_size=...)` must be a number, a pytree of them like the state, or a"
            f" function of theta, got {step!r}."
        )
    return validate.real_arrays(step, "Hamiltonian(step_size=...)")


def _step_conditions(step: PyTree) -> tuple[validate.Condition, ...]:
    leaves, name = jax.tree.leaves(step), "Hamiltonian(step_size=...)"
    return tuple(each for leaf in leaves for each in validate.positive(leaf, name))
