"""Warnings as functions of what was counted: each cause with a case that warns and one that does
not. No chains are run.
"""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

from diffmh.analysis import Jump
from diffmh.reports import convergence, diagnostics
from diffmh.reports.diagnostics import Diagnosis
from diffmh.reports.method import Method

WALK = Method("StochasticDerivative", "two-sided", 1, ("CommonRandomNumbers",), (), False)
SCORE = Method("Score", None, 0, (), (), True)
COVARIANCE = Method("Covariance", None, 0, (), (), True)
HEALTHY = Diagnosis(
    acceptance_rate=0.4,
    least_acceptance=0.3,
    num_decisions=1_000.0,
    recoupling_time=3.0,
    alive_fraction=0.7,
    max_weight=1.5,
    weight_share=0.01,
    max_tangent=0.0,
    tie_share=0.0,
    never_born=False,
    never_moved=(),
    rounding=1e-6,
    effective_samples=np.array([800.0, 900.0]),
    num_samples=1_000.0,
    num_chains=8,
    nan_proposals=0,
    method=WALK,
    largest_share=0.05,
    cut_off=0.0,
    recouplings=300.0,
    value_r_hat=1.01,
    gradient_r_hat=1.1,
    value_drift=None,
    gradient_drift=None,
)
# An estimator without alternatives counts none.
WITHOUT = dataclasses.replace(
    HEALTHY, method=COVARIANCE, recoupling_time=math.nan, alive_fraction=math.nan
)


def warned(diagnosis=HEALTHY, **counts):
    return list(diagnostics.warnings(dataclasses.replace(diagnosis, **counts)))


def test_a_healthy_run_has_nothing_to_say():
    for diagnosis in (HEALTHY, WITHOUT):
        assert warned(diagnosis) == [] and list(diagnostics.notes(diagnosis)) == []


# Counts that just warn, counts that just do not, and how the warning begins.
CAUSES = [
    ({"nan_proposals": 1_200}, {"nan_proposals": 0}, "the log density was NaN at 1,200 proposals"),
    ({"rounding": 0.011}, {"rounding": 0.01}, "the log density is so large that its last digit"),
    ({"never_moved": (1,)}, {"never_moved": ()}, "part 1 of the state never moved"),
    ({"max_tangent": 1e6}, {"max_tangent": 9e5}, "the derivative of a state with respect to theta"),
    ({"max_tangent": math.nan}, {"max_tangent": 0.0}, "the derivative of a state"),
    ({"least_acceptance": 0.004}, {"least_acceptance": 0.005}, "a chain is stuck"),
    ({"least_acceptance": 0.0}, {"least_acceptance": math.nan}, "a chain is stuck"),
    # At a rate of 0.4 one of 8 chains accepts none of 17 proposals in 740 runs, of 18 in 1,200.
    (
        {"least_acceptance": 0.0, "num_decisions": 18.0},
        {"least_acceptance": 0.0, "num_decisions": 17.0},
        "a chain is stuck",
    ),
    (
        {"least_acceptance": 0.0, "acceptance_rate": 0.0, "num_decisions": 176.0},
        {"least_acceptance": 0.0, "acceptance_rate": 0.0, "num_decisions": 175.0},
        "a chain is stuck",
    ),
    (
        {"effective_samples": np.array([39.0, np.nan])},
        {"effective_samples": np.array([40.0, 900.0])},
        "there are fewer than 5 effective samples per chain",
    ),
    ({"value_r_hat": 1.11}, {"value_r_hat": 1.1}, "the chains disagree about the value"),
    ({"gradient_r_hat": 1.61}, {"gradient_r_hat": 1.6}, "the chains disagree about the gradient"),
    ({"tie_share": 0.01, "method": SCORE}, {"tie_share": 0.01}, "1.0% of the decisions were exact"),
    ({"never_born": True}, {"never_born": False}, "no alternative was ever born"),
    (
        {"recoupling_time": 101.0, "alive_fraction": 0.51},
        {"recoupling_time": 101.0, "alive_fraction": 0.5},
        "few alternatives carry the gradient: they hardly ever recouple",
    ),
    (
        {"recoupling_time": 101.0, "alive_fraction": 0.51},
        {"recoupling_time": 100.0, "alive_fraction": 0.51},
        "few alternatives carry the gradient: they hardly ever recouple",
    ),
    (
        {"recoupling_time": 26.0, "num_samples": 99.0},
        {"recoupling_time": 25.0, "num_samples": 99.0},
        "few alternatives carry the gradient: they hardly ever recouple",
    ),
    (
        {"largest_share": 0.26},
        {"largest_share": 0.25},
        "few alternatives carry the gradient: the largest 1 %",
    ),
    (
        {"weight_share": 0.21, "num_samples": 100.0},
        {"weight_share": 0.21, "num_samples": 99.0},
        "few alternatives carry the gradient: one of them carried 21%",
    ),
    ({"cut_off": 0.06}, {"cut_off": 0.05}, "alternatives outlive the chain: 6%"),
]


@pytest.mark.parametrize(("warns", "does_not", "words"), CAUSES)
def test_each_cause_has_one_warning(warns, does_not, words):
    (text,) = warned(**warns)
    assert text.startswith(words) and text.endswith(".")
    assert warned(**does_not) == []


