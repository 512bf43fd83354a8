"""compose: functions of expectations, without the bias of plugging in."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, overload

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, PyTree

from ._expectation import Differentiable, Expectation
from .base import validate
from .base.sums import mean_of_others
from .base.validate import Checked
from .core.admission import Unflatten
from .core.simulation import flatten
from .reports.report import RunChains

# With more parameters than this a report differentiates φ backward.
_MANY_PARAMETERS = 256


class Composition(Differentiable):
    """`φ(θ, m_1(θ), m_2(θ), ...)`; made by `diffmh.compose`."""

    def __init__(self, phi: Callable[..., PyTree], expectations: tuple[Differentiable, ...]):
        self.phi = phi
        self.expectations = expectations
        self.num_chains = expectations[0].num_chains

    def __repr__(self) -> str:
        name = getattr(self.phi, "__name__", self.phi)
        return f"Composition({name}, {', '.join(map(repr, self.expectations))})"

    def by(self, estimator):
        return Composition(self.phi, tuple(e.by(estimator) for e in self.expectations))

    def applicable(self, theta, key, *args):
        """The estimators that apply to every expectation, beginning with the first expectation's
        own. If all use the default, but with different numbers of alternatives, the default leads
        the list, and each expectation keeps its own number.
        """
        first, *rest = (e.applicable(theta, key, *args) for e in self.expectations)

        def applies_to_all(estimator):
            return all(any(eqx.tree_equal(estimator, one) for one in some) for some in rest)

        shared = list(filter(applies_to_all, first))
        given = [e.simulation.estimator for e in self.expectations if isinstance(e, Expectation)]
        same = len(given) == 1 + len(rest) and all(eqx.tree_equal(given[0], e) for e in given)
        return shared if applies_to_all(first[0]) or not same else [given[0], *shared]

    def per_chain(self, theta, key=None, *args):
        values = [e.per_chain(theta, key, *args) for e, key in self._with_keys(key)]
        return pseudo_values(self.phi, theta, tuple(values))

    @property
    def num_steps(self) -> int:
        return sum(e.num_steps for e in self.expectations)

    def run_chains(self, theta, key=None, *args, course=None):
        # Chain c of every expectation goes into pseudo-value c: errors are over chains too.
        runs = [e.run_chains(theta, key, *args, course=course) for e, key in self._with_keys(key)]
        return composed_chains(self.phi, runs)

    @property
    def mesh(self):
        return next((e.mesh for e in self.expectations if e.mesh is not None), None)

    def _with_keys(self, key):
        validate.typed_key(key)
        # Independent chains for each expectation; one alone has the chains of its own call.
        count = len(self.expectations)
        keys = [key] if count == 1 else jax.random.split(key, count)
        return list(zip(self.expectations, keys, strict=True))


def composed_chains(phi: Callable[..., PyTree], runs: list[RunChains]) -> RunChains:
    """The pseudo-values of `φ(θ, m_1, ...)` and their derivatives, from each chain's of every m."""
    theta = runs[0].theta
    means = tuple(run.unflatten(run.value) for run in runs)

    def one_chain():
        return jax.tree.map(lambda leaf: leaf[0], pseudo_values(phi, theta, means))

    def flat(theta, means):
        return jax.vmap(flatten, out_axes=-1)(pseudo_values(phi, theta, means))

    # Both are the chain rule ∂φ/∂θ + Σ ∂φ/∂m · dm/dθ; what differs is which factor is multiplied
    # first.
    many = ravel_pytree(theta)[0].size > _MANY_PARAMETERS
    value, jacobian = (_backward if many else _forward)(flat, theta, means, runs)

    def of_all(name):
        return tuple(dict.fromkeys(x for run in runs for x in getattr(run, name)))

    return RunChains(
        Unflatten.of(jax.eval_shape(one_chain)),
        theta,
        value,
        jacobian,
        tuple(outcome for run in runs for outcome in run.outcomes),
        of_all("jumps"),
        of_all("notes"),
        of_all("warnings"),
    )


class OverDraws(eqx.Module):
    """Averages over draws, whose batches `compose` takes as independent chains."""

    @abstractmethod
    def composed(self, phi: Callable[..., PyTree], averages: tuple[Any, ...]) -> Any:
        """`φ(θ, m_1(θ), ...)` of averages over draws, this one the first of them."""


def _forward(flat: Callable[..., Array], theta: PyTree, means: tuple, runs: list[RunChains]):
    """Value and derivative of `flat(theta, means)`, parameter by parameter."""
    flat_theta, unravel = ravel_pytree(theta)

    def along(direction, *slopes):
        d_means = tuple(run.unflatten(slope) for run, slope in zip(runs, slopes, strict=True))
        return jax.jvp(flat, (theta, means), (unravel(direction), d_means))

    directions = jnp.eye(flat_theta.size, dtype=flat_theta.dtype)
    value, jacobian = jax.vmap(along)(directions, *(run.jacobian for run in runs))
    return value[0], jacobian


