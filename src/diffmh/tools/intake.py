"""Draws from anywhere, as arrays `(chain, draw, ...)`."""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Iterable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, PyTree

from ..adapters.group_marks import holds_states, recorded_theta
from ..base import trees, validate
from ..base.extras import needing

# An error needs this many draws.
LEAST_DRAWS = 16
# A message names at most this many arrays.
_MOST_NAMES = 24
# Shares of the transitions that diverged: above the first there is a warning, above the second no
# row is trusted.
_SOME_DIVERGENCES, MANY_DIVERGENCES = 0.001, 0.01
# The depth at which NumPyro, PyMC, BlackJAX and Stan stop by default, and the share of transitions
# that may reach it.
_DEEPEST, _MANY_DEEPEST = 10, 0.01


class GivenDraws(eqx.Module):
    """Draws as they came. `sites` are the variables by name, or the pytree itself, `of_model` says
    that they are those of a model, on their supports; `states` are unconstrained states, where the
    source says that it has them; `marked` that diffmh made these,
    `stacked` that they are the positions of a stack of BlackJAX' states. `diverging` and
    `tree_depth` are the sampler's own statistics, of shape `(chain, draw)`, `theta` the
    hyperparameters that it ran with, where they are known; `arguments` are those of the model in
    the run, by name, hyperparameters among them.
    """

    sites: PyTree = None
    of_model: bool = False
    states: PyTree = None
    marked: bool = False
    theta: dict[str, Any] | None = None
    arguments: dict[str, Any] | None = None
    diverging: np.ndarray | None = None
    tree_depth: np.ndarray | None = None
    stacked: bool = False

    def sampler(self) -> GivenDraws:
        """The sampler's statistics alone."""
        return GivenDraws(diverging=self.diverging, tree_depth=self.tree_depth)

    @property
    def divergent_share(self) -> float:
        return 0.0 if self.diverging is None else float(np.mean(self.diverging))

    def notes(self) -> Iterator[str]:
        """The sampler's statistics in a line, if there are any."""
        facts = []
        if self.diverging is not None:
            facts.append(f"divergent transitions: {int(np.sum(self.diverging)):,}")
        if self.tree_depth is not None:
            depth = self.tree_depth
            facts.append(
                f"tree depth {np.mean(depth):.1f} on average, {int(np.max(depth))} at most"
            )
        if facts:
            yield ", ".join(facts)

    def warnings(self) -> Iterator[str]:
        if self.diverging is not None and self.divergent_share > _SOME_DIVERGENCES:
            count, size = int(np.sum(self.diverging)), self.diverging.size
            yield (
                f"{count:,} of {size:,} transitions diverged: the draws may miss a part of the"
                " posterior where it is narrow. Sample with a higher target acceptance rate (0.95"
                " or 0.99), or write the hierarchy non-centred."
            )
        depth = self.tree_depth
        if depth is not None and np.mean(depth >= _DEEPEST) > _MANY_DEEPEST:
            yield (
                f"{np.mean(depth >= _DEEPEST):.0%} of the transitions reached tree depth"
                f" {_DEEPEST}, where they are cut off: the posterior is far from round. Warm up"
                " longer, or rescale the model's parameters."
            )


def read(draws: Any, where: str = "from_draws(draws=...)") -> GivenDraws:
    """The draws of an ArviZ `DataTree`, `Dataset` or `InferenceData`, a path to one, a NumPyro
    `MCMC`, stacked BlackJAX states, a dictionary or another pytree.
    """
    _refuse_key_or_table(draws, where)
    if not validate.concrete(draws):
        raise TypeError(f"`{where}` must be known: draws cannot be traced by `jit` or `grad`.")
    if isinstance(draws, str | os.PathLike):
        draws = _opened(draws, where)
    if hasattr(draws, "get_samples") and hasattr(draws, "get_extra_fields"):
        return _of_mcmc(draws, where)
    # A DataTree has children; ArviZ before 1.0 has an InferenceData, a mapping without data_vars.
    is_dataset = hasattr(draws, "data_vars") and not getattr(draws, "children", None)
    if is_dataset:
        return _of_group(draws, where)
    if not isinstance(draws, dict) and hasattr(draws, "posterior"):
        return _of_groups(draws, where)
    groups = getattr(draws, "children", None)
    if groups is not None:
        raise ValueError(f"`{where}`: the tree has no group `posterior`, it has {sorted(groups)}.")
    if not isinstance(draws, dict) and hasattr(draws, "position"):
        return GivenDraws(states=draws.position, stacked=True)
    return GivenDraws(sites=draws)


