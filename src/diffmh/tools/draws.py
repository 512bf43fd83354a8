"""from_draws: the derivative of a posterior expectation from anybody's draws."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PyTree

from ..analysis import moving_jumps
from ..base import trees, validate
from ..base.validate import Checked
from ..core.admission import Unflatten, check_observable, check_scalar, refuse_jumps
from ..core.autodiff import not_differentiable
from ..core.simulation import flatten
from ..jaxprs import compat
from ..reports import diagnostics
from ..reports.convergence import autocorrelation_time, mean_and_error, split_r_hat
from ..reports.report import Report, RunChains, report

T = TypeVar("T")

# A batch is this many autocorrelation times long: its mean's variance is then 2 or 3 % too small.
_TIMES, _MOST_BATCHES, _LEAST_BATCHES = 20, 400, 8
# Draws that are evaluated at once, and series whose autocorrelation is estimated.
_AT_ONCE, _MOST_SERIES = 1024, 256


class FromDraws(eqx.Module):
    """`E[f(θ, x)]` over draws of `x`, and its derivative; made by `diffmh.from_draws`."""

    f: Callable[..., PyTree]
    log_density: Callable[..., Array]
    draws: PyTree

    def __repr__(self) -> str:
        chains, count = _shape(self.draws)
        return f"FromDraws({chains} chains of {count:,} draws)"

    def run(self, theta: PyTree, *args: Any) -> Report:
        """Value and gradient at the theta that the draws were made with, with errors that account
        for autocorrelation.
        """
        theta = not_differentiable(
            validate.theta(theta),
            "`from_draws(...).run` reports value and derivative of its own, and its draws are those"
            " of one theta: nothing else can be differentiated.",
        )
        theta, args = trees.strong(theta), trees.data(args)

        def f(theta, x):
            return validate.numbers(self.f(theta, x, *args), "`f`")

        def log_density(theta, x):
            return validate.numbers(self.log_density(theta, x, *args), "`log_density`")

        x = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[2:], leaf.dtype), self.draws)
        form = check_observable(jax.eval_shape(f, theta, x))
        check_scalar(jax.eval_shape(log_density, theta, x), theta, x)
        refuse_jumps(moving_jumps(log_density, theta, x), "log_density", moves=False)
        refuse_jumps(moving_jumps(f, theta, x), "f", moves=False)
        explicit = compat.depends_on(f, theta, x)
        found = _evaluate(self.f, self.log_density, theta, self.draws, args, explicit)
        return _summary(_AtDraws(*(np.asarray(part, float) for part in found)), theta, form)


def from_draws(
    f: Checked[Callable[..., PyTree]],
    log_density: Checked[Callable[..., Array]],
    draws: Any,
    *,
    state: Checked[Callable[[PyTree], PyTree]] | None = None,
) -> FromDraws:
    """Value and derivative of a posterior expectation from existing draws: of NUTS in NumPyro, Stan
    or PyMC, or of `diffmh.sample`.

        d/dθ E[f(θ, x)] = Cov(f(θ, x), ∂_θ log g(θ, x)) + E[∂_θ f(θ, x)]

    over the draws, with `g` the unnormalised density that they were drawn from. It holds for
    parameters of the density, and if the chains have forgotten where they began. Only the terms of
    `log_density` that contain both θ and `x` count, so a prior's alone will often do; and as the
    Jacobian of a change of variables does not depend on θ, draws may be in any of them.

    Errors come from the means over batches of successive draws, each some 20 autocorrelation times
    long (of f, and of the terms of the covariance), with Student's quantile for their number in
    `Report.interval`; chains that disagree become batches themselves.

    **Arguments**

    - `f(theta, x, *args)`: a pytree of real arrays. `log_density(theta, x, *args)`: a scalar.
    - `draws`: an ArviZ `DataTree` or `InferenceData`, of which `posterior` is taken; or a dict or
      any pytree of arrays `(chain, draw, ...)`. A state `x` has the same form without the two axes:
      of ArviZ's a dict by the variables' names.
    - `state`: a function that makes of such an `x` what `f` and `log_density` expect.

    **Returns** an object with `.run(theta, *args) -> Report`, where θ must be the one that the
    draws were made with.

    **Refused**: an f or a `log_density` that may jump in x at a place that depends on θ
    (`diffmh.continuous` vouches for what does not); arrays that disagree about chains and draws,
    draws that are not finite, fewer than 16 of them.

    >>> import jax, jax.numpy as jnp, diffmh
    >>> draws = {"x": 0.5 + jax.random.normal(jax.random.key(0), (4, 1_000))}      # N(θ, 1)
    >>> log_normal = lambda theta, x: -0.5 * (x["x"] - theta) ** 2
    >>> report = diffmh.from_draws(lambda theta, x: x["x"] ** 2, log_normal, draws).run(0.5)
    >>> low, high = report.interval(0.999)[1]
    >>> bool(low < 2 * 0.5 < high)                                  # E = θ² + 1
    True
    """
    where = "from_draws(f, log_density, draws)"
    validate.function(f, where, "f", "f(theta, x, *args) -> pytree of real arrays")
    validate.function(log_density, where, "log_density", "log_density(theta, x, *args) -> scalar")
    arrays = _arrays(draws)
    _refuse_unless_draws(arrays)
    if state is not None:
        validate.function(state, where, "state", "state(x) -> what f and log_density expect")

        def checked(x):
            return validate.state(state(x), "what `from_draws(state=...)` returns")

        arrays = jax.vmap(jax.vmap(checked))(arrays)
        _refuse_unless_draws(arrays)
    return FromDraws(f, log_density, arrays)


def _arrays(draws: Any) -> PyTree:
    """The posterior's variables by name, or the pytree itself."""
    posterior: Any = draws
    # A DataTree has children; ArviZ before 1.0 has an InferenceData, a mapping without data_vars.
    is_dataset = hasattr(draws, "data_vars") and not hasattr(draws, "children")
    if not isinstance(draws, dict) and not is_dataset:
        posterior = getattr(draws, "posterior", draws)
    if hasattr(posterior, "data_vars"):
        named = {}
        for name, variable in posterior.data_vars.items():
            if not {"chain", "draw"} <= set(variable.dims):
                raise ValueError(
                    f"`from_draws(draws=...)`: {name!r} has dimensions {variable.dims}, not 'chain'"
                    " and 'draw'."
                )
            named[str(name)] = np.asarray(variable.transpose("chain", "draw", ...))
        return trees.strong(named)
    return trees.strong(validate.state(posterior, "`from_draws(draws=...)`"))


