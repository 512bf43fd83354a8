"""Kernels of kernels: in turn, over sites, again and again, and one of several at random."""

from __future__ import annotations

import contextlib
import functools
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from ..base import parts, validate
from ..base.inversion import index_from_uniform
from ..base.validate import Checked
from ..core.kernel import Kernel, State
from ..proposals import On
from .gibbs import Gibbs
from .lifted import StatePart, Whole
from .metropolis import MetropolisHastings


class Several(Kernel):
    """One or more kernels: its updates are those of all, on states with one cache."""

    kernels: tuple[Kernel, ...]

    def updates(self):
        return tuple(update for kernel in self.kernels for update in kernel.updates())

    def densities(self):
        return {name: one for kernel in self.kernels for name, one in kernel.densities().items()}

    def start(self, parameters, x):
        return self.kernels[0].start(parameters, x)

    def conditions(self, theta, *args):
        return tuple(each for kernel in self.kernels for each in kernel.conditions(theta, *args))

    @property
    def draws_within_steps(self):
        return any(kernel.draws_within_steps for kernel in self.kernels)


class Cycle(Several):
    """`Cycle(first, second, ...)` runs kernels in turn as one step: a sweep, or
    Metropolis-within-Gibbs.

    Decisions, births and recouplings of alternatives happen at every update; `f` is evaluated once
    per cycle. A long sweep compiles quickly, because one loop runs all kernels if they differ only
    in arrays (the site that they move). Otherwise one loop runs eight or more in succession that
    are `Gibbs`, or `MetropolisHastings` with `On`, and differ only in arrays and in the part of the
    state that they move.

    >>> import diffmh
    >>> density = lambda theta, x: -0.5 * (x["a"] - theta) ** 2 - 0.5 * (x["b"] - x["a"]) ** 2
    >>> move = lambda part: diffmh.On(lambda x: x[part], diffmh.GaussianWalk(1.0))
    >>> mh = lambda part: diffmh.MetropolisHastings(density, move(part))
    >>> sweep = diffmh.Cycle(mh("a"), mh("b"))
    """

    def __init__(self, *kernels: Checked[Kernel]):
        self.kernels = sharing_cache(_checked(kernels, "Cycle(...)"))

    def distribute(self, make, key):
        keys, noise = jax.random.split(key, len(self.kernels)), []
        for run in _runs(self.kernels):
            noise.append(run.distribute(make, keys[: len(run.kernels)]))
            keys = keys[len(run.kernels) :]
        return tuple(noise)

    def fold(self, advance, carry, noise):
        for run, run_noise in zip(_runs(self.kernels), noise, strict=True):
            carry = run.fold(advance, carry, run_noise)
        return carry

    def without_cache(self):
        return Cycle(*(kernel.without_cache() for kernel in self.kernels))


class Repeat(Several):
    """`Repeat(kernel, n)`: n steps of a kernel as one, which thins the chain; `f` is evaluated once
    per n steps.

    >>> import diffmh
    >>> density = lambda theta, x: -0.5 * (x - theta) ** 2
    >>> walk = diffmh.MetropolisHastings(density, diffmh.GaussianWalk(2.38))
    >>> thinned = diffmh.Repeat(walk, 10)
    """

    num_steps: int = eqx.field(static=True)

    def __init__(self, kernel: Checked[Kernel], num_steps: Checked[int]):
        self.kernels = (validate.instance(kernel, Kernel, "Repeat(...)", "kernel"),)
        self.num_steps = validate.count(num_steps, "Repeat(num_steps=...)")

    @property
    def kernel(self) -> Kernel:
        return self.kernels[0]

    def distribute(self, make, key):
        keys = jax.random.split(key, self.num_steps)
        return jax.vmap(lambda key: self.kernel.distribute(make, key), out_axes=1)(keys)

    def fold(self, advance, carry, noise):
        body = lambda carry, noise: (self.kernel.fold(advance, carry, noise), None)
        return jax.lax.scan(body, carry, noise)[0]

    def without_cache(self):
        return Repeat(self.kernel.without_cache(), self.num_steps)


