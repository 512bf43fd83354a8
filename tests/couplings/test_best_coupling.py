"""A proposal names its own best coupling; kinds of proposals have theirs; and the default of a
user's own proposal is exact at a fixed cost.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import derivatives
from scipy import stats
from unbiasedness import assert_unbiased, is_caught

import diffmh
from diffmh import couplings

log_normal = lambda theta, x: -0.5 * jnp.sum((x - theta) ** 2)


class LogWalk(diffmh.extend.Proposal):
    """The documented multiplicative walk."""

    scale: float = 1.0
    symmetric: bool = False

    def sample(self, key, x):
        return x * jnp.exp(self.scale * jax.random.normal(key, x.shape))

    def log_prob(self, x, x_new):
        centred = (jnp.log(x_new) - jnp.log(x)) / self.scale
        return jnp.sum(jax.scipy.stats.norm.logpdf(centred) - jnp.log(self.scale * x_new))


class Labels(diffmh.extend.NoiseProposal):
    """One label of many is proposed anew: a user's proposal on whole arrays."""

    symmetric: bool = True

    def noise(self, key, x, num_steps):
        key_site, key_label = jax.random.split(key)
        site = jax.random.randint(key_site, (num_steps,), 0, x.size)
        return site, jax.random.randint(key_label, (num_steps,), 0, 3)

    def move(self, x, noise):
        site, label = noise
        return jnp.where(jnp.arange(x.size) == site, label, x)

    def log_prob(self, x, x_new):
        return jnp.zeros(())


class Stubborn(LogWalk):
    def best_coupling(self):
        return diffmh.Independent()


class Wrong(LogWalk):
    def best_coupling(self):
        return "maximal"


