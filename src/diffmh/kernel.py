"""Kernel: what can be sampled and differentiated.

A kernel moves a state by accept/reject decisions. `AcceptReject` makes one decision per step, or
many that are independent given the rest; `Cycle` and `Repeat` put such steps in order. Estimators
see a kernel only through this interface.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from . import _trees, _validate
from .parameters import Dual, Parameters

Carry = TypeVar("Carry")


class State(eqx.Module):
    """Where a chain is, `x`, and what its kernel remembers there so as not to compute it twice
    (or `None`).
    """

    x: PyTree
    memory: PyTree


class Step(eqx.Module):
    """One accept/reject step of the primal: `D` decisions (shape `()` for a kernel that makes one).

    `log_ratio` is `log r` of each decision, with its derivative if one is wanted.
    """

    before: State
    proposed: State
    after: State
    accepted: Bool[Array, "*D"]
    log_ratio: Dual

    @property
    def accept_probability(self) -> Float[Array, "*D"]:
        return accept_probability(self.log_ratio.value)

    @property
    def log_accept_gradient(self) -> Float[Array, "P *D"]:
        """`∂ log α / ∂θ`: that of `log r` where `log r < 0`, zero where `log r > 0`, and half of it
        at an exact tie.

        The tie is what `jnp.minimum(0, log r)` differentiates to. A model whose weights are all
        zero ties at every step: with a zero there its gradient would silently be zero.
        """
        log_ratio, gradient = self.log_ratio.value, self.log_ratio.gradient
        assert gradient is not None, "the step was taken without derivatives"
        share = jnp.where(log_ratio < 0, 1.0, jnp.where(log_ratio == 0, 0.5, 0.0)).astype(
            gradient.dtype
        )
        # α = 0 where the proposal lies outside the support: its log density has no derivative
        # there, and needs none.
        return jnp.where((share > 0) & (log_ratio > -jnp.inf), share * gradient, 0.0)

    @property
    def log_reject_gradient(self) -> Float[Array, "P *D"]:
        """`∂ log(1 − α) / ∂θ = −∂ log α / expm1(−log α)`, for decisions that were rejected
        (where α < 1).
        """
        odds = jnp.expm1(-jnp.minimum(0.0, self.log_ratio.value))
        return -self.log_accept_gradient / jnp.where(odds > 0, odds, 1.0)


def accept_probability(log_ratio: Float[Array, "*D"]) -> Float[Array, "*D"]:
    """`α = min(1, r) = exp(min(0, log r))`, and 0 where `log r` is NaN."""
    return jnp.where(jnp.isnan(log_ratio), 0.0, jnp.exp(jnp.minimum(0.0, log_ratio)))


def accept(uniform: Float[Array, "*D"], log_ratio: Float[Array, "*D"]) -> Bool[Array, "*D"]:
    """`U < α`. Strict: a float32 uniform is exactly 0 once in 2²³ draws, and α may be 0. A NaN
    is never accepted.
    """
    return uniform < accept_probability(log_ratio)


class Kernel(eqx.Module):
    """What can be sampled and differentiated: accept/reject steps in some order.

    To write your own step, subclass `AcceptReject`; to put steps in order, use `Cycle` and
    `Repeat`.
    """

    @abstractmethod
    def steps(self) -> tuple[AcceptReject, ...]:
        """The different accept/reject steps that it is made of."""

    @abstractmethod
    def start(self, parameters: Parameters, x: PyTree) -> State:
        """The state of a chain that starts at `x`."""

    @abstractmethod
    def draw(
        self, draw: Callable[[AcceptReject, Key[Array, ""]], PyTree], key: Key[Array, ""]
    ) -> PyTree:
        """`draw(step, key)` for each of its steps with a key of its own: randomness for some
        number of steps ahead.
        """

    @abstractmethod
    def fold(
        self, advance: Callable[[AcceptReject, Carry, PyTree], Carry], carry: Carry, noise: PyTree
    ) -> Carry:
        """`carry = advance(step, carry, noise)` for each of its steps in turn, `noise` being one
        step's worth of `draw`.
        """

    @abstractmethod
    def forgetful(self) -> Kernel:
        """The same kernel, remembering nothing in its state."""


class AcceptReject(Kernel):
    """One step of accept/reject decisions: subclass this to differentiate a sampler of your own.

    The decisions of a step must be independent given the rest of the state (one decision, or a
    block update). All methods are for one chain and pure: whatever is random comes in as noise.
    `docs/extending.md` writes one out.
    """

    @abstractmethod
    def log_density(self, theta: PyTree, x: PyTree, *args: Any) -> Float[Array, ""]:
        """`log g_θ(x)`, unnormalised: the density that the kernel leaves invariant."""

    @abstractmethod
    def noise(self, key: Key[Array, ""], x: PyTree, num_steps: int) -> PyTree:
        """All randomness of `num_steps` steps of the primal, leading axis `num_steps`; only the
        shapes of `x` count.
        """

    @abstractmethod
    def coupling_noise(self, key: Key[Array, ""], x: PyTree, num_steps: int) -> PyTree:
        """The randomness that `coupled_step` needs beyond the primal's."""

    @abstractmethod
    def step(self, parameters: Parameters, state: State, noise: PyTree) -> Step:
        """A step of the primal, with the log accept ratio of each decision."""

    @abstractmethod
    def coupled_step(
        self,
        parameters: Parameters,
        step: Step,
        alternative: State,
        noise: PyTree,
        coupling_noise: PyTree,
    ) -> State:
        """The step of an alternative: by itself distributed as `step`, and equal to the primal's
        once they have met.
        """

    @abstractmethod
    def flipped(self, step: Step, index: Int[Array, ""]) -> State:
        """The state that the step would have led to, had decision `index` gone the other way."""

    @property
    @abstractmethod
    def remembers(self) -> Any:
        """What its states remember (by identity), or `None`: steps of a cycle that remember the
        same share it.
        """

    def steps(self) -> tuple[AcceptReject, ...]:
        return (self,)

    def draw(self, draw, key):
        return draw(self, key)

    def fold(self, advance, carry, noise):
        return advance(self, carry, noise)


