"""adapt: step sizes and covariances of proposals, set in a warm-up and then frozen."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Key, PyTree

from ..base import trees, validate
from ..base.validate import Checked
from ..core.adapted import Adapted
from ..core.decisions import Acceptance, accept_probability
from ..core.kernel import Kernel, Update
from ..core.parameters import Parameters
from ..fast.rounding import Barriers
from ..kernels import Cycle, Hamiltonian, Langevin, MetropolisHastings, Mixture, Repeat
from ..kernels.metropolis import ProposalOfTheta
from ..proposals import GaussianWalk, On

# The covariance is estimated anew after each of so many windows, but the last.
_WINDOWS = 6
# More dimensions than this have only their variances estimated.
_DENSE = 64
# A chain that accepts less than this share of a window's proposals is stuck.
_STUCK = 0.02
# A warm-up has so many steps, or so many for each dimension if these are more.
_STEPS, _STEPS_A_DIMENSION = 1_200, 60


class _Family(eqx.Module):
    """Kernels of one kind that differ in step and scales, and their best acceptance rate."""

    @abstractmethod
    def acceptance(self, dimension: int) -> float:
        """The acceptance rate to aim at."""

    @abstractmethod
    def kernel(self, step: Array, root: Array) -> Kernel:
        """The kernel of steps `step · root`, `root` being a factor of the covariance (a vector if
        it is diagonal).
        """

    def part(self, x: PyTree) -> PyTree:
        """The part of a state that it moves."""
        return x

    @property
    def dense(self) -> bool:
        """True if it has a use for more than variances."""
        return True


class _Walks(_Family):
    """Optimal acceptance: Gelman, Roberts and Gilks (1996). A walk of a part of the state stays on
    it, and scales that were given leaf by leaf stay so.
    """

    like: MetropolisHastings
    unravel: Callable[[Array], PyTree]

    def acceptance(self, dimension):
        return 0.44 if dimension == 1 else 0.234

    def part(self, x):
        return self.like.proposal.moved_part(x)

    def kernel(self, step, root):
        walk = GaussianWalk(step * root if self.dense else self.unravel(step * root))
        proposal = self.like.proposal
        moved = On(proposal.where, walk) if isinstance(proposal, On) else walk
        return MetropolisHastings(self.like.density, moved, self.like.coupling)

    @property
    def dense(self):
        return eqx.is_array(self.like.proposal.part_proposal.scale)


class _Langevins(_Family):
    """Optimal acceptance: Roberts and Rosenthal (1998)."""

    like: Langevin

    def acceptance(self, dimension):
        return 0.574

    def kernel(self, step, root):
        like = self.like.update
        return Langevin(like.density, step * root, like.coupling)


class _Hamiltonians(_Family):
    """Acceptance of 0.8, as in Stan and NumPyro."""

    like: Hamiltonian
    unravel: Callable[[Array], PyTree]

    def acceptance(self, dimension):
        return 0.8

    def kernel(self, step, root):
        return Hamiltonian(
            self.like.density, self.unravel(step * root), self.like.num_leapfrog_steps
        )

    @property
    def dense(self):
        return False


class _Setting(eqx.Module):
    """The logarithm of a family's step, and its factor of the covariance."""

    log_step: Float[Array, ""]
    root: Array


class _Piece(eqx.Module):
    """A kernel of a cycle: one to adapt, by its family, or one that runs as it is."""

    kernel: Kernel
    family: _Family | None
    dimension: int = eqx.field(static=True)

    @property
    def dense(self) -> bool:
        assert self.family is not None
        return self.family.dense and 1 < self.dimension <= _DENSE

    def at(self, setting: _Setting | None) -> Kernel:
        if self.family is None or setting is None:
            return self.kernel
        return self.family.kernel(jnp.exp(setting.log_step), setting.root)


class _Progress(eqx.Module):
    """The chains, and the setting of each piece so far, `None` for those that run as they are."""

    states: PyTree
    settings: tuple[_Setting | None, ...]


