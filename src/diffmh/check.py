"""check: tries a user's own density, proposal and coupling against what they promise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key, PyTree
from scipy import stats

from . import _admission, _trees, _validate
from .estimators import StochasticDerivative
from .kernel import Kernel
from .kernels import MetropolisHastings
from .proposals import On
from .simulation import Simulation

# A healthy kernel fails a statistical test once in a million: with some tens of tests, a false
# alarm in ten thousand checks.
_FALSE_ALARM = 1e-6
_DRAWS = 4_000
_PAIRS = 4


class Finding(eqx.Module):
    """One promise, whether it was kept, and what was seen."""

    promise: str
    kept: bool
    detail: str


class Findings(eqx.Module):
    """What `check` found. True if everything was kept; print it to read it."""

    findings: tuple[Finding, ...]

    def __bool__(self) -> bool:
        return all(finding.kept for finding in self.findings)

    @property
    def broken(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if not finding.kept)

    def __str__(self) -> str:
        mark = lambda finding: "ok    " if finding.kept else "BROKEN"
        return "\n".join(
            f"{mark(finding)} {finding.promise}: {finding.detail}" for finding in self.findings
        )


def check(kernel: Kernel, theta: PyTree, key: Key[Array, ""], *args: Any, init: PyTree) -> Findings:
    """Tries what a kernel's density, proposal and coupling promise, at states that a short run
    visits, and names what is wrong.

    - the density is a finite real scalar that depends on theta, and gives the same value twice;
    - the proposal keeps the form of the state; it is symmetric if it says so; `log_prob` is the
      density of what `sample` draws;
    - the coupling is faithful (chains that met stay together), and what it proposes to the other
      chain has the right distribution.

    The statistical tests raise a false alarm about once in 10⁴ checks.

    >>> import jax, diffmh
    >>> normal = diffmh.MetropolisHastings(lambda theta, x: -0.5 * (x - theta) ** 2, diffmh.GaussianWalk(2.38))
    >>> bool(diffmh.check(normal, 0.5, jax.random.key(0), init=0.0))
    True
    """
    _validate.instance(kernel, Kernel, "check(kernel, theta, key, *args, init=...)", "kernel")
    theta, key = _trees.strong(_validate.theta(theta)), _validate.typed_key(key)
    start = init if callable(init) else _trees.strong(_validate.state(init, "`init`"))
    simulation = Simulation(
        kernel, start, lambda theta, x, *args: 0.0, StochasticDerivative(), 1, 0, 1
    )
    findings: list[Finding] = []
    try:
        _admission.admit(simulation, theta, key, args)
        _admission.check_start(simulation, theta, key, args)
        findings.append(
            Finding("density", True, "a finite scalar at the start, and it depends on theta")
        )
    except (TypeError, ValueError) as error:
        findings.append(Finding("density or proposal", False, str(error)))
        return Findings(tuple(findings))
    x = jax.tree.map(lambda leaf: leaf[..., 0], simulation.starts(key))
    for number, step in enumerate(kernel.updates()):
        if isinstance(step, MetropolisHastings):
            findings += _check_step(step, theta, jax.random.fold_in(key, number), args, x)
    return Findings(tuple(findings))


def _check_step(kernel: MetropolisHastings, theta, key, args, x) -> list[Finding]:
    name = type(kernel.proposal).__name__
    proposal, states = kernel.proposal, _visited(kernel, theta, key, args, x)
    findings = [_repeatable(kernel, theta, args, states), _symmetric(proposal, key, states, name)]
    findings.append(_log_prob(proposal, key, states, name))
    while isinstance(proposal, On):
        states = jax.vmap(proposal.where)(states)
        proposal = proposal.proposal
    coupling_name = f"{type(kernel.coupling).__name__} of {type(proposal).__name__}"
    findings.append(_faithful(kernel.coupling, proposal, key, states, coupling_name))
    findings.append(_marginal(kernel.coupling, proposal, key, states, coupling_name))
    return findings


def _visited(kernel, theta, key, args, x) -> PyTree:
    """`_PAIRS` pairs of states `(x, y)`, y proposed and accepted from x: states that an
    alternative and its primal may be in.
    """

    def walk(carry, key):
        key_propose, key_accept = jax.random.split(key)
        new = kernel.proposal.sample(key_propose, carry)
        there, here = (kernel.log_density(theta, state, *args) for state in (new, carry))
        accepted = jnp.log(jax.random.uniform(key_accept)) < there - here
        carry = _trees.select(accepted, new, carry)
        return carry, carry

    _, path = jax.lax.scan(walk, x, jax.random.split(jax.random.fold_in(key, 1), 64 * _PAIRS))
    return jax.tree.map(lambda leaf: leaf[::32], path)


def _pair(states, number):
    pick = lambda i: jax.tree.map(lambda leaf: leaf[i], states)
    return pick(2 * number), pick(2 * number + 1)


def _repeatable(kernel, theta, args, states) -> Finding:
    density = jax.jit(jax.vmap(lambda x: kernel.log_density(theta, x, *args)))
    same = bool(jnp.array_equal(density(states), density(states), equal_nan=True))
    return Finding(
        "density is a function", same, "two evaluations agree" if same else "two evaluations differ"
    )


def _symmetric(proposal, key, states, name) -> Finding:
    promise = f"{name}.symmetric"
    if not proposal.symmetric:
        return Finding(promise, True, "not claimed")
    count = jax.tree.leaves(states)[0].shape[0]
    new = jax.vmap(proposal.sample)(jax.random.split(jax.random.fold_in(key, 2), count), states)
    forward, backward = (
        jax.vmap(proposal.log_prob)(states, new),
        jax.vmap(proposal.log_prob)(new, states),
    )
    kept = bool(np.allclose(forward, backward, rtol=1e-3, atol=1e-3))
    gap = float(np.nanmax(np.abs(np.asarray(forward - backward))))
    return Finding(
        promise,
        kept,
        "log q(x'|x) = log q(x|x')" if kept else f"log q(x'|x) and log q(x|x') differ by {gap:.3g}",
    )


def _log_prob(proposal, key, states, name) -> Finding:
    """With `s = q_y / (q_x + q_y)`: the mean of `h s` over draws from x is that of `h (1 − s)` over
    draws from y, for any h.

    Both are `∫ h q_x q_y / (q_x + q_y)`. Tried with h = 1 and h = s, which are bounded, so that the
    means are normal; they do not see a factor that depends on x' alone. For a single real number
    the mean of `k(x') / q(x'|x)`, k a narrow normal density, does.
    """
    promise, worst = f"{name}.log_prob is the density of sample", 1.0
    for number in range(_PAIRS):
        x, y = _pair(states, number)
        keys = jax.random.split(jax.random.fold_in(key, 100 + number))
        draws = [
            jax.vmap(proposal.sample, (0, None))(jax.random.split(k, _DRAWS), state)
            for k, state in zip(keys, (x, y), strict=True)
        ]
        log_q = lambda start, new: np.asarray(
            jax.vmap(proposal.log_prob, (None, 0))(start, new), float
        )
        share = lambda new: 1 / (1 + np.exp(np.clip(log_q(x, new) - log_q(y, new), -700, 700)))
        at_x, at_y = share(draws[0]), share(draws[1])
        worst = min(worst, _two_means(at_x, 1 - at_y), _two_means(at_x**2, at_y * (1 - at_y)))
        leaves = jax.tree.leaves(x)
        if (
            len(leaves) == 1
            and leaves[0].size == 1
            and jnp.issubdtype(leaves[0].dtype, jnp.floating)
        ):
            masses = [
                _mass(_columns(new)[0], log_q(start, new))
                for start, new in zip((x, y), draws, strict=True)
            ]
            worst = min(worst, _two_means(*masses))
    kept = worst > _FALSE_ALARM
    return Finding(
        promise,
        kept,
        f"least p-value {worst:.2g}" + ("" if kept else ": draws and density disagree"),
    )


def _mass(draws: np.ndarray, log_q: np.ndarray) -> np.ndarray:
    """`k(x') / q(x'|x)` with k normal about the median, a quarter of the interquartile range
    wide: its mean is `∫ k = 1`.
    """
    low, middle, high = np.quantile(draws, [0.25, 0.5, 0.75])
    return np.exp(stats.norm.logpdf(draws, middle, (high - low) / 4) - log_q)


def _two_means(a: np.ndarray, b: np.ndarray) -> float:
    spread = np.sqrt((a.var() + b.var()) / len(a))
    if not np.isfinite(spread):
        return 0.0
    if spread < 1e-6:
        return 1.0 if abs(a.mean() - b.mean()) < 1e-3 else 0.0
    return float(2 * stats.norm.sf(abs(a.mean() - b.mean()) / spread))


def _faithful(coupling, proposal, key, states, name) -> Finding:
    def one(key, x):
        key_sample, key_couple = jax.random.split(key)
        x_new = proposal.sample(key_sample, x)
        y_new = coupling.propose(key_couple, proposal, x, x_new, x)
        _validate.same_form(y_new, x, f"what `{type(coupling).__name__}` proposes")
        return _trees.equal(y_new, x_new)

    x, _ = _pair(states, 0)
    kept = bool(
        jnp.all(jax.vmap(one, (0, None))(jax.random.split(jax.random.fold_in(key, 3), 500), x))
    )
    return Finding(
        f"{name} is faithful",
        kept,
        "y = x gives y' = x'" if kept else "y = x does not give y' = x' bit for bit",
    )


def _marginal(coupling, proposal, key, states, name) -> Finding:
    """What the coupling proposes to y against direct draws from q(·|y): Kolmogorov–Smirnov on
    each coordinate's change.
    """
    worst = 1.0
    for number in range(_PAIRS):
        x, y = _pair(states, number)

        def coupled(key, x=x, y=y):
            key_sample, key_couple = jax.random.split(key)
            return coupling.propose(key_couple, proposal, x, proposal.sample(key_sample, x), y)

        keys = jax.random.split(jax.random.fold_in(key, 200 + number), 2 * _DRAWS)
        drawn = _columns(jax.vmap(coupled)(keys[:_DRAWS]))
        direct = _columns(jax.vmap(proposal.sample, (0, None))(keys[_DRAWS:], y))
        for a, b in zip(drawn, direct, strict=True):
            worst = min(worst, float(np.asarray(stats.ks_2samp(a, b, method="asymp"))[1]))
    kept = worst > _FALSE_ALARM
    detail = f"least p-value {worst:.2g}" + (
        "" if kept else ": y' is not distributed as q(·|y), so the gradient is biased"
    )
    return Finding(f"{name} keeps its marginal", kept, detail)


def _columns(tree: PyTree) -> list[np.ndarray]:
    """The first eight coordinates of each leaf."""
    flat: Callable[[Array], np.ndarray] = lambda leaf: np.asarray(leaf, float).reshape(
        leaf.shape[0], -1
    )
    return [column for leaf in jax.tree.leaves(tree) for column in flat(leaf).T[:8]]
