"""Kernels of kernels: in turn, and again and again."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from .. import _validate
from ..kernel import Kernel


class Cycle(Kernel):
    """`Cycle(first, second, ...)` runs kernels in turn as one step: a sweep, or
    Metropolis-within-Gibbs.

    Decisions, births and recouplings of alternatives happen at every update; `f` is evaluated once
    per cycle. Kernels that differ only in arrays (the site that they move) are run by one loop, so a
    long sweep compiles quickly.

    >>> import diffmh
    >>> density = lambda theta, x: -0.5 * (x["a"] - theta) ** 2 - 0.5 * (x["b"] - x["a"]) ** 2
    >>> move = lambda part: diffmh.On(lambda x: x[part], diffmh.GaussianWalk(1.0))
    >>> mh = lambda part: diffmh.MetropolisHastings(density, move(part))
    >>> sweep = diffmh.Cycle(mh("a"), mh("b"))
    """

    kernels: tuple[Kernel, ...]

    def __init__(self, *kernels: Kernel):
        if not kernels:
            raise ValueError("`Cycle(...)` needs at least one kernel, got none.")
        for kernel in kernels:
            _validate.instance(kernel, Kernel, "Cycle(...)", "kernel")
        self.kernels = sharing_memory(kernels)

    def updates(self):
        return tuple(update for kernel in self.kernels for update in kernel.updates())

    def start(self, parameters, x):
        return self.kernels[0].start(parameters, x)

    def distribute(self, make, key):
        keys = jax.random.split(key, len(self.kernels))
        stack = _Stack.of(self.kernels)
        if stack is None:
            own = zip(self.kernels, keys, strict=True)
            return tuple(kernel.distribute(make, key) for kernel, key in own)
        each = lambda varying, key: stack.kernel(varying).distribute(make, key)
        return jax.vmap(each, out_axes=1)(stack.varying, keys)

    def fold(self, advance, carry, noise):
        stack = _Stack.of(self.kernels)
        if stack is None:
            for kernel, kernel_noise in zip(self.kernels, noise, strict=True):
                carry = kernel.fold(advance, carry, kernel_noise)
            return carry

        def body(carry, one):
            varying, kernel_noise = one
            return stack.kernel(varying).fold(advance, carry, kernel_noise), None

        return jax.lax.scan(body, carry, (stack.varying, noise))[0]

    def forgetful(self):
        return Cycle(*(kernel.forgetful() for kernel in self.kernels))


class Repeat(Kernel):
    """`Repeat(kernel, n)`: n steps of a kernel as one, which thins the chain; `f` is evaluated once
    per n steps.

    >>> import diffmh
    >>> density = lambda theta, x: -0.5 * (x - theta) ** 2
    >>> walk = diffmh.MetropolisHastings(density, diffmh.GaussianWalk(2.38))
    >>> thinned = diffmh.Repeat(walk, 10)
    """

    kernel: Kernel
    num_steps: int = eqx.field(static=True)

    def __init__(self, kernel: Kernel, num_steps: int):
        self.kernel = _validate.instance(kernel, Kernel, "Repeat(...)", "kernel")
        self.num_steps = _validate.count(num_steps, "Repeat(num_steps=...)")

    def updates(self):
        return self.kernel.updates()

    def start(self, parameters, x):
        return self.kernel.start(parameters, x)

    def distribute(self, make, key):
        keys = jax.random.split(key, self.num_steps)
        return jax.vmap(lambda key: self.kernel.distribute(make, key), out_axes=1)(keys)

    def fold(self, advance, carry, noise):
        body = lambda carry, noise: (self.kernel.fold(advance, carry, noise), None)
        return jax.lax.scan(body, carry, noise)[0]

    def forgetful(self):
        return Repeat(self.kernel.forgetful(), self.num_steps)


def sharing_memory(kernels: tuple[Kernel, ...]) -> tuple[Kernel, ...]:
    """The kernels, which remember the same in a state, or nothing."""
    memories = [update.remembers for kernel in kernels for update in kernel.updates()]
    if all(memory is memories[0] for memory in memories):
        return kernels
    return tuple(kernel.forgetful() for kernel in kernels)


class _Stack(eqx.Module):
    """Kernels that differ only in arrays: those arrays, stacked, and what they have in common."""

    varying: PyTree
    shared: Any

    @staticmethod
    def of(kernels: tuple[Kernel, ...]) -> _Stack | None:
        parts = [eqx.partition(kernel, eqx.is_array) for kernel in kernels]
        arrays, static = [part[0] for part in parts], [part[1] for part in parts]
        if len(kernels) == 1 or not all(eqx.tree_equal(other, static[0]) for other in static):
            return None
        forms = [jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), each) for each in arrays]
        if any(form != forms[0] for form in forms):
            return None
        same = jax.tree.map(lambda *leaves: all(leaf is leaves[0] for leaf in leaves), *arrays)
        common, _ = eqx.partition(arrays[0], same)
        varying = [eqx.partition(each, same)[1] for each in arrays]
        return _Stack(
            jax.tree.map(lambda *leaves: jnp.stack(leaves), *varying),
            eqx.combine(common, static[0]),
        )

    def kernel(self, varying: PyTree) -> Kernel:
        """One of the kernels, from its slice of what varies."""
        return eqx.combine(varying, self.shared)
