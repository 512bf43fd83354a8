"""check: tries a user's own density, proposal, coupling and updates against what they promise."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Key, PyTree

from ..base import trees, validate
from ..base.validate import Checked
from ..core import admission
from ..core.kernel import Kernel
from ..core.plan import Plan
from ..core.simulation import Simulation, nothing
from ..estimators import StochasticDerivative
from ..kernels.accept_reject import AcceptReject
from ..kernels.metropolis import MetropolisHastings
from ..proposals import Proposal
from . import trials
from .trials import Trial, Verdict
from .update_trials import try_updates

_DRAWS = 20_000
# Numbers in the draws of one test, which bound the memory for large states.
_NUMBERS = 8_000_000
_PAIRS = 4
# Of a log density whose digits are coarser than this, ratios are noise.
_COARSE = 0.5


class Findings(eqx.Module):
    """The verdicts of `check`. True if every promise was kept; print it to read it."""

    findings: tuple[Verdict, ...]

    def __bool__(self) -> bool:
        return all(finding.kept for finding in self.findings)

    @property
    def broken(self) -> tuple[Verdict, ...]:
        return tuple(finding for finding in self.findings if not finding.kept)

    def __str__(self) -> str:
        return "\n".join(
            f"{'ok    ' if each.kept else 'BROKEN'} {each.promise}: {each.detail}"
            for each in self.findings
        )


def check(
    kernel: Checked[Kernel], theta: PyTree, key: Checked[Key[Array, ""]], *args: Any, init: PyTree
) -> Findings:
    """Tries what a kernel's density, proposal and coupling promise, at states that a short run
    visits, and names what is wrong.

    - the density is a finite real scalar that depends on theta, gives the same value twice, and its
      derivative in theta is that of finite differences;
    - the proposal keeps the form of the state and can move the start; it is symmetric if it says
      so; `log_prob` is the density of what `sample` draws;
    - the coupling is faithful (chains that met stay together), and what it proposes to the other
      chain has the right distribution;
    - an `Update` of one's own reads theta only where its derivative is seen; leaves its
      `log_density` invariant in one step (tried where at most 400 states are reached, and for up to
      16 floats); its `coupled_step` equals `step` from the same state, bit for bit, and moves an
      alternative as a chain moves; its `flip_odds` have the derivatives of its decisions; and the
      derivative of a run of 3 steps is that of differences with common random numbers. If a kernel
      has many updates, 4 of them are tried separately.

    All statistical tests of a check together raise a false alarm in fewer than 1 of 1000. In every
    run of `benchmarks/check_power.py` (20 to 100 of each) it found: a drift of 0.1 of a step or
    steps 8 % too long in `sample`; half of the Jacobian of a multiplicative walk in two dimensions
    forgotten; a label of probability ½ drawn 0.04 more often; a coupling that moves the alternative
    0.08 of a step too far, shortens its steps by 10 %, correlates its coordinates by 0.1, or leaves
    it where it is in 1 of 200. A derivative of the density that is wrong by more than 2 % is found
    wherever float32 resolves it. Of an update on five labels it found in each of 20 runs: log odds
    of leaving one of them that are off by 0.15; derivatives of all log odds that are too large by a
    tenth; an alternative that stays where it is in 1 of 10.

    >>> import jax, diffmh
    >>> log_density = lambda theta, x: -0.5 * (x - theta) ** 2
    >>> normal = diffmh.MetropolisHastings(log_density, diffmh.GaussianWalk(2.38))
    >>> bool(diffmh.check(normal, 0.5, jax.random.key(0), init=0.0))
    True
    """
    validate.instance(kernel, Kernel, "check(kernel, theta, key, *args, init=...)", "kernel")
    theta, key = trees.strong(validate.theta(theta)), validate.typed_key(key)
    start = init if callable(init) else trees.strong(validate.state(init, "`init`"))
    simulation = Simulation(kernel, start, nothing, StochasticDerivative(), 1, 0, 1)
    updates = [update for update in kernel.updates() if isinstance(update, AcceptReject)]
    own = [update for update in kernel.updates() if not isinstance(update, AcceptReject)]
    try:
        # At one theta every proposal is a fixed one.
        fixed = [
            MetropolisHastings(update.density, update.proposal_at(theta, *args), update.coupling)
            for update in updates
        ]
        admission.admit(simulation, theta, key, args)
        admission.check_start(simulation, theta, key, args)
        x = jax.tree.map(
            lambda leaf: leaf[..., 0], Plan.of(simulation, theta, key, args).starts(key)
        )
        for update in fixed:
            assert isinstance(update.proposal, Proposal)
            update.proposal.refuse_start(jax.tree.map(np.asarray, x))
    except (TypeError, ValueError) as error:
        return Findings((Verdict("density or proposal", False, str(error)),))
    seen = "a finite scalar at the start, and it depends on theta"
    results: list[Verdict | Trial] = [Verdict("density", True, seen)]
    for number, update in enumerate(fixed):
        results += _try_update(update, theta, jax.random.fold_in(key, number), args, x)
    if own:
        try:
            results += try_updates(
                simulation, own, theta, jax.random.fold_in(key, len(updates)), args
            )
        except (TypeError, ValueError) as error:
            results.append(Verdict("kernel", False, str(error)))
    num_tests = sum(len(result.p_values) for result in results if isinstance(result, Trial))
    return Findings(
        tuple(each.judged(num_tests) if isinstance(each, Trial) else each for each in results)
    )


def _try_update(kernel: MetropolisHastings, theta, key, args, x) -> list[Verdict | Trial]:
    proposal, name = kernel.proposal, type(kernel.proposal).__name__
    assert isinstance(proposal, Proposal), "at one theta"
    key_visit, key_symmetric, key_density, key_faithful, key_marginal = jax.random.split(key, 5)
    pairs = _visited(kernel, theta, key_visit, args, x)
    results: list[Verdict | Trial] = [
        _repeatable(kernel, theta, args, pairs[0]),
        *_coarse(kernel, theta, args, pairs[0]),
        _derivative(kernel, theta, args, pairs[0]),
    ]
    pairs = tuple(jax.vmap(proposal.moved_part)(states) for states in pairs)
    proposal = proposal.part_proposal
    results.append(_symmetric(proposal, key_symmetric, pairs[0], name))
    results.append(_log_prob(proposal, key_density, pairs, name))
    coupling_name = f"{type(kernel.coupling).__name__} of {type(proposal).__name__}"
    results.append(_faithful(kernel.coupling, proposal, key_faithful, pairs[0], coupling_name))
    results.append(_marginal(kernel.coupling, proposal, key_marginal, pairs, coupling_name))
    return results


@eqx.filter_jit
def _visited(kernel, theta, key, args, x) -> tuple[PyTree, PyTree]:
    """`_PAIRS` pairs of states `(x, y)` along a short run, y proposed from x, in the support and
    other than x if that comes about: states that an alternative and its primal may be in.
    """

    def log_density(state):
        return kernel.density(theta, state, *args)

    def walk(carry, key):
        key_propose, key_accept = jax.random.split(key)
        new = kernel.proposal.sample(key_propose, carry)
        log_ratio = log_density(new) - log_density(carry)
        accepted = jnp.log(jax.random.uniform(key_accept)) < log_ratio
        carry = trees.select(accepted, new, carry)
        return carry, carry

    def neighbour(x, key):
        def look(found, key):
            new = kernel.proposal.sample(key, x)
            wanted = jnp.isfinite(log_density(new)) & trees.equal(found, x)
            return trees.select(wanted, new, found), None

        return jax.lax.scan(look, x, jax.random.split(key, 32))[0]

    key_walk, key_look = jax.random.split(key)
    _, path = jax.lax.scan(walk, x, jax.random.split(key_walk, 48 * _PAIRS))
    states = trees.take(path, slice(None, None, 48))
    return states, jax.vmap(neighbour)(states, jax.random.split(key_look, _PAIRS))


def _repeatable(kernel, theta, args, states) -> Verdict:
    both = [trials.log_densities(kernel.density, theta, args, states) for _ in range(2)]
    same = bool(jnp.array_equal(*both, equal_nan=True))
    right, wrong = "two evaluations agree", "two evaluations differ"
    return Verdict.of("density is a function", same, right, wrong)


def _coarse(kernel, theta, args, states) -> list[Verdict]:
    """A density whose last digit is so large that accept probabilities are rounded away."""
    densities = np.asarray(trials.log_densities(kernel.density, theta, args, states))
    digit = float(np.max(np.abs(densities)) * np.finfo(densities.dtype).eps)
    if digit < _COARSE:
        return []
    detail = (
        f"the last digit of a log density of {densities.flat[0]:.3g} is {digit:.2g}, and accept"
        " probabilities are rounded as coarsely: subtract a constant from `log_density`, or use"
        " float64"
    )
    return [Verdict("density's digits", False, detail)]


@eqx.filter_jit
def _slopes(kernel, theta, args, states, directions, widths):
    """For each state and direction `∂ log g` by JAX, and by central differences of each width
    with a bound on their rounding: (states, directions[, widths]).
    """
    flat, unravel = ravel_pytree(theta)

    def one(x, direction, size):

        def density(flat):
            return kernel.density(unravel(flat), x, *args)

        _, slope = jax.jvp(density, (flat,), (direction,))

        def difference(width):
            ends = [density(flat + sign * width * size * direction) for sign in (1, -1)]
            # The step that was taken, after rounding.
            step = jnp.sum(jnp.abs(flat + width * size * direction - flat)) / jnp.sum(
                jnp.abs(direction)
            )
            rounding = 8 * jnp.finfo(flat.dtype).eps * jnp.max(jnp.abs(jnp.stack(ends)))
            return (ends[0] - ends[1]) / (2 * step), rounding / step

        return slope, *jax.vmap(difference)(widths)

    size = jax.vmap(lambda d: jnp.maximum(jnp.max(jnp.abs(d * flat)), 0.1))(directions)
    over_directions = jax.vmap(one, (None, 0, 0))
    return jax.vmap(over_directions, (0, None, None))(states, directions, size)


def _derivative(kernel, theta, args, states) -> Verdict:
    """The derivative in theta agrees with differences of some width, to one part in a hundred and
    their rounding; differences whose rounding is more than that say nothing.
    """
    promise = "density's derivative in theta"
    flat, _ = ravel_pytree(theta)
    directions = trials.directions(flat.size, 8)
    widths = jnp.asarray(10 ** np.arange(-1, -4.5, -0.5), flat.dtype)
    found = _slopes(kernel, theta, args, states, jnp.asarray(directions, flat.dtype), widths)
    slope, differences, rounding = (np.asarray(each, float) for each in found)
    slope = slope[..., None]
    scale = np.maximum(np.abs(slope), np.abs(differences))
    tells = np.isfinite(differences) & (rounding <= 0.01 * scale)
    # Of all widths one must agree: wide ones are curved, narrow ones rounded.
    agrees = np.abs(differences - slope) <= 0.01 * scale + rounding
    wrong = tells.any(axis=-1) & ~(tells & agrees).any(axis=-1)
    if not wrong.any():
        tried = int(tells.any(axis=-1).sum())
        if not tried:
            return Verdict(promise, True, "not tried: rounding hides it, or it is zero")
        return Verdict(promise, True, f"agrees with finite differences, {tried} tried")
    state, direction = np.argwhere(wrong)[0]
    best = np.argmin(np.where(tells, rounding, np.inf)[state, direction])
    detail = (
        f"by JAX it is {slope[state, direction, 0]:.4g}, by finite differences"
        f" {differences[state, direction, best]:.4g}, in direction {directions[direction]} of theta"
        f" flattened, at x = {trees.take(states, int(state))}: a `custom_jvp`, a `stop_gradient`,"
        " or a jump"
    )
    return Verdict(promise, False, detail)


@eqx.filter_jit
def _both_ways(proposal, key, states) -> tuple[Array, Array]:
    """`log q(x'|x)` and `log q(x|x')` of moves from each state."""
    many = jax.tree.map(lambda leaf: jnp.repeat(leaf, 64, axis=0), states)
    new = jax.vmap(proposal.sample)(jax.random.split(key, 64 * _PAIRS), many)
    log_prob = jax.vmap(proposal.log_prob)
    return log_prob(many, new), log_prob(new, many)


def _symmetric(proposal, key, states, name) -> Verdict:
    promise = f"{name}.symmetric"
    if not proposal.symmetric:
        return Verdict(promise, True, "not claimed")
    forward, backward = map(np.asarray, _both_ways(proposal, key, states))
    # A symmetric proposal's ratio is left out of the accept ratio, so an asymmetry is a bias.
    kept = bool(np.allclose(forward, backward, rtol=1e-3, atol=1e-3))
    gap = float(np.nanmax(np.abs(forward - backward)))
    wrong = f"log q(x'|x) and log q(x|x') differ by {gap:.3g}"
    return Verdict.of(promise, kept, "log q(x'|x) = log q(x|x')", wrong)


@eqx.filter_jit
def _sampled(proposal, key, x, count: int) -> PyTree:
    return _over_keys(lambda key: proposal.sample(key, x), key, x, count)


def _over_keys(function, key, x: PyTree, count: int) -> PyTree:
    """`function` of `count` keys, in batches of at most 2¹⁵ numbers: of more, with δ the same for
    all draws, XLA's CPU compiler makes wrong code for `z − (z·δ) δ` (jaxlib 0.10.2).
    """
    batch = min(count, max(1, 2**15 // trees.size(x)))
    return jax.lax.map(function, jax.random.split(key, count), batch_size=batch)


@eqx.filter_jit
def _log_densities(proposal, x, new) -> Array:
    return jax.vmap(proposal.log_prob, (None, 0))(x, new)


def _num_draws(x: PyTree) -> int:
    return max(2_000, min(_DRAWS, _NUMBERS // max(trees.size(x), 1)))


def _log_prob(proposal, key, pairs, name) -> Trial:
    """Compare draws from x and from y with the densities that `log_prob` claims, and with a
    density that we know: a normal one fitted to them, or, on finitely many states, counts.
    """
    p_values: list[float] = []
    for number, key_pair in enumerate(jax.random.split(key, _PAIRS)):
        x, y = (trees.take(states, number) for states in pairs)
        keys = jax.random.split(key_pair)

        def log_q(start, new):
            return np.asarray(_log_densities(proposal, start, new), float)

        draws = [
            _sampled(proposal, k, state, _num_draws(x))
            for k, state in zip(keys, (x, y), strict=True)
        ]
        own = [log_q(x, draws[0]), log_q(y, draws[1])]
        if not all(np.all(np.isfinite(each)) for each in own):
            p_values.append(0.0)
            continue
        other = [log_q(y, draws[0]), log_q(x, draws[1])]
        p_values += trials.bridge(other[0] - own[0], own[1] - other[1])
        for start, new, log_new in zip((x, y), draws, own, strict=True):
            p_values += _against_known(proposal, start, new, log_new, number)
    meaning = "what `sample` draws does not have the density `log_prob`"
    return Trial(f"{name}.log_prob is the density of sample", tuple(p_values), meaning)


def _against_known(proposal, x, draws, log_q, seed) -> list[float]:
    leaves = jax.tree.leaves(x)
    flat = trials.flat(draws)
    if all(not jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in leaves):
        return trials.outcomes(flat, log_q)
    if not all(jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in leaves) or flat.shape[1] > 64:
        return []
    half = len(flat) // 2
    reference = trials.Reference(flat[:half])
    if not reference.usable:
        return []
    _, unravel = ravel_pytree(x)
    known = reference.sample(np.random.default_rng(seed), len(flat) - half)
    as_states = jax.vmap(unravel)(jnp.asarray(known, ravel_pytree(x)[0].dtype))
    known = trials.flat(as_states)
    claimed = np.asarray(_log_densities(proposal, x, as_states), float)
    # Outside the support of the proposal its density may be anything; NaN stands for none.
    claimed = np.where(np.isnan(claimed), -np.inf, claimed)
    # The reference was fitted to the first half, and is tried on the second.
    at_draws = reference.log_density(flat[half:]) - log_q[half:]
    return trials.bridge(at_draws, reference.log_density(known) - claimed)


@eqx.filter_jit
def _together(coupling, proposal, keys, states) -> Array:
    """True where `y = x` gave `y' = x'`, for each state and key."""

    def one(key, x):
        key_sample, key_couple = jax.random.split(key)
        x_new = proposal.sample(key_sample, x)
        y_new = coupling.propose(key_couple, proposal, x, x_new, x)
        validate.same_form(y_new, x, f"what `{type(coupling).__name__}` proposes")
        return trees.equal(y_new, x_new)

    return jax.vmap(jax.vmap(one, (0, None)))(keys, states)


def _faithful(coupling, proposal, key, states, name) -> Verdict:
    keys = jax.random.split(key, (_PAIRS, 200))
    kept = bool(jnp.all(_together(coupling, proposal, keys, states)))
    right, wrong = "y = x gives y' = x'", "y = x does not give y' = x' bit for bit"
    return Verdict.of(f"{name} is faithful", kept, right, wrong)


@eqx.filter_jit
def _coupled(coupling, proposal, key, x, y, count: int) -> PyTree:
    def one(key):
        key_sample, key_couple = jax.random.split(key)
        return coupling.propose(key_couple, proposal, x, proposal.sample(key_sample, x), y)

    return _over_keys(one, key, x, count)


def _marginal(coupling, proposal, key, pairs, name) -> Trial:
    """Draws of what the coupling proposes to y against direct draws from q(·|y), and how often it
    proposes y or x itself.
    """
    p_values: list[float] = []
    for number, key_pair in enumerate(jax.random.split(key, _PAIRS)):
        x, y = (trees.take(states, number) for states in pairs)
        key_coupled, key_direct = jax.random.split(key_pair)
        count = _num_draws(x)
        drawn = trials.flat(_coupled(coupling, proposal, key_coupled, x, y, count))
        direct = trials.flat(_sampled(proposal, key_direct, y, count))
        atoms = [trials.flat(trees.take(state, None))[0] for state in (x, y)]
        p_values += trials.same_law(drawn, direct, atoms)
    meaning = "y' is not distributed as q(·|y), so the gradient is biased"
    return Trial(f"{name} keeps its marginal", tuple(p_values), meaning)