def adapt(
    kernel: Checked[Kernel],
    theta: PyTree,
    key: Checked[Key[Array, ""]],
    *args: Any,
    init: PyTree | Callable[[Key[Array, ""]], PyTree],
    num_steps: Checked[int] | None = None,
    num_chains: Checked[int] = 16,
) -> Adapted:
    """The kernel with step sizes and scales that suit the target: the step by the acceptance rate
    (Robbins and Monro), the scales by the samples' covariance, both in a warm-up and then frozen;
    and the states in which the warm-up's chains end.

    **Arguments**

    - `kernel`: `MetropolisHastings` with a `GaussianWalk`, of the state or of a part of it (`On`),
      `Langevin` or `Hamiltonian`, each with a fixed step; only the kind of kernel is used, not the
      step. Or a `Cycle`, `Mixture` or `Repeat` with some of these in it: each gets a step and
      scales of its own, and the other kernels (moves of labels) run as they are. So
      `posterior.kernel()` is adapted for a model with discrete sites too.
    - `init`, `num_chains`, `num_steps`: the warm-up's chains and the length of each, 1,200 or 60
      for each dimension if left out.

    Up to 64 dimensions have their covariance estimated, more of them their variances. A walk whose
    scales were given leaf by leaf has them leaf by leaf.

    **Returns** an `Adapted`. Its `kernel` is of the same kind. Its steps are fixed: they depend
    neither on the chain, so that it leaves its target invariant, nor on theta. Its `states` are
    where the chains are, and `diffmh.expectation`, `sample` and `sensitivity` continue from there
    if they get the `Adapted` as a kernel and no `init`.

    Refused: kernels without anything to adapt, and inside `jit`.

    >>> import jax, diffmh
    >>> density = lambda theta, x: -0.5 * ((x - theta) / 100.0) ** 2
    >>> walk = diffmh.MetropolisHastings(density, diffmh.GaussianWalk(1.0))
    >>> adapted = diffmh.adapt(walk, 0.5, jax.random.key(0), init=0.0)
    >>> bool(150 < adapted.kernel.proposal.scale[0] < 350)                      # about 240
    True
    >>> draws = diffmh.sample(adapted, 0.5, jax.random.key(1), num_samples=100)
    """
    validate.instance(kernel, Kernel, "adapt(kernel, theta, key, ...)", "kernel")
    theta, key = trees.strong(validate.theta(theta)), validate.typed_key(key)
    if not validate.concrete(kernel, theta, key, args):
        raise TypeError(
            "`adapt` inspects its chains and cannot be traced: call it outside of `jit`, `grad` and"
            " `vmap`, and use the kernel that it returns there."
        )
    num_chains = validate.count(num_chains, "adapt(num_chains=...)", least=2)
    key_start, key = jax.random.split(key)

    def start(key):
        return trees.strong(validate.state(init(key) if callable(init) else init, "`init`"))

    states = jax.vmap(start)(jax.random.split(key_start, num_chains))
    pieces = tuple(_piece(each, trees.take(states, 0)) for each in _parts(kernel))
    if all(piece.family is None for piece in pieces):
        raise _nothing_to_adapt(kernel)
    _refuse_starts(kernel, theta, states, args)
    if num_steps is None:
        num_steps = max(_STEPS, _STEPS_A_DIMENSION * max(piece.dimension for piece in pieces))
    length = validate.count(num_steps, "adapt(num_steps=...)", least=20 * _WINDOWS) // _WINDOWS
    progress = _Progress(states, tuple(map(_begin, pieces)))
    *windows, last = jax.random.split(key, _WINDOWS)
    for now in windows:
        progress = _window(pieces, theta, now, args, progress, length, jnp.asarray(False))
    progress = _window(pieces, theta, last, args, progress, length, jnp.asarray(True))
    made = (piece.at(one) for piece, one in zip(pieces, progress.settings, strict=True))
    return Adapted(_put_together(kernel, made), progress.states)