def _refuse_key_or_table(draws: Any, where: str) -> None:
    """Two things that are at hand where draws are asked for."""
    if isinstance(draws, jax.Array) and jnp.issubdtype(draws.dtype, jax.dtypes.prng_key):
        raise TypeError(f"`{where}` got a key: pass draws, such as `posterior.sample(key)`.")
    if hasattr(draws, "draws") and hasattr(draws, "rows"):
        raise TypeError(f"`{where}` got a table: its draws are `table.draws`.")


def arrays_of(given: GivenDraws) -> PyTree:
    """The posterior's variables by name, or the pytree itself."""
    arrays = given.states if given.sites is None else given.sites
    if given.stacked:
        refuse_draws_first(arrays, "from_draws(draws=...)")
    return trees.strong(validate.state(arrays, "`from_draws(draws=...)`"))


def _opened(path: str | os.PathLike, where: str) -> Any:
    """A file of netCDF or a folder of zarr, in memory."""
    name = os.fspath(path)
    if not os.path.exists(name):
        raise FileNotFoundError(f"`{where}` is a path, but there is nothing at {name!r}.")
    advice = f"`{where}` reads files with xarray, which is not installed:"
    with needing("xarray", f'{advice} pip install "diffmh[samples]"'):
        import xarray
    try:
        with xarray.open_datatree(name) as tree:
            return tree.load()
    except (ValueError, OSError) as error:
        raise ValueError(
            f"`{where}`: xarray cannot read {name!r} as netCDF or zarr ({error}). netCDF needs"
            " h5netcdf or netCDF4 beside it, zarr needs zarr."
        ) from None


def _of_mcmc(mcmc: Any, where: str) -> GivenDraws:
    try:
        sites = mcmc.get_samples(group_by_chain=True)
        extra = mcmc.get_extra_fields(group_by_chain=True)
    except (AssertionError, AttributeError, TypeError):
        sites, extra = None, {}
    if not sites:
        raise ValueError(f"`{where}`: this `MCMC` has no draws yet: call its `run` first.")
    steps = extra.get("num_steps")
    # Without a model it has sampled a potential, on unconstrained states.
    free = getattr(getattr(mcmc, "sampler", None), "model", mcmc) is None
    return GivenDraws(
        sites=None if free else sites,
        of_model=not free,
        states=sites if free else None,
        arguments=None if free else _arguments_of(mcmc),
        diverging=_array(extra.get("diverging")),
        # A tree of depth d has 2^d − 1 leapfrog steps if it is complete.
        tree_depth=None if steps is None else np.ceil(np.log2(np.asarray(steps) + 1)),
    )


def _arguments_of(mcmc: Any) -> dict[str, Any] | None:
    """The arguments of the model in the last run of an `MCMC`, by name; `None` if it does not tell
    them.
    """
    try:
        called = inspect.signature(mcmc.sampler.model).bind(*mcmc._args, **mcmc._kwargs)
    except (AttributeError, TypeError, ValueError):
        return None
    called.apply_defaults()
    found = dict(called.arguments)
    for parameter in called.signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            found |= found.pop(parameter.name)
    return found


def _of_group(dataset: Any, where: str) -> GivenDraws:
    """The variables of one group: sites, or states if it says so."""
    named = _named(dataset, where)
    theta = recorded_theta(dataset.attrs)
    if holds_states(dataset.attrs):
        return GivenDraws(states=named, marked=True, theta=theta)
    return GivenDraws(sites=named, of_model=True, theta=theta)


def _of_groups(draws: Any, where: str) -> GivenDraws:
    found = _of_group(draws.posterior, where)
    free = getattr(draws, "unconstrained_posterior", None)
    if free is not None and found.states is None:
        marked = holds_states(free.attrs)
        found = dataclasses.replace(found, states=_named(free, where), marked=marked)
    stats = getattr(draws, "sample_stats", None)
    return dataclasses.replace(
        found,
        diverging=_statistic(stats, "diverging"),
        tree_depth=_statistic(stats, "tree_depth"),
    )


