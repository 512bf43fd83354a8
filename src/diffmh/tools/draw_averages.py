"""Averages over draws: value, covariance derivative, and their errors from batches."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Float, Int, PyTree

from ..base.batches import in_batches
from ..core.admission import Unflatten
from ..core.simulation import flatten
from ..estimators.stein import continuous_part
from ..reports import diagnostics
from ..reports.convergence import (
    autocorrelation_time,
    batch_inflation,
    mean_and_error,
    split_r_hat,
)
from ..reports.report import RunChains
from .draw_controls import Control, Coordinates, control_of, products
from .tails import HEAVY, pareto_shape

T = TypeVar("T")

# A batch is this many autocorrelation times long, where the chains are long enough: its mean's
# variance is then 2 or 3 % too small, which `batch_inflation` corrects.
_TIMES, _MOST_BATCHES, _LEAST_BATCHES = 20, 400, 8
# Draws that are evaluated at once, and series whose autocorrelation is estimated.
_AT_ONCE, _MOST_SERIES = 1024, 256
# Relative to the spread over draws, an error that single precision may hide.
_ROUNDING = 1e-5
# Pairs of score and value whose products are formed at once.
_COLUMNS = 256


@eqx.filter_jit
def evaluate(f, log_density, theta, draws, args, explicit: bool, by_x: bool = False):
    """f, `∂_θ log g` and `∂_θ f` at each draw: shapes `(C, n, F)`, `(C, n, P)` and `(C, n, P, F)`,
    the last `(C, n)` if f does not depend on θ; with `by_x` also the continuous part of x and
    `∇_x log g`, `(C, n, d)` each.
    """
    flat_theta, unravel = ravel_pytree(theta)

    def value(flat, x):
        return flatten(f(unravel(flat), x, *args))

    def at_draw(x):
        part, rest = continuous_part(x)
        place, at_place = ravel_pytree(part)

        def density(flat, place):
            return log_density(unravel(flat), eqx.combine(at_place(place), rest), *args)

        slope = jax.jacfwd(value)(flat_theta, x).T if explicit else jnp.zeros(())
        if not by_x:
            return value(flat_theta, x), jax.grad(density)(flat_theta, place), slope
        score, steepness = jax.grad(density, argnums=(0, 1))(flat_theta, place)
        return value(flat_theta, x), score, slope, place, steepness

    return in_batches(at_draw, draws, _AT_ONCE, axes=2)


class AtDraws(eqx.Module):
    """f, the score and f's own derivative at each draw; `slope` has no axes of P and F where f does
    not depend on θ. `weight` are importance weights of mean 1, None where all draws count the same.
    With a `control`, which has no weights beside it, each is averaged less its regression on
    Stein's functions.
    """

    value: Float[np.ndarray, "C n F"]
    score: Float[np.ndarray, "C n P"]
    slope: Float[np.ndarray, "C n *PF"]
    weight: Float[np.ndarray, "C n"] | None = None
    control: Control | None = None

    @property
    def weights(self) -> Float[np.ndarray, "C n"]:
        return np.ones(self.value.shape[:2]) if self.weight is None else self.weight

    def mean(self, values: Float[np.ndarray, "C n *any"]) -> Float[np.ndarray, "*any"]:
        """`Σ w v / Σ w` over all draws."""
        return np.tensordot(self.weights, values, axes=2) / self.weights.sum()

    def controlled(self, coordinates: Coordinates, degree: int | None) -> AtDraws:
        """With Stein's control variates, if there are draws enough."""
        value, score = self._centred()
        control = control_of(value, score, coordinates, self.value.shape[0], degree)
        return dataclasses.replace(self, control=control)

    def _centred(self) -> tuple[Float[np.ndarray, "n F"], Float[np.ndarray, "n P"]]:
        """f and score about their means, all chains after each other."""
        value, score = (
            leaf.reshape(-1, leaf.shape[-1]) - self.mean(leaf) for leaf in (self.value, self.score)
        )
        return value, score

    def _averaged(self) -> tuple[Float[np.ndarray, "n F"], Float[np.ndarray, "n P"]]:
        """f and score as they are averaged, about the means of the plain ones."""
        value, score = self._centred()
        if self.control is None:
            return value, score
        subtract = self.control.subtract
        return subtract(value, self.control.value), subtract(score, self.control.score)

    def _products(self, columns: Int[np.ndarray, "T"]) -> Float[np.ndarray, "n T"]:
        """The terms `(s_p − m_p)(f_i − m_i) + ∂_p f_i` of the pairs numbered `p F + i`."""
        value, score = self._centred()
        terms = products(score, value, columns)
        if self.control is not None:
            terms = self.control.subtract(terms, self.control.product[..., columns])
        if self.slope.ndim > 2:
            terms = terms + self.slope.reshape(len(terms), -1)[:, columns]
        return terms

    def batches(self, count: int) -> tuple[Float[np.ndarray, "F B"], Float[np.ndarray, "P F B"]]:
        """Value and derivative of `count` stretches of each chain, whose means are those of all
        draws.

        As for `Covariance()`, batch b gets `Cov_b + B/(B − 1) (f̄_b − f̄)(s̄_b − s̄)`, which is free of
        the bias from f̄ and s̄ where batches are independent. With plain means m of f and s, and bars
        for what is averaged of f, s and their products p:
        `p̄_b − (f̄ − m_f)(s̄_b − m_s) − (s̄ − m_s)(f̄_b − f̄) + (f̄_b − f̄)(s̄_b − s̄)/(B − 1)`.

        With weights w of mean 1, means are ratios `Σ w v / Σ w`, and batch b gets
        `v̄ + mean_b w (v − v̄)`: the ratio's linearisation, whose spread over batches is the error of
        the ratio.
        """
        chains, draws, num_values = self.value.shape
        length, num_batches = draws // count, chains * count
        # Without the first few draws, where the length does not divide the chain.
        used = slice(draws - count * length, draws)
        weight = self.weights[:, used].reshape(num_batches, length)
        weight = weight / weight.mean()

        def mean(leaf: Float[np.ndarray, "n T"]) -> Float[np.ndarray, "B T"]:
            batches = leaf.reshape(chains, draws, -1)[:, used].reshape(num_batches, length, -1)
            found = np.einsum("bl,blk->bk", weight, batches) / length
            return found - excess * found.mean(axis=0)

        # In double precision: covariances are small differences.
        excess = weight.mean(axis=1)[:, None] - 1
        values, scores = map(mean, self._averaged())
        f, s = values.mean(axis=0), scores.mean(axis=0)
        between = np.einsum("bp,bf->bpf", scores - s, values - f) / (num_batches - 1)
        pairs = scores.shape[1] * num_values
        columns = np.array_split(np.arange(pairs), -(-pairs // _COLUMNS))
        terms = np.concatenate([mean(self._products(some)) for some in columns], axis=1)
        linear = scores[:, :, None] * f + s[:, None] * (values - f)[:, None]
        slope = terms.reshape(between.shape) - linear + between
        values = values + self.mean(self.value)
        return np.moveaxis(values, 0, -1), np.moveaxis(slope, 0, -1)

    def with_rounding(
        self, value: Float[np.ndarray, "F B"], jacobian: Float[np.ndarray, "P F B"]
    ) -> tuple[Float[np.ndarray, "F B"], Float[np.ndarray, "P F B"]]:
        """The batches, with a deviation of alternating sign that stands for rounding.

        Control variates may leave nothing but rounding of what was evaluated in single precision,
        which is alike in all batches: their spread would claim an error that nobody knows.
        """
        centred, score = self._centred()
        deviation, own = centred.std(axis=0), score.std(axis=0)
        count = value.shape[-1]
        signs = np.where(np.arange(count) % 2, 1.0, -1.0) * (np.arange(count) < count // 2 * 2)
        signs = _ROUNDING * math.sqrt(count) * signs
        scale = np.einsum("p,f->pf", own, deviation)
        return value + deviation[:, None] * signs, jacobian + scale[..., None] * signs

    def series(self) -> Float[np.ndarray, "S C n"]:
        """The series that are averaged: f, and the terms of the covariance, at most
        `_MOST_SERIES` of each.
        """
        value, score = self._averaged()
        columns = np.array(most_series(range(score.shape[1] * value.shape[1])))
        some = value[:, np.array(most_series(range(value.shape[1])))]
        every = np.concatenate([some, self._products(columns)], axis=1)
        found = every.T.reshape(-1, *self.value.shape[:2])
        if self.weight is None:
            return found
        return self.weight * (found - self.mean(np.moveaxis(found, 0, -1))[:, None, None])


def most_series(every: Sequence[T]) -> Sequence[T]:
    """At most `_MOST_SERIES` of them, evenly spread."""
    return every[:: -(-len(every) // _MOST_SERIES)]


def run_of_draws(
    found: AtDraws,
    theta: PyTree,
    form: PyTree,
    notes: Sequence[str] = (),
    doubts: Sequence[str] = (),
    batches: int | None = None,
) -> RunChains:
    """Value and derivative of each batch; `batches` of each chain, or as many as suit them. `notes`
    and `doubts` are further lines of the report.
    """
    chains, draws, _ = found.value.shape
    cut = Cut.of(found.series(), batches)
    # Their means stay: only what they differ by is too small.
    wider = batch_inflation(cut.time, draws // cut.per_chain, draws, chains)
    value, jacobian = (spread_out(part, wider) for part in found.batches(cut.per_chain))
    if found.control is not None:
        value, jacobian = found.with_rounding(value, jacobian)
    note, doubt = _of_weights(found.weight)
    how, notes, doubts = "by the covariance identity", [*note, *notes], [*doubt, *doubts]
    return run_of_batches(found, cut, (value, jacobian), theta, form, how, notes, doubts)


class Cut(eqx.Module):
    """How chains are cut into batches, by the series that are averaged."""

    time: float
    per_chain: int
    r_hat: float

    @staticmethod
    def of(series: Float[np.ndarray, "S C n"], batches: int | None = None) -> Cut:
        """Batches of some 20 autocorrelation times, or `batches` of each chain."""
        _, chains, draws = series.shape
        time = max(map(autocorrelation_time, series))
        count = batches_per_chain(chains, draws, time) if batches is None else batches
        return Cut(time, count, largest_r_hat(series))


def run_of_batches(
    found: AtDraws,
    cut: Cut,
    batches: tuple[Float[np.ndarray, "F B"], Float[np.ndarray, "P F B"]],
    theta: PyTree,
    form: PyTree,
    how: str,
    notes: Sequence[str],
    doubts: Sequence[str],
) -> RunChains:
    """Value and derivative of each batch of what was found at the draws."""
    value, jacobian = batches
    chains, draws, _ = found.value.shape
    num_batches = chains * cut.per_chain
    few = num_batches < _LEAST_BATCHES or draws < _TIMES * cut.time / 2
    _, error = mean_and_error(value)
    spread = found.mean((found.value - found.mean(found.value)) ** 2)
    return RunChains(
        Unflatten.of(form),
        theta,
        jnp.asarray(value),
        jnp.asarray(jacobian),
        (),
        notes=(
            f"{how}, from {chains} chains of {draws:,} draws in {num_batches} batches;"
            f" autocorrelation time {cut.time:.3g}",
            *notes,
        ),
        warnings=(*diagnostics.of_draws(draws, cut.time, cut.r_hat, few), *doubts),
        effective_samples=np.where(error > 0, spread / np.where(error > 0, error**2, 1.0), np.nan),
    )


def spread_out(batches: Float[np.ndarray, "... B"], factor: float) -> Float[np.ndarray, "... B"]:
    """The batches with their deviations from their mean multiplied."""
    mean = batches.mean(axis=-1, keepdims=True)
    return mean + factor * (batches - mean)


def batches_per_chain(chains: int, draws: int, time: float) -> int:
    """As many as keep a batch `_TIMES` autocorrelation times long, where the chains are long
    enough; a divisor of their length if one is near.
    """
    least = -(-_LEAST_BATCHES // chains) if chains < 4 else 1
    most = max(least, min(int(draws / (_TIMES * time)), _MOST_BATCHES // chains, draws // 2))
    divisors = [count for count in range(max(least, most // 2), most + 1) if draws % count == 0]
    return max(divisors, default=most)


def largest_r_hat(series: Float[np.ndarray, "S C n"]) -> float:
    """`√((n − 1)/n + B/W)` over the halves of the chains (Gelman and others 2013), n their length;
    the largest of the series.
    """
    half = series.shape[-1] // 2
    halves = np.concatenate([series[..., :half], series[..., half : 2 * half]], axis=1)
    within = halves.var(axis=-1, ddof=1).mean(axis=-1)
    return split_r_hat(halves.mean(axis=-1), within, base=(half - 1) / half)


def _of_weights(weight: np.ndarray | None) -> tuple[list[str], list[str]]:
    """A note on importance weights, and a warning of a heavy tail, if there are any."""
    if weight is None:
        return [], []
    k, worth = pareto_shape(weight), weight.sum() ** 2 / np.sum(weight**2)
    doubt = (
        f"the weights have a heavy tail (Pareto k̂ = {k:.2f} > {HEAVY}): few draws decide, and"
        " errors are too small. Draw from a distribution that is closer."
    )
    note = f"weighted draws, worth {worth:,.0f} of {weight.size:,}; Pareto k̂ {k:.2f}"
    return [note], [doubt] if k > HEAVY else []
