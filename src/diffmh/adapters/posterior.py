"""A posterior: the density of somebody's model, its start, and its sites by name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Key, PyTree

from .._expectation import Expectation, expectation
from ..base import trees, validate
from ..base.validate import Checked
from ..core.kernel import Kernel
from ..kernels import Cycle, MetropolisHastings
from ..proposals import GaussianWalk, On, OneLabel, OtherState, Proposal

Sites = dict[str, Any]


class Posterior(eqx.Module):
    """A model's posterior, as `from_numpyro` and `from_pymc` return it.

    - `log_density(theta, x)`: the joint log density of latent sites and data on unconstrained
      states, the transforms' volume included. A state is a dictionary: real arrays by the names of
      the continuous sites, integers by those of the discrete ones.
    - `log_prior(theta, x)`, `log_likelihood(theta, x)`: its parts; the volume belongs to neither.
    - `constrain(theta, x)`: the sites as the model knows them, deterministic ones included;
      `unconstrain(theta, sites)` takes them back.
    - `init(key)`: a start by the model's own rule.
    - `theta`: the hyperparameters, by name.
    - `num_values`: for discrete sites of `0, ..., n − 1`, their n.
    """

    log_density: Callable[[Sites, Sites], Array]
    log_prior: Callable[[Sites, Sites], Array]
    log_likelihood: Callable[[Sites, Sites], Array]
    constrain: Callable[[Sites, Sites], Sites]
    unconstrain: Callable[[Sites, Sites], Sites]
    init: Callable[[Key[Array, ""]], Sites]
    theta: Sites
    num_values: dict[str, int] = eqx.field(static=True)

    def kernel(
        self, scale: Any = None, proposals: Checked[dict[str, Proposal]] | None = None
    ) -> Kernel:
        """A walk of `scale` on all continuous sites at once, `2.38/√d` if left out, in turn with a
        proposal for each discrete site: one label at a time, or what `proposals` says by name.

        `diffmh.adapt` sets the walk's scale; other kernels are made from `log_density`.
        """
        where = "Posterior.kernel(scale, proposals)"
        if proposals is not None and not isinstance(proposals, dict):
            raise TypeError(
                f"`{where}`: `proposals` must be a dictionary by the names of sites, got"
                f" {proposals!r}."
            )
        proposals = dict(proposals or {})
        for name, proposal in proposals.items():
            validate.instance(proposal, Proposal, where, f"proposals[{name!r}]")
        form = jax.eval_shape(self.init, jax.random.key(0))
        unknown = sorted(set(proposals) - set(form))
        if unknown:
            raise ValueError(
                f"`kernel(proposals=...)` names {unknown}; the sites are {sorted(form)}."
            )
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
        if name not in self.num_values:
            raise ValueError(
                f"site {name!r} is discrete, and its values are not known to be 0, ..., n − 1: give"
                f" it a proposal of its own, `kernel(proposals={{{name!r}: ...}})`."
            )
        count = self.num_values[name]
        return OneLabel(count) if site.ndim else OtherState(count)

    def expectation(
        self,
        f: Checked[Callable[[Sites, Sites], PyTree]],
        kernel: Checked[Kernel] | None = None,
        **options: Any,
    ) -> Expectation:
        """`diffmh.expectation` of `f(theta, sites)`, the sites as the model knows them. `kernel` is
        `self.kernel()` if left out, `init` the model's own; `options` are `diffmh.expectation`'s.
        """
        f = validate.function(f, "Posterior.expectation(f, ...)", "f", "f(theta, sites) -> values")
        options.setdefault("init", self.init)
        kernel = self.kernel() if kernel is None else kernel
        return expectation(lambda theta, x: f(theta, self.constrain(theta, x)), kernel, **options)


def checked_theta(theta: Any, where: str) -> Sites:
    """Hyperparameters by name, as arrays of floats."""
    if not isinstance(theta, dict) or not theta:
        raise TypeError(
            f"`{where}`: `theta` must be a dictionary of hyperparameters by name, such as"
            f" `{{'scale': 5.0}}`, got {theta!r}."
        )
    # A whole number that somebody writes is a number: `{"scale": 5}`.
    theta = {name: float(v) if type(v) is int else v for name, v in theta.items()}
    return trees.strong(validate.theta(theta))


@contextlib.contextmanager
def extra(function: str, library: str) -> Iterator[None]:
    """Says which extra to install where the library of an adapter is not there."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != library:
            raise
        raise ModuleNotFoundError(
            f"`diffmh.{function}` needs {library}, which is not installed:"
            f' pip install "diffmh[{library}]"',
            name=library,
        ) from error
