"""Proposal: the interface, and its faster form in which the noise is drawn ahead of the time
loop.
"""

# No `from __future__ import annotations` here: equinox reads `AbstractVar` off the annotation
# itself.

from abc import abstractmethod

import equinox as eqx
import jax
from jaxtyping import Array, Float, Key, PyTree

from .._lowering import rounding


class Proposal(eqx.Module):
    """`q(x' | x)`: subclass it, with these three, to write your own.

    - `sample(key, x)` draws `x'`, of the same structure, shapes and dtypes as `x`;
    - `log_prob(x, x_new)` is `log q(x_new | x)`, normalised;
    - `symmetric` says whether `q(x' | x) = q(x | x')` always: the accept ratio then skips it.

    An asymmetric example, a multiplicative walk on the positive numbers:

    >>> import jax, jax.numpy as jnp, diffmh
    >>> class LogWalk(diffmh.Proposal):
    ...     scale: float
    ...     symmetric: bool = False
    ...     def sample(self, key, x):
    ...         return x * jnp.exp(self.scale * jax.random.normal(key, x.shape))
    ...     def log_prob(self, x, x_new):
    ...         return jax.scipy.stats.norm.logpdf(jnp.log(x_new), jnp.log(x), self.scale) - jnp.log(x_new)
    >>> gamma = diffmh.MetropolisHastings(lambda shape, x: (shape - 1) * jnp.log(x) - x, LogWalk(1.0))

    `diffmh.check` tries what a proposal promises against what it does.
    """

    symmetric: eqx.AbstractVar[bool]

    @abstractmethod
    def sample(self, key: Key[Array, ""], x: PyTree) -> PyTree:
        """Draws `x' ~ q(· | x)`."""

    @abstractmethod
    def log_prob(self, x: PyTree, x_new: PyTree) -> Float[Array, ""]:
        """`log q(x_new | x)`."""


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
        noise = jax.tree.map(lambda leaf: leaf[0], self.noise(key, x, 1))
        # Settled, so that every use of the sample within a program sees the same bits.
        never = rounding.never(jax.random.fold_in(key, 0x6E6576))
        return rounding.settle(self.move(x, rounding.settle(noise, never)), never)


def draw(proposal: Proposal, key: Key[Array, ""], x: PyTree, num_steps: int) -> PyTree:
    """The randomness of `num_steps` proposals: noise where the proposal has it apart, else a key
    for each.
    """
    if isinstance(proposal, NoiseProposal):
        return proposal.noise(key, x, num_steps)
    return jax.random.split(key, num_steps)


def move(proposal: Proposal, x: PyTree, noise: PyTree) -> PyTree:
    """`x'` from `x` and one step's worth of `draw`."""
    return (
        proposal.move(x, noise)
        if isinstance(proposal, NoiseProposal)
        else proposal.sample(noise, x)
    )


def draw_one(proposal: Proposal, key: Key[Array, ""], x: PyTree) -> PyTree:
    """One step's worth of `draw`."""
    return jax.tree.map(lambda leaf: leaf[0], draw(proposal, key, x, 1))
