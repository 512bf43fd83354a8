"""check finds the classic mistakes, stays quiet on what is sound, and always ends."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import diffmh
from diffmh.tools import trials

KEY = jax.random.key(0)
log_normal = lambda theta, x: -0.5 * jnp.sum((x - theta) ** 2)
log_pdf = jax.scipy.stats.norm.logpdf


class LogWalk(diffmh.extend.Proposal):
    """A multiplicative walk, with a share of its Jacobian."""

    jacobian: float = 1.0
    symmetric: bool = False

    def sample(self, key, x):
        return x * jnp.exp(jax.random.normal(key, x.shape))

    def log_prob(self, x, x_new):
        ahead = log_pdf(jnp.log(x_new), jnp.log(x)) - self.jacobian * jnp.log(x_new)
        return jnp.sum(ahead)


class Drifts(diffmh.extend.Proposal):
    """A walk that drifts without saying so."""

    drift: float = 0.1
    symmetric: bool = True

    def sample(self, key, x):
        return x + self.drift + jax.random.normal(key, x.shape)

    def log_prob(self, x, x_new):
        return jnp.sum(log_pdf(x_new, x))


class Shrinks(diffmh.extend.Coupling):
    """The alternative's steps are a tenth too short."""

    by: float = 0.9

    def propose(self, key, proposal, x, x_new, y):
        return jnp.where(jnp.all(x == y), x_new, y + self.by * (x_new - x))


class Unsteady(diffmh.extend.Coupling):
    """Right in nine of ten, and stays where it is in the tenth."""

    def propose(self, key, proposal, x, x_new, y):
        stays = jax.random.uniform(key) < 0.1
        return jnp.where(jnp.all(x == y), x_new, jnp.where(stays, y, y + x_new - x))


class WrongJoint(diffmh.extend.Coupling):
    """Each coordinate is right by itself; together they are not: one noise for all."""

    def propose(self, key, proposal, x, x_new, y):
        step = (x_new - x)[0]
        return jnp.where(jnp.all(x == y), x_new, y + step)


def with_a_wrong_rule(factor):
    log_density = jax.custom_jvp(lambda theta, x: log_normal(theta, x))

    @log_density.defjvp
    def rule(primals, tangents):
        value, tangent = jax.jvp(log_normal, primals, tangents)
        return value, factor * tangent

    return log_density


walk = lambda coupling=None: diffmh.MetropolisHastings(
    log_normal, diffmh.GaussianWalk(1.0), coupling
)
log_gamma = lambda theta, x: jnp.sum(theta * jnp.log(jnp.abs(x)) - x)
part = lambda state: state["scale"]
log_part = lambda theta, state: log_gamma(theta, state["scale"])

