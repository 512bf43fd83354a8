"""Couplings hold their promise: both marginals and faithfulness, for every proposal-coupling
pair that is offered.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import diffmh

# One false alarm in a million for each test of a pair of states.
ALPHA = 1e-6
PAIRS, DRAWS = 20, 2_000

RING = jnp.array(
    [[0.1, 0.8, 0.1, 0.0], [0.0, 0.2, 0.8, 0.0], [0.3, 0.0, 0.1, 0.6], [0.9, 0.1, 0.0, 0.0]]
)


class StandardNormal:
    def sample(self, key):
        return jax.random.normal(key)

    def log_prob(self, x):
        return jax.scipy.stats.norm.logpdf(x)


class Exponential(diffmh.extend.Proposal):
    """A user's proposal with no noise apart: x' = x E with E standard exponential, asymmetric."""

    symmetric: bool = False

    def sample(self, key, x):
        return x * jax.random.exponential(key)

    def log_prob(self, x, x_new):
        return -x_new / x - jnp.log(x)


real = lambda key: jax.random.normal(key)
vector = lambda key: jax.random.normal(key, (2,))
label = lambda key: jax.random.randint(key, (), 0, 4)
spins = lambda key: jax.random.rademacher(key, (2,), jnp.int32)
positive = lambda key: 0.5 + jax.random.exponential(key)
mixed = lambda key: {"label": jax.random.randint(key, (), 0, 4), "mean": jax.random.normal(key)}

crn, independent = diffmh.CommonRandomNumbers(), diffmh.Independent()
maximal, reflection = diffmh.Maximal(), diffmh.MaximalReflection()
lower = jnp.array([[1.0, 0.0], [0.7, 0.4]])

OFFERED = [
    *(
        (diffmh.GaussianWalk(1.3), real, coupling)
        for coupling in (crn, independent, maximal, reflection)
    ),
    *(
        (diffmh.GaussianWalk(jnp.array([0.5, 2.0])), vector, coupling)
        for coupling in (maximal, reflection)
    ),
    *((diffmh.GaussianWalk(lower), vector, coupling) for coupling in (crn, maximal, reflection)),
    *(
        (diffmh.CrankNicolson(0.6, 1.5, 0.3), vector, coupling)
        for coupling in (crn, independent, maximal, reflection)
    ),
    *((diffmh.OtherState(4), label, coupling) for coupling in (crn, independent, maximal)),
    *((diffmh.TransitionMatrix(RING), label, coupling) for coupling in (crn, independent, maximal)),
    *((diffmh.SpinFlip(), spins, coupling) for coupling in (crn, independent, maximal)),
    *((diffmh.SpinFlip(1), spins, coupling) for coupling in (crn, independent, maximal)),
    *(
        (diffmh.Independence(StandardNormal()), real, coupling)
        for coupling in (crn, independent, maximal)
    ),
    *((Exponential(), positive, coupling) for coupling in (crn, independent, maximal)),
    (diffmh.On(lambda x: x["label"], diffmh.OtherState(4)), mixed, maximal),
    (diffmh.On(lambda x: x["mean"], diffmh.GaussianWalk(0.8)), mixed, reflection),
]
NAMES = [f"{type(p).__name__}-{type(c).__name__}-{i}" for i, (p, _, c) in enumerate(OFFERED)]
# Common and independent random numbers are the same code for every proposal: the first family tells
# most of it.
EACH = [
    pytest.param(
        *case,
        id=name,
        marks=pytest.mark.thorough if i > 1 and (case[2] is crn or case[2] is independent) else (),
    )
    for i, (name, case) in enumerate(zip(NAMES, OFFERED, strict=True))
]


@eqx.filter_jit
def proposals(proposal, coupling, draw_state, key):
    """`x'`; `y'` by the coupling with a key of its own and with the primal's; both directly;
    `y'` from `y = x`; `[x' = y']` and `min(1, q(x'|y)/q(x'|x))`: (PAIRS, DRAWS).
    """
    part = proposal.where if isinstance(proposal, diffmh.On) else lambda x: x

    def pair(key):
        key_x, key_y, key = jax.random.split(key, 3)
        x, y = draw_state(key_x), draw_state(key_y)

        def one(key):
            key_sample, key_couple, *keys_direct = jax.random.split(key, 4)
            sample = jax.vmap(lambda key, state: proposal.sample(key, state))
            x_new, *direct = apart(sample(jnp.stack([key_sample, *keys_direct]), stack(x, x, y)))
            coupled = [
                coupling.propose(key, proposal, x, x_new, y) for key in (key_couple, key_sample)
            ]
            together = coupling.propose(key_couple, proposal, x, x_new, x)
            met = close(part(x_new), part(coupled[0])).astype(float)
            log_overlap = proposal.log_prob(y, x_new) - proposal.log_prob(x, x_new)
            overlap = jnp.exp(jnp.minimum(0.0, log_overlap))
            return x_new, *coupled, *direct, together, met, overlap

        return jax.vmap(one)(jax.random.split(key, DRAWS))

    return jax.vmap(pair)(jax.random.split(key, PAIRS))


def stack(*states):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)


def apart(stacked):
    size = jax.tree.leaves(stacked)[0].shape[0]
    return [jax.tree.map(lambda leaf, i=i: leaf[i], stacked) for i in range(size)]


def close(a, b):
    """True if two states agree up to rounding, which the time loop alone takes care of."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return jnp.all(jnp.stack([jnp.allclose(x, y, rtol=1e-5, atol=1e-6) for x, y in pairs]))