def refuse_draws_first(position: PyTree, where: str) -> None:
    """BlackJAX' states must be stacked as `(chain, draw, ...)`. A scan over steps of many chains
    stacks draws first, which shows as more chains than draws.
    """
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(position)]
    if shapes and all(len(shape) >= 2 and shape[0] > shape[1] for shape in shapes):
        chains, count = shapes[0][:2]
        raise ValueError(
            f"`{where}`: these states would be {chains} chains of {count} draws. Their axes must be"
            " (chain, draw, ...), and a scan over steps of all chains puts the draws first: swap"
            " the two, `jax.tree.map(lambda leaf: leaf.swapaxes(0, 1), states)`."
        )


def _named(dataset: Any, where: str) -> dict[str, np.ndarray]:
    """The variables of an xarray dataset, chains and draws first."""
    named, wrong = {}, {}
    for name, variable in dataset.data_vars.items():
        if {"chain", "draw"} <= set(variable.dims):
            named[str(name)] = np.asarray(variable.transpose("chain", "draw", ...))
        else:
            wrong[str(name)] = dict(zip(variable.dims, variable.shape, strict=True))
    if wrong:
        raise ValueError(
            f"`{where}`: every variable must have the dimensions 'chain' and 'draw', got"
            f" {few(f'{name} with {dims}' for name, dims in wrong.items())}. Rename them"
            " (`Dataset.rename`), or undo `az.extract` by `.unstack('sample')`."
        )
    return named


def _statistic(stats: Any, name: str) -> np.ndarray | None:
    if stats is None or name not in getattr(stats, "data_vars", ()):
        return None
    found = stats[name]
    ordered = {"chain", "draw"} == set(found.dims)
    return np.asarray(found.transpose("chain", "draw")) if ordered else np.asarray(found)


def _array(value: Any) -> np.ndarray | None:
    return None if value is None else np.asarray(value)


def refuse_unless_draws(arrays: PyTree) -> None:
    leaves = jax.tree_util.tree_leaves_with_path(arrays)
    shapes = {jax.tree_util.keystr(path): leaf.shape for path, leaf in leaves}
    if len({shape[:2] for shape in shapes.values()}) > 1 or len(leaves[0][1].shape) < 2:
        listed = few(f"{name} {shape}".strip() for name, shape in shapes.items())
        raise ValueError(
            "`from_draws(draws=...)`: every array must begin with the axes (chain, draw), the same"
            f" for all, got shapes {listed}. With NumPyro, pass the `MCMC` itself or"
            " `get_samples(group_by_chain=True)`; for a single chain, `array[None]`."
        )
    chains, count = leaves[0][1].shape[:2]
    if chains * count < LEAST_DRAWS:
        raise ValueError(
            f"`from_draws(draws=...)` needs at least {LEAST_DRAWS} draws for an error, got"
            f" {chains} × {count}."
        )
    for path, leaf in leaves:
        if not bool(jnp.all(jnp.isfinite(leaf))):
            raise ValueError(
                f"`from_draws(draws=...)`: `draws{jax.tree_util.keystr(path)}` is not finite."
            )


def chains_and_draws(draws: PyTree) -> tuple[int, int]:
    chains, count = jax.tree.leaves(draws)[0].shape[:2]
    return chains, count


def checked_weights(weights: Any, draws: PyTree) -> Float[np.ndarray, "C n"]:
    """Importance weights, scaled to a mean of 1."""
    name = "from_draws(weights=...)"
    found = np.asarray(validate.real_array(weights, name, chains_and_draws(draws)), float)
    wrong = int(np.sum(~np.isfinite(found)))
    if wrong:
        raise ValueError(f"`{name}` must be finite, got {wrong:,} of {found.size:,} that are not.")
    if np.any(found < 0) or not found.sum() > 0:
        raise ValueError(
            f"`{name}` must be non-negative and not all zero, got numbers between {found.min():g}"
            f" and {found.max():g}: if these are log weights, pass their exponential."
        )
    return found / found.mean()


def few(texts: Iterable[str]) -> str:
    """The first of many, joined by commas, and how many there are."""
    texts = list(texts)
    more = f", … {len(texts)} in all" if len(texts) > _MOST_NAMES else ""
    return ", ".join(texts[:_MOST_NAMES]) + more
