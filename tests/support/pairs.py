"""Pairs of chains taken apart: what each pair has for D, for the covariance C and for their
mixture, from one program.
"""

from __future__ import annotations

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import diffmh
from diffmh.core import admission
from diffmh.core.execute import run
from diffmh.core.simulation import Outcome
from diffmh.estimators import mixing
from diffmh.estimators.mixing import PairTerms


class Parts(NamedTuple):
    """Of each pair, pairs leading: H(f) (C, F), and derivatives (C, F, P)."""

    value: np.ndarray
    decisions: np.ndarray
    covariance: np.ndarray | None
    mixed: np.ndarray
    means: PairTerms
    outcome: Outcome


def leading(array) -> np.ndarray:
    """(P, F, C) as (C, F, P)."""
    return np.moveaxis(np.asarray(array, float), (0, 1, 2), (2, 1, 0))


def parts(expectation: diffmh.Expectation, theta, key, *args) -> Parts:
    theta = jnp.asarray(theta)
    plan = admission.admit(expectation.simulation, theta, key, args).plan
    outcome = eqx.filter_jit(run)(plan, theta, key, args)
    means, value = outcome.observed.estimator, outcome.observed.value
    one_fold = np.zeros(value.shape[-1], int)
    return Parts(
        np.asarray(value, float).T,
        leading(means.derivative),
        None if means.score is None else leading(mixing.by_covariance(means, one_fold)),
        leading(mixing.mixed(means, value)),
        means,
        outcome,
    )


def groups(means: PairTerms, size: int) -> np.ndarray:
    """The mixture of each group of so many pairs, as if it were a run of its own: (runs, F, P)."""
    count = means.value.shape[-1] // size
    cut = lambda leaf: leaf[..., : count * size].reshape(*leaf.shape[:-1], count, size)
    apart = jax.tree.map(lambda leaf: jnp.moveaxis(cut(leaf), -2, 0), means)
    each = jax.vmap(lambda means: jnp.mean(mixing.mixed(means, means.value), axis=-1))(apart)
    return np.swapaxes(np.asarray(each, float), 1, 2)
