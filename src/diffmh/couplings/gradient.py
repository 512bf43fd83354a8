"""Common random numbers along the gradient, for Gaussian steps in many dimensions."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from ..base import trees, validate
from ..base.validate import Checked
from ..proposals import GaussianProposal
from .coupling import GaussianCoupling


class GradientCoupling(GaussianCoupling):
    """A coupling of Gaussian steps along a gradient, with one normal draw per step."""

    gradient: Callable[[PyTree], PyTree]

    def __init__(self, gradient: Checked[Callable[[PyTree], PyTree]]):
        self.gradient = validate.function(
            gradient, f"{type(self).__name__}(gradient)", "gradient", "state -> its gradient"
        )

    def keeps_apart(self, kind):
        return issubclass(kind, GaussianProposal)

    def noise(self, key, proposal, x, num_steps):
        return jax.random.normal(key, (num_steps,))


class GradientCommonRandomNumbers(GradientCoupling):
    """For Gaussian steps `x' = m(x) + L z`: the same noise, except that the components of the two
    steps along each chain's *own* gradient are equal (Papp and Sherlock, arXiv 2211.12585).

    In many dimensions, the component of a random-walk step along the gradient of the log density
    decides if it is accepted. If the chains share it, they accept and reject together, and
    contract. With `n_x = Lᵀ∇(x) / ‖Lᵀ∇(x)‖`, `n_y` likewise, and a fresh normal ζ:

        w = z + (ζ − n_x·z) n_x,      z_y = w + (n_x·z − n_y·w) n_y,      y' = m(y) + L z_y.

    `w` is standard normal and independent of `n_x·z`, so `z_y` is standard normal *for any
    directions*. Therefore `gradient` need not be exact and need not depend on theta. Use that of
    the log density at the initial theta:

    >>> import jax, jax.numpy as jnp, diffmh
    >>> log_density = lambda theta, x: -0.5 * jnp.sum((x - theta) ** 2)
    >>> gradient = jax.grad(lambda x: log_density(0.5, x))
    >>> far = diffmh.GradientCommonRandomNumbers(gradient)
    >>> walk = diffmh.GaussianWalk(2.38 / 50**0.5)
    >>> normal = diffmh.MetropolisHastings(log_density, walk, diffmh.TwoScale(far))

    By itself it brings chains close, but they never meet: use it within `TwoScale`. Within `On`,
    `gradient` takes the part that moves. Proposals that are not Gaussian raise an error.
    """

    def couple(self, proposal, x, x_new, y, primal_noise, noise):
        assert isinstance(proposal, GaussianProposal)
        shared, rest = _split(self.gradient, proposal, x, x_new, noise)
        return _joined(self.gradient, proposal, y, shared, rest)


class GradientReflection(GradientCoupling):
    """Like `GradientCommonRandomNumbers`, but the rest of the step is reflected: chains accept and
    reject together and approach each other.

    With `w` as there, `δ = L⁻¹(m(y) − m(x))` and `e = δ/‖δ‖`: `z_y = v + (n_x·z − n_y·v) n_y` where
    `v = w − 2(e·w)e`, which is standard normal as `w` is. It is intended for many dimensions of
    different scales, within `TwoScale`, which makes close chains meet. Compare `gradient_error`
    with that of `MaximalReflection` before you choose it. On an ellipse of scales 1 to 10, chains
    met twenty times sooner in 50 dimensions, about as soon in 20, later in 5. On a sphere they met
    later, or equally soon in 100 dimensions (`benchmarks/recoupling.py`). `distance=2` was always
    better than 1:

    >>> import jax, jax.numpy as jnp, diffmh
    >>> log_density = lambda theta, x: -0.5 * jnp.sum((x - theta) ** 2 / jnp.arange(1, 51) ** 2)
    >>> gradient = jax.grad(lambda x: log_density(0.5, x))
    >>> coupling = diffmh.TwoScale(diffmh.GradientReflection(gradient), distance=2.0)
    >>> normal = diffmh.MetropolisHastings(log_density, diffmh.GaussianWalk(2.0), coupling)

    Proposals that are not Gaussian raise an error.
    """

    def couple(self, proposal, x, x_new, y, primal_noise, noise):
        assert isinstance(proposal, GaussianProposal)
        shared, rest = _split(self.gradient, proposal, x, x_new, noise)
        apart = proposal.whiten(trees.subtract(proposal.mean(y), proposal.mean(x)))
        distance = trees.dot(apart, apart)
        # v = w − 2 (δ·w) δ / ‖δ‖²: a reflection, under which a standard normal stays one. Chains at
        # one place have δ = 0, and nothing is reflected.
        along = trees.dot(apart, rest) / jnp.where(distance > 0, distance, 1.0)
        mirrored = _moved(rest, -2 * along, apart)
        return _joined(self.gradient, proposal, y, shared, mirrored)


def _split(
    gradient, proposal: GaussianProposal, x: PyTree, x_new: PyTree, fresh: Array
) -> tuple[Array, PyTree]:
    """`n_x·z`, and `w`: z with that component replaced by a fresh one. Independent and normal."""
    z = proposal.whiten(trees.subtract(x_new, proposal.mean(x)))
    along = _direction(gradient, proposal, x)
    shared = trees.dot(along, z)
    return shared, _moved(z, fresh - shared, along)


def _joined(gradient, proposal: GaussianProposal, y: PyTree, shared: Array, rest: PyTree) -> PyTree:
    """`y'` with the shared component along y's own gradient."""
    along = _direction(gradient, proposal, y)
    z = _moved(rest, shared - trees.dot(along, rest), along)
    return trees.add(proposal.mean(y), proposal.colour(z))


def _direction(gradient, proposal: GaussianProposal, x: PyTree) -> PyTree:
    """`Lᵀ∇ / ‖Lᵀ∇‖`, or any other unit vector if the gradient is 0 or not finite."""
    slope = gradient(x)
    validate.same_form(slope, x, "what `gradient` returns")
    pulled = proposal.pull(slope)
    # Scaled first, so that the square of a large or a small gradient does not overflow or vanish.
    largest = jnp.max(jnp.stack([jnp.max(jnp.abs(leaf)) for leaf in jax.tree.leaves(pulled)]))
    steers = jnp.isfinite(largest) & (largest > 0)

    def scaled(leaf):
        return jnp.where(steers, leaf / largest, jnp.ones_like(leaf))

    pulled = jax.tree.map(scaled, pulled)
    length = jnp.sqrt(trees.dot(pulled, pulled))
    return jax.tree.map(lambda leaf: leaf / length, pulled)


def _moved(z: PyTree, amount: Array, direction: PyTree) -> PyTree:
    """`z + amount · direction`."""
    return jax.tree.map(lambda z, n: z + amount.astype(z.dtype) * n, z, direction)
