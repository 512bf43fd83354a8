"""hessian: second derivatives at equilibrium, with errors."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Key, PyTree

from .._expectation import Expectation
from ..base import trees, validate
from ..base.validate import Checked
from ..core.admission import Unflatten, refuse_jumps_of_slope
from ..core.autodiff import not_differentiable
from ..core.estimator import SecondOrder
from ..core.simulation import flatten
from ..jaxprs import compat
from ..reports.curvature import HessianReport, hessian_report
from ..reports.report import report
from .draws import FromDraws
from .examination import one_draw
from .weighted_report import WeightedBatches

_AGAIN = (
    "`diffmh.hessian(...)` is a second derivative, and third ones of chains are not estimated. What"
    " `diffmh.from_draws(..., at=theta)` returns has derivatives of every order."
)


class HessianOfChains(eqx.Module):
    """`d²E[f]/dθ²` of an expectation by chains; made by `diffmh.hessian`."""

    expectation: Expectation = eqx.field(static=True)

    def __call__(
        self, theta: PyTree, key: Checked[Key[Array, ""]] | None = None, *args: Any
    ) -> PyTree:
        """The Hessian, in the form of `jax.hessian`."""
        theta = trees.strong(not_differentiable(validate.theta(theta), _AGAIN))
        return jax.hessian(self.expectation)(theta, key, *args)

    def product(
        self,
        theta: PyTree,
        key: Checked[Key[Array, ""]] | None = None,
        *args: Any,
        direction: PyTree,
    ) -> PyTree:
        """The derivative of the gradient along a direction like theta, in the form of
        `jax.jacobian`. Nothing of the size of a Hessian is computed: its cost is that of a few
        gradients, however many parameters there are.
        """
        theta = trees.strong(not_differentiable(validate.theta(theta), _AGAIN))
        flat = ravel_pytree(_direction_like(theta, direction))[0]
        second, unflatten = self.expectation.hessian_product(theta, key, flat, args)
        _, unravel = ravel_pytree(theta)
        # Each of f's leaves has the parameters last, as `jax.jacobian` has them.
        found = unflatten(jnp.mean(second, axis=-1).T)
        by_value = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 0, -1), found)

        def like_theta(leaf):
            shaped = jax.vmap(unravel)(leaf.reshape(-1, leaf.shape[-1]))
            return jax.tree.map(
                lambda part: part.reshape(*leaf.shape[:-1], *part.shape[1:]), shaped
            )

        return jax.tree.map(like_theta, by_value)

    def run(
        self, theta: PyTree, key: Checked[Key[Array, ""]] | None = None, *args: Any
    ) -> HessianReport:
        """Value, gradient and Hessian of one run, with standard errors over the chains."""
        second = self.expectation.simulation.estimator.second_order()
        assert second is not None
        self.expectation.refuse_jumps_of_derivatives(theta, key, args)
        chains = self.expectation.by(second).run_chains(theta, key, *args)
        if not validate.concrete(chains):
            raise TypeError(
                "`.run` returns a report and cannot be traced: call the Hessian itself."
            )
        observed = chains.outcomes[0].observed
        found = second.second_derivative(observed.estimator, observed.value)
        return hessian_report(chains.unflatten, chains.theta, found, report(chains))


class HessianOfDraws(eqx.Module):
    """`d²E[f]/dθ²` from draws; made by `diffmh.hessian`."""

    draws: FromDraws

    def __call__(self, theta: PyTree, *args: Any) -> PyTree:
        """The Hessian, in the form of `jax.hessian`."""
        return jax.hessian(self.draws.located(theta))(theta, *args)

    def product(self, theta: PyTree, *args: Any, direction: PyTree) -> PyTree:
        """The derivative of the gradient along a direction like theta."""
        theta = trees.strong(validate.theta(theta))
        direction = _direction_like(theta, direction)
        gradient = jax.jacrev(lambda theta: self.draws.located(theta)(theta, *args))
        return jax.jvp(gradient, (theta,), (direction,))[1]

    def run(self, theta: PyTree, *args: Any) -> HessianReport:
        """Value, gradient and Hessian with standard errors from batches of successive draws."""
        theta = not_differentiable(validate.theta(theta), _AGAIN)
        theta, args = trees.strong(theta), trees.data(args)
        found = self.draws.examined(theta, args)
        _refuse_kinks(self.draws, theta, args)
        batches = WeightedBatches.of(self.draws.reweighted(theta, args), theta, found, order=2)
        second = np.moveaxis(np.asarray(batches.ratio.second), 0, -1)
        return hessian_report(Unflatten.of(found.form), theta, second, batches.report())


def _refuse_kinks(e: FromDraws, theta: PyTree, args: tuple[Any, ...]) -> None:
    x = one_draw(e.draws)
    form = compat.forms(theta)
    density = lambda theta, x: e.log_density(theta, x, *args)
    f = lambda theta, x: flatten(e.f(theta, x, *args))
    refuse_jumps_of_slope(density, form, x, "log_density")
    refuse_jumps_of_slope(f, form, x, "f")


def _direction_like(theta: PyTree, direction: PyTree) -> PyTree:
    """A user's direction with theta's types; refuses one of another form."""
    same = jax.tree.structure(direction) == jax.tree.structure(theta)
    if not same or trees.shapes(direction) != trees.shapes(theta):
        raise TypeError(
            "`product(direction=...)` must have the form of theta,"
            f" {trees.shapes(theta)}, got {trees.shapes(direction)}."
        )
    return jax.tree.map(lambda leaf, part: jnp.asarray(part, leaf.dtype), theta, direction)


def hessian(
    expectation: Checked[Expectation | FromDraws],
) -> HessianOfChains | HessianOfDraws:
    """The Hessian of an expectation at equilibrium, as a function `(theta, key, *args)`.

        ∂_ij E f = κ₃(f, s_i, s_j) + Cov(f, ∂_j s_i) + Cov(∂_i f, s_j) + Cov(∂_j f, s_i) + E ∂_ij f

    with `s = ∂_θ log g` and κ₃ the third joint cumulant. For chains every product of expectations
    is taken over different chains, which makes it unbiased once they have forgotten their start,
    and by `Stationary()` from any start; sums are kept, not paths, so memory does not grow with
    `num_samples`. For draws it is the derivative of the reweighted average.

    **Arguments**

    - `expectation`: what `diffmh.expectation(..., estimator=Covariance())` returns, with at least 3
      chains, or by `Stationary()`, from any start; or what `diffmh.from_draws` returns, which is
      called without a key.

    **Returns** an object that is called like `expectation` and gives what `jax.hessian` would: at
    each of f's leaves a pytree like theta of pytrees like theta. `.run` gives a report with errors,
    and `.product(theta, key, *args, direction=v)` the Hessian times v alone.

    **Refused**: other estimators, as those of the finite chain have no second derivative here; f or
    a log density whose derivative with respect to θ may jump in x at a place that depends on θ
    (`−|x − θ|`; one that is vouched for by `diffmh.continuous` is taken to be smooth).

    >>> import jax, diffmh
    >>> log_normal = lambda theta, x: -0.5 * (x - theta) ** 2
    >>> draws = 0.5 + jax.random.normal(jax.random.key(0), (4, 2_000))
    >>> square = diffmh.from_draws(lambda theta, x: x**2, log_normal, draws)
    >>> found = diffmh.hessian(square).run(0.5)
    >>> low, high = found.interval(0.999)
    >>> bool(low < 2 < high)                                     # E = θ² + 1
    True
    """
    if isinstance(expectation, FromDraws):
        return HessianOfDraws(expectation)
    where = "hessian(expectation)"
    if not isinstance(expectation, Expectation):
        raise TypeError(
            f"`{where}` takes what `diffmh.expectation(..., estimator=Covariance())` (or"
            " `Stationary()`) or"
            f" `diffmh.from_draws` returns, got {expectation!r}."
        )
    estimator = expectation.simulation.estimator
    second = estimator.second_order()
    if not isinstance(second, SecondOrder):
        raise ValueError(
            f"`{where}`: {type(estimator).__name__} has no second derivative. At equilibrium there"
            " is one: make the expectation with `estimator=diffmh.Covariance()` or"
            " `diffmh.Stationary()`, or take `diffmh.from_draws`."
        )
    second.refuse(expectation.simulation.kernel, 1, expectation.simulation.lag)
    if expectation.num_chains < 3:
        raise ValueError(
            f"`{where}` takes products of the means of three different chains: it needs"
            f" `num_chains` of at least 3, got {expectation.num_chains}."
        )
    return HessianOfChains(expectation)