def _refuse_unless_draws(arrays: PyTree) -> None:
    leaves = jax.tree_util.tree_leaves_with_path(arrays)
    shapes = {jax.tree_util.keystr(path): leaf.shape for path, leaf in leaves}
    if len({shape[:2] for shape in shapes.values()}) > 1 or len(leaves[0][1].shape) < 2:
        raise ValueError(
            "`from_draws(draws=...)`: every array must begin with the axes (chain, draw), the same"
            f" for all, got shapes {shapes}. Of NumPyro take `get_samples(group_by_chain=True)`."
        )
    chains, count = leaves[0][1].shape[:2]
    if chains * count < 2 * _LEAST_BATCHES:
        raise ValueError(
            f"`from_draws(draws=...)` needs at least {2 * _LEAST_BATCHES} draws for an error, got"
            f" {chains} × {count}."
        )
    for path, leaf in leaves:
        if not bool(jnp.all(jnp.isfinite(leaf))):
            raise ValueError(
                f"`from_draws(draws=...)`: `draws{jax.tree_util.keystr(path)}` is not finite."
            )


def _shape(draws: PyTree) -> tuple[int, int]:
    chains, count = jax.tree.leaves(draws)[0].shape[:2]
    return chains, count


@eqx.filter_jit
def _evaluate(f, log_density, theta, draws, args, explicit: bool):
    """f, `∂_θ log g` and `∂_θ f` at each draw: shapes `(C, n, F)`, `(C, n, P)` and `(C, n, P, F)`,
    the last `(C, n)` if f does not depend on θ.
    """
    flat_theta, unravel = ravel_pytree(theta)

    def value(flat, x):
        return flatten(f(unravel(flat), x, *args))

    def at_draw(x):
        score = jax.grad(lambda flat: log_density(unravel(flat), x, *args))(flat_theta)
        slope = jax.jacfwd(value)(flat_theta, x).T if explicit else jnp.zeros(())
        return value(flat_theta, x), score, slope

    shape = _shape(draws)
    joined = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), draws)
    found = jax.lax.map(at_draw, joined, batch_size=_AT_ONCE)
    return jax.tree.map(lambda leaf: leaf.reshape(*shape, *leaf.shape[1:]), found)


