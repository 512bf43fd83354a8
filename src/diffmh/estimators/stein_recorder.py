"""Stein's control variates beside a chain: sums of the functions and of their products with what is
averaged, in memory that does not grow with the number of samples.

The sums of products are formed once for each block of steps, of every `stride`-th of them where the
functions are many: they only set the coefficients. The averages themselves miss no sample.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from ..base import trees
from ..base.sums import CompensatedSum
from ..core import averages
from ..core.averages import Averaged, Averages
from ..core.recorder import Recorder
from ..core.simulation import Outcome
from . import stein
from .stein import Moments, Monomials


class CentreAndScale(eqx.Module):
    """Centre and scale of the continuous coordinates, and centres of f and of the score, from pilot
    chains: independent of the samples, and the same for all chains.
    """

    centre: Float[Array, "d"]
    scale: Float[Array, "d"]
    value: Float[Array, "F"]
    score: Float[Array, "P"]


class Seen(eqx.Module):
    """One sample, or an average: Stein's functions, the targets `(f, s, s f)` about the reference,
    and f's own derivative.
    """

    u: Float[Array, "m *C"]
    y: Float[Array, "T *C"]
    explicit: Float[Array, "P F *C"]


class Products(eqx.Module):
    """Sums over some samples of each chain: their number, and what least squares needs."""

    count: Float[Array, "*C"]
    u: Float[Array, "m *C"]
    y: Float[Array, "T *C"]
    uu: Float[Array, "m m *C"]
    uy: Float[Array, "m T *C"]
    yy: Float[Array, "T *C"]


class SteinMeans(eqx.Module):
    """The averages of each chain, and the sums of products behind the coefficients."""

    seen: Seen
    products: Products


class _Record(eqx.Module):
    averaged: Averaged
    products: CompensatedSum


class _Block(eqx.Module):
    """The averages' block, and the functions and targets of some of its steps; zero where a step is
    not a sample.
    """

    averages: averages.Block
    counted: Float[Array, "n"]
    u: Float[Array, "n m C"]
    y: Float[Array, "n T C"]

    @property
    def own(self) -> PyTree:
        return self.averages.own


class SteinRecorder(Recorder):
    """Records averages, and the products for Stein's control variates of every `stride`-th step."""

    averages: Averages
    stride: int = eqx.field(static=True)

    def start(self, loop, parameters, chains) -> _Record:
        averaged = self.averages.start(loop, parameters, chains)
        block = self._room(loop, averaged, None)
        nothing = trees.zeros(jax.eval_shape(_products, block))
        return _Record(averaged, CompensatedSum.like(nothing))

    def open_block(self, loop, progress) -> _Block:
        inner = dataclasses.replace(progress, record=progress.record.averaged)
        block = self.averages.open_block(loop, inner)
        return self._room(loop, progress.record.averaged, block)

    def _room(self, loop, averaged: Averaged, block: Any) -> _Block:
        rows = -(-loop.plan.block_steps // self.stride)
        seen = averaged.sums.total.estimator
        u, y = trees.zeros((seen.u, seen.y), rows)
        return _Block(block, jnp.zeros(rows, seen.u.dtype), u, y)

    def after_update(self, own, step, events):
        return self.averages.after_update(own, step, events)

    def after_step(self, stepper, parameters, chain, own, time):
        return self.averages.after_step(stepper, parameters, chain, own, time)

    def add(self, block: _Block, own, seen, time, row) -> _Block:
        inner = self.averages.add(block.averages, own, seen, time, row)
        # The last step of a stride stays: those before it are overwritten.
        place, counted = row // self.stride, time >= self.averages.burn_in
        here: Seen = seen.estimator

        def put(room, leaf):
            return room.at[place].set(jnp.where(counted, leaf, jnp.zeros_like(leaf)))

        return _Block(
            inner,
            block.counted.at[place].set(counted.astype(block.counted.dtype)),
            put(block.u, here.u),
            put(block.y, here.y),
        )

    def close_block(self, loop, progress, chains, block: _Block, index):
        record: _Record = progress.record
        inner = dataclasses.replace(progress, record=record.averaged)
        chains, averaged = self.averages.close_block(loop, inner, chains, block.averages, index)
        return chains, _Record(averaged, record.products.plus(_products(block)))

    def result(self, loop, progress) -> Outcome:
        record: _Record = progress.record
        inner = dataclasses.replace(progress, record=record.averaged)
        outcome = self.averages.result(loop, inner)
        means = SteinMeans(outcome.observed.estimator, record.products.value())
        observed = dataclasses.replace(outcome.observed, estimator=means)
        return dataclasses.replace(outcome, observed=observed)


def _products(block: _Block) -> Products:
    # Chains first within the products: a batch of small matrix products.
    u, y = jnp.moveaxis(block.u, -1, 0), jnp.moveaxis(block.y, -1, 0)
    last = lambda leaf: jnp.moveaxis(leaf, 0, -1)
    uu = jnp.einsum("cnm,cnk->cmk", u, u, precision="highest")
    uy = jnp.einsum("cnm,cnt->cmt", u, y, precision="highest")
    count = jnp.broadcast_to(jnp.sum(block.counted), (u.shape[0],))
    sums = (jnp.sum(u, axis=1), jnp.sum(y, axis=1), uu, uy, jnp.sum(y**2, axis=1))
    return Products(count, *map(last, sums))


def see(
    monomials: Monomials,
    reference: CentreAndScale,
    x: Array,
    slope: Array,
    value: Array,
    score: Array,
) -> tuple[Any, Array]:
    """Stein's functions and the targets at one sample."""
    at = (x - reference.centre) / reference.scale
    u = monomials.evaluate(at, slope * reference.scale)
    f, s = value - reference.value, score - reference.score
    return u, jnp.concatenate([f, s, jnp.outer(s, f).ravel()])


def controlled(means: SteinMeans, sizes: tuple[int, ...]) -> Float[Array, "T C"]:
    """Each chain's targets less their regressions, with coefficients from other chains."""
    num_chains = means.seen.y.shape[-1]
    if num_chains < stein.FOLDS or not sizes:
        return means.seen.y
    fold = [chain * stein.FOLDS // num_chains for chain in range(num_chains)]
    edges = [fold.index(k) for k in range(stein.FOLDS)] + [num_chains]

    def of_folds(leaf):
        parts = [leaf[..., edges[k] : edges[k + 1]].sum(axis=-1) for k in range(stein.FOLDS)]
        return jnp.stack(parts)

    products = jax.tree.map(of_folds, means.products)
    # Of the same parts, folds leading.
    moments = Moments(*jax.tree.leaves(products))
    found = stein.coefficients(moments, sizes)
    return means.seen.y - jnp.einsum("cmt,mc->tc", found[jnp.array(fold)], means.seen.u)
