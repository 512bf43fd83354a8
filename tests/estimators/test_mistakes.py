"""The tests can fail: deliberate mistakes, each of which `assert_unbiased` must catch on a small
finite chain.
"""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from finite_chains import Problem, exact, f, log_density, random_problem
from oracles import derivative, finite_chain_mean, transition_matrix
from programs import derivatives
from unbiasedness import assert_unbiased, is_caught

import diffmh
from diffmh.base import trees
from diffmh.core import alternatives, values
from diffmh.core.decisions import accept_probability
from diffmh.estimators import birth_readout, stochastic_derivative
from diffmh.estimators.birth_recorder import BirthRecorder
from diffmh.estimators.births import Births
from diffmh.extend import (
    Acceptance,
    Coupling,
    DensityOdds,
    Observation,
)
from diffmh.kernels.accept_reject import AcceptReject

PROBLEM = random_problem(3)
LENGTH = dict(num_samples=8, burn_in=3)
RUNS = 40_000


def run(
    problem: Problem = PROBLEM, coupling=None, init=0, burn_in=3, density=None, births=None
) -> np.ndarray:
    """Derivatives by many runs, traced anew (a new function object), so that what was patched is
    what runs.
    """
    fresh = lambda theta, x, *args: log_density(theta, x, *args)
    matrix = jnp.asarray(problem.proposal, jnp.float32)
    mh = diffmh.MetropolisHastings(density or fresh, diffmh.TransitionMatrix(matrix), coupling)
    expectation = diffmh.expectation(
        f,
        mh,
        init=init,
        num_samples=8,
        burn_in=burn_in,
        num_chains=RUNS,
        # One slot, in which pruning matters most.
        estimator=diffmh.StochasticDerivative(alternatives=1, births=births),
    )
    theta, *args = (jnp.asarray(array, jnp.float32) for array in problem[1:])
    return np.asarray(derivatives(expectation, theta, jax.random.key(11), *args))


def run_unpatched(problem: Problem = PROBLEM, births=None) -> np.ndarray:
    """The same without a mistake, compiled once for all problems."""
    return run(problem, density=log_density, births=births)


@pytest.mark.parametrize("births", [None, True])
def test_without_a_mistake(births):
    assert_unbiased(run_unpatched(births=births), exact(PROBLEM, **LENGTH))


class CopiesTheProposal(Coupling):
    """y' = x', whatever q(·|y) is: its marginal is broken."""

    def propose(self, key, proposal, x, x_new, y):
        return x_new


def wrong_sign_after_a_reject(patch):
    def wrong(self, weights):
        return -accept_probability(self.log_ratio.primal) * self.log_accept_gradient

    patch(Acceptance, "flip_weight", wrong)


def pruning_reuses_the_accept_uniform(patch):
    right = diffmh.StochasticDerivative.advance

    def wrong(self, memory, at):
        own = stochastic_derivative.OwnNoise(at.own_noise.coupling, at.noise.uniform)
        return right(self, memory, dataclasses.replace(at, own_noise=own))

    patch(diffmh.StochasticDerivative, "advance", wrong)


def born_at_the_alternative(patch):
    right = alternatives.prune

    def wrong(slots, at, candidates, uniform):
        pruned, *born = right(slots, at, candidates, uniform)
        return dataclasses.replace(pruned, state=slots.state), *born

    patch(alternatives, "prune", wrong)


def alternative_copies_the_decision(patch):
    right = AcceptReject.coupled_step

    def wrong(self, parameters, step, alternative, noise, coupling_noise):
        # A uniform below, or above, every α.
        agreed = jnp.where(step.decisions[0].outcome, -1.0, 2.0)
        copied = type(noise)(noise.proposal, agreed)
        return right(self, parameters, step, alternative, copied, coupling_noise)

    patch(AcceptReject, "coupled_step", wrong)


def keeps_the_heavier(patch):
    right = alternatives.prune

    def wrong(slots, at, candidates, uniform):
        heavier = values.norm(candidates, slots.scale) > jnp.min(slots.score)
        return right(slots, at, candidates, jnp.where(heavier, 0.0, 1.0))

    patch(alternatives, "prune", wrong)


def divides_by_one_less(patch):
    patch(diffmh.StochasticDerivative, "derivative", lambda self, means, value: means * 8 / 7)


def keeps_the_weight_after_a_birth(patch):
    right = alternatives.prune

    def wrong(slots, at, candidates, uniform):
        pruned, *born = right(slots, at, candidates, uniform)
        weight = jnp.where(born[0][:, None], candidates[None], slots.weight)
        return dataclasses.replace(pruned, weight=weight), *born

    patch(alternatives, "prune", wrong)


def forgets_that_f_depends_on_theta(patch):
    patch(Observation, "explicit", property(lambda self: 0.0))


def accepts_with_its_own_uniform_but_never_drops(patch):
    """Fresh uniforms for the alternative are unbiased only while met chains are dropped for
    good: here they are not, and part.
    """
    patch(alternatives, "drop_recoupled", lambda slots, at: slots)
    right = AcceptReject.coupled_step

    def wrong(self, parameters, step, alternative, noise, coupling_noise):
        halved = type(noise)(noise.proposal, 0.5 * noise.uniform)
        return right(self, parameters, step, alternative, halved, coupling_noise)

    patch(AcceptReject, "coupled_step", wrong)