class Indexed(Kernel):
    """Kernels of one form, made by a function of an index: those of sites, or of stages."""

    kernel_at: Callable[[Int[Array, ""]], Kernel]

    @property
    @abstractmethod
    def indices(self) -> Int[Array, "n"]:
        """The index of each kernel."""

    @property
    def part(self) -> StatePart:
        """The part of a state that the kernels move."""
        return Whole()

    def at(self, index: int | Int[Array, ""]) -> Kernel:
        """The kernel of an index."""
        return self.kernel_at(jnp.asarray(index))

    def densities(self):
        # Densities are known by identity. One that `kernel_at` makes anew has another identity each
        # time, as both are held here, and may depend on the index.
        own, again = self.at(0).densities(), self.at(0).densities()
        # One density of the whole state that all have in common is left invariant by all.
        if own.keys() == again.keys() and isinstance(self.part, Whole):
            return own

        def of_all(number, theta, x, *args):
            def at(index):
                density = list(self.at(index).densities().values())[number]
                return density(theta, self.part.of(x), *args)

            return jax.vmap(at)(self.indices)

        return {(id(self), i): functools.partial(of_all, i) for i in range(len(own))}

    def start(self, parameters, x):
        return State(x, self.at(0).start(parameters, self.part.of(x)).cache)

    def conditions(self, theta, *args):
        """The conditions of every index, indices leading."""
        return eqx.filter_vmap(lambda index: self.at(index).conditions(theta, *args))(self.indices)


class Sweep(Indexed):
    """`Sweep(kernel_at, n)` runs the kernels `kernel_at(0), ..., kernel_at(n − 1)` in turn as one
    step: a systematic sweep over sites, compiled once for all of them.

    `kernel_at(site)` makes the kernel of a site, a traced integer; all sites must have kernels of
    one form. Their densities may differ; for example, each may contain only the terms of its site.

    Refused: kernels whose number of parts depends on the site.

    >>> import jax, jax.numpy as jnp, diffmh
    >>> potts = lambda theta, z: theta * jnp.sum(z[1:] == z[:-1])
    >>> sweep = diffmh.Sweep(lambda i: diffmh.Gibbs(potts, lambda z: z[i], 3), 100)
    >>> agree = lambda theta, z: jnp.mean(z[1:] == z[:-1])
    >>> mean = diffmh.expectation(agree, sweep, init=jnp.zeros(100, int), num_samples=5)
    >>> slope = jax.grad(mean)(0.5, jax.random.key(0))
    """

    num_sites: int = eqx.field(static=True)

    def __init__(
        self, kernel_at: Checked[Callable[[Int[Array, ""]], Kernel]], num_sites: Checked[int]
    ):
        name = "Sweep(kernel_at, num_sites)"
        self.kernel_at = validate.function(kernel_at, name, "kernel_at", "site -> kernel")
        self.num_sites = validate.count(num_sites, "Sweep(num_sites=...)")
        validate.instance(self.at(0), Kernel, name, "kernel_at(0)")
        # A density that is made anew for each site may be another at each: the cache of one site is
        # no use to the next.
        if not _cache_alike((self.at(0), self.at(0))):
            self.kernel_at = lambda site: kernel_at(site).without_cache()

    @property
    def indices(self):
        return jnp.arange(self.num_sites)

    def updates(self):
        return self.at(0).updates()

    def distribute(self, make, key):
        keys = jax.random.split(key, self.num_sites)
        each = lambda site, key: self.at(site).distribute(make, key)
        return jax.vmap(each, out_axes=1)(self.indices, keys)

    def fold(self, advance, carry, noise):
        def body(carry, one):
            site, site_noise = one
            return self.at(site).fold(advance, carry, site_noise), None

        return jax.lax.scan(body, carry, (self.indices, noise))[0]

    @property
    def draws_within_steps(self):
        return self.at(0).draws_within_steps

    def without_cache(self):
        return Sweep(lambda site: self.kernel_at(site).without_cache(), self.num_sites)


