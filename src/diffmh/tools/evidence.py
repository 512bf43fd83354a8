"""evidence: gradient and Hessian of a log normaliser, with errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh
from jaxtyping import Array, Float, Key, PyTree

from .._expectation import Differentiable, expectation
from ..base import trees, validate
from ..base.validate import Checked
from ..core.adapted import Adapted, kernel_and_init
from ..core.autodiff import not_differentiable
from ..core.kernel import Kernel
from ..core.parameters import jacobian
from ..estimators import Covariance
from ..jaxprs.once import once
from .draws import FromDraws, from_draws
from .evidence_report import EvidenceReport, ObservedTerm
from .reweighting import checked_at

_NOT_AGAIN = (
    "`diffmh.evidence(...)` returns a gradient and a Hessian, which cannot be differentiated"
    " further."
)


class Curvature(NamedTuple):
    """Gradient and Hessian of a log normaliser, as `jax.grad` and `jax.hessian` would give them."""

    gradient: PyTree
    hessian: PyTree


class ScoreOfDensity(eqx.Module):
    """`s = ∂_θ log g(θ, x)` as f, flat: its mean is `∂ log Z`, and the derivative of its mean
    `Cov(s) + E ∂s` is `∂² log Z`. Beside it s at fixed θ, whose mean has the derivative `Cov(s)`.
    """

    log_density: Callable[..., Array]

    def __call__(self, theta: PyTree, x: PyTree, *args: Any) -> dict[str, Array]:
        score = jacobian(lambda theta: self.log_density(theta, x, *args), theta)
        return {"score": score, "fixed": jax.lax.stop_gradient(score)}


class Evidence(eqx.Module):
    """Gradient and Hessian of `log Z(θ)`, or of `observed(θ) − log Z(θ)`; made by
    `diffmh.evidence`.
    """

    scores: Differentiable | FromDraws
    observed: Callable[..., Array] | None = None

    def __repr__(self) -> str:
        sign = "log Z" if self.observed is None else "observed − log Z"
        return f"Evidence({sign}, {self.scores!r})"

    @property
    def has_chains(self) -> bool:
        return isinstance(self.scores, Differentiable)

    def __call__(self, theta: PyTree, *key_and_args: Any) -> Curvature:
        """Gradient and Hessian at `(theta, key, *args)`; from draws, at `(theta, *args)`."""
        theta = trees.strong(not_differentiable(validate.theta(theta), _NOT_AGAIN))
        args = key_and_args[1:] if self.has_chains else key_and_args
        scores = self.located(theta)

        def score(theta):
            return scores(theta, *key_and_args)["score"]

        value, pull = jax.vjp(score, theta)
        (rows,) = jax.vmap(pull)(jnp.eye(value.size, dtype=value.dtype))
        own = ObservedTerm.of(self.observed, theta, args)
        return Curvature(*own.trees(theta, value, jax.vmap(flat)(rows)))

    def run(self, theta: PyTree, *key_and_args: Any, **options: Any) -> EvidenceReport:
        """Gradient and Hessian with standard errors, over chains or batches of draws; `options` are
        those of an expectation's `.run`.
        """
        args = key_and_args[1:] if self.has_chains else key_and_args
        report = self.scores.run(theta, *key_and_args, **options)  # pyright: ignore
        theta = trees.strong(validate.theta(theta))
        return EvidenceReport.of(ObservedTerm.of(self.observed, theta, args), theta, report)

    def per_chain(
        self, theta: PyTree, key: Key[Array, ""], args: tuple[Any, ...], second: bool
    ) -> tuple[Float[Array, "C P"], Float[Array, "P P"] | None, Float[Array, "P P"] | None]:
        """Each chain's gradient; and with `second` the Hessian, and `Cov(s)`, of all of them."""
        scores = self.scores
        assert isinstance(scores, Differentiable)
        own = ObservedTerm.of(self.observed, theta, args)

        def each(theta):
            return scores.per_chain(theta, key, *args)

        if not second:
            return own.slope + own.sign * each(theta)["score"], None, None
        chains, pull = jax.vjp(each, theta)
        value = chains["score"]
        num_chains, size = value.shape
        # The cotangent e_i / C at every chain is that of component i of the mean over chains: it
        # pulls back to row i of the derivative. Of E s that is ∂² log Z; of E s at fixed θ, Cov(s).
        basis = jnp.broadcast_to(
            jnp.eye(size, dtype=value.dtype)[:, None] / num_chains, (size, num_chains, size)
        )
        zero = jnp.zeros_like(basis)
        (rows,) = jax.vmap(pull)({"score": basis, "fixed": zero})
        (fixed,) = jax.vmap(pull)({"score": zero, "fixed": basis})
        gradient = own.slope + own.sign * value
        hessian = own.second + own.sign * jax.vmap(flat)(rows)
        return gradient, hessian, jax.vmap(flat)(fixed)

    def located(self, theta: PyTree) -> Differentiable | FromDraws:
        """The scores as a function of theta; draws without `at` are taken to be made at this."""
        e = self.scores
        return e.located(theta) if isinstance(e, FromDraws) else e


def flat(tree: PyTree) -> Float[Array, "P"]:
    return ravel_pytree(tree)[0]


