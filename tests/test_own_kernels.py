"""Kernels of one's own: six samplers against their transition matrices, and what is refused."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import own_kernels
import pytest
from own_kernels import Barker, Case, Delayed, SliceByLevel, delayed, full, tempering
from unbiasedness import assert_unbiased, is_caught

import diffmh
from diffmh.extend import (
    Acceptance,
    Bernoulli,
    BlockUpdate,
    DensityOdds,
    State,
    Step,
    Update,
    Value,
)

STEPS = 3


@pytest.mark.parametrize("name", own_kernels.SOUND)
def test_matrices_leave_the_density_invariant(name):
    """So that the oracle of a sampler is not a mistake of its own."""
    case = own_kernels.SOUND[name]()
    update = case.kernel.updates()[-1]
    log_density = jax.vmap(lambda x: update.log_density(case.at, x))(jnp.asarray(case.states))
    density = np.exp(np.asarray(log_density, float))
    matrix = case.matrix(case.theta.astype(complex)).real
    np.testing.assert_allclose(density @ matrix, density, rtol=1e-5)


def test_tempering_against_known_numbers():
    """Those of ESTIMATOR.md, section 18: the cold replica, over three steps."""
    case = tempering()
    cold = np.stack(
        [case.exact(STEPS)[case.states[:, 0] == label].sum(axis=0) for label in (0, 1, 2)]
    )
    by_h, by_beta = [-0.077106, 0.011716, 0.065390], [0.042695, -0.032561, -0.010134]
    np.testing.assert_allclose(cold, np.stack([by_h, by_beta], axis=1), atol=1e-6)


@pytest.mark.parametrize("name", own_kernels.SOUND)
def test_derivatives(name):
    case = own_kernels.SOUND[name]()
    assert_unbiased(case.derivatives(STEPS), case.exact(STEPS), name)


def test_a_swap_of_equal_replicas_is_no_tie():
    """Its log ratio is 0 and the slope is not, by rounding; but it leads nowhere."""
    found = tempering().derivatives(STEPS, estimator=diffmh.Score())
    assert_unbiased(found, tempering().exact(STEPS))


class Ties(BlockUpdate):
    """Exact ties of the given number, which move two labels or nothing."""

    count: int = eqx.field(static=True)
    moves: bool = eqx.field(static=True)

    def log_density(self, theta, x):
        return theta * jnp.sum(x)

    def noise(self, key, x, num_steps):
        return jax.random.uniform(key, (num_steps, self.count))

    def decide(self, parameters, state, noise):
        tie = lambda theta: jnp.zeros(self.count) + (theta - jax.lax.stop_gradient(theta))
        return Acceptance.draw(noise, parameters.evaluate(tie))

    def result(self, x, noise, outcome):
        return jnp.where(self.moves & outcome[-1], x[::-1], x)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("moves", [True, False])
def test_ties_are_nan_to_scores_where_they_lead_elsewhere(count, moves):
    expectation = diffmh.expectation(
        lambda theta, x: x[0] * 1.0,
        Ties(count, moves),
        init=jnp.array([0, 1]),
        num_samples=2,
        num_chains=2,
        estimator=diffmh.Score(),
    )
    report = expectation.run(0.5, jax.random.key(0))
    assert np.isnan(report.gradient) == moves
    assert any("exact ties" in warning for warning in report.warnings) == moves


BIRTHS = diffmh.StochasticDerivative(births=True, alternatives=2)


@pytest.mark.parametrize("name", ["delayed", "barker"])
def test_births(name):
    """Births of several decisions are read by the odds of each."""
    case = own_kernels.SOUND[name]()
    assert_unbiased(case.derivatives(STEPS, estimator=BIRTHS), case.exact(STEPS), name)


def test_births_by_the_odds_of_the_other_decision_are_caught():
    right = Delayed().odds
    case = delayed(odds=right[::-1])
    assert is_caught(case.derivatives(STEPS, estimator=BIRTHS), case.exact(STEPS))


def test_odds_that_do_not_say_which_decision_are_refused():
    """By births, also where they are chosen because there are many parameters."""
    odds = DensityOdds(full)
    for case, estimator in ((delayed(odds=odds), BIRTHS), (delayed(40, odds=odds), None)):
        with pytest.raises(ValueError, match="`Delayed` makes 2 decisions, but its `flip_odds`"):
            case.derivatives(STEPS, 16, estimator)


def first_call(kernel, like: Case, estimator=None):
    case = dataclasses.replace(like, kernel=kernel)
    return case.expectation(STEPS, 2, estimator)(case.at, jax.random.key(0))


LOST = "state after a step of `{}` depends on theta other than through the outcomes"


class MovesAsItSays(SliceByLevel):
    """It says that its moves depend on θ, but integers have no tangents."""

    moves_with_theta = True


class Forgets(Delayed):
    """It decides twice and returns one of the decisions."""

    def step(self, parameters, state, noise):
        step = super().step(parameters, state, noise)
        return eqx.tree_at(lambda step: step.decisions, step, step.decisions[:1])


class Smooth(Barker):
    """Its noise has a scale that depends on θ."""

    def decide(self, parameters, state, noise):
        return super().decide(parameters, state, (noise[0], noise[1] * parameters.theta[0, 0]))


class ByHand(Barker):
    """The deciding value is computed from θ by hand, without its derivative."""

    def decide(self, parameters, state, noise):
        odds = full(parameters.theta, (state.x + noise[0]) % 5) - full(parameters.theta, state.x)
        return Bernoulli.draw(noise[1], Value(odds))


@pytest.mark.parametrize(
    "kernel, message",
    [
        (SliceByLevel(), LOST.format("SliceByLevel")),
        (diffmh.Repeat(SliceByLevel(), 2), LOST.format("SliceByLevel")),
        (MovesAsItSays(), LOST.format("MovesAsItSays")),
        (Forgets(), LOST.format("Forgets")),
        (Smooth(5), "the outcome of decision 0 of `Smooth` depends on theta other than through"),
        (ByHand(5), "a decision of `ByHand` has a `Value` without a derivative"),
    ],
)
def test_lost_derivatives_are_refused(kernel, message):
    with pytest.raises(diffmh.NotDifferentiable, match=message):
        first_call(kernel, delayed())


def test_a_step_that_decides_nothing_may_be_sampled_and_has_a_covariance():
    assert np.isfinite(first_call(SliceByLevel(), delayed(), diffmh.Covariance())).all()


class Floats(Update):
    """`x' = θ x + z`, whose tangent is carried on or not."""

    carries: bool = eqx.field(static=True)
    moves_with_theta = True

    def log_density(self, theta, x):
        return 0.0 * theta * x

    def noise(self, key, x, num_steps):
        return jax.random.normal(key, (num_steps,))

    def step(self, parameters, state, noise):
        after = parameters.evaluate(lambda theta, x: theta * x + noise, state.value)
        tangent = after.tangent if self.carries else None
        return Step(state, State(after.primal, None, tangent))

    def coupled_step(self, parameters, step, alternative, noise, coupling_noise):
        return State(parameters.theta * alternative.x + noise)

    def flipped(self, step, noise, decision, candidate):
        raise AssertionError("there is nothing to flip")


def test_moves_that_depend_on_theta_must_carry_tangents():
    mean = lambda carries: diffmh.expectation(
        lambda theta, x: x, Floats(carries), init=1.0, num_samples=1
    )
    assert jax.grad(mean(True))(0.5, jax.random.key(0)) == pytest.approx(1.0)
    with pytest.raises(diffmh.NotDifferentiable, match=LOST.format("Floats")):
        mean(False)(0.5, jax.random.key(0))


class Arrays(Barker):
    def decide(self, parameters, state, noise):
        return Bernoulli.draw(noise[1], jnp.zeros(()))


class Tuples(Barker):
    def decide(self, parameters, state, noise):
        return (super().decide(parameters, state, noise),)


class WithoutAxis(Barker):
    def noise(self, key, x, num_steps):
        return jax.random.rademacher(key, (), int), jax.random.uniform(key, ())


class OtherType(Barker):
    def result(self, x, noise, outcome):
        return 1.0 * super().result(x, noise, outcome)


class OneUniformTooMany(Barker):
    def decide(self, parameters, state, noise):
        return super().decide(parameters, state, (noise[0], jnp.stack([noise[1]] * 2)))


class NotATuple(Delayed):
    def step(self, parameters, state, noise):
        step = super().step(parameters, state, noise)
        return Step(step.before, step.after, step.decisions[0])


class OnlyAState(Delayed):
    def step(self, parameters, state, noise):
        return super().step(parameters, state, noise).after


class CoupledToAnArray(Delayed):
    def coupled_step(self, parameters, step, alternative, noise, coupling_noise):
        return alternative.x


class FlippedToAFloat(Delayed):
    def flipped(self, step, noise, decision, candidate):
        return State(1.0 * step.after.x)


class CouplingWithoutAxis(Delayed):
    def coupling_noise(self, key, x, num_steps):
        return jax.random.uniform(key)


@pytest.mark.parametrize(
    "kernel, message",
    [
        (Arrays(5), r"`Bernoulli.draw\(uniform, log_odds\)` needs a `Value`.* got float32\[\]"),
        (Tuples(5), r"`Tuples.decide` must return one decision.* got a tuple \(a `Bernoulli`\)"),
        (WithoutAxis(5), r"`WithoutAxis.noise\(.*\)` must .* leading axis is `num_steps`.* \(\)"),
        (
            OtherType(5),
            r"`OtherType.step` leads to must have the form.* int32\[\], got float32\[\]",
        ),
        (OneUniformTooMany(5), r"one uniform for each draw, got uniforms of shape \(2,\)"),
        (NotATuple(), r"`decisions` are a tuple of decisions.* got a `Acceptance`"),
        (OnlyAState(), "`OnlyAState.step` must return a `Step`, got a `State`"),
        (CoupledToAnArray(), r"coupled_step` must return a `State`, got an array of int32\[\]"),
        (FlippedToAFloat(), r"`FlippedToAFloat.flipped` leads to must have the form"),
        (CouplingWithoutAxis(), r"`CouplingWithoutAxis.coupling_noise\(.*leading axis"),
    ],
)
def test_mistakes_of_form_are_named(kernel, message):
    case = dataclasses.replace(delayed(), kernel=kernel)
    with pytest.raises(TypeError, match=message):
        jax.jacfwd(case.expectation(STEPS, 2))(case.at, jax.random.key(0))
