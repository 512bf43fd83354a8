"""A posterior: the density of somebody's model, its start, and its sites by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Key, PyTree

from .._expectation import Expectation, expectation
from ..base import trees, validate
from ..base.extras import needing
from ..base.validate import Checked
from ..core.adapted import Adapted
from ..core.kernel import Kernel
from ..estimators import Covariance
from ..kernels import Cycle, MetropolisHastings
from ..proposals import GaussianWalk, On, OneLabel, OtherState, Proposal
from .label_moves import SiteGibbs, Sites, label_move
from .nuts import Target, draw
from .other_density import with_density
from .summed_out import with_few_values

if TYPE_CHECKING:
    from xarray import DataTree


class OfModel(eqx.Module):
    """An object that has a model's density on unconstrained states as a method."""


class Posterior(eqx.Module):
    """A model's posterior, as `from_numpyro` and `from_pymc` return it.

    - `log_density(theta, x)`: the joint log density of latent sites and data on unconstrained
      states, the transforms' volume included. A state is a dictionary: real arrays by the names of
      the continuous sites, integers by those of the discrete ones.
    - `log_prior(theta, x)`, `log_likelihood(theta, x)`: its parts; the volume belongs to neither.
    - `log_prior_by_site(theta, x)`: the terms of the prior, by the names of the latent sites as the
      model knows them.
    - `constrain(theta, x)`: the sites as the model knows them, deterministic ones included;
      `unconstrain(theta, sites)` takes them back.
    - `init(key)`: a start by the model's own rule.
    - `theta`: the hyperparameters, by name.
    - `num_values`: for discrete sites of `0, ..., n − 1`, their n; `ranges`: the values of those
      that begin elsewhere.
    - `log_likelihoods(theta, x)`: the log likelihood of each observation, an array for each
      observed site by its name; their sum is `log_likelihood`.
    """

    log_density: Callable[[Sites, Sites], Array]
    log_prior: Callable[[Sites, Sites], Array]
    log_likelihood: Callable[[Sites, Sites], Array]
    log_prior_by_site: Callable[[Sites, Sites], dict[str, Array]]
    constrain: Callable[[Sites, Sites], Sites]
    unconstrain: Callable[[Sites, Sites], Sites]
    init: Callable[[Key[Array, ""]], Sites]
    theta: Sites
    num_values: dict[str, int] = eqx.field(static=True)
    ranges: dict[str, range] = eqx.field(static=True, default_factory=dict)
    log_likelihoods: Callable[[Sites, Sites], Sites] | None = None

    def __repr__(self) -> str:
        sites = list(jax.eval_shape(self.log_prior_by_site, self.theta, self._form))
        theta = {
            name: round(float(value), 6) if validate.concrete(value) and value.ndim == 0 else value
            for name, value in self.theta.items()
        }
        return f"Posterior(of {sites}{self._observed()}, theta={theta})"

    def _observed(self) -> str:
        if self.log_likelihoods is None:
            return ""
        observed = list(jax.eval_shape(self.log_likelihoods, self.theta, self._form))
        return f" given {observed}" if observed else " without data"

    def sample(
        self,
        key: Checked[Key[Array, ""]],
        *,
        num_warmup: Checked[int] = 1_000,
        num_samples: Checked[int] = 1_000,
        num_chains: Checked[int] = 4,
        progress: Checked[bool] = False,
        theta: Checked[Sites] | None = None,
        proposals: Checked[dict[str, Proposal]] | None = None,
        target_acceptance: Checked[float] = 0.9,
    ) -> DataTree:
        """Draws of the posterior, as an ArviZ `DataTree`: NUTS with step size and variances adapted
        in a warm-up and then frozen, and the discrete sites z given the continuous ones x.

        Discrete sites that take at most 256 values together are summed out: NUTS follows
        `log Σ_z exp(log_density(x, z))`, whose gradient is the mean of the gradients over
        `p(z | x)`, and z is then drawn from `p(z | x)`. Values of probability 0 have no part in it;
        one whose density is NaN counts as one of them.
        If these are all discrete sites, and x has at most 32 dimensions, each iteration also tries
        to jump between the modes of all z: a Metropolis–Hastings step, whose proposal is a mixture
        of Laplace's approximations of `p(x | z)`. Other discrete sites, such as a label for each
        observation, are drawn in turn with NUTS, each entry from its conditional distribution.

        **Arguments**

        - `num_warmup`, `num_samples`, `num_chains`: iterations of each chain that adapt and are
          dropped, draws of each chain, and how many chains.
        - `progress`: a bar on stderr, where that is a terminal.
        - `theta`: other hyperparameters than `self.theta`, by name.
        - `proposals`: by name, for discrete sites whose values are not known, as in `kernel`:
          `OtherState(n)` and `OneLabel(n)` stand for all of `0, ..., n − 1`; any other proposal is
          accepted or rejected, ten times or as often as the site has entries. A site that has a
          proposal is never summed out.
        - `target_acceptance`: the acceptance rate that the step size is adapted to.

        Chains start from the model's own `init`, spread out within ±1 if that is the same for all,
        and are started again within ±2 of it, up to 100 times, where the log density or its
        gradient is not finite. They share step size and variances.

        **Returns** a `DataTree` with the groups `posterior` (the sites as the model knows them,
        deterministic ones included), `unconstrained_posterior` (the states that `log_density`
        takes) and `sample_stats` (`diverging`, `tree_depth`, `n_steps`, `acceptance_rate`,
        `step_size`, `energy`, `lp`; for a model of discrete sites alone only `lp`), all of shape
        `(chain, draw, ...)`. A second call for a model of the same form compiles nothing.

        **Refused**: discrete sites of unknown values that have no proposal; a model for which no
        start is found; other names in `theta`; inside `jit`. Needs `blackjax` and `arviz-base`.

        >>> import diffmh, jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> def model(y, scale):
        ...     mean = numpyro.sample("mean", dist.Normal(0, scale))
        ...     numpyro.sample("y", dist.Normal(mean, 1), obs=y)
        >>> posterior = diffmh.from_numpyro(model, jnp.array([1.0, 2.0]), theta={"scale": 1.0})
        >>> draws = posterior.sample(jax.random.key(0), num_warmup=200, num_samples=500)
        >>> dict(draws.posterior.sizes)
        {'chain': 4, 'draw': 500}
        >>> bool(abs(draws.posterior["mean"].mean() - 1.0) < 0.2)                  # exactly 1
        True
        """
        with extra("Posterior.sample", "blackjax"):
            import blackjax  # noqa: F401
        with extra("Posterior.sample", "arviz_base", "samples"):
            import arviz_base  # noqa: F401

        where = "Posterior.sample"
        key = validate.typed_key(key)
        theta = self.theta if theta is None else self.other_theta(theta, f"{where}(theta=...)")
        if not validate.concrete(theta, key):
            raise TypeError(
                f"`{where}` returns draws and cannot be traced: call it outside of `jit`."
            )
        lengths = {
            "num_warmup": validate.count(num_warmup, f"{where}(num_warmup=...)"),
            "num_samples": validate.count(num_samples, f"{where}(num_samples=...)"),
            "num_chains": validate.count(num_chains, f"{where}(num_chains=...)"),
        }
        rate = validate.number(
            target_acceptance, f"{where}(target_acceptance=...)", above=0, below=1
        )
        return draw(
            self._target(self._checked_proposals(proposals, f"{where}(proposals=...)")),
            self.constrain,
            self.init,
            theta,
            key,
            **lengths,
            target_acceptance=rate,
            progress=validate.flag(progress, f"{where}(progress=...)"),
        )

    def other_theta(self, theta: Any, where: str) -> Sites:
        """Other hyperparameters, with the names and shapes of these."""
        theta = checked_theta(theta, where)
        shapes, expected = trees.shapes(theta), trees.shapes(self.theta)
        if shapes != expected:
            raise ValueError(
                f"`{where}` must have the names and shapes of the posterior's hyperparameters,"
                f" {expected}, got {shapes}."
            )
        return theta

    @property
    def _form(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The form of a state."""
        return jax.eval_shape(self.init, jax.random.key(0))

    def _target(self, proposals: dict[str, Proposal]) -> Target:
        form = self._form
        given = {name: label_move(name, proposal) for name, proposal in proposals.items()}
        rest = {name: site for name, site in form.items() if name not in given}
        continuous = sorted(
            n for n, site in rest.items() if jnp.issubdtype(site.dtype, jnp.inexact)
        )
        ranges = {
            name: self._values(name, "posterior.sample(key, proposals=")
            for name in rest
            if name not in continuous
        }
        summed_out = with_few_values(ranges, {name: form[name].size for name in ranges})
        for name, values in ranges.items():
            if summed_out is None or name not in summed_out.names:
                given[name] = SiteGibbs(name, values.start, len(values))
        moves = tuple(given[name] for name in form if name in given)
        return Target(self.log_density, tuple(continuous), moves, summed_out)

    def values_of(self, name: str) -> range | None:
        """The values of a discrete site, `None` if they are not known."""
        if name in self.num_values:
            return range(self.num_values[name])
        return self.ranges.get(name)

    def _values(self, name: str, call: str) -> range:
        """The values of a discrete site."""
        known = self.values_of(name)
        if known is not None:
            return known
        one = "OneLabel" if self._form[name].ndim else "OtherState"
        raise ValueError(
            f"site {name!r} is discrete, and its values are not known. If they are 0, ..., n − 1,"
            f" pass `{call}{{{name!r}: diffmh.{one}(n)}})`, with an n so large that greater values"
            " do not matter. Otherwise pass a `diffmh.extend.Proposal` of your own."
        )

    def _checked_proposals(self, proposals: Any, where: str) -> dict[str, Proposal]:
        """Proposals by the names of sites."""
        if proposals is not None and not isinstance(proposals, dict):
            raise TypeError(
                f"`{where}`: `proposals` must be a dictionary by the names of sites, got"
                f" {proposals!r}."
            )
        proposals = dict(proposals or {})
        for name, proposal in proposals.items():
            validate.instance(proposal, Proposal, where, f"proposals[{name!r}]")
        unknown = sorted(set(proposals) - set(self._form))
        if unknown:
            raise ValueError(
                f"`{where}`: `proposals` names {unknown}; the sites are {sorted(self._form)}."
            )
        return proposals

    def kernel(
        self, scale: Any = None, proposals: Checked[dict[str, Proposal]] | None = None
    ) -> Kernel:
        """A walk of `scale` on all continuous sites at once, `2.38/√d` if left out, in turn with a
        proposal for each discrete site: one label at a time, or what `proposals` says by name.

        `diffmh.adapt` sets the walk's scale; other kernels are made from `log_density`.
        """
        proposals = self._checked_proposals(proposals, "Posterior.kernel(scale, proposals)")
        form = self._form
        walked = []
        for name in form:
            if name in proposals:
                continue
            if jnp.issubdtype(form[name].dtype, jnp.inexact):
                walked.append(name)
            else:
                proposals[name] = self._labels(name, form[name])
        moves = [self._on(name, proposal) for name, proposal in proposals.items()]
        if walked:
            dimension = sum(form[name].size for name in walked)
            walk = GaussianWalk(2.38 / dimension**0.5 if scale is None else scale)
            part = lambda x: {name: x[name] for name in walked}
            moves.insert(0, walk if len(walked) == len(form) else On(part, walk))
        kernels = [MetropolisHastings(self.log_density, move) for move in moves]
        return kernels[0] if len(kernels) == 1 else Cycle(*kernels)

    def _on(self, name: str, proposal: Proposal) -> Proposal:
        return On(lambda x: x[name], proposal)

    def _labels(self, name: str, site: jax.ShapeDtypeStruct) -> Proposal:
        call = "posterior.kernel(proposals="
        values = self._values(name, call)
        if values.start != 0:
            raise ValueError(
                f"site {name!r} is discrete, with the values {values.start}, ..., {values.stop - 1}"
                f" and not 0, ..., n − 1: give it a proposal, `{call}{{{name!r}: ...}})`,"
                " or count from 0 in the model."
            )
        return OneLabel(len(values)) if site.ndim else OtherState(len(values))

    def kernel_for(self, log_density: Callable[..., Array], kernel: Any = None) -> Adapted | Kernel:
        """A kernel for another density on the same states, such as the posterior's with powers of
        prior and likelihood among its parameters: `self.kernel()` of it; the given kernel or
        `Adapted`, made for `self.log_density`, with this density in its place; or what a function
        `kernel(log_density)` returns.
        """
        if kernel is None:
            return dataclasses.replace(self, log_density=log_density).kernel()
        if not isinstance(kernel, Kernel | Adapted):
            where = "sensitivity(kernel=...)"
            signature = "a kernel, or kernel(log_density) -> Kernel"
            validate.function(kernel, where, "kernel", signature)
            if isinstance(getattr(kernel, "__self__", None), Posterior):
                raise TypeError(
                    f"`{where}` got the method `posterior.kernel` and not a kernel: call it,"
                    " `kernel=posterior.kernel()`."
                )
            made = kernel(log_density)
            if isinstance(made, Adapted):
                return made
            return validate.instance(made, Kernel, where, "kernel(log_density)")
        if isinstance(kernel, Adapted):
            changed = with_density(kernel.kernel, self.log_density, log_density)
            return Adapted(changed, kernel.states)
        return with_density(kernel, self.log_density, log_density)

    def expectation(
        self,
        f: Checked[Callable[[Sites, Sites], PyTree]],
        kernel: Checked[Kernel | Adapted] | None = None,
        **options: Any,
    ) -> Expectation:
        """`diffmh.expectation` of `f(theta, sites)`, the sites as the model knows them. `kernel` is
        `self.kernel()` if left out, `init` the model's own, or where the chains of an `Adapted`
        are; `options` are `diffmh.expectation`'s.
        """
        f = validate.function(f, "Posterior.expectation(f, ...)", "f", "f(theta, sites) -> values")
        validate.takes(f, "Posterior.expectation(f, ...)", "f", "theta", "sites")
        if not isinstance(kernel, Adapted):
            options.setdefault("init", self.init)
        if isinstance(options.get("estimator"), Covariance):
            # The transforms of the model have made its coordinates unconstrained.
            options["estimator"] = options["estimator"].declared_unconstrained()
        kernel = self.kernel() if kernel is None else kernel
        return expectation(lambda theta, x: f(theta, self.constrain(theta, x)), kernel, **options)


def checked_theta(theta: Any, where: str) -> Sites:
    """Hyperparameters by name, as arrays of floats."""
    if not isinstance(theta, dict) or not theta:
        raise TypeError(
            f"`{where}`: `theta` must be a dictionary of hyperparameters by name, such as"
            f" `{{'scale': 5.0}}`, got {theta!r}."
        )
    # An integer in `{"scale": 5}` is taken as a float.
    theta = {name: float(v) if type(v) is int else v for name, v in theta.items()}
    return trees.strong(validate.theta(theta))


def extra(function: str, library: str, name: str | None = None) -> AbstractContextManager[None]:
    """Says which extra to install where the library of an adapter is not there; the extra has the
    library's name if no other is given.
    """
    return needing(
        library,
        f"`diffmh.{function}` needs {library}, which is not installed:"
        f' pip install "diffmh[{name or library}]"',
    )
