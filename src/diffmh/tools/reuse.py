"""Draws that serve several steps of `optimise`, by reweighting."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, PyTree

from .._compose import Composition
from .._expectation import Differentiable, Expectation
from ..core.admission import Unflatten
from ..core.autodiff import differentiable
from ..core.simulation import Simulation
from ..jaxprs import compat
from ..runs.progress import Bar
from .evidence import Evidence
from .examination import one_draw
from .reweighting import Reweighted, log_weights
from .sample import filled, walk_of
from .weighted_sums import batch_sums, pseudo_values


class Reused(Differentiable):
    """An expectation at equilibrium from draws that were made at another theta: chain c has the
    jackknife's pseudo-value without it, whose derivative is the covariance across chains.
    """

    def __init__(self, simulation: Simulation, at: PyTree, draws: PyTree):
        self.simulation, self.at, self.draws = simulation, at, draws
        self.num_chains = simulation.num_chains

    @property
    def num_steps(self) -> int:
        return 0

    def run_chains(self, theta, key=None, *args, course=None):
        raise TypeError("`optimise(reuse=...)`: reused draws have no report.")

    def per_chain(self, theta, key=None, *args):
        given = self.reweighted(args)
        x = one_draw(self.draws)
        f = lambda theta, x: self.simulation.f(theta, x, *args)
        explicit = compat.depends_on(f, compat.forms(theta), x)
        unflatten = Unflatten.of(jax.eval_shape(f, theta, x))
        value = eqx.Partial(_value, given)
        slope = eqx.Partial(_value_and_slope, given, explicit)
        return unflatten(differentiable(value, slope, None, theta, key, args))

    def reweighted(self, args: tuple[Any, ...]) -> Reweighted:
        density = self.simulation.kernel.updates()[0].log_density
        return Reweighted(self.simulation.f, density, self.at, self.draws, args)


def _value(given: Reweighted, theta, key, args) -> Float[Array, "F C"]:
    # One batch for each chain, so pseudo-values are those of chains.
    sums, centre = batch_sums(given, theta, 0, False, 1)
    return jnp.asarray(pseudo_values(sums).value + centre).T


def _value_and_slope(given: Reweighted, explicit: bool, theta, key, args):
    sums, centre = batch_sums(given, theta, 1, explicit, 1)
    found = pseudo_values(sums)
    assert found.slope is not None
    return (found.value + centre).T, jnp.moveaxis(found.slope, 0, -1)


def sampled_by(objective: Any) -> list[Expectation]:
    """The expectations whose chains an objective samples; refuses those whose draws cannot be
    reweighted.
    """
    if isinstance(objective, Evidence):
        found = [objective.scores]
    elif isinstance(objective, Composition):
        found = [each for part in objective.expectations for each in sampled_by(part)]
    else:
        found = [objective]
    for each in found:
        if not isinstance(each, Expectation):
            raise TypeError(
                "`optimise(reuse=...)` keeps the draws of what `diffmh.expectation`, `compose` or"
                f" `evidence` returned, got {each!r}."
            )
        name = type(each.simulation.estimator).__name__
        if name != "Covariance":
            raise ValueError(
                "`optimise(reuse=...)` reweights draws, whose value and derivative are those of the"
                f" equilibrium, and this expectation uses {name}(): make it with"
                " `estimator=diffmh.Covariance()`."
            )
        if each.num_chains < 2:
            # One jackknife batch for each chain: without the only one there is no draw left.
            raise ValueError(
                "`optimise(reuse=...)` takes the bias of reweighting off across chains: the"
                f" expectation needs `num_chains` of at least 2, got {each.num_chains}."
            )
    return [each for each in found if isinstance(each, Expectation)]


def with_draws(objective: Any, at: PyTree, draws: list[PyTree]) -> Any:
    """The objective with draws in place of its chains."""
    # Invariant: draws come in the order in which `sampled_by` lists the expectations, depth first.
    rest = iter(draws)

    def replaced(part: Any) -> Any:
        if isinstance(part, Evidence):
            return Evidence(replaced(part.scores), part.observed)
        if isinstance(part, Composition):
            return Composition(part.phi, tuple(map(replaced, part.expectations)))
        return Reused(part.simulation, at, next(rest))

    return replaced(objective)


class KeptDraws(eqx.Module):
    """The origin of the kept draws: their theta and the iteration (−1 if there are no
    draws yet). A checkpoint stores only this, because the draws can be made again from it and the
    key.
    """

    at: PyTree
    iteration: Int[Array, ""]


class Draws:
    """The draws of an objective's chains, kept while they are good."""

    def __init__(self, objective: Any, share: float):
        self.expectations, self.share = sampled_by(objective), share
        self._iteration = -1
        self._draws: list[PyTree] = []

    def at(
        self, kept: KeptDraws, theta: PyTree, key: Key[Array, ""], i: int, args: tuple[Any, ...]
    ) -> tuple[KeptDraws, list[PyTree], bool]:
        """The draws for a step at theta, where they were made, and whether they are new."""
        # The choice depends on θ and on the draws alone, which follow from `kept`: a run that goes
        # on from a checkpoint makes the same one.
        if int(kept.iteration) >= 0:
            self._make(kept, key, args)
            if self._effective_share(kept, theta, args) >= self.share:
                return kept, self._draws, False
        kept = KeptDraws(theta, jnp.int32(i))
        self._make(kept, key, args)
        return kept, self._draws, True

    def _make(self, kept: KeptDraws, key: Key[Array, ""], args: tuple[Any, ...]) -> None:
        """Make the draws, or find them still there. After a checkpoint they are made again, the
        same ones: they follow from theta and the iteration's key.
        """
        if self._iteration == int(kept.iteration):
            return
        key = jax.random.fold_in(key, int(kept.iteration))
        count = len(self.expectations)
        # A key for each expectation, derived from the iteration's as `Composition` derives its own.
        keys = [key] if count == 1 else list(jax.random.split(key, count))
        # Neither `sample` nor a reweighted average asks whether the derivative exists.
        for each, own in zip(self.expectations, keys, strict=True):
            each.refuse(kept.at, own, args)
        self._draws = [
            _states(each.simulation, kept.at, own, args)
            for each, own in zip(self.expectations, keys, strict=True)
        ]
        self._iteration = int(kept.iteration)

    def _effective_share(self, kept: KeptDraws, theta: PyTree, args: tuple[Any, ...]) -> float:
        """The smallest effective size of any expectation's draws, as a share of their number."""
        reused = (
            Reused(each.simulation, kept.at, draws)
            for each, draws in zip(self.expectations, self._draws, strict=True)
        )
        return min(float(_share(each.reweighted(args), theta)) for each in reused)


@eqx.filter_jit
def _share(given: Reweighted, theta: PyTree) -> Float[Array, ""]:
    found = log_weights(given, theta)
    weight = jnp.exp(found - jnp.max(found))
    # (Σ w)² / (n Σ w²), Kish's effective size over the number of draws; the scale of w cancels.
    return jnp.mean(weight) ** 2 / jnp.mean(weight**2)


def _states(s: Simulation, theta: PyTree, key: Key[Array, ""], args: tuple[Any, ...]) -> PyTree:
    """The states that a simulation averages over: arrays `(chain, draw, ...)`."""
    walk = walk_of(
        s.kernel, theta, key, args, s.init, s.num_samples, s.num_chains, s.burn_in, 1, s.mesh
    )
    arrays = filled(walk, None, None, Bar("draws", walk.plan.num_blocks, False))
    # The last two are acceptance rate and log density.
    return jax.tree.unflatten(walk.plan.structure, [jnp.asarray(each) for each in arrays[:-2]])
