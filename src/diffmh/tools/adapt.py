"""adapt: step size and covariance of a proposal, set in a warm-up and then frozen."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Key, PyTree

from ..base import trees, validate
from ..base.validate import Checked
from ..core.decisions import Acceptance, accept_probability
from ..core.kernel import Kernel, Update
from ..core.parameters import Parameters
from ..fast.rounding import Barriers
from ..kernels import Hamiltonian, Langevin, MetropolisHastings
from ..kernels.metropolis import ProposalOfTheta
from ..proposals import GaussianWalk

# The covariance is estimated anew after each of so many windows, but the last.
_WINDOWS = 6
# More dimensions than this have only their variances estimated.
_DENSE = 64


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

    @property
    def dense(self) -> bool:
        """True if it has a use for more than variances."""
        return True


class _Walks(_Family):
    """Optimal acceptance: Gelman, Roberts and Gilks (1996)."""

    like: MetropolisHastings

    def acceptance(self, dimension):
        return 0.44 if dimension == 1 else 0.234

    def kernel(self, step, root):
        return MetropolisHastings(self.like.density, GaussianWalk(step * root), self.like.coupling)


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


class _Progress(eqx.Module):
    """The chains, and the step so far."""

    states: PyTree
    log_step: Float[Array, ""]
    time: Float[Array, ""]


def adapt(
    kernel: Checked[Kernel],
    theta: PyTree,
    key: Checked[Key[Array, ""]],
    *args: Any,
    init: PyTree | Callable[[Key[Array, ""]], PyTree],
    num_steps: Checked[int] = 1_200,
    num_chains: Checked[int] = 16,
) -> Kernel:
    """The kernel with step size and scales that suit the target: the step by the acceptance rate
    (Robbins and Monro), the scales by the samples' covariance, both in a warm-up and then frozen.

    **Arguments**

    - `kernel`: `MetropolisHastings` with a `GaussianWalk`, `Langevin` or `Hamiltonian`, each of a
      fixed step, of which nothing but the kind is used.
    - `init`, `num_chains`, `num_steps`: the warm-up's chains and the length of each.

    **Returns** a kernel of the same kind, whose steps depend on nothing any more: neither on the
    chain, so that it leaves its target invariant, nor on theta.

    Refused: other kernels, and inside `jit`.

    >>> import jax, diffmh
    >>> density = lambda theta, x: -0.5 * ((x - theta) / 100.0) ** 2
    >>> walk = diffmh.MetropolisHastings(density, diffmh.GaussianWalk(1.0))
    >>> adapted = diffmh.adapt(walk, 0.5, jax.random.key(0), init=0.0)
    >>> bool(150 < adapted.proposal.scale[0] < 350)                             # about 240
    True
    """
    validate.instance(kernel, Kernel, "adapt(kernel, theta, key, ...)", "kernel")
    theta, key = trees.strong(validate.theta(theta)), validate.typed_key(key)
    if not validate.concrete(kernel, theta, key, args):
        raise TypeError(
            "`adapt` looks at its chains and cannot be traced: call it outside of `jit`, `grad` and"
            " `vmap`, and use the kernel that it returns there."
        )
    num_chains = validate.count(num_chains, "adapt(num_chains=...)", least=2)
    length = validate.count(num_steps, "adapt(num_steps=...)", least=20 * _WINDOWS) // _WINDOWS
    key_start, key = jax.random.split(key)

    def start(key):
        return trees.strong(validate.state(init(key) if callable(init) else init, "`init`"))

    states = jax.vmap(start)(jax.random.split(key_start, num_chains))
    one, unravel = ravel_pytree(trees.take(states, 0))
    family = _family(kernel, unravel)
    _refuse_starts(kernel, theta, states, args)
    dense = family.dense and 1 < one.size <= _DENSE
    root = jnp.eye(one.size) if dense else jnp.ones(one.size)
    progress = _Progress(states, jnp.log(2.38 / one.size**0.5), jnp.zeros(()))
    *windows, last = jax.random.split(key, _WINDOWS)
    for now in windows:
        progress, _, samples = _window(family, theta, now, args, progress, root, length)
        root = _root(samples, dense)
    _, steps, _ = _window(family, theta, last, args, progress, root, length)
    return family.kernel(jnp.exp(jnp.mean(steps[length // 2 :])), root)


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


def _family(kernel: Kernel, unravel: Callable[[Array], PyTree]) -> _Family:
    match kernel:
        case MetropolisHastings(proposal=GaussianWalk()):
            return _Walks(kernel)
        case Langevin(update=ProposalOfTheta(has_own_parameters=False)):
            return _Langevins(kernel)
        case Hamiltonian(has_own_parameters=False):
            return _Hamiltonians(kernel, unravel)
    raise TypeError(
        "`adapt(kernel, ...)` sets the steps of `MetropolisHastings(density, GaussianWalk(...))`,"
        f" `Langevin` and `Hamiltonian`, none of them a function of theta, got {kernel}: for"
        " parameters of your own use `diffmh.tune`."
    )


@eqx.filter_jit
def _window(family: _Family, theta, key, args, progress: _Progress, root, length: int):
    """`length` steps of all chains with one set of scales: the logarithm of the step after each,
    and the flattened states.
    """
    parameters = Parameters(theta, args, Barriers(jnp.zeros(2, bool)), False)
    target = family.acceptance(root.shape[0])

    def move(kernel, x, key):
        ahead = kernel.distribute(lambda update, key: update.noise(key, x, 1), key)
        start = (kernel.start(parameters, x), jnp.zeros(()))
        state, accepted = kernel.fold(advance, start, trees.take(ahead, 0))
        return state.x, accepted

    def advance(update: Update, carry, noise):
        step = update.step(parameters, carry[0], noise)
        (decision,) = step.decisions
        assert isinstance(decision, Acceptance)
        return step.after, accept_probability(decision.log_ratio.primal)

    def step(progress: _Progress, key):
        kernel = family.kernel(jnp.exp(progress.log_step), root)
        keys = jax.random.split(key, jax.tree.leaves(progress.states)[0].shape[0])
        states, accepted = jax.vmap(lambda x, key: move(kernel, x, key))(progress.states, keys)
        gain = (progress.time + 1) ** -0.6
        log_step = progress.log_step + gain * (jnp.mean(accepted) - target)
        flat = jax.vmap(lambda x: ravel_pytree(x)[0])(states)
        return _Progress(states, log_step, progress.time + 1), (log_step, flat)

    # Each window's scales are new: the step starts to learn anew, but from where it is.
    begin = _Progress(progress.states, progress.log_step, jnp.zeros(()))
    progress, (steps, samples) = jax.lax.scan(step, begin, jax.random.split(key, length))
    return progress, steps, samples


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