MISTAKES = [
    wrong_sign_after_a_reject,
    pruning_reuses_the_accept_uniform,
    born_at_the_alternative,
    alternative_copies_the_decision,
    keeps_the_heavier,
    divides_by_one_less,
    keeps_the_weight_after_a_birth,
    forgets_that_f_depends_on_theta,
    accepts_with_its_own_uniform_but_never_drops,
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_mistake_is_caught(mistake, monkeypatch):
    mistake(monkeypatch.setattr)
    assert is_caught(run(), exact(PROBLEM, **LENGTH))


def odds_the_wrong_way_round(patch):
    patch(
        DensityOdds,
        "__call__",
        lambda self, theta, x, y, *args: -_odds(self, theta, x, y, *args),
    )


def _odds(self, theta, x, y, *args):
    return self.density(theta, y, *args) - self.density(theta, x, *args)


def sums_go_on_in_a_slot_given_away(patch):
    right = Births.advance

    def wrong(self, memory, at):
        after, events = right(self, memory, at)
        return dataclasses.replace(after, total=memory.total), events

    patch(Births, "advance", wrong)


def closed_with_the_next_birth(patch):
    right = Births.advance

    def wrong(self, memory, at):
        after, events = right(self, memory, at)
        return dataclasses.replace(
            after, closed=dataclasses.replace(after.closed, birth=after.birth)
        ), events

    patch(Births, "advance", wrong)


def open_births_are_forgotten(patch):
    patch(BirthRecorder, "_must_end", lambda self, loop, index: index < 0)


def burn_in_is_summed_too(patch):
    patch(BirthRecorder, "_shares", lambda self, time: jnp.ones(1))


def forgets_that_f_depends_on_theta_by_births(patch):
    patch(birth_readout.Forward, "explicit", lambda self, at: jnp.zeros_like(at.value.primal))


def pruned_by_another_number_than_the_weight(patch):
    right = Acceptance.flip_rate
    patch(Acceptance, "flip_rate", lambda self: jnp.sqrt(right(self)))


def every_tie_in_full(patch):
    patch(Acceptance, "_share", property(lambda self: jnp.ones_like(self.log_ratio.primal)))


def born_from_the_state_before(patch):
    right = Births.advance

    def wrong(self, memory, at):
        after, events = right(self, memory, at)
        before = trees.repeat(at.step.before.x, after.total.shape[0])
        x = trees.select(events.born, before, after.birth.x)
        return eqx.tree_at(lambda m: m.birth.x, after, x), events

    patch(Births, "advance", wrong)


BIRTH_MISTAKES = [
    sums_go_on_in_a_slot_given_away,
    closed_with_the_next_birth,
    open_births_are_forgotten,
    pruned_by_another_number_than_the_weight,
]
MORE_BIRTH_MISTAKES = [
    odds_the_wrong_way_round,
    burn_in_is_summed_too,
    forgets_that_f_depends_on_theta_by_births,
    every_tie_in_full,
    born_from_the_state_before,
    # Those of the alternatives, which births share.
    born_at_the_alternative,
    alternative_copies_the_decision,
    keeps_the_heavier,
    keeps_the_weight_after_a_birth,
    accepts_with_its_own_uniform_but_never_drops,
]


@pytest.mark.parametrize(
    "mistake",
    [
        *BIRTH_MISTAKES,
        *(pytest.param(mistake, marks=pytest.mark.thorough) for mistake in MORE_BIRTH_MISTAKES),
    ],
    ids=lambda mistake: mistake.__name__,
)
def test_mistake_in_births_is_caught(mistake, monkeypatch):
    mistake(monkeypatch.setattr)
    assert is_caught(run(births=True), exact(PROBLEM, **LENGTH))


def test_coupling_that_breaks_its_marginal_is_caught():
    assert is_caught(run(coupling=CopiesTheProposal()), exact(PROBLEM, **LENGTH))


def test_no_derivative_through_burn_in_is_caught():
    """The burn-in run apart, as a random start: its own dependence on θ is lost."""
    matrix = transition_matrix(
        PROBLEM.base + PROBLEM.features @ PROBLEM.theta, PROBLEM.proposal
    ).real
    after_burn_in = jnp.asarray(np.linalg.matrix_power(matrix, 3)[0])
    start = lambda key: jax.random.categorical(key, jnp.log(jnp.maximum(after_burn_in, 1e-30)))
    assert is_caught(run(init=start, burn_in=0), exact(PROBLEM, **LENGTH))


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_wrong_share_at_ties_is_caught(share, monkeypatch):
    """Two states of equal density: every step is a tie, of which half the derivative counts."""
    tied = PROBLEM._replace(base=np.zeros(8), theta=np.zeros(3), slopes=np.zeros((8, 2)))
    symmetric = np.eye(8)
    symmetric[:3, :3] = (1 - np.eye(3)) / 2
    tied = tied._replace(proposal=symmetric)
    assert_unbiased(run_unpatched(tied), exact(tied, **LENGTH))

    def wrong(self):
        log_ratio = self.log_ratio.primal
        counts = jnp.where(log_ratio < 0, 1.0, jnp.where(log_ratio == 0, share, 0.0))
        return counts * self.log_ratio.tangent

    monkeypatch.setattr(Acceptance, "log_accept_gradient", property(wrong))
    assert is_caught(run(tied), exact(tied, **LENGTH))


def test_the_oracle_sees_the_length():
    """At burn-in 50 finite-length mistakes are invisible: the tests run at burn-in 0 and 3,
    where they are not.
    """

    def mean(num_samples, burn_in):
        matrix = lambda theta: transition_matrix(
            PROBLEM.base + PROBLEM.features @ theta, PROBLEM.proposal
        )
        return derivative(
            lambda t: finite_chain_mean(matrix(t), 0, PROBLEM.values, num_samples, burn_in),
            PROBLEM.theta,
        )[1]

    assert np.abs(mean(8, 0) - mean(7, 0)).max() > 1e-3