class Mixture(Several):
    """`Mixture(first, second, ..., probabilities)` runs one of the kernels at each step, drawn with
    the given probabilities (equal ones if left out); an alternative always runs the same one.

    This combines a kernel that moves far with one under which chains meet. Kernels of different
    densities leave neither density invariant. The finite chain can still be differentiated;
    `Covariance()`, which needs the equilibrium's density, refuses them.

    Every kernel is computed at each step, and the drawn one's result is taken.

    Refused: probabilities that are not one positive number for each kernel, with sum 1.

    >>> import diffmh
    >>> density = lambda theta, x: -0.5 * (x - theta) ** 2
    >>> walk = lambda scale: diffmh.MetropolisHastings(density, diffmh.GaussianWalk(scale))
    >>> both = diffmh.Mixture(walk(0.5), walk(5.0), probabilities=(0.75, 0.25))
    """

    probabilities: Float[Array, "n"]

    def __init__(
        self,
        *kernels: Any,
        probabilities: Checked[Sequence[float] | Array] | None = None,
    ):
        if kernels and probabilities is None and not isinstance(kernels[-1], Kernel):
            kernels, probabilities = kernels[:-1], kernels[-1]
        self.kernels = sharing_cache(_checked(kernels, "Mixture(...)"))
        if probabilities is None:
            probabilities = [1 / len(kernels)] * len(kernels)
        self.probabilities = _checked_probabilities(probabilities, len(kernels))

    def distribute(self, make, key):
        key_choice, *keys = jax.random.split(key, len(self.kernels) + 1)
        own = zip(self.kernels, keys, strict=True)
        noise = tuple(kernel.distribute(make, key) for kernel, key in own)
        num_steps = jax.tree.leaves(noise)[0].shape[0]
        return jax.random.uniform(key_choice, (num_steps,)), noise

    def fold(self, advance, carry, noise):
        uniform, kernel_noise = noise

        def run(number, carry, kernel_noise):
            return self.kernels[number].fold(advance, carry, kernel_noise[number])

        branches = [functools.partial(run, number) for number in range(len(self.kernels))]
        chosen = index_from_uniform(self.probabilities, uniform)
        return jax.lax.switch(chosen, branches, carry, kernel_noise)

    def conditions(self, theta, *args):
        own = _probability_conditions(self.probabilities)
        return (*own, *super().conditions(theta, *args))

    def without_cache(self):
        kernels = (kernel.without_cache() for kernel in self.kernels)
        return Mixture(*kernels, probabilities=self.probabilities)


def _checked(kernels: tuple[Any, ...], where: str) -> tuple[Kernel, ...]:
    if not kernels:
        raise ValueError(f"`{where}` needs at least one kernel, got none.")
    return tuple(validate.instance(kernel, Kernel, where, "kernel") for kernel in kernels)


def _checked_probabilities(given: Any, count: int) -> Float[Array, "n"]:
    probabilities = validate.real_array(given, "Mixture(probabilities=...)")
    if probabilities.shape != (count,):
        raise ValueError(
            f"`Mixture(probabilities=...)` must be one number for each of the {count} kernels, got"
            f" {given!r}."
        )
    validate.require(_probability_conditions(probabilities))
    return probabilities


def _probability_conditions(probabilities: Float[Array, "n"]) -> tuple[validate.Condition, ...]:
    name = "Mixture(probabilities=...)"
    positive, _ = validate.positive(probabilities, name)
    return (positive, *validate.probabilities(probabilities, name))


def sharing_cache(kernels: tuple[Kernel, ...]) -> tuple[Kernel, ...]:
    """The kernels, which have the same in a state's cache, or nothing."""
    if _cache_alike(kernels):
        return kernels
    return tuple(kernel.without_cache() for kernel in kernels)


def _cache_alike(kernels: tuple[Kernel, ...]) -> bool:
    cached = [update.cached_function for kernel in kernels for update in kernel.updates()]
    return all(one is cached[0] for one in cached)


# Kernels of a `Cycle` that are alike are run by one loop, which compiles the step once. Which
# kernels are alike is known from them alone, and so are the runs, whenever they are asked for. But
# whether the parts that they move are of one form is known only where the state is: in
# `distribute`. So the noise says how it was drawn, and `fold` goes by it: `_LoopNoise` for one
# loop, else a tuple with the noise of each kernel.
#
# Invariant: whichever way it is, kernel k of the cycle draws from key k and runs as the k-th, and
# the numbers are the same.