def evidence(
    log_density: Checked[Callable[..., Array]],
    kernel: Any,
    *,
    init: PyTree | Callable[[Key[Array, ""]], PyTree] = None,
    num_samples: Checked[int] | None = None,
    burn_in: Checked[int] = 0,
    num_chains: Checked[int] = 16,
    mesh: Checked[Mesh] | None = None,
    at: PyTree = None,
    observed: Checked[Callable[..., Array]] | None = None,
) -> Evidence:
    """The gradient and the Hessian (not the value) of the log normaliser
    `log Z(θ) = log ∫ g(θ, x) dx`, from chains or draws:

        ∂ log Z = E s,    ∂² log Z = Cov(s) + E ∂s,    s = ∂_θ log g(θ, x)

    **Empirical Bayes**: if `g = p(x | θ) p(data | x)`, then Z is `p(data | θ)`, the evidence for
    hyperparameters θ. x may be labels or any other discrete latents. −∂² log Z is the *observed*
    information, and `Cov(s)` the missing one.

    **Energy models**: if x itself is observed, the log likelihood is `log g(θ, data) − log Z(θ)`:
    give the first term as `observed`, as the mean over observations. `Cov(s)` is then the Fisher
    information of one.

    Unlike for expectations, terms of `log_density` that contain θ alone count (the `−log τ` of a
    normal prior of scale τ): they are in Z.

    **Arguments**

    - `log_density(theta, x, *args)`: `log g`, a scalar.
    - `kernel`: a kernel with this very `log_density`, or an `Adapted` of one, and `init`,
      `num_samples`, `burn_in`, `num_chains`, `mesh` as for `expectation`; or draws as for
      `from_draws`, with `at` the theta that they were made with.
    - `observed(theta, *args)`: a scalar from which log Z is subtracted.

    **Returns** an object that is called with `(theta, key, *args)`, or `(theta, *args)` for draws,
    and gives gradient and Hessian; `.run` gives them with errors; `optimise` takes it as an
    objective, with `newton=True` for Newton steps.

    **Refused**: kernels to which `Covariance()` does not apply, and a score that may jump in x at a
    place that depends on θ, as the second derivative would be wrong.

    >>> import jax, jax.numpy as jnp, diffmh
    >>> y = jnp.array([1.2, -2.3, 0.4, 3.1, -0.7, 2.2, -1.9, 0.3])       # y ~ N(x, 1), x ~ N(0, τ²)
    >>> def log_joint(log_tau, x):
    ...     return jnp.sum(-0.5 * (x / jnp.exp(log_tau)) ** 2 - log_tau - 0.5 * (y - x) ** 2)
    >>> normal = jax.random.normal(jax.random.key(0), (4, 2_000, 8))
    >>> draws = y / 2 + jnp.sqrt(0.5) * normal                            # the posterior at τ = 1
    >>> found = diffmh.evidence(log_joint, draws).run(0.0)
    >>> bool(jnp.abs(found.gradient - 2.3825) < 5 * found.gradient_error)
    True
    >>> bool(jnp.abs(found.hessian + 4) < 5 * found.hessian_error)
    True
    """
    where = "evidence(log_density, kernel, ...)"
    validate.function(log_density, where, "log_density", "log_density(theta, x, *args) -> scalar")
    if observed is not None:
        validate.function(observed, where, "observed", "observed(theta, *args) -> scalar")
    score = ScoreOfDensity(once(log_density))
    if isinstance(kernel, Adapted):
        kernel, init = kernel_and_init(kernel, init, where)
    if not isinstance(kernel, Kernel):
        _refuse_chain_options(init, num_samples, mesh)
        return Evidence(_scores_of_draws(score, log_density, kernel, at), observed)
    if at is not None:
        raise ValueError(
            f"`{where}`: `at` is for draws; a kernel samples at the theta of the call."
        )
    if num_samples is None or init is None:
        raise TypeError(f"`{where}` needs `init` and `num_samples` for a kernel.")
    # Another density of the same law may differ by terms in θ alone, which do not change the chains
    # and do change Z: so identity, not agreement, is what is asked for.
    known = {id(log_density), id(once(log_density))}
    if not known & set(kernel.densities()):
        raise ValueError(
            f"`{where}`: `log_density` must be the function that the kernel was made with, because"
            " terms of it that depend on θ alone count here."
        )
    chains = expectation(
        score,
        kernel,
        init=init,
        num_samples=num_samples,
        burn_in=burn_in,
        num_chains=num_chains,
        estimator=Covariance(),
        mesh=mesh,
    )
    return Evidence(chains, observed)


def _scores_of_draws(score: ScoreOfDensity, log_density, draws: Any, at: PyTree) -> FromDraws:
    at = None if at is None else checked_at(at)
    try:
        return from_draws(score, log_density, draws, at=at)
    except (TypeError, ValueError, OSError) as error:
        raise type(error)(f"`evidence(...)`: `kernel` must be a kernel or draws. {error}") from None


def _refuse_chain_options(init, num_samples, mesh) -> None:
    given = {"init": init, "num_samples": num_samples, "mesh": mesh}
    named = [name for name, value in given.items() if value is not None]
    if named:
        raise TypeError(
            f"`evidence(log_density, draws, ...)`: `{named[0]}` is for chains of a kernel, and"
            " these are draws: leave it out."
        )
