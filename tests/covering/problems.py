"""For each kernel a small problem and its exact answer.

Discrete kernels move a state of two units `v` and a label `h`, twelve states in all, of a density
in which the units are independent given the label. The others move a float of a normal density.
Tables of numbers are data in `args`, or closed over. All of them are float32 numbers, so that the
oracle differentiates the very chain that is sampled.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from oracles import derivative, finite_chain_mean, lagged_chain_mean
from staged import swap_matrix

import diffmh

OUTPUTS = 2
Tables = dict[str, np.ndarray]


class Problem(NamedTuple):
    """`tables` are the arguments, or `None` if they are closed over; `starts` are two states, the
    first that of a fixed start, and a random one is one of the two with the same probability.
    `exact(num_samples, burn_in, lag)` has the value (F,) and Jacobian (F, P) of the finite chain;
    `covariance(num_samples, burn_in, num_chains)` what `Covariance()` has for them in the mean, and
    `stationary(lag)` the equilibrium's.
    """

    theta: np.ndarray
    tables: Tables | None
    kernel: diffmh.extend.Kernel
    f: Callable[..., Any]
    control: Callable[..., Any]
    starts: tuple[Any, Any]
    exact: Callable[[int, int, int], tuple[np.ndarray, np.ndarray]]
    covariance: Callable[[int, int, int], tuple[np.ndarray, np.ndarray]]
    stationary: Callable[[int], tuple[np.ndarray, np.ndarray]]


def problem_of(row) -> Problem:
    make = _discrete
    if row["kernel"] in CONTINUOUS:
        make = functools.partial(_continuous, proved=row["control"] == "stein")
    return make(
        row["kernel"],
        row["proposal"] == "of theta",
        row["coupling"],
        row["parameters"],
        row["f"] == "of theta",
        row["args"] == "tables",
        row["zeros"] == "some",
        row["lag"] > 0,
        row["start"] == "function",
    )


CONTINUOUS = ("walk", "langevin", "hamiltonian")


# Discrete states.
STATES = list(itertools.product((0, 1), (0, 1), (0, 1, 2)))
V0, V1, H = np.array(STATES).T


def _moves_labels(kernel: str, of_theta: bool) -> bool:
    """True if the kernel leads from one label to another; else it moves the units alone."""
    return not (kernel in ("block", "sweep") or (kernel == "repeat" and not of_theta))


def _single(array) -> np.ndarray:
    return np.asarray(array, np.float32).astype(float)


@functools.cache
def discrete_tables(parameters: int, zeros: bool) -> tuple[np.ndarray, Tables]:
    """`log g = base + slope · θ` over the states, and the units' log odds given the label: `log g =
    c(h) + Σ_i v_i odds_i(h)`, so that they are independent.
    """
    rng = np.random.default_rng([11, parameters])
    spread = 1.2 / np.sqrt(parameters)
    # Quarters, so that sums are exact and the odds those of the density.
    odds = np.round(4 * rng.normal(size=(2, 3))) / 4
    odds_slope = np.round(64 * spread * rng.normal(size=(2, 3, parameters))) / 64
    label, label_slope = rng.normal(size=3), spread * rng.normal(size=(3, parameters))
    tables = {
        "base": np.round(4 * label[H]) / 4 + V0 * odds[0, H] + V1 * odds[1, H],
        "slope": np.round(64 * label_slope[H]) / 64
        + V0[:, None] * odds_slope[0, H]
        + V1[:, None] * odds_slope[1, H],
        "odds": odds.T,
        "odds_slope": np.swapaxes(odds_slope, 0, 1),
        "values": rng.normal(size=(12, OUTPUTS)),
        "slopes": 0.5 * rng.normal(size=(12, OUTPUTS)),
    }
    theta = _single(rng.normal(size=parameters))
    tables = {name: _single(table) for name, table in tables.items()}
    if zeros:
        # Beside label 1 the first unit is 0, and beside label 2 the second is 1: with the units
        # at their start, label 2 is impossible. f need not be a number where the chain cannot be.
        impossible = ((H == 1) & (V0 == 1)) | ((H == 2) & (V1 == 0))
        tables["base"][impossible], tables["values"][impossible] = -np.inf, np.inf
        tables["odds"][1, 0], tables["odds"][2, 1] = -np.inf, np.inf
    return theta, tables


PROPOSAL = _single([[0.3, -0.4, 0.5], [-0.2, 0.1, 0.8], [0.6, 0.2, -0.3]])
UNIT_PROPOSAL = _single([[0.1, 0.6], [0.4, -0.3]])


def _entry(table, here):
    """An entry of a table by comparison: infinite entries elsewhere do no harm."""
    return jnp.sum(jnp.where(here.reshape(-1, *(1,) * (table.ndim - 1)), table, 0), axis=0)


def discrete_odds(theta, x, tables):
    """Of the units, given the label."""
    return _entry(tables["odds"] + tables["odds_slope"] @ theta, jnp.arange(3) == x["h"])


def discrete_density(theta, x, tables):
    return _entry(tables["base"] + tables["slope"] @ theta, _here(x))


def _index(x):
    return 6 * x["v"][0] + 3 * x["v"][1] + x["h"]


def _here(x):
    return jnp.arange(12) == _index(x)


def discrete_f(theta, x, tables):
    return _entry(tables["values"], _here(x))


def discrete_f_of_theta(theta, x, tables):
    return discrete_f(theta, x, tables) + theta[0] * _entry(tables["slopes"], _here(x))


def discrete_control(theta, x, tables):
    """Some function of f's form."""
    return _entry(tables["slopes"], _here(x))


def softmax_rows(logits, theta, of_theta: bool, xp):
    """Probabilities of proposals: those of θ lean towards the first value."""
    if of_theta:
        lean = xp.concatenate(
            [xp.ones((logits.shape[0], 1)), xp.zeros((logits.shape[0], logits.shape[1] - 1))], 1
        )
        logits = logits + 0.7 * theta[0] * lean
    weights = xp.exp(logits)
    return weights / weights.sum(axis=1, keepdims=True)


# Of the stages of a schedule; of replicas.
STAGE_BETAS, BETAS = _single([0.5, 1.0, 0.8]), _single([1.0, 0.5])


@functools.cache
def of_first(function):
    """A function of the first of several replicas."""

    def call(theta, x, *args):
        return function(theta, jax.tree.map(lambda leaf: leaf[0], x), *args)

    return call


@functools.cache
def lagged(f):
    """f now, times its first entry `lag` steps before."""
    return lambda theta, earlier, x, *args: f(theta, earlier, *args)[0] * f(theta, x, *args)


def _closed(function, *which):
    """A density or f with its tables closed over, the same object for the same ones."""
    # JAX makes an array of a NumPy array that a function closes over once, whatever the precision
    # is later: each precision has tables of its own.
    return _closed_in(jax.config.jax_enable_x64, function, *which)


@functools.cache
def _closed_in(x64: bool, function, *which):
    name, *rest = which
    _, tables = (discrete_tables if name == "discrete" else normal_tables)(*rest)
    own = jax.tree.map(np.copy, tables)
    return lambda theta, x: function(theta, x, jax.tree.map(jnp.asarray, own))


def _discrete(
    kernel: str,
    of_theta: bool,
    coupling: str | None,
    parameters: int,
    f_of_theta: bool,
    in_args: bool,
    zeros: bool,
    lag: bool,
    random_start: bool,
) -> Problem:
    theta, tables = discrete_tables(parameters, zeros)
    own = lambda function: function if in_args else _closed(function, "discrete", parameters, zeros)
    density, odds = own(discrete_density), own(discrete_odds)
    observed = own(discrete_f_of_theta if f_of_theta else discrete_f)

    def metropolis(density=density):
        q = lambda theta: diffmh.On(
            lambda x: x["h"],
            diffmh.TransitionMatrix(softmax_rows(jnp.asarray(PROPOSAL), theta, of_theta, jnp)),
        )
        return diffmh.MetropolisHastings(
            density, q if of_theta else q(None), coupling_of(coupling, kernel, of_theta)
        )

    def one_label():
        if of_theta:
            return metropolis()
        proposal = diffmh.On(lambda x: x["v"], diffmh.OneLabel(2))
        return diffmh.MetropolisHastings(density, proposal, coupling_of(coupling, kernel, of_theta))

    def site(i):
        if not of_theta:
            q = diffmh.On(lambda x: x["v"][i], diffmh.OtherState(2))
        else:
            q = lambda theta: diffmh.On(
                lambda x: x["v"][i],
                diffmh.TransitionMatrix(softmax_rows(jnp.asarray(UNIT_PROPOSAL), theta, True, jnp)),
            )
        return diffmh.MetropolisHastings(density, q, coupling_of(coupling, kernel, of_theta))

    block = lambda: diffmh.BlockGibbs(odds, lambda x: x["v"], density)

    def function():
        """The units, then the label given them: decisions of one step."""
        move = metropolis().proposal

        @diffmh.extend.update(density)
        def in_turn(draw, theta, x, *args):
            x = x | {"v": draw.bernoulli(odds(theta, x, *args)).astype(x["v"].dtype)}
            y = draw.propose(move, x, coupling_of(coupling, kernel))
            log_ratio = density(theta, y, *args) - density(theta, x, *args)
            back = move.log_prob(y, x) - move.log_prob(x, y)
            accepted = draw.accept(log_ratio + back)
            return jax.tree.map(lambda new, old: jnp.where(accepted, new, old), y, x)

        return in_turn

    def heated(beta):
        return metropolis(lambda theta, x, *args: beta * density(theta, x, *args))

    kernels = {
        "labels": metropolis,
        "schedule": lambda: diffmh.Schedule(
            lambda stage: heated(jnp.asarray(STAGE_BETAS, jnp.float32)[stage]), len(STAGE_BETAS), 2
        ),
        "tempering": lambda: diffmh.Tempering(heated, BETAS.astype(np.float32)),
        "gibbs": lambda: diffmh.Gibbs(
            density, lambda x: x["h"], 3, coupling_of(coupling, kernel, of_theta)
        ),
        "block": block,
        "cycle": lambda: diffmh.Cycle(block(), metropolis()),
        "repeat": lambda: diffmh.Repeat(one_label(), 2),
        "sweep": lambda: diffmh.Sweep(site, 2),
        "function": function,
        "mixture": lambda: diffmh.Mixture(metropolis(), block(), probabilities=(0.6, 0.4)),
    }

    def log_density(theta):
        # Far below everything, where the sampler has −inf: NaN in rows that are never reached.
        return np.maximum(tables["base"], -1e3) + tables["slope"] @ theta

    def matrix(theta):
        table = log_density(theta)
        label = softmax_rows(PROPOSAL, theta, of_theta, np)
        same_units = (V0[:, None] == V0) & (V1[:, None] == V1)

        def of_labels(table):
            return mh_matrix(table, np.where(same_units, label[H[:, None], H], 0.0))

        mh = of_labels(table)
        gibbs = conditional(table, same_units)
        block = conditional(table, H[:, None] == H)

        def unit(v, other):
            q = softmax_rows(UNIT_PROPOSAL, theta, True, np) if of_theta else 1 - np.eye(2)
            same = (other[:, None] == other) & (H[:, None] == H)
            return mh_matrix(table, np.where(same, q[v[:, None], v], 0.0))

        def one_label():
            differ = 1 * (V0[:, None] != V0) + (V1[:, None] != V1)
            return mh_matrix(table, np.where((differ == 1) & (H[:, None] == H), 0.5, 0.0))

        return {
            "labels": lambda: mh,
            "schedule": lambda: functools.reduce(
                np.matmul,
                [np.linalg.matrix_power(of_labels(beta * table), 2) for beta in STAGE_BETAS],
            ),
            "tempering": lambda: (
                np.kron(*(of_labels(beta * table) for beta in BETAS))
                @ swap_matrix([beta * table for beta in BETAS])
            ),
            "gibbs": lambda: gibbs,
            "block": lambda: block,
            "cycle": lambda: block @ mh,
            "repeat": lambda: np.linalg.matrix_power(mh if of_theta else one_label(), 2),
            "sweep": lambda: unit(V0, V1) @ unit(V1, V0),
            "function": lambda: block @ mh,
            "mixture": lambda: 0.6 * mh + 0.4 * block,
        }[kernel]()

    finite = np.where(np.isfinite(tables["values"]), tables["values"], 0.0)
    values = lambda theta: finite + f_of_theta * tables["slopes"] * theta[0]
    control = own(discrete_control)
    # Possible, and each leads to the other.
    other = {"h": 1} if _moves_labels(kernel, of_theta) else {"v": (1, 0)}
    state = {"v": (0, 0), "h": 0}
    starts = tuple(
        {name: np.asarray(one[name], np.int32) for name in one} for one in (state, state | other)
    )
    number = lambda x: STATES.index((*x["v"].tolist(), int(x["h"])))
    places = [number(x) for x in starts][: 1 + random_start]
    exact = exact_of(matrix, values, log_density, theta, one_of(places, len(STATES)))
    if kernel == "tempering":
        # The first replica's number leads in that of both.
        count, observed, control = len(STATES), of_first(observed), of_first(control)
        starts = jax.tree.map(lambda leaf: np.stack([leaf] * len(BETAS)), starts)
        both = lambda theta: np.add.outer(*(beta * log_density(theta) for beta in BETAS)).ravel()
        first = lambda theta: np.repeat(values(theta), count, axis=0)
        of_both = one_of([count * place + place for place in places], count**2)
        exact = exact_of(matrix, first, both, theta, of_both)
    return Problem(
        theta,
        tables if in_args else None,
        kernels[kernel](),
        lagged(observed) if lag else observed,
        control,
        starts,
        *exact,
    )


def mh_matrix(log_density: np.ndarray, proposal: np.ndarray) -> np.ndarray:
    """Metropolis–Hastings by a proposal that may depend on θ too."""
    here = np.where(proposal.real > 0, proposal, 1.0)
    correction = np.log(here.T) - np.log(here)
    ratio = log_density[None, :] - log_density[:, None] + correction
    return with_rejections(proposal * np.where(proposal.real > 0, accepted(ratio), 0.0))


def accepted(ratio: np.ndarray) -> np.ndarray:
    """`min(1, e^ratio)` of complex numbers; no ratio is 0 but that of staying."""
    return np.where(
        ratio.real < 0, np.exp(np.minimum(ratio.real, 0.0)) * (1 + 1j * ratio.imag), 1.0
    )


def with_rejections(moves: np.ndarray) -> np.ndarray:
    return moves + np.diag(1 - moves.sum(axis=1))


def conditional(log_density: np.ndarray, together: np.ndarray) -> np.ndarray:
    """Gibbs: anew among the states that are possible together."""
    weights = np.exp(log_density)[None, :] * together
    total = weights.sum(axis=1, keepdims=True)
    return weights / np.where(np.abs(total) > 0, total, 1.0)


# So many steps from the start no chain of these knows where it began.
_FAR = 2**13


def one_of(places: list[int], count: int) -> np.ndarray:
    """Each of these places with the same probability."""
    return np.eye(count)[places].mean(axis=0)


def exact_of(matrix, values, log_density, theta, begin):
    """`exact`, `covariance` and `stationary` of a problem, from its transition matrix, f and
    density over states as functions of θ, and the distribution of its start.
    """

    def exact(num_samples, burn_in, lag):
        def mean(theta):
            step, f = matrix(theta), values(theta)
            if lag:
                return lagged_chain_mean(step, begin, f[:, :1], f, num_samples, burn_in, lag)
            return finite_chain_mean(step, begin, f, num_samples, burn_in)

        return derivative(mean, theta)

    def covariance(num_samples, burn_in, num_chains):
        """`E[f s] − E[f] E[s] + E[∂f]` over steps and chains, with `s = ∂ log g`; of a single
        chain, which does not know these means, `E[f s] − E[f̄ s̄] + E[∂f]`.
        """
        step, (f, slope) = matrix(theta).real, derivative(values, theta)
        score = derivative(log_density, theta)[1]
        row, occupied = begin @ np.linalg.matrix_power(step, burn_in), []
        for _ in range(num_samples):
            row = row @ step
            occupied.append(row)
        mean = np.mean(occupied, axis=0)
        product = np.einsum("s,sf,sp->fp", mean, f, score) + np.einsum("s,sfp->fp", mean, slope)
        if num_chains > 1:
            return mean @ f, product - np.outer(mean @ f, mean @ score)
        # Σ_{t, u} E[f_t s_u]: at the same step, and the later ones of each seen from the earlier.
        together = num_samples * np.einsum("s,sf,sp->fp", mean, f, score)
        later_f, later_score = np.zeros_like(f), np.zeros_like(score)
        for row in reversed(occupied):
            together += (row[:, None] * f).T @ later_score + later_f.T @ (row[:, None] * score)
            later_f, later_score = step @ (f + later_f), step @ (score + later_score)
        return mean @ f, product - together / num_samples**2

    def stationary(lag):
        def mean(theta):
            step, f = matrix(theta), values(theta)
            row = begin @ np.linalg.matrix_power(step, _FAR)
            if lag:
                row = (row * f[:, 0]) @ np.linalg.matrix_power(step, lag)
            return row @ f

        return derivative(mean, theta)

    return exact, covariance, stationary


# A float.
SCALE, STEP, LEAPS = 1.7, 0.9, 2
# Where the support ends, if it does; no start is below.
LOWEST = -0.5


@functools.cache
def normal_tables(parameters: int, zeros: bool) -> tuple[np.ndarray, Tables]:
    """`log g = −½ e^{b·θ} (x − a·θ)²`."""
    rng = np.random.default_rng([12, parameters])
    spread = 1 / np.sqrt(parameters)
    theta = rng.normal(size=parameters)
    a, b = spread * rng.normal(size=(2, parameters))
    # The mean is 0.4 and the precision e^0.2, whatever the draw.
    a, b = (
        a + (0.4 - a @ theta) * theta / (theta @ theta),
        b + (0.2 - b @ theta) * theta / (theta @ theta),
    )
    tables = {"mean": _single(a), "log_precision": _single(b)}
    return _single(theta), tables | {"lowest": np.array(LOWEST if zeros else -np.inf)}


def normal_density(theta, x, tables):
    mean, log_precision = tables["mean"] @ theta, tables["log_precision"] @ theta
    return -0.5 * jnp.exp(log_precision) * (x - mean) ** 2


def truncated_density(theta, x, tables):
    return jnp.where(x > tables["lowest"], normal_density(theta, x, tables), -jnp.inf)


def normal_f(theta, x, tables):
    return jnp.stack([x, jnp.cos(x)])


def normal_f_of_theta(theta, x, tables):
    return jnp.stack([x, jnp.cos(x)]) + theta[0] * jnp.stack([0.5 * x**2, jnp.sin(x)])


def normal_control(theta, x, tables):
    return jnp.stack([1.5 * x, jnp.sin(x)])


def step_of(theta, of_theta: bool, fixed: float, xp):
    return fixed * xp.exp(0.3 * theta[0]) if of_theta else fixed


def _continuous(
    kernel: str,
    of_theta: bool,
    coupling: str | None,
    parameters: int,
    f_of_theta: bool,
    in_args: bool,
    zeros: bool,
    lag: bool,
    random_start: bool,
    proved: bool,
) -> Problem:
    """With `proved`, a density without an end that no proof could exclude."""
    theta, tables = normal_tables(parameters, zeros)
    own = lambda function: function if in_args else _closed(function, "normal", parameters, zeros)
    bounded = zeros or (kernel == "walk" and not of_theta and not proved)
    density = own(truncated_density if bounded else normal_density)
    observed = own(normal_f_of_theta if f_of_theta else normal_f)
    walk = lambda theta: diffmh.GaussianWalk(step_of(theta, of_theta, SCALE, jnp))
    step = (lambda theta: step_of(theta, True, STEP, jnp)) if of_theta else STEP
    kernels = {
        "walk": lambda: diffmh.MetropolisHastings(
            density, walk if of_theta else walk(None), coupling_of(coupling, kernel, of_theta)
        ),
        "langevin": lambda: diffmh.Langevin(density, step, coupling_of(coupling, kernel, of_theta)),
        "hamiltonian": lambda: diffmh.Hamiltonian(density, step, LEAPS),
    }
    low, high, cells = (LOWEST if zeros else -5.5), 6.5, 480
    width = (high - low) / cells
    grid = low + width * (np.arange(cells) + 0.5)
    places = [int(np.argmin(np.abs(grid - start))) for start in (1.0, -0.2)]

    # θ acts by these numbers: mean, log precision, and θ_0 itself.
    reduced = np.stack([tables["mean"], tables["log_precision"], np.eye(len(theta))[0]])

    def log_density(eta):
        return -0.5 * np.exp(eta[1]) * (grid - eta[0]) ** 2

    def matrix(eta):
        x, new = grid[:, None], grid[None]
        mean, precision = eta[0], np.exp(eta[1])
        ratio = log_density(eta)[None] - log_density(eta)[:, None]
        if kernel == "hamiltonian":
            size = step_of(eta[2:], of_theta, STEP, np)
            whole = leapfrog_matrix(precision, size)
            p = (new - mean - whole[0, 0] * (x - mean)) / whole[0, 1]
            p_new = whole[1, 0] * (x - mean) + whole[1, 1] * p
            density = np.exp(-0.5 * p**2) / np.sqrt(2 * np.pi) / whole[0, 1]
            return with_rejections(width * density * accepted(ratio + 0.5 * (p**2 - p_new**2)))
        size = step_of(eta[2:], of_theta, SCALE if kernel == "walk" else STEP, np)
        drift = 0.5 * size**2 * precision if kernel == "langevin" else 0.0
        log_q = -0.5 * ((new - x + drift * (x - mean)) / size) ** 2 - np.log(size)
        density = np.exp(log_q) / np.sqrt(2 * np.pi)
        return with_rejections(width * density * accepted(ratio + log_q.T - log_q))

    def values(eta):
        table = np.stack([grid, np.cos(grid)], 1)
        if not f_of_theta:
            return table
        return table + eta[2] * np.stack([0.5 * grid**2, np.sin(grid)], 1)

    begin = one_of(places[: 1 + random_start], cells)
    exact, covariance, stationary = exact_of(matrix, values, log_density, reduced @ theta, begin)

    def by_theta(value, jacobian):
        return value, jacobian @ reduced

    return Problem(
        theta,
        tables if in_args else None,
        kernels[kernel](),
        lagged(observed) if lag else observed,
        own(normal_control),
        (float(grid[places[0]]), float(grid[places[1]])),
        lambda *length: by_theta(*exact(*length)),
        lambda *length: by_theta(*covariance(*length)),
        lambda lag: by_theta(*stationary(lag)),
    )


def leapfrog_matrix(precision, size):
    """Of `(x − mean, p)`."""
    kick = np.array([[1, 0], [-0.5 * size * precision, 1]])
    drift = np.array([[1, size], [0, 1]])
    return functools.reduce(np.matmul, [kick @ drift @ kick] * LEAPS)


def _slope(x):
    """The gradient that steers couplings."""
    return -(x - 0.4)


def coupling_of(
    name: str | None, kernel: str, of_theta: bool = False
) -> diffmh.extend.Coupling | None:
    """`special` is one that is made for the kernel's proposal, or else the general one."""
    if name == "special":
        kernel = "repeat of theta" if kernel == "repeat" and of_theta else kernel
        return SPECIAL.get(kernel, diffmh.NearlyMaximal)()
    if name == "unsuitable":
        return UNSUITABLE.get(kernel, diffmh.MaximalReflection)()
    return {
        "default": lambda: None,
        "common": diffmh.CommonRandomNumbers,
        "independent": diffmh.Independent,
        "maximal": diffmh.Maximal,
    }[name or "default"]()


SPECIAL = {
    "walk": lambda: diffmh.TwoScale(diffmh.GradientReflection(_slope), distance=2.0),
    "langevin": lambda: diffmh.TwoScale(diffmh.GradientCommonRandomNumbers(_slope)),
    "repeat": diffmh.SameSite,
    "gibbs": diffmh.Maximal,
}
UNSUITABLE = {"walk": diffmh.SameSite, "langevin": diffmh.SameSite, "gibbs": diffmh.NearlyMaximal}
