"""Proposals: labels of small integers, one label of many, parts and elements of states, scales by
leaf; and the starts that they refuse.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import derivative, finite_chain_mean, transition_matrix
from programs import derivatives
from scipy import stats
from unbiasedness import assert_unbiased, is_caught

import diffmh
from diffmh import couplings

KEY = jax.random.key(0)


@pytest.mark.parametrize(("dtype", "num_states"), [("int8", 100), ("uint8", 200), ("uint8", 256)])
def test_other_state_on_small_integers(dtype, num_states):
    """Every shift of every state, exactly: the others, each once."""
    proposal = diffmh.OtherState(num_states)
    states = np.arange(num_states)
    move = jax.vmap(jax.vmap(proposal.move, (None, 0)), (0, None))
    moved = np.asarray(move(jnp.asarray(states, dtype), jnp.arange(1, num_states)))
    assert moved.dtype == dtype
    for state in states:
        assert sorted(moved[state]) == [other for other in states if other != state]
    shift = proposal.noise(KEY, jnp.asarray(0, dtype), 20_000)
    assert shift.min() == 1 and shift.max() == num_states - 1


@pytest.mark.parametrize(
    "proposal",
    [
        diffmh.OtherState(200),
        diffmh.TransitionMatrix(jnp.full((200, 200), 1 / 200)),
        diffmh.On(lambda x: x[0], diffmh.OtherState(200)),
        diffmh.OneLabel(200),
    ],
)
def test_labels_that_the_type_does_not_hold(proposal):
    start = jnp.zeros((2,) if isinstance(proposal, diffmh.On | diffmh.OneLabel) else (), "int8")
    with pytest.raises(TypeError, match=r"0 to 199, which do not fit int8.*int32"):
        proposal.noise(KEY, start, 1)


STARTS = {
    "label above": (diffmh.OtherState(3), 7, r"OtherState\(3\).*0 to 2.*has 7"),
    "label below": (diffmh.OtherState(3), -1, r"OtherState\(3\).*0 to 2.*has -1"),
    "matrix": (diffmh.TransitionMatrix(jnp.eye(3)), 3, r"TransitionMatrix.*0 to 2.*has 3"),
    "labels": (diffmh.OneLabel(2), jnp.array([0, 2]), r"OneLabel\(2\).*0 to 1.*has 2"),
    "site of a label": (diffmh.OneLabel(2, site=2), jnp.array([0, 1]), r"site.* is \(2,\).*\(2,\)"),
    "zeros and ones": (diffmh.SpinFlip(), jnp.array([0, 1]), r"SpinFlip.*±1.*has 0.*OneLabel"),
    "site": (diffmh.SpinFlip(site=7), jnp.ones(3, int), r"SpinFlip\(site=.* is \(7,\).*\(3,\)"),
    "part": (diffmh.On(lambda x: x["a"], diffmh.OtherState(3)), {"a": 5}, "has 5"),
}


@pytest.mark.parametrize("name", STARTS)
def test_starts_that_are_refused(name):
    proposal, start, words = STARTS[name]
    with pytest.raises(ValueError, match=words):
        proposal.refuse_start(jax.tree.map(np.asarray, start))


def test_starts_that_are_not_refused():
    diffmh.OtherState(3).refuse_start(2)
    diffmh.SpinFlip(site=(1, 1)).refuse_start(-np.ones((2, 2)))
    diffmh.OneLabel(3, site=1).refuse_start(np.array([0, 2]))
    diffmh.GaussianWalk(1.0).refuse_start(7.0)


def test_spins_of_unsigned_integers():
    with pytest.raises(TypeError, match=r"SpinFlip.*uint8.*int8.*OneLabel"):
        diffmh.SpinFlip().noise(KEY, jnp.ones(3, "uint8"), 1)


def test_a_site_that_is_not_there_is_seen_when_a_chain_is_run():
    kernel = diffmh.MetropolisHastings(lambda t, x: t * jnp.sum(x), diffmh.SpinFlip(site=7))
    mean = diffmh.expectation(
        lambda t, x: x[0], kernel, init=jnp.ones(3, int), num_samples=5, num_chains=2
    )
    with pytest.raises(ValueError, match=r"SpinFlip\(site=...\)` is \(7,\)"):
        mean(0.1, KEY)


def test_empty_arrays_in_a_state():
    kernel = diffmh.MetropolisHastings(lambda t, x: -t * x["a"] ** 2, diffmh.GaussianWalk(1.0))
    for init in (
        {"a": 0.0, "b": jnp.zeros((0, 3))},
        lambda key: {"a": 0.0, "b": jnp.zeros((0, 3))},
    ):
        with pytest.raises(ValueError, match=r"\['b'\] is empty, of shape"):
            diffmh.expectation(lambda t, x: x["a"], kernel, init=init, num_samples=5, num_chains=2)(
                1.0, KEY
            )


VALUES, SITES = 3, 2
STATES = list(itertools.product(range(VALUES), repeat=SITES))


def label_matrix(site=None):
    """`q(j | i)` of `OneLabel` over all arrays of labels, by counting."""
    matrix = np.zeros((len(STATES), len(STATES)))
    for (i, a), (j, b) in itertools.product(enumerate(STATES), repeat=2):
        differs = [s for s in range(SITES) if a[s] != b[s]]
        if len(differs) == 1 and site in (None, differs[0]):
            matrix[i, j] = 1 / ((VALUES - 1) * (SITES if site is None else 1))
    return matrix


@pytest.mark.parametrize("site", [None, 0, 1])
def test_one_label_is_what_it_says(site):
    proposal, states = diffmh.OneLabel(VALUES, site), jnp.array(STATES)
    log_prob = jax.vmap(jax.vmap(proposal.log_prob, (None, 0)), (0, None))(states, states)
    np.testing.assert_allclose(np.exp(log_prob), label_matrix(site), atol=1e-6)
    drawn = jax.vmap(lambda key: proposal.sample(key, states[4]))(jax.random.split(KEY, 6000))
    index = np.asarray(drawn) @ np.array([VALUES, 1])
    expected = label_matrix(site)[4]
    counts = np.bincount(index, minlength=len(STATES))
    assert np.all(counts[expected == 0] == 0)
    seen = expected > 0
    assert stats.chisquare(counts[seen], 6000 * expected[seen]).pvalue > 1e-6


def test_same_site_keeps_the_marginal_exactly():
    """x' ↦ y' is one to one between the proposals of x and those of y, and no coupling agrees
    more often.
    """
    states, matrix = np.array(STATES), label_matrix(0)
    couple = lambda x, x_new, y: diffmh.SameSite().propose(KEY, diffmh.OneLabel(3, 0), x, x_new, y)
    for i, j in itertools.product(range(len(STATES)), repeat=2):
        targets = np.flatnonzero(matrix[i])
        y_new = jax.vmap(couple, (None, 0, None))(states[i], states[targets], states[j])
        assert sorted(np.asarray(y_new) @ [VALUES, 1]) == list(np.flatnonzero(matrix[j]))
        together = np.mean(np.asarray(y_new)[:, 0] == states[targets][:, 0])
        assert together == (1.0 if states[i][0] == states[j][0] else (VALUES - 2) / (VALUES - 1))


FIELD = np.array([[0.3, -0.5, 0.2], [0.0, 0.4, -0.6]])


def log_labels(theta, x):
    field = jnp.asarray(FIELD, jnp.float32)
    return theta * (field[0][x[0]] + field[1][x[1]] + 0.7 * (x[0] == x[1]))


def exact_labels(sweep):
    field = np.array([FIELD[0][a] + FIELD[1][b] + 0.7 * (a == b) for a, b in STATES])
    f = np.array([[a * b + a] for a, b in STATES], float)

    def mean(theta):
        one = lambda site: transition_matrix(theta[0] * field, label_matrix(site))
        matrix = one(0) @ one(1) if sweep else one(None)
        return finite_chain_mean(matrix, 0, f, 12, 0)

    return derivative(mean, np.array([0.8]))[1][:, 0]


def labels_kernel(sweep, coupling=None):
    step = lambda site: diffmh.MetropolisHastings(
        log_labels, diffmh.OneLabel(VALUES, site), coupling
    )
    return diffmh.Cycle(step(0), step(1)) if sweep else step(None)


def label_gradients(kernel, init=(0, 0)):
    mean = diffmh.expectation(
        lambda theta, x: (x[0] * x[1] + x[0]).astype(float),
        kernel,
        init=jnp.array(init),
        num_samples=12,
        num_chains=20_000,
    )
    return np.asarray(derivatives(mean, 0.8, jax.random.key(3)))


@pytest.mark.parametrize("sweep", [False, True], ids=["random site", "sweep"])
def test_gradients_of_labels(sweep):
    assert_unbiased(label_gradients(labels_kernel(sweep)), exact_labels(sweep)[0])


class SameValue(diffmh.extend.Coupling):
    """Always the primal's value: no longer one of the others where y has it already."""

    def propose(self, key, proposal, x, x_new, y):
        return jnp.where(x == x_new, y, x_new)