# Fewer kernels that move different parts are not made one loop: it compiles sooner and runs slower.
_MANY = 8


class _LoopNoise(eqx.Module):
    """The noise of kernels that are run by one loop, kernels after steps."""

    noise: PyTree


class _Loop(eqx.Module):
    """Kernels that differ only in arrays: what they have in common, and those arrays, stacked."""

    shared: Any
    varying: PyTree

    @staticmethod
    def of(kernels: tuple[Kernel, ...]) -> _Loop | None:
        if len(kernels) == 1:
            return None
        split = [eqx.partition(kernel, eqx.is_array) for kernel in kernels]
        arrays, rest = [each[0] for each in split], split[0][1]
        forms = [jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), each) for each in arrays]
        alike = all(eqx.tree_equal(other, rest) for _, other in split)
        if not alike or any(form != forms[0] for form in forms):
            return None
        same = jax.tree.map(lambda *leaves: all(leaf is leaves[0] for leaf in leaves), *arrays)
        common, _ = eqx.partition(arrays[0], same)
        varying = [eqx.partition(each, same)[1] for each in arrays]
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *varying)
        return _Loop(eqx.combine(common, rest), stacked)

    def distribute(self, make, keys) -> _LoopNoise:
        def one(varying, key):
            return eqx.combine(varying, self.shared).distribute(make, key)

        return _LoopNoise(jax.vmap(one, out_axes=1)(self.varying, keys))

    def fold(self, advance, carry, noise: _LoopNoise):
        def body(carry, one):
            varying, kernel_noise = one
            return eqx.combine(varying, self.shared).fold(advance, carry, kernel_noise), None

        return jax.lax.scan(body, carry, (self.varying, noise.noise))[0]


class _Run(eqx.Module):
    """Kernels in succession, and the loop that runs them all if the state allows it."""

    kernels: tuple[Kernel, ...]
    loop: _Loop | None

    def distribute(self, make, keys) -> _LoopNoise | tuple[PyTree, ...]:
        if self.loop is not None:
            with contextlib.suppress(parts.Unlike):
                return self.loop.distribute(make, keys)
        own = zip(self.kernels, keys, strict=True)
        return tuple(kernel.distribute(make, key) for kernel, key in own)

    def fold(self, advance, carry, noise):
        if isinstance(noise, _LoopNoise):
            assert self.loop is not None
            return self.loop.fold(advance, carry, noise)
        for kernel, kernel_noise in zip(self.kernels, noise, strict=True):
            carry = kernel.fold(advance, carry, kernel_noise)
        return carry


def _runs(kernels: tuple[Kernel, ...]) -> list[_Run]:
    """All kernels as one run if they differ only in arrays; else those in succession together that
    differ only in arrays and in the part that they move.
    """
    loop = _Loop.of(kernels)
    if loop is not None:
        return [_Run(kernels, loop)]
    runs: list[list[Kernel]] = []
    for kernel in kernels:
        if runs and _loop_by_number((runs[-1][0], kernel)) is not None:
            runs[-1].append(kernel)
        else:
            runs.append([kernel])
    return [
        _Run(run, _loop_by_number(run) if len(run) >= _MANY else None) for run in map(tuple, runs)
    ]


def _where(kernel: Any) -> Callable[[Any], Any] | None:
    """The function by which a kernel picks the part of the state that it moves."""
    match kernel:
        case Gibbs(where=where) | MetropolisHastings(proposal=On(where=where)):
            return where
    return None


def _loop_by_number(kernels: tuple[Kernel, ...]) -> _Loop | None:
    """One loop over kernels that differ in the part that they move, each of which picks its part by
    its number among the parts of all: they then differ in that number.
    """
    wheres = tuple(where for where in map(_where, kernels) if where is not None)
    if len(wheres) < len(kernels):
        return None
    picks = [parts.OneOf(wheres, jnp.asarray(number)) for number in range(len(kernels))]
    own = zip(kernels, picks, strict=True)
    return _Loop.of(tuple(eqx.tree_at(_where, kernel, pick) for kernel, pick in own))
