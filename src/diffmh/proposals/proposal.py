"""Proposal and Coupling: the two interfaces, which refer to each other; and the faster form of a
proposal, whose noise is drawn ahead of the time loop.
"""

# No `from __future__ import annotations` here: equinox needs `AbstractVar` as an object, not text.

from abc import abstractmethod

import equinox as eqx
import jax
from jaxtyping import Array, Float, Key, PyTree

from ..base import trees, validate
from ..fast import rounding


class Proposal(eqx.Module):
    """`q(x' | x)`. To write your own, subclass it with these three members:

    - `sample(key, x)` draws `x'`, of the same structure, shapes and dtypes as `x`;
    - `log_prob(x, x_new)` is `log q(x_new | x)`, normalised;
    - `symmetric` is True if `q(x' | x) = q(x | x')` always: then the accept ratio omits it.

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

    Three more members are optional: `best_coupling()`, the coupling that suits it best;
    `refuse_start(x)`, which raises an error at states that it cannot move; and `conditions()`, the
    ranges of its parameters.

    `diffmh.check` tests that a proposal does what it declares.
    """

    symmetric: eqx.AbstractVar[bool]

    @abstractmethod
    def sample(self, key: Key[Array, ""], x: PyTree) -> PyTree:
        """Draw `x' ~ q(· | x)`."""

    @abstractmethod
    def log_prob(self, x: PyTree, x_new: PyTree) -> Float[Array, ""]:
        """`log q(x_new | x)`."""

    def best_coupling(self) -> "Coupling | None":
        """The coupling under which two chains with this proposal meet soonest. A kernel uses it
        unless the user gives another.

        With `None` it depends on the class: `MaximalReflection()` for Gaussian proposals,
        `Maximal()` for a `FiniteProposal`, `CommonRandomNumbers()` for any other `NoiseProposal`,
        and `NearlyMaximal()` for all others.
        """
        return None

    def conditions(self) -> tuple[validate.Condition, ...]:
        """The ranges of its parameters, such as `Condition(self.scale > 0, self.scale,
        \"`LogWalk(scale=...)` must be positive")`. Creating a proposal that violates one raises an
        error. If the parameters are functions of theta under `jit`, the result is NaN.
        """
        return ()

    def __check_init__(self):
        if validate.concrete(self):
            validate.require(self.conditions())

    def refuse_start(self, x: PyTree) -> None:
        """Raise a `ValueError` that says what is wrong if the proposal cannot move this state. `x`
        is one state with known values.
        """

    # A proposal moves the complete state; only `On`, which moves a part, overrides these three.
    # Invariant: `with_moved_part(x, moved_part(x_new)) == x_new`, and `part_proposal` draws
    # `moved_part(x_new)` from `moved_part(x)`.

    @property
    def part_proposal(self) -> "Proposal":
        """The proposal of the part that moves."""
        return self

    def moved_part(self, x: PyTree) -> PyTree:
        """The part of `x` that moves."""
        return x

    def with_moved_part(self, x: PyTree, part: PyTree) -> PyTree:
        """`x` with that part replaced."""
        return part


class Coupling(eqx.Module):
    """The joint proposal of two chains: given `x`, `x_new ~ q(· | x)` and `y`, draw `y_new`.
    Subclass it to write your own.

    It must satisfy two conditions, which `diffmh.check` tests:

    - *marginal*: averaged over `x_new` and the key, `y_new ~ q(· | y)`; otherwise the derivative is
      biased;
    - *faithful*: `y = x` implies `y_new = x_new` bit for bit, so that chains that have met stay
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
        """The reason why this coupling does not fit the proposal, as a phrase that continues
        "`MyCoupling()`"; `None` if it fits. The kernel's error message contains it.
        """
        return None

    def keeps_apart(self, kind: type[Proposal]) -> bool:
        """True if chains that are at different places certainly stay so, but for rounding, under
        proposals of this kind: estimators for which chains must meet refuse the pair.
        """
        return False


class NoiseProposal(Proposal):
    """A proposal `x' = h(x, ε)` whose noise ε does not depend on the state.

    The noise of many steps is drawn at once, ahead of the time loop, which is several times faster
    than a key for each step. Common random numbers are simply the same ε.
    """

    @abstractmethod
    def noise(self, key: Key[Array, ""], x: PyTree, num_steps: int) -> PyTree:
        """ε for `num_steps` steps along a leading axis. Only shapes and dtypes of `x` are used."""

    @abstractmethod
    def move(self, x: PyTree, noise: PyTree) -> PyTree:
        """`h(x, ε)`."""

    def sample(self, key: Key[Array, ""], x: PyTree) -> PyTree:
        noise = trees.take(self.noise(key, x, 1), 0)
        # Every use of the sample within a program must see the same bits.
        opaque_false = rounding.opaque_false(jax.random.fold_in(key, 0x6E6576))
        # So must the noise: if a product in it were contracted with a sum in `move`, it would round
        # differently in the copy that `log_prob` uses.
        moved = self.move(x, rounding.round_here(noise, opaque_false))
        return rounding.round_here(moved, opaque_false)


def proposal_noise(proposal: Proposal, key: Key[Array, ""], x: PyTree, num_steps: int) -> PyTree:
    """The randomness of `num_steps` proposals: the noise of a `NoiseProposal`, otherwise one key
    for each step.
    """
    if isinstance(proposal, NoiseProposal):
        return proposal.noise(key, x, num_steps)
    return jax.random.split(key, num_steps)


def move(proposal: Proposal, x: PyTree, noise: PyTree) -> PyTree:
    """`x'` from `x` and `proposal_noise` for one step."""
    if isinstance(proposal, NoiseProposal):
        return proposal.move(x, noise)
    return proposal.sample(noise, x)


def draw_one(proposal: Proposal, key: Key[Array, ""], x: PyTree) -> PyTree:
    """`proposal_noise` for one step."""
    return trees.take(proposal_noise(proposal, key, x, 1), 0)
