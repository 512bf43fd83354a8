"""Proposal and Coupling: the two interfaces, which speak of each other; and the faster form of a
proposal, in which the noise is drawn ahead of the time loop.
"""

# No `from __future__ import annotations` here: equinox reads `AbstractVar` off the annotation
# itself.

from abc import abstractmethod

import equinox as eqx
import jax
from jaxtyping import Array, Float, Key, PyTree

from ..base import trees, validate
from ..fast import rounding


class Proposal(eqx.Module):
    """`q(x' | x)`: subclass it, with these three, to write your own.

    - `sample(key, x)` draws `x'`, of the same structure, shapes and dtypes as `x`;
    - `log_prob(x, x_new)` is `log q(x_new | x)`, normalised;
    - `symmetric` says whether `q(x' | x) = q(x | x')` always: the accept ratio then skips it.

    An asymmetric example, a multiplicative walk on the positive numbers:

    >>> import jax, jax.numpy as jnp, diffmh
    >>> class LogWalk(diffmh.extend.Proposal):
    ...     scale: float
    ...     symmetric: bool = False
    ...     def sample(self, key, x):
    ...         return x * jnp.exp(self.scale * jax.random.normal(key, x.shape))
    ...     def log_prob(self, x, x_new):
    ...         ahead = jax.scipy.stats.norm.logpdf(jnp.log(x_new), jnp.log(x), self.scale)
    ...         return ahead - jnp.log(x_new)
    >>> log_density = lambda shape, x: (shape - 1) * jnp.log(x) - x
    >>> gamma = diffmh.MetropolisHastings(log_density, LogWalk(1.0))

    Three more may be given: `best_coupling()`, the coupling that suits it best; `refuse_start(x)`,
    which raises at states that it cannot move; and `conditions()`, the ranges of its parameters.

    `diffmh.check` tries what a proposal promises against what it does.
    """

    symmetric: eqx.AbstractVar[bool]

    @abstractmethod
    def sample(self, key: Key[Array, ""], x: PyTree) -> PyTree:
        """Draws `x' ~ q(· | x)`."""

    @abstractmethod
    def log_prob(self, x: PyTree, x_new: PyTree) -> Float[Array, ""]:
        """`log q(x_new | x)`."""

    def best_coupling(self) -> "Coupling | None":
        """The coupling under which two chains with this proposal meet soonest. A kernel takes it
        where its user names none.

        `None` leaves it to what kind of proposal it is: `MaximalReflection()` for a Gaussian one,
        `Maximal()` for a `FiniteProposal`, `CommonRandomNumbers()` for any other `NoiseProposal`,
        and `NearlyMaximal()` for all else.
        """
        return None

    def conditions(self) -> tuple[validate.Condition, ...]:
        """The ranges of its parameters, such as `Condition(self.scale > 0, self.scale,
        \"`LogWalk(scale=...)` must be positive")`. A proposal of which one is known not to hold
        cannot be made; where its parameters are functions of theta under `jit`, the result is NaN.
        """
        return ()

    def __check_init__(self):
        if validate.concrete(self):
            validate.require(self.conditions())

    def refuse_start(self, x: PyTree) -> None:
        """Raises `ValueError` where this is not a state that the proposal can move, naming what
        is wrong with it. `x` is one state whose values are known.
        """
        del x

    # A proposal moves all of a state; `On`, which moves a part, defines these three otherwise.
    # Whatever looks into a proposal asks them: `with_moved_part(x, moved_part(x_new)) == x_new`,
    # and `moved_part(x_new)` is drawn by `part_proposal` from `moved_part(x)`.

    @property
    def part_proposal(self) -> "Proposal":
        """The proposal of the part that moves."""
        return self

    def moved_part(self, x: PyTree) -> PyTree:
        """The part of `x` that it moves."""
        return x

    def with_moved_part(self, x: PyTree, part: PyTree) -> PyTree:
        """`x` with that part replaced."""
        return part


class Coupling(eqx.Module):
    """The joint proposal of two chains: given `x`, `x_new ~ q(· | x)` and `y`, draw `y_new`.
    Subclass it to write your own.

    It must keep two promises, which `diffmh.check` tries:

    - *marginal*: averaged over `x_new` and the key, `y_new ~ q(· | y)`; else the derivative is
      biased;
    - *faithful*: `y = x` implies `y_new = x_new` bit for bit, so that chains that met stay
      together.

    In the time loop `key` is the coupling's own, independent of `x_new`.

    >>> import jax, diffmh
    >>> class Antithetic(diffmh.extend.Coupling):        # for GaussianWalk: y moves against x
    ...     def propose(self, key, proposal, x, x_new, y):
    ...         return jax.numpy.where(x == y, x_new, y - (x_new - x))
    """

    @abstractmethod
    def propose(
        self, key: Key[Array, ""], proposal: Proposal, x: PyTree, x_new: PyTree, y: PyTree
    ) -> PyTree:
        """Draws `y_new`."""

    def mismatch(self, proposal: Proposal) -> str | None:
        """Why this coupling makes no sense for that proposal, to go on after "`MyCoupling()`"; or
        `None` if it does. A kernel refuses the pair by these words.
        """
        del proposal
        return None


class NoiseProposal(Proposal):
    """A proposal `x' = h(x, ε)` whose noise ε does not depend on where the chain is.

    The noise of many steps is then drawn at once, ahead of the time loop, which is several times
    faster than a key per step; and common random numbers are simply the same ε.
    """

    @abstractmethod
    def noise(self, key: Key[Array, ""], x: PyTree, num_steps: int) -> PyTree:
        """ε for `num_steps` steps along a leading axis; only the shapes and dtypes of `x` count."""

    @abstractmethod
    def move(self, x: PyTree, noise: PyTree) -> PyTree:
        """`h(x, ε)`."""

    def sample(self, key: Key[Array, ""], x: PyTree) -> PyTree:
        noise = trees.take(self.noise(key, x, 1), 0)
        # Every use of the sample within a program must see the same bits.
        opaque_false = rounding.opaque_false(jax.random.fold_in(key, 0x6E6576))
        # The noise too: a product in it that is contracted with a sum in `move` would round
        # differently in `log_prob`'s copy of it.
        moved = self.move(x, rounding.round_here(noise, opaque_false))
        return rounding.round_here(moved, opaque_false)


def proposal_noise(proposal: Proposal, key: Key[Array, ""], x: PyTree, num_steps: int) -> PyTree:
    """The randomness of `num_steps` proposals: its noise for a `NoiseProposal`, else a key for
    each.
    """
    if isinstance(proposal, NoiseProposal):
        return proposal.noise(key, x, num_steps)
    return jax.random.split(key, num_steps)


def move(proposal: Proposal, x: PyTree, noise: PyTree) -> PyTree:
    """`x'` from `x` and one step's worth of `proposal_noise`."""
    if isinstance(proposal, NoiseProposal):
        return proposal.move(x, noise)
    return proposal.sample(noise, x)


def draw_one(proposal: Proposal, key: Key[Array, ""], x: PyTree) -> PyTree:
    """One step's worth of `proposal_noise`."""
    return trees.take(proposal_noise(proposal, key, x, 1), 0)