def test_a_coupling_of_labels_that_is_wrong_is_caught():
    assert is_caught(label_gradients(labels_kernel(True, SameValue())), exact_labels(True)[0])


def test_on_an_element_of_an_array():
    """A sweep over elements is that over sites."""
    step = lambda site: diffmh.MetropolisHastings(
        log_labels, diffmh.On(lambda z: z[site], diffmh.OtherState(VALUES))
    )
    assert_unbiased(label_gradients(diffmh.Cycle(step(0), step(1))), exact_labels(True)[0])


PARTS = {
    "element": (lambda z: z["a"][1], ("a", np.s_[1])),
    "slice": (lambda z: z["a"][::2], ("a", np.s_[::2])),
    "reversed": (lambda z: z["a"][::-1], ("a", np.s_[::-1])),
    "row": (lambda z: z["b"][1], ("b", np.s_[1])),
    "column": (lambda z: z["b"][:, 0], ("b", np.s_[:, 0])),
    "node": (lambda z: z["b"], ("b", np.s_[:])),
    "indices": (lambda z: z["a"][jnp.array([2, 0])], ("a", np.s_[[2, 0]])),
}


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_on_replaces_what_it_picks(name, jit):
    where, (leaf, index) = PARTS[name]
    state = {"a": jnp.arange(4.0), "b": jnp.arange(6.0).reshape(3, 2), "c": jnp.array(5)}
    part = -1.0 - where(state)
    proposal = diffmh.On(where, diffmh.GaussianWalk(1.0))
    new = jax.tree.map(np.asarray, jit(lambda *both: proposal.replace(*both))(state, part))
    expected = {key: np.array(value) for key, value in state.items()}
    expected[leaf][index] = np.asarray(part)
    assert all(np.array_equal(new[key], expected[key]) for key in expected)
    assert all(new[key].dtype == expected[key].dtype for key in expected)


