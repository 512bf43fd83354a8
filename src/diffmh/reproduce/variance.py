"""Fig. 5: the variance of the entropy's derivative as a function of the length of the chain."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key
from matplotlib.figure import Figure

from .._expectation import expectation
from ..estimators import Covariance, Score, StochasticDerivative
from ..models import mixture as model
from ..plots import style
from .experiment import Claim, Data, Experiment, Result, Size, length
from .progress import Status

H, BURN_IN = 0.4, 50
ESTIMATORS: dict[str, tuple[Any, str, str]] = {
    "score": (Score(), style.AMBER, "score"),
    "one_sided": (
        StochasticDerivative("one-sided"),
        style.RED,
        "stochastic derivative, one-sided (the paper's)",
    ),
    "two_sided": (StochasticDerivative(alternatives=1), style.BLUE, "two-sided weights"),
    "eight": (StochasticDerivative(alternatives=8), style.VIOLET, "two-sided, 8 alternatives"),
    "covariance": (Covariance(), style.GREEN, "covariance (at stationarity)"),
}
# Read off the paper's figure, and measured again with its settings (ESTIMATOR.md, section 11).
PAPER = {
    "one_sided": {50: 1.5e-3, 200: 2.1e-4, 500: 9.2e-5, 2000: 1.9e-5, 5000: 8.6e-6},
    "score": {50: 5.2e-2, 200: 0.10, 500: 0.19, 2000: 0.52, 5000: 2.1},
}
ANEW = {50: 1.28e-3, 200: 2.29e-4, 500: 8.3e-5, 2000: 2.05e-5, 5000: 7.9e-6}


class Variance(Data):
    """The variance of one chain's derivative, by estimator and length."""

    length: Int[np.ndarray, "n"]
    one_sided: Float[np.ndarray, "n"]
    two_sided: Float[np.ndarray, "n"]
    eight: Float[np.ndarray, "n"]
    covariance: Float[np.ndarray, "n"]
    score: Float[np.ndarray, "n"]


def one_chain_variance(num_samples: int, estimator: Any, key: Array, num_chains: int) -> float:
    """The variance of `−Σ (1 + log p̂) dp̂`, both from the same chain, as in the paper."""
    runs = length(num_samples, BURN_IN, num_chains)
    occupancy = expectation(model.indicator, model.sampler(), init=0, estimator=estimator, **runs)
    p, slope = jax.jvp(lambda h: occupancy.per_chain(h, key), (H,), (1.0,))
    # A component that a short chain never visited contributes nothing to the entropy.
    derivative = -jnp.sum(
        jnp.where(p > 0, 1 + jnp.log(jnp.where(p > 0, p, 1.0)), 0.0) * slope, axis=1
    )
    # In double precision: the variances range over ten orders of magnitude.
    return float(np.var(np.asarray(derivative, float), ddof=1))


def compute(key: Key[Array, ""], size: Size, progress: Status) -> Result[Variance]:
    lengths = (50, 500, 2000) if size is Size.FAST else (50, 200, 500, 2000, 5000)
    num_chains = size.pick(8_000, 10_000, 20_000)
    cases = list(itertools.product(ESTIMATORS, lengths))
    found = {
        (name, n): one_chain_variance(
            n, ESTIMATORS[name][0], jax.random.fold_in(key, n), num_chains
        )
        for name, n in progress.over(cases, lambda case: f"{ESTIMATORS[case[0]][2]}, N = {case[1]}")
    }
    by_length = {name: np.array([found[name, n] for n in lengths]) for name in ESTIMATORS}
    data = Variance(length=np.array(lengths), **by_length)
    settings = f"h = {H}, burn-in {BURN_IN}, each variance over {num_chains:,} independent chains."
    return Result(data, settings, [row for i in range(len(lengths)) for row in _rows(data, i)])


def _rows(data: Variance, i: int) -> list[Claim]:
    n, one = int(data.length[i]), float(data.one_sided[i])
    score, ratio = float(data.score[i]), float(data.two_sided[i]) / one

    def near(ours, known, factor):
        return bool(known / factor <= ours <= known * factor)

    factor, bar = (2.0, "within a factor 2") if n >= 2000 else (1.25, "within 25 %")
    paper, paper_score = PAPER["one_sided"][n], PAPER["score"][n]
    known = (f"{paper:.2g}", f"{ANEW[n]:.3g} measured again", f"{one:.3g}", "within 25 %")
    what = "stochastic derivative (one-sided)"
    read_off = (f"{paper_score:.2g}", "—", f"{score:.3g}", bar)
    halved = ("—", "—", f"{ratio:.3f}", "≤ 0.6")
    return [
        Claim(f"variance, {what}, N = {n}", *known, near(one, ANEW[n], 1.25)),
        Claim(f"variance, score, N = {n}", *read_off, near(score, paper_score, factor)),
        Claim(f"variance, two-sided / one-sided, N = {n}", *halved, ratio <= 0.6),
    ]


def plot(data: Variance, narrow: bool) -> Figure:
    figure, ax = style.one_panel(6.6, 4.0, narrow, 4.6)
    for name, (_, colour, label) in ESTIMATORS.items():
        ax.loglog(data.length, getattr(data, name), "o-", color=colour, lw=1.5, ms=4, label=label)
    for name, label in (("one_sided", None), ("score", "read off the paper")):
        read = PAPER[name]
        ax.loglog(list(read), list(read.values()), "x", color=style.INK, ms=6, label=label)
    falling = data.one_sided[0] * data.length[0] / data.length
    ax.loglog(data.length, falling, color=style.GREY, lw=1, ls=":", label="1/N")
    style.name(ax, "", "samples N", "variance of the entropy's derivative")
    if narrow:
        style.key(ax, loc="lower left", bbox_to_anchor=(-0.2, 1.0), borderpad=0)
    else:
        style.key(ax, loc="center right", bbox_to_anchor=(1.0, 0.56))
    return figure


EXPERIMENT = Experiment(
    name="variance",
    figure=5,
    title="Variance against the length of the chain",
    shows=(
        "The variance of the derivative of the posterior's entropy from one chain. That of the"
        " stochastic derivative falls like 1/N, that of the score grows. Below the paper's:"
        " two-sided weights, eight alternatives at a time, and the covariance estimator, which"
        " needs a converged chain."
    ),
    data=Variance,
    compute=compute,
    plot=plot,
)
