"""Supports of vectors and matrices: what a bijection makes is proved to stay inside, and what only
looks like it is not.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from jax import lax
from numpyro.distributions import biject_to, constraints

from diffmh.analysis import moving_jumps

VECTOR = np.array([0.3, -0.2, 0.1], np.float32)
THETA = 0.7


def chosen(condition, x):
    """One number where all of a condition holds, another elsewhere: a jump unless it always does
    or never does.
    """
    return jnp.where(jnp.all(condition), jnp.sum(x), -jnp.inf)


def steps(condition, x=VECTOR):
    """The steps of a function that chooses by `condition(x)`, where x moves with θ."""
    return moving_jumps(lambda t, x: t * chosen(condition(x), x), THETA, x, x_moves=True)


def inside(constraint, event):
    """True if its own bijection maps x into the support."""
    bijection = biject_to(constraint)
    x = np.zeros(bijection.inverse_shape(event), np.float32)
    return lambda x: constraint(bijection(x)), x


SUPPORTS = {
    "simplex": inside(constraints.simplex, (4,)),
    "simplices": inside(constraints.simplex, (2, 3)),
    "simplex of many": inside(constraints.simplex, (20,)),
    "sum of zero": inside(constraints.zero_sum(1), (5,)),
    "lower_cholesky": inside(constraints.lower_cholesky, (3, 3)),
    "softplus_lower_cholesky": inside(constraints.softplus_lower_cholesky, (3, 3)),
    "positive_definite": inside(constraints.positive_definite, (4, 4)),
    "corr_cholesky": inside(constraints.corr_cholesky, (5, 5)),
    "corr_matrix": inside(constraints.corr_matrix, (5, 5)),
}


# The proof that a matrix is L Lᵀ does not go through in newer JAX: it is said, not admitted.
NEWER_JAX = jax.__version_info__ >= (0, 11)
MATRICES = (
    "lower_cholesky",
    "softplus_lower_cholesky",
    "positive_definite",
    "corr_cholesky",
    "corr_matrix",
)


@pytest.mark.parametrize("name", SUPPORTS)
def test_a_bijection_stays_in_its_support(name):
    assert bool(steps(*SUPPORTS[name])) == (NEWER_JAX and name in MATRICES)


def stick_breaking(x, last):
    """Shares of a whole; they add up to 1 if `last` is 1."""
    shares = jax.nn.sigmoid(x)
    left = jnp.cumprod(1 - shares)
    return jnp.append(shares, last) * jnp.append(jnp.ones(1), left)


def placed(x):
    """A lower triangular matrix with x in it, the last two on its diagonal."""
    return jnp.zeros((2, 2)).at[jnp.array([1, 0, 1]), jnp.array([0, 0, 1])].add(x)


def lower(x):
    """One whose diagonal is positive."""
    return placed(jnp.array([1.0, 0, 0]) * x + jnp.array([0, 1.0, 1.0]) * jnp.exp(x))


def full(x):
    """A positive diagonal alone does not make a Cholesky factor."""
    return lower(x) + jnp.array([[0, 1.0], [0, 0]]) * x[0]


def smallest(matrix):
    return jnp.linalg.eigh(matrix)[0][0]


def excess(root):
    """The first entry of the Cholesky factor of `root rootᵀ`, beyond root's own: 0 for a factor."""
    return jnp.linalg.cholesky(root @ root.T)[0, 0] - root[0, 0]