def _parts(kernel: Kernel) -> Iterator[Kernel]:
    """The kernels that it is put together from."""
    match kernel:
        case Cycle(kernels=kernels) | Mixture(kernels=kernels):
            for each in kernels:
                yield from _parts(each)
        case Repeat(kernel=repeated):
            yield from _parts(repeated)
        case _:
            yield kernel


def _put_together(kernel: Kernel, made: Iterator[Kernel]) -> Kernel:
    """The kernel with others in the places of `_parts`."""
    match kernel:
        case Cycle(kernels=kernels):
            return Cycle(*(_put_together(each, made) for each in kernels))
        case Mixture(kernels=kernels, probabilities=probabilities):
            others = [_put_together(each, made) for each in kernels]
            return Mixture(*others, probabilities=probabilities)
        case Repeat(kernel=repeated, num_steps=count):
            return Repeat(_put_together(repeated, made), count)
    return next(made)


def _piece(kernel: Kernel, x: PyTree) -> _Piece:
    """A kernel of a cycle on states like `x`."""
    match kernel:
        case (
            MetropolisHastings(proposal=GaussianWalk() as proposal)
            | MetropolisHastings(proposal=On(proposal=GaussianWalk()) as proposal)
        ):
            flat, unravel = ravel_pytree(proposal.moved_part(x))
            return _Piece(kernel, _Walks(kernel, unravel), flat.size)
        case Langevin(update=ProposalOfTheta(has_own_parameters=False)):
            return _Piece(kernel, _Langevins(kernel), trees.size(x))
        case Hamiltonian(has_own_parameters=False):
            flat, unravel = ravel_pytree(x)
            return _Piece(kernel, _Hamiltonians(kernel, unravel), flat.size)
    return _Piece(kernel, None, 0)


def _begin(piece: _Piece) -> _Setting | None:
    if piece.family is None:
        return None
    root = jnp.eye(piece.dimension) if piece.dense else jnp.ones(piece.dimension)
    return _Setting(jnp.log(2.38 / piece.dimension**0.5), root)


def _nothing_to_adapt(kernel: Kernel) -> TypeError:
    return TypeError(
        "`adapt(kernel, ...)` sets the steps of `MetropolisHastings(density, GaussianWalk(...))`,"
        " of the state or of a part of it (`On`), `Langevin` and `Hamiltonian`, none of them a"
        f" function of theta, or of a `Cycle` with one of them, got {kernel}: for parameters of"
        " your own use `diffmh.tune`."
    )


def _refuse_starts(kernel: Kernel, theta: PyTree, states: PyTree, args: tuple[Any, ...]) -> None:
    log_density = kernel.updates()[0].log_density
    found = jax.vmap(lambda x: log_density(theta, x, *args))(states)
    if found.ndim != 1:
        raise TypeError(
            "`adapt(kernel, ...)`: `log_density` must return a scalar, got shape"
            f" {found.shape[1:]} for `theta` of shape {trees.shapes(theta)} and this `init`: add"
            " the terms up with `jnp.sum`."
        )
    if not jnp.all(jnp.isfinite(found)):
        raise ValueError(
            "`adapt(init=...)` must be a state of finite log density, got"
            f" {found[jnp.argmin(jnp.isfinite(found))]} there: start inside the support."
        )