def test_on_several_elements_at_once():
    state = {"a": jnp.arange(4.0), "b": jnp.zeros(())}
    proposal = diffmh.On(lambda z: (z["b"], z["a"][2]), diffmh.GaussianWalk(1.0))
    new = proposal.sample(KEY, state)
    assert new["b"] != 0 and new["a"][2] != 2
    np.testing.assert_array_equal(new["a"][jnp.array([0, 1, 3])], [0, 1, 3])


@pytest.mark.parametrize(
    ("where", "words"),
    [
        (lambda z: z[0] + 1, "compute nothing"),
        (lambda z: 3, "compute nothing"),
        (lambda z: (z[0], z[:2]), "twice"),
    ],
)
def test_on_refuses_what_it_cannot_put_back(where, words):
    proposal = diffmh.On(where, diffmh.GaussianWalk(1.0))
    with pytest.raises(ValueError, match=words):
        proposal.replace(jnp.zeros(3), where(jnp.zeros(3)))


class Doubling(diffmh.extend.Proposal):
    """A user's own, with no noise apart."""

    symmetric: bool = False

    def sample(self, key, x):
        return x * jnp.exp(jax.random.normal(key, x.shape))

    def log_prob(self, x, x_new):
        return jax.scipy.stats.norm.logpdf(jnp.log(x_new), jnp.log(x)) - jnp.log(x_new)


def test_on_a_proposal_of_ones_own():
    proposal = diffmh.On(lambda z: z["a"][1], Doubling())
    state = {"a": jnp.ones(3), "b": jnp.array(0)}
    moved = proposal.sample(KEY, state)
    np.testing.assert_allclose(
        moved["a"], jnp.ones(3).at[1].set(Doubling().sample(KEY, 1.0 * state["a"][1]))
    )
    assert couplings.best_coupling(proposal) == diffmh.NearlyMaximal()
    log_gamma = lambda theta, z: (theta - 1) * jnp.log(z["a"][1]) - z["a"][1]
    mean = diffmh.expectation(
        lambda theta, z: jnp.log(z["a"][1]),
        diffmh.MetropolisHastings(log_gamma, proposal),
        init=state,
        num_samples=60,
        burn_in=60,
        num_chains=20_000,
    )
    exact = float(jax.scipy.special.polygamma(1, 3.0))
    assert_unbiased(np.asarray(derivatives(mean, 3.0, KEY)), exact)


TREE = {"a": jnp.zeros(()), "b": jnp.zeros((2, 2))}
BY_LEAF = {"a": 0.5, "b": jnp.array([[1.0, 2.0], [3.0, 4.0]])}
DIAGONAL = jnp.array([0.5, 1.0, 2.0, 3.0, 4.0])


@pytest.mark.parametrize(
    "walk", [diffmh.GaussianWalk, lambda scale: diffmh.CrankNicolson(0.6, scale, 0.3)]
)
def test_scales_by_leaf_are_a_diagonal(walk):
    by_leaf, flat = walk(BY_LEAF), walk(DIAGONAL)
    new = flat.sample(KEY, TREE)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, by_leaf.sample(KEY, TREE), new))
    np.testing.assert_allclose(by_leaf.log_prob(TREE, new), flat.log_prob(TREE, new), rtol=1e-5)
    other = jax.tree.map(lambda leaf: leaf + 0.25, TREE)
    coupled = [
        diffmh.MaximalReflection().propose(jax.random.key(4), each, TREE, new, other)
        for each in (by_leaf, flat)
    ]
    assert jax.tree.all(jax.tree.map(lambda a, b: jnp.allclose(a, b, rtol=1e-5), *coupled))


@pytest.mark.parametrize(
    ("scale", "error", "words"),
    [
        ({"a": 1.0}, ValueError, "structure of the state"),
        ({"a": 1.0, "b": jnp.ones(2)}, ValueError, r"\['b'\] of shape \(2,\).*\(2, 2\)"),
        ({"a": 1.0, "b": -1.0}, ValueError, "must be positive"),
        ({"a": 1.0, "b": "x"}, TypeError, "pytree of scales"),
        ({}, TypeError, "pytree of scales"),
    ],
)
def test_scales_by_leaf_that_are_refused(scale, error, words):
    with pytest.raises(error, match=words):
        diffmh.GaussianWalk(scale).sample(KEY, TREE)