HOLDS = {
    "shares": lambda x: jnp.abs(stick_breaking(x, 1.0).sum() - 1) < 1e-6,
    "a product of shares": lambda x: jnp.cumprod(jax.nn.sigmoid(x)) < 1.001,
    "an entry that is put once": lambda x: placed(jax.nn.sigmoid(x)) >= 0,
    "every entry": lambda x: jnp.stack([jnp.exp(x[0]), 1 + x[1] ** 2]) > 0,
    "bounds after algebra": lambda x: x + jnp.exp(x) - x > 0,
    "a product of a factor": lambda x: smallest(lower(x) @ lower(x).T) > 0,
    "the factor of a product": lambda x: excess(lower(x)) < 0.5,
    "far apart": lambda x: ~jnp.isclose(jnp.tanh(x), jnp.tanh(x) + 1),
}
# Each is false somewhere, and would be taken to hold if a rule did not ask for what it needs.
BREAKS = {
    "shares of less": lambda x: jnp.abs(stick_breaking(x, 0.9).sum() - 1) < 0.05,
    "shares of shares": lambda x: stick_breaking(x, jax.nn.sigmoid(x[0])).sum() > 0.9,
    "a product of factors above 1": lambda x: jnp.cumprod(1 + jnp.exp(x)) < 9,
    "a product of factors below 0": lambda x: jnp.cumprod(jnp.tanh(x)) >= 0,
    "two entries at one place": lambda x: (
        jnp.zeros(2).at[jnp.array([0, 0, 1])].add(jax.nn.sigmoid(x)) < 1.001
    ),
    "the sum of what is put": lambda x: placed(jnp.exp(x)).sum() > 1,
    "an entry somewhere": lambda x: (
        jnp.zeros(3).at[jnp.argsort(x)[:2]].add(jnp.array([1.0, 2.0])) < x
    ),
    "beside the first": lambda x: x[jnp.array([1])] > 0,
    "padded": lambda x: jnp.pad(jnp.exp(x), 1, constant_values=-1.0).sum() > 0,
    "one entry of two": lambda x: jnp.stack([jnp.exp(x[0]), x[1]]) > 0,
    "the other entry of two": lambda x: jnp.stack([x[1], jnp.exp(x[0])]) > 0,
    "bounds that meet": lambda x: x + jnp.exp(x) - x > 0.5,
    "a diagonal that is not positive": lambda x: excess(placed(x)) < 0.5,
    "a diagonal alone": lambda x: excess(full(x)) < 0.5,
    "a product with itself": lambda x: smallest(lower(x) @ lower(x)) > 0,
    "a product that is shifted": lambda x: smallest(lower(x) @ lower(x).T - 0.1 * jnp.eye(2)) > 0,
    "close where both are large": lambda x: ~jnp.isclose(x, x + 1),
    "one branch or another": lambda x: (
        lax.switch(jnp.argmax(x), [lambda: x[0], lambda: x[1], lambda: 2 * x[0]]) > 0
    ),
}


@pytest.mark.parametrize("name", HOLDS)
def test_what_always_holds_is_not_a_step(name):
    assert not steps(HOLDS[name])


@pytest.mark.parametrize("name", BREAKS)
def test_what_holds_somewhere_is_a_step(name):
    assert steps(BREAKS[name])


@pytest.mark.parametrize("name", BREAKS)
def test_every_one_breaks_somewhere(name):
    """Or the refusal would be of a continuous function."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4000, 3)) * 3, jnp.float32)
    x = jnp.concatenate([x, 1e5 * x])
    held = jax.vmap(lambda x: jnp.all(BREAKS[name](x)))(x)
    assert 0 < held.mean() < 1


def test_interval_censored_data_become_points_where_their_bounds_are_close():
    """NumPyro then takes the density for the probability: where x and x + 1 are large enough, a
    jump, which the same bounds between −1 and 2 never reach.
    """
    censored = lambda t: dist.IntervalCensoredDistribution(dist.Normal(t, 1.0), 0, 0)
    ends = lambda x: jnp.stack([x, x + 1.0])
    assert moving_jumps(lambda t, x: censored(t).log_prob(ends(x)), THETA, 0.3, x_moves=True)
    bounded = lambda t, x: censored(t).log_prob(ends(jnp.tanh(x)))
    assert not moving_jumps(bounded, THETA, 0.3, x_moves=True)


HIDDEN = {
    "a logarithm of theta": lambda t, x: jnp.where(jnp.isfinite(jnp.log(t)), 0.0, 1.0 * (x < t)),
    "a root of theta": lambda t, x: jnp.where(jnp.isnan(jnp.sqrt(t)), 1.0 * (x < t), 0.0),
    "a quotient by theta": lambda t, x: jnp.where(jnp.isfinite(x / t), 0.0, 1.0 * (x < t)),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_a_jump_is_not_hidden_where_theta_has_no_logarithm(name):
    """Values computed from theta alone need not be finite, so neither case may be left out."""
    number = jax.ShapeDtypeStruct((), float)
    assert moving_jumps(HIDDEN[name], number, number)
