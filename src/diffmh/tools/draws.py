"""from_draws: the derivative of a posterior expectation from anybody's draws."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, PyTree

from .._compose import OverDraws
from ..adapters.posterior import OfModel
from ..analysis import Jump
from ..base import trees, validate
from ..base.validate import Checked
from ..core.admission import Unflatten
from ..core.autodiff import not_differentiable
from ..estimators.stein import refuse_unless_continuous
from ..reports.report import Report, RunChains, report
from .composed_draws import ComposedDraws
from .curve import Curve, curve_of
from .draw_averages import AtDraws, evaluate, run_of_draws
from .draw_controls import Coordinates
from .examination import Examination, Examinations, one_draw
from .intake import (
    GivenDraws,
    arrays_of,
    chains_and_draws,
    checked_weights,
    read,
    refuse_unless_draws,
)
from .reweighting import Reweighted, as_function, checked_at, refuse_another_form
from .weighted_report import WeightedBatches


class FromDraws(OverDraws):
    """`E[f(θ, x)]` over draws of `x`, and its derivative; made by `diffmh.from_draws`."""

    f: Callable[..., PyTree]
    log_density: Callable[..., Array]
    draws: PyTree
    # The theta that the draws were made with, where they are a function of theta.
    at: PyTree = None
    weights: np.ndarray | None = None
    sampler: GivenDraws = GivenDraws()
    control: Literal["stein"] | None = eqx.field(static=True, default=None)
    degree: int | None = eqx.field(static=True, default=None)
    examinations: Examinations = eqx.field(default_factory=Examinations, static=True)

    def __repr__(self) -> str:
        chains, count = chains_and_draws(self.draws)
        return f"FromDraws({chains} chains of {count:,} draws)"

    def __call__(self, theta: PyTree, *args: Any) -> PyTree:
        """`Σ w f / Σ w` at theta, with `w = exp(log g(θ, x) − log g(θ₀, x))`, θ₀ being that of the
        draws: an ordinary function of theta, which `jax.grad`, `jax.hessian` and `jax.vmap` take.
        NaN, with its derivatives, where fewer than 5 % of the draws are effective.
        """
        if self.at is None:
            raise TypeError(
                "To call `from_draws(f, log_density, draws)` as a function of theta, pass the theta"
                " that the draws were made with: `from_draws(..., at=theta)`. `.run` does not need"
                " it."
            )
        theta, args = trees.strong(validate.theta(theta)), trees.data(args)
        form = self.examined(theta, args).form
        flat = as_function(self.reweighted(theta, args), theta)
        return jax.tree.map(lambda leaf: leaf[0], Unflatten.of(form)(flat[:, None]))

    def run(self, theta: PyTree, *args: Any) -> Report:
        """Value and gradient with errors that account for autocorrelation: at the theta that the
        draws were made with, or near it if they were given `at`.
        """
        theta = not_differentiable(
            validate.theta(theta),
            "`from_draws(...).run` reports value and derivative of its own; to differentiate, call"
            " what `from_draws(..., at=theta)` returns.",
        )
        theta, args = trees.strong(theta), trees.data(args)
        if self.at is not None:
            found = self.examined(theta, args)
            return WeightedBatches.of(self.reweighted(theta, args), theta, found).report()
        return self.summarised(self.at_draws(theta, *args), theta, *args)

    def examined(self, theta: PyTree, args: tuple[Any, ...]) -> Examination:
        """The form of f's value. Refuses functions that cannot be differentiated over the draws,
        and a theta that is not like `at`.
        """
        if self.at is not None:
            refuse_another_form(theta, self.at)
        return self.examinations.of(self.f, self.log_density, theta, self.draws, args)

    def summarised(self, at: AtDraws, theta: PyTree, *args: Any) -> Report:
        """The report of what `at_draws` found."""
        form = self.examined(theta, args).form
        return report(run_of_draws(at, theta, form, *self._lines()))

    def run_chains(self, theta: PyTree, *args: Any, batches: int | None = None) -> RunChains:
        """Value and derivative of each batch; `batches` of each chain, or as many as suit them."""
        found = self.examined(theta, args)
        if self.at is not None:
            given = self.reweighted(theta, args)
            return WeightedBatches.of(given, theta, found, batches=batches).run()
        at = self.at_draws(theta, *args)
        return run_of_draws(at, theta, found.form, *self._lines(), batches)

    def composed(self, phi, averages):
        return ComposedDraws.of(phi, averages)

    def _lines(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The sampler's notes and warnings."""
        return tuple(self.sampler.notes()), tuple(self.sampler.warnings())

    def at_draws(self, theta: PyTree, *args: Any) -> AtDraws:
        """f, score and f's own derivative at each draw, with the control variates, if wanted."""
        found = self.examined(theta, args)
        controlled = self.control is not None
        if controlled:
            # Integration by parts loses the boundary terms of a jump.
            refuse_unless_continuous(lambda: self.jumps_in_x(theta, *args), one_draw(self.draws))
        parts = evaluate(
            self.f, self.log_density, theta, self.draws, args, found.explicit, controlled
        )
        value, score, slope, *coordinates = (np.asarray(part, float) for part in parts)
        made = AtDraws(value, score, slope, self.weights)
        if not controlled:
            return made
        at = Coordinates(*(part.reshape(-1, part.shape[-1]) for part in coordinates))
        return made.controlled(at, self.degree)

    def jumps_in_x(self, theta: PyTree, *args: Any) -> list[Jump]:
        """The places where the density may jump in continuous x, wherever they are."""
        return self.examinations.jumps_in_x(self.log_density, theta, self.draws, args)

    def reweighted(self, theta: PyTree, args: tuple[Any, ...]) -> Reweighted:
        """The draws with their weights; all the same if `at` was not given."""
        at = theta if self.at is None else self.at
        return Reweighted(self.f, self.log_density, at, self.draws, args)

    def located(self, theta: PyTree) -> FromDraws:
        """The same draws as a function of theta: made at this theta, if `at` was not given."""
        if self.weights is not None or self.control is not None:
            raise ValueError(
                "second derivatives and the evidence compute weights of their own: make"
                " `from_draws(...)` without `weights` and `control`."
            )
        # θ₀ of the weights is where the draws were made, a constant: differentiated with it, log w
        # would be 0 and its derivatives would vanish.
        at = jax.lax.stop_gradient(theta)
        return dataclasses.replace(self, at=at) if self.at is None else self

    def curve(self, thetas: PyTree, *args: Any, name: Checked[str] | None = None) -> Curve:
        """Values along a grid of thetas with errors, effective sizes and Pareto k̂, for
        `plots.curve`.

        `thetas` is like theta, with a leading axis; or, with `name`, the values of that entry of a
        dict theta, the others staying where the draws were made.
        """
        return curve_of(self, thetas, args, name)


