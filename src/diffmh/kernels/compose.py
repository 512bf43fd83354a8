"""Kernels of kernels: in turn, over sites, again and again, and one of several at random."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from .. import _parts, _validate
from .._inversion import index_from_uniform
from .._validate import Checked
from ..kernel import Kernel
from ..proposals import On
from .gibbs import Gibbs
from .metropolis import MetropolisHastings


class Cycle(Kernel):
    """`Cycle(first, second, ...)` runs kernels in turn as one step: a sweep, or
    Metropolis-within-Gibbs.

    Decisions, births and recouplings of alternatives happen at every update; `f` is evaluated once
    per cycle. Kernels that differ only in arrays (the site that they move), and eight or more in
    succession that differ only in arrays and in the part of the state that they move, are run by
    one loop, so that a long sweep compiles quickly.

    >>> import diffmh
    >>> density = lambda theta, x: -0.5 * (x["a"] - theta) ** 2 - 0.5 * (x["b"] - x["a"]) ** 2
    >>> move = lambda part: diffmh.On(lambda x: x[part], diffmh.GaussianWalk(1.0))
    >>> mh = lambda part: diffmh.MetropolisHastings(density, move(part))
    >>> sweep = diffmh.Cycle(mh("a"), mh("b"))
    """

    kernels: tuple[Kernel, ...]

    def __init__(self, *kernels: Checked[Kernel]):
        if not kernels:
            raise ValueError("`Cycle(...)` needs at least one kernel, got none.")
        for kernel in kernels:
            _validate.instance(kernel, Kernel, "Cycle(...)", "kernel")
        self.kernels = sharing_cache(kernels)

    def updates(self):
        return tuple(update for kernel in self.kernels for update in kernel.updates())

    def densities(self):
        return _densities_of(self.kernels)

    def start(self, parameters, x):
        return self.kernels[0].start(parameters, x)

    def distribute(self, make, key):
        keys, begin, noise = jax.random.split(key, len(self.kernels)), 0, []
        for run in _runs(self.kernels):
            noise.append(run.distribute(make, keys[begin : begin + len(run.kernels)]))
            begin += len(run.kernels)
        return tuple(noise)

    def fold(self, advance, carry, noise):
        for run, run_noise in zip(_runs(self.kernels), noise, strict=True):
            carry = run.fold(advance, carry, run_noise)
        return carry

    def conditions(self, theta, *args):
        return _all_conditions(self.kernels, theta, args)

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

    def __init__(self, kernel: Checked[Kernel], num_steps: Checked[int]):
        self.kernel = _validate.instance(kernel, Kernel, "Repeat(...)", "kernel")
        self.num_steps = _validate.count(num_steps, "Repeat(num_steps=...)")

    def updates(self):
        return self.kernel.updates()

    def densities(self):
        return self.kernel.densities()

    def start(self, parameters, x):
        return self.kernel.start(parameters, x)

    def distribute(self, make, key):
        keys = jax.random.split(key, self.num_steps)
        return jax.vmap(lambda key: self.kernel.distribute(make, key), out_axes=1)(keys)

    def fold(self, advance, carry, noise):
        body = lambda carry, noise: (self.kernel.fold(advance, carry, noise), None)
        return jax.lax.scan(body, carry, noise)[0]

    def conditions(self, theta, *args):
        return self.kernel.conditions(theta, *args)

    def forgetful(self):
        return Repeat(self.kernel.forgetful(), self.num_steps)


class Sweep(Kernel):
    """`Sweep(kernel_at, n)` runs the kernels `kernel_at(0), ..., kernel_at(n − 1)` in turn as one
    step: a systematic sweep over sites, compiled once for all of them.

    `kernel_at(site)` makes the kernel of a site, a traced integer; all sites must have kernels of
    one form. Their densities may differ, as those that add up only the terms of one site do.

    Refused: kernels of whose parts the number depends on the site.

    >>> import jax, jax.numpy as jnp, diffmh
    >>> potts = lambda theta, z: theta * jnp.sum(z[1:] == z[:-1])
    >>> sweep = diffmh.Sweep(lambda i: diffmh.Gibbs(potts, lambda z: z[i], 3), 100)
    >>> agree = lambda theta, z: jnp.mean(z[1:] == z[:-1])
    >>> mean = diffmh.expectation(agree, sweep, init=jnp.zeros(100, int), num_samples=5)
    >>> slope = jax.grad(mean)(0.5, jax.random.key(0))
    """

    kernel_at: Callable[[Int[Array, ""]], Kernel]
    num_sites: int = eqx.field(static=True)

    def __init__(
        self, kernel_at: Checked[Callable[[Int[Array, ""]], Kernel]], num_sites: Checked[int]
    ):
        name = "Sweep(kernel_at, num_sites)"
        self.kernel_at = _validate.function(kernel_at, name, "kernel_at", "site -> kernel")
        self.num_sites = _validate.count(num_sites, "Sweep(num_sites=...)")
        _validate.instance(self._at(0), Kernel, name, "kernel_at(0)")
        # A density that is made anew for each site may be another at each: what one site has
        # remembered of its own is no use to the next.
        if not _remember_alike((self._at(0), self._at(0))):
            self.kernel_at = lambda site: kernel_at(site).forgetful()

    def _at(self, site: int | Int[Array, ""]) -> Kernel:
        return self.kernel_at(jnp.asarray(site))

    def updates(self):
        return self._at(0).updates()

    def densities(self):
        def of_all_sites(number):
            def density(theta, x, *args):
                at = lambda site: list(self._at(site).densities().values())[number](theta, x, *args)
                return jax.vmap(at)(jnp.arange(self.num_sites))

            return density

        return {(id(self), i): of_all_sites(i) for i in range(len(self._at(0).densities()))}

    def start(self, parameters, x):
        return self._at(0).start(parameters, x)

    def distribute(self, make, key):
        keys = jax.random.split(key, self.num_sites)
        each = lambda site, key: self._at(site).distribute(make, key)
        return jax.vmap(each, out_axes=1)(jnp.arange(self.num_sites), keys)

    def fold(self, advance, carry, noise):
        def body(carry, one):
            site, site_noise = one
            return self._at(site).fold(advance, carry, site_noise), None

        return jax.lax.scan(body, carry, (jnp.arange(self.num_sites), noise))[0]

    def conditions(self, theta, *args):
        """Those of every site, sites leading."""
        each = lambda site: self._at(site).conditions(theta, *args)
        return eqx.filter_vmap(each)(jnp.arange(self.num_sites))

    def forgetful(self):
        return Sweep(lambda site: self.kernel_at(site).forgetful(), self.num_sites)


class Mixture(Kernel):
    """`Mixture(first, second, ..., probabilities)` runs one of the kernels at each step, drawn with
    the given probabilities (equal ones if left out); an alternative always runs the same one.

    A kernel that moves far may so be mixed with one under which chains meet.

    Every kernel is computed at each step, and the drawn one's result is taken.

    Refused: probabilities that are not one positive number for each kernel, with sum 1.

    >>> import diffmh
    >>> density = lambda theta, x: -0.5 * (x - theta) ** 2
    >>> walk = lambda scale: diffmh.MetropolisHastings(density, diffmh.GaussianWalk(scale))
    >>> both = diffmh.Mixture(walk(0.5), walk(5.0), probabilities=(0.75, 0.25))
    """

    kernels: tuple[Kernel, ...]
    probabilities: Float[Array, "n"]

    def __init__(
        self,
        *kernels: Any,
        probabilities: Checked[Sequence[float] | Array] | None = None,
    ):
        if kernels and probabilities is None and not isinstance(kernels[-1], Kernel):
            kernels, probabilities = kernels[:-1], kernels[-1]
        if not kernels:
            raise ValueError("`Mixture(...)` needs at least one kernel, got none.")
        for kernel in kernels:
            _validate.instance(kernel, Kernel, "Mixture(...)", "kernel")
        self.kernels = sharing_cache(tuple(kernels))
        if probabilities is None:
            probabilities = [1 / len(kernels)] * len(kernels)
        self.probabilities = _checked_probabilities(probabilities, len(kernels))

    def updates(self):
        return tuple(update for kernel in self.kernels for update in kernel.updates())

    def densities(self):
        return _densities_of(self.kernels)

    def start(self, parameters, x):
        return self.kernels[0].start(parameters, x)

    def distribute(self, make, key):
        key_choice, *keys = jax.random.split(key, len(self.kernels) + 1)
        own = zip(self.kernels, keys, strict=True)
        noise = tuple(kernel.distribute(make, key) for kernel, key in own)
        num_steps = jax.tree.leaves(noise)[0].shape[0]
        return jax.random.uniform(key_choice, (num_steps,)), noise

    def fold(self, advance, carry, noise):
        uniform, kernel_noise = noise
        branches = [
            lambda carry, noise, kernel=kernel, number=number: kernel.fold(
                advance, carry, noise[number]
            )
            for number, kernel in enumerate(self.kernels)
        ]
        chosen = index_from_uniform(self.probabilities, uniform)
        return jax.lax.switch(chosen, branches, carry, kernel_noise)

    def conditions(self, theta, *args):
        own = _probability_conditions(self.probabilities)
        return (*own, *_all_conditions(self.kernels, theta, args))

    def forgetful(self):
        forgetful = (kernel.forgetful() for kernel in self.kernels)
        return Mixture(*forgetful, probabilities=self.probabilities)


def _checked_probabilities(given: Any, count: int) -> Float[Array, "n"]:
    probabilities = _validate.real_array(given, "Mixture(probabilities=...)")
    if probabilities.shape != (count,):
        raise ValueError(
            f"`Mixture(probabilities=...)` must be one number for each of the {count} kernels, got"
            f" {given!r}."
        )
    _validate.require(_probability_conditions(probabilities))
    return probabilities


def _probability_conditions(probabilities: Float[Array, "n"]) -> tuple[_validate.Condition, ...]:
    name = "Mixture(probabilities=...)"
    positive, _ = _validate.positive(probabilities, name)
    return (positive, *_validate.probabilities(probabilities, name))


def _all_conditions(kernels: tuple[Kernel, ...], theta: PyTree, args: tuple[Any, ...]):
    return tuple(each for kernel in kernels for each in kernel.conditions(theta, *args))


def sharing_cache(kernels: tuple[Kernel, ...]) -> tuple[Kernel, ...]:
    """The kernels, which remember the same in a state, or nothing."""
    if _remember_alike(kernels):
        return kernels
    return tuple(kernel.forgetful() for kernel in kernels)


def _remember_alike(kernels: tuple[Kernel, ...]) -> bool:
    cached = [update.remembers for kernel in kernels for update in kernel.updates()]
    return all(one is cached[0] for one in cached)


# Fewer kernels that move different parts are not made one loop: it compiles sooner and runs slower.
_MANY = 8


class _Looped(eqx.Module):
    """The noise of kernels that are run by one loop."""

    noise: PyTree


class _Run(eqx.Module):
    """Kernels in succession, run by one loop where they can be."""

    kernels: tuple[Kernel, ...]
    stack: _Stack | None

    def distribute(self, make, keys):
        if self.stack is not None:
            stack = self.stack
            each = lambda varying, key: stack.kernel(varying).distribute(make, key)
            try:
                return _Looped(jax.vmap(each, out_axes=1)(stack.varying, keys))
            except _parts.Unlike:
                pass  # What form the parts have is only known where the state is.
        own = zip(self.kernels, keys, strict=True)
        return tuple(kernel.distribute(make, key) for kernel, key in own)

    def fold(self, advance, carry, noise):
        if not isinstance(noise, _Looped):
            for kernel, kernel_noise in zip(self.kernels, noise, strict=True):
                carry = kernel.fold(advance, carry, kernel_noise)
            return carry
        stack = self.stack
        assert stack is not None

        def body(carry, one):
            varying, kernel_noise = one
            return stack.kernel(varying).fold(advance, carry, kernel_noise), None

        return jax.lax.scan(body, carry, (stack.varying, noise.noise))[0]


def _runs(kernels: tuple[Kernel, ...]) -> list[_Run]:
    """The kernels, those in succession together that one loop can run."""
    whole = _Stack.of(kernels)
    if whole is not None:
        return [_Run(kernels, whole)]
    runs: list[_Run] = []
    begin = 0
    while begin < len(kernels):
        end = begin + 1
        while end < len(kernels) and _differ_in_part(kernels[begin], kernels[end]):
            end += 1
        alike = kernels[begin:end]
        stack = _Stack.of(_by_number(alike)) if len(alike) >= _MANY else None
        runs.append(_Run(alike, stack))
        begin = end
    return runs


def _part(kernel: Any) -> Any:
    """The `where` of a kernel that moves a part of the state."""
    return kernel.where if isinstance(kernel, Gibbs) else kernel.proposal.where


def _differ_in_part(first: Kernel, other: Kernel) -> bool:
    """Whether two kernels differ in nothing but arrays and the part that they move."""
    for kernel in (first, other):
        match kernel:
            case Gibbs() | MetropolisHastings(proposal=On()):
                pass
            case _:
                return False
    if type(first) is not type(other):
        return False
    return _Stack.of(_by_number((first, other))) is not None


def _by_number(kernels: tuple[Kernel, ...]) -> tuple[Kernel, ...]:
    """The kernels, each picking its part by its number among the parts of all."""
    wheres = tuple(_part(kernel) for kernel in kernels)
    picks = [_parts.OneOf(wheres, jnp.asarray(number)) for number in range(len(kernels))]
    own = zip(kernels, picks, strict=True)
    return tuple(eqx.tree_at(_part, kernel, pick) for kernel, pick in own)


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


def _densities_of(kernels):
    return {name: one for kernel in kernels for name, one in kernel.densities().items()}
