"""compare: several estimators of one expectation on the same chains."""

from __future__ import annotations

from typing import Any

from jaxtyping import Array, Key, PyTree

from .._expectation import Differentiable
from ..base import validate
from ..base.validate import Checked
from ..reports.comparison import Comparison


def compare(
    expectation: Checked[Differentiable], theta: PyTree, key: Checked[Key[Array, ""]], *args: Any
) -> Comparison:
    """Runs several estimators on the same chains, and says which costs least: the one in use,
    `StochasticDerivative` with some numbers of alternatives and with the control by the covariance,
    `Score` and `Covariance`, where they apply.

    For each: value, gradient ± error over the chains, seconds per run, variance × time and how far
    its gradient lies from that of the estimator in use, chain by chain. The variance that a given
    time buys is in proportion to variance × time, so the least is recommended, among estimators of
    the quantity that was asked for: `StochasticDerivative` and `Score` estimate the derivative of
    the finite chain, `Covariance` and `Stationary` that of its equilibrium. One whose gradient
    differs from that in use by more than four standard errors is not recommended. Where
    `Stationary` is in use, `Covariance` is shown and not recommended: it is right only if the
    chains have reached equilibrium, and a bias within their error is not seen.

    **Arguments**: what `diffmh.expectation` or `diffmh.compose` returned, and then the arguments of
    its `.run`.
    Each estimator is compiled once and run four times.

    **Returns** a `Comparison`: print it, draw it with `plots.compare`, or take `.recommended`.

    **Refused**: a single chain, which gives no error; programs of `diffmh.sad`, whose own report
    compares its estimators.

    >>> import jax, diffmh
    >>> from diffmh.models import mixture
    >>> p = diffmh.expectation(mixture.indicator, mixture.sampler(), init=0, num_samples=200)
    >>> found = diffmh.compare(p, 0.4, jax.random.key(0))
    >>> [type(row.estimator).__name__ for row in found.rows][-2:]
    ['Score', 'Covariance']
    """
    where = "compare(expectation, theta, key)"
    made: Differentiable = validate.instance(expectation, Differentiable, where, "expectation")
    return made.compare(theta, key, *args)