@pytest.mark.parametrize(
    ("proposal", "best"),
    [
        (LogWalk(), diffmh.NearlyMaximal()),
        (Labels(), diffmh.CommonRandomNumbers()),
        (Stubborn(), diffmh.Independent()),
        (diffmh.On(lambda x: x, Labels()), diffmh.CommonRandomNumbers()),
        (diffmh.On(lambda x: x, Stubborn()), diffmh.Independent()),
        (diffmh.On(lambda x: x, diffmh.OtherState(3)), diffmh.Maximal()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_best_coupling(proposal, best):
    assert couplings.best_coupling(proposal) == best
    assert diffmh.MetropolisHastings(log_normal, proposal).coupling == best


def test_what_is_named_must_be_a_coupling():
    with pytest.raises(
        TypeError, match=r"Wrong\.best_coupling\(\).*diffmh\.extend\.Coupling.*'maximal'"
    ):
        diffmh.MetropolisHastings(log_normal, Wrong())


def test_a_coupling_of_ones_own_says_what_it_does_not_fit():
    class OnlyWalks(diffmh.extend.Coupling):
        def mismatch(self, proposal):
            return None if isinstance(proposal, diffmh.GaussianWalk) else "walks"

        def propose(self, key, proposal, x, x_new, y):
            return x_new

    diffmh.MetropolisHastings(log_normal, diffmh.GaussianWalk(1.0), OnlyWalks())
    with pytest.raises(ValueError, match=r"`OnlyWalks\(\)` walks: use `NearlyMaximal\(\)`"):
        diffmh.MetropolisHastings(log_normal, diffmh.On(lambda x: x, LogWalk()), OnlyWalks())


MATRIX = np.array(
    [[0.1, 0.8, 0.1, 0.0], [0.0, 0.2, 0.8, 0.0], [0.3, 0.0, 0.1, 0.6], [0.9, 0.1, 0.0, 0.0]]
)


def nearly_maximal_law(x: int, y: int, num_candidates: int, pick) -> np.ndarray:
    """`P(x' = i, y' = j)` by enumeration of x' and all candidates, `pick` giving the law of the
    index of y' among them.
    """
    joint = np.zeros((4, 4))
    for code in range(4 ** (num_candidates + 1)):
        z = np.array([(code >> (2 * i)) & 3 for i in range(num_candidates + 1)])
        probability = MATRIX[x, z[0]] * np.prod(MATRIX[y, z[1:]])
        if probability > 0:
            np.add.at(joint[z[0]], z, probability * pick(MATRIX[x, z], MATRIX[y, z]))
    return joint


def law_of_the_index(q_x, q_y):
    """By the library's own choice, on a fine grid of its two uniforms."""
    with np.errstate(divide="ignore"):
        log_v = jnp.asarray(np.log(q_x) - np.log(q_y), jnp.float32)
    num_candidates = len(q_x) - 1
    keep = min(1.0, float(np.sum(np.exp(log_v[1:] - np.minimum(log_v[0], 1e30)))) / num_candidates)
    law = np.zeros(num_candidates + 1)
    for kept, weight in ((0.0, keep), (1.0 - 1e-6, 1 - keep)):
        if weight > 0:
            grid = (jnp.arange(240) + 0.5) / 240
            index = jax.vmap(lambda u: choose(log_v, jnp.stack([jnp.float32(kept), u])))(grid)
            law += weight * np.bincount(np.asarray(index), minlength=num_candidates + 1) / 240
    return law


choose = jax.jit(couplings.nearly_maximal._choose)


@pytest.mark.parametrize("num_candidates", [1, 2])
def test_nearly_maximal_keeps_the_marginal_exactly(num_candidates):
    """Over all `x', c_1, ..., c_M` of a finite proposal, with zeros in it: the marginal of y' is
    that of q(·|y) up to the grid's spacing.
    """
    for x, y in ((0, 1), (2, 0), (3, 1)):
        joint = nearly_maximal_law(x, y, num_candidates, law_of_the_index)
        np.testing.assert_allclose(joint.sum(axis=1), MATRIX[x], atol=1e-6)
        np.testing.assert_allclose(joint.sum(axis=0), MATRIX[y], atol=2e-3)
        assert np.trace(joint) <= np.minimum(MATRIX[x], MATRIX[y]).sum() + 1e-6


def test_the_exact_test_can_fail():
    """Keep x' with the maximal coupling's probability, else the first candidate: what one would
    write at first.
    """

    def naive(q_x, q_y):
        keep = min(1.0, q_y[0] / q_x[0])
        return np.array([keep, 1 - keep])

    joint = nearly_maximal_law(0, 1, 1, naive)
    assert np.abs(joint.sum(axis=0) - MATRIX[1]).max() > 0.05


def kept(coupling, x, y, key, count):
    def one(key):
        key_sample, key_couple = jax.random.split(key)
        x_new = LogWalk().sample(key_sample, x)
        return x_new, coupling.propose(key_couple, LogWalk(), x, x_new, y)

    return jax.jit(jax.vmap(one))(jax.random.split(key, count))


def test_nearly_maximal_on_a_continuum():
    """The marginal, and that x' is kept nearly as often as can be: 2Φ(−δ/2) at distance δ."""
    x, y = jnp.float32(1.0), jnp.float32(np.exp(0.5))
    x_new, y_new = kept(diffmh.NearlyMaximal(), x, y, jax.random.key(1), 20_000)
    assert stats.kstest(np.log(np.asarray(y_new, float)), stats.norm(0.5).cdf).pvalue > 1e-6
    share, most = float(jnp.mean(x_new == y_new)), 2 * stats.norm.cdf(-0.25)
    assert most - 0.05 < share < most + 0.015
    less, _ = kept(diffmh.NearlyMaximal(1), x, y, jax.random.key(1), 20_000), None
    assert jnp.mean(less[0] == less[1]) < share - 0.03, "more candidates keep more"


log_gamma = lambda theta, x: (theta - 1) * jnp.log(x) - x


def gradients(coupling):
    kernel = diffmh.MetropolisHastings(log_gamma, LogWalk(), coupling)
    mean = diffmh.expectation(
        lambda theta, x: jnp.log(x), kernel, init=2.0, num_samples=60, burn_in=60, num_chains=20_000
    )
    return derivatives(mean, 3.0, jax.random.key(2))


class Shrinks(diffmh.extend.Coupling):
    def propose(self, key, proposal, x, x_new, y):
        return y * jnp.sqrt(x_new / x)


def test_gradients_with_the_default_of_ones_own_proposal():
    """d/da E[log x] = ψ'(a) for Gamma(a, 1); 60 steps of burn-in leave less than the error."""
    exact = float(jax.scipy.special.polygamma(1, 3.0))
    assert_unbiased(np.asarray(gradients(None)), exact)
    assert is_caught(np.asarray(gradients(Shrinks())), exact)


class NotANumber(LogWalk):
    def log_prob(self, x, x_new):
        return jnp.float32(jnp.nan) * x_new


class NotNormalised(LogWalk):
    def log_prob(self, x, x_new):
        return super().log_prob(x, x_new) + 5 * x


@pytest.mark.parametrize("coupling", [diffmh.Maximal(), diffmh.NearlyMaximal()])
@pytest.mark.parametrize("proposal", [NotANumber(), NotNormalised()])
def test_every_coupling_ends(coupling, proposal):
    """Even where the residual is empty because `log_prob` is not a density."""
    x, y = jnp.float32(2.0), jnp.float32(1.0)
    keys = jax.random.split(jax.random.key(3), 50)
    y_new = jax.vmap(lambda key: coupling.propose(key, proposal, x, proposal.sample(key, x), y))(
        keys
    )
    assert np.all(np.isfinite(y_new))