def columns(tree):
    return np.concatenate(
        [np.asarray(leaf, float).reshape(PAIRS, DRAWS, -1) for leaf in jax.tree.leaves(tree)],
        axis=-1,
    )


def same_distribution(a: np.ndarray, b: np.ndarray) -> float:
    """The p-value of two samples: χ² on whole states where there are few, Kolmogorov–Smirnov on
    each coordinate otherwise.
    """
    both, which = np.unique(np.concatenate([a, b]), axis=0, return_inverse=True)
    if len(both) == 1:
        return 1.0
    if len(both) <= 32:
        table = np.array(
            [
                np.bincount(which.ravel()[half], minlength=len(both))
                for half in (slice(0, len(a)), slice(len(a), None))
            ]
        )
        return stats.chi2_contingency(table).pvalue
    return min(stats.ks_2samp(a[:, i], b[:, i], method="asymp").pvalue for i in range(a.shape[1]))


@pytest.mark.parametrize(("proposal", "draw_state", "coupling"), EACH)
def test_each_keeps_its_promises(proposal, draw_state, coupling):
    """Both marginals; faithful; and, if it says so, maximal: P(x' = y') = ∫ min(q(·|x), q(·|y)) =
    E[min(1, q(x'|y)/q(x'|x))], which no coupling can exceed.
    """
    *drawn, met, overlap = proposals(proposal, coupling, draw_state, jax.random.key(5))
    x_new, own_key, primal_key, x_direct, y_direct, together = map(columns, drawn)
    for i in range(PAIRS):
        assert same_distribution(own_key[i], y_direct[i]) > ALPHA, "y' is not distributed as q(·|y)"
        assert same_distribution(primal_key[i], y_direct[i]) > ALPHA, (
            "y' is not distributed as q(·|y), given the primal's key"
        )
        assert same_distribution(x_new[i], x_direct[i]) > ALPHA, "x' is not distributed as q(·|x)"
    np.testing.assert_allclose(together, x_new, 1e-5, 1e-6, err_msg="y = x does not give y' = x'")
    if isinstance(coupling, diffmh.Maximal | diffmh.MaximalReflection):
        assert np.abs(z_of_meeting(met, overlap)).max() < 5, "x' = y' less often than it could be"


def z_of_meeting(met, overlap) -> np.ndarray:
    """z-scores of `P(x' = y')` against the overlap. Given x', a maximal coupling keeps it with
    probability `overlap`: that variance counts even where no draw showed it.
    """
    met, overlap = np.asarray(met, float), np.asarray(overlap, float)
    gap = met - overlap
    variance = np.maximum(gap.var(axis=1), np.mean(overlap * (1 - overlap), axis=1))
    return gap.mean(axis=1) / np.maximum(np.sqrt(variance / DRAWS), 1e-6)


def test_the_test_can_fail():
    """A walk whose copy takes half of the step."""

    class Shrinks(diffmh.extend.Coupling):
        def propose(self, key, proposal, x, x_new, y):
            return y + 0.5 * (x_new - x)

    drawn = proposals(diffmh.GaussianWalk(1.3), Shrinks(), real, jax.random.key(5))
    _, y_new, _, _, y_direct, _ = map(columns, drawn[:-2])
    assert all(same_distribution(y_new[i], y_direct[i]) < ALPHA for i in range(PAIRS))
    assert np.all(z_of_meeting(*drawn[-2:]) < -5), "it is not maximal either"


def test_common_random_numbers_are_common():
    """With the primal's key, both chains take the same step."""
    proposal, key = diffmh.GaussianWalk(1.3), jax.random.key(7)
    x, y = jnp.array(0.25), jnp.array(1.5)
    x_new = proposal.sample(key, x)
    np.testing.assert_allclose(crn.propose(key, proposal, x, x_new, y) - y, x_new - x, rtol=1e-5)


@pytest.mark.parametrize(
    ("proposal", "best"),
    [
        (diffmh.GaussianWalk(1.0), reflection),
        (diffmh.CrankNicolson(0.5), reflection),
        (diffmh.OtherState(3), maximal),
        (diffmh.TransitionMatrix(RING), maximal),
        (diffmh.SpinFlip(), crn),
        (diffmh.Independence(StandardNormal()), crn),
        (Exponential(), diffmh.NearlyMaximal()),
        (diffmh.On(lambda x: x, diffmh.GaussianWalk(1.0)), reflection),
    ],
    ids=lambda value: type(value).__name__,
)
def test_each_proposal_knows_its_best_coupling(proposal, best):
    assert diffmh.MetropolisHastings(lambda theta, x: theta, proposal).coupling == best


def test_reflection_recouples_as_often_as_it_should():
    """ESTIMATOR §5: 194 recouplings per 1000 steps on N(0, 1) in one dimension."""
    kernel = diffmh.MetropolisHastings(
        lambda theta, x: -0.5 * jnp.sum((x - theta) ** 2), diffmh.GaussianWalk(2.38)
    )
    path = diffmh.trace(kernel, 0.0, jax.random.key(8), init=0.0, num_steps=100_000)
    assert 0.17 < float(jnp.mean(path.recoupled)) < 0.30
