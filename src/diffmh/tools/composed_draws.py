"""Functions of averages over draws, without the bias of plugging in."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import equinox as eqx
import numpy as np
from jaxtyping import PyTree

from .._compose import composed_chains
from ..base import trees, validate
from ..core.autodiff import not_differentiable
from ..reports.report import Report, RunChains, report
from .intake import chains_and_draws

if TYPE_CHECKING:
    from .draws import FromDraws


class ComposedDraws(eqx.Module):
    """`φ(θ, m_1(θ), m_2(θ), ...)` of averages over draws; made by `diffmh.compose`."""

    phi: Callable[..., PyTree]
    averages: tuple[FromDraws, ...]

    @staticmethod
    def of(phi: Callable[..., PyTree], averages: tuple[FromDraws, ...]) -> ComposedDraws:
        sizes = sorted({chains_and_draws(one.draws) for one in averages})
        if len(sizes) > 1:
            listed = ", ".join(f"{chains} × {draws}" for chains, draws in sizes)
            raise ValueError(
                "`compose` pairs batches of draws up, and needs equally many chains and draws of"
                f" each `from_draws`, got {listed}."
            )
        return ComposedDraws(phi, averages)

    def __repr__(self) -> str:
        name = getattr(self.phi, "__name__", self.phi)
        return f"ComposedDraws({name}, {', '.join(map(repr, self.averages))})"

    def __call__(self, theta: PyTree, *args: Any) -> PyTree:
        """`φ(θ, Ê_1(θ), ...)` with reweighted averages, an ordinary function of theta: each average
        must know where its draws were made (`at`). Its bias of plugging in is of order 1/draws.
        """
        return self.phi(theta, *(one(theta, *args) for one in self.averages))

    def run(self, theta: PyTree, *args: Any) -> Report:
        """Value and gradient of φ, by the jackknife over batches of draws, with errors."""
        theta = not_differentiable(
            validate.theta(theta),
            "`compose(...).run` reports value and derivative of its own; to differentiate, call"
            " what `compose` returns for `from_draws(..., at=theta)`.",
        )
        theta, args = trees.strong(theta), trees.data(args)
        runs = [one.run_chains(theta, *args) for one in self.averages]
        # Batch b of every average goes into pseudo-value b: of averages over the same draws, these
        # share their errors, and the spread of the pseudo-values knows it.
        count = min(run.value.shape[-1] for run in runs)
        if any(run.value.shape[-1] > count for run in runs):
            chains, _ = chains_and_draws(self.averages[0].draws)
            runs = [one.run_chains(theta, *args, batches=count // chains) for one in self.averages]
        made = composed_chains(self.phi, runs)
        return report(dataclasses.replace(made, effective_samples=_worst(runs, made)))


def _worst(runs: list[RunChains], made: RunChains) -> np.ndarray:
    """A composed value has no draws of its own: it is as good as the worst average behind it."""
    every = np.concatenate(
        [run.effective_samples for run in runs if run.effective_samples is not None]
    )
    known = every[~np.isnan(every)]
    return np.full(len(made.value), known.min() if known.size else np.nan)