class Cycle(Kernel):
    """`Cycle(first, second, ...)` runs kernels in turn as one step: a sweep, or
    Metropolis-within-Gibbs.

    Decisions, births and recouplings of alternatives happen at every inner step; `f` is evaluated
    once per cycle. Kernels that differ only in arrays (the site that they move) are run by one
    loop, so a long sweep compiles quickly.

    >>> import diffmh
    >>> density = lambda theta, x: -0.5 * (x["a"] - theta) ** 2 - 0.5 * (x["b"] - x["a"]) ** 2
    >>> move = lambda part: diffmh.MetropolisHastings(density, diffmh.On(lambda x: x[part], diffmh.GaussianWalk(1.0)))
    >>> sweep = diffmh.Cycle(move("a"), move("b"))
    """

    kernels: tuple[Kernel, ...]

    def __init__(self, *kernels: Kernel):
        if not kernels:
            raise ValueError("`Cycle(...)` needs at least one kernel, got none.")
        for kernel in kernels:
            _validate.instance(kernel, Kernel, "Cycle(...)", "kernel")
        memories = [step.remembers for kernel in kernels for step in kernel.steps()]
        shared = all(memory is memories[0] for memory in memories)
        self.kernels = kernels if shared else tuple(kernel.forgetful() for kernel in kernels)

    def steps(self):
        return tuple(step for kernel in self.kernels for step in kernel.steps())

    def start(self, parameters, x):
        return self.kernels[0].start(parameters, x)

    def draw(self, draw, key):
        keys = jax.random.split(key, len(self.kernels))
        stack = self._stack()
        if stack is None:
            return tuple(
                kernel.draw(draw, key) for kernel, key in zip(self.kernels, keys, strict=True)
            )
        varying, rebuild = stack
        return jax.vmap(lambda leaves, key: rebuild(leaves).draw(draw, key), out_axes=1)(
            varying, keys
        )

    def fold(self, advance, carry, noise):
        stack = self._stack()
        if stack is None:
            for kernel, kernel_noise in zip(self.kernels, noise, strict=True):
                carry = kernel.fold(advance, carry, kernel_noise)
            return carry
        varying, rebuild = stack
        body = lambda carry, xs: (rebuild(xs[0]).fold(advance, carry, xs[1]), None)
        return jax.lax.scan(body, carry, (varying, noise))[0]

    def forgetful(self):
        return Cycle(*(kernel.forgetful() for kernel in self.kernels))

    def _stack(self) -> tuple[list[Array], Callable[[list[Array]], Kernel]] | None:
        """The arrays in which the kernels differ, stacked, and how to rebuild one; `None` if
        they differ otherwise.
        """
        flat = [jax.tree.flatten(kernel) for kernel in self.kernels]
        structure = flat[0][1]
        if len(flat) == 1 or any(other != structure for _, other in flat):
            return None
        columns = list(zip(*(leaves for leaves, _ in flat), strict=True))
        varying = [
            i for i, column in enumerate(columns) if any(leaf is not column[0] for leaf in column)
        ]
        for i in varying:
            described = [
                (leaf.shape, leaf.dtype) if eqx.is_array(leaf) else None for leaf in columns[i]
            ]
            if None in described or any(entry != described[0] for entry in described):
                return None
        shared = flat[0][0]

        def rebuild(leaves):
            merged = dict(zip(varying, leaves, strict=True))
            return jax.tree.unflatten(
                structure, [merged.get(i, leaf) for i, leaf in enumerate(shared)]
            )

        return [jnp.stack(columns[i]) for i in varying], rebuild


class Repeat(Kernel):
    """`Repeat(kernel, n)`: n steps of a kernel as one, which thins the chain; `f` is evaluated once
    per n steps.

    >>> import diffmh
    >>> walk = diffmh.MetropolisHastings(lambda theta, x: -0.5 * (x - theta) ** 2, diffmh.GaussianWalk(2.38))
    >>> thinned = diffmh.Repeat(walk, 10)
    """

    kernel: Kernel
    num_steps: int = eqx.field(static=True)

    def __init__(self, kernel: Kernel, num_steps: int):
        self.kernel = _validate.instance(kernel, Kernel, "Repeat(...)", "kernel")
        self.num_steps = _validate.count(num_steps, "Repeat(num_steps=...)")

    def steps(self):
        return self.kernel.steps()

    def start(self, parameters, x):
        return self.kernel.start(parameters, x)

    def draw(self, draw, key):
        keys = jax.random.split(key, self.num_steps)
        return jax.vmap(lambda key: self.kernel.draw(draw, key), out_axes=1)(keys)

    def fold(self, advance, carry, noise):
        body = lambda carry, noise: (self.kernel.fold(advance, carry, noise), None)
        return jax.lax.scan(body, carry, noise)[0]

    def forgetful(self):
        return Repeat(self.kernel.forgetful(), self.num_steps)


def met(state: State, other: State) -> Bool[Array, ""]:
    """Whether two chains are at the same place, bit for bit."""
    return _trees.equal(state.x, other.x)