BROKEN = {
    "2-D without its Jacobian": (
        diffmh.MetropolisHastings(log_gamma, LogWalk(0.0)),
        jnp.ones(2),
        "LogWalk.log_prob",
    ),
    "part without its Jacobian": (
        diffmh.MetropolisHastings(log_part, diffmh.On(part, LogWalk(0.0))),
        {"scale": jnp.ones(2), "label": jnp.array(0)},
        "log_prob",
    ),
    "custom_jvp": (
        diffmh.MetropolisHastings(with_a_wrong_rule(1.05), diffmh.GaussianWalk(1.0)),
        0.0,
        "derivative in theta",
    ),
    "stopped derivative": (
        diffmh.MetropolisHastings(
            lambda theta, x: theta * x - 0.5 * x**2 - jax.lax.stop_gradient(theta) * x**4,
            diffmh.GaussianWalk(1.0),
        ),
        0.1,
        "derivative in theta",
    ),
    "drift of 0.1": (
        diffmh.MetropolisHastings(log_normal, Drifts(), diffmh.CommonRandomNumbers()),
        0.0,
        "Drifts.log_prob",
    ),
    "steps a tenth too short": (walk(Shrinks()), 0.0, "Shrinks .* marginal"),
    "one of ten stays": (walk(Unsteady()), 0.0, "Unsteady .* marginal"),
    "wrong joint law": (walk(WrongJoint()), jnp.zeros(2), "WrongJoint .* marginal"),
    "label that is not there": (
        diffmh.MetropolisHastings(lambda theta, x: -theta * x, diffmh.OtherState(3)),
        7,
        "density or proposal",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_check_names_the_mistake(name):
    kernel, init, promise = BROKEN[name]
    findings = diffmh.check(kernel, 0.5, KEY, init=init)
    assert [bool(re.search(promise, finding.promise)) for finding in findings.broken] == [True], (
        str(findings)
    )


class LabelWalk(diffmh.extend.FiniteProposal):
    """A proposal on labels whose `log_prob` may be off."""

    bias: float = 0.0
    symmetric: bool = True

    def noise(self, key, x, num_steps):
        return jax.random.uniform(key, (num_steps,))

    def move(self, x, noise):
        return (x + jnp.where(noise < 0.5 + self.bias, 1, 2)) % 3

    def probabilities(self, x):
        return jnp.where(jnp.arange(3) == x, 0.0, 0.5)


log_label = lambda theta, x: -theta * x
SOUND = {
    "2-D with its Jacobian": (diffmh.MetropolisHastings(log_gamma, LogWalk()), jnp.ones(2)),
    "part": (
        diffmh.MetropolisHastings(log_part, diffmh.On(part, LogWalk())),
        {"scale": jnp.ones(2), "label": jnp.array(0)},
    ),
    "labels": (diffmh.MetropolisHastings(log_label, LabelWalk()), 0),
    "many labels": (
        diffmh.MetropolisHastings(lambda theta, x: -theta * jnp.sum(x), diffmh.OneLabel(4)),
        jnp.zeros(3, int),
    ),
    "reflection in three dimensions": (walk(), jnp.zeros(3)),
}


@pytest.mark.parametrize("name", SOUND)
def test_check_is_quiet(name):
    kernel, init = SOUND[name]
    findings = diffmh.check(kernel, 0.5, jax.random.key(1), init=init)
    assert findings and "not tried" not in str(findings), str(findings)


def test_labels_drawn_with_other_probabilities():
    kernel = diffmh.MetropolisHastings(log_label, LabelWalk(0.03), diffmh.Independent())
    findings = diffmh.check(kernel, 0.5, KEY, init=0)
    assert ["log_prob" in finding.promise for finding in findings.broken] == [True], str(findings)


class NotANumber(LogWalk):
    def log_prob(self, x, x_new):
        return jnp.sum(x_new) * jnp.nan


@pytest.mark.parametrize("coupling", [diffmh.Maximal(), diffmh.NearlyMaximal()])
def test_check_ends_where_log_prob_is_not_a_number(coupling):
    kernel = diffmh.MetropolisHastings(log_gamma, NotANumber(), coupling)
    findings = diffmh.check(kernel, 0.5, KEY, init=jnp.ones(2))
    assert any("log_prob" in finding.promise for finding in findings.broken), str(findings)


def test_p_values_are_honest():
    """On sound draws the least p-value of a test, times the number of tests, is at least as large
    as a uniform: among 300 trials each, at most 10 (expected 3) below 0.01.
    """
    rng = np.random.default_rng(0)
    below = {"same law": 0, "bridge": 0, "outcomes": 0}
    for _ in range(300):
        a, b = rng.normal(size=(2, 2_000, 2))
        p_values = trials.same_law(a, b, [np.zeros(2)])
        below["same law"] += min(p_values) * len(p_values) < 0.01
        log_ratio = lambda x: 0.5 * x[:, 0] ** 2 - 0.5 * (x[:, 0] - 1) ** 2
        p_values = trials.bridge(log_ratio(a), log_ratio(b + np.array([1.0, 0.0])))
        below["bridge"] += min(p_values) * len(p_values) < 0.01
        draws = rng.choice(4, size=(2_000, 1), p=[0.1, 0.2, 0.3, 0.4])
        p_values = trials.outcomes(draws, np.log([0.1, 0.2, 0.3, 0.4])[draws[:, 0]])
        below["outcomes"] += min(p_values) * len(p_values) < 0.01
    assert all(count <= 10 for count in below.values()), below


def test_a_density_that_lost_its_digits():
    offset = diffmh.MetropolisHastings(
        lambda theta, x: -0.5 * (x - theta) ** 2 - 5e7, diffmh.GaussianWalk(1.0)
    )
    findings = diffmh.check(offset, 0.5, KEY, init=0.0)
    assert [finding.promise for finding in findings.broken] == ["density's digits"]
    assert "not tried: rounding hides it" in str(findings)


def test_the_derivative_of_large_and_flat_densities_is_not_a_false_alarm():
    """No verdict if rounding hides the differences; kinks and many parameters pass."""
    offset = diffmh.MetropolisHastings(
        lambda theta, x: -0.5 * (x - theta) ** 2 - 5e5, diffmh.GaussianWalk(1.0)
    )
    assert diffmh.check(offset, 0.5, KEY, init=0.0)

    class Network(eqx.Module):
        weights: jax.Array
        bias: jax.Array

    def log_network(theta, x):
        return jnp.sum(jax.nn.relu(theta.weights * x + theta.bias)) - x**2

    theta = Network(jnp.linspace(-1.0, 1.0, 10), jnp.linspace(0.0, 1.0, 10))
    kernel = diffmh.MetropolisHastings(log_network, diffmh.GaussianWalk(1.0))
    findings = diffmh.check(kernel, theta, KEY, init=0.0)
    assert findings, str(findings)