class _AtDraws(eqx.Module):
    """f, the score and f's own derivative at each draw; `slope` has no axes of P and F where f does
    not depend on θ.
    """

    value: Float[np.ndarray, "C n F"]
    score: Float[np.ndarray, "C n P"]
    slope: Float[np.ndarray, "C n *PF"]

    def batches(self, count: int) -> tuple[Float[np.ndarray, "F B"], Float[np.ndarray, "P F B"]]:
        """Value and derivative of `count` stretches of each chain, whose means are those of all
        draws.

        As for `Covariance()`, batch b gets `Cov_b + B/(B − 1) (f̄_b − f̄)(s̄_b − s̄)`, which is free of
        the bias from f̄ and s̄ where batches are independent.
        """
        chains, draws = self.value.shape[:2]
        length, num_batches = draws // count, chains * count

        def split(leaf):
            # Without the first few draws, where the length does not divide the chain.
            used = leaf[:, draws - count * length :]
            return used.reshape(num_batches, length, *leaf.shape[2:])

        # In double precision: covariances are small differences.
        value, score = split(self.value), split(self.score)
        mean = value.mean(axis=(0, 1))
        value, score = value - mean, score - score.mean(axis=(0, 1))
        values, scores = value.mean(axis=1), score.mean(axis=1)
        between = np.einsum("bp,bf->bpf", scores, values)
        within = np.einsum("blp,blf->bpf", score, value) / length - between
        slope = within + between * (num_batches / (num_batches - 1))
        if self.slope.ndim > 2:
            slope = slope + split(self.slope).mean(axis=1)
        return np.moveaxis(values + mean, 0, -1), np.moveaxis(slope, 0, -1)

    def series(self) -> Float[np.ndarray, "S C n"]:
        """The series that are averaged: f, and the terms of the covariance, at most
        `_MOST_SERIES` of each.
        """
        value = self.value - self.value.mean(axis=(0, 1))
        score = self.score - self.score.mean(axis=(0, 1))
        pairs = _some([(p, i) for p in range(score.shape[-1]) for i in range(value.shape[-1])])
        terms = [score[..., p] * value[..., i] for p, i in pairs]
        if self.slope.ndim > 2:
            terms = [t + self.slope[..., p, i] for t, (p, i) in zip(terms, pairs, strict=True)]
        return np.stack([*(value[..., i] for i in _some(range(value.shape[-1]))), *terms])


def _some(every: Sequence[T]) -> Sequence[T]:
    """At most `_MOST_SERIES` of them, evenly spread."""
    return every[:: -(-len(every) // _MOST_SERIES)]


def _summary(found: _AtDraws, theta: PyTree, form: PyTree) -> Report:
    chains, draws, num_values = found.value.shape
    series = found.series()
    time = max(map(autocorrelation_time, series))
    count = _batches_per_chain(chains, draws, time)
    value, jacobian = found.batches(count)
    _, error = mean_and_error(value)
    spread = found.value.reshape(-1, num_values).var(axis=0)
    few = chains * count < _LEAST_BATCHES or draws < _TIMES * time / 2
    return report(
        RunChains(
            Unflatten.of(form),
            theta,
            jnp.asarray(value),
            jnp.asarray(jacobian),
            (),
            notes=(
                f"by the covariance identity, from {chains} chains of {draws:,} draws in"
                f" {chains * count} batches; autocorrelation time {time:.3g}",
            ),
            warnings=tuple(diagnostics.of_draws(draws, time, _split_r_hat(series), few)),
            effective_samples=np.where(
                error > 0, spread / np.where(error > 0, error**2, 1.0), np.nan
            ),
        )
    )


def _batches_per_chain(chains: int, draws: int, time: float) -> int:
    """As many as keep a batch `_TIMES` autocorrelation times long, where the chains are long
    enough; a divisor of their length if one is near.
    """
    least = -(-_LEAST_BATCHES // chains) if chains < 4 else 1
    most = max(least, min(int(draws / (_TIMES * time)), _MOST_BATCHES // chains, draws // 2))
    divisors = [count for count in range(max(least, most // 2), most + 1) if draws % count == 0]
    return max(divisors, default=most)


def _split_r_hat(series: Float[np.ndarray, "S C n"]) -> float:
    """`√((n − 1)/n + B/W)` over the halves of the chains (Gelman and others 2013), n their length;
    the largest of the series.
    """
    half = series.shape[-1] // 2
    halves = np.concatenate([series[..., :half], series[..., half : 2 * half]], axis=1)
    within = halves.var(axis=-1, ddof=1).mean(axis=-1)
    return split_r_hat(halves.mean(axis=-1), within, base=(half - 1) / half)