def from_draws(
    f: Checked[Callable[..., PyTree]],
    log_density: Checked[Callable[..., Array]],
    draws: Any,
    *,
    at: PyTree = None,
    state: Checked[Callable[[PyTree], PyTree]] | None = None,
    weights: Any = None,
    control: Checked[Literal["stein"]] | None = None,
    degree: Checked[int] | None = None,
    unconstrained: Checked[bool] = False,
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
    - `draws`: an ArviZ `DataTree` or `InferenceData`, of which `posterior` is taken, or a path to
      one in netCDF or zarr; a NumPyro `MCMC` that has run; a stack of BlackJAX' states, of which
      `position` is taken; or a dict or any pytree of arrays `(chain, draw, ...)`. They may be
      thinned. A state `x` has the same form without the two axes: from ArviZ, a dict by the
      variables' names. Divergences are reported where the source knows them.
    - `at`: the θ₀ that the draws were made with. The result is then an ordinary function of θ near
      θ₀, by reweighting.
    - `state`: a function that converts such an `x` to what `f` and `log_density` expect.
    - `weights`: importance weights `(chain, draw)` up to a factor, for draws of another
      distribution: means are `Σ w f / Σ w`, in value, covariance and errors.
    - `control="stein"`: Stein's control variates, often for ten to a hundred times less variance.
      Functions `Δφ + ∇φ · ∇_x log g` of mean zero, φ the monomials in the real coordinates of x,
      are subtracted with coefficients from other draws (`docs/mathematics.md`). `log_density` must
      then be the complete density, not only its terms with θ. The coordinates must take every real
      value, which `unconstrained=True` declares, and must have moments of the degree in use.
    - `degree`: the highest degree of the monomials, 0 to 3. If left out, as high as a tenth of the
      draws allows. The degree in use, 0 included, is chosen on other draws.

    **Returns** an object with `.run(theta, *args) -> Report`, where θ must be the one that the
    draws were made with, unless `at` says which that is. With `at`, calling it with
    `(theta, *args)` gives

        Ê(θ) = Σ w f(θ, x) / Σ w,    w = exp(log g(θ, x) − log g(θ₀, x))

    which JAX differentiates to any order and maps over a grid; memory is that of some thousand
    draws. It is NaN where the effective size `(Σw)²/Σw²` is below 5 % of the draws. `.run` raises
    an error there, and where Pareto k̂ of the weights is above 0.7, else it reports both; `.curve`
    has them along a grid, for `plots.curve`.

    **Refused**: an f or a `log_density` that may jump in x at a place that depends on θ
    (`diffmh.continuous` vouches for what does not); arrays that disagree about chains and draws,
    draws that are not finite, fewer than 16 of them; negative weights; more than one of `at`,
    `weights` and `control`; with `control="stein"` a density that is not proved continuous in x,
    coordinates that were not declared unconstrained, integers alone; derivatives of order k + 1
    where one of order k of f or `log_density` may jump so (one that is vouched for is taken to be
    smooth).

    >>> import jax, jax.numpy as jnp, diffmh
    >>> draws = {"x": 0.5 + jax.random.normal(jax.random.key(0), (4, 1_000))}      # N(θ, 1)
    >>> log_normal = lambda theta, x: -0.5 * (x["x"] - theta) ** 2
    >>> report = diffmh.from_draws(lambda theta, x: x["x"] ** 2, log_normal, draws).run(0.5)
    >>> low, high = report.interval(0.999)[1]
    >>> bool(low < 2 * 0.5 < high)                                  # E = θ² + 1
    True
    >>> stein = dict(control="stein", unconstrained=True)
    >>> report = diffmh.from_draws(lambda theta, x: x["x"], log_normal, draws, **stein).run(0.5)
    >>> round(float(report.gradient), 4), float(report.gradient_error) < 1e-4      # E = θ
    (1.0, True)
    """
    where = "from_draws(f, log_density, draws)"
    validate.function(f, where, "f", "f(theta, x, *args) -> pytree of real arrays")
    validate.function(log_density, where, "log_density", "log_density(theta, x, *args) -> scalar")
    _check_control(control, degree, unconstrained)
    _refuse_together(at=at, weights=weights, control=control)
    given = read(draws)
    if state is None:
        _refuse_sites(log_density, given)
    arrays = arrays_of(given)
    refuse_unless_draws(arrays)
    if state is not None:
        validate.function(state, where, "state", "state(x) -> what f and log_density expect")

        def checked(x):
            return validate.state(state(x), "what `from_draws(state=...)` returns")

        arrays = jax.vmap(jax.vmap(checked))(arrays)
        refuse_unless_draws(arrays)
    at = None if at is None else checked_at(at)
    weights = None if weights is None else checked_weights(weights, arrays)
    return FromDraws(f, log_density, arrays, at, weights, given.sampler(), control, degree)


def _refuse_sites(log_density: Any, given: GivenDraws) -> None:
    """A posterior's density of sites on their supports is another number, not an error."""
    function = getattr(log_density, "vouched_for", log_density)
    if given.of_model and isinstance(getattr(function, "__self__", None), OfModel):
        raise ValueError(
            "`from_draws(f, posterior.log_density, draws)`: this density takes unconstrained"
            " states, and the draws are the sites of a model: pass"
            " `state=lambda sites: posterior.unconstrain(posterior.theta, sites)`, or"
            " `draws.unconstrained_posterior` of `posterior.sample`; or use `diffmh.sensitivity`."
        )


def _refuse_together(**given: Any) -> None:
    """Each is another way to weigh the draws: one at a time."""
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise ValueError(
            f"`from_draws` takes one of `at`, `weights` and `control`, got {' and '.join(named)}."
        )


def _check_control(control: Any, degree: Any, unconstrained: Any) -> None:
    unconstrained = validate.flag(unconstrained, "from_draws(unconstrained=...)")
    if degree is not None:
        validate.count(degree, "from_draws(degree=...)", least=0)
        if degree > 3 or control is None:
            raise ValueError(
                "`from_draws(degree=...)` must be from 0 to 3 and needs `control='stein'`, got"
                f" degree={degree} and control={control!r}."
            )
    if control is None:
        return
    validate.choice(control, "from_draws(control=...)", ("stein",))
    if not unconstrained:
        raise ValueError(
            "`from_draws(control='stein')` needs coordinates that take every real value. If these"
            " do, declare it with `unconstrained=True`. Transform positive or bounded quantities"
            " first (`state=...`), with the Jacobian in `log_density`."
        )