@eqx.filter_jit
def _window(
    pieces: tuple[_Piece, ...],
    theta: PyTree,
    key: Key[Array, ""],
    args: tuple[Any, ...],
    progress: _Progress,
    length: int,
    last: Bool[Array, ""],
) -> _Progress:
    """`length` steps of all chains with one set of scales, then new scales; after the last window
    the scales stay, and each step is the mean of its second half. Stuck chains start again.
    """
    parameters = Parameters(theta, args, Barriers(jnp.zeros(2, bool)), False)

    def move(kernel: Kernel, x: PyTree, key) -> tuple[PyTree, Array]:
        ahead = kernel.distribute(lambda update, key: update.noise(key, x, 1), key)
        start = (kernel.start(parameters, x), jnp.zeros(()))
        state, accepted = kernel.fold(advance, start, trees.take(ahead, 0))
        return state.x, accepted

    def advance(update: Update, carry, noise):
        step = update.step(parameters, carry[0], noise)
        decision = step.decisions[-1] if step.decisions else None
        if isinstance(decision, Acceptance) and jnp.ndim(decision.log_ratio.primal) == 0:
            return step.after, accept_probability(decision.log_ratio.primal)
        return step.after, carry[1]

    def step(progress: _Progress, given):
        key, time = given
        states, settings, rates = progress.states, list(progress.settings), []
        for number, piece in enumerate(pieces):
            setting, kernel = settings[number], piece.at(settings[number])
            own = jax.random.fold_in(key, number)
            keys = jax.random.split(own, jax.tree.leaves(states)[0].shape[0])
            states, accepted = jax.vmap(lambda x, key, k=kernel: move(k, x, key))(states, keys)
            if setting is not None:
                assert piece.family is not None
                # Each window's scales are new: the step learns anew, but from where it is.
                excess = jnp.mean(accepted) - piece.family.acceptance(piece.dimension)
                log_step = setting.log_step + (time + 1.0) ** -0.6 * excess
                settings[number] = _Setting(log_step, setting.root)
                rates.append(accepted)
        progress = _Progress(states, tuple(settings))
        steps = [None if one is None else one.log_step for one in settings]
        rate = jnp.min(jnp.stack(rates), axis=0)
        return progress, (steps, [_flat(piece, states) for piece in pieces], rate)

    times = jnp.arange(length, dtype=float)
    key_steps, key_replace = jax.random.split(key)
    keys = jax.random.split(key_steps, length)
    progress, (steps, samples, rates) = jax.lax.scan(step, progress, (keys, times))
    settings = [
        None if one is None else _concluded(piece, one, steps[number], samples[number], last)
        for number, (piece, one) in enumerate(zip(pieces, progress.settings, strict=True))
    ]
    moving = jnp.mean(rates[length // 2 :], axis=0) > _STUCK
    return _Progress(_replaced(key_replace, progress.states, moving), tuple(settings))


def _replaced(key: Key[Array, ""], states: PyTree, moving: Bool[Array, "C"]) -> PyTree:
    """The states, where each stuck chain has the state of a random one that moves, if any does.

    A Langevin kernel, for example, gets stuck in the tails, where the gradient is large. Moving a
    chain causes no bias: nothing is averaged in a warm-up, which may start chains anywhere.
    """
    logits = jnp.where(moving, 0.0, -jnp.inf)
    others = jax.random.categorical(key, logits, shape=moving.shape)
    stays = moving | ~jnp.any(moving)
    return trees.take(states, jnp.where(stays, jnp.arange(moving.size), others))


def _flat(piece: _Piece, states: PyTree) -> Float[Array, "C d"] | None:
    if piece.family is None:
        return None
    part = piece.family.part
    return jax.vmap(lambda x: ravel_pytree(part(x))[0])(states)


def _concluded(piece: _Piece, setting: _Setting, steps, samples, last) -> _Setting:
    """The setting after a window."""
    averaged = _Setting(jnp.mean(steps[steps.size // 2 :]), setting.root)
    renewed = _Setting(setting.log_step, _root(samples, piece.dense))
    return trees.select(last, averaged, renewed)


def _root(samples: Float[Array, "n C d"], dense: bool) -> Array:
    """A factor of the samples' covariance, drawn a little towards a small multiple of the identity
    as in Stan; the first half of the window is left out.
    """
    later = samples[samples.shape[0] // 2 :].reshape(-1, samples.shape[-1])
    count, spread = later.shape[0], jnp.var(later, axis=0)
    kept, little = count / (count + 5), 1e-3 * jnp.mean(spread) * 5 / (count + 5)
    if not dense:
        return jnp.sqrt(kept * spread + little)
    covariance = jnp.cov(later, rowvar=False)
    return jnp.linalg.cholesky(kept * covariance + little * jnp.eye(samples.shape[-1]))