def test_what_another_cause_explains_is_left_out():
    slow = {"effective_samples": np.array([1.0]), "value_r_hat": 2.0, "gradient_r_hat": 2.0}
    (stuck,) = warned(least_acceptance=0.0, **slow)
    assert stuck.startswith("a chain is stuck")
    (few,) = warned(**slow)
    assert "a chain of 1,000 is 0.12 times as long" in few
    heavy = {"recoupling_time": 500.0, "largest_share": 0.4, "weight_share": 0.5, "cut_off": 0.9}
    (few,) = warned(gradient_r_hat=2.0, **heavy)
    for sign in ("hardly ever recouple", "largest 1 %", "50% of all the weight"):
        assert few.count(sign) == 1
    assert few.count("Use ") == 1


def test_parts_that_never_moved_explain_nothing_else():
    assert len(warned(never_moved=(0, 2), gradient_r_hat=2.0)) == 3


@pytest.mark.parametrize(
    ("method", "named", "unfit"),
    [
        (COVARIANCE, ["mixes faster"], ["meet sooner", "alternatives=", "`Covariance()`, whose"]),
        (SCORE, ["`StochasticDerivative()`", "`Covariance()`"], ["meet sooner", "alternatives="]),
        (WALK, ["alternatives=4", "meet sooner"], ["Covariance", "two-sided", "the coupling"]),
        (
            Method("StochasticDerivative", "one-sided", 32, ("Independent",), ("Maximal",), True),
            ["the coupling `Maximal()`", "weights='two-sided'", "`Covariance()`"],
            ["alternatives="],
        ),
    ],
)
def test_remedies_fit_the_estimator_in_use(method, named, unfit):
    (text,) = warned(WITHOUT, gradient_r_hat=2.0, method=method)
    used, remedies = text.split(" Use ")
    assert f"`{method.estimator}(" in used
    assert all(word in remedies for word in named)
    assert not any(word in remedies for word in unfit)


def test_a_drift_is_noted_for_the_quantity_that_is_estimated():
    drifting = dataclasses.replace(HEALTHY, value_drift="1 ± 0.1 over the first half")
    (note,) = diagnostics.notes(drifting)
    assert "not of the equilibrium: its value is 1 ± 0.1" in note
    both = dataclasses.replace(drifting, gradient_drift="2 ± 0.1", method=COVARIANCE)
    (note,) = diagnostics.notes(both)
    assert "meant for the equilibrium" in note
    assert "its derivative is 2 ± 0.1, and its value is 1 ± 0.1" in note


def estimates(value=1.0, slope=1.0, error=0.1, theta=None):
    theta = {"a": jnp.zeros(2), "b": 0.0} if theta is None else theta
    chains = np.broadcast_to(value, (1, 4))
    slopes, errors = (np.broadcast_to(part, (3,))[:, None] for part in (slope, error))
    return list(diagnostics.of_estimates(theta, chains, slopes, errors))


def test_numbers_that_cannot_be_right():
    assert estimates() == []
    (text,) = estimates(value=np.array([1.0, np.nan, np.inf, 1.0]))
    assert text.startswith("the value is not finite in 2 of 4 chains")
    (text,) = estimates(slope=[1.0, np.nan, 1.0])
    assert text.startswith("the gradient with respect to `theta['a']` is not finite")
    (text,) = estimates(slope=[1.0, 0.0, 1.0], error=[0.1, 0.0, 0.1])
    assert "`theta['a']` (1 of its 2 entries) is exactly 0 ± 0" in text
    (text,) = estimates(slope=[1.0, 1.0, 0.0], error=[0.1, 0.1, 0.0])
    assert "`theta['b']` is exactly 0 ± 0" in text
    assert estimates(slope=0.0) == [], "zero with an error is an estimate"
    assert estimates(error=0.0) == [], "and so is what is known exactly"


def test_draws():
    healthy = {"num_draws": 1_000, "time": 3.0, "r_hat": 1.05, "too_few": False}
    assert list(diagnostics.of_draws(**healthy)) == []
    (text,) = diagnostics.of_draws(**healthy | {"too_few": True})
    assert text.startswith("the draws are worth few independent ones")
    (text,) = diagnostics.of_draws(**healthy | {"r_hat": 1.051})
    assert text.startswith("the chains disagree (split R̂ = 1.051")


def test_a_jump_is_named():
    text = diagnostics.of_jump(Jump("model.py:3", "floor", False))
    assert "`floor` at model.py:3" in text and "diffmh.continuous" in text


def test_split_r_hat_is_that_of_its_definition():
    """B = 2, the variance of means ±1, over W = 4 and W = 0, which says nothing."""
    means = np.array([[1.0, -1.0], [1.0, -1.0]])
    assert convergence.split_r_hat(means, np.array([4.0, 0.0])) == math.sqrt(1.5)
    assert convergence.split_r_hat(means, np.array([4.0, 0.0]), base=0.0) == math.sqrt(0.5)


def test_halves_drift_beyond_chance():
    noise = np.tile([-0.1, 0.1], 8)
    still, moving = np.stack([noise, noise[::-1]]), np.stack([noise, 1 + noise[::-1]])
    assert convergence.drift(still[:, None]) is None
    assert convergence.drift(moving[:1, None]) is None, "a single step has one half"
    text = convergence.drift(np.stack([still, moving], axis=1))
    assert text == "0.000 ± 0.026 over the first half and 1.000 ± 0.026 over the second"


def test_the_largest_share_of_stretches():
    even = np.ones((10, 1, 1, 10))
    heavy = even.copy()
    heavy[3, 0, 0, 3] = 101.0
    length = np.ones(10, int)
    assert convergence.largest_share(even, length) == 0.01
    assert convergence.largest_share(heavy, length) == 101 / 200
    assert convergence.largest_share(heavy[:4], length[:4]) == 0.0, "40 are too few to say"