def _backward(flat: Callable[..., Array], theta: PyTree, means: tuple, runs: list[RunChains]):
    """The same, output by output and chain by chain."""
    value, pullback = jax.vjp(flat, theta, means)
    basis = jnp.eye(value.size, dtype=value.dtype).reshape(-1, *value.shape)

    def row(cotangent):
        d_theta, d_means = pullback(cotangent)
        total = ravel_pytree(d_theta)[0]
        for run, d_mean in zip(runs, d_means, strict=True):
            # φ_c depends on the chains' means of all chains, so its derivative is a sum over both F
            # and C.
            own = jax.vmap(flatten, out_axes=-1)(d_mean)
            total = total + jnp.tensordot(run.jacobian, own, axes=2)
        return total

    return value, jax.lax.map(row, basis).T.reshape(-1, *value.shape)


@overload
def compose(phi: Callable[..., PyTree], *expectations: Differentiable) -> Composition: ...
@overload
def compose(phi: Callable[..., PyTree], *expectations: OverDraws) -> Any: ...
def compose(phi: Checked[Callable[..., PyTree]], *expectations: Checked[Any]) -> Any:
    """`φ(θ, m_1(θ), ...)` of expectations, with value and gradient free of the plug-in bias to
    order `1/C²`.

    With both factors of the chain rule from the same chains, `∇φ(m̂) · dm̂` is biased by their
    correlation, however good `m̂` and `dm̂` are. The C chains are independent, so the jackknife
    removes it: the value is the mean of the pseudo-values

        φ_c = φ(θ, m̄) + (C − 1) (φ(θ, m̄) − φ(θ, m̄_{−c}))

    with `m̄_{−c}` the mean of the other chains, its derivative is that of this expression, and the
    spread of `φ_c` gives the error. Exactly unbiased where φ is at most quadratic in the
    expectations (a variance, a heat capacity) and chains are differentiated one by one; the
    covariance of `Covariance` and `Stationary` is one between chains, which leaves a bias of order
    `1/C²` there too (with 8 pairs of 5 samples, 0.04 of the error).

    **Arguments**: `phi(theta, m_1, m_2, ...)`, any JAX function, whose own parameters may be
    differentiated as usual; expectations with equal `num_chains` of at least 2. Several
    expectations get independent keys; one gets the key itself. Or averages over draws, of
    `from_draws`, all over equally many chains and draws: batches of draws take the place of chains,
    and what is returned has `.run(theta, *args)` as they do; it is a function of theta if each of
    them was given `at`.

    >>> import jax, diffmh
    >>> density = lambda theta, x: -0.5 * (x / theta) ** 2
    >>> normal = diffmh.MetropolisHastings(density, diffmh.GaussianWalk(2.38))
    >>> length = dict(num_samples=2_000, burn_in=50, num_chains=64)
    >>> moments = diffmh.expectation(lambda theta, x: (x, x**2), normal, init=0.0, **length)
    >>> variance = diffmh.compose(lambda theta, m: m[1] - m[0] ** 2, moments)
    >>> value, gradient = jax.value_and_grad(variance)(1.0, jax.random.key(0))
    >>> abs(float(value) - 1) < 0.1, abs(float(gradient) - 2) < 0.5     # θ² and 2θ
    (True, True)
    """
    where = "compose(phi, *expectations)"
    validate.function(phi, where, "phi", "phi(theta, m_1, m_2, ...)")
    if not expectations:
        raise ValueError(f"`{where}` needs at least one expectation, got none.")
    means = [f"m_{i}" for i in range(1, len(expectations) + 1)]
    validate.takes(phi, where, "phi", "theta", *means)
    if all(isinstance(e, OverDraws) for e in expectations):
        return expectations[0].composed(phi, expectations)
    for e in expectations:
        if not isinstance(e, Differentiable):
            raise TypeError(
                f"`{where}` composes what `diffmh.expectation` or `diffmh.from_draws`"
                f" returns, and not both together, got {e!r}."
            )
    counts = sorted({e.num_chains for e in expectations})
    if len(counts) > 1:
        raise ValueError(f"`compose` pairs chains up and needs equal `num_chains`, got {counts}.")
    if counts[0] < 2:
        raise ValueError(
            "`compose` removes bias across chains and needs `num_chains` of at least 2, got 1."
        )
    return Composition(phi, expectations)


def pseudo_values(phi: Callable[..., PyTree], theta: PyTree, values: tuple[PyTree, ...]) -> PyTree:
    """The jackknife's pseudo-values of `φ(θ, mean of values)`, chains leading as in `values`."""
    num_chains = jax.tree.leaves(values)[0].shape[0]
    # Their mean is φ(θ, m̄) less an estimate of its bias of order 1/C (Quenouille 1956).
    means = jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), values)
    others = jax.tree.map(lambda leaf: mean_of_others(leaf, axis=0), values)
    of_all = _checked(phi(theta, *means))
    of_others = jax.vmap(lambda means: phi(theta, *means))(others)

    def pseudo(of_all, of_others):
        of_all = jnp.expand_dims(of_all, 0)
        return of_all + (num_chains - 1) * (of_all - of_others)

    return jax.tree.map(pseudo, of_all, of_others)


def _checked(value: PyTree) -> PyTree:
    """Refuse what `phi` must not return: integers have no derivative."""
    for leaf in jax.tree.leaves(validate.numbers(value, "`phi`")):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            raise TypeError(
                f"`compose(phi, ...)`: `phi` must return floats, got {jnp.result_type(leaf)}, whose"
                " derivative would be zero: let `f` of the expectation be the indicator or the"
                " count, whose mean is smooth in theta."
            )
        validate.real_dtype(jnp.result_type(leaf), "what `phi` of `compose(phi, ...)` returns")
    return value
